"""A checkpoint's manifest: its files with size and SHA-256.

``manifest.json`` also carries the SHA-256 of its own text, so any flipped byte is detected and located.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import open_regular
from spotlight_rewards.base.typed_json import typed

MANIFEST = "manifest.json"
_ADDED = ("ledger_sha256", "versions", "contents")
"""Fields of the header that older versions did not write."""


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """What the checkpoint captures.

    Attributes:
        iteration: first iteration of a resumed run.
        ledger_position: last ledger record included.
        ledger_sha256: the ledger's digest there.
        versions: of libraries, by package.
        contents: hashes of files that decide the run's numbers, by the key that names them. Empty, as the
            digest and versions are: an older version wrote it.
    """

    iteration: int
    ledger_position: int
    config_digest: str
    package_version: str
    ledger_sha256: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 (hexadecimal) of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A checkpoint's header, and its files by relative POSIX path."""

    header: CheckpointHeader
    files: Mapping[str, FileEntry]


_MANIFEST = TypeAdapter(CheckpointManifest)


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that does not match its manifest.

    Attributes:
        checkpoint: name of its directory; ``file`` is relative to it.
        expected, found: hash, size or state.
    """

    checkpoint: str
    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.checkpoint}/{self.file}: expected {self.expected}, found {self.found}"


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_manifest(directory: Path, header: CheckpointHeader) -> CheckpointManifest:
    """Hash every file. Raises StoreError for anything but regular files and directories."""
    files: dict[str, FileEntry] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise StoreError(
                f"{path}: a checkpoint holds regular files only; write the file's content there."
            )
        if path.is_file():
            files[path.relative_to(directory).as_posix()] = FileEntry(path.stat().st_size, sha256_of(path))
    return CheckpointManifest(header, files)


def render(manifest: CheckpointManifest) -> bytes:
    body = asdict(manifest)
    for key in _ADDED:
        if not body["header"][key]:
            del body["header"][key]
    unsigned = json.dumps(body, indent=1, sort_keys=True)
    return json.dumps({**body, "sha256": _text_hash(unsigned)}, indent=1, sort_keys=True).encode() + b"\n"


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(directory: Path) -> CheckpointManifest | Damage:
    """Read a checkpoint's manifest, or report its damage."""
    path = directory / MANIFEST
    if not path.is_file():
        return Damage(directory.name, MANIFEST, "a manifest", "no such file")
    with open_regular(path) as file:
        content = file.read()
    try:
        manifest = typed(_MANIFEST, json.loads(content), "manifest")
        expected = render(manifest)
    except (ValueError, RecursionError):
        return Damage(directory.name, MANIFEST, "a manifest", f"{len(content)} bytes that are none")
    if content != expected:
        listed = f"sha256 {_text_hash(expected.decode())}"
        return Damage(directory.name, MANIFEST, f"{listed} of the text", f"sha256 {sha256_of(path)}")
    return manifest


def verify(directory: Path) -> tuple[CheckpointManifest | None, tuple[Damage, ...]]:
    """Verify every byte of a checkpoint, which holds no FIFO to wait for; the manifest is None if damaged."""
    manifest = read_manifest(directory)
    if isinstance(manifest, Damage):
        return None, (manifest,)
    damages = (_compare(directory, name, entry) for name, entry in manifest.files.items())
    others = (
        Damage(directory.name, path.relative_to(directory).as_posix(), "a file or none", "something else")
        for path in directory.rglob("*")
        if not (path.is_file() or path.is_dir())
    )
    return manifest, (*(damage for damage in damages if damage is not None), *others)


def _compare(directory: Path, name: str, entry: FileEntry) -> Damage | None:
    path = directory / name
    if not os.path.isfile(path):  # noqa: PTH113 - which raises for a name that no file can have
        return Damage(directory.name, name, f"{entry.size_bytes} bytes", "no such file")
    size = path.stat().st_size
    if size != entry.size_bytes:
        return Damage(directory.name, name, f"{entry.size_bytes} bytes", f"{size} bytes")
    found = sha256_of(path)
    if found != entry.sha256:
        return Damage(directory.name, name, f"sha256 {entry.sha256}", f"sha256 {found}")
    return None
