"""Draw the data of docs/pictures.py: one PNG for each dashboard, with the panels as Grafana's dark theme has them.

Runs in a separate environment with matplotlib. The rule: it draws all given series with the given units, thresholds and colors, and
does not depend on their source.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
from PIL import Image

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

_CANVAS, _PANEL, _BORDER, _GRID, _TEXT, _FAINT = "#111217", "#181b1f", "#2e3137", "#2a2d33", "#d5d6df", "#9a9ba6"
_COLORS = {
    "green": "#73bf69", "yellow": "#fade2a", "orange": "#ff9830", "red": "#f2495c", "blue": "#5794f2", "light-blue": "#8ab8ff",
    "purple": "#b877d9", "dark-purple": "#8f3bb8",
}  # fmt: skip
_BY_NAME = (
    "#7eb26d",
    "#eab839",
    "#6ed0e0",
    "#ef843c",
    "#e24d42",
    "#1f78c1",
    "#ba43a9",
    "#705da0",
    "#508642",
    "#cca300",
    "#447ebc",
    "#c15c17",
)
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.color": _TEXT,
    "axes.labelcolor": _FAINT,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
}
_WIDTH, _CELL, _GAP, _HEAD = 12.0, 0.32, 0.06, 0.42
"""Inches: of the picture, of one unit of Grafana's grid in height, between panels, of the heading."""
_LEGEND_LINE, _LEGEND_LINES = 0.155, 3


def main(data: Path, folder: Path) -> None:
    """Draw every dashboard of a file."""
    for name, dashboard in json.loads(data.read_text()).items():
        with plt.rc_context(_STYLE):
            file = folder / f"{name}.png"
            _dashboard(dashboard).savefig(file, dpi=110, facecolor=_CANVAS)
            plt.close("all")
            Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)  # a third of the size


def _dashboard(dashboard: dict[str, Any]) -> Any:
    """Draw the heading, and each panel at its place in Grafana's grid."""
    lowest = max(panel["grid"]["y"] + panel["grid"]["h"] for panel in dashboard["panels"])
    height = _HEAD + lowest * _CELL + _GAP
    figure = plt.figure(figsize=(_WIDTH, height))
    figure.text(0.12 / _WIDTH, 1 - 0.26 / height, dashboard["title"], fontsize=11, weight="bold")
    figure.text(1 - 0.12 / _WIDTH, 1 - 0.26 / height, dashboard["period"], fontsize=8, color=_FAINT, ha="right")
    for panel in dashboard["panels"]:
        grid = panel["grid"]
        left, top = grid["x"] / 24 * _WIDTH, _HEAD + grid["y"] * _CELL
        _draw_panel(figure, panel, dashboard, (left, height - top - grid["h"] * _CELL, grid["w"] / 24 * _WIDTH, grid["h"] * _CELL))
    return figure


def _draw_panel(figure: Any, panel: dict[str, Any], dashboard: dict[str, Any], box: tuple[float, float, float, float]) -> None:
    """Draw a panel into a box, in inches from the lower left corner."""
    width, height = figure.get_size_inches()
    left, bottom, wide, high = box

    def axes(x: float, y: float, w: float, h: float) -> Any:
        return figure.add_axes((x / width, y / height, w / width, h / height))

    if panel["kind"] == "row":
        figure.text((left + 0.12) / width, (bottom + 0.1) / height, f"⌄ {panel['title']}", fontsize=9.5, weight="bold")
        return
    frame = axes(left + _GAP, bottom + _GAP, wide - 2 * _GAP, high - 2 * _GAP)
    frame.set(xlim=(0, wide), ylim=(0, high))
    frame.axis("off")
    frame.add_patch(FancyBboxPatch((0.03, 0.03), wide - 0.06, high - 0.06, "round,pad=0,rounding_size=0.04", fc=_PANEL, ec=_BORDER, lw=0.8))
    figure.text((left + 0.17) / width, (bottom + high - 0.27) / height, panel["title"], fontsize=8.5, weight="bold")
    if panel["kind"] == "stat":
        _stat(axes(left + _GAP + 0.04, bottom + _GAP + 0.04, wide - 2 * _GAP - 0.08, high * 0.28), frame, panel, (wide, high))
    elif panel["kind"] == "bargauge":
        _bars(axes(left + 0.2, bottom + 0.15, wide - 0.4, high - 0.55), panel)
    elif panel["kind"] == "state-timeline":
        _states(axes(left + 0.2, bottom + 0.62, wide - 0.4, high - 1.05), panel, dashboard)
        _legend(figure, [(name, _color(color)) for _, name, color in panel["states"]], left, bottom, wide)
    else:
        names = [(line["name"], _line_color(panel, line["name"])) for line in panel["lines"]]
        lines = _legend(figure, names, left, bottom, wide)
        foot = 0.4 + lines * _LEGEND_LINE
        _chart(axes(left + 0.72, bottom + foot, wide - 0.92, high - foot - 0.42), panel, dashboard)


