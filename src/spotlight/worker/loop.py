"""What the process of a rollout worker does: commands in, steps, values and events out.

One thread owns the model and runs the loop; any thread may tell it something. Between two denoising steps it
obeys what it was told, so new work joins and old work leaves at step boundaries:

    while True:
        commands  ─►  obey     weights, groups, leases
        step                   every rollout held: those of one weight slot, size and guidance share forwards
        finish                 rollouts that are done: decoded, their samples delivered, LeaseCompleted
        commit                 leases whose turn it is: states by value, LeaseProgressed
        pull                   when there is room for more
        deliver                all of it at once

Invariants:
- It obeys commands to its own process only, group commands above the highest group epoch it heard of, weight
  pulls not below the newest it was told, and grants of its present group, each once.
- Nothing is told before the values it speaks of are safe.
- All steps of a rollout are made by weights of one digest: when that changes, every lease is let go.
- Followers of a group wait in a collective only between a lease's grant and its end.
- What is held outlives the loss of the group: it is committed when the group is to stop, or after a grace.
- One rollout's failure is told and leaves the others alone. Any other exception ends the loop.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from typing import assert_never

import torch
from torch import nn

from spotlight.rollout.sequence_parallel.lockstep import Follower, Lead
from spotlight.rollout.sequence_parallel.membership import FormationError, Group, GroupLostError, Membership
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
from spotlight.scheduler.types import LeaseId, Phase, PolicyVersion, RolloutId, WorkerId
from spotlight.worker.batching import OpenModel, by_slot
from spotlight.worker.beat import PHASE_OF, Beat, Pulse
from spotlight.worker.inbox import Inbox
from spotlight.worker.interfaces import (
    Command,
    FollowLease,
    Hands,
    Home,
    Leave,
    Loader,
    LoadError,
    Patience,
)
from spotlight.worker.leases import safe_steps
from spotlight.worker.outbox import Outbox
from spotlight.worker.post import Post
from spotlight.worker.resume import Starter

log = logging.getLogger("spotlight.rollout")


class WorkerLoop:
    """See the module's docstring.

    Args:
        epoch: of this process; commands to an older one of the same worker are not for it.
        commit_every: steps of a lease between two commits of its progress.
        capacity: rollouts held at once; None is what one forward takes.
        conditions_kept: prompts whose embeddings are held in memory.

    Attributes:
        failure: the traceback of the exception that ended ``run``.
    """

    def __init__(
        self,
        worker: WorkerId,
        epoch: int,
        home: Home,
        loader: Loader,
        hands: Hands,
        commit_every: int,
        *,
        capacity: int | None = None,
        patience: Patience | None = None,
        conditions_kept: int = 256,
    ) -> None:
        self._capacity = hands.engine.max_batch if capacity is None else capacity
        for name, value in (("commit_every", commit_every), ("capacity", self._capacity)):
            if value < 1:
                raise ValueError(f"worker's {name} is {value}; expected at least 1")
        self.worker, self.epoch = worker, epoch
        self.failure: str | None = None
        self._loader, self._hands, self._commit_every = loader, hands, commit_every
        self._patience = patience or Patience()
        self._inbox, self._outbox, self._pulse = Inbox(), Outbox(worker, home), Pulse()
        self._starter = Starter(home, hands.engine, hands.recipes, conditions_kept)
        # Not under autocast: there the sum would be rounded to half precision, the adapter alone is not.
        self._merged = hands.engine.autocast is None
        self._model = OpenModel(hands.slots, merged=self._merged)
        self._membership: Membership | None = None
        self._post: Post | None = None
        self._fence = 0
        self._ordered = self._loaded = (-1, -1)  # (lineage, version) told, and bound
        self._mark: str | None = None
        self._leaving = False

    # -- any thread ------------------------------------------------------------------------------------

    def tell(self, command: Command) -> None:
        """Have a command obeyed at the next step boundary; returns at once."""
        self._inbox.put(command)

    @property
    def beat(self) -> Beat:
        """What the worker is doing."""
        return self._pulse.beat

    @property
    def busy(self) -> bool:
        """Whether there is a step to take, or a leader to follow."""
        post = self._post
        return post is not None and post.busy

    # -- the work thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until told to leave.

        Raises:
            HomeLostError: nothing can be kept any more.
            Exception: whatever was not foreseen; ``failure`` has its traceback.
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
        """One round of the module's docstring, for those who drive the loop themselves.

        Waits for a command when there is nothing else to do.
        """
        wait_s = self._wait_s()
        if wait_s != 0:
            self._pulse.doing(self._idle_phase())
        commands = self._inbox.take(wait_s)
        pulls = [c for c in commands if isinstance(c, PullWeights) and c.epoch == self.epoch]
        self._ordered = max([self._ordered, *((pull.lineage, int(pull.version)) for pull in pulls)])
        for command in commands:
            self._obey(command)
        post = self._post
        if post is not None and post.lost_at_s is not None:
            if time.monotonic() >= post.lost_at_s + self._patience.grace_s:
                self._stop(StopGroup(post.leader, post.epoch, (self.worker,)))
        elif post is not None and post.called > post.ended:
            self._follow(post)
        elif post is not None and len(post.held):
            self._step(post)
        self._pull_work()
        self._deliver()
        self._rest()

    def _wait_s(self) -> float | None:
        """How long nothing needs to be done, unless something is told. None: for ever."""
        post, times = self._post, [self._outbox.due_s]
        if post is not None:
            if post.busy:
                return 0
            if post.lost_at_s is not None:
                times.append(post.lost_at_s + self._patience.grace_s)
            elif post.leads:
                times.append(post.ask_again_s)
        due_s = min((at_s for at_s in times if at_s is not None), default=None)
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def _idle_phase(self) -> Phase:
        if self._mark is None:
            return Phase.SETUP
        return Phase.RECONFIGURATION if self._post is None or self._post.lost else Phase.IDLE

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
                if (post := self._post_of(leader, epoch)) is not None:
                    post.held.drop(lease)
            case FollowLease(leader, epoch, lease):
                if (post := self._post_of(leader, epoch)) is not None and not post.leads:
                    post.called = max(post.called, lease)
            case Leave():
                self._leaving = True
            case _:
                assert_never(command)

    def _post_of(self, leader: WorkerId, epoch: int) -> Post | None:
        """This worker's place in that group, while the group can work."""
        post = self._post
        found = post is not None and (post.leader, post.epoch) == (leader, epoch) and not post.lost
        return post if found else None

    def _deliver(self) -> None:
        self._outbox.deliver(self._mark or "")

    # -- weights ---------------------------------------------------------------------------------------

    def _load(self, pull: PullWeights) -> None:
        order = (pull.lineage, int(pull.version))
        if pull.epoch != self.epoch or order < self._ordered:
            return
        if order != self._loaded:
            self._quiesce()
            self._pulse.doing(Phase.SETUP if self._mark is None else Phase.WEIGHT_SYNC)
            try:
                digest = self._loader.load(pull)
            except LoadError as error:
                if not error.intact:
                    self._bind(None, (-1, -1))
                failed = PullFailed(self.worker, self.epoch, pull.version, pull.lineage)
                self._outbox.tell_later(failed, self._patience.pause_s)
                return
            self._bind(digest, order)
        self._outbox.tell(WeightsPulled(self.worker, self.epoch, pull.version, pull.lineage))

    def _quiesce(self) -> None:
        """Make ready for other weights: nobody uses these, and nobody waits in a collective meanwhile."""
        post = self._post
        if post is not None and post.others_follow:
            self._commit(post, post.held.leases)
            post.held.let_go()
            post.asked = 0
        self._deliver()
        self._rest()
        self._model.close()

    def _bind(self, digest: str | None, order: tuple[int, int]) -> None:
        """Other weights are there: no lease under the former can be finished."""
        changed = digest != self._mark or order[1] != self._loaded[1]
        self._mark, self._loaded = digest, order
        if changed and self._post is not None:
            self._post.held.let_go()
            self._post.asked = 0

    @property
    def _version(self) -> PolicyVersion:
        return PolicyVersion(self._loaded[1])

    # -- groups ----------------------------------------------------------------------------------------

    def _form(self, command: FormGroup) -> None:
        post = self._post
        if post is not None and post.epoch == command.epoch:
            if post.leads and not post.lost:
                self._formed(post)
            return
        if command.epoch <= self._fence:
            if command.epoch == self._fence:  # it failed, or is over: that answer was lost
                self._outbox.tell(GroupStopped(command.leader, command.epoch))
            return
        self._fence = command.epoch
        self._part()
        self._pulse.doing(Phase.RECONFIGURATION)
        if len(command.members) > 1:
            try:
                self._meet(Group(command.epoch, command.members))
            except (FormationError, ConnectionError):
                stopped = GroupStopped(command.leader, command.epoch)
                self._outbox.tell_later(stopped, self._patience.pause_s)
                return
        leads = command.members[0] == self.worker
        self._post = Post(command.leader, command.epoch, len(command.members), leads)
        if leads:
            self._formed(self._post)

    def _formed(self, post: Post) -> None:
        self._outbox.tell(GroupFormed(post.leader, post.epoch))
        post.asked = 0  # a pull goes along

    def _meet(self, group: Group) -> None:
        if self._membership is None:
            self._membership = self._hands.membership()
        self._membership.form(group)

    def _stop(self, command: StopGroup) -> None:
        """Leave the group. The first who is told so commits what it holds, and answers for all.

        So does, unasked, whoever lost the group: the first may have been lost too. It answers only after the
        grace, for an answer frees all of them.
        """
        self._fence = max(self._fence, command.epoch)
        stopped = GroupStopped(command.leader, command.epoch)
        speaks, post = command.members[0] == self.worker, self._post
        if post is not None and post.epoch == command.epoch:
            if speaks or post.lost:
                self._commit(post, post.held.leases)
                self._deliver()
            if post.lost and not speaks:
                self._outbox.tell_later(stopped, self._patience.grace_s)
            self._part()
        if speaks:
            self._outbox.tell(stopped)

    def _part(self) -> None:
        """Stand alone, holding nothing. Followers are told, as far as they can be."""
        post, self._post = self._post, None
        self._model.close()
        if post is not None and post.others_follow:
            self._release(post)
        if self._membership is not None:
            self._membership.part()

    def _release(self, post: Post) -> None:
        """Let the followers return to their inboxes. That the group is lost shows in ``post``."""
        assert self._membership is not None
        lead = post.lead or Lead(self._hands.engine, self._membership)
        post.lead, post.ended = None, post.held.seen
        try:
            lead.end(post.ended)
        except GroupLostError:
            post.lose()

    # -- leases ----------------------------------------------------------------------------------------

    def _begin(self, grant: GrantLease) -> None:
        lease = grant.lease
        post = self._post_of(lease.worker, lease.epoch)
        if post is None or not post.leads or lease.id <= post.held.seen:
            return
        post.held.seen, post.asked = lease.id, 0
        if self._mark is None or any(rollout.version != self._version for rollout in grant.rollouts):
            return  # let go: the next pull says so
        states, failed = self._starter.start(grant.rollouts, grant.resume.keys(), self._mark)
        post.held.add(lease.id, states, grant.resume)
        for failure in failed:
            self._fail(post, lease.id, failure)

    def _fail(self, post: Post, lease: LeaseId, failed: FailedRollout) -> None:
        event = RolloutFailed(self.worker, lease, post.epoch, failed.rollout.id, failed.reason)
        self._outbox.tell(event)

    def _step(self, post: Post) -> None:
        held = post.held
        running = [state for state in held.states if not state.done]
        due: list[LeaseId] = []
        if running:
            self._pulse.doing(PHASE_OF[running[0].rollout.purpose])
            try:
                self._advance(post, running)
            except GroupLostError:
                post.lose()
                return
            self._pulse.stepped()
            due = held.step_taken(self._commit_every)
        self._finish(post)
        self._commit(post, due)

    def _advance(self, post: Post, running: Sequence[RolloutState]) -> None:
        """One step of all that runs, slot by slot."""
        engine, held = self._hands.engine, post.held
        for slot, states in by_slot(running, self._hands.slot_of, self._model.slot):
            model = self._model.use(slot)
            if post.degree == 1:
                held.advance(self._stepped(model, states))
                continue
            if post.lead is None:
                assert self._membership is not None
                post.lead = Lead(engine, self._membership, self._mark or "")
            names = {state.rollout.id for state in states}
            others = [state for state in held.states if state.rollout.id not in names]
            held.advance(post.lead.step(slot, model, states, others=others, claims=held.claims))

    def _stepped(self, model: nn.Module, states: Sequence[RolloutState]) -> list[RolloutState]:
        """A device with less memory than others finds out here how many rollouts it holds."""
        engine = self._hands.engine
        while True:
            try:
                return engine.step(model, states)
            except torch.OutOfMemoryError as error:
                if engine.max_batch == 1:
                    raise
                log.warning("%d rollouts at once are too many here: %s", engine.max_batch, error)
            engine.take_fewer()

    def _finish(self, post: Post) -> None:
        """Rollouts whose steps are all taken leave at once."""
        completed: dict[LeaseId, list[RolloutId]] = {}
        for result in self._decoded([state for state in post.held.states if state.done]):
            lease = post.held.remove(result.rollout.id)
            if isinstance(result, FailedRollout):
                self._fail(post, lease, result)
            else:
                self._outbox.keep_finished(result)
                completed.setdefault(lease, []).append(result.rollout.id)
        for lease, names in completed.items():
            event = LeaseCompleted(post.leader, lease, post.epoch, tuple(names), self._version)
            self._outbox.tell(event)

    def _decoded(self, done: list[RolloutState]) -> list[FinishedRollout | FailedRollout]:
        try:
            return self._hands.engine.finish(done) if done else []
        except Exception as error:  # noqa: BLE001 - whatever a decoder raises concerns this rollout alone
            if len(done) == 1:
                return [FailedRollout(done[0].rollout, f"cannot be decoded: {error}")]
        return [result for state in done for result in self._decoded([state])]

    def _commit(self, post: Post, leases: Sequence[LeaseId]) -> None:
        """Have the states of these leases kept, and tell how many steps of each are safe."""
        held, safe = post.held, []
        for state in [state for lease in leases for state in held.of_lease(lease)]:
            if bool(torch.isfinite(state.latents).all()):
                self._outbox.keep_progress(state)
                safe.append(state)
            else:
                lease = held.remove(state.rollout.id)
                why = f"the latents are not finite at step {state.step} of {state.rollout.steps}"
                self._fail(post, lease, FailedRollout(state.rollout, why))
        for lease, steps in safe_steps(safe, held.claims).items():
            if held.news(lease, steps):
                self._outbox.tell(LeaseProgressed(post.leader, lease, post.epoch, steps))

    def _follow(self, post: Post) -> None:
        """Do what the leader says until it has no work."""
        assert self._membership is not None
        self._deliver()
        follower = Follower(
            self._hands.engine,
            self._membership,
            self._hands.recipes,
            lambda slot: self._hands.slots.use(self._hands.known_slot(slot), merged=self._merged),
            self._mark or "",
            self._following,
        )
        try:
            follower.run()
            post.ended = follower.seen
        except GroupLostError:
            post.inherit(follower)
            post.lose()

    def _following(self, states: Sequence[RolloutState]) -> None:
        self._pulse.doing(PHASE_OF[states[0].rollout.purpose])
        self._pulse.stepped()

    # -- between leases --------------------------------------------------------------------------------

    def _pull_work(self) -> None:
        if self._post is not None:
            capacity = min(self._capacity, self._hands.engine.max_batch)
            pull = self._post.pull(capacity, self._patience.ask_again_s)
            if pull is not None:
                self._outbox.tell(pull)

    def _rest(self) -> None:
        """Without work no collective stays open, and no weights merged."""
        post = self._post
        if post is not None and not len(post.held):
            self._model.close()
            if post.others_follow:
                self._release(post)
