"""The real controller and two worker loops in threads: a whole run, messages lost and nodes taken too."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.controller_answers import learner_answer
from worker_world import RECIPES, SLOT_OF, Body, Kept, MemoryHome, SeededLoader, fill, loop, mark_of

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.rollout.serialization import pack_condition, unpack_sample
from spotlight.rollout.state import FinishedRollout
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.plan import ClusterPlan, Plan
from spotlight.scheduler.types import Node, NodeId, NodeKind, Rollout, RolloutId, WorkerId
from spotlight.worker.interfaces import Command, HeadLostError, Leave, Patience
from spotlight.worker.loop import WorkerLoop
from spotlight.worker.reports import Report, RolloutSpeed
from spotlight_rewards.base.prompts import Prompt, PromptId

TRAIN = [
    Prompt(PromptId(f"train{n}"), text, {}) for n, text in enumerate(("one red circle", "two blue squares"))
]
TEST = [Prompt(PromptId("test0"), "one yellow triangle", {})]
LIMIT_S = 60.0
SPOT = Node(NodeId("spot"), NodeKind.SPOT, 2, "cpu", 0.3, False, True)
FROM_WORKERS = (
    ev.WeightsPulled,
    ev.GroupFormed,
    ev.GroupStopped,
    ev.GroupPulled,
    ev.LeaseProgressed,
    ev.LeaseCompleted,
)


@dataclass
class Line:
    """A worker's connection to home, which can be cut: then the worker is dead to all."""

    home: MemoryHome
    events: queue.SimpleQueue[ev.Event]
    cut: bool = False

    def deliver(self, reports: Iterable[Report]) -> None:
        for report in reports:
            if self.cut:
                raise HeadLostError("cut off")
            self.home.deliver([report])
            for event in report.events:
                if not isinstance(event, RolloutSpeed):
                    self.events.put(event)

    def fetch(self, kind: str, names: Sequence[str], mark: str = "") -> list[Kept | None]:
        if self.cut:
            raise HeadLostError("cut off")
        return self.home.fetch(kind, names, mark)


@dataclass
class Process:
    loop: WorkerLoop
    loader: SeededLoader
    line: Line
    thread: threading.Thread


