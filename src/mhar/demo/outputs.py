"""What a run leaves in its folder, whether it made all its steps or was stopped."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mhar.analysis.report import write_report
from mhar.analysis.routing_map import RoutingMap
from mhar.demo.metrics import read_metrics
from mhar.demo.results import MIB, VariantResult, comparison_rows, result_table, window_losses
from mhar.demo.settings import BASELINE, DemoSettings
from mhar.demo.trainer import EVALUATION_BATCH, VariantTrainer
from mhar.runfile import write_atomically

REPORT, TABLE, COMPARISON = "report.html", "table.txt", "comparison.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: its table, a sample of each variant, whether all steps were made."""

    table: str
    samples: dict[str, str]
    finished: bool


def result_of(trainer: VariantTrainer) -> VariantResult:
    """The trainer's row, its losses as the metrics file has them."""
    router = trainer.model.model.router
    return VariantResult(
        name=trainer.name,
        num_parameters=sum(p.numel() for p in trainer.model.parameters()),
        num_routing_parameters=sum(p.numel() for p in router.parameters()),
        step=trainer.step,
        window_losses=window_losses(read_metrics(trainer.metrics.path)),
        tokens_per_s=trainer.tokens_per_s,
        peak_bytes=trainer.peak_bytes,
    )


def write_outputs(
    trainers: Sequence[VariantTrainer], settings: DemoSettings, bytes_per_token: float, folder: Path
) -> Outcome:
    """Checkpoints, summaries, routing maps, samples, table and report of what exists now."""
    results = [result_of(trainer) for trainer in trainers]
    samples = {trainer.name: trainer.sample() for trainer in trainers}
    for trainer, result in zip(trainers, results, strict=True):
        trainer.save()
        write_json(trainer.folder / "summary.json", summary(result, results, settings, bytes_per_token))
        write_atomically(trainer.folder / "sample.txt", samples[trainer.name] + "\n")
        if routing := routing_map(trainer):
            write_json(trainer.folder / "routing.json", routing)
    table = result_table(results, settings.evaluation_steps())
    write_atomically(folder / TABLE, table + "\n")
    if last := common_step(results):
        write_json(folder / COMPARISON, {"confidence": 0.95, "rows": comparison_rows(results, last)})
    write_report(folder / REPORT, [*(trainer.folder for trainer in trainers), folder], title="Depth routing demo")
    return Outcome(table, samples, all(result.step == settings.steps for result in results))


def summary(
    result: VariantResult, results: Sequence[VariantResult], settings: DemoSettings, bytes_per_token: float
) -> dict[str, Any]:
    """The numbers of one variant (`summary.json`)."""
    values: dict[str, Any] = {
        "name": result.name,
        "variant": result.name,
        "seed": settings.seed,
        "parameters": result.num_parameters,
        "routing_parameters": result.num_routing_parameters,
        "steps": result.step,
        "tokens": result.step * settings.tokens_per_step,
        "tokens_per_s": round(result.tokens_per_s, 1),
    }
    if result.peak_bytes is not None:
        values["peak_memory_mib"] = round(result.peak_bytes / MIB, 1)
    if result.window_losses:
        last = max(result.window_losses)
        loss = result.loss(last)
        assert loss is not None
        values["heldout_loss"] = loss
        values["heldout_bits_per_byte"] = loss / math.log(2) / bytes_per_token
        reference = next(other for other in results if other.name == BASELINE)
        difference = result.difference(reference, last)
        if difference is not None and result is not reference:
            values["difference_to_baseline"] = difference.mean
            values["difference_stderr"] = difference.stderr
    return values


def common_step(results: Sequence[VariantResult]) -> int | None:
    """The last step at which every variant was evaluated."""
    shared = set.intersection(*(set(result.window_losses) for result in results))
    return max(shared, default=None)


@torch.no_grad()
def routing_map(trainer: VariantTrainer) -> dict[str, Any] | None:
    """Routing weights by site, source and head, averaged over the held-out tokens; None for the baseline."""
    model = trainer.model.eval()
    if model.config.routing_config.read == "none":
        return None
    observer = RoutingMap()
    with model.model.router.observe(observer):
        for ids in trainer.data.held_out.split(EVALUATION_BATCH):
            model(input_ids=ids.to(trainer.device), use_cache=False)
    return observer.to_dict()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON object, atomically."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")
