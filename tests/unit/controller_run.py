"""A controller that is answered at once, with one node and one worker."""

from __future__ import annotations

from collections.abc import Callable

from tests.controller_answers import ClusterCommand, cluster_answer, learner_answer

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import (
    DiscardSamples,
    Effect,
    FinishRun,
    FormGroup,
    GrantLease,
    PullWeights,
    ReportChoice,
    ReportPipeline,
    ScoreSamples,
    StartWorker,
    WriteRecord,
)
from spotlight.scheduler.plan import ClusterPlan, Plan
from spotlight.scheduler.records import SampleDropped
from spotlight.scheduler.types import (
    DropReason,
    LeaseId,
    Node,
    NodeId,
    NodeKind,
    Rollout,
    WorkerId,
)
from spotlight_rewards.base.prompts import Prompt, PromptId

NODE = Node(
    NodeId("w"), NodeKind.SPOT, gpus=1, gpu_type="H100", price_usd_h=3.0, trains=False, rolls_out=True
)
WORKER = WorkerId("w/0")
TRAIN = [Prompt(PromptId(f"train{n}"), f"{n} circles", {}) for n in range(3)]
TEST = [Prompt(PromptId("test0"), "a square", {})]
PLAN = Plan(
    run_seed=0,
    iterations=2,
    prompts_per_iteration=2,
    group_size=3,
    rollout_steps=4,
    evaluation=EvaluationConfig(steps=3, images_per_prompt=2, every=2),
    updates_per_batch=1,
    micro_batch_size=4,
    checkpoint_every=1,
    lease_s=10.0,
    cluster=ClusterPlan(start_s=10.0),
    max_drop_share=None,
)
Answer = Callable[[Rollout], ev.Event]


def reward(rollout: Rollout) -> ev.Event:
    return ev.SamplesRewarded({rollout.id: {"reward": 1.0}}, 0)


def lose_member(member: int) -> Answer:
    """All rewards but those of one member of each training group."""

    def answer(rollout: Rollout) -> ev.Event:
        if rollout.id.startswith("t") and rollout.member == member:
            return ev.RewardFailed(rollout.id, DropReason.REWARD_ERROR, "it raised")
        return reward(rollout)

    return answer


class Run:
    """One worker and answers at once; ``until`` stops before a kind of effect is answered."""

    def __init__(self, plan: Plan = PLAN, answer: Answer = reward, test: list[Prompt] = TEST) -> None:
        self.answer = answer
        self.log: list[Effect] = []
        self.todo: list[Effect] = []
        self.start(Controller(plan, TRAIN, test))

    def start(self, controller: Controller) -> None:
        self.controller = controller
        self.seen = LeaseId(0)
        self.todo.clear()
        self.feed(ev.RunStarted())
        self.feed(ev.NodeJoined(NODE))

    def feed(self, event: ev.Event, now: float = 0.0) -> list[Effect]:
        effects = self.controller.handle(event, now)
        self.controller.check()
        self.log += effects
        hidden = WriteRecord | DiscardSamples | ClusterCommand
        self.todo += [effect for effect in effects if not isinstance(effect, hidden)]
        for effect in effects:
            self._obey(effect, now)
        return effects

    def _obey(self, effect: Effect, now: float) -> None:
        match effect:
            case GrantLease(lease):
                self.seen = lease.id
            case FormGroup(_, epoch):
                self.epoch = epoch
        if isinstance(effect, StartWorker | PullWeights | FormGroup) and (answer := cluster_answer(effect)):
            self.feed(answer, now)

    def pull(self, capacity: int, now: float = 0.0) -> list[Effect]:
        return self.feed(ev.GroupPulled(WORKER, self.epoch, capacity, self.seen), now)

    def until(self, kind: type[Effect]) -> Effect:
        while True:
            if not self.todo:
                self.pull(4)
            effect = self.todo.pop(0)
            if isinstance(effect, kind):
                return effect
            assert not isinstance(effect, FinishRun), effect
            for event in self.answers(effect):
                self.feed(event)

    def answers(self, effect: Effect) -> list[ev.Event]:
        match effect:
            case GrantLease(lease, rollouts):
                return [ev.LeaseCompleted(WORKER, lease.id, lease.epoch, lease.rollouts, rollouts[0].version)]
            case ScoreSamples(rollouts):
                return [self.answer(rollout) for rollout in rollouts]
            case ReportPipeline() | ReportChoice():
                return []
        answer = learner_answer(effect)
        assert answer is not None, effect
        return [answer]

    def kinds(self) -> list[str]:
        hidden = WriteRecord | DiscardSamples | GrantLease | ScoreSamples | ClusterCommand
        return [type(effect).__name__ for effect in self.log if not isinstance(effect, hidden)]

    def drops(self) -> list[SampleDropped]:
        records = [effect.record for effect in self.log if isinstance(effect, WriteRecord)]
        return [record for record in records if isinstance(record, SampleDropped)]
