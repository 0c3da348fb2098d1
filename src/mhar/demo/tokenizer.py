"""A byte-level BPE tokenizer, trained on the novels at the start of a run and kept in its folder."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` ids: any text round-trips, and id 0 ends a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)


def tokenizer_of_run(folder: Path, texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `folder`; trained on `texts` and saved there the first time."""
    if not (folder / "tokenizer.json").is_file():
        train_tokenizer(texts, vocab_size).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Tensor:
    """Ids of all texts in one row, int64 [tokens], with the end-of-text id after each."""
    end = tokenizer.get_vocab()[END_OF_TEXT]
    ids = [row for text in texts for row in (*tokenizer(text, verbose=False)["input_ids"], end)]
    return torch.tensor(ids, dtype=torch.long)
