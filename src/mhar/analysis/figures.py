"""Print figures, as SVG and PDF, from the folders that a report reads. Needs matplotlib (the `analysis` extra)."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mhar.analysis import depthmap
from mhar.analysis.curves import COSTS, HELDOUT_KEYS, TRAIN_KEYS, excess_by_width, gate_series, grouped_series
from mhar.analysis.runfolder import RunFolder, discover
from mhar.analysis.svg import SERIES_COLOURS, Series
from mhar.errors import InputError
from mhar.evaluation.loading import require

COLUMN_WIDTH, PAGE_WIDTH = 3.4, 7.0  # inches: one and two columns of a printed page
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mhar",  # equal input gives an equal file
    "pdf.fonttype": 42,
    "savefig.bbox": "tight",
}
MAX_GATES_NAMED = 8
Figures = Iterable[tuple[str, Any]]


def write_figures(runs: Sequence[Path | str], folder: Path | str) -> list[Path]:
    """Draw every figure that the runs have data for, each as NAME.svg and NAME.pdf, and return the files.

    Raises:
        InputError: nothing to draw, or a damaged run folder.
        DependencyError: matplotlib is not installed.
    """
    pyplot, matplotlib = require("matplotlib.pyplot", "analysis"), require("matplotlib", "analysis")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    found = discover(map(Path, runs))
    style = {**STYLE, "axes.prop_cycle": matplotlib.cycler(color=SERIES_COLOURS)}
    files: list[Path] = []
    with matplotlib.rc_context(style):
        for draw in DRAWERS:
            for name, figure in draw(found, pyplot):
                files += _save(figure, target / name)
                pyplot.close(figure)
    if not files:
        raise InputError(f"nothing to draw in {', '.join(map(str, runs))}")
    return files


def _save(figure: Any, stem: Path) -> list[Path]:
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "pdf")]
    for path, metadata in zip(files, ({"Date": None}, {"CreationDate": None}), strict=True):
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format=path.suffix[1:], metadata=metadata)
        temporary.replace(path)
    return files


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def _plot(axes: Any, series: Sequence[Series]) -> None:
    for curve in series:
        [line] = axes.plot(curve.x, curve.y, linewidth=1.2, label=curve.name)
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=line.get_color(), alpha=0.2, linewidth=0)


def loss_figures(runs: Sequence[RunFolder], pyplot: Any) -> Figures:
    """Held-out and training loss over steps; bands are the range over seeds."""
    for keys, name in ((HELDOUT_KEYS, "heldout-loss"), (TRAIN_KEYS, "training-loss")):
        series = grouped_series(runs, keys)
        if not series:
            continue
        figure, axes = pyplot.subplots(figsize=(COLUMN_WIDTH, 2.4))
        _plot(axes, series)
        late = [value for curve in series for value in list(curve.y)[len(curve.y) // 10 :]]
        margin = 0.05 * (max(late) - min(late)) or 0.1
        axes.set(xlabel="step", ylabel=f"{name.replace('-', ' ')} (nats per token)")
        axes.set_ylim(min(late) - margin, max(late) + margin)
        axes.legend()
        yield name, figure


def cost_figures(runs: Sequence[RunFolder], pyplot: Any) -> Figures:
    """Bars of throughput and memory, side by side."""
    measured = {key: [r for r in runs if isinstance(r.summary.get(key), (int, float))] for key in COSTS}
    shown = {key: found for key, found in measured.items() if len(found) > 1}
    if not shown:
        return
    figure, all_axes = pyplot.subplots(1, len(shown), figsize=(COLUMN_WIDTH * len(shown), 1.8), squeeze=False)
    for axes, (key, found) in zip(all_axes[0], shown.items(), strict=True):
        colours = [SERIES_COLOURS[i % len(SERIES_COLOURS)] for i in range(len(found))]
        bars = axes.barh([r.name for r in found], [r.summary[key] for r in found], color=colours)
        axes.bar_label(bars, fmt="{:,.4g}", padding=2)
        axes.invert_yaxis()
        axes.set(xlabel=COSTS[key])
        axes.margins(x=0.25)
    figure.tight_layout()
    yield "cost", figure


def _cells(rows: Sequence[Sequence[float | None]]) -> Any:
    return np.array([[np.nan if cell is None else cell for cell in row] for row in rows], dtype=float)


def _label_axes(axes: Any, data: dict[str, Any]) -> None:
    names = [depthmap.short(site["name"]) for site in data["sites"]]
    sources = [depthmap.short(name) for name in data["columns"]]
    for ticks, labels, set_ticks in ((names, names, axes.set_yticks), (sources, sources, axes.set_xticks)):
        step = -(-len(ticks) // 20)
        set_ticks(range(0, len(ticks), step), labels[::step])
    axes.tick_params(axis="x", rotation=90, length=2)
    axes.tick_params(axis="y", length=2)
    axes.set(xlabel="source", ylabel="site")


def map_figures(runs: Sequence[RunFolder], pyplot: Any) -> Figures:
    """Depth maps: mean routing weight by site and source, on a square-root scale."""
    from matplotlib.colors import PowerNorm

    for run in runs:
        if not run.routing:
            continue
        data = depthmap.map_data(run.routing)
        figure, axes = pyplot.subplots(figsize=(COLUMN_WIDTH, COLUMN_WIDTH))
        image = axes.imshow(_cells(depthmap.matrix(data)), cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect="auto")
        _label_axes(axes, data)
        axes.set_title(run.name)
        figure.colorbar(image, label="mean weight", shrink=0.8)
        yield f"depth-map-{_slug(run.name)}", figure


def head_figures(runs: Sequence[RunFolder], pyplot: Any) -> Figures:
    """Each head's deviation from the mean over heads, one colour scale for all heads of a run."""
    for run in runs:
        data = depthmap.map_data(run.routing) if run.routing else {"sites": []}
        heads = min(depthmap.num_heads(data), depthmap.MAX_HEAD_MAPS)
        if heads < 2:
            continue
        maps = [_cells(depthmap.matrix(data, head, relative=True)) for head in range(heads)]
        largest = max(1e-9, *(float(np.nanmax(np.abs(cells))) for cells in maps))
        columns = min(4, heads)
        rows = -(-heads // columns)
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(PAGE_WIDTH, 1.9 * rows), squeeze=False, layout="constrained"
        )
        image = None
        for head, axes in enumerate(grid.flat):
            axes.set_axis_off()
            if head < heads:
                image = axes.imshow(maps[head], cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
                axes.set_title(f"head {head}")
        figure.suptitle(f"{run.name}: weight minus the mean over heads", fontsize=8)
        figure.colorbar(image, ax=grid, shrink=0.8)
        yield f"head-deviations-{_slug(run.name)}", figure


def disagreement_figures(runs: Sequence[RunFolder], pyplot: Any) -> Figures:
    """Width disagreement of single-head models: by site, and learned excess against the model's width."""
    probed = [run for run in runs if "width_disagreement" in run.probe.get("totals", {})]
    for run in probed:
        sites = [site for site in run.probe["sites"] if "width_disagreement" in site]
        figure, axes = pyplot.subplots(figsize=(COLUMN_WIDTH, 2.2))
        for key, label in (("width_disagreement", "trained"), ("null_width_disagreement", "random, same norm")):
            axes.plot([site[key] for site in sites], linewidth=1.2, label=label)
        axes.set(xlabel="routing site", ylabel="KL (nats)", title=run.name)
        axes.locator_params(axis="x", integer=True)
        axes.legend()
        yield f"disagreement-{_slug(run.name)}", figure
    points = excess_by_width(runs)
    if len({width for width, _, _ in points}) > 1:
        figure, axes = pyplot.subplots(figsize=(COLUMN_WIDTH, 2.2))
        for width, excess, name in points:
            axes.plot([width], [excess], "o", label=name)
        axes.set(xlabel="width", ylabel="learned excess (nats)")
        axes.legend()
        yield "disagreement-against-width", figure


def gate_figures(runs: Sequence[RunFolder], pyplot: Any) -> Figures:
    """Gates over training where the metrics hold them, else the gates that a probe read, by site."""
    for run in runs:
        series = gate_series(run)
        sites = [site for site in run.probe.get("sites", ()) if "gate" in site]
        if not series and not sites:
            continue
        figure, axes = pyplot.subplots(figsize=(COLUMN_WIDTH, 2.2))
        if series:
            colours = pyplot.get_cmap("viridis")(np.linspace(0, 0.9, len(series)))  # early sites dark, late ones light
            for curve, colour in zip(series, colours, strict=True):
                axes.plot(curve.x, curve.y, linewidth=0.8, color=colour, label=curve.name)
            axes.set(xlabel="step")
        else:
            axes.plot([site["gate"] for site in sites], "o-", markersize=2, linewidth=0.8)
            axes.set(xlabel="routing site")
        axes.set(ylabel="gate", title=run.name)
        if series and len(series) <= MAX_GATES_NAMED:
            axes.legend()
        yield f"gates-{_slug(run.name)}", figure


DRAWERS: tuple[Callable[[Sequence[RunFolder], Any], Figures], ...] = (
    loss_figures,
    cost_figures,
    map_figures,
    head_figures,
    disagreement_figures,
    gate_figures,
)
