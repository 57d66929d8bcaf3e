"""The workers' side of the protocol in virtual time, with the obligations of a real worker.

- It obeys only commands of its own process epoch, group commands above the highest group epoch received, and
  weight pulls not older than the last one ordered.
- It commits progress by value before reporting it, and pulls again when idle.
- An abandoned lease ends at the next step boundary. A stopped group first commits its progress; so do
  survivors of a broken group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import (
    PHASE_OF,
    NodeKind,
    Phase,
    Rollout,
    RolloutId,
    WeightKind,
    WorkerId,
)
from spotlight_plan.simulation.costs import CostModel
from spotlight_plan.simulation.gpu_accounts import BilledSegment, GpuAccounts, GpuSwitches
from spotlight_plan.simulation.virtual_processes import (
    LeaseWork,
    VirtualGroup,
    VirtualProcess,
    VirtualWeights,
)

if TYPE_CHECKING:
    from spotlight_plan.simulation.virtual_driver import Simulation


@dataclass(frozen=True, slots=True)
class ImageCosts:
    """The cost model and the image size."""

    model: CostModel
    pixels: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Result of a message, confirmed and stored only if the controller accepts it."""

    segments: list[BilledSegment]
    phase: Phase
    weights: VirtualWeights
    group: VirtualGroup
    progress: tuple[tuple[RolloutId, int], ...] = ()

    @property
    def kind(self) -> NodeKind:
        """Of the node that made it."""
        return self.segments[0].kind


