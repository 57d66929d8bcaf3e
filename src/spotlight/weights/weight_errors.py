"""The errors of this room."""

from __future__ import annotations


class WeightsError(RuntimeError):
    """Weights are not what was asked for, or cannot be had: says what was found, expected, and the remedy."""


class NoSpaceError(WeightsError):
    """Shared memory is too small: names the directory, the bytes needed and those free."""


class PeerLostError(WeightsError):
    """The peer died, hangs, or has not (or no longer) what was asked for: take the weights from elsewhere.

    What was to be filled holds a mixture now and must be filled whole by another way.
    """
