"""Evaluation folders: scores of every item with hashes of what was asked, so that each number can be audited later.

evaluation.json         model, versions, seeds, settings, one result per task and metric, checksums of the records
records-TASK.jsonl      one line per item: document and prompt hash, target, answer, scores, weights
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mhar.errors import InputError
from mhar.runfile import write_atomically

FORMAT_VERSION = 1
EVALUATION = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One item of one task.

    Attributes:
        doc_hash, prompt_hash: SHA-256 of the document and of the exact prompt; together they identify the item.
        target: the right answer, as text.
        scores: by metric; 0 or 1 for accuracies, a value per unit (nats per word, ...) for likelihoods.
        weights: units of the item by metric; 1 where absent.
        answer: what the model said, as text (the chosen index, or the generation).
    """

    doc_id: int
    doc_hash: str
    prompt_hash: str
    target: str
    scores: dict[str, float]
    weights: dict[str, float] = field(default_factory=dict[str, float])
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One number of a results table. `available` is how many items the task has: n < available is a partial run."""

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int
    available: int
    higher_is_better: bool
    is_accuracy: bool
    is_primary: bool = False
    num_fewshot: int = 0
    note: str = ""

    @property
    def is_partial(self) -> bool:
        return self.n < self.available


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The content of an evaluation folder."""

    model: dict[str, Any]
    versions: dict[str, str]
    seeds: dict[str, int]
    settings: dict[str, Any]
    results: tuple[Result, ...]
    records: dict[str, tuple[Record, ...]]
    name: str = ""

    def with_task(self, task: str, records: Iterable[Record], results: Iterable[Result]) -> "Evaluation":
        """The evaluation with one more task, which replaces an earlier run of it."""
        others = tuple(result for result in self.results if result.task != task)
        return replace(self, results=(*others, *results), records={**self.records, task: tuple(records)})


def file_name(task: str) -> str:
    """`records-TASK.jsonl`, with what a file name cannot hold replaced."""
    return f"records-{''.join(c if c.isalnum() or c in '-_.' else '_' for c in task)}.jsonl"


def save(evaluation: Evaluation, folder: Path) -> None:
    """Write the folder: records first, `evaluation.json` last, so that a folder with the latter is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {}
    for task, records in evaluation.records.items():
        text = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
        write_atomically(folder / file_name(task), text)
        files[task] = {"file": file_name(task), "count": len(records), "sha256": _sha256(text.encode())}
    content = {
        "format_version": FORMAT_VERSION,
        "name": evaluation.name,
        "model": evaluation.model,
        "versions": evaluation.versions,
        "seeds": evaluation.seeds,
        "settings": evaluation.settings,
        "results": [asdict(result) for result in evaluation.results],
        "records": files,
    }
    write_atomically(folder / EVALUATION, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load(folder: Path) -> Evaluation:
    """Read an evaluation folder and check its records against their checksums.

    Raises:
        InputError: no evaluation there, another format, or a records file that is missing, truncated or altered.
    """
    path = folder / EVALUATION if folder.is_dir() else folder
    if not path.is_file():
        raise InputError(f"{folder} is no evaluation folder (no {EVALUATION}): run `mhar evaluate`")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON ({error}): truncated?") from error
    if content.get("format_version") != FORMAT_VERSION:
        raise InputError(f"{path}: format {content.get('format_version')!r}; this version reads {FORMAT_VERSION}")
    return Evaluation(
        model=content["model"],
        versions=content["versions"],
        seeds=content["seeds"],
        settings=content["settings"],
        results=tuple(Result(**result) for result in content["results"]),
        records={task: _read_records(path.parent, task, entry) for task, entry in content["records"].items()},
        name=content.get("name") or path.parent.resolve().name,
    )


def _read_records(folder: Path, task: str, entry: dict[str, Any]) -> tuple[Record, ...]:
    path = folder / entry["file"]
    if not path.is_file():
        raise InputError(f"the records of task {task!r} are missing: no file {path}")
    raw = path.read_bytes()
    if _sha256(raw) != entry["sha256"]:
        lines = len(raw.splitlines())
        raise InputError(
            f"{path} is truncated or was altered: {lines} lines where {entry['count']} were written,"
            f" SHA-256 {_sha256(raw)[:12]} where {entry['sha256'][:12]} was recorded"
        )
    # Not splitlines(): texts may hold U+2028 and other characters that it takes for line ends.
    return tuple(Record(**json.loads(line)) for line in raw.decode().split("\n") if line)


def hash_text(text: str) -> str:
    """SHA-256 of a text, as hexadecimal digits."""
    return _sha256(text.encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def model_revision(folder: Path) -> str:
    """A fingerprint of a local checkpoint: SHA-256 over the names and contents of its config and weight files."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def markdown(evaluations: Sequence[Evaluation]) -> str:
    """Results as a Markdown table; every partial run is marked in its own row."""
    lines = ["| model | task | metric | value | ± s.e. | n | shots | complete |", "|---|---|---|---|---|---|---|---|"]
    for evaluation in evaluations:
        lines += _rows(evaluation.name, evaluation.results)
    return "\n".join(lines)


def _rows(name: str, results: Iterable[Result]) -> list[str]:
    return [
        f"| {name} | {r.task} | {r.metric} | {r.value:.4f} | {'–' if r.stderr is None else f'{r.stderr:.4f}'}"
        f" | {r.n} | {r.num_fewshot} | {f'PARTIAL: {r.n} of {r.available}' if r.is_partial else 'yes'}"
        f"{'; ' + r.note if r.note else ''} |"
        for r in results
    ]
