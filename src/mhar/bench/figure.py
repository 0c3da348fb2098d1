"""One figure of the routing results: time of a micro-batch's routing by shape and implementation."""

from pathlib import Path
from typing import Any

from mhar.errors import DependencyError


def routing_figure(result: dict[str, Any], path: Path) -> None:
    """Bars on a logarithmic scale, one group a shape; written as SVG or PNG by the suffix of `path`.

    Raises:
        DependencyError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError('the figure needs matplotlib: pip install "mhar[bench]"') from error
    groups = list(dict.fromkeys((row["shape"], row["tokens"]) for row in result["rows"]))
    names = list(dict.fromkeys(row["implementation"] for row in result["rows"]))
    times = {(row["shape"], row["tokens"], row["implementation"]): row["ms"] for row in result["rows"]}
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(names)
    for index, name in enumerate(names):
        bars = [(x, times[(*group, name)]) for x, group in enumerate(groups) if (*group, name) in times]
        positions = [x + (index - (len(names) - 1) / 2) * width for x, _ in bars]
        axes.bar(positions, [ms for _, ms in bars], width, label=name, color=f"C{index}")
    axes.set_yscale("log")
    axes.set_ylabel("ms, forward and backward, chain subtracted")
    axes.set_xticks(range(len(groups)), [f"{shape}\n{tokens:,} tokens" for shape, tokens in groups])
    axes.set_title(f"Depth routing of one micro-batch, all sites ({result['device']})")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=4, fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
