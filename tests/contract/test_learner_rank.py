"""A learner rank computes what the inline driver's trainer does: alone to the bit, two within rounding."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from learner_job import (
    Batch,
    Blobs,
    alone,
    config_of,
    inline_learning,
    make_batch,
    prompts_of,
    rank_of,
    train_rank,
)

from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.learner.learner_rank import NEGATIVE, RankPlace
from spotlight.cluster.learner.rank_folder import write_token
from spotlight.cluster.workers.worker_weights import BundleLoader
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight.rollout.serialization import unpack_condition
from spotlight.runtime.assembly.learner_parts import Learning, rollout_slots
from spotlight.scheduler.effects import PullWeights
from spotlight.scheduler.types import PolicyVersion, WeightKind, WorkerId
from spotlight.store.run_directory import RunPaths
from spotlight.training.learner import TrainingError
from spotlight.worker.interfaces import LoadError
from spotlight.worker.reports import Report
from spotlight_rewards.base.errors import ConfigError
from spotlight_weights.bundle import WeightsManifest, bind, pack, read
from spotlight_weights.flat import digest_of
from spotlight_weights.node_cache import NodeCache
from spotlight_weights.weight_errors import WeightsError

WEIGHT_TOLERANCE = 2e-6
"""Largest difference of a weight between one rank and two, after two steps at learning rate 1e-3."""

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def train_inline(learning: Learning, batch: Batch) -> tuple[float, float]:
    learning.feed.prepare(batch.effect, batch.rollouts, batch.tensors)
    for micro_batch in batch.effect.micro_batches:
        learning.learner.accumulate(micro_batch.rollouts, micro_batch.update_samples)
    report = learning.learner.step(len(batch.rollouts))
    learning.learner.finish_batch()
    return report.sums.loss, report.grad_norm


def without_seconds(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.endswith("_s")}


@pytest.mark.parametrize("algorithm", ["nft", pytest.param("grpo", marks=pytest.mark.slow), "full"])
def test_one_rank_equals_the_inline_trainer_to_the_bit(
    random_pipeline: Path, tmp_path: Path, algorithm: str
) -> None:
    config = config_of(tmp_path, random_pipeline, algorithm)
    learning, rank = inline_learning(config), alone(config)
    start = rank.digest()
    assert start == learning.learner.digest()
    for iteration in range(2):
        batch = make_batch(config, learning, iteration, iteration)
        assert train_rank(rank, batch, batch.packed) == train_inline(learning, batch)
        assert without_seconds(rank.take_log()) == without_seconds(learning.learner.log.take())
        assert rank.digest() == learning.learner.digest() != start

    packed = rank.packed(2, 5)
    assert packed is not None
    bundle = read(*packed)
    assert (bundle.manifest.version, bundle.manifest.lineage) == (2, 5)
    assert bundle.manifest.modules_bound == learning.slots.modules_bound > 0
    assert set(bundle.tensors) == {"old", "policy"} if algorithm != "grpo" else {"policy"}
    for slot, tensors in bundle.tensors.items():
        expected = learning.slots.state(slot)  # type: ignore[arg-type]
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    with pytest.raises(RuntimeError, match="version 3 is to be published, but the learner has made 2"):
        rank.packed(3, 0)

    rank.save(tmp_path / "state")
    again = alone(config)
    again.load(tmp_path / "state")
    assert again.digest() == rank.digest()
    prompts = [batch.effect.groups[1].prompt_id, batch.effect.groups[0].prompt_id]
    again.send_conditions(prompts)
    assert isinstance(again.store, Blobs)
    sent = {name: unpack_condition(data)["embeds"] for (_, name), data in again.store.kept.items()}
    conditions = [sent[prompt] for prompt in prompts]
    assert all(map(torch.equal, conditions, (each["embeds"] for each in learning.conditions.of(prompts))))
    assert torch.equal(sent[NEGATIVE], learning.negative["embeds"])
    assert again.packed(None, 0) is not None


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        ("bfloat16", "bfloat16"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", "none", marks=pytest.mark.slow),
    ],
)
def test_adapters_rounded_for_workers_change_no_rollout_that_computes_in_bfloat16(
    random_pipeline: Path, tmp_path: Path, dtype: str, autocast: str
) -> None:
    """To the bit; in float32 they do, and are refused."""
    config = config_of(tmp_path, random_pipeline, "nft")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    learner = config.learner.model_copy(update={"autocast": autocast})
    config = config.model_copy(update={"learner": learner})
    rank, worker = alone(config), alone(config).learning
    batch = make_batch(config, rank.learning, 0, 0)
    train_rank(rank, batch, batch.packed)
    published = rank.packed(1, 0)
    assert published is not None
    states = {slot: rank.learning.slots.state(slot) for slot in ("old", "policy")}  # type: ignore[arg-type]
    whole, data = pack(1, 0, states, rank.learning.slots.modules_bound)
    rounded = pack(
        1,
        0,
        {slot: {name: tensor.bfloat16() for name, tensor in state.items()} for slot, state in states.items()},
        rank.learning.slots.modules_bound,
    )
    assert published == (rounded if autocast == "bfloat16" else (whole, data))
    assert rounded[0].bytes < 0.65 * whole.bytes
    with pytest.raises(WeightsError, match=r"bfloat16, expected .* float32.* fleet\.publish"):
        bind(read(*rounded), worker.slots)
    bind(read(*rounded), worker.slots, needs=("old", "policy"), dtype=torch.bfloat16)
    trained, rolled = (make_batch(config, learning, 1, 1) for learning in (rank.learning, worker))
    alike = [
        torch.equal(sample.tensors.final, rolled.finished[name].tensors.final)
        for name, sample in trained.finished.items()
    ]
    assert set(alike) == {autocast == "bfloat16"}


class Home:
    """The blob store of one version."""

    def __init__(self, manifest: WeightsManifest, data: bytes) -> None:
        self.kept = {"manifest": manifest.to_json().encode(), "weights": data}

    def fetch(self, kind: str, names: Sequence[str], weights_digest: str = "") -> list[StoredBlob]:
        return [StoredBlob(0, self.kept[kind])]

    def deliver(self, reports: Iterable[Report]) -> None:
        raise NotImplementedError


def test_evaluated_weights_are_sent_where_they_are_evaluated_and_older_ones_cannot_be(
    random_pipeline: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, random_pipeline, "nft")
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 2})})
    rank, worker = alone(config), alone(config).learning
    used = rollout_slots(config, worker.model.algorithm)
    assert used == ("old", "policy")
    with NodeCache("evaluated", parent=tmp_path) as cache:
        for version in range(4):
            if version:
                batch = make_batch(config, rank.learning, version - 1, version - 1)
                train_rank(rank, batch, batch.packed)
            due = version in (0, 2)
            manifest, data = rank.packed(version, 0) or pytest.fail("rank 0 publishes")
            assert manifest.slots == (used if due else ("old",))
            loader = BundleLoader(Home(manifest, data), cache, worker.slots, used)
            worker_id = WorkerId("w")
            loader.load(PullWeights(worker_id, 1, PolicyVersion(version), 0, WeightKind.ADAPTER, None))
            for slot in used:
                found, right = worker.slots.state(slot), rank.learning.slots.state(slot)
                same = all(torch.equal(found[name], tensor) for name, tensor in right.items())
                assert same is (due or slot == "old")
                assert all(bool(tensor.isfinite().all()) for tensor in found.values()) is same
    again = alone(config)
    rank.save(tmp_path / "state")
    again.load(tmp_path / "state")
    assert again.packed(None, 0) == rank.packed(3, 0), "what was begun with these weights goes on"
    evaluated = make_batch(config, worker, 3, 3, slot="policy")
    assert not evaluated.finished, "without the weights no evaluation looks right"
    assert make_batch(config, worker, 3, 3).finished


def test_a_version_trained_beside_another_quantised_base_is_not_loaded(
    random_pipeline: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, random_pipeline, "nft")
    config = config.model_copy(update={"model": config.model.model_copy(update={"quantize": "nf4"})})
    rank, worker = alone(config), alone(config).learning
    used, base = rollout_slots(config, worker.model.algorithm), digest_of(worker.slots.packed())
    manifest, data = rank.packed(0, 0) or pytest.fail("rank 0 publishes")
    assert manifest.base == base, "equal files are held equally"
    pull = PullWeights(WorkerId("w"), 1, PolicyVersion(0), 0, WeightKind.ADAPTER, None)
    with NodeCache("beside", parent=tmp_path) as cache:
        BundleLoader(Home(manifest, data), cache, worker.slots, used, None, base).load(pull)
        for other in ("", "another"):
            loader = BundleLoader(Home(manifest, data), cache, worker.slots, used, None, other)
            with pytest.raises(LoadError, match="trained beside a quantised base of digest"):
                loader.load(pull)


ALGORITHMS = ("nft", "grpo")


def one_of_two(number: int, root: Path, pipeline: Path, ports: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    for algorithm, port in zip(ALGORITHMS, ports, strict=True):
        config = config_of(root, pipeline, algorithm, algorithm)
        rank = rank_of(config, RankPlace(number, 2))
        address = rank.open_rendezvous("127.0.0.1", port) if number == 0 else Address("127.0.0.1", port)
        rank.join(address)
        rank.load_model(prompts_of(config))
        rank.build()
        batches = torch.load(root / f"{algorithm}-batches.pt", weights_only=False)
        figures = [train_rank(rank, batch, batch.packed) for batch in batches]
        digest, packed = rank.digest(), rank.packed(2, 0)
        rank.save(root / f"{algorithm}-state")
        exported = rank.export()
        assert (packed is None) == (exported is None) == (number > 0)
        if packed is not None:
            torch.save((figures, digest, packed), root / f"{algorithm}-two.pt")
        rank.close()


@pytest.mark.slow  # the learner's own tests compare ranks, and test_learner_rank_parts does it through actors
def test_two_ranks_equal_one(random_pipeline: Path, tmp_path: Path) -> None:
    ranks, figures = {}, {}
    for algorithm in ALGORITHMS:
        config = config_of(tmp_path, random_pipeline, algorithm, algorithm)
        RunPaths(config.runs_dir / config.name).path.mkdir()
        write_token(config, "the token")
        rank = ranks[algorithm] = alone(config)
        batches = [make_batch(config, rank.learning, iteration, iteration) for iteration in range(2)]
        figures[algorithm] = [train_rank(rank, batch, batch.packed) for batch in batches]
        torch.save(batches, tmp_path / f"{algorithm}-batches.pt")
    arguments = (tmp_path, random_pipeline, free_ports(len(ALGORITHMS)))
    mp.start_processes(one_of_two, arguments, nprocs=2, start_method="forkserver")

    for algorithm, rank in ranks.items():
        others, digest, packed = torch.load(tmp_path / f"{algorithm}-two.pt", weights_only=False)
        for mine, theirs in zip(figures[algorithm], others, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-6)
        own = rank.packed(2, 0)
        assert own is not None
        bundle, expected = read(*packed), read(*own)
        assert bundle.manifest.modules_bound == expected.manifest.modules_bound
        for slot, tensors in expected.tensors.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(bundle.tensors[slot][name], tensor, rtol=0, atol=WEIGHT_TOLERANCE)
        assert rank.digest() != digest
        rank.load(tmp_path / f"{algorithm}-state")
        assert rank.digest() == digest


def free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return ports


def test_a_batch_that_ranks_cannot_share_is_refused(random_pipeline: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, random_pipeline, "nft")
    with pytest.raises(ConfigError, match="divisible by the 3 ranks"):
        rank_of(config, RankPlace(0, 3)).config  # noqa: B018


def test_bad_batches_raise_what_they_raise_inline(random_pipeline: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, random_pipeline, "nft")
    rank = alone(config)
    with pytest.raises(RuntimeError, match="not joined"):
        rank_of(config, RankPlace(0, 1)).ranks  # noqa: B018
    batch = make_batch(config, rank.learning, 0, 0)
    first = next(iter(batch.packed))
    short = {name: data for name, data in batch.packed.items() if name != first}
    with pytest.raises(LookupError, match=f"no sample of rollout {first}"):
        train_rank(rank, batch, short)
    batch.finished[first].tensors.final.fill_(float("nan"))
    with pytest.raises(TrainingError, match="gradient norm"):
        train_rank(rank, batch, batch.packed)
