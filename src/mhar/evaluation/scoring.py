"""From the harness's samples to records, and from records to the numbers of a table."""

import json
import math
from collections.abc import Sequence
from typing import Any

from mhar.evaluation.records import Record, Result, hash_text
from mhar.evaluation.suites import TaskSpec

ACCURACIES = ("acc", "acc_norm", "exact_match", "math_verify", "pass_at_1", "pass@1")
# How the harness's likelihood metrics come from a score per unit (nats or bits) and its weighted mean.
PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity")


def records_of(samples: dict[str, list[dict[str, Any]]]) -> list[Record]:
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
