"""The last hour of the gateway, from the counters that control sums: points for charts, and counts by minute for alerts. Pure.

The rules: memory has a bound, which follows from the models and servers of the configuration and never from the traffic. Counters only
grow, so a rate is a difference of two samples, and a gap between samples makes a rate less exact but never wrong.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gateway.api.routes import ENDPOINTS
from gateway.telemetry.metrics import FAMILIES, Series
from gateway.telemetry.token_rates import ModelTokens

STEP = 5.0
"""Seconds between two points."""
HOUR = 3600.0
_MINUTE = 60.0
_SMOOTHED = 12  # points over which the time to first token is shown, since a single one has few streams
FAMILIES_READ = (
    "requests_total",
    "incomplete_total",
    "queued_requests",
    "inflight_requests",
    "time_to_first_token_seconds",
    "auth_failures_total",
    "continuations_total",
)
"""The families of the workers' counters that a sample needs."""
COLUMNS = ("succeeded", "rejected", "errors", "prompt", "completion", "in_flight", "queued", "first_token_p50", "first_token_p95")
"""The values of a point after its time: rates per second, numbers of requests, and seconds. None: no stream has started."""
_FIRST_TOKEN = FAMILIES["time_to_first_token_seconds"].buckets
LATE = 2.5
"""Seconds after which a stream starts late, as in the alerts."""
Point = tuple[float | None, ...]
Counts = Mapping[tuple[str, str], float]
"""Counters, each by what it counts and by the model, server or reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters of the workers at one time. ``at`` is in seconds of a clock that never goes back.

    ``counts`` are those by minute. ``tokens`` are the tokens of all models, counted at ``tokens_at``.
    """

    at: float
    outcomes: tuple[float, float, float]
    tokens: ModelTokens
    tokens_at: float
    in_flight: float
    queued: float
    first_tokens: tuple[float, ...]
    counts: Counts


def sampled(
    at: float, series: Mapping[Series, Sequence[float]], tokens: tuple[float, Mapping[str, ModelTokens]] | None, more: Counts
) -> Sample:
    """Return the sample of the families in ``FAMILIES_READ``. ``more`` are further counters by minute."""
    counts: defaultdict[tuple[str, str], float] = defaultdict(float, more)
    outcomes, buckets, in_flight, queued = [0.0, 0.0, 0.0], [0.0] * len(_FIRST_TOKEN), 0.0, 0.0
    for each, values in series.items():
        label, value = each.labels[0] if each.labels else "", values[0]
        match each.family:
            case "requests_total":
                outcome = _outcome(each.labels[2])
                outcomes[outcome] += value
                counts["requests", label] += value
                if outcome == 2:
                    counts["failures", label] += value
                elif outcome == 1 and each.labels[1] in ENDPOINTS:  # single requests of other routes are not stored
                    counts["rejected", label] += value
            case "incomplete_total" if each.labels[1] != "client":  # its status was sent before, so it counts as succeeded
                outcomes[0] -= value
                outcomes[2] += value
                counts["failures", label] += value
            case "inflight_requests":
                in_flight += value
            case "queued_requests":
                queued += value
                counts["queued", label] += value
            case "auth_failures_total":
                counts["auth_failures", label] += value
            case "continuations_total":
                counts["continuations", label] += value
                counts["not_continued", label] += value * (each.labels[3] != "continued")
            case "time_to_first_token_seconds":
                buckets = [total + count for total, count in zip(buckets, values, strict=False)]
                streams = sum(values[:-1])
                counts["streams", label] += streams
                counts["late", label] += streams - sum(values[: _FIRST_TOKEN.index(LATE) + 1])
    tokens_at, by_model = tokens or (at, {})
    total = ModelTokens(sum(each.prompt for each in by_model.values()), sum(each.completion for each in by_model.values()))
    return Sample(at, (outcomes[0], outcomes[1], outcomes[2]), total, tokens_at, in_flight, queued, tuple(buckets), counts)


def _outcome(code: str) -> int:
    """Return the position in ``outcomes``. A client that disconnected (499) is no error of the gateway."""
    return 2 if code[0] == "5" else 1 if code[0] == "4" and code != "499" else 0


