"""Tokenizers as the data pipeline needs them: identified by what they do, and applied in worker processes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhar.errors import InputError

PROBE = "Hello, World!  naïve café — 1,234.56 the\n\tquick brown fox; 你好 🙂 don't"


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What a prepared folder remembers of its tokenizer."""

    name: str
    fingerprint: str  # sha256 over the vocabulary and the ids of a probe text
    vocab_size: int
    eos_id: int  # the token put after every document


def load_tokenizer(name: str) -> Any:
    """The fast tokenizer of a local folder or hub name; InputError when there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"no tokenizer in {name!r}: {str(error).splitlines()[0]}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"the tokenizer of {name!r} is not a fast one (it has no tokenizer.json)")
    return tokenizer


def tokenizer_info(tokenizer: Any, name: str, end_of_text: str | None = None) -> TokenizerInfo:
    """Identify `tokenizer` by its behaviour, not by file layout or library version; `end_of_text` (default: its own
    end-of-sequence token) is the token that separates documents."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    separator = tokenizer.eos_token if end_of_text is None else end_of_text
    if separator is None:
        raise InputError(f"the tokenizer {name!r} has no end-of-sequence token: name one with end_of_text")
    if separator not in vocabulary:
        raise InputError(f"end_of_text: {separator!r} is no token of {name!r}")
    probe = tokenizer.backend_tokenizer.encode(PROBE, add_special_tokens=False).ids
    content = json.dumps([sorted(vocabulary.items()), probe], ensure_ascii=True)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    return TokenizerInfo(name, fingerprint, max(vocabulary.values()) + 1, vocabulary[separator])


def check_same_tokenizer(tokenizer: Any, name: str, prepared: TokenizerInfo) -> None:
    """InputError unless `tokenizer` is the one that the data was prepared with."""
    found = tokenizer_info(tokenizer, name)
    if found.fingerprint != prepared.fingerprint:
        raise InputError(
            f"the tokenizer {name!r} (fingerprint {found.fingerprint[:12]}, {found.vocab_size} ids) is not the one the "
            f"data was prepared with: {prepared.name!r} ({prepared.fingerprint[:12]}, {prepared.vocab_size} ids)"
        )


def id_dtype(vocab_size: int) -> str:
    """The narrowest of uint16 and uint32 that holds every id, as a little-endian numpy name."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of documents: ids with an end-of-text after each document, and one row of counts a document."""

    ids: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]  # tokens, end-of-text included
    text_bytes: NDArray[np.int64]  # UTF-8
    hashes: NDArray[np.uint64]


@lru_cache(maxsize=2)
def _backend(definition: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text, not the separator
    return tokenizer


def encode(definition: str, eos_id: int, dtype: str, texts: Sequence[str]) -> Encoded:
    """Tokenise `texts` with the `tokenizers` definition (its JSON); runs in worker processes."""
    backend = _backend(definition)
    pieces: list[NDArray[Any]] = []
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        ids.append(eos_id)
        pieces.append(np.array(ids, dtype))
    return Encoded(
        ids=np.concatenate(pieces),
        lengths=np.array([len(piece) for piece in pieces], np.int64),
        text_bytes=np.array([len(text.encode()) for text in texts], np.int64),
        hashes=np.array([document_hash(text) for text in texts], np.uint64),
    )


def document_hash(text: str) -> int:
    """64 bits that identify a document by its text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
