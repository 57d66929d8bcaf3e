"""Configuration of the fleet: machines, prices and timeouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from spotlight.config.section import Section
from spotlight.config.sections.learner_section import divisors_near
from spotlight.config.sections.target import TargetConfig
from spotlight.registry import CLOUDS, FAMILIES
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

_GROWS_AFTER_S = 60.0
_TIMES_ASKED = 3
"""Commands to form or leave a group are sent this often before its members are given up."""
_BEATS_MIN = 3
"""A lease must span this many heartbeats, so that a lost or late one costs no work."""


class LocalNodesConfig(Section):
    """Reserved nodes of the cluster started on this machine (no ``address``)."""

    rollout_slots: Annotated[int, Field(ge=0)] = 0
    """Reserved slots for rollouts, in addition to the learner's."""
    threads: PositiveInt | None = None
    """Threads per worker, and per learner rank, on a CPU slot; default: an equal share of the machine's cores
    for each worker, and for each rank.
    """


class SpotConfig(Section):
    """Preemptible nodes."""

    price_usd_h: Annotated[float, Field(ge=0)] = 0.015
    """Dollars per hour per slot (GPU) of a spot node."""
    nodes: Annotated[int, Field(ge=0)] | None = None
    """Emulated spot nodes on this machine that are never preempted; default: 2. Not with a ``trace``, which
    defines the nodes itself. With a ``fleet.target``: those at the beginning.
    """
    slots: PositiveInt = 1
    """CPU slots per emulated spot node, each standing for a GPU; unless the trace gives a number of GPUs."""
    trace: Path | None = None
    """Spot trace that emulated nodes follow: they join, get notices and are killed (SIGKILL) as it says. A
    file, or the built-in ``minute``: two nodes at a time, the older of which is preempted every minute.
    It starts with the run; after its end nodes stay as they are.
    """
    speed: PositiveFloat = 1.0
    """Factor by which the trace is played faster."""
    notice_s: Annotated[float, Field(ge=0)] | None = 10.0
    """Seconds from an emulated node's preemption notice to its end; 0: no notice; null: as in the trace."""

    @property
    def emulated_nodes(self) -> int:
        """``nodes``, decided, where no trace says which there are."""
        return 2 if self.nodes is None else self.nodes


class SequenceParallelConfig(Section):
    """GPUs of one node that denoise the same rollouts together (Ulysses)."""

    degrees: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """Allowed group sizes, ascending; each must divide the model's attention heads. The smallest must have
    enough memory; larger ones are for large images and for the tail of a batch.
    """
    pays_from_pixels: PositiveInt = 1024 * 1024
    """Pictures of at least this many pixels (videos: times latent frames) benefit from a higher degree."""
    guidance: bool = False
    """Whether the halves of a group make one of guidance's two passes each (``rollout.true_cfg_scale`` above
    1), and exchange velocities each step. Within a half the forward is split over half the degree, which
    must divide the attention heads; degrees above 1 must be even.
    """

    def split(self, degree: int) -> int:
        """GPUs that a forward is split over in a group of ``degree``."""
        return degree // 2 if self.guidance and degree > 1 else degree

    def guidance_problems(self, run: RunConfig) -> Iterator[Problem]:
        """Why guidance cannot be made in parallel."""
        if not self.guidance:
            return
        cached = None if run.exploration is None else run.exploration.step_cache
        scale, degrees = run.rollout.true_cfg_scale, list(self.degrees)
        fits = degrees[-1] > 1 and not any(degree % 2 for degree in degrees if degree > 1)
        for key, found, wanted, right in (
            (
                "rollout.true_cfg_scale",
                f"{scale:g}",
                "above 1: without guidance there is one pass",
                scale > 1,
            ),
            ("fleet.sequence_parallel.degrees", degrees, "1 and even degrees, or even ones", fits),
            ("exploration.step_cache", cached, "nothing: a rank keeps residuals of one pass", cached is None),
        ):
            if not right:
                yield Problem(
                    key, str(found), f"{wanted} (with fleet.sequence_parallel.guidance)",
                    "Change it, or leave fleet.sequence_parallel.guidance out.",
                )  # fmt: skip


class NoticesConfig(Section):
    """How nodes learn of their preemption."""

    cloud: Annotated[str, AfterValidator(CLOUDS.known("auto", "none"))] = "auto"
    """Whose metadata service each node polls; ``auto`` detects the cloud on the node."""
    endpoint: str | None = None
    """Address of the metadata service; default: the cloud's own."""
    sigterm_grace_s: Annotated[float, Field(ge=0)] | None = 30.0
    """Seconds from SIGTERM to SIGKILL. SIGTERM to a node's agent counts as a notice, too (Kubernetes,
    SLURM); null: it does not. Emulated nodes on this machine use ``fleet.spot.notice_s`` instead.
    """


