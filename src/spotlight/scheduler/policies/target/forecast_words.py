"""What the rest of a run takes and costs, in a sentence. Pure."""

from __future__ import annotations

import math

from spotlight.scheduler.policies.target.choose_nodes import Rest, TargetDecision

_MINUTE_S, _HOUR_S = 60.0, 3600.0


def forecast_words(decision: TargetDecision, rest: Rest) -> str:
    """``4 spot nodes instead of 2: the rest (28 iterations) takes 2.1 to 2.6 h and costs $41 to $52; ...``"""
    nodes = _plural(decision.nodes, "spot node")
    if decision.nodes != rest.asked:
        nodes += f" instead of {rest.asked}"
    then = decision.then
    if math.isinf(then.seconds):
        return f"{nodes}: nothing rolls out"
    takes, costs = _span(then.range_s), _dollars(then.range_usd)
    left = [
        *([] if rest.left_s is None else [f"{_one_span(rest.left_s)} to the deadline"]),
        *([] if rest.left_usd is None else [f"{_one_sum(rest.left_usd)} of the budget"]),
    ]
    iterations = _plural(rest.iterations, "iteration")
    forecast = f"{nodes}: the rest ({iterations}) takes {takes} and costs {costs}"
    return f"{forecast}; there are {' and '.join(left)} left: {_verdict(decision, rest)}"


def _verdict(decision: TargetDecision, rest: Rest) -> str:
    best = decision.best
    if decision.reachable:
        if decision.nodes == best.nodes or (
            _fits(decision.then.range_s[1], rest.left_s) and _fits(decision.then.range_usd[1], rest.left_usd)
        ):
            return "that holds"
        return f"{_plural(best.nodes, 'node')} would hold, and come next"
    over = [
        *(
            []
            if _fits(best.seconds, rest.left_s)
            else [f"{_one_span(best.seconds - (rest.left_s or 0.0))} late"]
        ),
        *([] if _fits(best.usd, rest.left_usd) else [f"{_one_sum(best.usd - (rest.left_usd or 0.0))} over"]),
    ]
    by = f", about {' and '.join(over)}" if over else ", with too little to spare"
    return f"out of reach; what comes nearest is {_plural(best.nodes, 'node')}{by}"


def _fits(needed: float, left: float | None) -> bool:
    return left is None or needed <= left


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _span(seconds: tuple[float, float]) -> str:
    low, high = seconds
    if high < 2 * _MINUTE_S:
        unit, size, digits = "s", 1.0, 0
    elif high < 2 * _HOUR_S:
        unit, size, digits = "min", _MINUTE_S, 0 if high >= 10 * _MINUTE_S else 1
    else:
        unit, size, digits = "h", _HOUR_S, 1
    return f"{_range(f'{low / size:.{digits}f}', f'{high / size:.{digits}f}')} {unit}"


def _one_span(seconds: float) -> str:
    return _span((max(0.0, seconds), max(0.0, seconds)))


def _one_sum(usd: float) -> str:
    return _dollars((max(0.0, usd), max(0.0, usd)))


def _dollars(usd: tuple[float, float]) -> str:
    digits = 0 if usd[1] >= 100 else 2 if usd[1] >= 0.1 else 4
    return _range(f"${usd[0]:.{digits}f}", f"${usd[1]:.{digits}f}")


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