def _stat(axes: Any, frame: Any, panel: dict[str, Any], size: tuple[float, float]) -> None:
    """Draw the last value in the color of its threshold, above its course."""
    axes.axis("off")
    if not panel["lines"]:
        frame.text(size[0] / 2, size[1] * 0.45, "No data", ha="center", color=_FAINT)
        return
    at, values = zip(*panel["lines"][0]["values"], strict=True)
    color = _of_value(panel, values[-1])
    axes.fill_between(at, values, color=color, alpha=0.15, lw=0)
    axes.plot(at, values, color=color, lw=0.9)
    axes.set(ylim=(0, 1.1 * max(*values, 1e-9)), xlim=(at[0], at[-1]))
    frame.text(size[0] / 2, size[1] * 0.45, _amount(values[-1], panel["unit"]), ha="center", fontsize=19, weight="bold", color=color)


def _bars(axes: Any, panel: dict[str, Any]) -> None:
    """Draw the last values as bars, the longest first."""
    last = sorted(((line["values"][-1][1], line["name"]) for line in panel["lines"]), reverse=True)
    most = max(panel["most"] or 0, *(value for value, _ in last))
    for row, (value, name) in enumerate(last):
        color = _of_value(panel, value)
        axes.add_patch(Rectangle((0, row + 0.42), most, 0.42, color=_GRID, lw=0))
        axes.add_patch(Rectangle((0, row + 0.42), value, 0.42, color=color, lw=0))
        axes.text(0, row + 0.3, name, fontsize=7.5, color=_TEXT)
        axes.text(most * 1.1, row + 0.72, _amount(value, panel["unit"]), fontsize=11, color=color, ha="right")
    axes.set(xlim=(0, most * 1.1), ylim=(max(len(last), 4), 0))
    axes.axis("off")


def _states(axes: Any, panel: dict[str, Any], dashboard: dict[str, Any]) -> None:
    """Draw a bar for each series, in the colors of its states."""
    named = {value: (text, _color(color)) for value, text, color in panel["states"]}
    lines = sorted(panel["lines"], key=lambda line: line["name"])
    for row, line in enumerate(lines):
        begin = 0
        values = line["values"]
        for number, (at, value) in enumerate(values):
            if number + 1 == len(values) or values[number + 1][1] != value:
                start, (text, color) = values[begin][0], named[round(value)]
                axes.add_patch(Rectangle((start, row + 0.12), at - start, 0.76, color=color, alpha=0.8, lw=0))
                if at - start > 0.013 * len(text) * (dashboard["end"] - dashboard["start"]):
                    axes.text((start + at) / 2, row + 0.5, text, ha="center", va="center", color="#111217", fontsize=7)
                begin = number + 1
        axes.text(-0.01, row + 0.5, line["name"], transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
    longest = max((len(line["name"]) for line in lines), default=0) * 0.058 + 0.1
    left, bottom, width, height = axes.get_position().bounds
    taken = longest / _WIDTH
    axes.set_position((left + taken, bottom, width - taken, height))
    axes.set(ylim=(max(len(lines), 1), 0), yticks=[])
    _time(axes, dashboard)


def _chart(axes: Any, panel: dict[str, Any], dashboard: dict[str, Any]) -> None:
    """Draw the lines, and the thresholds as dashed lines."""
    for line in panel["lines"]:
        at, values = zip(*line["values"], strict=True)
        color = _line_color(panel, line["name"])
        axes.plot(at, values, color=color, lw=1.1, solid_joinstyle="round")
        axes.fill_between(at, values, color=color, alpha=0.05, lw=0)
    highest = max((value for line in panel["lines"] for _, value in line["values"]), default=0.0)
    top = panel["most"] or 1.12 * max([highest, *(value for value, _ in panel["steps"] if value <= 8 * highest)]) or 1.0
    for value, color in panel["steps"]:
        if value <= top:
            axes.axhline(value, color=_color(color), lw=0.9, ls=(0, (5, 4)), alpha=0.9)
    axes.set_ylim(0, top)
    scale = 2**20 if panel["unit"] == "bytes" else 86400 if panel["unit"] == "s" and top > 86400 else 1
    ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=panel["unit"] == "short" and top > 4).tick_values(0, top / scale)
    axes.set_yticks([tick * scale for tick in ticks if tick * scale <= top])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _amount(value, panel["unit"])))
    axes.set_ylabel(panel["axis"], fontsize=7.5)
    if not panel["lines"]:
        axes.text(0.5, 0.5, "No data", ha="center", color=_FAINT, transform=axes.transAxes)
    _time(axes, dashboard)


