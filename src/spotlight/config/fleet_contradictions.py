"""Settings of the fleet that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from spotlight.config.errors import Problem
from spotlight.config.fleet import FleetConfig

_TIMES_ASKED = 3
"""A group is told to form or part so often before its members are given up."""
_BEATS_MIN = 3
"""A lease outlives so many heartbeats: one that is lost or late must not cost work."""


def fleet_problems(fleet: FleetConfig, *, trainers_generate: bool = False) -> Iterator[Problem]:
    """Every contradiction among the keys of ``fleet``.

    Args:
        trainers_generate: GPUs of the learner roll out too.
    """
    yield from _where(fleet)
    yield from _local(fleet, trainers_generate)
    degrees = list(fleet.sequence_parallel.degrees)
    if degrees != sorted(set(degrees)):
        yield Problem(
            "fleet.sequence_parallel.degrees",
            str(degrees),
            "each degree once, ascending",
            f"Set {sorted(set(degrees))}.",
        )
    forming_s = fleet.answer_s / 2 + 2 * fleet.collective_s
    if degrees[-1] > 1 and _TIMES_ASKED * fleet.answer_s < forming_s:
        yield Problem(
            "fleet.answer_s",
            f"{fleet.answer_s:g}",
            f"at least {0.8 * fleet.collective_s:g} with fleet.collective_s = {fleet.collective_s:g}",
            "Raise it, or lower fleet.collective_s: who waits for a dead member would be given up too.",
        )
    if fleet.lease_s < _BEATS_MIN * fleet.heartbeat_s:
        yield Problem(
            "fleet.lease_s", f"{fleet.lease_s:g}",
            f"at least {_BEATS_MIN} heartbeats ({_BEATS_MIN * fleet.heartbeat_s:g} s)",
            "Raise it, or lower fleet.heartbeat_s.",
        )  # fmt: skip


def _where(fleet: FleetConfig) -> Iterator[Problem]:
    """Keys of another driver, or of a cluster that is not ours to start."""
    spot = fleet.spot
    local = [name for name, value in (("nodes", spot.nodes), ("trace", spot.trace)) if value]
    if fleet.driver == "inline":
        keys = [*(["fleet.address"] if fleet.address else []), *(f"fleet.spot.{name}" for name in local)]
        for key in keys:
            yield Problem(
                key, "set", "nothing with fleet.driver=inline", "Set fleet.driver=ray, or leave it out."
            )
        if fleet.learner_ranks > 1:
            yield Problem(
                "fleet.learner_ranks", str(fleet.learner_ranks), "1 with fleet.driver=inline",
                "Start so many ranks with torchrun, or set fleet.driver=ray.",
            )  # fmt: skip
    elif fleet.address is not None:
        for name in local:
            yield Problem(
                f"fleet.spot.{name}", "set", "nothing with fleet.address",
                "Spot nodes are emulated on a local Ray only: leave one of the two keys out.",
            )  # fmt: skip


def nobody_only_rolls_out(fleet: FleetConfig) -> bool:
    """Whether the learner's slots are all there ever are, as far as a configuration can tell."""
    emulated, spot = fleet.driver == "ray" and fleet.address is None, fleet.spot
    return emulated and spot.trace is None and spot.nodes == 0 and fleet.local.rollout_slots == 0


def _local(fleet: FleetConfig, trainers_generate: bool) -> Iterator[Problem]:
    spot = fleet.spot
    if spot.trace is not None and spot.nodes:
        yield Problem(
            "fleet.spot.nodes", str(spot.nodes), "0 with fleet.spot.trace",
            "The trace says which nodes there are: leave one of the two keys out.",
        )  # fmt: skip
    if nobody_only_rolls_out(fleet) and not trainers_generate:
        yield Problem(
            "fleet.spot.nodes",
            "0, with no other slot that rolls out",
            "a slot that rolls out",
            "Set fleet.spot.nodes or fleet.local.rollout_slots to at least 1, or name a fleet.spot.trace.",
        )
