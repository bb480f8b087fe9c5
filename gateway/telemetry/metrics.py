"""Define the metrics, count them in workers, and sum them in control.

``FAMILIES`` is the list of all metrics: name, kind, labels, help. Workers count through ``WorkerMetrics`` into their shared
counters; control sums the counters of all workers and adds its own values, and prometheus_client writes the text.

The rules: the value of a label comes from the configuration, the route table or a constant, never from a request. A series that was
shown once is always shown: a counter never goes backwards when a worker dies, because its counters outlive it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from gateway.api.errors import AUTH_REASONS
from gateway.api.routes import ENDPOINTS
from gateway.snapshot.snapshot import Snapshot
from gateway.telemetry.request_record import Continuation, ReadGapCounts, RequestRecord
from gateway.telemetry.shared_counters import SharedCells, SharedCounters, SharedCountersFullError
from gateway.telemetry.token_rates import ModelTokens

PREFIX = "vllm_gateway_"
OTHER = "other"
"""The ``model`` label of requests whose model is not configured."""

_log = logging.getLogger("vllm_gateway.worker")
_INF = float("inf")
_DURATION = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, _INF)
# vLLM's own bounds (vllm/v1/metrics/loggers.py), so that dashboards can compare both
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560, _INF)
CHUNK_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, _INF)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, _INF)

_LAG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, _INF)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, without the prefix of its name. ``buckets`` are the upper bounds of a histogram, the last one infinite.

    ``shared``: the cells after the value of a gauge, which only workers read.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    shared: int = 0

    @property
    def kind(self) -> str:
        """The kind of metric. By the convention of Prometheus, the names of counters end in ``_total``, and no others."""
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"

    @property
    def cells(self) -> int:
        """Number of cells of one series: one value, or the counts of the buckets and the sum; and the shared ones."""
        return len(self.buckets) + 1 + self.shared


_FLOW = ("model", "class", "team", "key")
_FAMILIES = (
    Family(
        "requests_total",
        "Requests by the HTTP status sent (499: the client disconnected) and the error code, empty without an error.",
        ("model", "endpoint", "code", "error"),
    ),
    Family("key_requests_total", "Requests of known keys by the HTTP status sent.", ("key", "code")),
    Family("request_duration_seconds", "Time from a request's headers to the last byte of its response.", ("model", "endpoint"), _DURATION),
    Family("time_to_first_token_seconds", "Time from a request's headers to the first event of its stream.", ("model",), _FIRST_TOKEN),
    Family(
        "inter_chunk_latency_seconds",
        "Time between two reads of a stream's events; one read may have several events.",
        ("model",),
        CHUNK_GAPS,
    ),
    Family("overhead_seconds", "Time in the gateway itself, without waiting for client or server.", (), _OVERHEAD),
    Family("tokens_total", "Tokens reported by the server; cached is part of prompt, reasoning of completion.", ("key", "model", "type")),
    Family(
        "predicted_tokens_total",
        "Prompt tokens with the policy cost: those that were predicted to be cached, and those that were cached.",
        ("model", "type"),
    ),
    Family("prefix_index_blocks", "Blocks in the worker's prefix index of the model.", ("model", "worker")),
    Family("inflight_requests", "Requests in flight.", ("model",)),
    Family("queued_requests", "Requests queued for a server.", ("model",)),
    Family("queue_waiting_requests", "Requests of a key that wait in a model's queue.", _FLOW),
    Family("queue_requests_total", "Requests that were dispatched from a queue.", _FLOW),
    Family("queue_wait_seconds_total", "Seconds for which those requests waited.", _FLOW),
    Family(
        "queue_service_total",
        "Weighted tokens, by which a queue is fair, of requests that ended; only of keys that have waited in the last minute.",
        _FLOW,
    ),
    Family("queue_service_in_flight", "The same for requests in flight that were dispatched from the queue, as estimated.", _FLOW),
    Family(
        "open_slots",
        "Slots of each server that requests of the classes after a class with reserved slots may use, as the worker knows it.",
        ("model", "class", "worker"),
    ),
    Family(
        "objective_ratio",
        "Recent times of a class with automatically reserved slots, to the first token (ttft) or between tokens (itl), divided by their "
        "objective: above 1, it is missed.",
        ("model", "class", "objective", "worker"),
    ),
    Family("queue_deferred_total", "Requests that were deferred because a server had more of other prompts cached.", _FLOW),
    Family(
        "queue_preemptions_total",
        "Requests of a class that were stopped before their first byte and queued again, because an earlier class needed the slot.",
        ("model", "class"),
    ),
    Family("queue_refused_total", "Requests that a queue refused while its model was up or loading.", (*_FLOW, "reason")),
    Family("queue_bookings", "Refused clients for whose return the model's queue has a booking.", ("model",), shared=4095),
    Family("auth_failures_total", "Requests refused because of their key.", ("reason",)),
    Family("limited_total", "Requests refused by a limit.", ("key", "reason")),
    Family("limits_store_admissions_total", "Requests admitted by the limits store, by a call for each or from a lease.", ("source",)),
    Family("budget_used_ratio", "Used share of a budget, reservations included; above 1 if it is exceeded.", ("holder", "budget", "soft")),
    Family("session_evictions_total", "Sessions whose use was forgotten because the table of sessions was full.", ("key",)),
    Family("limited_users", "End users of a key or team with their own counts.", ("holder",)),
    Family("limited_users_overflow_total", "Requests of end users that share counts, because all others have use.", ("holder",)),
    Family("client_faults_total", "Connections closed because of what their client did.", ("reason",)),
    Family("log_lines_dropped_total", "Requests whose access log line could not be written."),
    Family("server_up", "1 when the server passes its health checks.", ("model", "server")),
    Family("server_out_of_rotation", "1 when the gateway itself gives the server no requests.", ("model", "server")),
    Family("server_serves_model", "1 when the server lists its model, 0 when it lists only others.", ("model", "server")),
    Family("ready_servers", "Servers of the model that are up; 0 also if the model has no servers.", ("model",)),
    Family("server_restarts_total", "Starts of a launched server after the first.", ("model", "server")),
    Family("server_inflight", "Requests in flight on the server.", ("model", "server")),
    Family("server_max_inflight", "Requests that may be in flight on the server at once, if they are bounded.", ("model", "server")),
    Family("server_ejected", "Workers that pass the server over for its failures, where another can serve.", ("model", "server")),
    Family("server_failures_total", "Attempts that failed on the server.", ("model", "server", "reason")),
    Family("kv_event_blocks", "Blocks that the server has cached, by its KV cache events.", ("model", "server")),
    Family("kv_event_gaps_total", "Times that KV cache events of the server were lost.", ("model", "server")),
    Family("discovery_up", "1 when the service discovery of the model works.", ("model",)),
    Family("key_set_up", "1 when the last fetch of the issuer's JWKS succeeded.", ("issuer",)),
    Family("dependency_up", "1 when the dependency works, 0 when /status shows it as down.", ("dependency",)),
    Family("retries_total", "Requests sent to a server again.", ("model",)),
    Family(
        "continuations_total",
        "Streams that lost their server and were to be continued on another one, by how, why and with which outcome.",
        ("model", "path", "cause", "outcome"),
    ),
    Family("continuation_gap_seconds", "Time from the loss of a stream's server to its next event.", ("model", "path"), _DURATION),
    Family(
        "continuation_tokens_total",
        "Tokens that continuations cost: prompt is the second prefill, lost are tokens that were made again.",
        ("model", "type"),
    ),
    Family("fallbacks_total", "Requests served by a fallback model.", ("model", "fallback")),
    Family("split_requests_total", "Requests for a split by the model that served them.", ("split", "model")),
    Family("mirrored_requests_total", "Copies of requests for another model by result.", ("model", "to", "result")),
    Family("mirrored_inflight_requests", "Copies of requests in flight.", ("model", "to")),
    Family("recorded_requests_total", "Requests selected to be recorded with their bodies, by result.", ("result",)),
    Family("launches_total", "Starts of launched servers.", ("model", "outcome")),
    Family("launch_failures_total", "Failed starts and crashes of launched servers by cause.", ("model", "cause")),
    Family("incomplete_total", "Truncated responses by what ended them.", ("model", "reason")),
    Family("config_reloads_total", "Reloads of the configuration.", ("outcome",)),
    Family("config_last_reload_successful", "1 when the last reload of the configuration succeeded."),
    Family("series_dropped_total", "Series for which a worker's counter memory had no capacity."),
    Family("ledger_rows_total", "Rows of the ledger by outcome.", ("outcome",)),
    Family("ledger_spool_rows", "Rows on disk that are not in the ledger's database yet."),
    Family("ledger_spool_bytes", "Bytes of those rows."),
    Family("ledger_memory_rows", "Rows in memory that are neither on disk nor in the ledger's database yet."),
    Family("ledger_memory_bytes", "Bytes of those rows."),
    Family(
        "audit_entries_total",
        "Entries of the audit log; suppressed: refused attempts beyond the rate limit, which are only counted.",
        ("outcome",),
    ),
    Family("audit_spool_entries", "Entries of the audit log on disk that are not in the store's database yet."),
    Family("audit_spool_bytes", "Bytes of those entries."),
    Family("audit_lines_dropped_total", "Entries of the audit log that could not be written to standard output."),
    Family("key_store_keys", "Keys of the store."),
    Family("key_store_age_seconds", "Seconds since the store's database confirmed the keys that are served."),
    Family("key_store_copy_age_seconds", "Seconds since the store's database confirmed the keys in the local copy."),
    Family("notices_total", "Attempts to send a notice: sent, failed, or given up, which is not tried again.", ("notice", "outcome")),
    Family("notices_waiting", "Notices that were not accepted by their receiver yet.", ("notice",)),
    Family("notices_oldest_waiting_seconds", "Age of the oldest of those notices, 0 without any.", ("notice",)),
    Family("prompt_counts_total", "Prompts of truncated requests that their server counted afterwards, by outcome.", ("model", "outcome")),
    Family(
        "unbilled_tokens_total",
        "Tokens that engines counted and the ledger did not bill, by the reason that the reconciliation found.",
        ("model", "reason"),
    ),
    Family("certificate_expires_timestamp_seconds", "When the first certificate of the setting's file expires, since 1970.", ("setting",)),
    Family(
        "key_expires_timestamp_seconds",
        "When the last valid key of an entry expires; an entry that does not expire, or is revoked, has no series.",
        ("key",),
    ),
    Family("worker_restarts_total", "Worker processes that ended unexpectedly and were replaced."),
    Family("worker_cpu_seconds_total", "CPU time, user and system, of the worker's current process.", ("worker",)),
    Family("worker_resident_memory_bytes", "Resident memory of the worker's process.", ("worker",)),
    Family("worker_open_fds", "Open file descriptors of the worker's process.", ("worker",)),
    Family("worker_max_fds", "Maximum number of file descriptors of the worker's process.", ("worker",)),
    Family("worker_event_loop_lag_seconds", "Delay of a timer in the worker's event loop.", ("worker",), _LAG),
    Family("build_info", "Always 1; the labels are the version and the core: python or compiled.", ("version", "core")),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}


_PER_MODEL = ("time_to_first_token_seconds", "inter_chunk_latency_seconds", "inflight_requests", "queued_requests", "retries_total")
_TOKEN_TYPES = ("prompt", "completion", "cached", "reasoning")
MIRROR_RESULTS = ("completed", "failed", "no_capacity", "limit", "drain")
RECORD_RESULTS = ("stored", "too_large", "no_memory", "not_parsed", "store_failed", "failed", "stopped")
INCOMPLETE_REASONS = ("client", "upstream", "drain")
CLIENT_FAULTS = ("malformed", "silent", "slow_head", "slow_body", "slow_reader", "too_many", "evicted")


@dataclass(frozen=True, slots=True)
class Series:
    """A metric with its label values. Its JSON is its name in the shared counters."""

    family: str
    labels: tuple[str, ...]

    def encode(self) -> str:
        return msgspec.json.encode((self.family, *self.labels)).decode()

    @classmethod
    def decode(cls, name: str) -> Series:
        family, *labels = msgspec.json.decode(name, type=list[str])
        return cls(family, tuple(labels))


def observe(cells: SharedCells, buckets: Sequence[float], value: float) -> None:
    """Count a value in the cells of a histogram: one cell for each bucket, then the sum."""
    cells[bisect_left(buckets, value)] += 1
    cells[-1] += value


def reset_gauges(counters: SharedCounters) -> None:
    """Set all gauges of a worker to 0: its process has ended, and its requests with it."""
    for name, _ in tuple(counters.readings()):
        if FAMILIES[Series.decode(name).family].kind == "gauge" and (cells := counters.find(name)) is not None:
            cells[0] = 0.0


class WorkerMetrics:
    """The metrics of one worker. Cells are looked up once for each set of labels and cached. ``peers``: the other workers' counters."""

    def __init__(self, counters: SharedCounters, peers: Iterable[SharedCounters] = ()) -> None:
        self._counters = counters
        self._peers = tuple(peers)
        self._cells: dict[tuple[str, ...], SharedCells] = {}
        self._peer_cells: dict[tuple[str, ...], list[SharedCells | None]] = {}  # of series that all peers have
        self._peer_series: dict[tuple[str, str], tuple[list[int], list[tuple[tuple[str, ...], SharedCells]]]] = {}
        self._outcomes: dict[tuple[str, str, int, str | None], tuple[SharedCells, SharedCells]] = {}
        self._uses: dict[tuple[str, str, int], tuple[SharedCells, ...]] = {}
        self._in_flight: dict[str, InflightGauge] = {}
        self._dropped = self.cells("series_dropped_total")
        self._overhead = self.cells("overhead_seconds")
        reset_gauges(counters)

    def cells(self, family: str, *labels: str) -> SharedCells:
        """Return the cells of one series. If the counter memory is full, return throw-away cells so that counting never fails a request."""
        key = (family, *labels)
        if (found := self._cells.get(key)) is None:
            found = self._cells[key] = self._allocate(Series(family, labels).encode(), FAMILIES[family].cells)
        return found

    @property
    def has_peers(self) -> bool:
        """Whether there are other workers."""
        return bool(self._peers)

    def peer_cells(self, family: str, *labels: str) -> list[SharedCells | None]:
        """Return the cells of a series in each other worker, to be read; None if it does not exist there."""
        key = (family, *labels)
        if (found := self._peer_cells.get(key)) is None:
            name = Series(family, labels).encode()
            found = [each.find(name) for each in self._peers]
            if all(cells is not None for cells in found):
                self._peer_cells[key] = found
        return found

    def peer_series(self, family: str, label: str) -> Sequence[tuple[tuple[str, ...], SharedCells]]:
        """Return the other labels and the cells of the series of a family with this first label, in all other workers."""
        seen, found = self._peer_series.setdefault((family, label), ([0] * len(self._peers), []))
        prefix = Series(family, (label,)).encode()[:-1] + ","
        for number, each in enumerate(self._peers):
            for name in each.new_names(seen[number]):
                seen[number] += 1
                if name.startswith(prefix) and (cells := each.find(name)) is not None:
                    found.append((Series.decode(name).labels[1:], cells))
        return found

    def _allocate(self, name: str, count: int) -> SharedCells:
        try:
            return self._counters.cells(name, count)
        except SharedCountersFullError:
            if not self._dropped[0]:
                _log.error("the counter memory is full: new series of this worker are not in its metrics")
            self._dropped[0] += 1
            return memoryview(bytearray(8 * count)).cast("d")

    def create_series(self, snapshot: Snapshot) -> None:
        """Create the series that a configuration implies, so that their first increase is visible."""
        self._create("auth_failures_total", AUTH_REASONS.values())
        self._create("client_faults_total", CLIENT_FAULTS)
        self._create("log_lines_dropped_total")
        if snapshot.recording is not None:
            self._create("recorded_requests_total", RECORD_RESULTS)
        models = (*(model.id for model in snapshot.models if not model.split), OTHER)
        self._create("requests_total", models, ENDPOINTS, ["200"], [""])
        self._create("request_duration_seconds", models, ENDPOINTS[:1])
        self._create("incomplete_total", models, INCOMPLETE_REASONS)
        for name in _PER_MODEL:
            self._create(name, models)
        for model in snapshot.bases:
            for name in ("server_inflight", "server_ejected"):
                self._create(name, [model.id], [server.name for server in model.servers])
        ids = {name: model.id for model in snapshot.models for name in (model.id, *model.aliases)}
        for model in snapshot.models:
            self._create("fallbacks_total", [model.id], [ids[fallback] for fallback in model.fallbacks])
            self._create("split_requests_total", [model.id], [target for target, _ in model.split])
            if model.mirror is not None:
                self._create("mirrored_inflight_requests", [model.id], [model.mirror.to])
                self._create("mirrored_requests_total", [model.id], [model.mirror.to], MIRROR_RESULTS)

    def _create(self, family: str, *labels: Iterable[str]) -> None:
        """Create the series of a family for each combination of these label values."""
        for values in product(*labels):
            self.cells(family, *values)

    def in_flight(self, model: str) -> InflightGauge:
        """Return the gauge of a model's requests; each request holds it in a ``with``."""
        try:
            return self._in_flight[model]
        except KeyError:
            cells = self._in_flight[model] = InflightGauge(self.cells("inflight_requests", model))
            return cells

    def count_client_fault(self, reason: str) -> None:
        """Count a connection that is closed for a reason of ``CLIENT_FAULTS``."""
        self.cells("client_faults_total", reason)[0] += 1

    def count_record(self, result: str) -> None:
        """Count a request that was selected to be recorded."""
        self.cells("recorded_requests_total", result)[0] += 1

    def count_prediction(self, model: str, predicted: float, cached: int) -> None:
        """Count the cached tokens of a prompt, and their prediction."""
        self.cells("predicted_tokens_total", model, "predicted")[0] += predicted
        self.cells("predicted_tokens_total", model, "cached")[0] += cached

    def record_request(self, record: RequestRecord) -> None:
        """Count a finished request, once."""
        # Every request runs this: look-ups are subscripts and ``observe`` is inlined, since each step is counted (test_cost.py).
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
        if (key := record.key) is not None:
            if (usage := record.usage) is None:
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
            if record.continuations:
                self._count_continuations(record.continuations, model)
        if code is not None or record.incomplete is not None or record.failures or record.requested_model is not None:
            self._count_failures(record, model)
        if record.split is not None:
            self.cells("split_requests_total", record.split, model)[0] += 1

    def _outcome_cells(self, record: RequestRecord, model: str) -> tuple[SharedCells, SharedCells]:
        requests = self.cells("requests_total", model, record.endpoint, str(record.status), record.code or "")
        cells = (requests, self.cells("request_duration_seconds", model, record.endpoint))
        self._outcomes[model, record.endpoint, record.status, record.code] = cells
        return cells

    def _usage_cells(self, key: str, model: str, status: int) -> tuple[SharedCells, ...]:
        """Return the cells of a key's requests with a status, and of its tokens by ``_TOKEN_TYPES``."""
        tokens = (self.cells("tokens_total", key, model, kind) for kind in _TOKEN_TYPES)
        cells = self._uses[key, model, status] = (self.cells("key_requests_total", key, str(status)), *tokens)
        return cells

    def _count_stream(self, record: RequestRecord, model: str, gaps: ReadGapCounts) -> None:
        if record.first_token is not None:
            observe(self.cells("time_to_first_token_seconds", model), _FIRST_TOKEN, record.first_token)
        latencies = self.cells("inter_chunk_latency_seconds", model)
        for index, count in enumerate(gaps.counts):
            if count:
                latencies[index] += count
        latencies[-1] += gaps.total

    def _count_continuations(self, continuations: tuple[Continuation, ...], model: str) -> None:
        for each in continuations:
            self.cells("continuations_total", model, each.path, each.cause, each.outcome)[0] += 1
            self.cells("continuation_tokens_total", model, "lost")[0] += each.lost_tokens
            self.cells("continuation_tokens_total", model, "prompt")[0] += each.prompt_tokens
            if each.gap is not None:
                observe(self.cells("continuation_gap_seconds", model, each.path), _DURATION, each.gap)

    def _count_failures(self, record: RequestRecord, model: str) -> None:
        for owner, server, reason in record.failures:
            self.cells("server_failures_total", owner, server, reason)[0] += 1
        if record.retries:
            self.cells("retries_total", model)[0] += record.retries
        if record.requested_model is not None:
            self.cells("fallbacks_total", record.requested_model, model)[0] += 1
        if record.incomplete is not None:
            self.cells("incomplete_total", model, record.incomplete)[0] += 1
        if record.code is not None and record.code in AUTH_REASONS:
            self.cells("auth_failures_total", AUTH_REASONS[record.code])[0] += 1


