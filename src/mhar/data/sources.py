"""Documents out of files and data sets, in a fixed order that can be re-entered at any document."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from mhar.errors import DependencyError, InputError, MharError

JSON_LINES = (".jsonl", ".ndjson", ".json")
PLAIN_TEXT = (".txt", ".md")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
DATASET_PREFIX = "hf:"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from: the position of its source in the list, and its row there (from 0)."""

    text: str
    source: int
    row: int


def expand(names: Sequence[str]) -> list[str]:
    """Folders replaced by the readable files in them, sorted; InputError for a name that is not there."""
    found: list[str] = []
    for name in names:
        path = Path(name)
        if name.startswith(DATASET_PREFIX) or path.is_file():
            found.append(name)
        elif path.is_dir():
            found += sorted(str(file) for file in path.rglob("*") if file.is_file() and _format(file) is not None)
        else:
            raise InputError(f"no file, folder or {DATASET_PREFIX}NAME data set {name!r}")
    return found


def documents(sources: Sequence[str], column: str = "text", start: tuple[int, int] = (0, 0)) -> Iterator[Document]:
    """Every document of `sources` from `start` = (source, row) on; rows with an empty text are passed over.

    Formats, by suffix: JSON lines, parquet, text (one document a file), each also .gz, .bz2, .xz or .zst, and
    `hf:NAME[:CONFIG[:SPLIT]]`, streamed through `datasets`. `column` holds the text.
    """
    for source in range(start[0], len(sources)):
        first = start[1] if source == start[0] else 0
        for row, text in enumerate(_readable_texts(sources[source], column)):
            if row >= first and text:
                yield Document(text, source, row)


def _readable_texts(name: str, column: str) -> Iterator[str | None]:
    """The texts of a source; whatever a reader raises on bad content or a failing network becomes an InputError."""
    try:
        yield from _texts(name, column)
    except MharError:
        raise
    except Exception as error:  # each of the decompressors and libraries has errors of its own
        raise InputError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def _texts(name: str, column: str) -> Iterator[str | None]:
    if name.startswith(DATASET_PREFIX):
        return _dataset_texts(name, column)
    path = Path(name)
    kind = _format(path)
    if kind in JSON_LINES:
        return _json_texts(path, column)
    if kind == ".parquet":
        return _parquet_texts(path, column)
    if kind in PLAIN_TEXT:
        return iter([_decompressed(path).read().decode("utf-8-sig")])
    known = ", ".join((*JSON_LINES, ".parquet", *PLAIN_TEXT))
    raise InputError(f"{name}: unknown kind of file. Known: {known}, also compressed as {', '.join(COMPRESSED)}")


def _format(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    return suffix if suffix in (*JSON_LINES, ".parquet", *PLAIN_TEXT) else None


def _json_texts(path: Path, column: str) -> Iterator[str]:
    with _decompressed(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise InputError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from error
            yield _column(record, column, f"{path}, line {number}")


def _parquet_texts(path: Path, column: str) -> Iterator[str | None]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DependencyError("parquet files need pyarrow: pip install 'mhar[train]'") from error
    file = parquet.ParquetFile(path)
    if column not in file.schema_arrow.names:
        raise InputError(f"{path}: no column {column!r}. Columns: {', '.join(file.schema_arrow.names)}")
    values = chain.from_iterable(batch.column(0).to_pylist() for batch in file.iter_batches(columns=[column]))
    for number, value in enumerate(values, 1):
        yield None if value is None else _text(value, column, f"{path}, row {number}")


def _dataset_texts(name: str, column: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DependencyError(f"{name} needs the package datasets: pip install 'mhar[train]'") from error
    path, config, split = ([*name.removeprefix(DATASET_PREFIX).split(":"), "", ""])[:3]
    rows: Any = load_dataset(path, config or None, split=split or "train", streaming=True)
    for number, record in enumerate(rows):
        yield _column(record, column, f"{name}, row {number}")


def _column(record: Any, column: str, where: str) -> str:
    if not isinstance(record, dict) or column not in record:
        names = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"{where}: no column {column!r}. Found: {names}")
    return _text(record[column], column, where)


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: column {column!r} is not Unicode text ({error.reason})") from error
    return value


def _decompressed(path: Path) -> BinaryIO:
    openers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
    return openers.get(path.suffix, lambda file: file.open("rb"))(path)


def _zstd(path: Path) -> BinaryIO:
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DependencyError(f"{path}: .zst files need the package zstandard (pip install zstandard)") from error
    return zstandard.open(path, "rb")
