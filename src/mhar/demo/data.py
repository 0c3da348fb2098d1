"""The data of one run, shared by its variants."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mhar.demo.batches import TokenOrder, windows
from mhar.demo.corpus import load_corpus
from mhar.demo.settings import DemoSettings
from mhar.demo.tokenizer import encode, tokenizer_of_run


@dataclass(frozen=True, slots=True)
class DemoData:
    """Tokenizer, token order of training, held-out windows [count, length + 1], and their UTF-8 bytes per token."""

    tokenizer: PreTrainedTokenizerFast
    order: TokenOrder
    held_out: Tensor
    bytes_per_token: float


def load_data(settings: DemoSettings, folder: Path) -> DemoData:
    """Read, tokenise and cut the novels; the tokenizer is trained on the training novels alone and kept in `folder`."""
    corpus = load_corpus(settings.held_out, settings.max_characters)
    tokenizer = tokenizer_of_run(folder / "tokenizer", corpus.training, settings.vocab_size)
    training = encode(tokenizer, corpus.training)
    order = TokenOrder(training, settings.sequence_length, settings.batch_size, settings.seed)
    held_out = windows(encode(tokenizer, [corpus.held_out]), settings.sequence_length)
    held_out = held_out[: settings.num_held_out_windows]
    targets = held_out[:, 1:]
    num_bytes = len(str(tokenizer.decode(targets.flatten())).encode())
    return DemoData(tokenizer, order, held_out, num_bytes / targets.numel())