class InflightGauge:
    """A gauge of the ``with`` blocks that hold it."""

    __slots__ = ("_cells",)

    def __init__(self, cells: SharedCells) -> None:
        self._cells = cells

    def __enter__(self) -> None:
        self._cells[0] += 1

    def __exit__(self, *_: object) -> None:
        self._cells[0] -= 1


class ReadGaps:
    """Times between the reads of one stream, counted once when it ends.

    ``more``: the number of events that came in a read after its first event.
    """

    __slots__ = ("_began", "counts", "last", "more")

    def __init__(self, now: float) -> None:
        self._began = self.last = now
        self.counts = [0] * len(CHUNK_GAPS)
        self.more = 0

    @property
    def events(self) -> int:
        """Number of events of the stream."""
        return 1 + sum(self.counts) + self.more

    @property
    def total(self) -> float:
        """Sum of all times between reads, in seconds."""
        return self.last - self._began

    def mark(self, now: float) -> None:
        """Count the time since the last read."""
        self.counts[bisect_left(CHUNK_GAPS, now - self.last)] += 1
        self.last = now


# Control's side


def sum_series(counters: Iterable[SharedCounters], families: Iterable[str] = ()) -> dict[Series, list[float]]:
    """Sum all series over all shared counters, cell by cell. ``families``: only those of these families, which have labels."""
    total: dict[Series, list[float]] = {}
    prefixes = tuple(f'["{family}",' for family in families) or ""
    for each in counters:
        for name, values in each.readings(prefixes):
            series = Series.decode(name)
            before = total.get(series)
            total[series] = [a + b for a, b in zip(before, values, strict=True)] if before else list(values)
    return total


