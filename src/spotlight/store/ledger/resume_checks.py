"""Whether a ledger and a run's checkpoints belong together, so that the run may go on from them."""

from __future__ import annotations

from spotlight.store.checkpoints import Checkpoint
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import DamagedCheckpointError, LedgerError


def require_resumable(ledger: SqliteLedger, newest: Checkpoint | None, paths: RunPaths) -> None:
    """Read the whole ledger, and compare it with the checkpoint to resume from.

    Raises:
        LedgerError: it is damaged, or not the one that the checkpoint was written with.
        DamagedCheckpointError: checkpoints were committed, and there is none.
    """
    ledger.require_sound()
    if newest is None:
        if (committed := ledger.furthest_checkpoint()) is not None:
            raise DamagedCheckpointError(
                f"{paths.checkpoints}: no checkpoint is here, but by the ledger one was committed at record "
                f"{committed} of {ledger.position()}. Restore the folder from a copy, or delete the run "
                "directory to start again."
            )
        return
    position, expected = newest.header.ledger_position, newest.header.ledger_sha256
    if position > ledger.position():
        found = f"ends at record {ledger.position()}"
    elif expected and (digest := ledger.digest_at(position)) != expected:
        found = f"has the digest {digest} there, expected {expected}"
    else:
        return
    raise LedgerError(
        f"{paths.ledger}: not the ledger of {newest.directory.name}, which was written at record {position}: "
        f"it {found}. It is of another run, of another copy, or damaged: restore the ledger and the "
        "checkpoints from one copy of the run, or start a run of another name."
    )