@dataclass
class Head:
    """A driver: carries out the controller's effects, and loses messages if it is told to."""

    controller: Controller
    bodies: dict[str, Body]
    home: MemoryHome
    losing: float
    draw: random.Random
    events: queue.SimpleQueue[ev.Event] = field(default_factory=queue.SimpleQueue)
    processes: dict[WorkerId, Process] = field(default_factory=dict)
    issued: dict[RolloutId, Rollout] = field(default_factory=dict)
    scored: Counter[RolloutId] = field(default_factory=Counter)
    finish: ef.FinishRun | None = None
    began_s: float = field(default_factory=time.monotonic)
    ended: list[Process] = field(default_factory=list)
    taken_s: float = math.inf
    spot: Node = SPOT

    def run(self, mischief: dict[int, ev.Event | None]) -> None:
        """``mischief``: what happens once so many rollouts are scored."""
        self.feed(ev.RunStarted())
        self.feed(ev.NodeJoined(Node(NodeId("home"), NodeKind.RESERVED, 1, "cpu", 1.0, True, False)))
        self.feed(ev.NodeJoined(self.spot))
        while self.finish is None:
            assert time.monotonic() - self.began_s < LIMIT_S, f"stuck: {self.controller.stage}"
            wake_s = self.controller.wake_s
            try:
                patience_s = 0.5 if wake_s is None else max(0.001, wake_s - self.now)
                event = self.events.get(timeout=min(patience_s, 0.5))
            except queue.Empty:
                event = ev.TimePassed()
            for _ in range(self.copies(event)):
                self.feed(event)
            if self.now >= self.taken_s:
                self.taken_s = math.inf
                self.inject(ev.NodeLost(SPOT.id))
            for due in [count for count in mischief if len(self.scored) >= count]:
                if (fault := mischief.pop(due)) is not None:
                    self.inject(fault)
        for process in self.processes.values():
            process.loop.commands.put(Leave())
        for process in [*self.processes.values(), *self.ended]:
            process.thread.join(20)
            assert not process.thread.is_alive()
            assert process.loop.failure is None or process.line.cut, process.loop.failure

    @property
    def now(self) -> float:
        return time.monotonic() - self.began_s

    def copies(self, event: ev.Event) -> int:
        """Messages of workers may be lost or doubled."""
        if not isinstance(event, FROM_WORKERS):
            return 1
        return (self.draw.random() >= self.losing) + (self.draw.random() < self.losing)

    def inject(self, event: ev.Event) -> None:
        if isinstance(event, ev.NodeLost):
            for worker in list(self.processes):
                self.kill(worker)
            self.feed(event)
            self.feed(ev.NodeJoined(SPOT))
        elif isinstance(event, ev.WorkerCrashed):
            process = self.processes[event.worker]
            self.kill(event.worker)
            self.feed(ev.WorkerCrashed(event.worker, process.loop.epoch))
        else:
            self.feed(event)
            self.taken_s = self.now + 0.3

    def kill(self, worker: WorkerId) -> None:
        process = self.processes.pop(worker)
        process.line.cut = True
        process.loop.commands.put(Leave())
        process.thread.join(20)  # its body is used again
        self.ended.append(process)

    def feed(self, event: ev.Event) -> None:
        effects = self.controller.handle(event, self.now)
        self.controller.check()
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: ef.Effect) -> None:
        put = self.events.put
        match effect:
            case ef.StartWorker(worker, _, _, epoch):
                self.start(worker, epoch)
            case ef.PullWeights(worker):
                self.tell(worker, effect)
            case ef.FormGroup() | ef.StopGroup():
                for member in effect.members:
                    self.tell(member, effect)
            case ef.GrantLease(lease, rollouts):
                self.issued |= {one.id: one for one in rollouts}
                self.tell(lease.worker, effect)
            case ef.AbandonLease(leader):
                self.tell(leader, effect)
            case ef.ScoreSamples(rollouts, lineage):
                for one in rollouts:
                    assert ("image", one.id, mark_of(one.version)) in self.home.values
                self.scored.update(one.id for one in rollouts)
                put(ev.SamplesRewarded({one.id: {"reward": one.seed % 7 / 7} for one in rollouts}, lineage))
            case ef.FinishRun():
                self.finish = effect
            case _:
                if answer := learner_answer(effect):
                    put(answer)

    def start(self, worker: WorkerId, epoch: int) -> None:
        if worker in self.processes and self.processes[worker].loop.epoch == epoch:
            self.events.put(ev.WorkerStarted(worker, epoch))
            return
        if worker in self.processes:
            self.kill(worker)
        line = Line(self.home, self.events)
        patience = Patience(ask_again_s=0.1, grace_s=0.3, pause_s=0.02)
        worker_loop, loader = loop(
            self.bodies[worker[-1]], line, worker, epoch=epoch, commit_every=2, capacity=3, patience=patience
        )
        thread = threading.Thread(target=self.live, args=(worker_loop,), daemon=True)
        self.processes[worker] = Process(worker_loop, loader, line, thread)
        thread.start()
        self.events.put(ev.WorkerStarted(worker, epoch))

    @staticmethod
    def live(worker_loop: WorkerLoop) -> None:
        try:
            worker_loop.run()
        except HeadLostError:
            return

    def tell(self, worker: WorkerId, command: Command) -> None:
        process = self.processes.get(worker)
        if process is None or self.draw.random() < self.losing:
            return
        process.loop.commands.put(command)
        if self.draw.random() < self.losing:
            process.loop.commands.put(command)


PLAN = Plan(
    run_seed=3,
    iterations=2,
    prompts_per_iteration=2,
    group_size=4,
    rollout_steps=6,
    evaluation=EvaluationConfig(steps=4, images_per_prompt=2, every=1),
    updates_per_batch=1,
    micro_batch_size=2,
    checkpoint_every=1,
    lease_s=5.0,
    max_drop_share=None,
    cluster=ClusterPlan(answer_s=0.5, start_s=5.0, drain_margin_s=0.0),
)


@pytest.fixture(scope="module")
def bodies(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Body]:
    cache = tmp_path_factory.mktemp("embeds")
    return {name: Body.build(random_pipeline, cache) for name in ("0", "1")}


