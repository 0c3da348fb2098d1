"""Reads the local data of the task files beside it. The harness imports this file by its path."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mhar.errors import InputError

OPENERS: dict[str, Callable[..., IO[str]]] = {"": open, ".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
NUM_GSM8K_SHOTS = 5


def find(folder: str | Path, stem: str) -> Path | None:
    """`stem`, plain or compressed, in `folder`."""
    return next((path for suffix in OPENERS if (path := Path(folder) / f"{stem}{suffix}").is_file()), None)


def read_text(folder: str | Path, stem: str) -> str:
    """The whole file; InputError when it is missing or damaged."""
    path = find(folder, stem)
    if path is None:
        raise InputError(f"no {stem} (plain, .xz, .gz or .bz2) in {folder}")
    suffix = path.suffix if path.suffix in OPENERS else ""
    try:
        with OPENERS[suffix](path, mode="rt", encoding="utf-8") as file:
            return file.read()
    except (EOFError, OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): truncated?") from error


def rows(folder: str | Path, stem: str) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    found: list[dict[str, Any]] = []
    # Not splitlines(): texts may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(read_text(folder, stem).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{stem}:{number} is not valid JSON ({error}): truncated?") from error
    if not found:
        raise InputError(f"{stem} in {folder} is empty")
    return found


def load(folder: str, file: str, **_metadata: Any) -> dict[str, Any]:
    """One test split from `file`. The harness also passes the task's metadata, which says nothing here."""
    from datasets import Dataset

    return {"test": Dataset.from_list(rows(folder, file))}


def load_gsm8k(folder: str, file: str, train: str, **_metadata: Any) -> dict[str, Any]:
    """Test items and few-shot examples: from the training file, else the first test items, then not scored."""
    from datasets import Dataset

    test = rows(folder, file)
    shots = rows(folder, train) if find(folder, train) else None
    if shots is None:
        shots, test = test[:NUM_GSM8K_SHOTS], test[NUM_GSM8K_SHOTS:]
    return {"train": Dataset.from_list(shots), "test": Dataset.from_list(test)}


def load_wikitext(folder: str, file: str, **_metadata: Any) -> dict[str, Any]:
    """One document per article, as in the harness's document-level WikiText."""
    from datasets import Dataset

    return {"test": Dataset.from_list([{"page": page} for page in articles(read_text(folder, file))])}


def articles(text: str) -> Iterator[str]:
    """Split raw WikiText at its first-level headings (" = Title = ")."""
    lines: list[str] = []
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "".join(lines).strip():
                yield "\n".join(lines)
            lines = []
        lines.append(line)
    if "".join(lines).strip():
        yield "\n".join(lines)
