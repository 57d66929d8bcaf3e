"""How far rounding alone moves replayed log-probs from the rollouts', against the clip of the ratio."""

from __future__ import annotations

from collections.abc import Mapping

from spotlight.config.schema import RunConfig


def noisy_clip_range(config: RunConfig) -> float | None:
    """The clip range of ratios that rounding reaches; None where all are 1, or none is of log-probs."""
    algorithm = config.algorithm
    old = getattr(algorithm, "old_log_probs", None)
    if old == "rollout" or (old == "recompute" and config.learner.updates_per_batch > 1):
        clip_range: float = getattr(algorithm, "clip_range")  # noqa: B009 - of those with old_log_probs
        return clip_range
    return None


def replay_noise_note(row: Mapping[str, float], clip_range: float | None) -> str | None:
    """What to say about an iteration's ``replay/`` metrics; None if :func:`noisy_clip_range` is.

    Log-probs are means over the latent, and so is ``clip_range``: where rounding exceeds it, noise decides
    which updates are clipped.
    """
    found = [value for name, value in row.items() if name.startswith("replay/")]
    if clip_range is None or not found:
        return None
    noise = max(found)
    note = f"rounding moves replayed log-probs by {noise:.1e} (algorithm.clip_range {clip_range:g})"
    if noise <= clip_range:
        return note
    return (
        f"WARNING: {note}: noise decides what is clipped. Set algorithm.old_log_probs=stop_gradient, a "
        "larger algorithm.clip_range, or learner.autocast=none with model.dtype=float32"
    )
