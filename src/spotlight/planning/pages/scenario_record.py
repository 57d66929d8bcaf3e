"""A comparison as JSON: everything that the table says, what it rests on, and enough to repeat it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from spotlight.fleet.traces.statistics import statistics
from spotlight.planning.pricing import PriceTag
from spotlight.planning.scenarios.prepare import Prepared
from spotlight.planning.scenarios.profile import NamedFigure, assumptions
from spotlight.planning.simulation_outcome import Outcome
from spotlight.scheduler.types import NodeKind, Phase


def assumed_of(prepared: Prepared) -> tuple[NamedFigure, ...]:
    """The guesses of the profile that this scenario rests on."""
    cluster = prepared.file.cluster
    return assumptions(prepared.profile, (cluster.reserved.gpu_type, cluster.spot.gpu_type))


def prices_of(prepared: Prepared) -> dict[str, PriceTag]:
    """What a GPU costs, by what it is rented as."""
    tariff = prepared.tariff
    tags = {"reserved": tariff.reserved, "on demand": tariff.on_demand, "spot": tariff.spot}
    return {name: tag for name, tag in tags.items() if tag is not None}


def record_of(prepared: Prepared, outcomes: Sequence[Outcome], now: datetime) -> dict[str, object]:
    """What ``--json`` writes."""
    trace = prepared.trace
    return {
        "scenario": prepared.file.model_dump(mode="json"),
        "profile": prepared.profile.name,
        "prices": {
            name: {
                "usd_gpu_h": tag.usd_gpu_h,
                "source": tag.source,
                "as_of": tag.as_of.isoformat() if tag.as_of else None,
                "age_days": (now - tag.as_of).days if tag.as_of else None,
            }
            for name, tag in prices_of(prepared).items()
        },
        "trace": {"source": trace.source} | _finite(asdict(statistics(trace))),
        "assumed": [asdict(figure) for figure in assumed_of(prepared)],
        "strategies": [outcome_record(outcome) for outcome in outcomes],
    }


def outcome_record(outcome: Outcome) -> dict[str, object]:
    """One strategy's figures; what is unknown is null."""
    names = set(Outcome.__slots__) - {"gpu_s", "target", "filled_s"}
    record = _finite({name: getattr(outcome, name) for name in Outcome.__slots__ if name in names})
    target = outcome.target
    record["iterations_to_target"] = target.model_dump() if target is not None else None
    record["gpu_s"] = {
        kind.value: {phase.value: outcome.gpu_s.get((kind, phase), 0.0) for phase in Phase}
        for kind in NodeKind
    }
    record["filled_s"] = {filler.value: seconds for filler, seconds in outcome.filled_s.items()}
    return record


def _finite(numbers: dict[str, object]) -> dict[str, object]:
    """JSON has no NaN."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in numbers.items()
    }
