"""`mhar compare`: paired differences between evaluated models, and the refusal to compare what is not comparable."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mhar.errors import InputError
from mhar.evaluation.records import Evaluation, Record, Result
from mhar.evaluation.statistics import NARROW_NOTE, format_interval, holm, paired_accuracy, paired_bootstrap

HARNESS = "lm_eval"


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One pair of models on one metric of one task; `b` minus `a`. `partial` is empty or says how much was run.

    Interval and p-values are None where a single item allows neither; `is_narrow` marks the interval of few items.
    """

    task: str
    metric: str
    a: str
    b: str
    value_a: float
    value_b: float
    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    p_holm: float | None
    n: int
    partial: str
    only_a: int | None
    only_b: int | None
    higher_is_better: bool
    test: str
    is_narrow: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, and the tasks that not every model has (never compared, always listed)."""

    rows: tuple[ComparisonRow, ...]
    skipped: dict[str, list[str]]
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """For `comparison.json`."""
        return {"confidence": self.confidence, "skipped": self.skipped, "rows": [asdict(row) for row in self.rows]}


def compare(
    evaluations: Sequence[Evaluation], *, all_metrics: bool = False, confidence: float = 0.95, seed: int = 0
) -> Comparison:
    """Compare every later evaluation with the first one.

    Holm's correction runs over all rows with a test: tasks, metrics and pairs alike. By default each task is tested on
    its primary metric alone, since testing more metrics costs power.

    Raises:
        InputError: fewer than two evaluations, no task in common, or items, prompts, few-shot counts or harness
            versions that differ.
    """
    if len(evaluations) < 2:
        raise InputError(f"a comparison needs at least two evaluations, got {len(evaluations)}")
    evaluations = _distinct_names(evaluations)
    first, *others = evaluations
    shared = [task for task in first.records if all(task in other.records for other in others)]
    if not shared:
        tasks = "; ".join(f"{e.name}: {', '.join(e.records) or 'none'}" for e in evaluations)
        raise InputError(f"the evaluations have no task in common ({tasks})")
    rows = [
        row
        for other in others
        for task in shared
        for row in _compare_task(first, other, task, all_metrics, confidence, seed)
    ]
    every = dict.fromkeys(task for e in evaluations for task in e.records)
    skipped = {t: [e.name for e in evaluations if t not in e.records] for t in every if t not in shared}
    return Comparison(tuple(_adjusted(rows)), skipped, confidence)


def _adjusted(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The rows with Holm's p-values; rows that could not be tested keep none and do not count."""
    adjusted = iter(holm([row.p_value for row in rows if row.p_value is not None]))
    return [row if row.p_value is None else replace(row, p_holm=next(adjusted)) for row in rows]


