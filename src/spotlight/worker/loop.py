"""The loop of a rollout worker: commands in, denoising steps, values and events out.

One thread owns the model and runs the loop. Commands come from any thread and are handled between two steps,
so work joins and leaves at step boundaries:

    while True:
        commands  ─►  obey     weights, groups, leases
        step                   all held rollouts; same weight slot, size and guidance share a forward
        finish                 decode rollouts that are done, store samples, LeaseCompleted
        commit                 leases that are due: store states, LeaseProgressed; report their speed
        pull                   request work when there is room
        deliver                send all of it at once

Invariants:
- Only commands to this process are handled, group commands above the highest epoch seen, pulls not older than
  the newest received, and each grant of the current group once.
- An event is sent only after the values it refers to are durable.
- All steps of a rollout use weights of one digest; a new digest drops every lease.
- Followers wait in a collective only between a lease's grant and its end.
- Held rollouts survive the loss of the group: they are committed when it is stopped, or after a grace period.
- A failed rollout is reported and affects no other. Any other exception ends the loop.
"""

from __future__ import annotations

import logging
import queue
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import assert_never

from torch import nn

from spotlight.rollout.sequence_parallel.lockstep import Follower, Lead
from spotlight.rollout.sequence_parallel.membership import (
    FormationError,
    GroupLostError,
    SpGroup,
    SpMembership,
)
from spotlight.rollout.state import FailedRollout, FinishedRollout, RolloutState
from spotlight.scheduler.effects import AbandonLease, FormGroup, GrantLease, PullWeights, StopGroup
from spotlight.scheduler.events import (
    GroupFormed,
    GroupStopped,
    LeaseCompleted,
    LeaseProgressed,
    PullFailed,
    RolloutFailed,
    WeightsPulled,
)
from spotlight.scheduler.types import LeaseId, PolicyVersion, RolloutId, WorkerId
from spotlight.worker.interfaces import (
    Command,
    FollowLease,
    HeadClient,
    Leave,
    Loader,
    LoadError,
    Patience,
    WorkerDependencies,
)
from spotlight.worker.leases import GroupRole, safe_steps
from spotlight.worker.steps import OpenModel, SpeedMeter, all_finite, by_slot, kind_of
from spotlight.worker.stored_rollouts import ReportOutbox, RolloutStarter
from spotlight_rewards.base.device_errors import end_if_lost, is_out_of_memory

log = logging.getLogger("spotlight.rollout")


