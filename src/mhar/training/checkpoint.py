"""Checkpoints of a run: sharded, saved in the background, whole or absent, and pruned by rule."""

import hashlib
import json
import shutil
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from mhar import runfile
from mhar.data.shards import read_manifest, sha256_of
from mhar.errors import CheckpointError
from mhar.training.config import CheckpointSection, RunConfig
from mhar.training.distributed import World
from mhar.training.optimizer import WeightAverage

STATE = "state.json"
CHECKSUMS = "checksums.json"
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
FAILURES = (Exception, CheckpointException)  # the latter is a BaseException
# What decides the numbers of a run: a checkpoint continues only a run that agrees in all of it.
DECISIVE = ("model", "data", "optimizer", "schedule", "seed", "steps", "batch_size", "ema", "parallel", "eval")
FREE = {
    "data": ("workers", "verify", "tokenizer"),
    "model": ("backend", "activation_checkpointing", "attention"),
    "parallel": ("mode", "shard", "reshard", "device", "compile", "compile_mode", "deterministic"),
    "eval": ("every", "tail", "batch_size"),
}


class Checkpoints:
    """The folder `checkpoints/` of a run, holding `step-N` folders.

    A checkpoint is written as `step-N.partial` and renamed when every rank's part is on disk, so that a folder named
    `step-N` is always whole. The one before is removed only after that.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.folder, self.options, self.world = config.out / "checkpoints", config.checkpoint, world
        self.identity = world.from_main(lambda: identity(config))
        self._pending: tuple[Path, Future[Any]] | None = None
        self._background = futures.ThreadPoolExecutor(1, "checksums")
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in (*self.folder.glob("*.partial"), *self.folder.glob("*.deleting")):
                shutil.rmtree(leftover, ignore_errors=True)
        if world.size > 1:
            dist.barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Let a save under way end before the process groups do."""
        if self._pending is not None:
            futures.wait([self._pending[1]])
        self._background.shutdown()

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending."""
        return steps_in(self.folder)

    def save(self, step: int, state: "TrainingState", *, wait: bool = False, name: str | None = None) -> None:
        """Save after `step` updates; returns once the state is copied (wait: once it is on disk).

        Raises CheckpointError when this save or the one before failed; older checkpoints are whole then.
        """
        self.wait()
        target = self.folder / (name or f"step-{step}")
        if name is None and target.exists():
            return
        partial = target.with_name(f"{target.name}.partial")
        try:
            future = cast(
                "Future[Any]",
                state_dict_saver.async_save(
                    state.tensors(), checkpoint_id=partial, process_group=self.world.save_group
                ),
            )
            if self.world.is_main:
                future = self._background.submit(self._complete, future, partial, step)
            self._pending = (target, future)
        except FAILURES as error:
            raise self._failed(target, error) from error
        if wait or not self.options.asynchronous:
            self.wait()

    def _complete(self, written: "Future[Any]", partial: Path, step: int) -> None:
        """Behind the tensors of all ranks: what they belong to, and their checksums."""
        written.result()
        checksums = {path.name: sha256_of(path) for path in sorted(partial.iterdir())}
        runfile.write_atomically(partial / CHECKSUMS, json.dumps(checksums))
        runfile.write_atomically(partial / STATE, json.dumps({"step": step, "run": self.identity}))

    def poll(self) -> None:
        """Finish a save whose files are written; never waits."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Finish the save under way, if any."""
        if self._pending is None:
            return
        (target, future), self._pending = self._pending, None
        try:
            future.result()
            if self.world.is_main:
                shutil.rmtree(target, ignore_errors=True)
                target.with_name(f"{target.name}.partial").rename(target)
                self._prune()
        except FAILURES as error:
            raise self._failed(target, error) from error

    def load(self, step: int, state: "TrainingState") -> None:
        """Restore model, optimizer and average in place; CheckpointError for another run's or a damaged one."""
        source = self.folder / f"step-{step}"
        try:
            found = json.loads((source / STATE).read_text(encoding="utf-8"))["run"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(source, f"{STATE} cannot be read: {error}") from error
        if found != self.identity:
            different = ", ".join(_differences(found, self.identity))
            raise CheckpointError(f"{source} belongs to another run: it differs in {different}. Choose another `out`.")
        self._verify(source)
        tensors = state.tensors()
        try:
            state_dict_loader.load(tensors, checkpoint_id=source, process_group=self.world.save_group)
        except FAILURES as error:
            raise self._damaged(source, _reason(error)) from error
        state.restore(tensors)

    def _verify(self, source: Path) -> None:
        """Compare the files with their checksums, each rank its share; every rank learns of a damaged one."""
        try:
            expected = json.loads((source / CHECKSUMS).read_text(encoding="utf-8"))
            mine = list(expected.items())[self.world.rank :: self.world.size]
            bad = [name for name, checksum in mine if sha256_of(source / name) != checksum]
            damage = f"{bad[0]} is not what was written" if bad else None
        except (OSError, ValueError, AttributeError) as error:
            damage = _reason(error)
        if found := [text for text in self.world.gather(damage) if text]:
            raise self._damaged(source, found[0])

    def _damaged(self, source: Path, reason: str) -> CheckpointError:
        earlier = [step for step in self.steps() if self.folder / f"step-{step}" != source]
        remedy = f"continue from step-{earlier[-1]}" if earlier else "begin anew"
        return CheckpointError(f"{source} cannot be loaded: {reason}; remove {source} to {remedy}")

    def remove_failed(self) -> None:
        """Remove what `save` wrote under other names: states in front of a failure."""
        for path in self.folder.glob("failed-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        kept = prunable(self.steps(), self.options)
        for step in kept:
            doomed = (self.folder / f"step-{step}").rename(self.folder / f"step-{step}.deleting")
            shutil.rmtree(doomed, ignore_errors=True)

    def _failed(self, target: Path, error: BaseException) -> CheckpointError:
        good = self.steps()
        last = f"the last good one is step-{good[-1]}" if good else "there is no earlier one"
        return CheckpointError(f"{target} could not be saved ({_reason(error)}); {last}")


class TrainingState:
    """What a checkpoint holds: weights, moments and averages. Everything else is a function of the step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> None:
        self.model, self.optimizer, self.average = model, optimizer, average

    def tensors(self) -> dict[str, Any]:
        """The live tensors, by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=OPTIONS)
        averages = {} if self.average is None else {"ema": self.average.averages}
        return {"model": model, "optimizer": optimizer, **averages}

    def restore(self, tensors: dict[str, Any]) -> None:
        """Put back what `tensors` (filled by a load) holds."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=OPTIONS,
        )


def steps_in(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in `folder`, ascending."""
    names = (path.name for path in folder.glob("step-*"))
    return sorted(int(name[5:]) for name in names if name[5:].isdigit())


def prunable(steps: list[int], options: CheckpointSection) -> list[int]:
    """The checkpoints to remove: neither among the last `keep` nor at a multiple of `keep_every`."""
    return [step for step in steps[: -options.keep] if options.keep_every is None or step % options.keep_every]


def identity(config: RunConfig) -> dict[str, Any]:
    """The part of a run's configuration that decides its numbers; data and checkpoint by content, not by path."""
    values = {name: value for name, value in runfile.to_mapping(config).items() if name in DECISIVE}
    for section, names in FREE.items():
        values[section] = {name: value for name, value in values[section].items() if name not in names}
    values["data"]["train"] = [read_manifest(folder).fingerprint("train") for folder in config.data.train]
    values["data"]["val"] = read_manifest(config.data.val or config.data.train[0]).fingerprint("val")
    if config.model.init_from is not None:
        values["model"]["init_from"] = _checkpoint_fingerprint(config.model.init_from)
    return values


def _checkpoint_fingerprint(name: str) -> str:
    """The name of a checkpoint of the hub, or the hash of a local one's configuration and weights."""
    files = sorted(path for path in Path(name).glob("*") if path.suffix in (".json", ".safetensors", ".bin"))
    if not files:
        return name
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    """The cause in one line; DCP wraps what happened on each rank."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {type(cause).__name__} {cause}"
    return f"{type(error).__name__}: {error}"


def _differences(found: Any, asked: Any, where: str = "") -> list[str]:
    if not isinstance(found, dict) or not isinstance(asked, dict):
        return [] if found == asked else [f"{where} ({found!r}, now {asked!r})"]
    names = list(dict.fromkeys([*found, *asked]))
    return [
        text
        for name in names
        for text in _differences(found.get(name), asked.get(name), f"{where}.{name}" if where else name)
    ]
