"""The fleet's part of the configuration: which machines, what they cost, and how patient the head is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from spotlight.config.errors import Problem
from spotlight.config.section import Section
from spotlight.registry import CLOUDS

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

_TIMES_ASKED = 3
"""A group is told to form or part so often before its members are given up."""
_BEATS_MIN = 3
"""A lease outlives so many heartbeats: one that is lost or late must not cost work."""


class LocalNodesConfig(Section):
    """The reserved nodes of the cluster that is started on this machine where no ``address`` is given."""

    rollout_slots: Annotated[int, Field(ge=0)] = 0
    """Reserved slots that roll out, beside those of the learner."""
    threads: PositiveInt | None = None
    """Threads of a worker on a CPU slot; default: the machine's cores, shared out."""


class SpotConfig(Section):
    """Preemptible nodes."""

    price_usd_h: Annotated[float, Field(ge=0)] = 0.015
    """Dollars an hour for one slot (a GPU) of a spot node."""
    nodes: Annotated[int, Field(ge=0)] | None = None
    """Emulated spot nodes on this machine, which stay; default: 2. Not with a ``trace``, which says so."""
    slots: PositiveInt = 1
    """CPU slots of an emulated spot node, each standing for a GPU; where the trace tells GPUs, those."""
    trace: Path | None = None
    """Spot trace that emulated nodes follow: they are added, announced and killed (SIGKILL) by it: a file, or
    ``minute``, which is shipped: two nodes at a time, the older of which is taken every minute. It begins
    when the run does, and after its end nodes stay as they are."""
    speed: PositiveFloat = 1.0
    """The trace is played so many times as fast."""
    notice_s: Annotated[float, Field(ge=0)] | None = 10.0
    """How long before its end an emulated node is told of it; 0: never; null: when the trace says."""


class SequenceParallelConfig(Section):
    """GPUs of one node that denoise the same rollouts together (Ulysses)."""

    degrees: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """Degrees that groups may have, ascending; each divides the model's attention heads. The smallest is one
    whose memory suffices; higher ones are for large pictures and the tail of a batch."""
    pays_from_pixels: PositiveInt = 1024 * 1024
    """Pictures of so many pixels gain from a higher degree."""


class NoticesConfig(Section):
    """Where nodes hear of their preemption."""

    cloud: Annotated[str, AfterValidator(CLOUDS.known("auto", "none"))] = "auto"
    """Whose metadata service each node asks; ``auto`` finds out on the node."""
    endpoint: str | None = None
    """Address of the metadata service; default: the cloud's own."""
    sigterm_grace_s: Annotated[float, Field(ge=0)] | None = 30.0
    """From SIGTERM to SIGKILL: SIGTERM to a node's agent is a notice too (Kubernetes, SLURM); null: it is
    not. On this machine's emulated nodes it is ``fleet.spot.notice_s``."""


class FleetConfig(Section):
    """Where the run works, and what that costs."""

    driver: Literal["inline", "ray"] = "inline"
    """``inline``: in this process (or torchrun's). ``ray``: on a cluster whose spot nodes may vanish."""
    address: str | None = None
    """Address of a running Ray cluster (``auto``, host:port); default: one is started on this machine."""
    price_usd_h: Annotated[float, Field(ge=0)] = 0.05
    """Dollars an hour for one worker (a reserved GPU, or this machine's CPU). Every billed second is
    charged."""
    learner_ranks: PositiveInt = 1
    """Reserved slots that train together (FSDP2)."""
    local: LocalNodesConfig = LocalNodesConfig()
    """The reserved nodes of a cluster on this machine."""
    spot: SpotConfig = SpotConfig()
    """Preemptible nodes."""
    notices: NoticesConfig = NoticesConfig()
    """Where nodes hear of their preemption."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """How workers of a node are grouped."""
    commit_every: PositiveInt = 1
    """Denoising steps between two commits of rollouts in flight: what a loss without notice costs at most."""
    lease_s: PositiveFloat = 120.0
    """Work of a group that commits nothing for so long is given to another."""
    heartbeat_s: PositiveFloat = 5.0
    """A worker that shows no sign of life for three of these is restarted."""
    answer_s: PositiveFloat = 30.0
    """A command that a worker does not answer for so long is sent again, and at last the worker restarted."""
    collective_s: PositiveFloat = 30.0
    """A member of a group that keeps the others waiting for so long within a step is given up by them."""
    start_s: PositiveFloat = 600.0
    """How long starting a process, or loading all weights, may take."""
    learner_s: PositiveFloat = 3600.0
    """How long one call of the learner may take (a micro-batch, a checkpoint) before it counts as lost."""
    drain_margin_s: Annotated[float, Field(ge=0)] = 25.0
    """A node that will be taken stops its work so long before: at once where its notice is shorter."""
    store_gb: PositiveFloat = 4.0
    """Memory for states and samples in flight, on this process's node; more goes to the run directory."""

    @property
    def only_learner_slots(self) -> bool:
        """Whether the learner's slots are all there ever are, as far as a configuration can tell."""
        ours, spot = self.driver == "ray" and self.address is None, self.spot
        return ours and spot.trace is None and spot.nodes == 0 and self.local.rollout_slots == 0

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Keys of another driver or cluster, slots that nobody uses, and patience that does not suffice."""
        yield from self._place_problems()
        if self.spot.trace is not None and self.spot.nodes:
            yield Problem(
                "fleet.spot.nodes", str(self.spot.nodes), "0 with fleet.spot.trace",
                "The trace says which nodes there are: leave one of the two keys out.",
            )  # fmt: skip
        if self.only_learner_slots and not run.pipeline.trainers_generate:
            yield Problem(
                "fleet.spot.nodes", "0, with no other slot that rolls out", "a slot that rolls out",
                "Set fleet.spot.nodes or fleet.local.rollout_slots to at least 1, or name a "
                "fleet.spot.trace.",
            )  # fmt: skip
        degrees = list(self.sequence_parallel.degrees)
        if degrees != (ascending := sorted(set(degrees))):
            yield Problem(
                "fleet.sequence_parallel.degrees", str(degrees), "each degree once, ascending",
                f"Set {ascending}.",
            )  # fmt: skip
        forming_s = self.answer_s / 2 + 2 * self.collective_s
        if degrees[-1] > 1 and _TIMES_ASKED * self.answer_s < forming_s:
            yield Problem(
                "fleet.answer_s", f"{self.answer_s:g}",
                f"at least {0.8 * self.collective_s:g} with fleet.collective_s = {self.collective_s:g}",
                "Raise it, or lower fleet.collective_s: who waits for a dead member would be given up too.",
            )  # fmt: skip
        if self.lease_s < _BEATS_MIN * self.heartbeat_s:
            yield Problem(
                "fleet.lease_s", f"{self.lease_s:g}",
                f"at least {_BEATS_MIN} heartbeats ({_BEATS_MIN * self.heartbeat_s:g} s)",
                "Raise it, or lower fleet.heartbeat_s.",
            )  # fmt: skip

    def _place_problems(self) -> Iterator[Problem]:
        """Keys of another driver, or of a cluster that is not ours to start."""
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
        elif self.address is not None:
            for key, value in emulated.items():
                if value:
                    yield Problem(
                        key, "set", "nothing with fleet.address",
                        "Spot nodes are emulated on a local Ray only: leave one of the two keys out.",
                    )  # fmt: skip
