"""Lines over sizes that double, as SVG: panels side by side, each with its own scale from 0."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, BOTTOM, LEGEND_ROW = 460, 260, 60, 40, 50, 18  # pixels
COLOURS = ("#4878a8", "#c05020", "#408040", "#806090")


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: Sequence[tuple[int, float]]  # size, value
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_label: str
    lines: Sequence[Line]
    top: float  # value at the upper edge


def draw(panels: Sequence[Panel]) -> str:
    height = TOP + PANEL_HEIGHT + BOTTOM + LEGEND_ROW * max(len(panel.lines) for panel in panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(panels) * PANEL_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
    parts = [part for number, panel in enumerate(panels) for part in _panel(panel, number * PANEL_WIDTH)]
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _panel(panel: Panel, left: int) -> list[str]:
    sizes = sorted({size for line in panel.lines for size, _ in line.points})
    x0, x1, y0, y1 = left + LEFT, left + PANEL_WIDTH - 20, TOP + PANEL_HEIGHT, TOP
    span = math.log2(sizes[-1] / sizes[0]) or 1.0

    def x(size: int) -> float:
        return round(x0 + math.log2(size / sizes[0]) / span * (x1 - x0), 1)

    def y(value: float) -> float:
        return round(y0 - value / panel.top * (y0 - y1), 1)

    parts = [f'<text x="{x0}" y="20" font-weight="bold">{escape(panel.title)}</text>']
    for quarter in range(5):
        value = panel.top * quarter / 4
        parts.append(f'<line x1="{x0}" y1="{y(value)}" x2="{x1}" y2="{y(value)}" stroke="#d8d8d8"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    parts += [f'<text x="{x(size)}" y="{y0 + 16}" text-anchor="middle">{size}</text>' for size in sizes]
    parts.append(f'<text x="{(x0 + x1) / 2}" y="{y0 + 34}" text-anchor="middle">{escape(panel.x_label)}</text>')
    for number, line in enumerate(panel.lines):
        style = f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2"' + (' stroke-dasharray="5 4"' if line.dashed else "")
        path = " ".join(f"{x(size)},{y(min(value, panel.top))}" for size, value in line.points)
        legend_y = y0 + BOTTOM + number * LEGEND_ROW
        parts.append(f'<polyline points="{path}" fill="none" {style}/>')
        parts.append(f'<line x1="{x0}" y1="{legend_y}" x2="{x0 + 30}" y2="{legend_y}" {style}/>')
        parts.append(f'<text x="{x0 + 38}" y="{legend_y + 4}">{escape(line.label)}</text>')
    return parts
