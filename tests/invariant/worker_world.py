"""A home, a loader and hands for worker loops in this process, and the orders a controller gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from spotlight.diffusion.samplers import ODE, FlowSDE
from spotlight.diffusion.schedule import RandomWindow
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots, Slot
from spotlight.rollout.commits import Committer, latents_of, restore
from spotlight.rollout.engine import Engine
from spotlight.rollout.sequence_parallel.lockstep import LockstepOrder
from spotlight.rollout.sequence_parallel.membership import GroupLostError, SpMembership
from spotlight.rollout.serialization import pack_condition, unpack_condition
from spotlight.rollout.state import Recipe, RolloutState
from spotlight.scheduler.effects import FormGroup, GrantLease, PullWeights
from spotlight.scheduler.events import Event, LeaseProgressed
from spotlight.scheduler.types import (
    Lease,
    LeaseId,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
    WeightKind,
    WorkerId,
)
from spotlight.worker.interfaces import HeadClient, HeadLostError, LoadError, Patience, WorkerDependencies
from spotlight.worker.loop import WorkerLoop
from spotlight.worker.reports import Report, RolloutSpeed, address
from spotlight_rewards.base.prompts import PromptId

SIZE = MediaSize(16, 16)
PROMPTS = ("one red circle", "two blue squares", "two blue squares left of one yellow triangle, all on white")
TRAIN = Recipe(SIZE, FlowSDE(0.7), RandomWindow(2), 1.0, "trajectory")
RECIPES = {
    Purpose.TRAIN: TRAIN,
    Purpose.EXPLORE: TRAIN,
    Purpose.EVAL: Recipe(SIZE, ODE(), None, 1.0, "final"),
}
SLOT_OF: dict[Purpose, Slot] = {Purpose.TRAIN: "policy", Purpose.EXPLORE: "policy", Purpose.EVAL: "old"}
EPOCH = 7
WAITS = Patience(ask_again_s=30.0, grace_s=0.1, pause_s=0.0)
E = TypeVar("E")


@dataclass(frozen=True)
class Kept:
    step: int
    data: bytes


@dataclass
class MemoryHome:
    """Values by (kind, name, mark), and every event in the order it came."""

    values: dict[tuple[str, str, str], Kept] = field(default_factory=dict, repr=False)
    events: list[Event] = field(default_factory=list)
    speeds: list[RolloutSpeed] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list, repr=False)
    lost: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def deliver(self, reports: Iterable[Report]) -> None:
        if self.lost:
            raise HeadLostError("the home is gone")
        for report in reports:
            self._take(report)

    def _take(self, report: Report) -> None:
        with self._changed:
            for value in report.values:
                key = (value.kind, value.name, address(report.weights_digest, value.suffix))
                if key not in self.values or self.values[key].step < value.step:
                    self.values[key] = Kept(value.step, value.data)
            self.reports.append(report)
            for event in report.events:
                if isinstance(event, RolloutSpeed):
                    self.speeds.append(event)
                else:
                    self.events.append(event)
            self._changed.notify_all()

    def fetch(self, kind: str, names: Sequence[str], mark: str = "") -> list[Kept | None]:
        with self._changed:
            return [self.values.get((kind, name, mark)) for name in names]

    def put(self, kind: str, name: str, data: bytes, mark: str = "", step: int = 0) -> None:
        self.values[kind, name, mark] = Kept(step, data)

    def of(self, kind: type[E]) -> list[E]:
        with self._changed:
            return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[E], count: int = 1, timeout_s: float = 60.0) -> list[E]:
        with self._changed:
            found = self._changed.wait_for(
                lambda: sum(isinstance(event, kind) for event in self.events) >= count, timeout_s
            )
        assert found, f"no {count} of {kind.__name__} came; there are {self.events}"
        return self.of(kind)

    def clear(self) -> None:
        with self._changed:
            self.events.clear()
            self.speeds.clear()
            self.reports.clear()

    def sample(self, name: str, mark: str) -> dict[str, Tensor]:
        return safetensors.torch.load(self.values["sample", name, mark].data)

    def step_of(self, name: str, mark: str) -> int | None:
        kept = self.values.get(("progress", name, mark))
        return kept and kept.step


@dataclass
class SeededLoader:
    """Weights made up from the version; fails as often as it is told to."""

    slots: LoraSlots
    pulls: list[PullWeights] = field(default_factory=list)
    failures: list[LoadError] = field(default_factory=list)
    same_digest: bool = False

    def load(self, pull: PullWeights) -> str:
        self.pulls.append(pull)
        if self.failures:
            raise self.failures.pop()
        version = 0 if self.same_digest else int(pull.version)
        fill(self.slots, version)
        return mark_of(version)


def mark_of(version: int) -> str:
    return f"digest-{version}"


def fill(slots: LoraSlots, version: int) -> None:
    """Adapters that make a difference, by version and slot."""
    for slot in ("policy", "old"):
        generator = torch.Generator().manual_seed(1000 * version + len(slot))
        state = {n: 0.05 * torch.randn(t.shape, generator=generator) for n, t in slots.state(slot).items()}
        slots.load_state(slot, state)


def load_family(pipeline: Path, cache: Path) -> QwenImage:
    return QwenImage.load(pipeline, device="cpu", dtype=torch.float32, embeddings_cache=cache)


def no_membership() -> SpMembership:
    raise AssertionError("a worker alone asked for a membership")


@dataclass
class Body:
    """A model with its slots and engine: what one worker process has."""

    family: QwenImage
    slots: LoraSlots
    engine: Engine
    steps: int = 0

    def __post_init__(self) -> None:
        step = self.engine.step

        def counted(model: nn.Module, states: Sequence[RolloutState], *how: Any) -> list[RolloutState]:
            self.steps += 1
            return step(model, states, *how)

        self.engine.step = counted  # type: ignore[method-assign]

    @classmethod
    def build(cls, pipeline: Path, cache: Path, max_batch: int = 8) -> Body:
        family = load_family(pipeline, cache)
        slots = LoraSlots(
            family.transformer,
            LoraSpec(rank=4, alpha=4, targets=family.lora_targets, seed=0),
            ["old"],
        )
        return cls(family, slots, Engine(family, max_batch=max_batch))

    def dependencies(self, membership: Callable[[], SpMembership] = no_membership) -> WorkerDependencies:
        return WorkerDependencies(self.engine, self.slots, RECIPES, SLOT_OF, membership)


def home_with_prompts(family: QwenImage) -> MemoryHome:
    home = MemoryHome()
    for i, condition in enumerate(family.encode(PROMPTS)):
        home.put("condition", f"p{i}", pack_condition(condition))
    return home


def resumed(home: MemoryHome, one: Rollout) -> RolloutState:
    """The state that is stored of a rollout."""
    data = home.values["progress", one.id, mark_of(0)].data
    latents = [home.values["latent", one.id, f"{mark_of(0)}/{name}"].data for name in latents_of(data)]
    condition = unpack_condition(home.values["condition", one.prompt_id, ""].data)
    return restore(data, latents, condition, TRAIN)


def committed(state: RolloutState, home: MemoryHome) -> bytes:
    """Its latents go to the store, too."""
    *latents, last = Committer().begin([state])
    for one in latents:
        home.put("latent", one.rollout, one.data, f"{mark_of(0)}/{one.latent}", one.step)
    return last.data


def loop(
    body: Body,
    home: HeadClient,
    name: str = "w0",
    *,
    epoch: int = EPOCH,
    commit_every: int = 1,
    capacity: int | None = None,
    patience: Patience = WAITS,
) -> tuple[WorkerLoop, SeededLoader]:
    loader = SeededLoader(body.slots)
    worker = WorkerLoop(
        WorkerId(name),
        epoch,
        home,
        loader,
        body.dependencies(),
        commit_every,
        capacity=capacity,
        patience=patience,
    )
    return worker, loader


def rollout(seed: int, steps: int = 5, purpose: Purpose = Purpose.TRAIN, version: int = 0) -> Rollout:
    name = RolloutId(f"{purpose.value}-{seed}-{steps}")
    prompt = PromptId(f"p{seed % len(PROMPTS)}")
    return Rollout(name, purpose, 3, prompt, seed, seed, steps, PolicyVersion(version))


def pull(version: int = 0, lineage: int = 0, epoch: int = EPOCH, name: str = "w0") -> PullWeights:
    return PullWeights(WorkerId(name), epoch, PolicyVersion(version), lineage, WeightKind.ADAPTER, None)


def form(epoch: int = 1, *members: str) -> FormGroup:
    names = tuple(WorkerId(name) for name in members or ("w0",))
    return FormGroup(names[0], epoch, names)


def grant(
    lease: int, rollouts: Sequence[Rollout], epoch: int = 1, leader: str = "w0", **resume: int
) -> GrantLease:
    ids = tuple(one.id for one in rollouts)
    steps = {RolloutId(name.replace("_", "-")): step for name, step in resume.items()}
    return GrantLease(Lease(LeaseId(lease), WorkerId(leader), epoch, ids, 1e9), tuple(rollouts), steps)


def resume_of(rollouts: Sequence[Rollout], step: int) -> dict[str, int]:
    return {one.id.replace("-", "_"): step for one in rollouts}


def ready(worker: WorkerLoop, home: MemoryHome, version: int = 0) -> None:
    """Give it weights and a group of its own."""
    worker.commands.put(pull(version))
    worker.commands.put(form())
    worker.turn()
    home.clear()


def turns(worker: WorkerLoop, count: int) -> None:
    for _ in range(count):
        worker.turn()


def work_off(worker: WorkerLoop, limit: int = 200) -> None:
    """Obey the commands, and turn while there is something to do."""
    worker.turn()
    for _ in range(limit):
        if not worker.busy:
            return
        worker.turn()
    raise AssertionError("it never ends")


def reported_steps(home: MemoryHome, lease: int) -> list[int]:
    return [event.steps for event in home.of(LeaseProgressed) if event.lease == lease]


class ToldLate(SpMembership):
    """A follower's, whose exchanges fail at their end, as NCCL's do when a peer is lost."""

    def __init__(self, order: LockstepOrder) -> None:
        self.order = order

    def broadcast(self, data: bytes | None) -> bytes:
        return self.order.to_bytes()

    @contextmanager
    def exchange(self, work: float = 0.0) -> Iterator[None]:
        yield
        raise GroupLostError("a peer was late")
