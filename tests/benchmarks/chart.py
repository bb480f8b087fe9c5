"""Horizontal bars as SVG, legible on light and dark pages. Pure: values to text.

The rule: the picture says no more than the table. Every bar has its median written beside it and its least and most drawn as a line; a
bar that would make all others unreadable is cut, and looks cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from tests.benchmarks.results import Spread

_WIDTH, _LABELS, _VALUES = 760, 150, 130
_BAR, _STEP, _TOP, _BOTTOM = 20, 32, 56, 14
_TOO_LONG = 4.0  # times the next longest

_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 15px; } .unit { fill: #59636e; font-size: 13px; }
  .bar { fill: #8c99a8; } .ours { fill: #1a7f5a; } .spread, .cut { stroke: #1f2328; stroke-width: 1.5; fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .unit { fill: #9198a1; } .bar { fill: #6e7681; } .ours { fill: #3fb984; } .spread, .cut { stroke: #e6edf3; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its values, the text beside it, and whether it is the one to look at."""

    name: str
    values: Spread
    text: str
    ours: bool = False


def bars(title: str, unit: str, drawn: Sequence[Bar]) -> str:
    """A chart of at least one bar, in the order given. `unit` says what the numbers are."""
    height = _TOP + _STEP * len(drawn) + _BOTTOM
    scale = (_WIDTH - _LABELS - _VALUES) / _longest([bar.values.most for bar in drawn])
    rows = "\n".join(_row(bar, _TOP + number * _STEP, scale) for number, bar in enumerate(drawn))
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">'
    title_and_unit = f'<text class="title" x="0" y="18">{escape(title)}</text>\n<text class="unit" x="0" y="38">{escape(unit)}</text>'
    return f"{opening}\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n{title_and_unit}\n{rows}\n</svg>\n"


def _longest(values: Sequence[float]) -> float:
    """Where the axis ends: at the longest bar that does not dwarf the next one."""
    ordered = sorted(values, reverse=True)
    for value, following in pairwise(ordered):
        if value <= _TOO_LONG * following:
            return value or 1.0
    return ordered[-1] or 1.0


def _row(bar: Bar, top: float, scale: float) -> str:
    limit = float(_WIDTH - _LABELS - _VALUES)
    length = min(bar.values.median * scale, limit)
    least, most = (min(value * scale, limit) for value in (bar.values.least, bar.values.most))
    middle = top + _BAR / 2
    text_at = _LABELS + max(length, most) + 10
    marks = _cut(_LABELS + limit - 24, top) if bar.values.median * scale > limit + 1 else _spread(_LABELS + least, _LABELS + most, middle)
    return (
        f'<text x="{_LABELS - 10}" y="{middle + 5:.1f}" text-anchor="end">{escape(bar.name)}</text>'
        f'<rect class="{"ours" if bar.ours else "bar"}" x="{_LABELS}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="2"/>'
        f'{marks}<text x="{text_at:.1f}" y="{middle + 5:.1f}">{escape(bar.text)}</text>'
    )


def _spread(start: float, end: float, y: float) -> str:
    return f'<path class="spread" d="M{start:.1f} {y - 4}v8M{start:.1f} {y}H{end:.1f}M{end:.1f} {y - 4}v8"/>'


def _cut(x: float, top: float) -> str:
    return f'<path class="cut" d="M{x:.1f} {top + _BAR + 3}l8 {-_BAR - 6}M{x + 6:.1f} {top + _BAR + 3}l8 {-_BAR - 6}"/>'
