"""A model that a worker hands to a learner of its process is the one that was loaded, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from learner_job import alone, config_of, inline_learning, make_batch, train_rank

from spotlight.cluster.workers.worker_process import WorkerPlace, WorkerProcess
from spotlight.config.schema import RunConfig
from spotlight.models.family import ModelFamily
from spotlight.models.peft_layers import LoraSpec, eject, inject
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.serialization import pack_condition
from spotlight.runtime.assembly import components as build
from spotlight.scheduler.effects import PullWeights
from spotlight.scheduler.types import PolicyVersion, WeightKind, WorkerId
from spotlight.worker.interfaces import Leave
from spotlight_weights.weight_errors import WeightsError

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


class Stored:
    step = 0

    def __init__(self, data: bytes) -> None:
        self.data = data


class Head:
    """Has the negative prompt; no version is published."""

    def __init__(self, config: RunConfig) -> None:
        self.negative = pack_condition(inline_learning(config).negative)

    def deliver(self, reports: object) -> None:
        """Nobody hears it."""

    def fetch(self, kind: str, names: Sequence[str], weights_digest: str = "") -> list[Stored | None]:
        return [Stored(self.negative) if kind == "condition" else None for _ in names]


def ended_worker(config: RunConfig) -> WorkerProcess:
    """A worker that has loaded the model and left."""
    meeting, run = Address("127.0.0.1", 1), f"test-{id(config)}"
    place = WorkerPlace(WorkerId("n/0"), 1, torch.device("cpu"), meeting, run)
    process = WorkerProcess(config, place, Head(config), lambda config: None)
    process.commands.put(PullWeights(place.worker, 1, PolicyVersion(0), 0, WeightKind.FULL, None))
    process.commands.put(Leave())
    process.run()
    return process


@pytest.mark.parametrize("algorithm", ["nft", "grpo"])
def test_a_learner_on_a_workers_model_equals_one_that_loaded_it(
    random_pipeline: Path, tmp_path: Path, algorithm: str
) -> None:
    config = config_of(tmp_path, random_pipeline, algorithm)
    family, _ = ended_worker(config).hand_over()
    rank = alone(config, family)
    assert rank.learning.model.family is family
    other, learning = alone(config), inline_learning(config)
    assert rank.digest() == other.digest()
    batch = make_batch(config, learning, 0, 0)
    assert train_rank(rank, batch, batch.packed) == train_rank(other, batch, batch.packed)
    assert rank.digest() == other.digest() != learning.learner.digest()


def test_a_base_that_is_not_what_was_loaded_is_refused(random_pipeline: Path, tmp_path: Path) -> None:
    process = ended_worker(config_of(tmp_path, random_pipeline, "nft"))
    assert process._held is not None
    weight = next(process._held[0].transformer.parameters())
    with torch.no_grad():
        weight.view(-1)[0].add_(1e-3)
    with pytest.raises(WeightsError, match="expected"):
        process.hand_over()


def test_a_worker_without_a_base_has_none_to_hand_over(random_pipeline: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, random_pipeline, "full")
    with pytest.raises(WeightsError, match="no base weights"):
        ended_worker(config).hand_over()


def test_ejected_adapters_leave_the_modules_that_were_there(random_pipeline: Path, tmp_path: Path) -> None:
    family: ModelFamily = build.load_family(config_of(tmp_path, random_pipeline, "nft"), torch.device("cpu"))
    before = dict(family.transformer.named_modules())
    inject(family.transformer, LoraSpec(2, 4.0, family.lora_targets), ["policy", "old"])
    assert dict(family.transformer.named_modules()).keys() != before.keys()
    eject(family.transformer)
    after = dict(family.transformer.named_modules())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    inject(family.transformer, LoraSpec(2, 4.0, family.lora_targets), ["policy"])