@dataclass(slots=True)
class VirtualWorkers:
    """All worker processes and their groups."""

    host: Simulation
    accounts: GpuAccounts
    costs: ImageCosts
    commit_every: int
    turns: GpuSwitches
    poll_s: float | None = None
    processes: dict[WorkerId, VirtualProcess] = field(default_factory=dict)

    # -- processes -------------------------------------------------------------------------------------

    def start(self, effect: ef.StartWorker) -> None:
        """Start a process, replacing an older one of that worker."""
        old = self.processes.get(effect.worker)
        if old is not None and old.epoch >= effect.epoch:
            if old.up and old.epoch == effect.epoch:
                self.host.send(ev.WorkerStarted(old.worker, old.epoch), old)
            return
        if old is not None:
            self.kill(old)
        gpu = self.accounts.gpus[effect.node][effect.gpu]
        process = VirtualProcess(effect.worker, effect.node, gpu, effect.epoch)
        self.processes[effect.worker] = process
        self.accounts.worker(gpu, Phase.SETUP, self.host.now)
        self.host.after(
            self.host.noisy(self.costs.model.worker_start_s(), effect.node), self._started, process
        )

    def _started(self, process: VirtualProcess) -> None:
        if process.alive:
            process.up = True
            self.host.send(ev.WorkerStarted(process.worker, process.epoch), process)

    def kill(self, process: VirtualProcess) -> None:
        """Kill a process. Its group is broken; survivors keep the last finished step."""
        process.alive = process.up = False
        del self.processes[process.worker]
        group = process.group
        if group is None:
            return
        self._halt(group)
        group.broken = True
        group.members.remove(process)
        for member in group.members:
            self.accounts.worker(member.gpu, Phase.RECONFIGURATION, self.host.now)

    # -- weights ---------------------------------------------------------------------------------------

    def pull(self, effect: ef.PullWeights) -> None:
        """Load weights, concurrently with whatever the process does."""
        process = self.processes.get(effect.worker)
        if process is None or not process.up or process.epoch != effect.epoch:
            return
        order = (effect.lineage, int(effect.version))
        if order < process.ordered:
            return
        peer = self.processes.get(effect.peer) if effect.peer is not None else None
        weights = self.host.published(effect.version)
        process.ordered = order
        if (effect.peer is not None and (peer is None or not peer.based)) or weights is None:
            self._pull_failed(process, effect)
            return
        if process.group is None or process.group.run is None:
            first = effect.kind is WeightKind.FULL and not process.based
            self.accounts.worker(process.gpu, Phase.SETUP if first else Phase.WEIGHT_SYNC, self.host.now)
        process.pulling = True
        seconds = self.costs.model.pull_s(effect.kind, peer is not None)
        if peer is None:
            seconds = max(seconds, self.host.pulled(effect.kind, process))
        self.host.after(self.host.noisy(seconds, process.node), self._loaded, process, effect, peer, weights)

    def _pull_failed(self, process: VirtualProcess, effect: ef.PullWeights) -> None:
        failed = ev.PullFailed(process.worker, process.epoch, effect.version, effect.lineage)
        self.host.after(1.0, self.host.send, failed, process)

    def _loaded(
        self,
        process: VirtualProcess,
        effect: ef.PullWeights,
        peer: VirtualProcess | None,
        weights: VirtualWeights,
    ) -> None:
        if not process.alive or process.ordered != (effect.lineage, int(effect.version)):
            return
        if (peer is not None and not peer.alive) or self.host.corrupted():
            self._pull_failed(process, effect)
            return
        process.based, process.pulling = True, False
        group = process.group
        if process.weights != weights and group is not None and group.run is not None:
            # One lease must not mix weight versions.
            self._halt(group)
            group.run = None
            self._ask(group)
        process.weights = weights
        if group is None or group.run is None:
            self.accounts.worker(process.gpu, Phase.IDLE, self.host.now)
        pulled = ev.WeightsPulled(process.worker, process.epoch, effect.version, effect.lineage)
        self.host.send(pulled, process)

    # -- groups ----------------------------------------------------------------------------------------

    def form(self, effect: ef.FormGroup) -> None:
        """Join processes into a group, which pulls work as soon as it has formed."""
        members = [self.processes.get(name) for name in effect.members]
        ready = [process for process in members if process is not None and process.up]
        if len(ready) < len(members):
            return
        known = ready[0].group
        if known is not None and known.epoch == effect.epoch:
            if known.formed and not known.broken:
                self.host.send(ev.GroupFormed(known.leader, known.epoch), ready[0])
            return
        if any(effect.epoch <= process.fence for process in ready):
            return
        group = VirtualGroup(effect.leader, effect.epoch, ready)
        for process in ready:
            if process.group is not None:
                self._part(process.group)
            process.group, process.fence = group, effect.epoch
            self.accounts.worker(process.gpu, Phase.RECONFIGURATION, self.host.now)
        seconds = self.costs.model.group_setup_s(len(ready))
        self.host.after(self.host.noisy(seconds, ready[0].node), self._formed, group)

    def _formed(self, group: VirtualGroup) -> None:
        if group.broken:
            return
        group.formed = True
        for process in group.members:
            self.accounts.worker(process.gpu, Phase.IDLE, self.host.now)
        self.host.send(ev.GroupFormed(group.leader, group.epoch), group.members[0])
        self._ask(group)

    def stop(self, effect: ef.StopGroup) -> None:
        """Commit a group's progress at the next step boundary, then dissolve it."""
        answering = [self.processes[name] for name in effect.members if name in self.processes]
        answering = [process for process in answering if process.up]
        if not answering:
            return
        speaker = next((p for p in answering if p.frozen_until_s <= self.host.now), answering[0])
        group = next(
            (p.group for p in answering if p.group is not None and p.group.epoch == effect.epoch), None
        )
        for process in answering:
            process.fence = max(process.fence, effect.epoch)
        if group is None:
            self._stopped(effect, speaker)
            return
        stuck = any(process.frozen_until_s > self.host.now for process in group.members)
        if group.run is None or group.broken or stuck:
            if group.run is not None:
                self._halt(group)
            self._commit_and_part(group, effect, speaker)
        elif not group.stopping:
            group.stopping = True
            self._at_boundary(group, self._commit_and_part, group, effect, speaker)

    def _commit_and_part(self, group: VirtualGroup, effect: ef.StopGroup, speaker: VirtualProcess) -> None:
        if speaker.group is not group:
            return
        if group.run is not None:
            self._report_progress(group, group.run, speaker)
        self._part(group)
        self._stopped(effect, speaker)

    def _stopped(self, effect: ef.StopGroup, speaker: VirtualProcess) -> None:
        self.host.send(ev.GroupStopped(effect.leader, effect.epoch), speaker)

    def _part(self, group: VirtualGroup) -> None:
        self._halt(group)
        group.broken, group.run = True, None
        for process in group.members:
            process.group = None
            self.accounts.worker(process.gpu, Phase.RECONFIGURATION, self.host.now)

    def _ask(self, group: VirtualGroup) -> None:
        """Pull work; repeat after ``poll_s`` where messages may be lost."""
        if group.broken or group.run is not None:
            return
        first, group.polls = group.members[0], group.polls + 1
        for process in group.members:
            if not process.pulling:
                self.accounts.worker(process.gpu, Phase.IDLE, self.host.now)
        capacity = self.costs.model.lease_size(first.gpu_type, self.costs.pixels, len(group.members))
        self.host.send(ev.GroupPulled(group.leader, group.epoch, capacity, group.seen), first)
        if self.poll_s is not None:
            self.host.after(self.poll_s, self._poll, group, group.polls)

    def _poll(self, group: VirtualGroup, polls: int) -> None:
        if group.polls == polls:
            self._ask(group)

    # -- leases ----------------------------------------------------------------------------------------

    def work(self, effect: ef.GrantLease) -> None:
        """Begin a lease, unless it is known already or the group has changed."""
        group = self._group_of(effect.lease.worker, effect.lease.epoch)
        if group is None or effect.lease.id <= group.seen or group.stopping:
            return
        weights = group.members[0].weights
        if weights is None:
            return
        if group.run is not None:
            self._halt(group)
        group.seen = effect.lease.id
        left = {rollout.id: (rollout, effect.resume.get(rollout.id, 0)) for rollout in effect.rollouts}
        group.run = run = LeaseWork(effect.lease, weights, PHASE_OF[effect.rollouts[0].purpose], left)
        turn_s = self.turns.to_rollout(process.gpu for process in group.members)
        if not turn_s:
            self._next_chunk(group, run)
            return
        for process in group.members:
            self.accounts.worker(process.gpu, Phase.RECONFIGURATION, self.host.now)
        turn_s = self.host.noisy(turn_s, group.members[0].node)
        self.host.after(turn_s, self._turned, group, run, run.turn)

    def _turned(self, group: VirtualGroup, run: LeaseWork, turn: int) -> None:
        if group.run is run and run.turn == turn and not run.halting and not group.stopping:
            self._next_chunk(group, run)

    def abandon(self, effect: ef.AbandonLease) -> None:
        """Stop a lease at the next step boundary."""
        group = self._group_of(effect.leader, effect.epoch)
        if group is None or group.run is None or group.run.lease.id != effect.lease or group.run.halting:
            return
        group.run.halting = True
        self._at_boundary(group, self._abandoned, group, group.run)

    def _abandoned(self, group: VirtualGroup, run: LeaseWork) -> None:
        if group.run is run:
            self._halt(group)
            group.run = None
            self._ask(group)

    def _group_of(self, leader: WorkerId, epoch: int) -> VirtualGroup | None:
        process = self.processes.get(leader)
        group = process.group if process is not None else None
        return (
            group
            if group is not None and group.epoch == epoch and group.formed and not group.broken
            else None
        )

    def _next_chunk(self, group: VirtualGroup, run: LeaseWork) -> None:
        first = group.members[0]
        to_finish = min(rollout.steps - start - run.done for rollout, start in run.left.values())
        run.chunk = min(to_finish, self.commit_every - run.done % self.commit_every)
        seconds = self.costs.model.denoise_step_s(
            first.gpu_type, self.costs.pixels, len(run.left), len(group.members)
        )
        run.step_s = self.host.noisy(seconds, first.node)
        run.chunk_start_s, run.turn, run.decoding = self.host.now, run.turn + 1, False
        for process in group.members:
            self.accounts.work(process.gpu, run.unconfirmed, self.host.now)
        self.host.after(run.chunk * run.step_s, self._chunk_done, group, run, run.turn)

    def _chunk_done(self, group: VirtualGroup, run: LeaseWork, turn: int) -> None:
        if group.run is not run or run.turn != turn:
            return
        thaw_s = max(process.frozen_until_s for process in group.members)
        if thaw_s > self.host.now:
            self.host.after(thaw_s - self.host.now + 1e-3, self._chunk_done, group, run, turn)
            return
        run.done, run.chunk = run.done + run.chunk, 0
        finished = [rollout for rollout, start in run.left.values() if start + run.done >= rollout.steps]
        if not finished:
            self._report_progress(group, run, group.members[0])
            self._next_chunk(group, run)
            return
        run.decoding, first = True, group.members[0]
        seconds = self.costs.model.decode_s(first.gpu_type, self.costs.pixels, len(finished))
        self.host.after(self.host.noisy(seconds, first.node), self._decoded, group, run, turn, finished)

    def _decoded(self, group: VirtualGroup, run: LeaseWork, turn: int, finished: list[Rollout]) -> None:
        if group.run is not run or run.turn != turn:
            return
        for rollout in finished:
            del run.left[rollout.id]
        segments = self._closed_segments(group, run)
        names = tuple(rollout.id for rollout in finished)
        first = group.members[0]
        if not run.left:
            group.run = None
        completed = ev.LeaseCompleted(group.leader, run.lease.id, group.epoch, names, run.weights.version)
        self.host.send(completed, first, Receipt(segments, run.phase, run.weights, group))
        if run.left:
            run.committed = run.done
            self._next_chunk(group, run)
        else:
            self._ask(group)

    def _report_progress(self, group: VirtualGroup, run: LeaseWork, speaker: VirtualProcess) -> None:
        if run.done <= run.committed:
            return
        run.committed = run.done
        steps = tuple(
            (name, start + run.done)
            for name, (rollout, start) in run.left.items()
            if start + run.done < rollout.steps
        )
        receipt = Receipt(self._closed_segments(group, run), run.phase, run.weights, group, steps)
        self.host.send(
            ev.LeaseProgressed(group.leader, run.lease.id, group.epoch, run.done), speaker, receipt
        )

    def _closed_segments(self, group: VirtualGroup, run: LeaseWork) -> list[BilledSegment]:
        closed, run.unconfirmed = run.unconfirmed, []
        for process in group.members:
            self.accounts.work(process.gpu, run.unconfirmed, self.host.now)
        return closed

    def _at_boundary(self, group: VirtualGroup, then: Callable[..., None], *args: object) -> None:
        """Finish the current step, begin no other, then call ``then``."""
        run = group.run
        if run is None or run.decoding or not run.step_s:  # no step yet: its GPUs are still switching
            # Let a decode in progress finish.
            gpu_type = group.members[0].gpu_type if group.members else ""
            decoding = run is not None and run.decoding and gpu_type
            rest_s = self.costs.model.decode_s(gpu_type, self.costs.pixels, 1) if decoding else 0.0
            self.host.after(rest_s, then, *args)
            return
        steps = int((self.host.now - run.chunk_start_s) / run.step_s) + 1
        end_s = run.chunk_start_s + min(steps, run.chunk) * run.step_s
        self.host.after(max(0.0, end_s - self.host.now), self._boundary, group, run, run.turn, then, args)

    def _boundary(
        self,
        group: VirtualGroup,
        run: LeaseWork,
        turn: int,
        then: Callable[..., None],
        args: tuple[object, ...],
    ) -> None:
        if group.run is run and run.turn == turn:
            self._halt(group)
        then(*args)

    def _halt(self, group: VirtualGroup) -> None:
        run = group.run
        if run is None:
            return
        if run.chunk and run.step_s > 0:
            # Rounding must not lose a step that ends at this moment.
            steps = int((self.host.now - run.chunk_start_s) / run.step_s + 1e-9)
            run.done += min(steps, run.chunk)
        run.chunk, run.turn = 0, run.turn + 1
        for process in group.members:
            self.accounts.worker(process.gpu, Phase.IDLE, self.host.now)
