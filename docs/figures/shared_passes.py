"""Draws shared-passes.svg from the schedule itself: which launch visits which pair of a site and a source row."""

from pathlib import Path

from mhar.ops.schedule import SublayerSchedule

SITES, BLOCK, INNER, CELL = 25, 8, 4, 15
COLOURS = ["#4c78a8", "#72b7b2", "#f58518", "#eeca3b", "#b279a2", "#9d755d", "#54a24b", "#e45756"]
OWN = "#c9c9c9"


def cells(backward: bool) -> dict[tuple[int, int], str]:
    """Colour of each (site, row): grey where the site kernel visits it, one colour per shared pass."""
    schedule = SublayerSchedule(0, SITES, BLOCK, INNER)
    colours = {(s, n): OWN for s in range(SITES) for n in range(s + 1)}
    count = 0
    for s in range(SITES):
        passes = schedule.backward(SITES - 1 - s, SITES) if backward else [schedule.forward(s)]
        for shared in filter(None, passes):
            for site in range(shared.site0, shared.site1):
                for row in range(shared.row0, shared.row1):
                    colours[site, row] = COLOURS[count % len(COLOURS)]
            count += 1
    return colours


def panel(x0: int, title: str, backward: bool) -> list[str]:
    """One triangle of cells with its title and axes."""
    parts = [f'<text x="{x0}" y="18" font-size="14">{title}</text>']
    for (s, n), colour in cells(backward).items():
        x, y = x0 + s * CELL, 30 + n * CELL
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour}"/>')
    size = SITES * CELL
    parts.append(f'<text x="{x0}" y="{48 + size}" font-size="12">routing site s &#8594;</text>')
    parts.append(f'<text x="{x0}" y="{22 + size}" font-size="12">&#8595; source row n</text>')
    return parts


def main() -> None:
    size = SITES * CELL
    body = panel(10, "forward: one colour per partial mix", False)
    body += panel(40 + size, "backward: one colour per pull", True)
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"'
    svg = [f'<svg {style} width="{2 * size + 60}" height="{size + 60}">', *body, "</svg>"]
    Path(__file__).with_name("shared-passes.svg").write_text("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
