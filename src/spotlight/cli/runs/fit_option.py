"""``spotlight train --fit``: settings with which a run fits one GPU, printed with why and what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from spotlight.config.requires import plain
from spotlight.report.wording import size
from spotlight_rewards.base.errors import UserError

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig
    from spotlight.dry_run.fit.fit import Fit

_GIB = 2**30


class FitError(UserError, ValueError):
    """``--fit`` cannot be read, or nothing fits."""


def fitted_overrides(config: RunConfig, asked: str, ranks: int, console: Console) -> list[str]:
    """Overrides with which ``config`` fits, which are printed.

    Args:
        asked: GB of a GPU, or ``auto``: this machine's.

    Raises:
        FitError: more than one process shares the work, no such GPU, or nothing fits.
        ModelError: the model's sizes are not known.
    """
    from spotlight.dry_run.fit.fit import fit
    from spotlight.dry_run.fit.whole_run import nearest
    from spotlight.dry_run.run_plan import needs_of

    if ranks > 1 or config.fleet.driver != "inline":
        where = f"{ranks} ranks" if ranks > 1 else f"fleet.driver={config.fleet.driver}"
        raise FitError(f"--fit with {where}; expected one process with one GPU. Leave out --fit, or these.")
    total, usable = _memory(asked)
    needs = needs_of(config)
    found = fit(config, needs.memory, usable)
    title = f"To fit {size(usable)} of {size(total)}"
    if not found.fits:
        raise FitError(_refusal(title, found, nearest(found, needs)))
    if not found.changes:
        console.print(f"{title}: nothing to change, {found.largest} takes {size(max(found.peaks.values()))}")
        return []
    _print(console, title, found)
    return found.overrides


def _memory(asked: str) -> tuple[float, float]:
    """Bytes of the GPU, and those that can be used."""
    from spotlight.dry_run.fitting_sizes import USABLE

    if asked != "auto":
        try:
            total = float(asked) * _GIB
        except ValueError:
            total = 0.0
        if not 0 < total < float("inf"):
            raise FitError(
                f"--fit is {asked!r}; expected GB of a GPU, as 24, or auto for that of this machine."
            )
        return total, USABLE * total
    import torch

    if not torch.cuda.is_available():
        raise FitError("--fit is auto, and torch sees no GPU here; expected one. Name its size: --fit 24.")
    free, whole = torch.cuda.mem_get_info()
    return float(whole), min(USABLE * whole, float(free))


def _refusal(title: str, found: Fit, others: list[str]) -> str:
    tried = (
        " ".join(f"{each.saving.key}={plain(each.value)}" for each in found.changes)
        or "all settings as they are"
    )
    most = size(max(found.peaks.values()))
    nearest = "; ".join(others) or "none"
    return f"{title}: {found.largest} takes {most} with {tried}. Nearest that fit: {nearest}."


def _print(console: Console, title: str, found: Fit) -> None:
    console.print(f"{title}: {found.largest} takes {size(max(found.peaks.values()))} with")
    for each in found.changes:
        saved = f"{each.phase} {size(each.before_bytes)} -> {size(each.after_bytes)}"
        line = (
            f"  {each.saving.key}={plain(each.value)} (was {plain(each.was)}): {saved}; {each.saving.costs}"
        )
        console.print(Text(line), soft_wrap=True)
