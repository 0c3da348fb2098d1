"""lm-evaluation-harness on a model in memory, with every item kept as a record."""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mhar import __version__
from mhar.errors import InputError
from mhar.evaluation import suites
from mhar.evaluation.loading import LoadedModel, display_name, require
from mhar.evaluation.records import Evaluation, Record, Result
from mhar.evaluation.scoring import records_of, summarise
from mhar.evaluation.suites import TaskSpec

VERSIONED = ("lm_eval", "torch", "transformers", "datasets", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessSettings:
    """How tasks are run. `limit` takes the first items of each task; None takes all."""

    data: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    num_fewshot: int | None = None
    seed: int = 0
    max_length: int | None = None
    download: bool = False
    allow_code: bool = False

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be a positive integer, got {value}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed must lie between 0 and 2**32 - 1, got {self.seed}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise InputError(f"num_fewshot must not be negative, got {self.num_fewshot}")


def versions() -> dict[str, str]:
    """Versions of everything that a score depends on."""
    found = {"mhar": __version__}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def resolve(names: Sequence[str], settings: HarnessSettings) -> list[TaskSpec]:
    """The tasks to run, checked before any model is loaded; see `suites.expand` and `suites.check_runnable`."""
    if not names:
        raise InputError("no task given")
    specs = suites.expand(names, lambda: _manager(None).all_tasks)
    for spec in specs:
        suites.check_runnable(spec, settings.data, download=settings.download, allow_code=settings.allow_code)
    return specs


def evaluate_tasks(
    loaded: LoadedModel,
    specs: Sequence[TaskSpec],
    settings: HarnessSettings,
    *,
    finished: Evaluation | None = None,
    on_task: Callable[[Evaluation], None] = lambda _: None,
) -> Evaluation:
    """Run the tasks one after another.

    Args:
        finished: an earlier evaluation of the same model; its tasks are not run again.
        on_task: called with the evaluation so far after each task, so that an interrupted run loses one task at most.

    Raises:
        InputError: a model without a tokenizer.
        DependencyError: lm-evaluation-harness is not installed.
    """
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.info['name']} has no tokenizer: benchmark tasks are texts, and need one")
    evaluation = finished or empty_evaluation(loaded, settings)
    lm = _language_model(loaded, settings)
    for spec in specs:
        if spec.name in evaluation.records:
            continue
        records, results = run_task(lm, spec, settings)
        evaluation = evaluation.with_task(spec.name, records, results)
        on_task(evaluation)
    return evaluation


def continued(fresh: Evaluation, earlier: Evaluation) -> Evaluation:
    """`earlier` to go on from, when it was made with the same model, versions, seeds and settings.

    Raises:
        InputError: what differs, named.
    """
    for what in ("model", "versions", "seeds", "settings"):
        now, before = getattr(fresh, what), getattr(earlier, what)
        changed = [key for key in now | before if now.get(key) != before.get(key)]
        if changed:
            values = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in changed)
            raise InputError(f"cannot resume {earlier.name}: its {what} differ ({values})")
    return replace(fresh, results=earlier.results, records=earlier.records)


def empty_evaluation(loaded: LoadedModel, settings: HarnessSettings) -> Evaluation:
    """An evaluation without results yet."""
    kept = {
        "limit": settings.limit,
        "num_fewshot": settings.num_fewshot,
        "max_length": settings.max_length,
        "batch_size": settings.batch_size,
    }
    return Evaluation(
        model=loaded.info,
        versions=versions(),
        seeds=dict.fromkeys(("python", "numpy", "torch", "fewshot"), settings.seed),
        settings=kept,
        results=(),
        records={},
        name=display_name(loaded.info["name"]),
    )


def run_task(lm: Any, spec: TaskSpec, settings: HarnessSettings) -> tuple[list[Record], list[Result]]:
    """One task through the harness; members of a group are pooled item by item."""
    lm_eval = require("lm_eval", "eval")
    is_local = bool(spec.file and settings.data is not None)
    with _quiet():
        output = lm_eval.simple_evaluate(
            model=lm,
            tasks=list(spec.members or (spec.name,)),
            task_manager=_manager(settings.data if is_local else None),
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=0,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
            confirm_run_unsafe_code=settings.allow_code,
        )
    records = records_of(output["samples"])
    available = sum(count["original"] for count in output["n-samples"].values())
    direction = {m: up for by_metric in output["higher_is_better"].values() for m, up in by_metric.items()}
    shots = max(output["n-shot"].values())
    results = summarise(spec, records, available, direction, shots, suites.note(spec, settings.data))
    return records, results


def _language_model(loaded: LoadedModel, settings: HarnessSettings) -> Any:
    huggingface = require("lm_eval.models.huggingface", "eval")
    with _quiet():
        return huggingface.HFLM(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            backend="causal",
            batch_size=settings.batch_size,
            max_length=settings.max_length,
        )


def _manager(data: Path | None) -> Any:
    """Our task files over `data`, or the harness's own (which may fetch from the hub)."""
    tasks = require("lm_eval.tasks", "eval")
    if data is None:
        return tasks.TaskManager()
    return tasks.TaskManager(
        include_path=str(suites.TASK_FOLDER), include_defaults=False, metadata={"folder": str(data)}
    )


@contextmanager
def _quiet() -> Generator[None]:
    """The harness logs advice about its own command line at warning level; errors still show."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
