"""What the hub itself lists of a commit: size and hash of every file, to check what another node gave.

The list is in the hub's cache of this node (``trees/COMMIT.json``), if the hub was asked before, or it is
asked for while files are copied. On a cluster without a way to the hub there is none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spotlight_files.hub_snapshot import SnapshotManifest, SourceLostError, WantedModel

log = logging.getLogger("spotlight.files")

_ANSWERS_S = 10.0


@dataclass(frozen=True, slots=True)
class ListedFile:
    """``sha256`` of large files; small ones have git's hash only."""

    bytes: int
    git_sha1: str
    sha256: str | None


Listed = Mapping[str, ListedFile]


def asked_hub(wanted: WantedModel, directory: Path) -> Callable[[], Listed | None]:
    """Begin to ask for the list of the wanted commit; the result waits for it, for 10 s at most.

    Args:
        directory: of the model in the hub's cache.

    Returns:
        None where it is neither cached nor to be had; the log says why.
    """
    found = list[Listed | None]()

    def ask() -> None:
        try:
            found.append(cached_list(directory, str(wanted.revision)) or _from_hub(wanted))
        except Exception as error:  # noqa: BLE001 - of the network, in any of a client's forms; it is told
            log.info(
                "the hub does not list the files of %s: %s: %s", wanted.hub_id, type(error).__name__, error
            )
            found.append(None)

    thread = threading.Thread(target=ask, name="hub list", daemon=True)
    thread.start()

    def answer() -> Listed | None:
        thread.join(_ANSWERS_S)
        return found[0] if found else None

    return answer


def cached_list(directory: Path, commit: str) -> Listed | None:
    """The list that huggingface_hub keeps, in the format of its version 1; None: there is none."""
    try:
        kept = json.loads((directory / "trees" / f"{commit}.json").read_text(encoding="utf-8"))
        if kept["format_version"] != 1:
            return None
        return {
            path: ListedFile(entry.get("lfs_size", entry["size"]), entry["blob_id"], entry.get("lfs_sha256"))
            for path, entry in kept["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _from_hub(wanted: WantedModel) -> Listed:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    tree = HfApi().list_repo_tree(wanted.hub_id, revision=wanted.revision, recursive=True)
    files = (entry for entry in tree if isinstance(entry, RepoFile))
    return {
        file.path: ListedFile(file.size, file.blob_id, None if file.lfs is None else file.lfs.sha256)
        for file in files
    }


def require_listed(offer: SnapshotManifest, listed: Listed, blobs: Path) -> None:
    """Check copied files, whose content has the hashes that were offered, against the hub's list.

    Raises:
        SourceLostError: one is not what the hub has; it is removed.
    """
    for file in offer.files:
        entry, blob = listed.get(file.path), blobs / file.blob
        size = blob.stat().st_size  # not what was offered: a whole one may have been here before
        if entry is not None and entry.sha256 is None and size == entry.bytes:
            content = blob.read_bytes()  # small, or the hub would have hashed it
            same = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == entry.git_sha1
        else:
            same = entry is not None and (file.sha256, size) == (entry.sha256, entry.bytes)
        if not same:
            blob.unlink(missing_ok=True)
            raise SourceLostError(
                f"{file.path} is not the file that the hub lists in commit {offer.commit[:12]}"
            )
