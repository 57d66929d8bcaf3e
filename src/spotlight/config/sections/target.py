"""Configuration of goals that a run holds by adding and dropping spot nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, ValidationError

from spotlight.config.section import Section
from spotlight.registry import NODE_PROVIDERS
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

EMULATED = "emulated"
_PARAMS = "fleet.target.params"


class TargetConfig(Section):
    """A deadline and a budget, held by the number of spot nodes (docs/howto/hold-a-deadline.md)."""

    deadline_h: PositiveFloat | None = None
    """Hours from the start of the run's first attempt to its end, time between attempts included."""
    budget_usd: PositiveFloat | None = None
    """Dollars of the whole run, as the ledger counts them. What does not fit is said; nothing is stopped."""
    nodes_min: Annotated[int, Field(ge=0)] = 1
    """Fewest spot nodes asked for."""
    nodes_max: PositiveInt = 16
    """Most spot nodes asked for."""
    node_s: PositiveFloat = 300.0
    """Seconds that a new node is assumed to take until it works, before one has been measured."""
    report_s: PositiveFloat = 3600.0
    """Seconds between two messages of what the rest will take and cost; decisions are said at once."""
    retry_s: PositiveFloat = 60.0
    """Seconds until a provider that failed is asked again."""
    provider: Annotated[str, AfterValidator(NODE_PROVIDERS.known("auto"))] = "auto"
    """Who adds and drops nodes; ``auto``: the cluster that is emulated on this machine."""
    params: Mapping[str, Any] = {}
    """The provider's own settings."""

    @property
    def is_set(self) -> bool:
        """Whether there is a goal to hold."""
        return self.deadline_h is not None or self.budget_usd is not None

    def clipped(self, nodes: int) -> int:
        """A number of spot nodes within the bounds."""
        return min(max(nodes, self.nodes_min), self.nodes_max)

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Keys that nothing reads, a provider that does not suit the cluster, and what it cannot use."""
        fleet = run.fleet
        if not self.is_set:
            if self != TargetConfig():
                yield Problem(
                    "fleet.target", "settings without a goal", "a deadline_h or a budget_usd beside them",
                    "Set one (--deadline-h, --budget-usd), or leave fleet.target out.",
                )  # fmt: skip
            return
        if fleet.driver != "ray":
            yield Problem(
                "fleet.target", f"a goal with fleet.driver={fleet.driver}", "fleet.driver=ray",
                "Only a cluster has spot nodes to add: set it, or leave fleet.target out.",
            )  # fmt: skip
            return
        if self.nodes_min > self.nodes_max:
            yield Problem(
                "fleet.target.nodes_min", str(self.nodes_min),
                f"at most fleet.target.nodes_max ({self.nodes_max})", "Lower it, or raise that.",
            )  # fmt: skip
        yield from self._too_few(run)
        yield from self._provider_problems(emulated=fleet.address is None)

    def _too_few(self, run: RunConfig) -> Iterator[Problem]:
        fleet = run.fleet
        held = fleet.learner_ranks - fleet.reserved_ranks
        others = fleet.address is not None or fleet.local.rollout_slots > 0 or run.pipeline.trainers_generate
        # Elsewhere it is not known how many slots a node has: one that holds all ranks may be enough.
        slots = fleet.spot.slots if fleet.address is None else max(held, 1)
        needed = -(-held // slots) if others else held // slots + 1
        if fleet.learner_placement != "spot_then_on_demand" and self.nodes_min < needed:
            what = "the learner and a slot that rolls out" if held else "a slot that rolls out"
            yield Problem(
                "fleet.target.nodes_min", str(self.nodes_min), f"at least {needed}: {what}", "Raise it."
            )

    def _provider_problems(self, *, emulated: bool) -> Iterator[Problem]:
        if emulated != (self.provider in ("auto", EMULATED)):
            where = "a cluster on this machine" if emulated else "fleet.address"
            others = [name for name in NODE_PROVIDERS if name != EMULATED]
            yield Problem(
                "fleet.target.provider", self.provider,
                f"{EMULATED} or auto with {where}" if emulated else f"{' or '.join(others)} with {where}",
                "Set it to who adds and drops this cluster's spot nodes.",
            )  # fmt: skip
            return
        settings = NODE_PROVIDERS.load(self.provider_name).settings
        try:
            settings.model_validate(self.params)
        except ValidationError as error:
            known = ", ".join(settings.model_fields) or "nothing"
            for each in error.errors(include_url=False):
                key = ".".join([_PARAMS, *map(str, each["loc"])])
                missing = each["type"] == "missing"
                yield Problem(
                    key, "nothing" if missing else repr(each["input"]), f"{each['msg']} ({known})",
                    f"Give what fleet.target.provider={self.provider_name} takes.",
                )  # fmt: skip

    @property
    def provider_name(self) -> str:
        """``provider``, decided."""
        return EMULATED if self.provider == "auto" else self.provider
