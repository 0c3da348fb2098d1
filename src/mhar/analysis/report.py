"""`mhar report`: one self-contained HTML file from run folders. Needs nothing beyond the base install and no network.

A run is a folder; whatever of these it holds is shown:

    run.yaml            resolved configuration, shown as it is; its `variant` and `seed` group runs
    metrics.jsonl       one object a line: "step" and numbers such as "loss", "heldout_loss", "tokens_per_s";
                        "gates" may map site names to gate values
    summary.json        one flat object: "name", "variant", "seed", and the numbers for the table
    routing.json        {"sites": [{"name", "source_names", "weights": [per source [per head]]}]}, token means
    evaluation.json, comparison.json, probe.json, interventions.json    as the commands of those names write them
"""

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from mhar import __version__
from mhar.analysis import depthmap
from mhar.analysis.curves import (
    COSTS,
    GATES,
    HELDOUT_KEYS,
    TRAIN_KEYS,
    excess_by_width,
    gate_series,
    grouped_series,
)
from mhar.analysis.runfolder import RunFolder, discover
from mhar.analysis.svg import SERIES_COLOURS, Series, bar_chart, line_chart
from mhar.analysis.tables import (
    comparison_tables,
    evaluation_table,
    intervention_tables,
    probe_tables,
    render_table,
    summary_table,
)

PROBE_CHARTS = (
    ({"width_disagreement": "trained", "null_width_disagreement": "random query"}, "width disagreement (nats)"),
    ({"head_disagreement": "trained", "null_head_disagreement": "random queries"}, "head disagreement (nats)"),
    ({"relative_entropy": "entropy / log N"}, "relative entropy"),
    ({"gate": "gate"}, "gate"),
)
Section = tuple[str, str]


def write_report(path: Path | str, runs: Sequence[Path | str], *, title: str = "Depth routing report") -> Path:
    """Write the report of all run folders at or below `runs` to `path` and return it.

    Args:
        path: the HTML file; written beside itself first and renamed, so an old report is never left half replaced.
        runs: folders, searched downwards.

    Raises:
        InputError: a folder that does not exist, holds nothing to report, or has a damaged file (named).
    """
    target = Path(path)
    page = render(discover(Path(run) for run in runs), title)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, target)
    return target


def render(runs: Sequence[RunFolder], title: str) -> str:
    """The page as text."""
    maps = [depthmap.map_data(run.routing) for run in runs if run.routing]
    builders: tuple[Callable[[Sequence[RunFolder]], Section], ...] = (
        _summary,
        _curves,
        _costs,
        _depth_maps,
        _head_maps,
        _probes,
        _interventions,
        _evaluations,
        _comparisons,
        _configs,
    )
    sections = [section for builder in builders if (section := builder(runs))[1]]
    body = "".join(f"<section><h2>{escape(heading)}</h2>{content}</section>" for heading, content in sections)
    made = f"mhar {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; {len(runs)} folders"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_asset("report.css")}</style></head>'
        f'<body><h1>{escape(title)}</h1><p class="note">{escape(made)}</p>{body}'
        f"{depthmap.embedded(maps)}<script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("mhar.analysis.assets").joinpath(name).read_text(encoding="utf-8")


def _grid(items: Iterable[str]) -> str:
    content = "".join(f"<figure>{item}</figure>" for item in items)
    return f'<div class="grid">{content}</div>' if content else ""


def _summary(runs: Sequence[RunFolder]) -> Section:
    return "Runs", render_table(summary_table(runs))


def _curves(runs: Sequence[RunFolder]) -> Section:
    charts: list[str] = []
    for keys, label in ((HELDOUT_KEYS, "held-out loss"), (TRAIN_KEYS, "training loss")):
        if series := grouped_series(runs, keys):
            charts.append(line_chart(series, x_label="step", y_label=f"{label} (nats per token)", skip=0.1))
    for run in runs:
        if series := gate_series(run):
            shown = sorted(series, key=lambda gate: -abs(gate.y[-1]))[: len(SERIES_COLOURS)]
            which = f" ({len(shown)} of {len(series)}, the furthest open)" if len(shown) < len(series) else ""
            heading = f"<h3>Gates of {escape(run.name)}{which}</h3>"
            charts.append(heading + line_chart(shown, x_label="step", y_label=GATES))
    note = "Bands: smallest to largest over seeds. The first tenth of a curve may lie above the frame."
    return "Training", f'{_grid(charts)}<p class="note">{note}</p>' if charts else ""


def _costs(runs: Sequence[RunFolder]) -> Section:
    charts: list[str] = []
    for key, label in COSTS.items():
        measured = [(run.name, run.summary[key]) for run in runs if isinstance(run.summary.get(key), (int, float))]
        if len(measured) > 1:
            names, values = zip(*measured, strict=True)
            charts.append(bar_chart(names, values, label=label))
    return "Cost", _grid(charts)


def _depth_maps(runs: Sequence[RunFolder]) -> Section:
    routed = [run for run in runs if run.routing]
    figures = [
        depthmap.interactive(depthmap.map_data(run.routing), index, run.name) for index, run in enumerate(routed)
    ]
    note = "<p>Routing weight of each source (column) at each site (row), averaged over tokens. Rows sum to 1.</p>"
    return "Depth maps", note + _grid(figures) if figures else ""


def _head_maps(runs: Sequence[RunFolder]) -> Section:
    blocks = [
        f"<h3>{escape(run.name)}</h3>{content}"
        for run in runs
        if run.routing and (content := depthmap.head_maps(depthmap.map_data(run.routing)))
    ]
    return "What each head does differently", "".join(blocks)


def _probes(runs: Sequence[RunFolder]) -> Section:
    by_run = "".join(probe_tables(run) + _grid(_probe_charts(run)) for run in runs if run.probe)
    excess = excess_by_width(runs)
    if len({width for width, _, _ in excess}) < 2:
        return "Probe", by_run
    widths, values, _ = zip(*excess, strict=True)
    chart = line_chart([Series("learned excess", widths, values)], x_label="width", y_label="learned excess (nats)")
    return "Probe", _grid([f"<h3>Width disagreement against width</h3>{chart}"]) + by_run


def _probe_charts(run: RunFolder) -> list[str]:
    """What the probe found from site to site, against its null where it has one."""
    charts: list[str] = []
    for keys, label in PROBE_CHARTS:
        points = {name: _by_site(run, key) for key, name in keys.items()}
        series = [Series(name, x, y) for name, (x, y) in points.items() if len(x) > 1]
        if series:
            charts.append(line_chart(series, x_label="routing site", y_label=label))
    return charts


def _by_site(run: RunFolder, key: str) -> tuple[list[float], list[float]]:
    found = [(index, site[key]) for index, site in enumerate(run.probe.get("sites", ())) if key in site]
    return [float(index) for index, _ in found], [float(value) for _, value in found]


def _interventions(runs: Sequence[RunFolder]) -> Section:
    return "Interventions", "".join(intervention_tables(run) for run in runs if run.interventions)


def _evaluations(runs: Sequence[RunFolder]) -> Section:
    evaluated = [run for run in runs if run.evaluation]
    return "Evaluation", evaluation_table(evaluated) if evaluated else ""


def _comparisons(runs: Sequence[RunFolder]) -> Section:
    return "Paired comparisons", "".join(comparison_tables(run) for run in runs if run.comparison)


def _configs(runs: Sequence[RunFolder]) -> Section:
    blocks = (
        f"<details><summary>{escape(run.name)}</summary><pre>{escape(run.config)}</pre></details>"
        for run in runs
        if run.config
    )
    return "Resolved configurations", "".join(blocks)
