"""The prepared folder: shards of token ids with an index of documents, a manifest, and checksums.

manifest.json            what was tokenised, how, and every shard with its SHA-256
train-00000.bin          token ids, little-endian uint16 or uint32, an end-of-text after each document
train-00000.idx.npy      one row a document: end offset in the shard, source, row in the source, hash of the text
tokenizer/               the tokenizer, so that a trained model can be exported with it
"""

import bisect
import hashlib
import io
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhar import runfile
from mhar.data.tokenization import Encoded, TokenizerInfo
from mhar.errors import ConfigurationError, InputError, unknown

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
INDEX_DTYPE = np.dtype([("end", "<i8"), ("source", "<i4"), ("row", "<i8"), ("hash", "<u8")])


@dataclass(frozen=True, slots=True)
class Shard:
    """One pair of files, `name`.bin and `name`.idx.npy."""

    name: str
    tokens: int
    documents: int
    text_bytes: int  # UTF-8 length of the texts
    sha256: str
    index_sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is known about a prepared folder."""

    format_version: int
    dtype: str
    tokenizer: TokenizerInfo
    sources: dict[str, int]  # name -> size in bytes (0 for a streamed data set)
    seed: int
    held_out: float
    splits: dict[str, tuple[Shard, ...]] = field(default_factory=dict)

    def tokens(self, split: str) -> int:
        """Number of tokens of a split, end-of-texts included."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    def text_bytes(self, split: str) -> int:
        """UTF-8 bytes of the texts of a split."""
        return sum(shard.text_bytes for shard in self.splits.get(split, ()))

    def fingerprint(self, split: str) -> str:
        """Identifies the tokens of a split, wherever its folder lies: a hash of its shards' hashes."""
        shards = [shard.sha256 for shard in self.splits.get(split, ())]
        return _sha256(json.dumps([self.dtype, self.tokenizer.fingerprint, shards]).encode())


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a prepared folder; InputError when there is none or it cannot be read."""
    path = Path(folder) / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{folder} is no finished prepared folder (no {MANIFEST}): run `mhar prepare`") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if values.get("format_version") != FORMAT_VERSION:
        raise InputError(f"{path}: format {values.get('format_version')!r}; this version reads {FORMAT_VERSION}")
    try:
        return runfile.from_mapping(Manifest, values)
    except ConfigurationError as error:
        raise InputError(f"{path}: {error}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the folder a finished one."""
    runfile.write_atomically(folder / MANIFEST, json.dumps(runfile.to_mapping(manifest), indent=1) + "\n")


class ShardWriter:
    """Collects encoded documents of one split and writes them as numbered shards."""

    def __init__(self, folder: Path, split: str, shards: tuple[Shard, ...] = ()) -> None:
        self.folder, self.split, self.shards = folder, split, shards
        self.tokens = 0
        self._ids: list[NDArray[Any]] = []
        self._index: list[NDArray[Any]] = []
        self._text_bytes = 0

    def add(self, encoded: Encoded, sources: NDArray[Any], rows: NDArray[Any]) -> None:
        """Append whole documents: `sources` and `rows` say where each came from."""
        index = np.zeros(len(rows), INDEX_DTYPE)
        index["end"] = self.tokens + np.cumsum(encoded.lengths)
        index["source"], index["row"], index["hash"] = sources, rows, encoded.hashes
        self._ids.append(encoded.ids)
        self._index.append(index)
        self._text_bytes += int(encoded.text_bytes.sum())
        self.tokens += len(encoded.ids)

    def flush(self) -> None:
        """Write what was collected as one shard (nothing when nothing was)."""
        if not self.tokens:
            return
        name = f"{self.split}-{len(self.shards):05d}"
        ids, index = np.concatenate(self._ids).tobytes(), _npy(np.concatenate(self._index))
        runfile.write_atomically(self.folder / f"{name}.bin", ids)
        runfile.write_atomically(self.folder / f"{name}.idx.npy", index)
        documents = sum(map(len, self._index))
        shard = Shard(name, self.tokens, documents, self._text_bytes, _sha256(ids), _sha256(index))
        self.shards = (*self.shards, shard)
        self.tokens, self._ids, self._index, self._text_bytes = 0, [], [], 0


class PreparedSplit:
    """One split of a prepared folder as a single stream of tokens, memory-mapped.

    Sizes are checked when it is opened; `verify()` reads every byte. Pickles as its paths.
    """

    def __init__(self, folder: str | os.PathLike[str], split: str = "train") -> None:
        self.folder, self.split = Path(folder), split
        self.manifest = read_manifest(folder)
        if split not in self.manifest.splits:
            raise unknown(f"split of {folder}", split, self.manifest.splits)
        self.shards = self.manifest.splits[split]
        self._starts = [0, *accumulate(shard.tokens for shard in self.shards)]
        if not len(self):
            raise InputError(f"the split {split!r} of {folder} is empty")
        for shard in self.shards:
            self._check_size(shard)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}

    @cached_property
    def _maps(self) -> list[NDArray[Any]]:
        return [np.memmap(self._bin(shard), self.manifest.dtype, "r") for shard in self.shards]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop` of the stream, across shards, as int64."""
        first = bisect.bisect_right(self._starts, start) - 1
        pieces: list[NDArray[Any]] = []
        for shard in range(first, len(self.shards)):
            base = self._starts[shard]
            if base >= stop:
                break
            pieces.append(self._maps[shard][max(start - base, 0) : stop - base])
        return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)

    def documents(self) -> NDArray[Any]:
        """The index over all shards: `end` in the whole stream, `source`, `row`, `hash`; one row a document."""
        tables: list[NDArray[Any]] = []
        for shard, start in zip(self.shards, self._starts, strict=False):
            table = np.load(self.folder / f"{shard.name}.idx.npy")
            table["end"] += start
            tables.append(table)
        return np.concatenate(tables)

    def verify(self) -> None:
        """InputError that names the first shard whose content is not what was written."""
        for shard in self.shards:
            for path, expected in ((self._bin(shard), shard.sha256), (self._idx(shard), shard.index_sha256)):
                found = sha256_of(path)
                if found != expected:
                    raise InputError(f"{path} was altered: SHA-256 {found}, the manifest says {expected}")

    def _bin(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}.bin"

    def _idx(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}.idx.npy"

    def _check_size(self, shard: Shard) -> None:
        path, expected = self._bin(shard), shard.tokens * np.dtype(self.manifest.dtype).itemsize
        found = path.stat().st_size if path.is_file() else None
        if found != expected or not self._idx(shard).is_file():
            what = "missing" if found is None else f"truncated or altered ({found} bytes, not {expected})"
            what = what if found != expected else "without its index"
            raise InputError(f"shard {path} is {what}; its SHA-256 was {shard.sha256}")


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
