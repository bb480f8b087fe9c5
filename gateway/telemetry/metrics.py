"""What is counted, under which names, and how it becomes Prometheus text.

``FAMILIES`` is the list of every metric: name, kind, labels, help. Workers count through ``WorkerMetrics`` into
their scoreboard; control sums the boards, adds what it knows itself, and prometheus_client writes the text.

The rules: a label's value comes from the configuration, the route table or a constant, never from a request;
a series, once shown, is shown for ever (counters never go backwards when a worker dies, because its board
outlives it).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from gateway.api.routes import ENDPOINTS
from gateway.auth.keyring import AUTH_REASONS
from gateway.snapshot.snapshot import Snapshot
from gateway.telemetry.request_record import ReadGapCounts, RequestRecord
from gateway.telemetry.shared_counters import Cells, SharedCounters, SharedCountersFullError
from gateway.telemetry.token_rates import TokenCounts

PREFIX = "vllm_gateway_"
OTHER = "other"
"""The ``model`` label of requests whose model is not configured."""

_log = logging.getLogger("vllm_gateway.worker")
_INF = float("inf")
_DURATION = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, _INF)
# vLLM's own boundaries (vllm/v1/metrics/loggers.py), so that panels can subtract the one from the other
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560, _INF)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, _INF)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, _INF)

_LAG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, _INF)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``buckets`` are the upper bounds of a histogram, the last one infinite."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def cells(self) -> int:
        """Cells of one series on a board: a value, or the buckets' counts and the sum."""
        return len(self.buckets) + 1 if self.buckets else 1


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "requests_total": Family(
            "counter",
            "Requests by the HTTP status sent (499: the client left) and the code of the error, empty without an error.",
            ("model", "endpoint", "code", "error"),
        ),
        "key_requests_total": Family("counter", "Requests of known keys by the HTTP status sent.", ("key", "code")),
        "request_duration_seconds": Family("histogram", "From a request's head to its last byte.", ("model", "endpoint"), _DURATION),
        "time_to_first_token_seconds": Family(
            "histogram", "From a request's head to the first event of its stream.", ("model",), _FIRST_TOKEN
        ),
        "inter_token_latency_seconds": Family("histogram", "Between two reads of a stream's events.", ("model",), BETWEEN),
        "overhead_seconds": Family("histogram", "Time in the gateway itself, without waiting for client or server.", (), _OVERHEAD),
        "tokens_total": Family(
            "counter", "Tokens by the server's count; cached is part of prompt, reasoning of completion.", ("key", "model", "type")
        ),
        "inflight_requests": Family("gauge", "Requests being served.", ("model",)),
        "queued_requests": Family("gauge", "Requests waiting for a server.", ("model",)),
        "auth_failures_total": Family("counter", "Requests refused for their key.", ("reason",)),
        "limited_total": Family("counter", "Requests refused by a limit.", ("key", "reason")),
        "client_faults_total": Family("counter", "Connections that were ended for what their client did.", ("reason",)),
        "log_lines_dropped_total": Family("counter", "Requests whose lines of the access log could not be written."),
        "server_up": Family("gauge", "1 when the server answers its probes.", ("model", "server")),
        "server_out_of_rotation": Family("gauge", "1 when the gateway itself gives the server no requests.", ("model", "server")),
        "ready_servers": Family("gauge", "Servers of the model that are up; 0 also while the model has no server at all.", ("model",)),
        "server_restarts_total": Family("counter", "Starts of a launched server after the first.", ("model", "server")),
        "server_inflight": Family("gauge", "Requests in flight on the server.", ("model", "server")),
        "server_ejected": Family(
            "gauge", "Workers that pass the server over for its failures, where another can serve.", ("model", "server")
        ),
        "server_failures_total": Family("counter", "Attempts that failed on the server.", ("model", "server", "reason")),
        "discovery_up": Family("gauge", "1 when what the model's servers are found by answers as it should.", ("model",)),
        "key_set_up": Family("gauge", "1 when the last look at an issuer's keys brought some.", ("issuer",)),
        "dependency_up": Family("gauge", "1 when what the gateway depends on works, 0 when /status shows it as down.", ("dependency",)),
        "retries_total": Family("counter", "Requests sent a second time.", ("model",)),
        "fallbacks_total": Family("counter", "Requests that another model answered.", ("model", "fallback")),
        "launches_total": Family("counter", "Starts of launched servers.", ("model", "outcome")),
        "launch_failures_total": Family("counter", "Failed starts and deaths of launched servers by their cause.", ("model", "cause")),
        "incomplete_total": Family("counter", "Answers that broke off, by who ended them.", ("model", "reason")),
        "config_reloads_total": Family("counter", "Readings of the configuration.", ("outcome",)),
        "config_last_reload_successful": Family("gauge", "1 when the last reading of the configuration was taken."),
        "series_dropped_total": Family("counter", "Series that a worker's board had no room for."),
        "ledger_rows_total": Family("counter", "Rows of the ledger, by what became of them.", ("outcome",)),
        "ledger_spool_rows": Family("gauge", "Rows on disk that the ledger's database has not got yet."),
        "ledger_spool_bytes": Family("gauge", "Bytes of those rows."),
        "ledger_memory_rows": Family("gauge", "Rows in memory that are neither on disk nor in the ledger's database yet."),
        "ledger_memory_bytes": Family("gauge", "Bytes of those rows."),
        "key_expires_timestamp_seconds": Family(
            "gauge", "When the last good key of an entry ends; one that does not, or is revoked, has no such series.", ("key",)
        ),
        "worker_restarts_total": Family("counter", "Worker processes that ended unexpectedly and were replaced."),
        "worker_cpu_seconds_total": Family("counter", "CPU time, user and system, of the worker's present process.", ("worker",)),
        "worker_resident_memory_bytes": Family("gauge", "Resident memory of the worker's process.", ("worker",)),
        "worker_open_fds": Family("gauge", "Open file descriptors of the worker's process.", ("worker",)),
        "worker_max_fds": Family("gauge", "Most file descriptors that the worker's process may open.", ("worker",)),
        "worker_event_loop_lag_seconds": Family("histogram", "Delay of a timer in the worker's event loop.", ("worker",), _LAG),
        "build_info": Family("gauge", "Always 1; the version is the label.", ("version",)),
    }
)

