"""Draw the data of docs/pictures.py: one PNG for each dashboard. Runs in a separate environment with matplotlib.

The rule: it draws all given lines, and does not depend on their source.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, PercentFormatter, ScalarFormatter, StrMethodFormatter

_COLUMNS = 2
_LINES = 8  # shown in a legend
_COLORS = ("#1a7f5a", "#3b74c4", "#c9312b", "#b26a00", "#7a5af0", "#667085", "#0e7490", "#be185d", "#4d7c0f", "#1c2330")
_STYLE = {
    "font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#98a2b3", "axes.grid": True, "grid.color": "#eaecf0", "legend.fontsize": 6.5,
    "legend.frameon": False, "figure.facecolor": "white",
}  # fmt: skip


def main(data: Path, folder: Path) -> None:
    """Draw every dashboard of a file."""
    for name, dashboard in json.loads(data.read_text()).items():
        with plt.rc_context(_STYLE):
            file = folder / f"{name}.png"
            _dashboard(dashboard).savefig(file, dpi=100)
            plt.close("all")
            Image.open(file).convert("RGB").quantize(128).save(file, optimize=True)  # a third of the size


def _dashboard(dashboard: dict[str, Any]) -> Any:
    """Draw a row of numbers, then the panels in two columns."""
    stats = [panel for panel in dashboard["panels"] if panel["stat"]]
    charts = [panel for panel in dashboard["panels"] if not panel["stat"]]
    rows = math.ceil(len(charts) / _COLUMNS)
    figure = plt.figure(figsize=(11, 0.5 + 2.1 * rows + 0.9 * bool(stats)), layout="constrained")
    figure.suptitle(dashboard["title"], x=0.01, ha="left", weight="bold")
    parts = figure.subfigures(1 + bool(stats), 1, height_ratios=[*([0.9] if stats else []), 2.1 * rows], squeeze=False)[:, 0]
    for axes, panel in zip(parts[0].subplots(1, len(stats)) if stats else (), stats, strict=True):
        _number(axes, panel)
    all_axes = parts[-1].subplots(rows, _COLUMNS, squeeze=False).flat
    for axes, panel in zip(all_axes, charts, strict=False):
        _chart(axes, panel, dashboard["start"])
    for axes in all_axes[len(charts) :]:
        axes.axis("off")
    return figure


def _number(axes: Any, panel: dict[str, Any]) -> None:
    values = [value for line in panel["lines"] for _, value in line["values"]]
    text = "-" if not values else f"{values[-1]:.1%}" if panel["unit"] == "percentunit" else f"{values[-1]:.3g}"
    axes.axis("off")
    axes.set_title(panel["title"])
    axes.text(0, 0.3, text, fontsize=22, color=_COLORS[0], transform=axes.transAxes)


def _chart(axes: Any, panel: dict[str, Any], start: float) -> None:
    unit, scale = ("days", 86400.0) if panel["unit"] == "s" and _highest(panel["lines"]) > 86400 else (panel["unit"], 1.0)
    for number, line in enumerate(sorted(panel["lines"], key=lambda line: -_highest([line]))):
        at, values = zip(*((moment, value / scale) for moment, value in line["values"]), strict=True)
        style = ("-", "--", ":")[number // len(_COLORS) % 3]
        name = line["name"] if number < _LINES else "_"
        axes.plot([moment - start for moment in at], values, style, color=_COLORS[number % len(_COLORS)], lw=1.2, label=name)
    axes.set_title(panel["title"])
    axes.yaxis.set_major_formatter(_formatter(unit))
    axes.xaxis.set_major_formatter(EngFormatter(unit="s", sep=" "))
    if panel["lines"]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", color="#98a2b3", transform=axes.transAxes)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(0, bottom), top if top > 0 else 1)


def _highest(lines: list[dict[str, Any]]) -> float:
    """Return the largest value of some lines, by which the legend is sorted."""
    return max((abs(value) for line in lines for _, value in line["values"]), default=0.0)


def _formatter(unit: str) -> Any:
    if unit == "percentunit":
        return PercentFormatter(1.0)
    if unit == "days":
        return StrMethodFormatter("{x:g} days")
    engineering = {"s": "s", "bytes": "B"}.get(unit)
    return ScalarFormatter(useOffset=False) if engineering is None else EngFormatter(unit=engineering, sep=" ")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
