"""The training loop: one process or many, from scratch or from a checkpoint, continued exactly where it was killed.

    for each step:
        for each micro-batch: loss = model(tokens) / targets in the whole batch; backward
        clip; check; AdamW with the scheduled learning rate; average the weights
        now and then: log, evaluate on the fixed held-out windows, save in the background

Everything random is a function of (seed, step): the order of samples, and the generators, which are seeded at every
step. So a checkpoint needs weights, moments, averages and the step, and a resumed run repeats the numbers of one that
was never interrupted (bit for bit on CPU).
"""

import json
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhar import runfile
from mhar.data.loader import StepBatches, TrainingSamples, check_batch, training_loader
from mhar.data.order import mix
from mhar.errors import MharError
from mhar.training.checkpoint import Checkpoints, TrainingState
from mhar.training.config import RunConfig
from mhar.training.distributed import World, autocast, gradient_sync, start_world, whole
from mhar.training.environment import environment, peak_memory, variant_name
from mhar.training.flops import flops_per_token, peak_flops
from mhar.training.inputs import check_vocabulary, open_data
from mhar.training.lock import folder_lock, make_folder
from mhar.training.metrics import Metrics
from mhar.training.model import export, parameter_counts, place_model, unwrapped
from mhar.training.optimizer import WeightAverage, build_optimizer, set_lr
from mhar.training.schedule import lr_factor
from mhar.training.validation import Validation, cross_entropy

SUMMARY = "summary.json"
FAILURE = "failure.json"


class DivergenceError(MharError):
    """The loss or its gradient is not finite, or the loss is above `max_loss`."""


def train(config: RunConfig) -> dict[str, Any]:
    """Run, or continue, the training that `config` describes; returns the summary written to `out/summary.json`.

    `out` then holds run.yaml, metrics.jsonl, checkpoints/, tensorboard/, final/ (and final_ema/), summary.json. Under
    torchrun every process calls this. Raises MharError subclasses for what a user can mend, DivergenceError when
    training cannot go on; Ctrl-C saves, and `summary["stopped"]` says "interrupted".
    """
    begin = time.monotonic()
    with start_world(config.parallel) as world, determinism(config):
        check_batch(config.batch_size, config.micro_batch_size, world.size)
        make_folder(config.out)
        with folder_lock(config.out) if world.is_main else nullcontext():
            run = Run(config, world, begin)
            with run.metrics, run.checkpoints:
                return run.train()


