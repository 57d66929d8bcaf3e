"""Configuration of goals that a run holds by adding and dropping spot nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationError

from spotlight.config.requires import Computed, Requires, That, at_most, other_than
from spotlight.config.section import Section
from spotlight.registry import NODE_PROVIDERS
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

EMULATED = "emulated"


def _has_goal(run: RunConfig) -> bool:
    return run.fleet.target.is_set and run.fleet.driver == "ray"


def _nodes_needed(run: RunConfig) -> int:
    fleet = run.fleet
    held = fleet.learner_ranks - fleet.reserved_ranks
    others = fleet.address is not None or fleet.local.rollout_slots > 0 or run.pipeline.trainers_generate
    # Elsewhere it is not known how many slots a node has: one that holds all ranks may be enough.
    slots = fleet.spot.slots if fleet.address is None else max(held, 1)
    return -(-held // slots) if others else held // slots + 1


def _misfits(run: RunConfig) -> Iterator[Problem]:
    target = run.fleet.target
    if not _has_goal(run) or (run.fleet.address is None) != (target.provider in ("auto", EMULATED)):
        return
    settings = NODE_PROVIDERS.load(target.provider_name).settings
    try:
        settings.model_validate(target.params)
    except ValidationError as error:
        known = ", ".join(settings.model_fields) or "nothing"
        for each in error.errors(include_url=False):
            key = ".".join(["fleet.target.params", *map(str, each["loc"])])
            found = "nothing" if each["type"] == "missing" else repr(each["input"])
            remedy = f"Give what fleet.target.provider={target.provider_name} takes."
            yield Problem(key, found, f"{each['msg']} ({known})", remedy)


class TargetConfig(Section):
    """A deadline and a budget, held by adding and dropping spot nodes (docs/howto/hold-a-deadline.md)."""

    deadline_h: PositiveFloat | None = None
    """Hours from the start of the run's first attempt to its end, including time between attempts."""
    budget_usd: PositiveFloat | None = None
    """Dollars for the whole run, as the ledger counts them. A run that needs more says so, but goes on."""
    nodes_min: Annotated[int, Field(ge=0)] = 1
    """Fewest spot nodes asked for."""
    nodes_max: PositiveInt = 16
    """Most spot nodes asked for."""
    node_s: PositiveFloat = 300.0
    """Seconds that a new node is assumed to need until it works, until one has been measured."""
    report_s: PositiveFloat = 3600.0
    """Seconds between messages on the time and cost still to come; decisions are reported at once."""
    retry_s: PositiveFloat = 60.0
    """Seconds until a provider that failed is asked again."""
    provider: Annotated[str, AfterValidator(NODE_PROVIDERS.known("auto"))] = "auto"
    """What adds and drops nodes; ``auto``: the cluster that is emulated on this machine."""
    params: Mapping[str, Any] = {}
    """The provider's own settings."""

    @property
    def is_set(self) -> bool:
        """Whether there is a goal to hold."""
        return self.deadline_h is not None or self.budget_usd is not None

    def clipped(self, nodes: int) -> int:
        """A number of spot nodes within the bounds."""
        return min(max(nodes, self.nodes_min), self.nodes_max)

    @property
    def provider_name(self) -> str:
        return EMULATED if self.provider == "auto" else self.provider

    requires = (
        Requires("fleet.target", {},
                 That("a deadline_h or a budget_usd beside its other keys", lambda run:
                      run.fleet.target.is_set or run.fleet.target == TargetConfig()),
                 "Set one (--deadline-h, --budget-usd), or leave fleet.target out.",
                 found="settings without a goal"),
        Requires("fleet.target", {"fleet.driver": other_than("ray")},
                 That("no goal", lambda run: not run.fleet.target.is_set),
                 "Only a cluster has spot nodes to add: set fleet.driver=ray, or leave fleet.target out.",
                 found="a goal"),
        Requires("fleet.target.nodes_min", {}, at_most("fleet.target.nodes_max"),
                 "Lower it, or raise fleet.target.nodes_max."),
        Requires("fleet.target.nodes_min", That("with a goal", lambda run: _has_goal(run)
                      and run.fleet.learner_placement != "spot_then_on_demand"),
                 That("room for the learner and a slot that rolls out",
                      lambda run: run.fleet.target.nodes_min >= _nodes_needed(run)),
                 lambda run: f"Set at least {_nodes_needed(run)}."),
        Requires("fleet.target.provider",
                 That("with a cluster on this machine", lambda run: _has_goal(run) and not run.fleet.address),
                 ("auto", EMULATED), "Its spot nodes are emulated: leave it out."),
        Requires("fleet.target.provider",
                 That("with fleet.address", lambda run: _has_goal(run) and bool(run.fleet.address)),
                 other_than("auto", EMULATED),
                 "Set it to the provider of this cluster's spot nodes, or leave fleet.target out."),
        Computed("fleet.target.params", "the settings of fleet.target.provider", _misfits),
    )  # fmt: skip
