"""Where the numbers of a run go: a progress bar, JSON lines, TensorBoard, and trackers on request."""

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from mhar import runfile
from mhar.errors import DependencyError
from mhar.training.config import RunConfig

METRICS = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file (a kill may leave half a line at the end); none if there is no file."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


class Metrics:
    """Writes on the main process; on the others it does nothing. Lines after the step resumed from are dropped."""

    def __init__(self, config: RunConfig, step: int, *, is_main: bool) -> None:
        self.path, self.is_main = config.out / METRICS, is_main
        self.history = [line for line in read_metrics(self.path) if line["step"] <= step] if step else []
        self._trackers: list[Any] = []
        self._board: Any = None
        if not is_main:
            return
        runfile.write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in self.history))
        self._file = self.path.open("a", encoding="utf-8")
        self._bar = tqdm(total=config.steps, initial=step, unit="step", disable=not config.logging.progress)
        if config.logging.tensorboard:
            self._board = _board(config.out / "tensorboard", step)
        for package in ("trackio", "wandb"):
            if project := getattr(config.logging, package):
                self._trackers.append(_tracker(package, project, config))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line: `kind` and `step`, then `values`; numbers also go to TensorBoard and the trackers."""
        line = {"kind": kind, "step": step, **values}
        self.history.append(line)
        if not self.is_main:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        scalars = {f"{kind}/{name}": value for name, value in _scalars(values).items()}
        for name, value in scalars.items():
            if self._board is not None:
                self._board.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.log(scalars, step=step)
        if kind != "routing":
            shown = {
                n: f"{values[n]:.4g}" for n in ("loss", "heldout_loss", "tokens_per_s") if values.get(n) is not None
            }
            self._bar.set_postfix({**getattr(self, "_shown", {}), **shown})
            self._shown = {**getattr(self, "_shown", {}), **shown}

    def advance(self) -> None:
        """One step is done."""
        if self.is_main:
            self._bar.update()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind, those of earlier processes included."""
        return [line for line in self.history if line["kind"] == kind]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_main:
            self._bar.close()
            self._file.close()
            if self._board is not None:
                self._board.close()
            for tracker in self._trackers:
                tracker.finish()


def _scalars(values: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        entries: Any = value.items() if isinstance(value, dict) else [(None, value)]
        for inner, number in entries:
            if isinstance(number, int | float):
                flat[name if inner is None else f"{name}/{inner}"] = number
    return flat


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise DependencyError(
            "logging.tensorboard needs TensorBoard: pip install 'mhar[train]', or logging.tensorboard=false"
        ) from error
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def _tracker(package: str, project: str, config: RunConfig) -> Any:
    try:
        tracker = importlib.import_module(package)
    except ImportError as error:
        raise DependencyError(f"logging.{package} needs the package {package}: pip install {package}") from error
    tracker.init(project=project, name=config.out.name, config=runfile.to_mapping(config))
    return tracker
