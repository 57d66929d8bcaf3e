"""Human-readable numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from spotlight.store.run_estimate import RunEstimate, Span
from spotlight_rewards.base.file_errors import size as size


def duration(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:04:05``."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def money(usd: float) -> str:
    """Dollars to the cent, or two significant digits below that: ``$12.34``, ``$0.05``, ``$0.0018``."""
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.2g}"


def estimate_words(estimate: RunEstimate) -> str:
    """Time and dollars with their ranges, and what they rest on; one line."""
    work = span_words(estimate.work_s, duration)
    rest = f"the whole run of {plural(estimate.iterations, 'iteration')}. It rests on {estimate.rests_on}."
    return f"{work} of work, {span_words(estimate.usd, money)} for {rest}"


def span_words(span: Span, said: Callable[[float], str]) -> str:
    """``3:10:00 (2:40:00 to 4:05:00)``; without bounds that read the same."""
    likely, least, most = (said(end) for end in (span.likely, span.least, span.most))
    return likely if least == likely == most else f"{likely} ({least} to {most})"


def count(number: float) -> str:
    """Exact with separators below a million, then ``2.48 M``, ``20.43 B``."""
    for one, unit in ((1e9, "B"), (1e6, "M")):
        if abs(number) >= one:
            return f"{number / one:.2f} {unit}"
    return f"{number:,.0f}"


def score(mean: float | None, stderr: float | None = None) -> str:
    """``0.781 ± 0.021``; a dash for a missing value."""
    if mean is None or not math.isfinite(mean):
        return "-"
    if stderr is None or not math.isfinite(stderr):
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {stderr:.3f}"


def plural(number: int, one: str) -> str:
    """``1 attempt``, ``2 attempts``."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"
