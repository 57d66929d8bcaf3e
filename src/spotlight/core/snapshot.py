"""The controller's state between two iterations, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.core.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a resumed run starts from.

    Attributes:
        iteration: the one to start with.
        leases_granted: by the queue, so far.
        chosen: seeds that exploration chose for ``iteration``, by slot.
        ledger: see :meth:`~spotlight.core.ledger.Ledger.snapshot`.
    """

    iteration: int
    version: PolicyVersion
    leases_granted: int
    chosen: Mapping[int, tuple[int, ...]]
    ledger: Mapping[str, object]

    def as_json(self) -> dict[str, object]:
        """What :meth:`parse` takes."""
        tree: dict[str, object] = {
            "iteration": self.iteration,
            "version": self.version,
            "leases_granted": self.leases_granted,
            "ledger": dict(self.ledger),
        }
        if self.chosen:
            tree["chosen"] = {str(slot): list(seeds) for slot, seeds in self.chosen.items()}
        return tree

    @classmethod
    def parse(cls, tree: Mapping[str, object]) -> Snapshot:
        """Raises ValueError for anything else than what :meth:`as_json` made."""
        iteration, version = tree.get("iteration"), tree.get("version")
        leases, ledger, chosen = tree.get("leases_granted"), tree.get("ledger"), tree.get("chosen", {})
        if not (
            isinstance(iteration, int)
            and isinstance(version, int)
            and isinstance(leases, int)
            and isinstance(ledger, Mapping)
            and isinstance(chosen, Mapping)
        ):
            raise ValueError(f"not a controller snapshot: {sorted(tree)}")
        seeds = {int(slot): tuple(int(seed) for seed in chosen[slot]) for slot in chosen}
        return cls(iteration, PolicyVersion(version), leases, seeds, ledger)
