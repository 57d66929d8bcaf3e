"""Exploration across iterations. Part of the controller.

    open ──► previews ──► close: choose seeds ──► groups regenerated ──► learn the gain ──► open

Invariants
    1. The state between iterations is JSON; a restored explorer continues identically.
    2. Only seeds reach training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from typing import cast

from pydantic import TypeAdapter

from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler.iteration import Work
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.exploration.bandit import Arm, DiscountedUCB, arm_grid
from spotlight.scheduler.policies.exploration.budget import Forecast, IterationSeconds, WindowSeen
from spotlight.scheduler.policies.exploration.contrast import contrast
from spotlight.scheduler.policies.exploration.fidelity import fidelity
from spotlight.scheduler.policies.exploration.planner import Planner, fixed
from spotlight.scheduler.policies.exploration.window import Choice, ExploredGroup, Window, choose, flat
from spotlight.scheduler.policy import Policy
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.seeds import spares_of_iteration
from spotlight.scheduler.types import PolicyVersion
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.base.typed_json import section, typed

_GROUPS: TypeAdapter[Mapping[int, ExploredGroup]] = TypeAdapter(Mapping[int, ExploredGroup])


class Explorer:
    """See the module's docstring.

    Attributes:
        planner: decides how much to explore; None: the same in every iteration.
        window: open while previews are made.
        groups: chosen seeds for the iteration that trains next, by slot, some with a spare prompt; absent
            slots take fresh seeds.
        report: JSON-able report on ``groups``, without the open window.
    """

    def __init__(self, plan: Plan, prompts: Sequence[Prompt], owner: Policy | None = None) -> None:
        assert plan.exploration is not None, "a plan without exploration"
        self._plan, self._exploration = plan, plan.exploration
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._owner = owner
        self.planner = make_planner(plan, self._exploration)
        self._pool_max = plan.pool_max
        self.window = self._new_window(0)
        self._closed: tuple[Arm | None, float] | None = None
        self._planned: list[Prompt] = []
        self.groups: Mapping[int, ExploredGroup] = {}
        self.report: dict[str, object] = {}
        self._decided: dict[str, object] = {}

    def _new_window(self, iteration: int) -> Window:
        return Window(iteration, work=Work(self._owner))

    # -- a window --------------------------------------------------------------------------------------

    def open(
        self,
        iteration: int,
        version: PolicyVersion,
        prompts: Sequence[Prompt],
        early: int,
        workers: int,
        now: float,
    ) -> Window:
        """Open an iteration's window; ``window.arm`` is None for no exploration.

        Args:
            prompts: by slot.
            early: number of leading slots that are not explored.
        """
        planner = self.planner
        if planner is not None and self._closed is not None:
            arm, closed_s = self._closed
            planner.learn_rest(arm, now - closed_s)
        self._closed = None
        explored = {slot: prompt for slot, prompt in enumerate(prompts) if slot >= early}
        if planner is None:
            decision = fixed(arms_of(self._plan)[0], iteration)
        else:
            decision = planner.decide(iteration, len(explored), workers)
        self._planned = list(prompts)
        self._decided = {"iteration": iteration, "decision": dict(decision.metrics)}
        work = Work(self._owner)
        self.window = Window(iteration, decision.arm, version, now, workers, explored, work, scored_s=now)
        return self.window

    def spare(self, slot: int) -> int | None:
        """A new slot with a spare prompt, if ``slot`` has no contrast and one is left."""
        window, plan = self.window, self._plan
        spares = len(window.replaced)  # each added one spare prompt
        if spares >= self._exploration.spare_prompts or slot in window.replaced:
            return None
        if not flat(window, slot, self._exploration, plan.group_size):
            return None
        prompts = list(self._prompts.values())
        found = spares_of_iteration(prompts, plan.run_seed, window.iteration, self._planned, spares + 1)
        if len(found) <= spares:
            return None
        new = plan.prompts_per_iteration + spares
        window.replace(slot, new, found[spares])
        return new

    def deepen(self) -> dict[int, range]:
        """The next round of extra previews: members by slot."""
        limit = self._pool_max
        return {} if limit is None or self.window.arm is None else self.window.round(limit)

    @property
    def deepens(self) -> bool:
        """Whether idle workers preview more seeds than planned."""
        return self._pool_max is not None

    def close(self, now: float) -> tuple[Window, Choice]:
        """Choose seeds from the scored previews and close the window."""
        window, self.window = self.window, self._new_window(self.window.iteration)
        if window.opened_s is None:
            self.groups, self.report = {}, {}
            return window, Choice()
        plan, exploration = self._plan, self._exploration
        choice = choose(window, exploration, plan.group_size, plan.prompts_per_iteration, plan.run_seed)
        self.groups = choice.groups
        self._closed = window.arm, now
        open_s = now - window.opened_s
        if window.arm is not None and self.planner is not None:
            # Deepening pools keeps workers as busy as planned previews do.
            busy_s = open_s if window.work.unscored else window.scored_s - window.opened_s
            scored = len(window.work.scores)
            self.planner.observe(WindowSeen(window.arm, open_s, busy_s, window.workers, scored))
        self.report = self._decided | {
            "arm": window.arm and window.arm.name,
            "version": window.version,
            "window": {
                "open_s": open_s,
                "workers": window.workers,
                "prompts": sum(slot < plan.prompts_per_iteration for slot in window.prompts),
                "planned": window.planned,
                "issued": len(window.work.rollouts),
                "scored": len(window.work.scores),
                "cut_off": window.cut_off,
            },
            "selection": {
                "policy": exploration.policy,
                "replaced_prompts": choice.replaced,
                "pool_contrast": choice.pool_contrast,
                "pool_size": choice.pool_size,
                **{verdict.value: count for verdict, count in sorted(choice.verdicts.items())},
            },
        }
        return window, choice

    # -- the groups that were chosen -------------------------------------------------------------------

    def explored_beside(self, slot: int, seeds: Set[int]) -> tuple[Mapping[str, float], ...]:
        """Preview scores that a slot's samples at ``seeds`` are compared with: of its other seeds.

        Of a group chosen for its contrast, those of the group. The rest of the pool is not trained: compared
        with it, too, the group's advantages would not balance, and near the ceiling nearly all be negative.
        """
        if slot not in self.groups:
            return ()
        group = self.groups[slot]
        beside = zip(group.seeds, group.previews, strict=True)
        by_chance = group.drawn == len(group.seeds)
        return (
            *(group.unchosen if by_chance else ()),
            *(scores for seed, scores in beside if seed not in seeds),
        )

    def learn(
        self,
        realised: Mapping[int, Mapping[int, Mapping[str, float]]],
        version: PolicyVersion,
    ) -> dict[str, object] | None:
        """Learn from regenerated scores; returns the report, or None without exploration.

        Args:
            realised: regenerated scores by slot and seed.
            version: that made them.
        """
        report, self.report = self.report, {}
        if "window" not in report:
            return None
        evidence = {
            name: [
                found
                for slot, group in sorted(self.groups.items())
                if (found := group.evidence(name, realised.get(slot, {}))) is not None
            ]
            for name in self._score_names()
        }
        ranked = {name: fidelity(groups) for name, groups in evidence.items()}
        gained = contrast(evidence[REWARD])
        arm = Arm.parse(str(report["arm"])) if report["arm"] is not None else None
        prompts = cast("int", section(report, "window")["prompts"])
        if self.planner is not None:
            self.planner.learn(arm, gained, len(self.groups), prompts)
        report["staleness"] = version - cast("int", report.pop("version"))
        report["contrast"] = dict(gained.as_metrics()) if gained is not None else {}
        report["fidelity"] = {name: dict(one.as_metrics()) for name, one in ranked.items()}
        return report

    def _score_names(self) -> list[str]:
        names = {name: None for group in self.groups.values() for name in group.pool_variance}
        return [REWARD, *(name for name in names if name != REWARD)]

    # -- checkpoints -----------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """JSON-able state between two iterations."""
        return {
            "policy": {} if self.planner is None else self.planner.snapshot(),
            "groups": {str(slot): asdict(group) for slot, group in self.groups.items()},
            "report": dict(self.report),
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Restore a snapshot; empty: the initial state. Raises ValueError if malformed."""
        self.planner = make_planner(self._plan, self._exploration)
        self.window, self.groups, self.report = self._new_window(0), {}, {}
        self._closed = None  # the clock may be another's
        if not state:
            return
        if self.planner is not None:
            self.planner.load(section(state, "policy"))
        self.groups = typed(_GROUPS, state.get("groups"), "groups")
        if all(map(self._fits, self.groups, self.groups.values())):
            self.report = dict(section(state, "report"))
        else:  # the run's course was changed: the next iteration's seeds are random ones
            self.groups = {}

    def _fits(self, slot: int, group: ExploredGroup) -> bool:
        known, plan = group.prompt in self._prompts, self._plan
        return known and slot < plan.prompts_per_iteration and len(group.seeds) == plan.group_size


def make_planner(plan: Plan, exploration: ExplorationConfig) -> Planner | None:
    """None: the same arm in every iteration."""
    planner = exploration.planner
    if planner is None:
        return None
    # The bandit tries arms in this order: the largest that fits first, to fill the window.
    arms = sorted(
        arms_of(plan), key=lambda arm: (-planner.costs.work_s(arm.steps, arm.seeds_per_prompt), arm)
    )
    bandit = DiscountedUCB(arms, planner.alpha, planner.discount, planner.sharing)
    forecast = Forecast(planner.costs, planner.caution)
    if exploration.where == "idle":
        return Planner(bandit, forecast)
    if planner.maximises == "contrast":
        return Planner(bandit, forecast, limited=False)
    seconds = IterationSeconds(forecast, plan.rollout_steps, plan.group_size, plan.keeps_previews)
    return Planner(bandit, forecast, limited=False, seconds=seconds)


def arms_of(plan: Plan) -> tuple[Arm, ...]:
    """All arms that may be played; none without exploration."""
    explores = plan.exploration
    return () if explores is None else arm_grid(*explores.arms(plan.group_size, plan.rollout_steps))
