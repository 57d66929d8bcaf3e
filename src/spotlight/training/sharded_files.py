"""Reads torch's distributed checkpoints, whose index is a pickle: of somebody else's run it may hold code."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

INDEX = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # its name in Python 3.13
}
"""All that an index of tensors consists of, but for types of tensors and their sizes."""
_DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    ArithmeticError,
    ImportError,
    struct.error,
)
"""What unpickling raises of other bytes, beside UnpicklingError."""


class _IndexUnpickler(pickle._Unpickler):
    """In Python: the one in C takes gigabytes at a few bytes' word."""

    def find_class(self, module: str, name: str) -> Any:
        plain = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if not plain and name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors does")
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """Reads tensors, and nothing that torch would unpickle without looking.

    Raises:
        pickle.UnpicklingError: the index holds something else, or names files outside of its directory.
    """

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index, checked."""
        try:
            # From memory: a file would be asked for as many bytes as the index says.
            content = io.BytesIO((Path(self.path) / INDEX).read_bytes())
            return self._checked(_IndexUnpickler(content).load())
        except _DAMAGED as error:
            raise pickle.UnpicklingError(f"its index is damaged ({type(error).__name__}: {error})") from error

    def _checked(self, index: object) -> Metadata:
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"its index is a {type(index).__name__}; expected torch's Metadata")
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name!r} is a {type(entry).__name__}; expected a tensor")
        for place in index.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"it names {place.relative_path!r}, outside of its directory")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index