_TOKEN_TYPES = ("prompt", "completion", "cached", "reasoning")
_PER_MODEL = ("time_to_first_token_seconds", "inter_token_latency_seconds", "inflight_requests", "queued_requests", "retries_total")
INCOMPLETE_REASONS = ("client", "upstream", "drain")
CLIENT_FAULTS = ("malformed", "silent", "slow_head", "slow_body", "slow_reader", "too_many", "evicted")


@dataclass(frozen=True, slots=True)
class Series:
    """A metric with its label values; on a board it is named by its JSON."""

    family: str
    labels: tuple[str, ...]

    def encode(self) -> str:
        return msgspec.json.encode((self.family, *self.labels)).decode()

    @classmethod
    def decode(cls, name: str) -> Series:
        family, *labels = msgspec.json.decode(name, type=list[str])
        return cls(family, tuple(labels))


def observe(cells: Cells, buckets: Sequence[float], value: float) -> None:
    """Count a value in a histogram's cells: one per bucket, then the sum."""
    cells[bisect_left(buckets, value)] += 1
    cells[-1] += value


class WorkerMetrics:
    """The counting side. Cells are looked up once per set of labels and kept."""

    def __init__(self, board: SharedCounters) -> None:
        self._counters = board
        self._cells: dict[tuple[str, ...], Cells] = {}
        self._outcomes: dict[tuple[str, str, int, str | None], tuple[Cells, Cells]] = {}
        self._uses: dict[tuple[str, str, int], tuple[Cells, ...]] = {}
        self._in_flight: dict[str, InflightGauge] = {}
        self._dropped = self.cells("series_dropped_total")
        self._overhead = self.cells("overhead_seconds")
        self._reset_gauges()

    def _reset_gauges(self) -> None:
        """What a predecessor on this board had in flight died with it."""
        for reading in tuple(self._counters.readings()):
            series = Series.decode(reading.name)
            if FAMILIES[series.family].kind == "gauge":
                self.cells(series.family, *series.labels)[0] = 0.0

    def cells(self, family: str, *labels: str) -> Cells:
        """The cells of one series. Where the board has no room for it, they are nobody's to read: a request does not fail for its count."""
        key = (family, *labels)
        found = self._cells.get(key)
        if found is None:
            found = self._cells[key] = self._allocate(Series(family, labels).encode(), FAMILIES[family].cells)
        return found

    def _allocate(self, name: str, count: int) -> Cells:
        try:
            return self._counters.cells(name, count)
        except SharedCountersFullError:
            if not self._dropped[0]:
                _log.error("there is no room for more series: what is new to this worker is not in its metrics")
            self._dropped[0] += 1
            return memoryview(bytearray(8 * count)).cast("d")

    def create_series(self, snapshot: Snapshot) -> None:
        """Make the series that a configuration implies, so that their first increase is seen as one."""
        for reason in AUTH_REASONS.values():
            self.cells("auth_failures_total", reason)
        for reason in CLIENT_FAULTS:
            self.cells("client_faults_total", reason)
        self.cells("log_lines_dropped_total")
        for name in (*(model.id for model in snapshot.models), OTHER):
            for endpoint in ENDPOINTS:
                self.cells("requests_total", name, endpoint, "200", "")
            self.cells("request_duration_seconds", name, ENDPOINTS[0])
            for family in _PER_MODEL:
                self.cells(family, name)
            for reason in INCOMPLETE_REASONS:
                self.cells("incomplete_total", name, reason)
        for model in snapshot.bases:
            for server in model.servers:
                self.cells("server_inflight", model.id, server.name)
                self.cells("server_ejected", model.id, server.name)
        ids = {name: model.id for model in snapshot.models for name in (model.id, *model.aliases)}
        for model in snapshot.models:
            for fallback in model.fallbacks:
                self.cells("fallbacks_total", model.id, ids[fallback])

    def in_flight(self, model: str) -> InflightGauge:
        """The gauge of a model's requests, to be held by each of them in a ``with``."""
        try:
            return self._in_flight[model]
        except KeyError:
            made = self._in_flight[model] = InflightGauge(self.cells("inflight_requests", model))
            return made

    def queued(self, model: str) -> Cells:
        return self.cells("queued_requests", model)

    def count_auth_failure(self, code: str) -> None:
        self.cells("auth_failures_total", AUTH_REASONS[code])[0] += 1

    def count_client_fault(self, reason: str) -> None:
        """Count a connection that is ended for a reason of ``CLIENT_FAULTS``."""
        self.cells("client_faults_total", reason)[0] += 1

    def count_dropped_lines(self, count: int) -> None:
        """Count requests of which the access log has no line."""
        if count:
            self.cells("log_lines_dropped_total")[0] += count

    def record_request(self, record: RequestRecord) -> None:
        """Count one request at its end, once."""
        # Every request comes by here: look-ups are subscripts and ``observe`` is written out, since each step is counted (test_cost.py).
        model = record.model or OTHER
        code = record.code
        try:
            requests, durations = self._outcomes[model, record.endpoint, record.status, code]
        except KeyError:
            requests, durations = self._outcome_cells(record, model)
        requests[0] += 1
        duration = record.duration
        durations[bisect_left(_DURATION, duration)] += 1
        durations[-1] += duration
        overhead = record.overhead
        overheads = self._overhead
        overheads[bisect_left(_OVERHEAD, overhead)] += 1
        overheads[-1] += overhead
        key = record.key
        if key is not None:
            usage = record.usage
            if usage is None:
                self.cells("key_requests_total", key.entry or key.id, str(record.status))[0] += 1
            else:
                try:
                    requests, prompt, completion, cached, reasoning = self._uses[key.entry or key.id, model, record.status]
                except KeyError:
                    requests, prompt, completion, cached, reasoning = self._usage_cells(key.entry or key.id, model, record.status)
                requests[0] += 1
                prompt[0] += usage.prompt
                completion[0] += usage.completion
                if usage.cached:
                    cached[0] += usage.cached
                if usage.reasoning:
                    reasoning[0] += usage.reasoning
        if record.gaps is not None:
            self._count_stream(record, model, record.gaps)
        if code is not None or record.incomplete is not None or record.failures or record.asked is not None:
            self._count_failures(record, model)

    def _outcome_cells(self, record: RequestRecord, model: str) -> tuple[Cells, Cells]:
        requests = self.cells("requests_total", model, record.endpoint, str(record.status), record.code or "")
        made = (requests, self.cells("request_duration_seconds", model, record.endpoint))
        self._outcomes[model, record.endpoint, record.status, record.code] = made
        return made

    def _usage_cells(self, key: str, model: str, status: int) -> tuple[Cells, ...]:
        """The cells of a key's requests with this status, and of its tokens by ``_TOKEN_TYPES``. They exist from their first use."""
        tokens = (self.cells("tokens_total", key, model, kind) for kind in _TOKEN_TYPES)
        made = self._uses[key, model, status] = (self.cells("key_requests_total", key, str(status)), *tokens)
        return made

    def _count_stream(self, record: RequestRecord, model: str, gaps: ReadGapCounts) -> None:
        if record.first_token is not None:
            observe(self.cells("time_to_first_token_seconds", model), _FIRST_TOKEN, record.first_token)
        between = self.cells("inter_token_latency_seconds", model)
        for index, count in enumerate(gaps.counts):
            if count:
                between[index] += count
        between[-1] += gaps.total

    def _count_failures(self, record: RequestRecord, model: str) -> None:
        for owner, server, reason in record.failures:
            self.cells("server_failures_total", owner, server, reason)[0] += 1
        if record.retries:
            self.cells("retries_total", model)[0] += record.retries
        if record.asked is not None:
            self.cells("fallbacks_total", record.asked, model)[0] += 1
        if record.incomplete is not None:
            self.cells("incomplete_total", model, record.incomplete)[0] += 1
        if record.code is not None and record.code in AUTH_REASONS:
            self.count_auth_failure(record.code)