def _time(axes: Any, dashboard: dict[str, Any]) -> None:
    start, end = dashboard["start"], dashboard["end"]
    first = start - start % 30 + 30
    ticks = [first + 30 * number for number in range(int((end - first) / 30) + 1)]
    axes.set_xlim(start, end)
    axes.set_xticks(ticks, [f"{int(at) // 3600 % 24:02}:{int(at) // 60 % 60:02}:{int(at) % 60:02}" for at in ticks])
    axes.tick_params(length=0, labelsize=7)
    axes.grid(color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(figure: Any, names: list[tuple[str, str]], left: float, bottom: float, wide: float) -> int:
    """Draw the names with their colors, and return the number of lines. Grafana scrolls what does not fit; here the rest is counted."""
    rows: list[list[tuple[str, str]]] = [[]]
    for number, (name, color) in enumerate(names):
        if sum(_entry_width(text) for text, _ in rows[-1]) + _entry_width(name) > wide - 0.5:
            if len(rows) == _LEGEND_LINES:
                rows[-1][-1] = (f"and {len(names) - number + 1} more", "none")
                break
            rows.append([])
        rows[-1].append((name, color))
    width, height = figure.get_size_inches()
    for row, entries in enumerate(reversed(rows)):
        x, y = left + 0.22, bottom + 0.16 + row * _LEGEND_LINE
        for name, color in entries:
            figure.add_artist(Rectangle((x / width, (y + 0.025) / height), 0.13 / width, 0.035 / height, color=color))
            figure.text((x + 0.18) / width, y / height, name, fontsize=7)
            x += _entry_width(name)
    return len(rows)


def _entry_width(name: str) -> float:
    """Return the width of a name in a legend, in inches."""
    return 0.33 + 0.058 * len(name)


def _color(name: str) -> str:
    return _COLORS.get(name, name)


def _line_color(panel: dict[str, Any], name: str) -> str:
    """Return the fixed color of a series, or the color that its name has in all panels. Shades are lighter and darker."""
    found = None
    for pattern, mode, color in panel["colors"]:
        if re.search(pattern, name):
            found = (mode, color)
    if found is None:
        return _by_name(panel)[name]
    mode, color = found
    if mode == "fixed":
        return _color(color)
    same = sorted(line["name"] for line in panel["lines"] if any(re.search(p, line["name"]) and c == color for p, _, c in panel["colors"]))
    share = same.index(name) / len(same)
    red, green, blue = mpl.colors.to_rgb(_color(color))
    return mpl.colors.to_hex([part * (1 - 0.55 * share) for part in (red, green, blue)])


def _by_name(panel: dict[str, Any]) -> dict[str, str]:
    """Return the colors of all series: each has the color of its name, or the next free one."""
    taken: dict[str, str] = {}
    for name in sorted({line["name"] for line in panel["lines"]}):
        first = crc32(name.encode())
        around = [_BY_NAME[(first + step) % len(_BY_NAME)] for step in range(len(_BY_NAME))]
        taken[name] = next((color for color in around if color not in taken.values()), around[0])
    return taken


def _of_value(panel: dict[str, Any], value: float) -> str:
    """Return the color of the threshold that a value has reached."""
    return _color([color for least, color in [(float("-inf"), panel["floor"]), *panel["steps"]] if value >= least][-1])


def _amount(value: float, unit: str) -> str:
    """Return a value as Grafana writes it."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        size, name = next(
            ((size, name) for size, name in ((86400, " days"), (3600, " h"), (60, " min"), (1, " s")) if value >= size), (0.001, " ms")
        )
        return f"{value / size:.3g}{name}" if value else "0 s"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB" if value else "0 B"
    size, letter = next(((size, letter) for size, letter in ((1e6, " M"), (1e3, " K")) if value >= size), (1, ""))
    return f"{value / size:.3g}{letter}" + {"reqps": " req/s", "ops": " ops/s"}.get(unit, "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
