"""What a report reads: folders that training, evaluation, probing and comparison leave behind."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mhar.errors import InputError

CONFIG, METRICS, SUMMARY, ROUTING = "run.yaml", "metrics.jsonl", "summary.json", "routing.json"
EVALUATION, PROBE, COMPARISON, INTERVENTIONS = (
    "evaluation.json",
    "probe.json",
    "comparison.json",
    "interventions.json",
)
RECOGNISED = (CONFIG, METRICS, SUMMARY, ROUTING, EVALUATION, PROBE, COMPARISON, INTERVENTIONS)
MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The readable contents of one folder; what is absent is empty."""

    path: Path
    name: str
    config: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    routing: dict[str, Any] = field(default_factory=dict[str, Any])
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])
    probe: dict[str, Any] = field(default_factory=dict[str, Any])
    comparison: dict[str, Any] = field(default_factory=dict[str, Any])
    interventions: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def variant(self) -> str:
        """The routing variant that the summary or the configuration names, else the run's name."""
        return str(self.summary.get("variant") or find_key(self.config, "variant") or self.name)

    @property
    def seed(self) -> str:
        return str(self.summary.get("seed", find_key(self.config, "seed")))


def find_key(config: str, key: str) -> str | None:
    """The first scalar `key: value` of a YAML text, at any depth."""
    for line in config.splitlines():
        name, _, value = line.strip().partition(":")
        if name == key and value.strip():
            return value.strip().strip("'\"")
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, `{}` when there is no such file.

    Raises:
        InputError: the file is not one whole JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON ({error}): truncated?") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold one JSON object, got {type(content).__name__}")
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file that a run may still be writing: a last line without its newline is left out.

    Raises:
        InputError: any other line that is not a JSON object, with its number.
    """
    if not path.is_file():
        return []
    *lines, _unterminated = path.read_text(encoding="utf-8").split("\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number} is not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number} must hold a JSON object, got {line[:40]!r}")
        if record:
            records.append(record)
    return records


def load_run(path: Path, name: str | None = None) -> RunFolder:
    """Read one folder; `name` defaults to the summary's or the folder's."""
    summary = read_json(path / SUMMARY)
    config = path / CONFIG
    return RunFolder(
        path=path,
        name=str(name or summary.get("name") or path.resolve().name),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        metrics=read_json_lines(path / METRICS),
        summary=summary,
        routing=read_json(path / ROUTING),
        evaluation=read_json(path / EVALUATION),
        probe=read_json(path / PROBE),
        comparison=read_json(path / COMPARISON),
        interventions=read_json(path / INTERVENTIONS),
    )


def discover(paths: Iterable[Path]) -> list[RunFolder]:
    """The run folders at or below each path, in order; names gain their parent's where they would be equal.

    Raises:
        InputError: a path that does not exist, or below which nothing can be reported.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise InputError(f"no run folder {path}")
        found = list(_walk(path, MAX_DEPTH))
        if not found:
            raise InputError(f"{path} holds none of {', '.join(RECOGNISED)}")
        folders += [folder for folder in found if folder not in folders]
    runs = [load_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        load_run(run.path, f"{run.path.resolve().parent.name}/{run.name}") if names.count(run.name) > 1 else run
        for run in runs
    ]


def _walk(path: Path, depth: int) -> Iterator[Path]:
    if any((path / name).is_file() for name in RECOGNISED):
        yield path
    if depth:
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith((".", "checkpoint")):
                yield from _walk(child, depth - 1)


def curve(metrics: Iterable[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the lines that hold a finite number under `key`; a repeated step keeps its last value."""
    points: dict[float, float] = {}
    for line in metrics:
        value, step = line.get(key), line.get("step")
        if isinstance(value, (int, float)) and isinstance(step, (int, float)) and math.isfinite(value):
            points[step] = float(value)
    steps = sorted(points)
    return steps, [points[step] for step in steps]
