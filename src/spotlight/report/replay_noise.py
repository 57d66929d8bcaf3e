"""How far rounding alone moves replayed log-probs from the rollouts', against the clip of the ratio."""

from __future__ import annotations

from collections.abc import Mapping


def replay_noise_note(row: Mapping[str, float], clip_range: float | None) -> str | None:
    """What to tell about an iteration's ``replay/`` metrics; None for algorithms without a ratio.

    Log-probs are means over the latent, and so is ``clip_range``: where rounding exceeds it, updates after a
    batch's first are clipped by noise.
    """
    found = [value for name, value in row.items() if name.startswith("replay/")]
    if clip_range is None or not found:
        return None
    noise = max(found)
    note = f"rounding moves replayed log-probs by {noise:.1e} (algorithm.clip_range {clip_range:g})"
    if noise <= clip_range:
        return note
    return (
        f"WARNING: {note}: with updates_per_batch above 1, noise decides what is clipped. Set "
        "algorithm.old_log_probs=stop_gradient, a larger algorithm.clip_range, or learner.autocast=none with "
        "model.dtype=float32"
    )
