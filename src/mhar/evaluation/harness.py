"""lm-evaluation-harness on a model in memory, with every item kept as a record."""

import json
import logging
import math
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
from mhar.evaluation.records import Evaluation, Record, Result, hash_text
from mhar.evaluation.suites import TaskSpec

ACCURACIES = ("acc", "acc_norm", "exact_match", "math_verify", "pass_at_1", "pass@1")
# How the harness's likelihood metrics come from a score per unit (nats or bits) and its weighted mean.
PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity")
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
    records = _records(output["samples"])
    available = sum(count["original"] for count in output["n-samples"].values())
    direction = {m: up for by_metric in output["higher_is_better"].values() for m, up in by_metric.items()}
    shots = max(output["n-shot"].values())
    results = summarise(spec, records, available, direction, shots, suites.note(spec, settings.data))
    return records, results


def _records(samples: dict[str, list[dict[str, Any]]]) -> list[Record]:
    """Records of all members; where a task has several filters, their metrics are merged into one record."""
    merged: dict[tuple[str, int], Record] = {}
    for offset, (task, items) in enumerate(sorted(samples.items())):
        filters = {item["filter"] for item in items}
        for item in items:
            suffix = f",{item['filter']}" if len(filters) > 1 else ""
            scores, weights = _scores(item, suffix)
            key = (task, item["doc_id"])
            if key in merged:
                merged[key].scores.update(scores)
                merged[key].weights.update(weights)
                continue
            merged[key] = Record(
                doc_id=offset * 10**7 + item["doc_id"],
                doc_hash=item["doc_hash"],
                # The harness hashes the first context alone: the choices and the continuation belong to the question.
                prompt_hash=hash_text(json.dumps([str(part) for request in item["arguments"] for part in request])),
                target=str(item["target"]),
                scores=scores,
                weights=weights,
                answer=_answer(item["filtered_resps"]),
            )
    return list(merged.values())


def _scores(item: dict[str, Any], suffix: str) -> tuple[dict[str, float], dict[str, float]]:
    """Scores and weights of one sample: likelihoods become nats (bits for bits_per_byte) per unit, lower better."""
    scores: dict[str, float] = {}
    weights: dict[str, float] = {}
    for metric in item["metrics"]:
        value, name = item[metric], metric + suffix
        if isinstance(value, (tuple, list)):
            log_likelihood, units = float(value[0]), float(value[1])
            scores[name] = -log_likelihood / units / (math.log(2) if metric == "bits_per_byte" else 1.0)
            weights[name] = units
        else:
            scores[name] = -float(value) if metric == "perplexity" else float(value)
    return scores, weights


def _answer(responses: Sequence[Any]) -> str:
    """The model's answer: the text it wrote, or the index of the likeliest choice."""
    if len(responses) == 1:
        return str(responses[0])
    return str(max(range(len(responses)), key=lambda i: responses[i][0]))


def summarise(
    spec: TaskSpec,
    records: Sequence[Record],
    available: int,
    direction: dict[str, bool],
    num_fewshot: int,
    note: str = "",
) -> list[Result]:
    """Table rows from records: weighted means, or their exponential for perplexities; standard errors by item."""
    results: list[Result] = []
    metrics = list(records[0].scores) if records else []
    primary = spec.primary if spec.primary in metrics else (metrics[0] if metrics else "")
    for metric in metrics:
        mean, stderr = weighted_mean(
            [record.scores[metric] for record in records], [record.weights.get(metric, 1.0) for record in records]
        )
        base = metric.split(",")[0]
        is_perplexity = base in PERPLEXITIES
        value = math.exp(mean) if is_perplexity else mean
        results.append(
            Result(
                task=spec.name,
                metric=metric,
                value=value,
                # The delta method carries the standard error of a mean through the exponential.
                stderr=None if stderr is None else stderr * (value if is_perplexity else 1.0),
                n=len(records),
                available=available,
                higher_is_better=bool(direction.get(base, direction.get(metric, True))),
                is_accuracy=base in ACCURACIES and all(r.scores[metric] in (0.0, 1.0) for r in records),
                is_primary=metric == primary,
                num_fewshot=num_fewshot,
                note=note,
            )
        )
    return results


def weighted_mean(scores: Sequence[float], weights: Sequence[float]) -> tuple[float, float | None]:
    """Ratio estimate sum(w*s)/sum(w) and its standard error over items (None for a single item)."""
    total, n = sum(weights), len(scores)
    mean = sum(s * w for s, w in zip(scores, weights, strict=True)) / total
    if n < 2:
        return mean, None
    squares = sum((w * (s - mean)) ** 2 for s, w in zip(scores, weights, strict=True))
    return mean, math.sqrt(squares * n / (n - 1)) / total


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
