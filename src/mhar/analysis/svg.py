"""Charts as SVG text, with the standard library alone: what a report draws where matplotlib is not installed.

Sizes are in the units of each chart's viewBox; text stays legible when a chart is scaled to the width of a phone.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

# Okabe and Ito's palette (yellow left out: too pale for thin lines), distinct under the common colour blindnesses.
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B")
SEQUENTIAL = ((247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
DIVERGING = ((178, 24, 43), (244, 165, 130), (247, 247, 247), (146, 197, 222), (33, 102, 172))
NUM_LEVELS = 24
MAX_MARKERS = 40
WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 10, 40


@dataclass(frozen=True, slots=True)
class Series:
    """One curve; `low` and `high` (same length as `y`) draw a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear map from data to drawing units."""

    start: float
    stop: float
    low: float
    high: float

    def __call__(self, value: float) -> float:
        span = (self.stop - self.start) or 1.0
        return round(self.low + (value - self.start) / span * (self.high - self.low), 2)


def nice_ticks(start: float, stop: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [start, stop] from the inside."""
    if not stop > start:
        return [start]
    rough = (stop - start) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(start / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(stop / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number for people: thousands grouped, four significant digits below a thousand."""
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def colour(anchors: Sequence[tuple[int, int, int]], fraction: float) -> str:
    """The colour at `fraction` (clamped to [0, 1]) of the piecewise linear ramp through `anchors`."""
    position = min(max(fraction, 0.0), 1.0) * (len(anchors) - 1)
    index = min(int(position), len(anchors) - 2)
    share = position - index
    mixed = (round(a + (b - a) * share) for a, b in zip(anchors[index], anchors[index + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _axes(x: Scale, y: Scale, x_ticks: Iterable[float], x_label: str, y_label: str) -> str:
    parts: list[str] = []
    for tick in nice_ticks(y.start, y.stop):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):g}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y(tick) + 4, number(tick), "end"))
    parts += [_text(x(tick), HEIGHT - BOTTOM + 16, number(tick)) for tick in x_ticks]
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(12, middle, y_label, extra=f' transform="rotate(-90 12 {middle:g})"'))
    return "".join(parts)


def _svg(body: str, label: str, width: float = WIDTH, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'


def legend(names: Sequence[str]) -> str:
    """Colour keys as HTML, in the order of the series."""
    keys = (
        f'<span class="key"><i style="background:{SERIES_COLOURS[i % len(SERIES_COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def y_range(series: Sequence[Series], skip: float) -> tuple[float, float]:
    """Range of all finite values past the first `skip` share of each curve's points, with a margin of 4 %."""
    values = [
        value
        for curve in series
        for sequence in (curve.y, curve.low, curve.high)
        for value in list(sequence)[int(len(sequence) * skip) :]
        if math.isfinite(value)
    ]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
    return low - margin, high + margin


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, skip: float = 0.0) -> str:
    """Curves with bands. `skip` leaves the first share of every curve out of the y range (a loss starts far above)."""
    xs = [value for curve in series for value in curve.x]
    x = Scale(min(xs, default=0.0), max(xs, default=1.0), LEFT, WIDTH - RIGHT)
    y = Scale(*y_range(series, skip), HEIGHT - BOTTOM, TOP)
    clip = f"frame-{zlib.crc32(repr((x_label, y_label, series)).encode()):08x}"
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"/>'
    curves = "".join(_curve(curve, x, y, SERIES_COLOURS[i % len(SERIES_COLOURS)]) for i, curve in enumerate(series))
    body = _axes(x, y, nice_ticks(x.start, x.stop), x_label, y_label)
    body += f'<clipPath id="{clip}">{frame}</clipPath><g clip-path="url(#{clip})">{curves}</g>'
    return legend([curve.name for curve in series]) + _svg(body, f"{y_label} against {x_label}")


def _curve(curve: Series, x: Scale, y: Scale, stroke: str) -> str:
    values = [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if math.isfinite(b)]
    parts: list[str] = []
    if curve.low and curve.high:
        upper = [f"{x(a):g} {y(b):g}" for a, b in zip(curve.x, curve.high, strict=True)]
        lower = [f"{x(a):g} {y(b):g}" for a, b in zip(curve.x, curve.low, strict=True)]
        parts.append(f'<path d="M{"L".join(upper + lower[::-1])}Z" fill="{stroke}" opacity="0.18"/>')
    path = "L".join(f"{x(a):g} {y(b):g}" for a, b in values)
    parts.append(f'<path d="M{path}" fill="none" stroke="{stroke}" stroke-width="2"/>' if path else "")
    if len(values) <= MAX_MARKERS:
        for a, b in values:
            title = escape(f"{curve.name}: {number(b)} at {number(a)}")
            parts.append(f'<circle cx="{x(a):g}" cy="{y(b):g}" r="3" fill="{stroke}"><title>{title}</title></circle>')
    return "".join(parts)


def bar_chart(names: Sequence[str], values: Sequence[float], *, label: str) -> str:
    """Horizontal bars from zero, each with its value written beside it."""
    row, left, right = 26, 172, 64
    height = row * len(names) + 8
    x = Scale(0.0, max([*values, 0.0]) or 1.0, left, WIDTH - right)
    parts: list[str] = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        fill = SERIES_COLOURS[i % len(SERIES_COLOURS)]
        top = 4 + i * row
        parts.append(_text(left - 8, top + 16, name if len(name) <= 24 else name[:23] + "…", "end"))
        parts.append(f'<rect x="{left}" y="{top + 3}" width="{x(value) - left:g}" height="{row - 8}" fill="{fill}"/>')
        parts.append(_text(x(value) + 6, top + 16, number(value), "start"))
    return f'<p class="axis-title">{escape(label)}</p>' + _svg("".join(parts), label, WIDTH, height)


def cell_paths(values: Sequence[Sequence[float | None]], fractions: Sequence[float], diverging: bool = False) -> str:
    """Unit cells of a matrix, one path per colour level, in a coordinate system of (column, row).

    Args:
        values: rows of cells; None leaves a cell empty.
        fractions: (offset, gain, exponent): a cell's place on the ramp is offset + gain * sign * |value|^exponent.
    """
    offset, gain, exponent = fractions
    levels: dict[int, list[str]] = {}
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value is not None:
                place = offset + math.copysign(gain * abs(value) ** exponent, value)
                level = round(min(max(place, 0.0), 1.0) * (NUM_LEVELS - 1))
                levels.setdefault(level, []).append(f"M{column} {row}h1v1h-1z")
    ramp = DIVERGING if diverging else SEQUENTIAL
    paths = (
        f'<path fill="{colour(ramp, level / (NUM_LEVELS - 1))}" d="{"".join(cells)}"/>'
        for level, cells in sorted(levels.items())
    )
    return "".join(paths)