def _distinct_names(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Names with their dtype where dtypes differ, and with their position where names are still equal."""
    dtypes = [evaluation.model.get("dtype") for evaluation in evaluations]
    names = [
        f"{evaluation.name} ({dtype or 'unknown dtype'})" if len(set(dtypes)) > 1 else evaluation.name
        for evaluation, dtype in zip(evaluations, dtypes, strict=True)
    ]
    return [
        replace(evaluation, name=f"{name} ({index})" if names.count(name) > 1 else name)
        for index, (evaluation, name) in enumerate(zip(evaluations, names, strict=True), start=1)
    ]


def _compare_task(
    first: Evaluation, second: Evaluation, task: str, all_metrics: bool, confidence: float, seed: int
) -> list[ComparisonRow]:
    results_a, results_b = _results(first, task), _results(second, task)
    metrics = [m for m, r in results_a.items() if m in results_b and (all_metrics or r.is_primary)]
    _check_same_conditions(first, second, task)
    pairs = join(first, second, task)
    return [
        _row(first.name, second.name, results_a[metric], results_b[metric], pairs, confidence, seed)
        for metric in metrics
    ]


def _results(evaluation: Evaluation, task: str) -> dict[str, Result]:
    return {result.metric: result for result in evaluation.results if result.task == task}


def _check_same_conditions(first: Evaluation, second: Evaluation, task: str) -> None:
    """What must be equal for a paired comparison to mean anything."""
    uses_harness = not task.startswith("heldout:")
    a, b = first.versions.get(HARNESS), second.versions.get(HARNESS)
    if uses_harness and a != b:
        raise InputError(
            f"task {task!r} was scored by different harness versions: {HARNESS} {a} for {first.name},"
            f" {b} for {second.name}"
        )
    shots = [next(r.num_fewshot for r in e.results if r.task == task) for e in (first, second)]
    if shots[0] != shots[1]:
        raise InputError(
            f"task {task!r} has different few-shot counts: {shots[0]} for {first.name}, {shots[1]} for {second.name}"
        )


def join(first: Evaluation, second: Evaluation, task: str) -> list[tuple[Record, Record]]:
    """The records of one task, paired by document and prompt hash, in the first model's order.

    Raises:
        InputError: items that only one model has, the same item with different prompts, or an item twice.
    """
    a, b = (_by_document(evaluation, task) for evaluation in (first, second))
    only_a, only_b = len(a.keys() - b.keys()), len(b.keys() - a.keys())
    if only_a or only_b:
        raise InputError(
            f"task {task!r} was run on different items: {only_a} only for {first.name}, {only_b} only for"
            f" {second.name}, {len(a.keys() & b.keys())} for both"
        )
    prompts = sum(a[key].prompt_hash != b[key].prompt_hash for key in a)
    if prompts:
        raise InputError(
            f"task {task!r}: {prompts} of {len(a)} items have different prompts in {first.name} and {second.name}"
        )
    return [(a[key], b[key]) for key in a]


def _by_document(evaluation: Evaluation, task: str) -> dict[tuple[str, int], Record]:
    """Records by document hash; equal documents (data sets have some) are told apart by their order."""
    seen: dict[str, int] = {}
    keyed: dict[tuple[str, int], Record] = {}
    for record in sorted(evaluation.records[task], key=lambda record: record.doc_id):
        copy = seen[record.doc_hash] = seen.get(record.doc_hash, -1) + 1
        keyed[record.doc_hash, copy] = record
    return keyed


def _row(
    a: str, b: str, result: Result, other: Result, pairs: list[tuple[Record, Record]], confidence: float, seed: int
) -> ComparisonRow:
    metric = result.metric
    scores: tuple[list[float], list[float]] = (
        [pair[0].scores[metric] for pair in pairs],
        [pair[1].scores[metric] for pair in pairs],
    )
    if result.is_accuracy:
        found = paired_accuracy(*scores, confidence=confidence)
    else:
        weights = [pair[0].weights.get(metric, 1.0) for pair in pairs]
        found = paired_bootstrap(*scores, weights, confidence=confidence, seed=seed)
    return ComparisonRow(
        task=result.task,
        metric=metric,
        a=a,
        b=b,
        value_a=result.value,
        value_b=other.value,
        difference=found.difference,
        low=found.low,
        high=found.high,
        p_value=found.p_value,
        p_holm=found.p_value,
        n=found.n,
        partial=f"{result.n} of {result.available}" if result.is_partial else "",
        only_a=found.only_first,
        only_b=found.only_second,
        higher_is_better=result.higher_is_better,
        test=found.test,
        is_narrow=found.is_narrow,
    )


def markdown(comparison: Comparison) -> str:
    """The comparison as a Markdown table with the conditions below it."""
    level = f"{comparison.confidence:.0%}"
    lines = [
        f"| task | metric | pair | difference | {level} interval | only first / only second right | p | p (Holm) | n |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in comparison.rows:
        discordant = "–" if row.only_a is None else f"{row.only_a} / {row.only_b}"
        count = f"{row.n} (PARTIAL: {row.partial})" if row.partial else str(row.n)
        lines.append(
            f"| {row.task} | {row.metric} | {row.b} − {row.a} | {row.difference:+.4f}"
            f" | {format_interval(row.low, row.high, row.is_narrow)} | {discordant} | {_p(row.p_value)}"
            f" | {_p(row.p_holm)} | {count} |"
        )
    tested = sum(row.p_value is not None for row in comparison.rows)
    tests = sorted({row.test for row in comparison.rows})
    lines += ["", f"Tests: {'; '.join(tests)}. Holm's correction over the {tested} tested rows."]
    if any(row.is_narrow for row in comparison.rows):
        lines += ["", NARROW_NOTE]
    for task, missing in comparison.skipped.items():
        lines.append(f"Not compared: {task} (missing for {', '.join(missing)}).")
    return "\n".join(lines)


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
