"""Depth maps for the report: routing weight by site and source, from a `routing.json`."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from mhar.analysis.svg import DIVERGING, SEQUENTIAL, cell_paths
from mhar.errors import InputError

CELLS_WIDE = 420.0
LABEL_SPACE = 96.0
MAX_LABELS = 20
MAX_HEAD_MAPS = 16


def short(name: str) -> str:
    """A site's or source's name for an axis: "layers.3.attn" becomes "3.attn"."""
    return name.removeprefix("layers.")


def map_data(routing: dict[str, Any]) -> dict[str, Any]:
    """The map in the form that the script reads: columns are all sources in order of appearance.

    Args:
        routing: `{"sites": [{"name", "source_names", "weights": [per source [per head]]}]}`; sites without sources
            are left out.

    Raises:
        InputError: a site whose weights do not have one row per source and equally many heads in each.
    """
    sites = [site for site in routing.get("sites", ()) if site["source_names"]]
    for site in sites:
        rows = site["weights"]
        if len(rows) != len(site["source_names"]) or len({len(row) for row in rows}) != 1:
            raise InputError(
                f"site {site['name']} needs one row of head weights per source ({len(site['source_names'])}),"
                f" got rows of length {[len(row) for row in rows]}"
            )
    columns = _ordered_columns([site["source_names"] for site in sites])
    place = {name: index for index, name in enumerate(columns)}
    return {
        "columns": columns,
        "sites": [
            {
                "name": site["name"],
                "columns": [place[name] for name in site["source_names"]],
                "weights": [[round(float(weight), 5) for weight in row] for row in site["weights"]],
            }
            for site in sites
        ],
    }


def _ordered_columns(source_names: Sequence[Sequence[str]]) -> list[str]:
    """All names once, in order of appearance; the running partial sum last, since it is always the newest source."""
    names = dict.fromkeys(name for names in source_names for name in names)
    return [name for name in names if name != "partial"] + [name for name in names if name == "partial"]


def matrix(data: dict[str, Any], head: int | None = None, relative: bool = False) -> list[list[float | None]]:
    """Rows of cells (site x column) of one head or the mean over heads; `relative` subtracts that mean."""
    rows: list[list[float | None]] = []
    for site in data["sites"]:
        row: list[float | None] = [None] * len(data["columns"])
        for column, weights in zip(site["columns"], site["weights"], strict=True):
            mean = sum(weights) / len(weights)
            row[column] = mean if head is None else weights[head] - mean * relative
        rows.append(row)
    return rows


def num_heads(data: dict[str, Any]) -> int:
    return max((len(site["weights"][0]) for site in data["sites"]), default=0)


def interactive(data: dict[str, Any], index: int, name: str) -> str:
    """The figure that the script brings to life; `index` is the map's place in the embedded data."""
    columns, rows = len(data["columns"]), len(data["sites"])
    size = CELLS_WIDE / max(columns, 1)
    width, height = LABEL_SPACE + CELLS_WIDE, LABEL_SPACE + rows * size
    cells = cell_paths(matrix(data), (0.0, 1.0, 0.5))
    heads = num_heads(data)
    buttons = ""
    if heads > 1:
        choices = [(-1, "mean of heads"), *((head, f"head {head}") for head in range(heads))]
        buttons = "".join(
            f'<button type="button" data-head="{head}" aria-pressed="{str(head < 0).lower()}">{label}</button>'
            for head, label in choices
        )
        buttons += '<button type="button" data-relative aria-pressed="false">deviation from the mean</button>'
    label = f"routing weights of {name}: {rows} sites by {columns} sources"
    return (
        f'<figure class="depth-map" data-map="{index}"><h3>{escape(name)}</h3>'
        f'<div class="buttons">{buttons}</div>'
        f'<p class="readout" aria-live="polite">Point at, tap or step (arrow keys) to a cell to read it.</p>'
        f'<svg viewBox="0 0 {width:g} {height:g}" tabindex="0" role="img" aria-label="{escape(label)}">'
        f"{_labels(data, size)}"
        f'<g transform="translate({LABEL_SPACE:g} {LABEL_SPACE:g}) scale({size:.4g})"><g class="cells">{cells}</g>'
        f'<rect class="cursor" width="1" height="1"/></g></svg>{_ramp()}</figure>'
    )


def _labels(data: dict[str, Any], size: float) -> str:
    rows, columns = data["sites"], data["columns"]
    parts: list[str] = []
    for i in range(0, len(rows), -(-len(rows) // MAX_LABELS)):
        y = LABEL_SPACE + (i + 0.5) * size + 4
        name = escape(short(rows[i]["name"]))
        parts.append(f'<text x="{LABEL_SPACE - 6:g}" y="{y:g}" text-anchor="end">{name}</text>')
    for i in range(0, len(columns), -(-len(columns) // MAX_LABELS)):
        x, y = LABEL_SPACE + (i + 0.5) * size + 4, LABEL_SPACE - 6
        turn = f'transform="rotate(-90 {x:g} {y:g})"'
        parts.append(f'<text x="{x:g}" y="{y:g}" {turn}>{escape(short(columns[i]))}</text>')
    parts.append(f'<text x="4" y="14">source →</text><text x="4" y="{LABEL_SPACE - 6:g}">site ↓</text>')
    return "".join(parts)


def _ramp() -> str:
    stops = ",".join(f"rgb{anchor}" for anchor in SEQUENTIAL)
    return (
        f'<div class="ramp">0 <i style="background:linear-gradient(90deg,{stops})"></i> 1'
        " (square-root scale; deviations: red below, blue above the mean)</div>"
    )


def head_maps(data: dict[str, Any], limit: int = MAX_HEAD_MAPS) -> str:
    """Small multiples: each head's deviation from the mean over heads, one colour scale for all. Empty for one head."""
    heads = num_heads(data)
    if heads < 2:
        return ""
    maps = [matrix(data, head, relative=True) for head in range(heads)]
    largest = max((abs(cell) for rows in maps for row in rows for cell in row if cell is not None), default=0.0)
    box = f'viewBox="0 0 {len(data["columns"])} {len(data["sites"])}"'
    figures = "".join(
        f'<figure><figcaption>head {head}</figcaption><svg {box} role="img" aria-label="deviation of head {head}">'
        f"{cell_paths(rows, (0.5, 0.5 / max(largest, 1e-9), 1.0), diverging=True)}</svg></figure>"
        for head, rows in enumerate(maps[:limit])
    )
    more = f" The first {limit} of {heads} heads are drawn." if heads > limit else ""
    note = f"Full colour: a weight {largest:.3f} above (blue) or below (red) the heads' mean.{more}"
    return f'<div class="heads">{figures}</div><p class="note">{note}</p>'


def embedded(maps: Sequence[dict[str, Any]]) -> str:
    """The data element that the script reads. "<" is escaped so that no name can close the element."""
    content = json.dumps({"maps": maps, "ramps": {"sequential": SEQUENTIAL, "diverging": DIVERGING}})
    return f'<script type="application/json" id="depth-maps">{content.replace("<", chr(92) + "u003c")}</script>'
