"""The simulation driver: executes the controller's effects in virtual time.

    heap of (time, call) ──► event ──► controller.handle ──► effects ──► workers / learner / rewards / store
                 ▲                                                                    │
                 └────────────────────── call later ◄─────────────────────────────────┘

It makes no decisions, and its only randomness is seeded noise. Equal scenarios give equal runs, event by
event.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spotlight.garbage import collection_paused
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.stages import Stage
from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase, WeightKind, WorkerId
from spotlight_plan.simulation.disturbances import Network, TimingNoise
from spotlight_plan.simulation.gpu_accounts import GpuAccounts, GpuSwitches
from spotlight_plan.simulation.machines.booting import BootingMachines
from spotlight_plan.simulation.machines.other_costs import OtherCosts
from spotlight_plan.simulation.machines.virtual_places import Parts, VirtualPlaces
from spotlight_plan.simulation.machines.virtual_supply import OnDemandSupply, SpotSupply
from spotlight_plan.simulation.run_result import result_of
from spotlight_plan.simulation.scenario import (
    IterationTimes,
    NodeEvent,
    PriceChanged,
    Scenario,
    SimulationResult,
)
from spotlight_plan.simulation.virtual_clock import VirtualClock
from spotlight_plan.simulation.virtual_learner import VirtualLearner, VirtualStore
from spotlight_plan.simulation.virtual_processes import VirtualProcess, VirtualWeights
from spotlight_plan.simulation.virtual_rewards import ScorerQueue, judged
from spotlight_plan.simulation.virtual_workers import ImageCosts, Receipt, VirtualWorkers
from spotlight_rewards.base.prompts import Prompt, PromptId

FIND_S, END_S = 0.5, 1.0
"""Until the newest checkpoint is found; from the end of a learner's processes until it is noticed."""


@dataclass(slots=True)
class _Wake:
    at_s: float = float("inf")


