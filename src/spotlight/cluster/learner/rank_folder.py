"""The run directory, as a learner rank's node has it: the head's own, or one that is carried.

Where no storage is shared, files that the rank writes are sent through the blob store, whose process is on
the head's node, and those it reads are brought from there. Paths are the head's, absolute or relative to its
working directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from spotlight.cluster.blobs.blob_client import BlockingBlobClient
from spotlight.config.schema import RunConfig
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.file_errors import StoreError, storage_errors

PIECE_BYTES = 16 << 20
_STORAGE_SETTLES_S = 10.0
"""A network file system may take seconds to show a new file to other machines."""
_LOOKS_AGAIN_S = 0.2


class RankFolder:
    """One rank's. Methods raise StoreError or OSError of either end's disk, and what ``files`` raises.

    Args:
        token: what the head wrote into its run directory (:func:`write_token`); empty: it is shared.
        stack: ends what is of this process alone.

    Attributes:
        shared: whether this node sees the head's run directory.
        config: the configuration, with a ``runs_dir`` of this node.
    """

    def __init__(self, config: RunConfig, token: str, files: BlockingBlobClient, stack: ExitStack) -> None:
        self.config, self._files, self._heads = config, files, _run_of(config)
        self.shared = not token or _shows(config, token)
        if not self.shared:
            self._own = Path(stack.enter_context(TemporaryDirectory(prefix="spotlight-learner-")))
            self.config = config.model_copy(update={"runs_dir": self._own})

    @contextmanager
    def read(self, directory: Path) -> Iterator[Path]:
        """A directory with the files that the head's holds."""
        with self._here(directory) as here:
            if not self.shared:
                bring_folder(self._files, self._named(directory), here)
            yield here

    @contextmanager
    def written(self, directory: Path) -> Iterator[Path]:
        """A directory whose files are the head's, too, once the block is left."""
        with self._here(directory) as here:
            yield here
            if not self.shared:
                send_folder(here, self._files, self._named(directory))

    def deliver(self, path: Path) -> Path:
        """A file or folder of :attr:`config`'s run as the head has it: brought there with all beside it."""
        if self.shared:
            return path
        relative = path.relative_to(_run_of(self.config))
        if (folder := _run_of(self.config) / relative.parts[0]).is_dir():
            send_folder(folder, self._files, relative.parts[0])
        return self._heads / relative

    @contextmanager
    def _here(self, directory: Path) -> Iterator[Path]:
        if self.shared:
            yield directory
        else:
            with TemporaryDirectory(dir=self._own) as here:
                yield Path(here)

    def _named(self, directory: Path) -> str:
        return Path(os.path.relpath(directory, self._heads)).as_posix()


def write_token(config: RunConfig, token: str) -> Path:
    """Write ``token`` to the run directory, for ranks that share it to find. Remove it afterwards.

    Raises StoreError.
    """
    path = _token_path(config)
    with storage_errors("cannot write the learner's token", path):
        path.write_text(token, encoding="utf-8")
    return path


def send_folder(local: Path, files: BlockingBlobClient, folder: str) -> None:
    """Write all files below ``local`` into a folder of the run directory. Raises as ``files``, OSError."""
    for path in sorted(each for each in local.rglob("*") if each.is_file()):
        target, start = f"{folder}/{path.relative_to(local).as_posix()}", 0
        with path.open("rb") as file:
            while (piece := file.read(PIECE_BYTES)) or not start:
                files.write_file(target, start, piece)
                start += len(piece)
                if not piece:
                    break


def bring_folder(files: BlockingBlobClient, folder: str, local: Path) -> None:
    """The other way. Raises as ``files``, OSError, StoreError: a file has become shorter."""
    for path, size_bytes in files.file_sizes(folder).items():
        target = local / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while (start := file.tell()) < size_bytes:
                piece = files.read_file(f"{folder}/{path}", start, min(PIECE_BYTES, size_bytes - start))
                if not piece:
                    raise StoreError(f"{folder}/{path}: {start} bytes; expected {size_bytes}.")
                file.write(piece)


def _shows(config: RunConfig, token: str) -> bool:
    path = _token_path(config)
    give_up_s = time.monotonic() + _STORAGE_SETTLES_S
    while _content(path) != token:
        # Storage that is shared was so before this run began.
        if time.monotonic() >= give_up_s or not config.runs_dir.is_dir():
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208 - a network file system then looks for new files
        time.sleep(_LOOKS_AGAIN_S)
    return True


def _run_of(config: RunConfig) -> Path:
    return RunPaths(config.runs_dir / config.name).path


def _token_path(config: RunConfig) -> Path:
    return _run_of(config) / "storage-token"


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
