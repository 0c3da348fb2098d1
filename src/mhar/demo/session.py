"""A whole demo run: data, the variants in turn, and what the folder holds at the end, however early that comes.

The variants train in rounds, one after another up to the next evaluation: a run that is stopped leaves all of them
comparable, and load on the machine that comes and goes touches all of them alike.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mhar.demo.data import DemoData, load_data
from mhar.demo.interrupt import StopRequest
from mhar.demo.outputs import Outcome, result_of, write_outputs
from mhar.demo.results import VariantResult, format_difference
from mhar.demo.settings import BASELINE, VARIANTS, DemoSettings
from mhar.demo.trainer import VariantTrainer
from mhar.demo.variants import backbone, build_variant


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
    base = backbone(settings, data.tokenizer)
    return [VariantTrainer(name, build_variant(name, base), data, settings, folder / name) for name in VARIANTS]


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
