"""Documents to a prepared folder: in parallel, in a fixed order, and continued where an interrupted run stopped."""

import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from mhar import runfile
from mhar.data.shards import FORMAT_VERSION, MANIFEST, Manifest, Shard, ShardWriter, read_manifest, write_manifest
from mhar.data.sources import DATASET_PREFIX, Document, documents, expand
from mhar.data.tokenization import Encoded, TokenizerInfo, encode, id_dtype, load_tokenizer, tokenizer_info
from mhar.errors import ConfigurationError, InputError

PROGRESS = "progress.json"
BATCH_CHARACTERS = 2**20  # of text handed to a worker at once
DEFAULT_HELD_OUT = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """What `mhar prepare` reads.

    `sources` are split by the hash of each document (the part `held_out` becomes `val`), so that the split depends on
    neither order, file layout nor what else is prepared, and copies of a document stay together. `validation` sources
    go to `val` whole; with them `held_out` is 0 unless given.
    """

    sources: tuple[str, ...] = ()
    out: Path
    tokenizer: str
    validation: tuple[str, ...] = ()
    held_out: float | None = None
    column: str = "text"
    end_of_text: str | None = None  # None: the tokenizer's end-of-sequence token
    shard_tokens: int = 2**26
    workers: int = 0  # 0: one a core
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigurationError("sources: nothing to prepare")
        if self.held_out is not None and not 0 <= self.held_out < 1:
            raise ConfigurationError(f"held_out is a fraction from 0 to below 1, received {self.held_out}")
        if not 0 <= self.seed < 2**64:
            raise ConfigurationError(f"seed must be from 0 to below 2**64, received {self.seed}")
        if self.shard_tokens < 1 or self.workers < 0:
            raise ConfigurationError(
                f"shard_tokens must be positive and workers not negative, received {self.shard_tokens}, {self.workers}"
            )

    @property
    def held_out_fraction(self) -> float:
        """The part of `sources` that becomes validation data."""
        default = 0.0 if self.validation else DEFAULT_HELD_OUT
        return default if self.held_out is None else self.held_out


@dataclass(frozen=True, slots=True)
class _Progress:
    """What is safe on disk: every document before `position` = (source, row)."""

    manifest: Manifest
    options: dict[str, Any] = field(default_factory=dict)
    position: tuple[int, ...] = (0, 0)


def prepare(config: PrepareConfig, *, show_progress: bool = True) -> Manifest:
    """Tokenise `config.sources` into `config.out` and return the manifest.

    An interrupted run is continued by the same call; a finished one is returned as it is. The bytes written do not
    depend on the number of workers or on interruptions. Raises InputError when the folder holds other data.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    train, validation = expand(config.sources), expand(config.validation)
    info = tokenizer_info(tokenizer, config.tokenizer, config.end_of_text)
    sizes = {name: 0 if name.startswith(DATASET_PREFIX) else Path(name).stat().st_size for name in train + validation}
    places = {name if name.startswith(DATASET_PREFIX) else Path(name).resolve() for name in train + validation}
    if len(places) < len(train) + len(validation):
        raise InputError("a source is given twice (a validation source must not be among the training sources)")
    empty = Manifest(FORMAT_VERSION, id_dtype(info.vocab_size), info, sizes, config.seed, config.held_out_fraction)
    options = {"column": config.column, "shard_tokens": config.shard_tokens, "validation": validation}
    try:
        progress = _resume(config.out, _Progress(empty, options))
        if progress is None:
            return read_manifest(config.out)
        tokenizer.save_pretrained(config.out / "tokenizer")
        definition = tokenizer.backend_tokenizer.to_str()
        return _Preparation(config, definition, len(train), progress).run(show_progress)
    except OSError as error:  # those of the sources are InputErrors by now
        raise InputError(f"{config.out} cannot be written: {error}. What is there is kept.") from error


def _resume(out: Path, fresh: _Progress) -> _Progress | None:
    """The state to continue from, or None when `out` is finished; InputError when it holds something else."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PROGRESS
    if not path.is_file():
        if (out / MANIFEST).exists() or any(out.glob("*.bin")):
            raise InputError(f"{out} holds prepared data without {PROGRESS}: choose another folder")
        return fresh
    found = runfile.from_mapping(_Progress, json.loads(path.read_text(encoding="utf-8")))
    for name in ("dtype", "tokenizer", "sources", "seed", "held_out"):
        _check_equal(out, name, getattr(found.manifest, name), getattr(fresh.manifest, name))
    for name, value in fresh.options.items():
        _check_equal(out, name, found.options.get(name), value)
    return None if (out / MANIFEST).exists() else found