CASES: dict[str, tuple[float, dict[int, ev.Event | None]]] = {
    "calm": (0.0, {}),
    "lost messages": (0.1, {}),
    "lost workers": (
        0.0,
        {
            3: ev.WorkerCrashed(WorkerId("spot/1"), 0),
            8: ev.NodeNoticed(NodeId("spot"), 0.0),
            14: ev.NodeLost(NodeId("spot")),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_under_the_real_controller(bodies: dict[str, Body], case: str) -> None:
    losing, mischief = CASES[case]
    home = MemoryHome()
    prompts = [*TRAIN, *TEST]
    for prompt, condition in zip(
        prompts, bodies["0"].family.encode([prompt.text for prompt in prompts]), strict=True
    ):
        home.put("condition", prompt.id, pack_condition(condition))
    head = Head(Controller(PLAN, TRAIN, TEST), bodies, home, losing, random.Random(1))
    head.run({**mischief})
    assert head.finish == ef.FinishRun(None)
    assert len(head.scored) == 2 * 8 + 3 * 2
    assert set(head.scored.values()) == {1}
    head.controller.ledger.check()
    recoveries = head.controller.cluster.recoveries
    if case == "calm":
        # A grant on its way when room for more was pulled for.
        assert set(recoveries) <= {Recovery.GRANT_RESENT}
    if case == "lost workers":
        assert {Recovery.WORKER_CRASHED, Recovery.NODE_LOST} <= set(recoveries)
    # Each is what its one policy version makes.
    for one in random.Random(2).sample(sorted(head.issued.values(), key=lambda r: r.id), 4):
        assert_made_by_its_version(bodies["0"], home, one)


STEP_S, LEASE_S = 200.0, 120.0


class StepClock(queue.SimpleQueue[ev.Event]):
    """Events, and the time as if only denoising took any, ``STEP_S`` each step."""

    def __init__(self, body: Body) -> None:
        self.body, self.now = body, 0.0
        self.stamps: queue.SimpleQueue[float] = queue.SimpleQueue()

    def put(self, item: ev.Event, block: bool = True, timeout: float | None = None) -> None:
        with LOCK:
            self.stamps.put(STEP_S * self.body.steps)
            super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> ev.Event:
        event = super().get(block, timeout)
        self.now = max(self.now, self.stamps.get())
        return event


LOCK = threading.Lock()


class SlowHead(Head):
    @property
    def now(self) -> float:
        assert isinstance(self.events, StepClock)
        return self.events.now


def test_steps_longer_than_a_lease_lose_no_work(bodies: dict[str, Body]) -> None:
    home, body = MemoryHome(), bodies["0"]
    texts = [prompt.text for prompt in (*TRAIN, *TEST)]
    for prompt, condition in zip([*TRAIN, *TEST], body.family.encode(texts), strict=True):
        home.put("condition", prompt.id, pack_condition(condition))
    patience = ClusterPlan(answer_s=30.0, start_s=3 * STEP_S, drain_margin_s=0.0)
    plan = replace(PLAN, iterations=1, lease_s=LEASE_S, cluster=patience)
    body.steps = 0
    controller = Controller(plan, TRAIN, TEST)
    head = SlowHead(
        controller, bodies, home, 0.0, random.Random(1), StepClock(body), spot=replace(SPOT, gpus=1)
    )
    head.run({})
    assert head.finish == ef.FinishRun(None)
    assert head.now > 2 * plan.rollout_steps * STEP_S
    assert set(controller.cluster.recoveries) <= {Recovery.GRANT_RESENT}


def assert_made_by_its_version(body: Body, home: MemoryHome, one: Rollout) -> None:
    fill(body.slots, int(one.version))
    text = {prompt.id: prompt.text for prompt in (*TRAIN, *TEST)}[one.prompt_id]
    with body.slots.use(SLOT_OF[one.purpose], merged=True) as model:
        states = body.engine.start([one], body.family.encode([text]), RECIPES[one.purpose])
        (result,) = body.engine.run(model, states)
    made = unpack_sample(home.values["sample", one.id, mark_of(one.version)].data).final
    assert isinstance(result, FinishedRollout)
    assert (made - result.tensors.final).abs().max() <= 2e-5
