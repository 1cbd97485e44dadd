"""Reads torch.distributed.checkpoint's files without executing anything in them, so that untrusted checkpoints are safe.

Both its index (`.metadata`) and its non-tensor values are pickles, which can call any function. Checksums in the manifest do not help:
whoever wrote the checkpoint wrote them too.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    *((METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorProperties")),
    *((METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),  # the second is Python 3.13's name
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
"""Classes of an index; dtypes of torch are allowed too."""


def enum_member(kind: Any, name: str) -> Enum:
    """What stands for `getattr`, by which Python 3.11.0 to 3.11.3 pickle a member of an enum."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it names an attribute {name!r} of {kind!r}, which is not allowed")
    return kind[name]


class Unpickler(pickle.Unpickler):
    """Loads only the classes of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")


class Reader(dcp.FileSystemReader):
    """A FileSystemReader that reads the index with `Unpickler`; it already loads tensors with weights_only=True."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            metadata = Unpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it contains a {type(metadata).__name__}, not Metadata")
            outside = {info.relative_path for info in metadata.storage_data.values()} - {file.name for file in path.parent.iterdir()}
            if outside:
                raise pickle.UnpicklingError(f"it points to {sorted(outside)[0]}, which is not in the folder")
        except (OSError, MemoryError):
            raise
        except Exception as error:  # malformed pickles raise almost anything
            raise ValueError(f"{path}: not the index of a checkpoint: {error}") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """A DefaultLoadPlanner that loads numbers, strings, lists and tensors only; torch's own unpickles anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
