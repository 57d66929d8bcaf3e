"""``spotlight train --fit``: settings with which a run fits one GPU, printed with why and what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from spotlight.config.requires import plain
from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting import Fitting, Needs
from spotlight.dry_run.fitting_sizes import GPU_GIB, USABLE, resized, sizes_of
from spotlight.dry_run.run_plan import needs_of
from spotlight.report.wording import size
from spotlight_plan.commands.fit.fit import Fit, fit
from spotlight_plan.commands.fit.published import trained
from spotlight_rewards.base.errors import UserError

_GIB = 2**30
SMALL_GIB = (12, 16, 24, 32)
"""Memory of GPUs that people have at home."""


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
        console.print(f"{title}: nothing to change, {_peak(found)}")
        return []
    _print(console, title, found)
    return found.overrides


def _memory(asked: str) -> tuple[float, float]:
    """Bytes of the GPU, and those that can be used."""
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
    tried = _changed(found) or "all settings as they are"
    nearest = "; ".join(others) or "none"
    return f"{title}: {_peak(found)} with {tried}. Nearest that fit: {nearest}."


def _peak(found: Fit) -> str:
    return f"{found.largest} takes {size(max(found.peaks.values()))}"


def _changed(found: Fit) -> str:
    return " ".join(f"{each.saving.key}={plain(each.value)}" for each in found.changes)


def _print(console: Console, title: str, found: Fit) -> None:
    console.print(f"{title}: {_peak(found)} with")
    for each in found.changes:
        saved = f"{each.phase} {size(each.before_bytes)} -> {size(each.after_bytes)}"
        was = f"(was {plain(each.was)}): {saved}; {each.saving.costs}"
        console.print(f"  {each.saving.key}={plain(each.value)} {was}", soft_wrap=True)


def nearest(found: Fit, needs: Needs) -> list[str]:
    """What would fit, if :func:`fit` did not make the run do so: smaller pictures here, a larger GPU."""
    now = found.config.rollout.height
    smaller = [
        size
        for size in sizes_of(found.config, needs.model)
        if size.height < now and fit(resized(found.config, size), needs.memory, found.usable_bytes).fits
    ]
    gpus = [gib for gib in GPU_GIB if fit(found.config, needs.memory, USABLE * gib * _GIB).fits]
    sizes = [f"rollout.height={size.height} rollout.width={size.width}" for size in smaller[-1:]]
    return [*sizes, *(f"a GPU of {gib} GB" for gib in gpus[:1])]


def small_fits(config: RunConfig, needs: Needs) -> Iterator[tuple[int, Fit]]:
    """What fits each of :data:`SMALL_GIB`."""
    for gib in SMALL_GIB:
        yield gib, fit(config, needs.memory, USABLE * gib * _GIB)


def _small_gpus(config: RunConfig, needs: Needs) -> Iterator[tuple[str, str, str]]:
    for gib, found in small_fits(config, needs):
        changed = _changed(found)
        why = f"{_peak(found)} with {changed}" if changed else _peak(found)
        yield f"a GPU of {gib} GB", "fits" if found.fits else "too small", why


FITTING = Fitting(fitted_overrides, _small_gpus, trained)