class OnDemandConfig(Section):
    """A node at the full price (``fleet.price_usd_h``) for a learner that finds no spot node."""

    after_s: Annotated[float, Field(ge=0)] = 300.0
    """It is taken when the learner has waited this long."""
    back_after_s: Annotated[float, Field(ge=0)] = 60.0
    """The learner leaves it when spot nodes have had room for this long; then it is given back."""
    start: str | None = None
    """Shell command that starts a node and makes it join the cluster as ``$SPOTLIGHT_NODE``, with
    ``$SPOTLIGHT_SLOTS`` GPUs. Only with ``fleet.address``: a cluster on this machine emulates the node.
    """
    stop: str | None = None
    """Shell command that ends the node ``$SPOTLIGHT_NODE``; also called when the run ends."""


class FleetConfig(Section):
    """Where the run executes, and what that costs."""

    driver: Literal["inline", "ray"] = "inline"
    """``inline``: in this process (or torchrun's). ``ray``: on a cluster whose spot nodes may vanish."""
    address: str | None = None
    """Address of a running Ray cluster (``auto``, host:port); default: start one on this machine."""
    price_usd_h: Annotated[float, Field(ge=0)] = 0.05
    """Dollars per hour per worker (a reserved GPU, or this machine's CPU). Every billed second is charged."""
    learner_ranks: PositiveInt = 1
    """Slots that train together (FSDP2)."""
    learner_ranks_min: PositiveInt | None = None
    """A learner on spot nodes with room for fewer than ``learner_ranks`` is formed with the largest divisor
    of it that fits, down to this number. Gradients are the same up to rounding; with ``learner.shard=all``
    each rank holds more of the model. Default: it waits for ``learner_ranks``.
    """
    learner_grows_after_s: Annotated[float, Field(ge=0)] = _GROWS_AFTER_S
    """A learner of fewer ranks moves to more when spot nodes have had room for them so long, beside it."""
    learner_placement: Literal["reserved", "spot", "spot_then_on_demand"] = "reserved"
    """Nodes that the learner is on. ``spot``: it moves to another spot node when its own gets a notice
    or is lost, and waits for one where there is none. Its state is then saved after every iteration, behind
    the rollouts of the next, into ``runs_dir``, which spot nodes must share with the head; a loss costs at
    most the training of one iteration. Only the head needs a reserved node, without GPUs. LoRA only.
    ``spot_then_on_demand``: instead of waiting on, it takes a node on demand (``fleet.on_demand``).
    """
    on_demand: OnDemandConfig = OnDemandConfig()
    """When a learner on spot nodes takes a node on demand, and how."""
    local: LocalNodesConfig = LocalNodesConfig()
    """Reserved nodes of a cluster on this machine."""
    spot: SpotConfig = SpotConfig()
    """Preemptible nodes."""
    target: TargetConfig = TargetConfig()
    """A deadline and a budget, which the number of spot nodes follows."""
    notices: NoticesConfig = NoticesConfig()
    """How nodes learn of their preemption."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """How workers of a node form groups."""
    commit_every: PositiveInt = 1
    """Denoising steps between commits of rollouts in flight: the most that a loss without notice costs."""
    lease_s: PositiveFloat = 120.0
    """Work of a group that commits nothing for this long goes to another group; for four times what the last
    steps, or ends of rollouts, of its kind took, if longer (up to twice that with more rollouts); and for
    ``start_s``, if longer, until its workers have finished a first rollout.
    """
    heartbeat_s: PositiveFloat = 5.0
    """Seconds between heartbeats; a worker that misses three in a row is restarted."""
    answer_s: PositiveFloat = 30.0
    """A command without a reply for this long is sent again; after three times the worker is restarted. A
    worker replies between two denoising steps; one with work gets as long as ``lease_s`` says, if longer,
    but no more once its lease has expired.
    """
    collective_s: PositiveFloat = 30.0
    """A member that keeps its group waiting within a step for this long is given up by the others; for four
    times what such a step took before, if that is longer.
    """
    start_s: PositiveFloat = 600.0
    """Limit for starting a process, for loading all weights, and at first for a denoising step, which may
    compile kernels.
    """
    publish: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the adapters that workers get. ``bfloat16``, half the bytes, changes no rollout under
    ``learner.autocast: bfloat16``, which rounds adapters anyway; ``auto`` takes it there alone.
    """
    learner_s: PositiveFloat = 3600.0
    """Limit for one call of the learner (a micro-batch, a checkpoint) before it counts as lost."""
    drain_margin_s: Annotated[float, Field(ge=0)] = 25.0
    """A node about to be preempted stops working this long before; at once if its notice is shorter."""
    store_gb: PositiveFloat = 4.0
    """Memory on this process's node for latents and samples in flight; more goes to the run directory."""

    def published_dtype(self, run: RunConfig) -> Literal["float32", "bfloat16"]:
        """``publish``, decided."""
        if self.publish != "auto":
            return self.publish
        rounds = run.learner.mode == "lora" and run.learner.autocast == "bfloat16"
        return "bfloat16" if rounds else "float32"

    @property
    def learner_moves(self) -> bool:
        """Whether the learner is on spot nodes."""
        return self.learner_placement != "reserved"

    @property
    def reserved_ranks(self) -> int:
        """Learner ranks on reserved nodes."""
        return 0 if self.learner_moves else self.learner_ranks

    @property
    def fewest_ranks(self) -> int:
        """The learner starts with no fewer."""
        return self.learner_ranks_min or self.learner_ranks

    @property
    def only_learner_slots(self) -> bool:
        """Whether the learner's slots are the only ones there will be, as far as the configuration tells."""
        ours, spot = self.driver == "ray" and self.address is None, self.spot
        left = self.fewest_ranks - self.reserved_ranks
        few = spot.emulated_nodes * spot.slots <= left
        return ours and spot.trace is None and few and self.local.rollout_slots == 0

    @property
    def _spot_nodes_min(self) -> int:
        return (self.fewest_ranks - self.reserved_ranks) // self.spot.slots + 1

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Keys of another driver or cluster, unused slots, and inconsistent timeouts."""
        yield from self._place_problems()
        if self.publish == "bfloat16":
            yield from self._publish_problems(run)
        if self.spot.trace is not None and self.spot.nodes:
            yield Problem(
                "fleet.spot.nodes", str(self.spot.nodes), "0 with fleet.spot.trace",
                "The trace says which nodes there are: leave one of the two keys out.",
            )  # fmt: skip
        if self.only_learner_slots and not run.pipeline.trainers_generate:
            yield Problem(
                "fleet.spot.nodes", f"{self.spot.emulated_nodes}, with no other slot that rolls out",
                "a slot that rolls out",
                f"Set fleet.spot.nodes to at least {self._spot_nodes_min} or fleet.local.rollout_slots to at "
                "least 1, or name a fleet.spot.trace.",
            )  # fmt: skip
        if self.learner_moves:
            yield from self._moving_problems(run)
        yield from self._fewer_ranks_problems(run)
        yield from self._on_demand_problems()
        yield from self.target.problems(run)
        degrees = list(self.sequence_parallel.degrees)
        if degrees != (ascending := sorted(set(degrees))):
            yield Problem(
                "fleet.sequence_parallel.degrees", str(degrees), "each degree once, ascending",
                f"Set {ascending}.",
            )  # fmt: skip
        yield from self.sequence_parallel.guidance_problems(run)
        if degrees[-1] > 1 and not FAMILIES.load(run.model.family).splits_sequence:
            yield Problem(
                "fleet.sequence_parallel.degrees", str(degrees), f"[1] with model.family={run.model.family}",
                "Forwards of this family cannot be split over several GPUs: leave it out.",
            )  # fmt: skip
        # Guidance in parallel opens a group of each half, too, for half as long.
        openings = 2.5 if self.sequence_parallel.guidance else 2.0
        forming_s = self.answer_s / 2 + openings * self.collective_s
        if degrees[-1] > 1 and _TIMES_ASKED * self.answer_s < forming_s:
            yield Problem(
                "fleet.answer_s", f"{self.answer_s:g}",
                f"at least {openings / (_TIMES_ASKED - 0.5) * self.collective_s:g} with fleet.collective_s = "
                f"{self.collective_s:g}",
                "Raise it, or lower fleet.collective_s: who waits for a dead member would be given up too.",
            )  # fmt: skip
        if self.lease_s < _BEATS_MIN * self.heartbeat_s:
            yield Problem(
                "fleet.lease_s", f"{self.lease_s:g}",
                f"at least {_BEATS_MIN} heartbeats ({_BEATS_MIN * self.heartbeat_s:g} s)",
                "Raise it, or lower fleet.heartbeat_s.",
            )  # fmt: skip

    def _moving_problems(self, run: RunConfig) -> Iterator[Problem]:
        """Keys that a learner on spot nodes cannot follow."""
        placement = f"fleet.learner_placement={self.learner_placement}"
        for index, reward in enumerate(run.rewards):
            if reward.device == "learner":
                yield Problem(
                    f"rewards[{index}].device", "learner", f"another with {placement}",
                    "Its process cannot move with the learner: set cpu, spot or cuda, or leave it out.",
                )  # fmt: skip
        if run.checkpoint.every != 1:
            yield Problem(
                "checkpoint.every", str(run.checkpoint.every), f"1 with {placement}",
                "The learner's state is saved after every iteration there: leave it out.",
            )  # fmt: skip
        if run.learner.mode != "lora":
            yield Problem(
                "learner.mode", run.learner.mode, f"lora with {placement}",
                "All weights would be saved after every iteration: set learner.mode=lora, or leave "
                "fleet.learner_placement out.",
            )  # fmt: skip

    def _fewer_ranks_problems(self, run: RunConfig) -> Iterator[Problem]:
        """Numbers of ranks that do not go together."""
        least, most = self.learner_ranks_min, self.learner_ranks
        if least is None:
            if self.learner_grows_after_s != _GROWS_AFTER_S:
                yield Problem(
                    "fleet.learner_grows_after_s", f"{self.learner_grows_after_s:g}",
                    "fleet.learner_ranks_min beside it",
                    "Set that too, or leave it out: the number of ranks is fixed.",
                )  # fmt: skip
            return
        if not self.learner_moves:
            yield Problem(
                "fleet.learner_ranks_min", str(least),
                f"none with fleet.learner_placement={self.learner_placement}",
                "Set fleet.learner_placement=spot, or leave it out.",
            )  # fmt: skip
        if most % least:
            yield Problem(
                "fleet.learner_ranks_min", str(least), f"a divisor of fleet.learner_ranks = {most}",
                f"Nearest: {divisors_near(most, least)}.",
            )  # fmt: skip
        if run.algorithm.compares_groups and least < most:
            yield Problem(
                "fleet.learner_ranks_min", str(least), f"{most} with algorithm.name={run.algorithm.name}",
                "Its loss compares the samples of whole groups, which fewer ranks would cut: leave it out.",
            )  # fmt: skip

    def _on_demand_problems(self) -> Iterator[Problem]:
        """Keys that nothing reads, and commands that are missing."""
        takes = self.learner_placement == "spot_then_on_demand"
        if not takes and self.on_demand != OnDemandConfig():
            yield Problem(
                "fleet.on_demand", "set", f"nothing with fleet.learner_placement={self.learner_placement}",
                "Set fleet.learner_placement=spot_then_on_demand, or leave it out.",
            )  # fmt: skip
            return
        for key, command in (("start", self.on_demand.start), ("stop", self.on_demand.stop)):
            if takes and self.address is not None and command is None:
                yield Problem(
                    f"fleet.on_demand.{key}", "nothing", "a shell command with fleet.address",
                    "Give the command of your cloud (docs/howto/train-on-spot.md has some).",
                )  # fmt: skip
            if takes and self.address is None and command is not None:
                yield Problem(
                    f"fleet.on_demand.{key}", repr(command), "nothing without fleet.address",
                    "A cluster on this machine emulates the node: leave it out.",
                )  # fmt: skip

    def _publish_problems(self, run: RunConfig) -> Iterator[Problem]:
        learner = run.learner
        for key, found, wanted in (
            ("mode", learner.mode, "lora"),
            ("autocast", learner.autocast, "bfloat16"),
        ):
            if found != wanted:
                yield Problem(
                    "fleet.publish", "'bfloat16'", f"'float32' or 'auto' with learner.{key}={found}",
                    "Workers would roll out with other weights than are trained: leave it out"
                    + (", or set learner.autocast=bfloat16." if key == "autocast" else "."),
                )  # fmt: skip

    def _place_problems(self) -> Iterator[Problem]:
        emulated = {"fleet.spot.nodes": self.spot.nodes, "fleet.spot.trace": self.spot.trace}
        if self.driver == "inline":
            for key, value in {"fleet.address": self.address, **emulated}.items():
                if value:
                    yield Problem(
                        key, "set", "nothing with fleet.driver=inline",
                        "Set fleet.driver=ray, or leave it out.",
                    )  # fmt: skip
            if self.learner_ranks > 1:
                yield Problem(
                    "fleet.learner_ranks", str(self.learner_ranks), "1 with fleet.driver=inline",
                    "Start so many ranks with torchrun, or set fleet.driver=ray.",
                )  # fmt: skip
            if self.learner_moves:
                yield Problem(
                    "fleet.learner_placement", self.learner_placement, "reserved with fleet.driver=inline",
                    "Set fleet.driver=ray, or leave it out.",
                )  # fmt: skip
            if self.publish != "auto":
                yield Problem(
                    "fleet.publish", self.publish, "auto with fleet.driver=inline, which sends no weights",
                    "Set fleet.driver=ray, or leave it out.",
                )  # fmt: skip
        elif self.address is not None:
            for key, value in emulated.items():
                if value:
                    yield Problem(
                        key, "set", "nothing with fleet.address",
                        "Spot nodes are emulated on a local Ray only: leave one of the two keys out.",
                    )  # fmt: skip
