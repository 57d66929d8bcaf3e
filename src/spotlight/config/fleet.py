"""The fleet's part of the configuration: which machines, what they cost, and how patient the head is with them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from spotlight.config.section import Section


class LocalConfig(Section):
    """Reserved nodes of the local Ray that is started when ``fleet.address`` is not set."""

    reserved_nodes: PositiveInt = 1
    """Nodes that nothing takes; the first one is Ray's head."""
    reserved_slots: PositiveInt = 1
    """CPU slots of each; a slot stands for a GPU. The learner ranks take theirs first."""


class SpotConfig(Section):
    """Spot nodes: their price everywhere, and how the local Ray plays a spot market."""

    price_usd_h: Annotated[float, Field(ge=0)] | None = None
    """Dollars an hour for one slot of a spot node; default: ``fleet.price_usd_h``."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Spot nodes of the local Ray that are there from the start and stay. Not with ``trace``."""
    slots: PositiveInt = 1
    """CPU slots of each spot node of the local Ray; where the trace tells GPUs, those."""
    trace: str | None = None
    """Spot trace whose nodes are added, noticed and killed on the local Ray, in real time, over and over."""
    speed: PositiveFloat = 1.0
    """The trace is played so many times as fast."""
    notice_s: Annotated[float, Field(ge=0)] = 30.0
    """Real seconds from a notice to its kill, whatever the speed; 0: nodes vanish without a word."""


class NoticesConfig(Section):
    """How nodes learn of their preemption."""

    cloud: Literal["auto", "aws", "gcp", "azure", "none"] = "auto"
    """Whose metadata service the nodes ask; ``auto``: each finds out; ``none``: nobody's."""
    endpoint: str | None = None
    """Address of the metadata service, where it is not http://169.254.169.254."""
    sigterm_grace_s: Annotated[float, Field(ge=0)] | None = 30.0
    """From SIGTERM to SIGKILL: SIGTERM to a node's agent is a notice too; ``null``: it is not. On a
    local Ray it is ``fleet.spot.notice_s``."""


class FleetConfig(Section):
    """The hardware, and what it costs."""

    price_usd_h: Annotated[float, Field(ge=0)] = 0.05
    """Dollars an hour for one worker (a GPU, or this machine's CPU). Every billed second is charged."""
    driver: Literal["inline", "ray"] = "inline"
    """``inline``: this process (or the ranks of one torchrun) does everything; ``ray``: nodes that may be taken."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster to join, or ``auto``; default: start a local one on 127.0.0.1."""
    local: LocalConfig = LocalConfig()
    """Reserved nodes of the local Ray."""
    spot: SpotConfig = SpotConfig()
    """Spot nodes."""
    notices: NoticesConfig = NoticesConfig()
    """How nodes learn of their preemption."""
    learner_ranks: PositiveInt = 1
    """Slots of reserved nodes that train."""
    learner_rolls_out: bool = True
    """Slots that train also roll out while the learner waits."""
    sequence_parallel: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """Degrees of sequence parallelism that groups of workers may have, ascending, from 1."""
    lease_s: PositiveFloat = 60.0
    """A group that commits nothing for so long loses its work to others."""
    heartbeat_s: PositiveFloat = 2.0
    """Between two signs of life of a worker."""
    answer_s: PositiveFloat = 10.0
    """Longest wait for the answer of a living process."""
    start_s: PositiveFloat = 300.0
    """Longest wait for a worker to start, import and load."""
    drain_margin_s: Annotated[float, Field(ge=0)] = 2.0
    """A noticed node stops work so long before it is taken."""
    commit_every: PositiveInt = 1
    """Denoising steps between two commits of a rollout's progress; a kill without notice loses at most these."""
    store_gib: PositiveFloat = 1.0
    """Memory of the progress store on the reserved node; the rest goes to its disk."""
