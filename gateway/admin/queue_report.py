"""The shares of each model's queue by class, team and key, and the slots open to later classes, from the workers' counters. Pure.

The rule: everything is since the gateway started, but for the requests that wait now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.telemetry.metrics import FAMILIES, Series

_FAMILIES = {
    "queue_waiting_requests": "waiting",
    "queue_requests_total": "dispatched",
    "queue_wait_seconds_total": "wait_seconds",
    "queue_service_total": "service",
    "queue_refused_total": "refused",
}


def queue_report(series: Mapping[Series, Sequence[float]], model: str | None = None) -> dict[str, Any]:
    """Return the keys that have waited for a model, or for any, the largest service of each model first; and the open slots.

    ``wait_seconds`` is the mean of the dispatched requests. ``service_share`` is the part of the service of the whole model, 0 to 1.
    ``open_slots``: for each class with reserved slots, those of each server that later classes may use. ``objectives`` are the recent times
    of the class, divided by what they may be, if the slots follow them.
    """
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: dict.fromkeys(_FAMILIES.values(), 0.0))
    for each, cells in series.items():
        if (name := _FAMILIES.get(each.family)) is not None and model in (None, each.labels[0]):
            found[each.labels[:4]][name] += cells[0]  # a refusal has a reason, too
    whole: dict[str, float] = defaultdict(float)
    for labels, values in found.items():
        whole[labels[0]] += values["service"]
    rows = [_row(labels, values, whole[labels[0]]) for labels, values in found.items()]
    return {"flows": sorted(rows, key=lambda row: (row["model"], -row["service"], row["key"])), "open_slots": _open_slots(series, model)}


def _open_slots(series: Mapping[Series, Sequence[float]], model: str | None) -> list[dict[str, Any]]:
    """Return a row for each class with reserved slots: the least open slots of any worker, and the longest times."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for each, cells in series.items():
        if each.family not in ("open_slots", "objective_ratio") or model not in (None, each.labels[0]) or not cells[0]:
            continue
        row = found.setdefault(each.labels[:2], {"slots": None, "objectives": {}})
        if each.family == "open_slots":
            row["slots"] = min(int(cells[0]), row["slots"] or int(cells[0]))
        else:
            row["objectives"][each.labels[2]] = round(max(cells[0], row["objectives"].get(each.labels[2], 0.0)), 3)
    return [{"model": labels[0], "class": labels[1], **row} for labels, row in sorted(found.items()) if row["slots"]]


def _row(labels: tuple[str, ...], values: Mapping[str, float], whole: float) -> dict[str, Any]:
    dispatched, service = int(values["dispatched"]), values["service"]
    return {
        **dict(zip(FAMILIES["queue_requests_total"].labels, labels, strict=True)),
        "waiting": int(values["waiting"]),
        "dispatched": dispatched,
        "refused": int(values["refused"]),
        "wait_seconds": round(values["wait_seconds"] / dispatched, 3) if dispatched else 0.0,
        "service": round(service),
        "service_share": round(service / whole, 4) if whole else 0.0,
    }
