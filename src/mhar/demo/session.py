"""A whole demo run: data, the variants in turn, and what the folder holds at the end, however early that comes.

The variants train in rounds, one after another up to the next evaluation: a run that is stopped leaves all of them
comparable, and load on the machine that comes and goes touches all of them alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from mhar.demo.batches import TokenOrder, windows
from mhar.demo.corpus import load_corpus
from mhar.demo.interrupt import StopRequest
from mhar.demo.outputs import Outcome, result_of, write_outputs
from mhar.demo.results import VariantResult, format_difference
from mhar.demo.settings import BASELINE, VARIANTS, DemoSettings
from mhar.demo.tokenizer import END_OF_TEXT, encode, tokenizer_of_run
from mhar.demo.trainer import VariantTrainer
from mhar.demo.variants import backbone, build_variant


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


def run_demo(settings: DemoSettings, folder: Path, *, say: Callable[[str], None] = tqdm.write) -> Outcome:
    """Train and compare all variants in `folder`, from its newest checkpoints if it has any.

    SIGINT or SIGTERM ends the run after the current step; the folder then holds the same files as at the end.

    Args:
        settings: resolved configuration.
        folder: made by :func:`mhar.demo.folder.new_folder`.
        say: receives the lines of progress.
    """
    data = load_data(settings, folder)
    trainers = make_trainers(settings, data, folder)
    with StopRequest() as stop:
        train_in_rounds(trainers, settings, stop, say)
    return write_outputs(trainers, settings, data.bytes_per_token, folder)


def make_trainers(settings: DemoSettings, data: DemoData, folder: Path) -> list[VariantTrainer]:
    """A trainer per variant, all from one backbone."""
    base = backbone(settings, int(data.tokenizer.convert_tokens_to_ids(END_OF_TEXT)))  # pyright: ignore
    return [
        VariantTrainer(
            name, build_variant(name, base), data.order, data.held_out, data.tokenizer, settings, folder / name
        )
        for name in VARIANTS
    ]


def train_in_rounds(
    trainers: Sequence[VariantTrainer], settings: DemoSettings, stop: StopRequest, say: Callable[[str], None]
) -> None:
    """Train every variant to each evaluation step in turn; returns early, after a whole step, when asked to stop."""
    total = settings.steps * len(trainers)
    with tqdm(total=total, initial=sum(t.step for t in trainers), unit="step", dynamic_ncols=True) as bar:
        for goal in settings.evaluation_steps():
            behind = [trainer for trainer in trainers if trainer.step < goal]
            for trainer in behind:
                train_to(trainer, goal, stop, bar)
                if trainer.step < goal:
                    return
                trainer.evaluate()
                trainer.save()
            if behind:
                say(f"step {goal}: held-out loss " + comparison_line([result_of(t) for t in trainers], goal))


def train_to(trainer: VariantTrainer, goal: int, stop: StopRequest, bar: "tqdm[Any]") -> None:
    """Steps up to `goal`, shown on the bar."""
    bar.set_description(trainer.name)
    while trainer.step < goal and not stop.requested:
        loss = trainer.train_step()
        if trainer.peak_bytes is None:
            trainer.measure_memory()
        bar.set_postfix_str(f"loss {loss:.3f}, {trainer.tokens_per_s:,.0f} tokens/s", refresh=False)
        bar.update()


def comparison_line(results: Sequence[VariantResult], step: int) -> str:
    """`baseline 4.901, mhar 4.870 (-0.031 ±0.004)`."""
    reference = next(result for result in results if result.name == BASELINE)
    parts = [f"{BASELINE} {reference.loss(step):.3f}"]
    for result in results:
        if result is not reference:
            difference = format_difference(result.difference(reference, step))
            parts.append(f"{result.name} {result.loss(step):.3f} ({difference})")
    return ", ".join(parts)