class InflightGauge:
    """A gauge that goes up and down with the ``with`` blocks that are in it."""

    __slots__ = ("_cells",)

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def __enter__(self) -> None:
        self._cells[0] += 1

    def __exit__(self, *_: object) -> None:
        self._cells[0] -= 1


class ReadGaps:
    """Times between the reads of one stream, gathered beside it and counted once at its end.

    ``more``: the events beyond one of each read. ``counted``: how many events the server's usage covers.
    """

    __slots__ = ("_began", "counted", "counts", "last", "more")

    def __init__(self, now: float) -> None:
        self._began = self.last = now
        self.counts = [0] * len(BETWEEN)
        self.more = 0
        self.counted = 0.0

    @property
    def events(self) -> int:
        """How many events passed."""
        return 1 + sum(self.counts) + self.more

    @property
    def are_counted(self) -> bool:
        """Whether the server's usage covers all of them."""
        return self.counted >= self.events

    @property
    def total(self) -> float:
        """The sum of all gaps."""
        return self.last - self._began

    def mark(self, now: float) -> None:
        self.counts[bisect_left(BETWEEN, now - self.last)] += 1
        self.last = now


# The reading side


def sum_series(boards: Iterable[SharedCounters]) -> dict[Series, list[float]]:
    """Every series of all boards, cell by cell added up."""
    total: dict[Series, list[float]] = {}
    for board in boards:
        for reading in board.readings():
            series = Series.decode(reading.name)
            before = total.get(series)
            total[series] = [a + b for a, b in zip(before, reading.values, strict=True)] if before else list(reading.values)
    return total


