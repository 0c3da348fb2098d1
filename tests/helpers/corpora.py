"""Tiny prepared data for tests: a word-level tokenizer, documents, and prepared folders with chosen tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhar.data.prepare import PrepareConfig, prepare
from mhar.data.shards import FORMAT_VERSION, Manifest, ShardWriter, write_manifest
from mhar.data.tokenization import Encoded, TokenizerInfo

WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "it",
    "was",
    "he",
    "she",
    "had",
    "not",
    "with",
    "his",
    "her",
    "for",
    "as",
    "at",
    "by",
    "on",
]


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> Path:
    """A word-level tokenizer saved as a folder: `<eos>` is 0, `<unk>` 1, then `words`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<eos>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def random_documents(count: int, seed: int = 0, mean_words: int = 20) -> list[str]:
    """Documents whose words follow each other with structure, so that a model can learn something."""
    random = np.random.default_rng(seed)
    documents: list[str] = []
    for _ in range(count):
        start, length = int(random.integers(len(WORDS))), int(random.integers(1, 2 * mean_words))
        documents.append(" ".join(WORDS[(start + step * step) % len(WORDS)] for step in range(length)))
    return documents


def write_jsonl(path: Path, documents: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def prepared_text(folder: Path, count: int = 400, **options: Any) -> Path:
    """A folder prepared from random documents with the word tokenizer, split by hash."""
    tokenizer = save_tokenizer(folder.parent / f"{folder.name}-tokenizer")
    source = write_jsonl(folder.parent / f"{folder.name}.jsonl", random_documents(count))
    options = {"held_out": 0.1, "workers": 1, **options}
    prepare(PrepareConfig(sources=(str(source),), out=folder, tokenizer=str(tokenizer), **options), show_progress=False)
    return folder


def prepared_counting(folder: Path, lengths: Sequence[int], shards: int = 1) -> Path:
    """A prepared folder whose token at position p of the stream is p + 1 (0, the end-of-text, never occurs)."""
    folder.mkdir(parents=True, exist_ok=True)
    writer, position = ShardWriter(folder, "train"), 1
    for number, length in enumerate(lengths):
        ids = np.arange(position, position + length, dtype="<u4")
        zero = np.zeros(1, np.int64)
        writer.add(Encoded(ids, np.array([length]), zero, zero.astype(np.uint64)), zero, np.array([number]))
        position += length
        if (number + 1) % max(1, len(lengths) // shards) == 0:
            writer.flush()
    writer.flush()
    info = TokenizerInfo("counting", "counting", position, 0)
    write_manifest(folder, Manifest(FORMAT_VERSION, "<u4", info, {}, 0, 0.0, {"train": writer.shards}))
    return folder
