"""Configuration of the fleet: machines, prices and timeouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from spotlight.config.requires import SET, UNSET, Requires, That, more_than, other_than, shown
from spotlight.config.section import Section
from spotlight.config.sections.learner_section import divisors_near
from spotlight.config.sections.target import TargetConfig
from spotlight.registry import FAMILIES
from spotlight_fleet.notices.registry import CLOUDS

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

_INLINE = {"fleet.driver": "inline"}
_RAY = "Set fleet.driver=ray, or leave it out."
_MOVES = {"fleet.learner_placement": other_than("reserved")}
_ON_DEMAND = "spot_then_on_demand"
_GUIDANCE = {"fleet.sequence_parallel.guidance": True}
_NO_GUIDANCE = "Change it, or leave fleet.sequence_parallel.guidance out."
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
    """Threads per worker and per learner rank on CPU slots; default: the machine's cores divided equally
    among the workers, and among the ranks.
    """


class SpotConfig(Section):
    """Preemptible nodes."""

    price_usd_h: Annotated[float, Field(ge=0)] = 0.015
    """Dollars per hour per slot (GPU) of a spot node."""
    nodes: Annotated[int, Field(ge=0)] | None = None
    """Emulated spot nodes on this machine that are never preempted; default: 2. Not with a ``trace``, which
    defines the nodes itself. With a ``fleet.target``: the number at the start.
    """
    slots: PositiveInt = 1
    """CPU slots, each standing for a GPU, per emulated spot node, unless the trace gives a number of GPUs."""
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
    """Whether each half of a group makes one of guidance's two passes (``rollout.true_cfg_scale`` above 1);
    the halves exchange velocities at each step. Within a half the forward is split over half the degree,
    which must divide the attention heads; degrees above 1 must be even.
    """

    def split(self, degree: int) -> int:
        """GPUs that a forward is split over in a group of ``degree``."""
        return degree // 2 if self.guidance and degree > 1 else degree

    requires = (
        Requires("fleet.sequence_parallel.degrees", {},
                 That("each degree once, ascending", lambda run: _ascending(run) == _degrees(run)),
                 lambda run: f"Set {shown(_ascending(run))}."),
        Requires("fleet.sequence_parallel.degrees",
                 That("with model.family={model.family}, whose forwards cannot be split over GPUs",
                      lambda run: not FAMILIES.load(run.model.family).splits_sequence),
                 ((1,),), "Leave it out."),
        Requires("fleet.sequence_parallel.degrees", _GUIDANCE,
                 That("even degrees, or 1 and even ones", lambda run: _degrees(run)[-1] > 1
                      and not any(degree % 2 for degree in _degrees(run) if degree > 1)), _NO_GUIDANCE),
        Requires("rollout.true_cfg_scale", _GUIDANCE, more_than(1),
                 f"Without guidance there is one pass. {_NO_GUIDANCE}"),
        Requires("exploration.step_cache", _GUIDANCE, UNSET,
                 f"Ranks keep the residuals of one pass only. {_NO_GUIDANCE}"),
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
    """Take a node when the learner has waited for this long."""
    back_after_s: Annotated[float, Field(ge=0)] = 60.0
    """Leave the node and give it back when spot nodes have had room for the learner for this long."""
    start: str | None = None
    """Shell command that starts a node and makes it join the cluster as ``$SPOTLIGHT_NODE``, with
    ``$SPOTLIGHT_SLOTS`` GPUs. Only with ``fleet.address``: a cluster on this machine emulates the node.
    """
    stop: str | None = None
    """Shell command that ends the node ``$SPOTLIGHT_NODE``; also called when the run ends."""


class FleetConfig(Section):
    """Where the run executes, and what that costs."""

    driver: Literal["inline", "ray"] = "inline"
    """``inline``: in this process, or its ``--ranks``. ``ray``: on a cluster whose spot nodes may vanish."""
    address: str | None = None
    """Address of a running Ray cluster (``auto``, host:port); default: start one on this machine."""
    head: Literal["reserved", "any"] = "reserved"
    """Nodes that may run this command. ``any``: spot nodes too. A run then outlives its node if ``runs_dir``
    does (as a bucket does) and your launcher starts the same command elsewhere.
    """
    price_usd_h: Annotated[float, Field(ge=0)] = 0.05
    """Dollars per hour per worker (a reserved GPU, or this machine's CPU). Every billed second is charged."""
    learner_ranks: PositiveInt = 1
    """Slots that train together (FSDP2)."""
    learner_ranks_min: PositiveInt | None = None
    """Fewest ranks of a learner on spot nodes: without room for ``learner_ranks``, it starts with the largest
    divisor of that number that fits. Gradients are the same up to rounding; with ``learner.shard=all`` each
    rank holds more of the model. Default: it waits for ``learner_ranks``.
    """
    learner_grows_after_s: Annotated[float, Field(ge=0)] = _GROWS_AFTER_S
    """A learner of fewer ranks moves to more once other spot nodes have had room for them this long."""
    learner_placement: Literal["reserved", "spot", "spot_then_on_demand"] = "reserved"
    """Where the learner runs. ``spot``: it moves to another spot node when its own gets a notice or is lost,
    and waits if there is none. Its state is then saved after every iteration, during the rollouts of the
    next, on the head's node if the nodes share no ``runs_dir``; a loss costs at most the training of one
    iteration. Only the head needs a reserved node, which needs no GPUs. LoRA only.
    ``spot_then_on_demand``: if it waits too long, it takes an on-demand node (``fleet.on_demand``).
    """
    on_demand: OnDemandConfig = OnDemandConfig()
    """When and how a learner on spot nodes takes an on-demand node."""
    local: LocalNodesConfig = LocalNodesConfig()
    """Reserved nodes of a cluster on this machine."""
    spot: SpotConfig = SpotConfig()
    """Preemptible nodes."""
    target: TargetConfig = TargetConfig()
    """A deadline and a budget, held by adding and dropping spot nodes."""
    notices: NoticesConfig = NoticesConfig()
    """How nodes learn of their preemption."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """How workers of a node form groups."""
    commit_every: PositiveInt = 1
    """Denoising steps between commits of rollouts in flight: the most that a loss without notice costs."""
    lease_s: PositiveFloat = 120.0
    """If a group commits nothing for this long, its work goes to another group. The limit is at least four
    times what steps, or ends of rollouts, last took in groups of its kind (up to twice that with more
    rollouts), and at least ``start_s`` until its workers have finished a first rollout.
    """
    heartbeat_s: PositiveFloat = 5.0
    """Seconds between heartbeats; a worker that misses three in a row is restarted."""
    answer_s: PositiveFloat = 30.0
    """A command without a reply for this long is sent again; after three times the worker is restarted.
    Workers reply between two denoising steps, so one with work gets as long as ``lease_s`` says, if that is
    longer, until its lease has expired.
    """
    collective_s: PositiveFloat = 30.0
    """The others give up a member that keeps its group waiting within a step for this long, or for four
    times what such a step took before, if that is longer.
    """
    start_s: PositiveFloat = 600.0
    """Limit for starting a process, for loading all weights, and for a process's first denoising steps, which
    may compile kernels.
    """
    publish: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which workers get the adapters. ``bfloat16`` has half the bytes and changes no rollout under
    ``learner.autocast: bfloat16``, which rounds adapters anyway; ``auto`` takes it only there.
    """
    learner_s: PositiveFloat = 3600.0
    """Limit for one call to the learner (a micro-batch, a checkpoint), after which it counts as lost. Once
    such calls are measured, the limit is four times what the last ones took, but at least ``lease_s``, or
    ``start_s`` where files are written.
    """
    learner_collective_s: PositiveFloat = 600.0
    """If a rank of the learner keeps the others waiting in a collective for this long, the learner ends, and
    on Ray starts again. Under torchrun this includes waiting for each other's rewards and for rank 0's files.
    """
    drain_margin_s: Annotated[float, Field(ge=0)] = 25.0
    """A node stops working this long before its preemption; at once if its notice is shorter."""
    store_gb: PositiveFloat = 4.0
    """Memory on this process's node for latents and samples in flight; the rest goes to the run directory."""

    def published_dtype(self, run: RunConfig) -> Literal["float32", "bfloat16"]:
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
    def spot_nodes_min(self) -> int:
        """Emulated spot nodes of which one has a slot that the learner leaves."""
        return (self.fewest_ranks - self.reserved_ranks) // self.spot.slots + 1

    @property
    def answer_s_min(self) -> float:
        """Who waits for a member to form a group, and then for a dead one, must not be given up."""
        # Guidance in parallel opens a group of each half, too, for half as long.
        openings = 2.5 if self.sequence_parallel.guidance else 2.0
        return openings / (_TIMES_ASKED - 0.5) * self.collective_s

    def notes(self, run: RunConfig) -> Iterator[str]:
        """What the learner's GPUs do without spot nodes."""
        vanish = self.address is not None or self.spot.trace is not None
        waits = self.driver == "ray" and not self.learner_moves and not run.pipeline.trainers_generate
        if waits and vanish and self.local.rollout_slots == 0:
            yield (
                "when only the learner's node is left, its GPUs wait at full price until a spot node joins; "
                "with pipeline.trainers_generate=true they roll out meanwhile."
            )

    requires = (
        *(Requires(key, _INLINE, UNSET, _RAY)
          for key in ("fleet.address", "fleet.spot.nodes", "fleet.spot.trace")),
        Requires("fleet.head", {"fleet.address": UNSET}, "reserved",
                 "A cluster on this machine has a reserved node for the head: leave it out."),
        Requires("fleet.learner_ranks", _INLINE, 1,
                 "Start that many with --ranks, or set fleet.driver=ray."),
        Requires("fleet.learner_placement", _INLINE, "reserved", _RAY),
        Requires("fleet.publish", _INLINE, "auto", f"One process sends no weights. {_RAY}"),
        *(Requires(key, {"fleet.driver": "ray", "fleet.address": SET}, UNSET,
                   "Spot nodes are emulated only on this machine: leave one of the two keys out.")
          for key in ("fleet.spot.nodes", "fleet.spot.trace")),
        Requires("fleet.publish", {"learner.mode": other_than("lora")}, ("auto", "float32"),
                 "Workers would roll out with different weights from those trained: leave it out."),
        Requires("fleet.publish", {"learner.autocast": other_than("bfloat16")}, ("auto", "float32"),
                 "Workers would roll out with different weights from those trained: leave it out, or set "
                 "learner.autocast=bfloat16."),
        Requires("fleet.spot.nodes", {"fleet.spot.trace": SET}, UNSET,
                 "The trace says which nodes there are: leave one of the two keys out."),
        Requires("fleet.spot.nodes", That("where the learner's do not (pipeline.trainers_generate=false)",
                                          lambda run: not run.pipeline.trainers_generate),
                 That("a slot that rolls out", lambda run: not run.fleet.only_learner_slots),
                 "Set fleet.spot.nodes to at least {fleet.spot_nodes_min} or fleet.local.rollout_slots to at "
                 "least 1, or name a fleet.spot.trace.",
                 found="{fleet.spot.emulated_nodes}, with no other slot that rolls out"),
        Requires("rewards.*.device", _MOVES, other_than("learner"),
                 "A reward's process cannot move with the learner: set cpu, spot or cuda, or leave it out."),
        Requires("checkpoint.every", _MOVES, 1,
                 "On spot nodes it is saved after every iteration: leave it out."),
        Requires("learner.mode", _MOVES, "lora",
                 "All weights would be saved after every iteration: set learner.mode=lora, or leave "
                 "fleet.learner_placement out."),
        Requires("fleet.learner_grows_after_s", {"fleet.learner_ranks_min": UNSET}, _GROWS_AFTER_S,
                 "The number of ranks is fixed: leave it out, or set fleet.learner_ranks_min."),
        Requires("fleet.learner_ranks_min", {"fleet.learner_placement": "reserved"}, UNSET,
                 "Set fleet.learner_placement=spot, or leave it out."),
        Requires("fleet.learner_ranks_min", {},
                 That("a divisor of fleet.learner_ranks = {fleet.learner_ranks}",
                      lambda run: run.fleet.learner_ranks % run.fleet.fewest_ranks == 0),
                 lambda run: f"Nearest: {divisors_near(run.fleet.learner_ranks, run.fleet.fewest_ranks)}."),
        Requires("fleet.learner_ranks_min",
                 That("with algorithm.name={algorithm.name}, which compares the samples of whole groups",
                      lambda run: run.algorithm.compares_groups),
                 That("fleet.learner_ranks = {fleet.learner_ranks}",
                      lambda run: run.fleet.fewest_ranks >= run.fleet.learner_ranks),
                 "Fewer ranks would cut groups: leave it out."),
        Requires("fleet.on_demand", {"fleet.learner_placement": other_than(_ON_DEMAND)}, OnDemandConfig(),
                 "Set fleet.learner_placement=spot_then_on_demand, or leave it out."),
        *(Requires(key, {"fleet.learner_placement": _ON_DEMAND, "fleet.address": SET}, SET,
                   "Give the shell command of your cloud (docs/howto/train-on-spot.md has some).")
          for key in ("fleet.on_demand.start", "fleet.on_demand.stop")),
        *(Requires(key, {"fleet.learner_placement": _ON_DEMAND, "fleet.address": UNSET}, UNSET,
                   "A cluster on this machine emulates the node: leave it out.")
          for key in ("fleet.on_demand.start", "fleet.on_demand.stop")),
        Requires("fleet.answer_s", {"fleet.sequence_parallel.degrees": other_than((1,))},
                 That("at least {fleet.answer_s_min} with fleet.collective_s = {fleet.collective_s}",
                      lambda run: run.fleet.answer_s >= run.fleet.answer_s_min),
                 "Raise it, or lower fleet.collective_s: waiting for a dead member may take that long."),
        Requires("fleet.lease_s", {},
                 That(f"at least {_BEATS_MIN} heartbeats (fleet.heartbeat_s = {{fleet.heartbeat_s}})",
                      lambda run: run.fleet.lease_s >= _BEATS_MIN * run.fleet.heartbeat_s),
                 "Raise it, or lower fleet.heartbeat_s."),
    )  # fmt: skip


def _degrees(run: RunConfig) -> list[int]:
    return list(run.fleet.sequence_parallel.degrees)


def _ascending(run: RunConfig) -> list[int]:
    return sorted(set(_degrees(run)))