class Run:
    """One training run on one rank: everything that lives as long as the process does."""

    def __init__(self, config: RunConfig, world: World, begin: float) -> None:
        self.config, self.world, self.begin = config, world, begin
        sets, self.manifest = open_data(config, world)
        self.samples = TrainingSamples(sets, config.data.weights, config.seed)
        self.validation = Validation(config, world) if config.eval.every else None
        self.model = place_model(config, world)
        self.inner = unwrapped(self.model)
        check_vocabulary(self.inner.config, self.manifest, config)
        self.optimizer = build_optimizer(self.model, config.optimizer, world.device)
        self.average = WeightAverage(self.model, config.ema) if config.ema else None
        self.state = TrainingState(self.model, self.optimizer, self.average)
        self.checkpoints = Checkpoints(config, world)
        self.step = self._resume()
        self.flops = flops_per_token(self.inner, self.inner.config, config.data.sequence_length)
        self.peak_flops = peak_flops(world.device)
        self.window_seconds, self.window_steps = 0.0, 0
        if world.is_main:
            runfile.save(config, config.out / "run.yaml")
        self.metrics = Metrics(config, self.step, is_main=world.is_main)

    def _resume(self) -> int:
        steps = self.checkpoints.steps()
        if not steps:
            return 0
        self.checkpoints.load(steps[-1], self.state)
        return steps[-1]

    def _finished_before(self) -> dict[str, Any] | None:
        path = self.config.out / SUMMARY
        if self.step < self.config.steps or not path.is_file():
            return None
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary["stopped"] != "finished":
            return None
        if self.world.is_main:
            print(f"{self.config.out} finished before: nothing to do")
        return summary

    # The loop

    def train(self) -> dict[str, Any]:
        """All steps that are left, then the final evaluation, checkpoint, export and summary (a finished run: as it
        is)."""
        if (summary := self._finished_before()) is not None:
            return summary
        config, stopped = self.config, "finished"
        self.model.train()
        if self.step == 0 and self.validation:
            self.evaluate()
        batches = self._batches()
        with stop_signals() as signalled:
            while self.step < config.steps:
                stopped = self._step(batches, signalled) or "finished"
                self.checkpoints.poll()
                if stopped != "finished":
                    break
                if self.validation and config.eval.every and self.step % config.eval.every == 0:
                    self.evaluate()
                if self.step % config.checkpoint.every == 0 and self.step < config.steps:
                    self.checkpoints.save(self.step, self.state)
        return self._finish(stopped)

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        config, world = self.config, self.world
        order = StepBatches(self.step, config.steps, config.batch_size, config.micro_batch_size, world.rank, world.size)
        on_gpu = world.device.type == "cuda"
        loader = training_loader(self.samples, order, workers=config.data.workers, pin_memory=on_gpu)
        for batch in loader:
            yield {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}

    def _step(self, batches: Iterator[dict[str, Tensor]], signalled: list[int]) -> str | None:
        """One update; returns why the run must stop after it, or None."""
        config, begin = self.config, time.perf_counter()
        torch.manual_seed(mix(config.seed, 3, self.step, self.world.rank) >> 1)
        loss, z_loss = self._gradients(batches)
        logged = (self.step + 1) % config.logging.every == 0 or self.step + 1 == config.steps
        routing = self._routing() if logged else {}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.clip)
        overtime = config.max_seconds is not None and time.monotonic() - self.begin > config.max_seconds
        sums = self.world.sum(loss, z_loss, whole(norm), len(signalled), overtime)  # the one wait for the device
        mean_loss, mean_z, mean_norm = (total / self.world.size for total in sums[:3])
        self._check(mean_loss, mean_norm)
        lr = config.optimizer.lr * lr_factor(config.schedule, self.step, config.steps)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update()
        self.step += 1
        self.metrics.advance()
        self.window_seconds += time.perf_counter() - begin
        self.window_steps += 1
        if logged:
            self._log(loss=mean_loss, z_loss=mean_z, grad_norm=mean_norm, lr=lr)
            if routing:
                self.metrics.write("routing", self.step, **routing)
        if sums[3]:
            return "interrupted"
        return "time limit" if sums[4] else None

    def _gradients(self, batches: Iterator[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Backward passes of this rank's micro-batches; its parts of the batch's mean loss and of the z-loss."""
        config, world = self.config, self.world
        first = self.step * config.batch_size
        targets = self.samples.num_targets(range(first, first + config.batch_size))
        # DDP and FSDP average gradients over the ranks, so each rank divides by its share of the targets.
        items = world.scalar(targets / world.size).float()
        total, total_z = torch.zeros((), device=world.device), torch.zeros((), device=world.device)
        count = config.batch_size // config.micro_batch_size // world.size
        for micro in range(count):
            batch = next(batches)
            if config.parallel.compile_mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            with gradient_sync(self.model, micro == count - 1):
                with autocast(config.parallel, world):
                    outputs: Any = self.model(**batch, use_cache=False, num_items_in_batch=items)
                outputs.loss.backward()
            total += cross_entropy(outputs, self.inner.config).detach()
            if getattr(outputs, "z_loss", None) is not None:
                total_z += outputs.z_loss.detach()
        return total, total_z

    def _check(self, loss: float, norm: float) -> None:
        finite = all(map(torch.isfinite, torch.tensor([loss, norm])))
        if finite and loss <= self.config.max_loss:
            return
        first, last = self.step * self.config.batch_size, (self.step + 1) * self.config.batch_size - 1
        failure = {
            "step": self.step,
            "samples": [first, last],
            "loss": loss if math.isfinite(loss) else str(loss),  # JSON has no NaN
            "grad_norm": norm if math.isfinite(norm) else str(norm),
        }
        self.optimizer.zero_grad()
        self.checkpoints.save(self.step, self.state, wait=True, name=f"failed-{self.step}")
        if self.world.is_main:
            runfile.write_atomically(self.config.out / FAILURE, json.dumps(failure) + "\n")
        raise DivergenceError(
            f"training failed in batch {self.step} (samples {first} to {last}): loss "
            f"{loss:.6g} (max_loss {self.config.max_loss:g}), gradient norm {norm:.6g}. The state before the update is "
            f"in checkpoints/failed-{self.step}"
        )

    # What is written

    def _log(self, **values: float) -> None:
        tokens = self.window_steps * self.config.batch_size * self.config.data.sequence_length
        speed = tokens / self.window_seconds
        step_ms = 1000 * self.window_seconds / self.window_steps
        self.window_seconds, self.window_steps = 0.0, 0
        self.metrics.write(
            "train",
            self.step,
            tokens=self._tokens(),
            **values,
            tokens_per_s=round(speed, 1),
            step_ms=round(step_ms, 3),
            mfu=self._mfu(speed),
        )

    def _tokens(self) -> int:
        return self.step * self.config.batch_size * self.config.data.sequence_length

    def _mfu(self, tokens_per_s: float) -> float | None:
        return self.peak_flops and round(tokens_per_s * self.flops / (self.peak_flops * self.world.size), 4)

    @torch.no_grad()
    def _routing(self) -> dict[str, dict[str, float]]:
        """By site: gates and the norms of their gradients, or the norms of queries where there are no gates."""
        router: Any = getattr(getattr(self.inner, "model", None), "router", None)
        if router is None or router.query is None:
            return {}
        names = {row: site.name for site, row in zip(router.plan, router.site_rows, strict=True) if row is not None}
        columns = {"query_norms": whole(router.query).norm(dim=-1)}
        if router.gate is not None:
            columns["gates"] = whole(router.gate)
            if router.gate.grad is not None:
                columns["gate_grad_norms"] = whole(router.gate.grad).abs()
        return {
            key: {names[row]: value for row, value in enumerate(column.tolist())} for key, column in columns.items()
        }

    def evaluate(self) -> None:
        """Held-out loss of the weights, and of their average."""
        assert self.validation is not None
        begin = time.perf_counter()
        result = self.validation.run(self.model)
        values: dict[str, Any] = {"heldout_loss": result.loss, "heldout_bits_per_byte": result.bits_per_byte}
        if self.average is not None:
            with self.average.swapped():
                values["ema_heldout_loss"] = self.validation.run(self.model).loss
        seconds = round(time.perf_counter() - begin, 3)
        self.metrics.write(
            "eval", self.step, tokens=self._tokens(), **values, eval_tokens=result.tokens, seconds=seconds
        )

    def _finish(self, stopped: str) -> dict[str, Any]:
        if stopped == "interrupted":
            self.checkpoints.save(self.step, self.state, wait=True)
            return self._summary(stopped)
        evaluations = self.metrics.of_kind("eval")
        if self.validation and (not evaluations or evaluations[-1]["step"] < self.step):
            self.evaluate()
        self.checkpoints.save(self.step, self.state, wait=True)
        tokenizer = Path(self.config.data.train[0]) / "tokenizer"
        dtype = self.config.checkpoint.export_dtype
        export(self.model, self.config.out / "final", self.world, dtype, tokenizer)
        if self.average is not None:
            with self.average.swapped():
                export(self.model, self.config.out / "final_ema", self.world, dtype, tokenizer)
        if self.world.is_main:
            self.checkpoints.remove_failed()
            (self.config.out / FAILURE).unlink(missing_ok=True)
        return self._summary(stopped)

    def _summary(self, stopped: str) -> dict[str, Any]:
        config, evaluations = self.config, self.metrics.of_kind("eval")
        tail = [line["heldout_loss"] for line in evaluations[-config.eval.tail :]]
        speeds = [line["tokens_per_s"] for line in self.metrics.of_kind("train")]
        speed = statistics.median(speeds[1:] or speeds) if speeds else None
        summary: dict[str, Any] = {
            "name": config.out.name,
            "variant": variant_name(self.inner.config),
            "seed": config.seed,
            "stopped": stopped,
            "steps": self.step,
            "tokens": self._tokens(),
            "epochs": round(self.step * config.batch_size / len(self.samples), 4),
            "heldout_loss": statistics.fmean(tail) if tail else None,
            "heldout_evaluations": len(tail),
            "heldout_loss_last": tail[-1] if tail else None,
            "heldout_bits_per_byte": evaluations[-1]["heldout_bits_per_byte"] if tail else None,
            "tokens_per_s": speed and round(speed, 1),
            "mfu": speed and self._mfu(speed),
            "peak_memory_gib": peak_memory(self.world.device),
            **parameter_counts(self.model),
            "wall_seconds": round(time.monotonic() - self.begin, 1),
            **environment(self.world),
        }
        if evaluations and "ema_heldout_loss" in evaluations[-1]:
            summary["ema_heldout_loss_last"] = evaluations[-1]["ema_heldout_loss"]
        if self.world.is_main:
            runfile.write_atomically(config.out / SUMMARY, json.dumps(summary, indent=1) + "\n")
        return summary


@contextmanager
def determinism(config: RunConfig) -> Generator[None]:
    """PyTorch's deterministic mode inside the context, if the run asks for it."""
    before = torch.are_deterministic_algorithms_enabled()
    if config.parallel.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS wants it for deterministic results
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def stop_signals() -> Generator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a step can finish and be saved; a second one acts at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
