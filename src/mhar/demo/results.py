"""What a run found: losses at fixed steps, paired differences to the baseline, and the table that shows them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mhar.demo.settings import BASELINE

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean paired difference over held-out windows (nats per token) and its standard error."""

    mean: float
    stderr: float
    num_windows: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % normal interval of the mean over windows; it holds no spread between seeds."""
        return self.mean - 1.96 * self.stderr, self.mean + 1.96 * self.stderr


def paired_difference(losses: Sequence[float], reference: Sequence[float]) -> Difference:
    """`losses` minus `reference`, window by window."""
    change = torch.tensor(losses, dtype=torch.float64) - torch.tensor(reference, dtype=torch.float64)
    stderr = change.std().item() / math.sqrt(len(change)) if len(change) > 1 else math.nan
    return Difference(change.mean().item(), stderr, len(change))


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One row of the table; `window_losses` maps evaluated steps to the loss of each held-out window."""

    name: str
    num_parameters: int
    num_routing_parameters: int
    step: int
    window_losses: dict[int, list[float]]
    tokens_per_s: float
    peak_bytes: int | None

    def loss(self, step: int) -> float | None:
        """Held-out loss in nats per token, None where the variant was not evaluated."""
        losses = self.window_losses.get(step)
        return None if losses is None else sum(losses) / len(losses)

    def difference(self, reference: "VariantResult", step: int) -> Difference | None:
        """Paired difference to `reference` at `step`, None unless both were evaluated there."""
        mine, theirs = self.window_losses.get(step), reference.window_losses.get(step)
        return None if mine is None or theirs is None else paired_difference(mine, theirs)


def window_losses(metrics: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    """Held-out losses by step from the lines of a metrics file."""
    return {line["step"]: line["window_losses"] for line in metrics if line["kind"] == "eval"}


def result_table(results: Sequence[VariantResult], steps: Sequence[int]) -> str:
    """The run as text: a column per variant, in brackets its change against the baseline; a dash where there is none
    yet. Losses are in nats per token."""
    reference = next((result for result in results if result.name == BASELINE), None)
    others = [result is not reference and reference is not None for result in results]

    def row(label: str, values: Sequence[str], changes: Sequence[str]) -> list[str]:
        cells = zip(values, changes, others, strict=True)
        return [label, *(f"{value} ({change})" if other and change else value for value, change, other in cells)]

    rows = [
        ["", *(result.name for result in results)],
        row(
            "parameters",
            [f"{result.num_parameters:,}" for result in results],
            [f"+{result.num_routing_parameters:,}" for result in results],
        ),
    ]
    for step in steps:
        losses = [result.loss(step) for result in results]
        differences = [None if reference is None else result.difference(reference, step) for result in results]
        rows.append(
            row(
                f"held-out loss, step {step}",
                ["–" if loss is None else f"{loss:.3f}" for loss in losses],
                [format_difference(difference) for difference in differences],
            )
        )
    speeds = [result.tokens_per_s for result in results]
    rows.append(row("tokens/s", [f"{speed:,.0f}" for speed in speeds], _ratios(speeds, results)))
    peaks = [(result.peak_bytes or 0) / MIB for result in results]
    rows.append(row("peak memory, MiB", [f"{peak:.1f}" if peak else "–" for peak in peaks], _ratios(peaks, results)))
    return _aligned(rows)


def _ratios(values: Sequence[float], results: Sequence[VariantResult]) -> list[str]:
    """Each value over the baseline's, empty where either is missing."""
    base = next((value for value, result in zip(values, results, strict=True) if result.name == BASELINE), 0.0)
    return [f"{value / base:.2f}x" if value and base else "" for value in values]


def format_difference(difference: Difference | None) -> str:
    """`-0.031 ±0.004`; empty for None."""
    return "" if difference is None else f"{difference.mean:+.3f} ±{difference.stderr:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def comparison_rows(results: Sequence[VariantResult], step: int) -> list[dict[str, Any]]:
    """Rows of `comparison.json` (the format that the report reads): every variant against the baseline at `step`."""
    reference = next((result for result in results if result.name == BASELINE), None)
    rows: list[dict[str, Any]] = []
    for result in results:
        difference = None if reference in (None, result) else result.difference(reference, step)
        if difference is None:
            continue
        low, high = difference.interval
        rows.append(
            {
                "a": BASELINE,
                "b": result.name,
                "task": "held-out novel",
                "metric": f"loss at step {step}",
                "difference": difference.mean,
                "low": low,
                "high": high,
                "p_value": None,
                "p_holm": None,
                "n": difference.num_windows,
                "test": "normal interval over paired windows; one seed",
            }
        )
    return rows
