"""Evaluations made by hand, for tests of records and comparisons."""

from mhar.evaluation.records import Evaluation, Record, hash_text
from mhar.evaluation.scoring import summarise
from mhar.evaluation.suites import TASKS, TaskSpec


def records(scores, *, metric="acc", weights=None, prompt="prompt {}", document="document {}") -> list[Record]:
    """One record per score."""
    return [
        Record(
            doc_id=i,
            doc_hash=hash_text(document.format(i)),
            prompt_hash=hash_text(prompt.format(i)),
            target=str(i),
            scores={metric: float(score)},
            weights={} if weights is None else {metric: float(weights[i])},
        )
        for i, score in enumerate(scores)
    ]


def evaluation(name, tasks, *, harness="0.4.13", num_fewshot=0, available=None) -> Evaluation:
    """`tasks`: records by task name."""
    results = [
        result
        for task, items in tasks.items()
        for result in summarise(
            TASKS.get(task, TaskSpec(name=task, primary="", source="")),
            items,
            available or len(items),
            {"loss": False, "word_perplexity": False},
            num_fewshot,
        )
    ]
    return Evaluation(
        model={"name": name, "revision": "r"},
        versions={"mhar": "0", "lm_eval": harness},
        seeds={"python": 0},
        settings={"limit": None},
        results=tuple(results),
        records={task: tuple(items) for task, items in tasks.items()},
        name=name,
    )
