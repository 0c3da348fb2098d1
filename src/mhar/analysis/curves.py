"""Curves over training steps, grouped over seeds; and what a report calls the numbers of a run."""

from collections.abc import Sequence

from mhar.analysis.runfolder import RunFolder, curve
from mhar.analysis.svg import Series

HELDOUT_KEYS = ("heldout_loss", "validation_loss", "val_loss", "eval_loss")
TRAIN_KEYS = ("loss", "train_loss")
GATES = "gate"
COSTS = {  # of a run's summary
    "tokens_per_s": "throughput, tokens per second",
    "peak_memory_gib": "peak memory, GiB",
    "peak_memory_mib": "peak memory, MiB",
    "mfu": "model FLOPs utilisation",
}
MAX_POINTS = 200


def first_key(run: RunFolder, keys: Sequence[str]) -> tuple[list[float], list[float]]:
    """The curve under the first of `keys` that the run's metrics hold."""
    return next((points for key in keys if (points := curve(run.metrics, key))[0]), ([], []))


def thin(x: Sequence[float], y: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most `limit` points: means over equal bins of consecutive points; x at the end of each bin."""
    size = -(-len(x) // limit)
    if size <= 1:
        return list(x), list(y)
    bins = [slice(i, i + size) for i in range(0, len(x), size)]
    return [x[part][-1] for part in bins], [sum(y[part]) / len(y[part]) for part in bins]


def seed_groups(runs: Sequence[RunFolder]) -> list[tuple[str, list[RunFolder]]]:
    """Runs of one variant that differ in their seed form a group; every other run stands alone."""
    by_variant: dict[str, list[RunFolder]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, []).append(run)
    groups: list[tuple[str, list[RunFolder]]] = []
    for variant, members in by_variant.items():
        if len({run.seed for run in members}) == len(members) > 1:
            groups.append((f"{variant} ({len(members)} seeds)", members))
        else:
            groups += [(run.name, [run]) for run in members]
    return groups


def grouped_series(runs: Sequence[RunFolder], keys: Sequence[str]) -> list[Series]:
    """One curve per group: the mean over its seeds at the steps all of them have, with the range as band."""
    series: list[Series] = []
    for name, members in seed_groups(runs):
        curves = [dict(zip(*first_key(run, keys), strict=True)) for run in members]
        steps = sorted(set.intersection(*(set(points) for points in curves)))
        if not steps:
            continue
        values = [[points[step] for points in curves] for step in steps]
        x, mean = thin(steps, [sum(row) / len(row) for row in values])
        low = thin(steps, [min(row) for row in values])[1] if len(members) > 1 else ()
        high = thin(steps, [max(row) for row in values])[1] if len(members) > 1 else ()
        series.append(Series(name, x, mean, low, high))
    return series


def excess_by_width(runs: Sequence[RunFolder]) -> list[tuple[float, float, str]]:
    """(width, learned excess, name) of every probed single-head model, by width."""
    return sorted(
        (float(run.probe["model"]["width"]), float(run.probe["totals"]["learned_excess"]), run.name)
        for run in runs
        if "learned_excess" in run.probe.get("totals", {}) and "width" in run.probe.get("model", {})
    )


def gate_series(run: RunFolder) -> list[Series]:
    """A run's gates over training, one curve per site, from the metric lines whose "gates" map names to values."""
    points: dict[str, dict[float, float]] = {}
    for line in run.metrics:
        gates = line.get("gates")
        if isinstance(gates, dict) and "step" in line:
            for site, value in gates.items():
                points.setdefault(site, {})[line["step"]] = value
    return [Series(site, *thin(list(values), list(values.values()))) for site, values in points.items()]