class WorkerLoop:
    """See the module docstring.

    Args:
        epoch: of this process; commands to an earlier process of this worker are ignored.
        commit_every: steps between two commits of a lease.
        capacity: rollouts held at once; None: as many as fit into one forward.
        commands: a queue that others hold, too; default: a new one.
        first: a command to obey before them.

    Attributes:
        commands: for the next step boundary; any thread may put.
        failure: traceback of the exception that ended ``run``.
    """

    def __init__(
        self,
        worker: WorkerId,
        epoch: int,
        head: HeadClient,
        loader: Loader,
        dependencies: WorkerDependencies,
        commit_every: int,
        *,
        capacity: int | None = None,
        patience: Patience | None = None,
        commands: queue.SimpleQueue[Command] | None = None,
        first: Command | None = None,
    ) -> None:
        self._capacity = dependencies.engine.max_batch if capacity is None else capacity
        for name, value in (("commit_every", commit_every), ("capacity", self._capacity)):
            if value < 1:
                raise ValueError(f"worker's {name} is {value}; expected at least 1")
        self.worker, self.epoch = worker, epoch
        self.failure: str | None = None
        self._loader, self._dependencies, self._commit_every = loader, dependencies, commit_every
        self._patience, self._first = patience or Patience(), first
        self.commands: queue.SimpleQueue[Command] = commands or queue.SimpleQueue()
        self._outbox = ReportOutbox(worker, head)
        self._meter = SpeedMeter(dependencies.engine, self._outbox.send)
        self._starter = RolloutStarter(head, dependencies.engine, dependencies.recipes)
        # Not under autocast: merged weights would be rounded to half precision, a separate adapter is not.
        self._merged = dependencies.engine.autocast is None
        self._model = OpenModel(dependencies.slots, merged=self._merged)
        self._membership: SpMembership | None = None
        self._role: GroupRole | None = None
        self._fence = 0
        self._ordered = self._loaded = (-1, -1)  # (lineage, version) requested, and loaded
        self._weights_digest: str | None = None
        self._leaving = False

    @property
    def busy(self) -> bool:
        """Whether there is a step to take or a leader to follow."""
        role = self._role
        return role is not None and role.busy

    # -- the work thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until told to leave.

        Raises:
            HeadLostError: values can no longer be stored.
            Exception: anything unexpected; ``failure`` has its traceback.
        """
        try:
            while not self._leaving:
                self.turn()
        except BaseException:
            self.failure = traceback.format_exc()
            raise
        finally:
            self._part()

    def turn(self) -> None:
        """One iteration; waits for a command when idle."""
        commands = self._commands(self._wait_s())
        # Look ahead for the newest pull: older ones in the same batch of commands are skipped.
        pulls = [c for c in commands if isinstance(c, PullWeights) and c.epoch == self.epoch]
        self._ordered = max([self._ordered, *((pull.lineage, int(pull.version)) for pull in pulls)])
        for command in commands:
            self._obey(command)
        role = self._role
        if role is not None and role.lost_at_s is not None:
            if time.monotonic() >= role.lost_at_s + self._patience.grace_s:
                self._stop(StopGroup(role.leader, role.epoch, (self.worker,)))
        elif role is not None and role.called > role.ended:
            self._follow(role)
        elif role is not None and len(role.leases):
            with self._meter.step(role, self._membership.ranks_per_forward if self._membership else 1):
                self._step(role)
        self._pull_work()
        self._deliver()
        self._rest()

    def _wait_s(self) -> float | None:
        """Seconds to the next timer: 0 with work to do, None without any timer."""
        role, times = self._role, [self._outbox.due_s]
        if role is not None:
            if role.busy:
                return 0
            if role.lost_at_s is not None:
                times.append(role.lost_at_s + self._patience.grace_s)
            elif role.leads:
                times.append(role.ask_again_s)
        due_s = min((at_s for at_s in times if at_s is not None), default=None)
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def _commands(self, wait_s: float | None) -> list[Command]:
        """All waiting commands; if there are none, wait for one (None: forever)."""
        first, self._first = self._first, None
        taken = [] if first is None else [first]
        with suppress(queue.Empty):
            if not taken:
                taken.append(self.commands.get(block=wait_s != 0, timeout=wait_s))
            while True:
                taken.append(self.commands.get_nowait())
        return taken

    def _obey(self, command: Command) -> None:
        match command:
            case PullWeights():
                self._load(command)
            case FormGroup():
                self._form(command)
            case StopGroup():
                self._stop(command)
            case GrantLease():
                self._begin(command)
            case AbandonLease(leader, epoch, lease):
                if (role := self._role_in(leader, epoch)) is not None:
                    role.leases.drop(lease)
            case FollowLease(leader, epoch, lease):
                if (role := self._role_in(leader, epoch)) is not None and not role.leads:
                    role.called = max(role.called, lease)
            case Leave():
                self._leaving = True
            case _:
                assert_never(command)

    def _role_in(self, leader: WorkerId, epoch: int) -> GroupRole | None:
        role = self._role
        found = role is not None and (role.leader, role.epoch) == (leader, epoch) and not role.lost
        return role if found else None

    def _deliver(self) -> None:
        self._outbox.deliver(self._weights_digest or "")

    # -- weights ---------------------------------------------------------------------------------------

    def _load(self, pull: PullWeights) -> None:
        order = (pull.lineage, int(pull.version))
        if pull.epoch != self.epoch or order < self._ordered:
            return
        if order != self._loaded:
            self._quiesce()
            try:
                weights_digest = self._loader.load(pull)
            except LoadError:
                failed = PullFailed(self.worker, self.epoch, pull.version, pull.lineage)
                self._outbox.send_later(failed, self._patience.pause_s)
                return
            self._bind(weights_digest, order)
        self._outbox.send(WeightsPulled(self.worker, self.epoch, pull.version, pull.lineage))

    def _quiesce(self) -> None:
        """Before weights change, stop using them and release followers from their collective."""
        role = self._role
        if role is not None and role.others_follow:
            self._commit(role, role.leases.ids)
            role.leases.let_go()
            role.asked = 0
        self._deliver()
        self._rest()
        self._model.close()

    def _bind(self, weights_digest: str, order: tuple[int, int]) -> None:
        """Record new weights; leases begun with others cannot be finished."""
        changed = weights_digest != self._weights_digest or order[1] != self._loaded[1]
        self._weights_digest, self._loaded = weights_digest, order
        if changed and self._role is not None:
            self._role.leases.let_go()
            self._role.asked = 0

    @property
    def _version(self) -> PolicyVersion:
        return PolicyVersion(self._loaded[1])

    # -- groups ----------------------------------------------------------------------------------------

    def _form(self, command: FormGroup) -> None:
        role = self._role
        if role is not None and role.epoch == command.epoch:
            if role.leads and not role.lost:
                self._formed(role)
            return
        if command.epoch <= self._fence:
            if command.epoch == self._fence:  # it failed or ended, and that reply was lost
                self._outbox.send(GroupStopped(command.leader, command.epoch))
            return
        self._fence = command.epoch
        self._part()
        if len(command.members) > 1:
            try:
                self._meet(SpGroup(command.epoch, command.members))
            except (FormationError, ConnectionError):
                stopped = GroupStopped(command.leader, command.epoch)
                self._outbox.send_later(stopped, self._patience.pause_s)
                return
        leads = command.members[0] == self.worker
        self._role = GroupRole(command.leader, command.epoch, len(command.members), leads)
        if self._membership is not None:
            self._role.batch = self._membership.batch
        if leads:
            self._formed(self._role)

    def _formed(self, role: GroupRole) -> None:
        self._outbox.send(GroupFormed(role.leader, role.epoch))
        role.asked = 0  # so that a pull is sent along

    def _meet(self, group: SpGroup) -> None:
        if self._membership is None:
            self._membership = self._dependencies.membership()
        self._membership.form(group, self._dependencies.engine.max_batch)

    def _stop(self, command: StopGroup) -> None:
        """Leave the group. The first member of the command commits and answers for all.

        A member that lost its group also commits, since the first may be gone too, but answers only after the
        grace period, because the answer frees all members.
        """
        self._fence = max(self._fence, command.epoch)
        stopped = GroupStopped(command.leader, command.epoch)
        speaks, role = command.members[0] == self.worker, self._role
        if role is not None and role.epoch == command.epoch:
            if speaks or role.lost:
                self._commit(role, role.leases.ids)
                self._deliver()
            if role.lost and not speaks:
                self._outbox.send_later(stopped, self._patience.grace_s)
            self._part()
        if speaks:
            self._outbox.send(stopped)

    def _part(self) -> None:
        role, self._role = self._role, None
        self._model.close()
        if role is not None and role.others_follow:
            self._release(role)
        if self._membership is not None:
            self._membership.part()
        self._dependencies.rested()

    def _release(self, role: GroupRole) -> None:
        """Let followers return to their inboxes; failing that, the group is lost."""
        assert self._membership is not None
        lead = role.lead or Lead(self._dependencies.engine, self._membership)
        role.lead, role.ended = None, role.leases.seen
        try:
            lead.end(role.ended)
        except GroupLostError:
            role.lose()

    # -- leases ----------------------------------------------------------------------------------------

    def _begin(self, grant: GrantLease) -> None:
        lease = grant.lease
        role = self._role_in(lease.worker, lease.epoch)
        if role is None or not role.leads or lease.id <= role.leases.seen:
            return
        role.leases.seen, role.asked = lease.id, 0
        if self._weights_digest is None or any(
            rollout.version != self._version for rollout in grant.rollouts
        ):
            return  # dropped: the next pull reports it as not held
        states, failed = self._starter.start(grant.rollouts, grant.resume.keys(), self._weights_digest)
        role.leases.add(lease.id, states, grant.resume)
        for failure in failed:
            self._fail(role, lease.id, failure)

    def _fail(self, role: GroupRole, lease: LeaseId, failed: FailedRollout) -> None:
        event = RolloutFailed(self.worker, lease, role.epoch, failed.rollout.id, failed.reason)
        self._outbox.send(event)

    def _step(self, role: GroupRole) -> None:
        leases = role.leases
        running = [state for state in leases.states if not state.done]
        due: list[LeaseId] = []
        if running:
            try:
                with self._dependencies.around(kind_of(running)):
                    self._advance(role, running)
            except GroupLostError:
                role.lose()
            except RuntimeError as error:
                self._leave_room(role, len(running), error)
            if role.lost:
                return
            due = leases.step_taken(self._commit_every)
        self._finish(role)
        self._commit(role, due)

    def _leave_room(self, role: GroupRole, rollouts: int, error: RuntimeError) -> None:
        """Lose the group for lack of memory: the next one takes half as many rollouts at once.

        Raises:
            RuntimeError: ``error``: there is no half, it was not in a step that all take, or this worker is
                alone.
        """
        if role.degree == 1 or not is_out_of_memory(error):
            raise error
        assert self._membership is not None
        in_step = self._membership.group.degree == 1  # what fails within an exchange has left the group
        self._membership.part()
        tried = min(role.batch, rollouts)
        if not in_step or tried <= 1:
            raise error
        log.warning("%d rollouts at once are too many for the group of %s: %s", tried, role.leader, error)
        traceback.clear_frames(error.__traceback__)  # they hold tensors of the step
        self._dependencies.engine.take_fewer(tried)
        role.lose()

    def _advance(self, role: GroupRole, running: Sequence[RolloutState]) -> None:
        engine, leases = self._dependencies.engine, role.leases
        for slot, states in by_slot(running, self._dependencies.slot_of, self._model.slot):
            model = self._model.use(slot)
            if role.degree == 1:
                leases.advance(self._stepped(model, states))
                continue
            if role.lead is None:
                assert self._membership is not None
                role.lead = Lead(engine, self._membership, self._weights_digest or "")
            names = {state.rollout.id for state in states}
            others = [state for state in leases.states if state.rollout.id not in names]
            leases.advance(role.lead.step(slot, model, states, others=others, claims=leases.claims))

    def _stepped(self, model: nn.Module, states: Sequence[RolloutState]) -> list[RolloutState]:
        engine = self._dependencies.engine
        while True:  # a device with less memory than others finds its batch size here
            try:
                return engine.step(model, states)
            except RuntimeError as error:
                if engine.max_batch == 1 or not is_out_of_memory(error):
                    raise
                log.warning("%d rollouts at once are too many here: %s", engine.max_batch, error)
            engine.take_fewer()

    def _finish(self, role: GroupRole) -> None:
        completed: dict[LeaseId, list[RolloutId]] = {}
        done = [state for state in role.leases.states if state.done]
        for result in self._decoded(done):
            lease = role.leases.remove(result.rollout.id)
            if isinstance(result, FailedRollout):
                self._fail(role, lease, result)
            else:
                self._outbox.keep_finished(result)
                completed.setdefault(lease, []).append(result.rollout.id)
        for lease, names in completed.items():
            event = LeaseCompleted(role.leader, lease, role.epoch, tuple(names), self._version)
            self._outbox.send(event)

    def _decoded(self, done: list[RolloutState]) -> list[FinishedRollout | FailedRollout]:
        try:
            return self._dependencies.engine.finish(done) if done else []
        except Exception as error:  # noqa: BLE001 - whatever a decoder raises concerns this rollout alone
            end_if_lost(error)  # but for that: it would fail every rollout held
            if len(done) == 1:
                return [FailedRollout(done[0].rollout, f"cannot be decoded: {error}")]
        return [result for state in done for result in self._decoded([state])]

    def _commit(self, role: GroupRole, ids: Sequence[LeaseId]) -> None:
        leases, safe = role.leases, []
        states = [state for lease in ids for state in leases.of_lease(lease)]
        for state, finite in zip(states, all_finite(states), strict=True):
            if finite:
                safe.append(state)
            else:
                lease = leases.remove(state.rollout.id)
                why = f"the latents are not finite at step {state.step} of {state.rollout.steps}"
                self._fail(role, lease, FailedRollout(state.rollout, why))
        self._outbox.keep_progress(safe)
        for lease, steps in safe_steps(safe, leases.claims).items():
            if leases.news(lease, steps):
                self._outbox.send(LeaseProgressed(role.leader, lease, role.epoch, steps))

    def _follow(self, role: GroupRole) -> None:
        assert self._membership is not None
        self._deliver()
        follower = Follower(
            self._dependencies.engine,
            self._membership,
            self._dependencies.recipes,
            self._use,
            self._weights_digest or "",
        )
        try:
            follower.run()
            role.ended = follower.seen
        except GroupLostError:
            role.inherit(follower)
            role.lose()
        except RuntimeError as error:
            role.inherit(follower)
            self._leave_room(role, follower.running, error)

    def _use(self, slot: str) -> AbstractContextManager[nn.Module]:
        dependencies = self._dependencies
        return dependencies.slots.use(dependencies.known_slot(slot), merged=self._merged)

    # -- between leases --------------------------------------------------------------------------------

    def _pull_work(self) -> None:
        if self._role is not None:
            capacity = min(self._capacity, self._dependencies.engine.max_batch, self._role.batch)
            pull = self._role.pull(capacity, self._patience.ask_again_s)
            if pull is not None:
                self._outbox.send(pull)

    def _rest(self) -> None:
        """Without work, keep no collective open and no weights merged."""
        role = self._role
        if role is not None and not len(role.leases):
            self._model.close()
            if role.others_follow:
                self._release(role)
            self._dependencies.rested()
