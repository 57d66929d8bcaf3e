"""Settings of the fleet that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from spotlight.config.errors import Problem
from spotlight.config.fleet import FleetConfig

_BEATS_MIN = 3
"""A lease outlives so many heartbeats: one that is lost or late must not cost work."""


def fleet_problems(fleet: FleetConfig) -> Iterator[Problem]:
    """Every contradiction among the keys of ``fleet``."""
    yield from _where(fleet)
    yield from _local(fleet)
    degrees = fleet.sequence_parallel
    if list(degrees) != sorted(set(degrees)) or degrees[0] != 1:
        yield Problem(
            "fleet.sequence_parallel", str(list(degrees)), "each degree once, ascending, from 1",
            f"Set {sorted({1, *degrees})}: a worker that is left alone must be a group.",
        )  # fmt: skip
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
            yield Problem(key, "set", "nothing with fleet.driver=inline", "Set fleet.driver=ray, or leave it out.")
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


def _local(fleet: FleetConfig) -> Iterator[Problem]:
    spot = fleet.spot
    if spot.trace is not None and spot.nodes:
        yield Problem(
            "fleet.spot.nodes", str(spot.nodes), "0 with fleet.spot.trace",
            "The trace says which nodes there are: leave one of the two keys out.",
        )  # fmt: skip
    if fleet.driver != "ray" or fleet.address is not None:
        return
    if fleet.learner_ranks > (slots := fleet.local.reserved_nodes * fleet.local.reserved_slots):
        yield Problem(
            "fleet.learner_ranks", str(fleet.learner_ranks),
            f"at most fleet.local.reserved_nodes x reserved_slots = {slots}",
            f"Lower it, or set fleet.local.reserved_slots={fleet.learner_ranks}.",
        )  # fmt: skip
    if spot.trace is not None and 0 < spot.notice_s <= fleet.drain_margin_s:
        yield Problem(
            "fleet.spot.notice_s", f"{spot.notice_s:g}",
            f"more than fleet.drain_margin_s = {fleet.drain_margin_s:g}, or 0",
            "With less, a noticed node has no time to do anything.",
        )  # fmt: skip
