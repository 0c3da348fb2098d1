"""Safetensors files copied tensor by tensor: bytes in, the same bytes out, one small buffer in between.

A safetensors file is a little-endian u64 header length, a JSON header {name: {dtype, shape, data_offsets}} and the
tensors' bytes without gaps. Copying bytes needs no tensor library, keeps every dtype, and bounds host memory by
`CHUNK_BYTES` however large a shard is. The bytes are looked at once on their way, for weights that are not finite.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mhar.errors import CheckpointError

CHUNK_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its name, the format's dtype name, its shape, and [begin, end) in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The header of one safetensors file; `entries` in the order of their bytes."""

    path: Path
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    data_start: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    def read(self, name: str) -> Tensor:
        """One tensor, copied into memory."""
        entry = next((e for e in self.entries if e.name == name), None)
        if entry is None:
            raise CheckpointError(f"{self.path.name} holds no tensor {name!r}")
        with self.path.open("rb") as file:
            file.seek(self.data_start + entry.begin)
            data = bytearray(file.read(entry.num_bytes))
        if not data:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def open_tensor_file(path: Path) -> TensorFile:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: not a safetensors file, an unknown dtype, or fewer or more bytes than its header promises.
    """
    size = path.stat().st_size
    header, data_start = _read_header(path, size)
    metadata = header.pop("__metadata__", {})
    entries = sorted((_entry(path, name, value) for name, value in header.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise CheckpointError(f"{path.name} is damaged: tensor {entry.name!r} does not start where another ends")
        position = entry.end
    if data_start + position != size:
        raise CheckpointError(
            f"{path.name} is damaged or cut short: its header describes {data_start + position} bytes,"
            f" the file has {size}; download it again"
        )
    return TensorFile(path, tuple(entries), metadata, data_start)


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path.name} is not a whole safetensors file (its header does not fit in {size} B)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path.name} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name} is not a safetensors file: its header is not an object")
    return header, 8 + length


def _entry(path: Path, name: str, value: dict[str, Any]) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path.name} is damaged: tensor {name!r} has no readable entry in its header") from error
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{path.name}: tensor {name!r} has dtype {dtype}, which belongs to a quantised checkpoint;"
            " convert the unquantised weights"
        )
    entry = TensorEntry(name, dtype, shape, begin, end)
    if entry.num_bytes != math.prod(shape) * entry.item_bytes:
        raise CheckpointError(f"{path.name} is damaged: tensor {name!r} has {entry.num_bytes} bytes for shape {shape}")
    return entry


def copy_tensors(
    source: TensorFile, target: Path, *, keep: Callable[[str], bool], extra: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Write the kept tensors of `source`, then `extra` ones, to a new file; returns the names that are not finite.

    Names, dtypes, shapes, bytes and order stay as they are. Peak memory: `CHUNK_BYTES` and the extra tensors.
    """
    added = {name: tensor.detach().cpu().contiguous() for name, tensor in (extra or {}).items()}
    kept = [entry for entry in source.entries if keep(entry.name)]
    # Widest dtypes first, as the format's own writer does: no tensor then starts at an unaligned byte.
    order = sorted([*kept, *map(_entry_of, added, added.values())], key=lambda entry: -entry.item_bytes)
    not_finite: list[str] = []
    with source.path.open("rb") as reader, target.open("wb") as writer:
        writer.write(_header(_placed(order), source.metadata))
        for entry in order:
            if entry.name in added:
                writer.write(added[entry.name].reshape(-1).view(torch.uint8).numpy().data)
                continue
            reader.seek(source.data_start + entry.begin)
            if not _copy_checked(reader, writer, entry):
                not_finite.append(entry.name)
        writer.flush()
        os.fsync(writer.fileno())
    return not_finite


def _entry_of(name: str, tensor: Tensor) -> TensorEntry:
    dtype = next(key for key, value in DTYPES.items() if value == tensor.dtype)
    return TensorEntry(name, dtype, tuple(tensor.shape), 0, tensor.nbytes)


def _placed(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The entries with offsets that follow one another."""
    placed: list[TensorEntry] = []
    position = 0
    for entry in entries:
        placed.append(replace(entry, begin=position, end=position + entry.num_bytes))
        position += entry.num_bytes
    return placed


def _header(entries: Iterable[TensorEntry], metadata: dict[str, str]) -> bytes:
    """Length and JSON, spelled and padded to 8 bytes as the format's own writer does."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _copy_checked(reader: BinaryIO, writer: BinaryIO, entry: TensorEntry) -> bool:
    """Copy one tensor's bytes through a bounded buffer; False when it holds NaN or infinity."""
    finite = True
    remaining = entry.num_bytes
    while remaining:
        data = bytearray(min(remaining, CHUNK_BYTES))
        if reader.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"the file ended inside tensor {entry.name!r}")
        if finite and entry.dtype in FLOATS:
            finite = bool(torch.isfinite(torch.frombuffer(data, dtype=DTYPES[entry.dtype])).all())
        writer.write(data)
        remaining -= len(data)
    return finite