def tokens_by_model(counters: Iterable[SharedCounters]) -> dict[str, ModelTokens]:
    """Return the tokens that each model has read and generated. No other series is read, so it is cheap."""
    total = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
    for each in counters:
        for name, values in each.readings('["tokens_total",'):
            _, model, kind = Series.decode(name).labels
            total[model][kind] += values[0]
    return {model: ModelTokens(tokens["prompt"], tokens["completion"]) for model, tokens in total.items()}


class CounterSums:
    """Sums of single series over all shared counters, for frequent reads: a read costs a few additions.

    ``by``: for each family, the label that its sums are by.
    """

    def __init__(self, counters: Sequence[SharedCounters], by: Mapping[str, int]) -> None:
        self._counters = counters
        self._by = by
        self._seen = [0] * len(counters)
        self._cells: dict[tuple[str, str], list[SharedCells]] = {}

    def sum(self, family: str, label: str) -> float:
        """Return the sum of the first cells of a family's series with this label."""
        self._find_new_series()
        return sum(cells[0] for cells in self._cells.get((family, label), ()))

    def _find_new_series(self) -> None:
        for number, each in enumerate(self._counters):
            for name in each.new_names(self._seen[number]):
                self._seen[number] += 1
                series = Series.decode(name)
                if series.family in self._by:
                    key = series.family, series.labels[self._by[series.family]]
                    self._cells.setdefault(key, []).append(each.cells(name, 1))


def by_family(series: Mapping[Series, Sequence[float]]) -> Iterator[tuple[str, Family, list[tuple[tuple[str, ...], Sequence[float]]]]]:
    """Return every family of ``FAMILIES`` in its order, with its series."""
    grouped: dict[str, list[tuple[tuple[str, ...], Sequence[float]]]] = {name: [] for name in FAMILIES}
    for one, values in series.items():
        grouped[one.family].append((one.labels, values))
    for name, family in FAMILIES.items():
        yield name, family, grouped[name]