class Simulation(VirtualClock):
    """One run in virtual time.

    Attributes:
        slow: factor on a node's durations.
        reward_failing: share of samples whose reward times out.
        overlaps: pipeline report of each iteration.
        explorations: exploration reports; a repeated iteration appears twice.
        head_up: False while the head restarts and receives nothing; no scenario has that.
        head_life: counts its restarts.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario
        self.train = [Prompt(PromptId(f"p{n}"), f"prompt {n}", {}) for n in range(scenario.train_prompts)]
        self.test = [Prompt(PromptId(f"q{n}"), f"held out {n}", {}) for n in range(scenario.test_prompts)]
        self.controller = Controller(scenario.plan, self.train, self.test)
        self.random = random.Random(scenario.seed)
        self.network = Network(random.Random(scenario.seed + 1))
        self.accounts = GpuAccounts(scenario.timelines, OtherCosts(scenario.standing_usd_h))
        self.store = VirtualStore()
        costs = ImageCosts(scenario.costs, scenario.plan.cluster.pixels)
        turns = GpuSwitches(scenario.costs.switch_s())
        self.workers = VirtualWorkers(self, self.accounts, costs, scenario.commit_every, turns)
        joins = [event.node for _, event in scenario.nodes if isinstance(event, ev.NodeJoined)]
        gpu_type = max(joins, key=lambda node: (node.trains, node.kind is NodeKind.SPOT)).gpu_type
        self.places = VirtualPlaces()
        self.booting = BootingMachines(self.accounts)
        self._moves = scenario.plan.cluster.learner_moves
        self.on_demand = None if scenario.on_demand is None else OnDemandSupply(self, scenario.on_demand)
        self.spot = None
        if (target := scenario.plan.fleet.target) is not None:
            at_start = sum(at_s == 0 for at_s, event in scenario.nodes if _joins_spot(event))
            self.spot = SpotSupply(
                self, target.clipped(scenario.spot_first or at_start), scenario.spot_delay_s
            )
        self.learner = VirtualLearner(self, gpu_type, turns)
        self._learner_noise = TimingNoise(scenario.seed, "learner", scenario.noise)
        self._reward_noise = TimingNoise(scenario.seed, "rewards", scenario.noise)
        self._scorers = ScorerQueue()
        self._start_due = False
        self.noticed: dict[NodeId, float] = {}
        self.slow: dict[NodeId, float] = {}
        self.reward_failing = 0.0
        self.head_up = True
        self.head_life = 0
        self.finish: ef.FinishRun | None = None
        self._closing: ef.FinishRun | None = None
        self.events = self.preemptions = self.notices = 0
        self.explorations: list[ef.ReportExploration] = []
        self.overlaps: list[ef.ReportPipeline] = []
        self.fleet_reports: list[tuple[float, ef.ReportFleet]] = []
        self._times = IterationTimes()
        self._worked_s = 0.0
        self.iterations = self._times.ended
        self._wake = _Wake()

    @property
    def nodes(self) -> dict[NodeId, Node]:
        """The nodes that are there, with their roles."""
        return self.places.nodes

    # -- the loop --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Schedule the scenario's node events, and start the learner."""
        for at_s, event in self.scenario.nodes:
            self.at(at_s, self.happen, event)
        self.at(0.0, self._report_supply)
        self.at(0.0, self._start_learner)

    def _report_supply(self) -> None:
        if self.on_demand is not None:
            self.feed(ev.NodesProvided(NodeKind.ON_DEMAND, self.on_demand.provided))
        if self.spot is not None:
            self.feed(ev.NodesProvided(NodeKind.SPOT, self.spot.provided))

    def step(self) -> bool:
        """Do the next scheduled call. Returns False when there is none, or the run is over."""
        return self.finish is None and self.advance(self.scenario.until_s)

    def noisy(self, seconds: float, node: NodeId) -> float:
        """Apply a node's slowness and the scenario's noise to a duration."""
        if self.slow:
            seconds *= self.slow.get(self.places.machine_of.get(node, node), 1.0)
        return (
            seconds * self.random.lognormvariate(0.0, self.scenario.noise) if self.scenario.noise else seconds
        )

    def after_ranks(self, seconds: float, then: Callable[..., None], *args: object) -> None:
        """Call ``then`` when the slowest learner rank is done; each rank has its own noise."""
        ranks: Counter[float] = Counter()
        for node in self.nodes.values():
            if node.trains:
                ranks[self.slow.get(self.places.machine_of[node.id], 1.0)] += node.gpus
        factors = (slow * self._learner_noise.slowest(count) for slow, count in ranks.items())
        # No ranks: the last training node is lost, but not yet the learner, whose answer is then discarded.
        self.after(seconds * max(factors, default=1.0), then, *args)

    # -- the controller --------------------------------------------------------------------------------

    def feed(self, event: ev.Event, receipt: Receipt | None = None) -> None:
        """Pass an event to the controller and execute its effects in order."""
        if not self.head_up or self.finish is not None:
            return
        if self._closing is not None:
            self.finish = self._closing if self.learner.alive else None
            if self.finish is not None or not self._moves:
                return
        self.events += 1
        if isinstance(event, ev.WeightsPulled) and (process := self.workers.processes.get(event.worker)):
            self.places.warm.add(self.places.machine_of[process.node])
        effects = self.controller.handle(event, self.now)
        if receipt is not None:
            self._settle(event, receipt, effects)
        self.observe(event, effects, receipt)
        for effect in effects:
            self._carry_out(effect)
        self._schedule_wake()

    def observe(self, event: ev.Event, effects: list[ef.Effect], receipt: Receipt | None) -> None:
        """Hook for checks: called after each event, before its effects are carried out."""

    def _schedule_wake(self) -> None:
        wake_s = self.controller.wake_s
        if wake_s is not None and wake_s < self._wake.at_s:
            self._wake = _Wake(wake_s)
            self.at(max(wake_s, self.now), self._time_passed, self._wake)

    def _time_passed(self, wake: _Wake) -> None:
        if wake is self._wake:
            self._wake = _Wake()
            self.feed(ev.TimePassed())

    def _settle(self, event: ev.Event, receipt: Receipt, effects: list[ef.Effect]) -> None:
        """Bill and store work that the controller accepted; everything else stays LOST."""
        match event:
            case ev.LeaseCompleted():
                accepted = {one.id: one.purpose for one in ef.accepted(effects, event.rollouts)}
                self.store.finished(accepted, receipt.weights)
                counts = bool(accepted)
                if counts and self.scenario.egress is not None:
                    purpose, kind = next(iter(accepted.values())), receipt.kind
                    self.scenario.egress.samples(purpose, len(accepted), kind, self.accounts.other)
            case ev.LeaseProgressed(_, lease):
                counts = not any(isinstance(e, ef.AbandonLease) and e.lease == lease for e in effects)
                if counts:
                    self.store.progressed(receipt.progress, receipt.weights)
            case _:
                return
        if counts:
            self.accounts.confirm(receipt.segments, receipt.phase)

    # -- effects ---------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.WriteRecord() | ef.RollBack() | ef.ReportChoice() | ef.HoldSamples():
                pass
            case ef.GrantLease():
                self._order(effect.lease.worker, self.workers.work, effect)
            case ef.AbandonLease():
                self._order(effect.leader, self.workers.abandon, effect)
            case ef.PullWeights():
                self._order(effect.worker, self.workers.pull, effect)
            case ef.FormGroup():
                self._order(effect.leader, self.workers.form, effect)
            case ef.StopGroup():
                self._order(effect.members[0], self.workers.stop, effect)
            case ef.StartWorker():
                self._start_worker(effect)
            case ef.ScoreSamples(rollouts, lineage):
                costs, slow = self.scenario.costs, self._reward_noise.slowest(1)
                answer_s, busy_s = costs.reward_s(len(rollouts)) * slow, costs.scoring_s(len(rollouts)) * slow
                seconds = self._scorers.answered_s(self.now, answer_s, busy_s)
                if self._fails():
                    seconds += 200.0 * self.random.random()  # retried, and late
                made_by = [self.store.samples.get(rollout.id) for rollout in rollouts]
                plan, rewards = self.scenario.plan, self.scenario.rewards
                scored = judged(rollouts, made_by, lineage, plan, rewards, self._fails)
                self.after(seconds, self._score, self.head_life, scored)
            case ef.KeepPreview() | ef.DiscardSamples():
                self.store.carry_out(effect)
            case ef.ReportEvaluation(iteration, lineage=lineage):
                self.after(0.0, self._from_head, self.head_life, ev.EvaluationReported(iteration, lineage))
            case ef.PrepareLearner(number):
                self.learner.prepare(number)
            case ef.EndLearner(detail):
                self.after(END_S, self.lose_learner, detail, self.learner.life)
            case ef.RestoreLearner():
                # Until the newest checkpoint is found, the learner that runs answers what it was asked.
                self.after(FIND_S, self._restore, self.head_life, effect)
            case ef.ReportExploration():
                self.explorations.append(effect)
            case ef.ReportPipeline():
                self.overlaps.append(effect)
            case ef.AssignRoles(machine, parts):
                if machine in self.places.machines:
                    self._assign(machine, parts)
            case ef.PlaceLearner(ranks):
                self.places.placed = ranks
            case ef.NodesWanted(kind):
                supply = self.spot if kind is NodeKind.SPOT else self.on_demand
                assert supply is not None, f"nobody provides {kind} nodes"
                self.after(0.0, supply.carry_out, effect)
            case ef.ReportFleet():
                self.fleet_reports.append((self.now, effect))
            case ef.FinishRun():
                self._close(effect)
            case _:
                if isinstance(effect, ef.PublishWeights):
                    self._iteration_done()
                self.learner.carry_out(effect)

    def _restore(self, head_life: int, effect: ef.RestoreLearner) -> None:
        wanted = (head_life, effect.lineage) == (self.head_life, self.controller.cluster.lineage)
        if wanted and self._room < self.scenario.plan.ranks_min:
            self.after(FIND_S, self._restore, head_life, effect)
        elif wanted:
            self.learner.restore(effect, self._room)
            self._learner_starts()

    @property
    def _room(self) -> int:
        """Ranks of the learner that is formed now."""
        return sum(self.places.placed.values()) if self._moves else self.places.ranks

    def _close(self, effect: ef.FinishRun) -> None:
        """The weights are exported by a learner that is up; a lost one is started again for that."""
        if effect.error is not None or self.learner.alive:
            self.finish = effect
        else:
            self._closing = effect
            self._start_learner()

    def _start_worker(self, effect: ef.StartWorker) -> None:
        if effect.node in self.nodes:
            self.workers.start(effect)

    def _score(self, life: int, scored: Iterator[ev.Event]) -> None:
        for event in scored:
            self._from_head(life, event)

    def _fails(self) -> bool:
        return bool(self.reward_failing) and self.random.random() < self.reward_failing

    def _from_head(self, life: int, event: ev.Event) -> None:
        if life == self.head_life:
            self.feed(event)

    def _iteration_done(self) -> None:
        self.accounts.settle(self.now)
        it = self.controller
        self._times.end(it.iteration, self.now, self.accounts.total_usd, it.ledger.trained)
        if self.spot is not None:
            by_phase = self.accounts.by_phase()
            worked_s = by_phase[Phase.ROLLOUT] + by_phase[Phase.EVALUATION]
            billed = ev.IterationBilled(
                it.iteration, worked_s - self._worked_s, self.accounts.total_usd, self.now
            )
            self._worked_s = worked_s
            self.after(0.0, self._from_head, self.head_life, billed)

    # -- messages --------------------------------------------------------------------------------------

    def _order(self, worker: WorkerId, obey: Callable[..., None], effect: ef.Effect) -> None:
        if self.network.faultless:
            self.after(0.0, self._arrive, worker, obey, effect)
            return
        for delay_s in self.network.delays():
            self.after(delay_s, self._arrive, worker, obey, effect)

    def _arrive(self, worker: WorkerId, obey: Callable[..., None], effect: ef.Effect) -> None:
        process = self.workers.processes.get(worker)
        # A frozen process acts once it resumes; ``stop`` itself picks a member that is not frozen.
        if process is not None and process.frozen_until_s > self.now and obey != self.workers.stop:
            self.after(process.frozen_until_s - self.now + 1e-3, self._arrive, worker, obey, effect)
        else:
            obey(effect)

    def send(self, event: ev.Event, sender: VirtualProcess, receipt: Receipt | None = None) -> None:
        """Send a worker's message to the controller; a frozen process sends once it is continued."""
        wait_s = max(0.0, sender.frozen_until_s - self.now)
        for delay_s in [0.0] if self.network.faultless else self.network.delays():
            self.after(wait_s + delay_s, self.feed, event, receipt)

    def published(self, version: int) -> VirtualWeights | None:
        """Weights of a version in the store."""
        return self.store.versions.get(version)

    def pulled(self, kind: WeightKind, process: VirtualProcess) -> float:
        """Pay for weights from another region; returns the least seconds that they take."""
        egress = self.scenario.egress
        return egress.pull(kind, process.gpu.node.kind, self.accounts.other) if egress else 0.0

    def corrupted(self) -> bool:
        """Whether a weight transfer fails its checksum."""
        return not self.network.faultless and self.network.random.random() < self.network.lost

    # -- nodes -----------------------------------------------------------------------------------------

    def happen(self, event: NodeEvent) -> None:
        """An event of the scenario, or of its market of spot nodes."""
        if self.spot is None or self.spot.offer(event, self.now):
            self.apply(event)

    def apply(self, event: NodeEvent) -> None:
        """Apply a node event to the simulated cluster and report it to the controller."""
        if self.booting.happen(event, self.now):
            if isinstance(event, ev.NodeLost):
                self._changed()
            return
        places = self.places
        match event:
            case PriceChanged(name, price_usd_h):
                for part in places.parts.get(name, ()):
                    self.accounts.price(
                        part.id, price_usd_h * part.gpus / places.machines[name].gpus, self.now
                    )
                return
            case ev.NodeJoined(node) if node.id not in places.machines:
                if self.scenario.boot_s and self.now > 0:
                    self.booting.join(node, self.now)
                    self.after(self.scenario.boot_s, self._booted, node.id, self.now)
                    return
                self._join(node)
            case ev.NodeLost(name) if name in places.machines:
                holds_learner = self._take(name)
                self.feed(event)
                if holds_learner:
                    self.lose_learner(f"node {name} is gone")
            case ev.NodeNoticed(name, deadline_s) if name in places.machines:
                self.notices += 1
                self.noticed[name] = deadline_s
                self.feed(event)
            case ev.NoticeCancelled(name) if self.noticed.pop(name, None) is not None:
                self.feed(event)
        self._changed()

    def _changed(self) -> None:
        """A learner that waits for nodes looks again."""
        if self._start_due and self.head_up:
            self._start_learner()

    def _join(self, machine: Node) -> None:
        self.places.join(machine)
        self.accounts.add(machine, self.now)
        self.feed(ev.NodeJoined(machine))

    def _booted(self, name: NodeId, since_s: float) -> None:
        booted = self.booting.booted(name, since_s, self.now)
        if booted is None:
            return
        machine, deadline_s = booted
        self._join(machine)
        self._changed()
        if deadline_s is not None:
            self.apply(ev.NodeNoticed(name, deadline_s))

    def _assign(self, machine: NodeId, parts: Parts) -> None:
        """A machine is other nodes to the controller from now on."""
        before = self.places.put(machine, parts)
        self._kill_workers(before)
        self.accounts.reassign(before, parts, self.now)

    def _kill_workers(self, nodes: Sequence[Node]) -> None:
        names = {node.id for node in nodes}
        for process in [one for one in self.workers.processes.values() if one.node in names]:
            self.workers.kill(process)

    def _learner_starts(self) -> None:
        if self._moves:
            self.places.started()
            self.feed(ev.LearnerStarted(self.places.running))

    def _take(self, name: NodeId) -> bool:
        """Take a machine; returns whether the learner was on it."""
        places = self.places
        self.preemptions += places.machines[name].kind is not NodeKind.ON_DEMAND
        parts = places.take(name)
        self._kill_workers(parts)
        for part in parts:
            self.accounts.remove(part.id, self.now)
        self.noticed.pop(name, None)
        if not self._moves:
            return any(part.trains for part in parts)
        if name in places.placed and name not in places.running:
            self.learner.forget_second()
        return name in places.running

    def lose_learner(self, detail: str, life: int | None = None) -> None:
        """A learner rank dies, unless another ``life`` was meant."""
        if life not in (None, self.learner.life):
            return
        self.learner.lose()
        self.places.running = {}
        starts = self.controller.stage is Stage.IDLE or self._closing is not None
        if self._moves or not starts:
            self.feed(ev.LearnerLost(detail))
        if self.head_up and starts:
            self._start_learner()

    def _start_learner(self) -> None:
        self._start_due = self._room < self.scenario.plan.ranks_min
        if not self._start_due:
            self.learner.start(self._room)
            self._learner_starts()

    def result(self) -> SimulationResult:
        """The result of the run so far."""
        return result_of(self)


def simulate(scenario: Scenario) -> SimulationResult:
    """Run a scenario to its end."""
    simulation = Simulation(scenario)
    # Without cycles there is nothing to collect: a fifth of the time with 1,000 GPUs, and it grows with them.
    with collection_paused():
        simulation.begin()
        while simulation.step():
            pass
    return simulation.result()


def _joins_spot(event: NodeEvent) -> bool:
    return isinstance(event, ev.NodeJoined) and event.node.kind is NodeKind.SPOT
