"""Horizontal bars as SVG: our speed filled, the bare library's as an outline around it."""

from dataclasses import dataclass
from xml.sax.saxutils import escape

LABEL_WIDTH, BAR_WIDTH, NUMBERS_WIDTH, ROW_HEIGHT = 210, 420, 150, 30  # pixels


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    ours: float
    bare: float


def draw(bars: list[Bar], title: str) -> str:
    longest = max(max(bar.ours, bar.bare) for bar in bars)
    width, height = LABEL_WIDTH + BAR_WIDTH + NUMBERS_WIDTH, ROW_HEIGHT * (len(bars) + 1) + 10
    rows = [f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>']
    for number, bar in enumerate(bars, 1):
        y = number * ROW_HEIGHT
        ours, bare = (round(value / longest * BAR_WIDTH, 1) for value in (bar.ours, bar.bare))
        rows += [
            f'<text x="10" y="{y + 16}">{escape(bar.label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{ours}" height="14" fill="#4878a8"/>',
            f'<rect x="{LABEL_WIDTH}" y="{y + 2}" width="{bare}" height="18" fill="none" stroke="#202020"/>',
            f'<text x="{LABEL_WIDTH + BAR_WIDTH + 10}" y="{y + 16}">{bar.ours:.2f} / {bar.bare:.2f} = {bar.ours / bar.bare:.2f}</text>',
        ]
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *rows, "</svg>", ""])
