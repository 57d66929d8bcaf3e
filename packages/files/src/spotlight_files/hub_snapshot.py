"""A model's files in the hub's cache of a node: which a run needs, whether they are here, and serving them.

The cache is huggingface_hub's: ``blobs`` named by content, ``snapshots/COMMIT`` of links to them, ``refs`` by
which a branch or tag finds its commit, and ``trees``, by which newer versions know a commit's files. No
torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol, TypeAlias

from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import (
    PICKLED,
    PipelineComponent,
    PipelineFiles,
    check_weights,
    hub_patterns,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class WantedModel:
    """What a run needs of a hub model.

    Attributes:
        revision: branch, tag or commit; None: the main branch. Only a commit is asked of other nodes.
        patterns: of the files.
        weights: components with weights, of those that ``model_index.json`` names.
    """

    hub_id: str
    revision: str | None
    patterns: tuple[str, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file of a snapshot; ``blob``: its name among the blobs, equal for equal content."""

    path: str
    blob: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """The files of one commit."""

    commit: str
    files: tuple[SnapshotFile, ...]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)


def wanted_of(hub_id: str, revision: str | None, components: Mapping[str, PipelineComponent]) -> WantedModel:
    """What :func:`spotlight_files.pipeline_files.locate` would download."""
    weights = tuple(name for name, part in components.items() if part.weights and not part.lazy)
    return WantedModel(hub_id, revision, tuple(hub_patterns(components)), weights)


def is_commit(revision: str | None) -> bool:
    """Whether a revision names the same files for ever."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def cache_directory() -> Path:
    """The hub's cache on this node."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def model_directory(cache: Path, hub_id: str) -> Path:
    """A model's directory in the cache."""
    return cache / f"models--{hub_id.replace('/', '--')}"


def on_disk(wanted: WantedModel, cache: Path) -> Path | None:
    """The snapshot, if all that is wanted of it is here; asks no hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        root = Path(
            snapshot_download(
                wanted.hub_id,
                revision=wanted.revision,
                cache_dir=cache,
                local_files_only=True,
                allow_patterns=list(wanted.patterns),
                ignore_patterns=list(PICKLED),
            )
        )
        files = PipelineFiles(root)
        for name in wanted.weights:  # without a cached tree, the hub's code returns parts of snapshots, too
            if files.component_class(name) is not None:
                check_weights(files.folder(name))
    except (LocalEntryNotFoundError, HFValidationError, ModelError):
        return None
    return root


class ModelFileServer:
    """Reads files of snapshots for other nodes; no others than it has offered.

    Args:
        cache: None: this node's.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache_directory() if cache is None else cache
        self._offered: dict[str, Path] = {}

    def offer(self, wanted: WantedModel) -> SnapshotManifest | None:
        """The files here; None if any is missing."""
        root = on_disk(wanted, self._cache)
        if root is None:
            return None
        files = tuple(_file(root, path) for path in _matching(root, wanted.patterns))
        self._offered = {file.path: (root / file.path).resolve() for file in files}
        return SnapshotManifest(root.name, files)

    def read(self, path: str, start: int, length: int) -> bytes:
        """Bytes of an offered file; fewer at its end. OSError if it is gone, KeyError if not offered."""
        with self._offered[path].open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(length)


class SourceLostError(RuntimeError):
    """A source died, is silent, or sent something else than it offered."""


def require_fit(offer: SnapshotManifest, wanted: WantedModel) -> None:
    """Check names that another node gave before any becomes a path here. Raises SourceLostError."""
    for file in offer.files:
        inside = "\0" not in file.path and {"", ".", ".."}.isdisjoint(file.path.split("/"))
        known = _BLOB.fullmatch(file.blob) and _SHA256.fullmatch(file.sha256) and file.bytes >= 0
        known = known and (len(file.blob) < len(file.sha256) or file.blob == file.sha256)
        if not (inside and known and _is_wanted(file.path, wanted.patterns)):
            raise SourceLostError(f"it offers {file.path!r} as {file.blob!r}, which is no file of the model")
    if offer.commit != wanted.revision:
        raise SourceLostError(f"it offers the commit {offer.commit!r}; expected {wanted.revision}")


PendingBytes: TypeAlias = Callable[[], bytes]
"""Waits for bytes on their way. Raises SourceLostError."""


class FileSource(Protocol):
    """Another node's :class:`ModelFileServer`; methods raise SourceLostError."""

    name: str

    def offer(self, wanted: WantedModel) -> SnapshotManifest | None:
        """See :meth:`ModelFileServer.offer`."""
        ...

    def read(self, path: str, start: int, length: int) -> PendingBytes:
        """Ask for :meth:`ModelFileServer.read`; returns at once."""
        ...


def _matching(root: Path, patterns: Sequence[str]) -> list[str]:
    """As the hub's own code matches them."""
    names = (path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file())
    return [name for name in names if _is_wanted(name, patterns)]


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns) and not any(
        fnmatch(name, pattern) for pattern in PICKLED
    )


def _file(root: Path, name: str) -> SnapshotFile:
    """The hub names large files by their SHA-256; that of others, which are small, is computed."""
    path = root / name
    content = path.resolve()
    named = content.name if content.parent.name == "blobs" else ""
    if _SHA256.fullmatch(named):
        sha256 = named
    else:
        with content.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return SnapshotFile(name, named or sha256, content.stat().st_size, sha256)


def cached_commit(hub_id: str) -> str | None:
    """The commit of a model's main branch in the cache; None: it was never loaded from there."""
    branch = model_directory(cache_directory(), hub_id) / "refs" / "main"
    return branch.read_text(encoding="utf-8").strip() if branch.is_file() else None
