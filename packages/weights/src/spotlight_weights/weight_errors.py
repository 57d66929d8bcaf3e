"""Errors of the weights package."""

from __future__ import annotations

from spotlight_rewards.base.errors import UserError


class WeightsError(UserError, RuntimeError):
    """Weights are wrong or unavailable; names what was found, what was expected, and the remedy."""


class NoSpaceError(WeightsError):
    """Shared memory is too small; names the directory, the bytes needed and those free."""


class PeerLostError(WeightsError):
    """The peer died, hangs, or lacks the requested weights; fetch them from elsewhere.

    The targets may hold a mixture and must be filled completely.
    """