class RecentHistory:
    """The points and counts of the last hour."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=int(HOUR / STEP))
        self.counts = MinuteCounts()
        self._samples: deque[Sample] = deque(maxlen=_SMOOTHED + 1)

    def add(self, sample: Sample, wall: float) -> Point | None:
        """Add a sample that was made at ``wall``, in seconds since the epoch. Returns its point, None for the first sample."""
        before = self._samples[-1] if self._samples else None
        self._samples.append(sample)
        self.counts.add(sample.at, sample.counts)
        if before is None or sample.at <= before.at:
            return None
        seconds, of_tokens = sample.at - before.at, sample.tokens_at - before.tokens_at
        rates = [max(now - then, 0.0) / seconds for now, then in zip(sample.outcomes, before.outcomes, strict=True)]
        prompt, completion = sample.tokens.prompt - before.tokens.prompt, sample.tokens.completion - before.tokens.completion
        tokens = [max(each, 0.0) / of_tokens if of_tokens > 0 else 0.0 for each in (prompt, completion)]
        buckets = [now - then for now, then in zip(sample.first_tokens, self._samples[0].first_tokens, strict=True)]
        first = [quantile(share, _FIRST_TOKEN, buckets) for share in (0.5, 0.95)]
        rounded = [None if each is None else round(each, 3) for each in (*rates, *tokens, sample.in_flight, sample.queued, *first)]
        point = (round(wall, 1), *rounded)
        self.points.append(point)
        return point


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return a quantile of a histogram, interpolated in its bucket as Prometheus does; None without observations."""
    total = sum(counts)
    if total <= 0:
        return None
    below, lower = 0.0, 0.0
    for bound, count, until in zip(bounds, counts, accumulate(counts), strict=True):
        if until >= share * total and count > 0:
            return lower if bound == bounds[-1] else lower + (bound - lower) * (share * total - below) / count
        below, lower = until, bound
    return lower


class MinuteCounts:
    """Counters once a minute for an hour, as numbers of 8 bytes. The counts of a moment ago are the latest ones."""

    def __init__(self) -> None:
        self._positions: dict[tuple[str, str], int] = {}
        self._rows: deque[tuple[float, array[float]]] = deque(maxlen=int(HOUR / _MINUTE) + 1)
        self._latest: tuple[float, array[float]] = 0.0, array("d")

    def add(self, at: float, counts: Counts) -> None:
        """Add counters at a time."""
        for each in counts:
            self._positions.setdefault(each, len(self._positions))
        row = array("d", bytes(8 * len(self._positions)))
        for each, value in counts.items():
            row[self._positions[each]] = value
        self._latest = at, row
        if not self._rows or at - self._rows[-1][0] >= _MINUTE - 1:
            self._rows.append(self._latest)

    def present(self, name: str) -> Iterator[tuple[str, float]]:
        """Yield the latest values of a counter, by label."""
        row = self._latest[1]
        yield from ((label, row[position]) for (each, label), position in self._positions.items() if each == name)

    def increase(self, name: str, seconds: float, offset: float = 0.0) -> dict[str, float]:
        """Return how much a counter has grown within the ``seconds`` before ``offset``, by label, as far as the history goes back."""
        last, first = self._row(offset)[1], self._row(offset + seconds)[1]
        found = ((label, position) for (each, label), position in self._positions.items() if each == name)
        return {label: _value(last, position) - _value(first, position) for label, position in found}

    def covered(self, seconds: float) -> float:
        """Return the seconds that an increase within ``seconds`` covers: fewer soon after a start."""
        return self._latest[0] - self._row(seconds)[0]

    def _row(self, age: float) -> tuple[float, array[float]]:
        """Return the counters of so many seconds ago, or the oldest ones, with their time."""
        if not age:
            return self._latest
        before: Iterable[tuple[float, array[float]]] = reversed(self._rows)
        return next((each for each in before if self._latest[0] - each[0] >= age - 1), self._rows[0])


def _value(row: array[float], position: int) -> float:
    return row[position] if position < len(row) else 0.0  # it was counted later for the first time
