"""A world for the controller: nodes, rewards and a learner that answer in any order, and observers.

The world is the controller's second opinion. It keeps its own simple account of what was granted, scored,
trained and discarded, and asserts after every event that the controller's effects agree with it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.controller_answers import ClusterCommand, cluster_answer, learner_answer

from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import (
    AbandonLease,
    CommitCheckpoint,
    DiscardSamples,
    Effect,
    FinishBatch,
    FinishRun,
    FormGroup,
    GrantLease,
    PrepareBatch,
    PublishWeights,
    PullWeights,
    ReportEvaluation,
    ScoreSamples,
    StartWorker,
    StepOptimizer,
    StopGroup,
    TrainMicroBatch,
    WriteRecord,
)
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.records import (
    Record,
    RolloutIssued,
    SampleDropped,
    SampleEvaluated,
    SampleExplored,
    SampleFinished,
    SampleScored,
    SampleTrained,
    StepApplied,
)
from spotlight.scheduler.types import (
    DropReason,
    Lease,
    LeaseId,
    MicroBatch,
    Node,
    NodeId,
    NodeKind,
    Phase,
    PolicyVersion,
    Rollout,
    RolloutId,
    WorkerId,
)
from spotlight_rewards.base.prompts import Prompt, PromptId

NODES = [Node(NodeId(name), NodeKind.SPOT, 1, "H100", 3.0, False, True) for name in ("a", "b", "c")]
TRAIN = [Prompt(PromptId(f"train{n}"), f"{n} red circles", {}) for n in range(5)]
TEST = [Prompt(PromptId(f"test{n}"), f"{n} blue squares", {}) for n in range(2)]
PATIENCE = 20_000
"""Events after which a run that has not finished is called stuck."""


def chance(rollout: RolloutId, what: str) -> float:
    """In [0, 1): the fate of a rollout, the same on any worker at any time."""
    return (
        int.from_bytes(hashlib.blake2b(f"{rollout}/{what}".encode(), digest_size=4).digest(), "big") / 2**32
    )


@dataclass
class Account:
    """What the effects and records said so far."""

    position: int = 0
    issued: Counter[RolloutId] = field(default_factory=Counter)
    finished: Counter[RolloutId] = field(default_factory=Counter)
    scored: Counter[RolloutId] = field(default_factory=Counter)
    ended: Counter[RolloutId] = field(default_factory=Counter)
    trained_in: dict[PolicyVersion, int] = field(default_factory=Counter)
    discarded: Counter[RolloutId] = field(default_factory=Counter)
    published: int = 0
    before: int = 0
    early: bool = False
    versions: dict[RolloutId, int] = field(default_factory=dict)
    steps: int = 0
    planned: list[MicroBatch] = field(default_factory=list)
    update: list[RolloutId] = field(default_factory=list)

    def write(self, effect: WriteRecord) -> None:
        assert effect.position == self.position + 1, "records are numbered with a gap"
        self.position = effect.position
        self._count(effect.record)
        counts = [self.issued, self.finished, self.scored, self.ended]
        assert all(count.total() == len(count) for count in counts), f"twice: {effect.record}"

    def _count(self, record: Record) -> None:
        match record:
            case RolloutIssued(rollout):
                assert rollout.version in self.fresh, "a rollout asks for weights not published last"
                self.issued[rollout.id] += 1
                self.versions[rollout.id] = rollout.version
            case SampleFinished(rollout):
                assert rollout in self.issued
                self.finished[rollout] += 1
            case SampleScored(rollout):
                assert rollout in self.finished
                self.scored[rollout] += 1
            case SampleTrained(rollout, version):
                assert rollout in self.scored
                assert self.versions[rollout] in self.fresh, "trained on a sample of older weights"
                self.ended[rollout] += 1
                self.trained_in[version] += 1
            case SampleEvaluated(rollout) | SampleDropped(rollout) | SampleExplored(rollout):
                self.ended[rollout] += 1
            case StepApplied(version):
                assert version == self.steps + 1, "a step number was skipped"
                self.steps = version
                assert record.samples == self.trained_in[version], (
                    "a step counts other samples than entered it"
                )

    @property
    def fresh(self) -> set[int]:
        """Versions that samples may have."""
        return {self.published, self.before if self.early else self.published}

    def needs(self, *rollouts: RolloutId) -> None:
        gone = [rollout for rollout in rollouts if rollout in self.discarded]
        assert not gone, f"{gone} are needed after they were discarded"


class World:
    """Drives a controller to the end of its run.

    Attributes:
        calm: nothing goes wrong, answers come at once and in order, time stands still.
        failing: share of rewards that fail; a quarter of it are rollouts that always fail, or scores of NaN.
    """

    def __init__(self, controller: Controller, seed: int, *, calm: bool, failing: float = 0.0) -> None:
        self.controller, self.plan = controller, controller.plan
        self.random = random.Random(seed)
        self.calm, self.failing = calm, failing
        self.now = 0.0
        self.account = Account(
            controller.ledger.position,
            published=controller.version,
            before=controller.version,
            early=controller.plan.pipeline.next_share > 0,
            steps=controller.version,
        )
        self.effects: list[Effect] = []
        self.checkpoints: list[tuple[int, CommitCheckpoint]] = []
        self.present: set[NodeId] = set()
        self.groups: dict[WorkerId, int] = {}
        self.seen: dict[WorkerId, LeaseId] = {}
        self.holder: dict[RolloutId, LeaseId] = {}
        self.voided: set[LeaseId] = set()
        self.leases: dict[LeaseId, Lease] = {}
        self.tasks: list[tuple[Lease, Rollout]] = []
        self.answers: list[ev.Event] = []
        self.sent: list[ev.Event] = []
        self.stumbled: set[RolloutId] = set()
        self.finish: FinishRun | None = None
        self.trouble = 0 if calm else 150

    def run(self) -> World:
        """Feed events until the run is over: troubles first, and then peace, in which it must end."""
        self.feed(ev.RunStarted())
        for node in NODES[:1] if self.calm else NODES:
            self._join(node)
        for _ in range(PATIENCE):
            if self.finish is not None:
                return self
            self._turn()
        raise AssertionError(f"no progress: the iteration is {self.controller.stage}")

    @property
    def succeeded(self) -> bool:
        """Whether the run went through to its end."""
        assert self.finish is not None
        return self.finish.error is None

    # -- one event -------------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        """Hand one event to the controller and hold its effects against the account."""
        void = self._is_void(event)
        if isinstance(event, ev.NodeLost | ev.NodeJoined):
            node = event.node if isinstance(event, ev.NodeLost) else event.node.id
            self.voided |= {lease.id for lease in self.leases.values() if node_of(lease.worker) == node}
        if isinstance(event, ev.WeightsPublished) and event.version != self.account.published:
            self.account.before, self.account.published = self.account.published, event.version
        effects = self.controller.handle(event, self.now)
        self.controller.check()
        assert self.finish is None or not effects
        if void:
            assert not any(isinstance(effect, ScoreSamples) for effect in effects), f"believed: {event}"
        self.effects += effects
        for effect in effects:
            self._carry_out(effect)

    def _is_void(self, event: ev.Event) -> bool:
        """Whether a completion comes from a worker that was given up, or for work given to another."""
        return isinstance(event, ev.LeaseCompleted) and (
            event.lease in self.voided
            or all(
                self.holder[name] != event.lease or name in self.account.finished for name in event.rollouts
            )
        )

    def _turn(self) -> None:
        if self.trouble and self.random.random() < 0.3:
            self.trouble -= 1
            self._make_trouble()
        elif self.answers and (self.calm or self.random.random() < 0.5):
            index = 0 if self.calm else self.random.randrange(len(self.answers))
            self._send(self.answers.pop(index))
        elif self.tasks and (self.calm or self.random.random() < 0.7):
            index = 0 if self.calm else self.random.randrange(len(self.tasks))
            self._work(*self.tasks.pop(index))
        else:
            if not self.present or (not self.calm and self.random.random() < 0.1):
                self._join(self.random.choice(NODES))
            if self.groups:
                leader = min(self.groups) if self.calm else self.random.choice(sorted(self.groups))
                self._pull(leader, 3 if self.calm else self.random.randint(1, 5))
            if not self.calm:
                self.now += 1.0  # so that leases of vanished workers expire in the end
                self.feed(ev.TimePassed())

    def _pull(self, leader: WorkerId, capacity: int) -> None:
        epoch = self.groups[leader]
        mine = (lease for lease, _ in self.tasks if (lease.worker, lease.epoch) == (leader, epoch))
        holds = tuple(dict.fromkeys(lease.id for lease in mine))
        self.feed(ev.GroupPulled(leader, epoch, capacity, self.seen.get(leader, LeaseId(0)), holds))

    def _make_trouble(self) -> None:
        node = self.random.choice(NODES)
        worker = WorkerId(f"{node.id}/0")
        match self.random.randrange(5):
            case 0:
                self.present.discard(node.id)
                self.groups.pop(worker, None)
                self.feed(ev.NodeLost(node.id))  # what it holds stays in self.tasks: a zombie's work
            case 1:
                self._join(node)
            case 2 if self.sent:
                self.feed(self.random.choice(self.sent))
            case 3:
                self.now += self.random.choice([1.0, self.plan.lease_s])
                self.feed(ev.TimePassed())
            case 4:
                self.feed(ev.GpuTimeSpent(worker, self.random.choice(list(Phase)), self.random.random()))

    def _join(self, node: Node) -> None:
        self.groups.pop(WorkerId(f"{node.id}/0"), None)
        self.present.add(node.id)
        self.feed(ev.NodeJoined(node))

    def _work(self, lease: Lease, rollout: Rollout) -> None:
        ids = lease.worker, lease.id, lease.epoch
        if chance(rollout.id, "poison") < self.failing / 4:
            self._send(ev.RolloutFailed(*ids, rollout.id, "not finite"))
        elif not self.calm and self.random.random() < 0.5:
            self._send(ev.LeaseProgressed(*ids, self.random.randrange(rollout.steps)))
            self.tasks.append((lease, rollout))
        elif not self.calm and rollout.id not in self.stumbled and self.random.random() < 0.05:
            self.stumbled.add(rollout.id)  # once: a second failure would drop it
            wrong = ev.LeaseCompleted(*ids, (rollout.id,), PolicyVersion(rollout.version + 1))
            self.feed(self.random.choice([wrong, ev.RolloutFailed(*ids, rollout.id, "lost its footing")]))
        else:
            self._send(ev.LeaseCompleted(*ids, (rollout.id,), rollout.version))

    def _send(self, event: ev.Event) -> None:
        if isinstance(event, ev.LeaseCompleted | ev.SamplesRewarded | ev.RewardFailed | ev.LeaseProgressed):
            self.sent.append(event)
        self.feed(event)

    # -- effects ---------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        account = self.account
        match effect:
            case WriteRecord():
                account.write(effect)
            case GrantLease(lease, rollouts, resume):
                assert self.groups.get(lease.worker) == lease.epoch, "work was given to a group that is gone"
                assert set(resume) <= set(lease.rollouts)
                assert {rollout.version for rollout in rollouts} == {account.published}, "old weights"
                assert not any(rollout in account.finished for rollout in lease.rollouts)
                account.needs(*lease.rollouts)
                self.leases[lease.id] = lease
                self.holder |= dict.fromkeys(lease.rollouts, lease.id)
                self.seen[lease.worker] = lease.id
                self.tasks += [(lease, rollout) for rollout in rollouts]
            case StartWorker() | PullWeights() | FormGroup() | StopGroup() | AbandonLease():
                self._obey(effect)
            case ScoreSamples(rollouts):
                account.needs(*(rollout.id for rollout in rollouts))
                self.answers += [self._reward(rollout.id) for rollout in rollouts]
            case DiscardSamples(rollouts):
                account.discarded.update(rollouts)
                assert account.discarded.total() == len(account.discarded), "discarded twice"
            case FinishRun():
                assert self.finish is None
                self.finish = effect
            case _:
                self._learn(effect)

    def _obey(self, command: ClusterCommand) -> None:
        """Workers answer late and in any order, and more than once where they are asked again."""
        match command:
            case FormGroup(leader, epoch):
                self.groups[leader] = epoch
            case StopGroup(leader, epoch) if self.groups.get(leader) == epoch:
                del self.groups[leader]  # what it holds is completed late, as by a zombie
        # A worker that hears too late that its lease is given up goes on.
        if answer := cluster_answer(command):
            self.answers.append(answer)

    def _learn(self, effect: Effect) -> None:
        account = self.account
        match effect:
            case PrepareBatch(_, groups, scores, micro_batches):
                members = [rollout for group in groups for rollout in group.rollouts]
                account.needs(*members)
                account.planned += micro_batches
                assert effect.partial == (self.plan.pipeline.trains_parts)
                compared = [len(comparison.others) for comparison in effect.comparisons] or [0] * len(groups)
                assert all(
                    len(group.rollouts) + others >= 2 for group, others in zip(groups, compared, strict=True)
                )
                in_order = [rollout for batch in micro_batches for rollout in batch.rollouts]
                divided = self.plan.update_split != "groups"
                assert members == in_order or (divided and sorted(members) == sorted(in_order))
                assert set(members) == set(scores)
                assert len(members) == len(scores)
            case TrainMicroBatch(batch):
                account.needs(*batch.rollouts)
                assert batch == account.planned.pop(0), "trained otherwise than announced"
                assert 0 < len(batch.rollouts) <= self.plan.micro_batch_size
                assert len(batch.rollouts) % self.plan.ranks == 0, "ranks would train unequally"
                account.update += batch.rollouts
            case StepOptimizer(_, _, samples):
                assert samples == len(account.update) == len(set(account.update)) > 0
                account.update = []
            case FinishBatch():
                assert not account.planned, "a prepared sample was not trained"
            case PublishWeights(version):
                assert version == self.controller.version
            case ReportEvaluation(_, version):
                account.needs(*(rollout.id for rollout in effect.scored))
                assert version == account.published
            case CommitCheckpoint(_, position):
                assert position <= account.position, "a checkpoint stands for records not written before it"
                # A run that ends for want of scores saves what its iteration began with.
                assert position == account.position or self.controller.work.stopping is not None
                self.checkpoints.append((len(self.effects), effect))
        if answer := learner_answer(effect):
            self.answers.append(answer)

    def _reward(self, rollout: RolloutId) -> ev.Event:
        if chance(rollout, "reward") < self.failing:
            return ev.RewardFailed(rollout, DropReason.REWARD_TIMEOUT, "too slow")
        if chance(rollout, "nan") < self.failing / 4:
            return ev.SamplesRewarded({rollout: {"reward": float("nan")}}, 0)
        return ev.SamplesRewarded({rollout: {"reward": chance(rollout, "score"), "strict": 1.0}}, 0)


def learning(effects: list[Effect]) -> list[Effect]:
    """What the learner and the evaluation saw: it must not depend on who was fast, and who died."""
    kinds = PrepareBatch | TrainMicroBatch | StepOptimizer | FinishBatch | PublishWeights | ReportEvaluation
    return [effect for effect in effects if isinstance(effect, kinds)]


def without_cluster(effects: list[Effect]) -> list[Effect]:
    """What was decided of the run, without the commands that keep workers going."""
    return [effect for effect in effects if not isinstance(effect, ClusterCommand)]


def node_of(worker: WorkerId) -> NodeId:
    return NodeId(worker.partition("/")[0])


def start(plan: Plan) -> Controller:
    return Controller(plan, TRAIN, TEST)