def tokens_by_model(boards: Iterable[SharedCounters]) -> dict[str, TokenCounts]:
    """What each model has read and generated so far, for all keys together. Cheap: no other series is looked at."""
    total: dict[str, TokenCounts] = {}
    for board in boards:
        for reading in board.readings('["tokens_total",'):
            _, model, kind = Series.decode(reading.name).labels
            before = total.get(model, TokenCounts())
            if kind == "prompt":
                total[model] = TokenCounts(before.prompt + reading.values[0], before.completion)
            elif kind == "completion":
                total[model] = TokenCounts(before.prompt, before.completion + reading.values[0])
    return total


class CounterSums:
    """Sums of single series over all boards, for those who look often: a look costs a few additions, not a decoding of everything.

    ``by``: for each family, which of its labels its sums are by.
    """

    def __init__(self, boards: Sequence[SharedCounters], by: Mapping[str, int]) -> None:
        self._counters = boards
        self._by = by
        self._seen = [0] * len(boards)
        self._cells: dict[tuple[str, str], list[Cells]] = {}

    def sum(self, family: str, label: str) -> float:
        """The sum of the first cells of a family's series with this label."""
        self._find_new_series()
        return sum(cells[0] for cells in self._cells.get((family, label), ()))

    def _find_new_series(self) -> None:
        for number, board in enumerate(self._counters):
            for name in board.new_names(self._seen[number]):
                self._seen[number] += 1
                series = Series.decode(name)
                if series.family in self._by:
                    key = series.family, series.labels[self._by[series.family]]
                    self._cells.setdefault(key, []).append(board.cells(name, 1))


def by_family(series: Mapping[Series, Sequence[float]]) -> Iterator[tuple[str, Family, list[tuple[tuple[str, ...], Sequence[float]]]]]:
    """Every family of ``FAMILIES`` in its order, with its series (none is left out)."""
    grouped: dict[str, list[tuple[tuple[str, ...], Sequence[float]]]] = {name: [] for name in FAMILIES}
    for one, values in series.items():
        grouped[one.family].append((one.labels, values))
    for name, family in FAMILIES.items():
        yield name, family, grouped[name]