def _check_equal(out: Path, name: str, found: Any, asked: Any) -> None:
    if found != asked:
        raise InputError(f"{out} was begun with another {name}: {found!r}, now {asked!r}. Choose another folder.")


class _Preparation:
    def __init__(self, config: PrepareConfig, definition: str, num_train: int, progress: _Progress) -> None:
        self.config, self.definition, self.num_train, self.progress = config, definition, num_train, progress
        self.out = config.out
        splits = ("train", "val") if config.validation or config.held_out_fraction else ("train",)
        self.writers = {
            split: ShardWriter(self.out, split, progress.manifest.splits.get(split, ())) for split in splits
        }

    def run(self, show_progress: bool) -> Manifest:
        manifest = self.progress.manifest
        start = (self.progress.position[0], self.progress.position[1])
        batches = _batches(documents(list(manifest.sources), self.config.column, start))
        with tqdm(desc="tokenising", unit="B", unit_scale=True, disable=not show_progress) as bar:
            for batch, encoded in self._encoded(batches, manifest.tokenizer):
                self._store(batch, encoded)
                bar.update(int(encoded.text_bytes.sum()))
                if self.writers["train"].tokens >= self.config.shard_tokens:
                    self._commit((batch[-1].source, batch[-1].row + 1))
        self._commit((len(manifest.sources), 0))
        return self._finish()

    def _encoded(
        self, batches: Iterator[list[Document]], info: TokenizerInfo
    ) -> Iterator[tuple[list[Document], Encoded]]:
        workers = self.config.workers or os.cpu_count() or 1
        arguments = (self.definition, info.eos_id, self.progress.manifest.dtype)
        if workers == 1:
            for batch in batches:
                yield batch, encode(*arguments, [document.text for document in batch])
            return
        with _pool(workers) as submit:
            pending: deque[tuple[list[Document], Future[Encoded]]] = deque()
            for batch in batches:
                pending.append((batch, submit(encode, *arguments, [document.text for document in batch])))
                if len(pending) > 2 * workers:  # bounds the memory, and keeps the order
                    done, future = pending.popleft()
                    yield done, future.result()
            for done, future in pending:
                yield done, future.result()

    def _store(self, batch: list[Document], encoded: Encoded) -> None:
        sources = np.array([document.source for document in batch])
        rows = np.array([document.row for document in batch])
        held_out = (sources >= self.num_train) | held_out_documents(
            encoded.hashes, self.config.held_out_fraction, self.config.seed
        )
        for split, chosen in (("train", ~held_out), ("val", held_out)):
            if chosen.any():
                self.writers[split].add(_select(encoded, chosen), sources[chosen], rows[chosen])

    def _commit(self, position: tuple[int, int]) -> None:
        for writer in self.writers.values():
            writer.flush()
        shards: dict[str, tuple[Shard, ...]] = {split: writer.shards for split, writer in self.writers.items()}
        self.progress.manifest.splits.update(shards)
        state = _Progress(self.progress.manifest, self.progress.options, position)
        runfile.write_atomically(self.out / PROGRESS, json.dumps(runfile.to_mapping(state)))

    def _finish(self) -> Manifest:
        manifest = self.progress.manifest
        for split in self.writers:
            if not manifest.tokens(split):
                raise InputError(f"the split {split!r} came out empty: too few documents, or held_out too small")
        write_manifest(self.out, manifest)
        return manifest


def held_out_documents(hashes: NDArray[np.uint64], fraction: float, seed: int = 0) -> NDArray[np.bool_]:
    """Which documents belong to the held-out split: a function of the document's hash and the seed alone."""
    keys = (hashes ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing; wraps at 64 bits
    return keys < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


def _select(encoded: Encoded, chosen: NDArray[np.bool_]) -> Encoded:
    if chosen.all():
        return encoded
    tokens = np.repeat(chosen, encoded.lengths)
    return Encoded(encoded.ids[tokens], encoded.lengths[chosen], encoded.text_bytes[chosen], encoded.hashes[chosen])


def _batches(stream: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in stream:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _pool(workers: int) -> Generator[Callable[..., Future[Any]]]:
    # Ctrl-C reaches the whole group; only this process acts on it
    ignore = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=signal.signal, initargs=ignore)
    try:
        yield pool.submit
    finally:
        pool.shutdown(cancel_futures=True)
