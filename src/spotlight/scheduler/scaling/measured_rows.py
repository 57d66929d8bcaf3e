"""What is measured and forecast, in an iteration's row of metrics; a resumed run reads it again. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from spotlight.scheduler.scaling.iteration_model import MeasuredIteration
from spotlight.scheduler.scaling.target_policy import TargetDecision

_SECONDS, _WORKERS, _WORK = "target/iteration_s", "target/workers", "target/work_s"
_NODES, _SETTLED, _ASKED = "target/spot_nodes", "target/settled", "target/nodes_asked"


def iteration_row(measured: MeasuredIteration | None, asked: int) -> dict[str, float]:
    """Figures of an iteration; ``asked``: spot nodes asked for from now on."""
    row = {_ASKED: float(asked)}
    if measured is not None:
        row |= {
            _SECONDS: measured.seconds,
            _WORKERS: measured.workers,
            _WORK: measured.work_s,
            _NODES: measured.spot_nodes,
            _SETTLED: -1.0 if measured.asked is None else float(measured.asked),
        }
    return row


def decision_row(decision: TargetDecision | None) -> dict[str, float]:
    """Forecast of the rest; empty before anything is forecast."""
    if decision is None:
        return {}
    then = decision.then
    return {
        "target/left_s": then.seconds,
        "target/left_s_low": then.range_s[0],
        "target/left_s_high": then.range_s[1],
        "target/left_usd": then.usd,
        "target/left_usd_low": then.range_usd[0],
        "target/left_usd_high": then.range_usd[1],
        "target/reachable": float(decision.reachable),
    }


def measured_before(rows: Iterable[Mapping[str, float]]) -> tuple[list[MeasuredIteration], int | None]:
    """What earlier attempts measured, the oldest first, and asked for last; None: nothing."""
    found: list[MeasuredIteration] = []
    asked: int | None = None
    for row in rows:
        if _ASKED in row:
            asked = int(row[_ASKED])
        figures = [row.get(name, math.nan) for name in (_SECONDS, _WORKERS, _WORK, _NODES, _SETTLED)]
        if all(map(math.isfinite, figures)):
            seconds, workers, work_s, nodes, settled = figures
            found.append(
                MeasuredIteration(seconds, workers, work_s, nodes, None if settled < 0 else int(settled))
            )
    return found, asked
