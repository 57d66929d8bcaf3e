"""The controller's state between two iterations, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.scheduler.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a resumed run starts from.

    Attributes:
        iteration: the one to start with.
        leases_granted: by the queue, so far.
        ledger: see :meth:`~spotlight.scheduler.ledger.Ledger.snapshot`.
        exploration: see :meth:`~spotlight.scheduler.exploration.explorer.Explorer.snapshot`; empty without
        exploration.
    """

    iteration: int
    version: PolicyVersion
    leases_granted: int
    ledger: Mapping[str, object]
    exploration: Mapping[str, object]

    def as_json(self) -> dict[str, object]:
        """What :meth:`parse` takes."""
        tree: dict[str, object] = {
            "iteration": self.iteration,
            "version": self.version,
            "leases_granted": self.leases_granted,
            "ledger": dict(self.ledger),
        }
        if self.exploration:
            tree["exploration"] = dict(self.exploration)
        return tree

    @classmethod
    def parse(cls, tree: Mapping[str, object]) -> Snapshot:
        """Raises ValueError for anything else than what :meth:`as_json` made."""
        iteration, version = tree.get("iteration"), tree.get("version")
        leases, ledger = tree.get("leases_granted"), tree.get("ledger")
        exploration = tree.get("exploration", {})
        if not (
            isinstance(iteration, int)
            and isinstance(version, int)
            and isinstance(leases, int)
            and isinstance(ledger, Mapping)
            and isinstance(exploration, Mapping)
        ):
            raise ValueError(f"not a controller snapshot: {sorted(tree)}")
        return cls(iteration, PolicyVersion(version), leases, ledger, exploration)
