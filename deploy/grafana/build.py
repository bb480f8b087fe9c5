"""Generate the Grafana dashboards in this folder from the tables below: ``python deploy/grafana/build.py``.

The rules: a panel is a row of a table with its complete queries, so that each query can be run alone. A value with a good and a bad side
has thresholds, and a state has the same color in each panel. A test compares the files with the generated ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CONSOLE = "http://127.0.0.1:9090"
"""The default of the variable ``console``. The chart replaces it."""

GREEN, YELLOW, ORANGE, RED, BLUE, GRAY = "green", "yellow", "orange", "red", "blue", "#8e8e99"

Query = tuple[str, str]
"""PromQL, and the legend of its series."""
Steps = tuple[tuple[float, str], ...]
"""Thresholds: the color from a value on. Below the first value it is green, or the color of the ``floor``."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``unit`` is as Grafana calls it, ``says`` is for the reader, ``axis`` says what a plain number counts.

    ``states`` are the names and colors of single values.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    says: str
    kind: str = "timeseries"
    axis: str = ""
    steps: Steps = ()
    floor: str = GREEN
    most: float | None = None
    states: tuple[tuple[int, str, str], ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        return (4, 4) if self.kind == "stat" else (12, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. ``variables``: name and the query for its values."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


COLORS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    # the end of a legend; then patterns of its series, how Grafana colors them, and the color. A later pattern wins
    ("{{code}}", ((r"2\d\d$", "shades", GREEN), (r"3\d\d$", "shades", BLUE), (r"4\d\d$", "shades", YELLOW),
                  (r"499$", "fixed", GRAY), (r"5\d\d$", "shades", RED))),
    ("by {{reason}}", ((r"by client$", "shades", GRAY), (r"by drain$", "shades", ORANGE), (r"by upstream$", "shades", RED))),
    ("p99", ((r"^p50$", "fixed", "light-blue"), (r"^p95$", "fixed", BLUE), (r"^p99$", "fixed", "dark-purple"))),
    ("{{type}}", ((r"prompt$", "shades", BLUE), (r"(cached|predicted)$", "shades", "light-blue"), (r"completion$", "shades", "purple"),
                  (r"reasoning$", "shades", "dark-purple"))),
    ("{{outcome}}", ((r"ready$", "shades", GREEN), (r"(failed|restarts)$", "shades", RED))),
    ("{{result}}", ((r"completed$", "fixed", GREEN), (r"failed$", "fixed", RED), (r"(no_capacity|limit)$", "shades", YELLOW),
                    (r"drain$", "fixed", GRAY))),
    ("rows in memory", ((r"^written", "fixed", GREEN), (r"^lost|on disk$", "shades", ORANGE), (r"^dropped", "fixed", RED),
                        (r"in memory$", "fixed", BLUE))),
    ("replaced workers", ((r"applied$", "fixed", GREEN), (r"rejected$", "fixed", RED), (r"workers$", "fixed", ORANGE),
                          (r"lines$", "fixed", GRAY))),
)  # fmt: skip
"""Fixed colors of states, status classes and kinds. Other series are colored by their name, so a model has one color in all panels."""

_HERE = 'namespace=~"$namespace", release=~"$release"'
"""Kubernetes' labels. Series without them match the value All."""
_GATEWAY = f'{_HERE}, instance=~"$instance"'


def _of(*matchers: str, of: str = _GATEWAY) -> str:
    return f"{{{', '.join((of, *matchers))}}}"


_M, _S, _K = 'model=~"$model"', 'server=~"$server"', 'key=~"$key"'
_ALL, _MODEL, _BOTH, _KEY = _of(), _of(_M), _of(_M, _S), _of(_K)
_ENGINE = _of('job="vllm"', _M, _S, of=_HERE)


def _values(label: str, metric: str, selector: str) -> tuple[str, str]:
    return label, f"label_values({metric}{selector}, {label})"


_LOCATIONS = (
    _values("namespace", "vllm_gateway_build_info", ""),
    _values("release", "vllm_gateway_build_info", '{namespace=~"$namespace"}'),
    _values("instance", "vllm_gateway_build_info", f"{{{_HERE}}}"),
)
_MODELS = (*_LOCATIONS, _values("model", "vllm_gateway_inflight_requests", _ALL))
_SERVERS = (*_MODELS, _values("server", "vllm_gateway_server_up", _MODEL))
_KEYS = (*_LOCATIONS, _values("key", "vllm_gateway_key_requests_total", _ALL))


def _rate(metric: str, selector: str) -> str:
    return f"rate({metric}{selector}[$__rate_interval])"


def _hour(metric: str, selector: str = _ALL) -> str:
    return f"increase({metric}{selector}[1h])"


def _sum(by: str, vector: str) -> str:
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def _quantiles(metric: str, by: str, selector: str, *shares: float) -> tuple[Query, ...]:
    """Return the quantiles of a histogram, one query each."""
    buckets = _sum(f"{by}, le".removeprefix(", "), _rate(f"{metric}_bucket", selector))
    legend = "".join(f"{{{{{label}}}}} " for label in by.split(", ") if label)
    return tuple((f"histogram_quantile({share:g}, {buckets})", f"{legend}p{share * 100:g}") for share in shares or (0.5, 0.95))


def _beside(ours: str, theirs: str) -> tuple[Query, ...]:
    """Return a quantile of the gateway's, by model, and vLLM's own, by server."""
    (gateway, _), (engine, _) = *_quantiles(ours, "model", _MODEL, 0.95), *_quantiles(theirs, "server, instance", _ENGINE, 0.95)
    return (gateway, "{{model}} (gateway)"), (engine, _ENGINE_NAME)


_ENGINE_NAME = "{{server}} (vLLM, {{instance}})"
"""Two gateways may launch servers of the same name, so that only the instance tells them apart."""
_WORKER = "{{instance}} worker {{worker}}"
_LAG = _quantiles("vllm_gateway_worker_event_loop_lag_seconds", "instance, worker", _ALL, 0.99)[0][0]
_REQUESTS = _rate("vllm_gateway_requests_total", _MODEL)
_ERRORS = _rate("vllm_gateway_requests_total", _of(_M, 'error!=""'))
_INCOMPLETE = _rate("vllm_gateway_incomplete_total", _MODEL)
_FAILURES = " or ".join(
    (_rate("vllm_gateway_requests_total", _of(_M, 'code=~"5.."')), _rate("vllm_gateway_incomplete_total", _of(_M, 'reason!="client"')))
)
_USED = _of(_K, 'type=~"prompt|completion"')
_TOKENS = "vllm_gateway_tokens_total"
_FIRST = "vllm_gateway_time_to_first_token_seconds"
_CHUNKS = "vllm_gateway_inter_chunk_latency_seconds"
_READY = f"max by (namespace, release, model) (vllm_gateway_ready_servers{_MODEL})"
_LIMITED = _rate("vllm_gateway_limited_total", _KEY)
_KEY_REQUESTS = _rate("vllm_gateway_key_requests_total", _KEY)
_EXPIRES = f"min by (key) (vllm_gateway_key_expires_timestamp_seconds{_KEY}) - time()"


def _share(*matchers: str) -> str:
    return f"max by (holder, budget) (vllm_gateway_budget_used_ratio{_of(*matchers)})"


def _shares_by(level: str) -> Query:
    """Return the part of the service of a model's queue that each class, team or key got."""
    service = _rate("vllm_gateway_queue_service_total", _MODEL)
    return f"{_sum(f'model, {level}', service)} / on (model) group_left () ({_sum('model', service)} > 0)", f"{{{{model}}}} {{{{{level}}}}}"


def _mean_wait_by(level: str) -> Query:
    seconds, requests = (
        _sum(f"model, {level}", _rate(f"vllm_gateway_queue_{name}_total", _MODEL)) for name in ("wait_seconds", "requests")
    )
    return f"{seconds} / ({requests} > 0)", f"{{{{model}}}} {{{{{level}}}}}"


def _budgets(*matchers: str) -> tuple[Query, ...]:
    """Return the used shares of budgets, those that refuse requests and those that only warn."""
    return (_share(*matchers, _HARD), "{{holder}}: {{budget}}"), (_share(*matchers, 'soft="true"'), "{{holder}}: {{budget}} (soft)")


_HARD = 'soft="false"'
_LATE: Steps = ((1, YELLOW), (2.5, RED))
_FULL: Steps = ((0.8, YELLOW), (0.95, RED))
_BUDGET: Steps = ((0.8, YELLOW), (0.9, ORANGE), (1, RED))
_ANY: Steps = ((1, RED),)
_FEW: Steps = ((1, YELLOW), (10, RED))
_WEEK: Steps = ((86400, ORANGE), (7 * 86400, GREEN))
_UP_DOWN = ((0, "down", RED), (1, "up", GREEN))

OVERVIEW = Dashboard(
    "vllm-gateway-overview",
    "vllm-gateway / Overview",
    _MODELS,
    (
        Row("At a glance", (
            Panel("Requests", "reqps", ((_sum("", _REQUESTS), "requests"),), "Finished requests a second.", "stat", floor=BLUE),
            Panel("Failed", "percentunit", ((f"{_sum('', _FAILURES)} / {_sum('', _REQUESTS)}", "failed"),),
                  "Share of 5xx, and of responses that a server or a stop truncated. Yellow from the objective on, 0.1%.", "stat",
                  steps=((0.001, YELLOW), (0.01, RED))),
            Panel("First token, p95", "s", _quantiles(_FIRST, "", _MODEL, 0.95),
                  "95 of 100 streams start faster. Red from the objective on, 2.5 s.", "stat", steps=_LATE),
            Panel("Queued", "short", ((f"sum(vllm_gateway_queued_requests{_MODEL})", "queued"),),
                  "Requests that wait for a server or for capacity.", "stat", steps=_FEW),
            Panel("Models without a server", "short", ((f"count({_READY} == 0) or vector(0)", "models"),),
                  "Models without a ready server, also those that are stopped or asleep.", "stat", steps=_ANY),
            Panel("Firing alerts", "short", (('count(ALERTS{alertname=~"VllmGateway.+", alertstate="firing"}) or vector(0)', "alerts"),),
                  "Alerts of deploy/prometheus/rules.yaml, for all gateways of this Prometheus.", "stat", steps=_ANY),
        )),
        Row("Traffic", (
            Panel("Requests by status", "reqps", ((_sum("code", _REQUESTS), "{{code}}"),),
                  "Finished requests by HTTP status. 499: the client disconnected first."),
            Panel("Errors by code", "reqps", ((_sum("error", _ERRORS), "{{error}}"),),
                  "The codes are in docs/errors.md. A truncated stream has the status 200 and an error."),
            Panel("Tokens", "short", ((_sum("type", _rate(_TOKENS, _MODEL)), "{{type}}"),),
                  "Per second. cached is a part of prompt, reasoning of completion.", axis="tokens/s"),
            Panel("In flight and queued", "short",
                  ((_sum("model", f"vllm_gateway_inflight_requests{_MODEL}"), "{{model}} in flight"),
                   (_sum("model", f"vllm_gateway_queued_requests{_MODEL}"), "{{model}} queued")),
                  "Requests in flight include queued ones.", axis="requests"),
        )),
        Row("Latency", (
            Panel("Time to first token", "s", _quantiles(_FIRST, "", _MODEL, 0.5, 0.95, 0.99),
                  "Streams only, from the end of the request's headers. The objective is a p95 below 2.5 s.", steps=((2.5, RED),)),
            Panel("Duration", "s", _quantiles("vllm_gateway_request_duration_seconds", "", _MODEL, 0.5, 0.95, 0.99),
                  "Until the last byte of the response. It depends on the length of the responses, so it has no threshold."),
            Panel("Time in the gateway", "s", _quantiles("vllm_gateway_overhead_seconds", "", _ALL, 0.5, 0.99),
                  "Spent by the gateway itself, without waiting for clients or servers. Long times mean busy workers.",
                  steps=((0.1, YELLOW),)),
            Panel("Incomplete requests", "reqps", ((_sum("reason", _INCOMPLETE), "by {{reason}}"),),
                  "Requests without a complete response, by the side that ended them."),
        )),
        Row("Gateways", (
            Panel("Dependencies", "short", ((f"min by (dependency) (vllm_gateway_dependency_up{_ALL})", "{{dependency}}"),),
                  "Services that the gateways use. Down: for at least one gateway; /status shows the error.", "state-timeline",
                  states=_UP_DOWN),
            Panel("Gateways", "short", (("up" + _of('job="vllm-gateway"'), "{{instance}}"),),
                  "Down: Prometheus cannot read the admin port.", "state-timeline", states=_UP_DOWN),
            Panel("Events in an hour", "short",
                  ((_sum("", _hour("vllm_gateway_config_reloads_total", _of('outcome="success"'))), "reloads applied"),
                   (_sum("", _hour("vllm_gateway_config_reloads_total", _of('outcome="failure"'))), "reloads rejected"),
                   (_sum("", _hour("vllm_gateway_worker_restarts_total")), "replaced workers"),
                   (_sum("", _hour("vllm_gateway_log_lines_dropped_total")), "dropped access log lines")),
                  "Changes of the configuration, workers that ended unexpectedly, and access log lines that nothing read.",
                  axis="in the hour before"),
            Panel("Versions", "short", ((f"sum by (version, core) (vllm_gateway_build_info{_ALL})", "{{version}} ({{core}})"),),
                  "Number of gateways by version and core. Two versions at a time are normal during an upgrade.", axis="gateways"),
        )),
        Row("Workers", (
            Panel("CPU", "percentunit", ((_rate("vllm_gateway_worker_cpu_seconds_total", _ALL), _WORKER),),
                  "100% is one core, the maximum of a worker. Add workers or gateways before.", steps=_FULL),
            Panel("Memory", "bytes", ((f"vllm_gateway_worker_resident_memory_bytes{_ALL}", _WORKER),),
                  "Resident memory. It depends on streams and bodies; it should return to its level after a peak."),
            Panel("Event loop lag, p99", "s", ((_LAG, _WORKER),),
                  "The worker delays each of its requests by about as much.", steps=((0.1, YELLOW), (0.5, RED))),
            Panel("File descriptors in use", "percentunit",
                  ((f"vllm_gateway_worker_open_fds{_ALL} / vllm_gateway_worker_max_fds{_ALL}", _WORKER),),
                  "Each connection needs one. Without free ones, idle clients are disconnected and connections refused.", steps=_FULL),
        )),
    ),
)  # fmt: skip

MODELS = Dashboard(
    "vllm-gateway-models",
    "vllm-gateway / Models and servers",
    _SERVERS,
    (
        Row("Servers", (
            Panel("Servers", "short",
                  ((f"vllm_gateway_server_up{_BOTH} - vllm_gateway_server_out_of_rotation{_BOTH}", "{{server}} ({{instance}})"),),
                  "Out of rotation: stopped, asleep or draining by the gateway itself.", "state-timeline",
                  states=((-1, "out of rotation", BLUE), *_UP_DOWN)),
            Panel("In flight, by server", "short", ((f"vllm_gateway_server_inflight{_BOTH}", "{{server}} ({{instance}})"),),
                  "Requests of each gateway on each server. Servers of one model should have about as many.", axis="requests"),
            Panel("Failed attempts", "reqps",
                  ((_sum("server, reason", _rate("vllm_gateway_server_failures_total", _BOTH)), "{{server}} {{reason}}"),
                   (_sum("model", _rate("vllm_gateway_retries_total", _MODEL)), "{{model}} sent again")),
                  "Attempts that failed, also those followed by a successful retry. The reasons are in docs/metrics.md."),
            Panel("Continued streams", "short",
                  ((_sum("model, cause, outcome", _rate("vllm_gateway_continuations_total", _MODEL)) + " > 0",
                    "{{model}} {{cause}}: {{outcome}}"),),
                  "Streams a second whose server was lost or drained, and whether another one continued them.", axis="streams"),
            Panel("Ejected servers", "short", ((f"vllm_gateway_server_ejected{_BOTH}", "{{server}} ({{instance}})"),),
                  "Number of workers that skip the server because it keeps failing.", axis="workers", steps=((1, YELLOW),)),
        )),
        Row("Requests", (
            Panel("Requests", "reqps", ((f"{_sum('model, endpoint', _REQUESTS)} > 0", "{{model}} {{endpoint}}"),),
                  "Finished requests by model and route."),
            Panel("Status", "reqps", ((_sum("model, code", _REQUESTS) + " > 0", "{{model}} {{code}}"),),
                  "By HTTP status. `other` is without a model that the key may use."),
            Panel("Errors by code", "reqps", ((_sum("model, error", _ERRORS), "{{model}} {{error}}"),),
                  "The codes are in docs/errors.md."),
            Panel("Incomplete requests", "reqps", ((_sum("model, reason", _INCOMPLETE) + " > 0", "{{model}} by {{reason}}"),),
                  "Requests without a complete response, by the side that ended them."),
        )),
        Row("Latency and queues", (
            Panel("Time to first token", "s", _quantiles(_FIRST, "model", _MODEL),
                  "Streams only, queue included. The objective is a p95 below 2.5 s.", steps=((2.5, RED),)),
            Panel("Inter-chunk latency", "s", _quantiles(_CHUNKS, "model", _MODEL),
                  "Time between two reads of a stream; a read can contain several tokens. Above 0.2 s, text visibly stutters.",
                  steps=((0.2, YELLOW),)),
            Panel("Queued", "short", ((_sum("model", f"vllm_gateway_queued_requests{_MODEL}"), "{{model}}"),),
                  "Requests in the queue: they wait for a server or for capacity. From ten on, a growing queue fires an alert.",
                  axis="requests", steps=((10, YELLOW),)),
            Panel("Starts", "short",
                  ((_sum("model, outcome", _hour("vllm_gateway_launches_total", _MODEL)), "{{model}} {{outcome}}"),
                   (_sum("server", _hour("vllm_gateway_server_restarts_total", _BOTH)) + " > 0", "{{server}} restarts")),
                  "Finished starts of launched servers, and starts after the first.", axis="in the hour before"),
        )),
        Row("Fairness", (
            Panel("Share of the service, by class", "percentunit", (_shares_by("class"),),
                  "Weighted tokens of keys that waited. Classes that wait get shares by weight; a strict class takes what it needs.",
                  most=1),
            Panel("Share of the service, by team", "percentunit", (_shares_by("team"),),
                  "Teams that wait get shares by weight. The series without a team has the keys without one, together.", most=1),
            Panel("Share of the service, by key", "percentunit", (_shares_by("key"),),
                  "Keys of one team divide its share by priority. A key that does not wait gets what it needs.", most=1),
            Panel("Waiting requests, by key", "short",
                  ((_sum("model, key", f"vllm_gateway_queue_waiting_requests{_MODEL}"), "{{model}} {{key}}"),),
                  "A key that sends many requests waits with them. An alert fires if it waits and is not served.", axis="requests"),
            Panel("Mean wait, by class", "s", (_mean_wait_by("class"),),
                  "Of requests that left the queue for a server. Long waits of a class after a strict one: give it an aging.",
                  steps=((10, YELLOW), (30, RED))),
            Panel("Mean wait, by team", "s", (_mean_wait_by("team"),),
                  "A team waits longer than others if it sends more than its share. Requests that did not wait are not counted.",
                  steps=((10, YELLOW), (30, RED))),
        )),
        Row("Fallbacks, splits and mirrors", (
            Panel("Fallbacks and splits", "reqps",
                  ((_sum("model, fallback", _rate("vllm_gateway_fallbacks_total", _MODEL)), "{{model}} served by {{fallback}}"),
                   (_sum("split, model", _rate("vllm_gateway_split_requests_total", _MODEL)), "{{split}} served by {{model}}")),
                  "Requests that another model served: a fallback, or a model of a split."),
            Panel("Mirrored requests", "reqps",
                  ((_sum("to, result", _rate("vllm_gateway_mirrored_requests_total", _MODEL)), "to {{to}}, {{result}}"),),
                  "Copies of requests by their result. They do not affect the clients."),
        )),
    ),
)  # fmt: skip

KEYS = Dashboard(
    "vllm-gateway-keys",
    "vllm-gateway / Keys, budgets and cost",
    _KEYS,
    (
        Row("At a glance", (
            Panel("Active keys", "short", ((f"count({_sum('key', _KEY_REQUESTS)} > 0) or vector(0)", "keys"),),
                  "Keys with requests in the last minutes.", "stat", floor=BLUE),
            Panel("Tokens in a day", "short", ((_sum("", f"increase({_TOKENS}{_USED}[1d])"), "tokens"),),
                  "Prompt and completion tokens of the last 24 hours.", "stat", floor=BLUE),
            Panel("Rejected by a limit", "percentunit", ((f"{_sum('', _LIMITED)} / {_sum('', _KEY_REQUESTS)}", "rejected"),),
                  "Share of the keys' requests.", "stat", steps=((0.05, YELLOW), (0.2, ORANGE))),
            Panel("Fullest budget", "percentunit", ((f"max({_share(_HARD)})", "used"),),
                  "The most used budget that refuses requests. It does so from 100% on.", "stat", steps=_BUDGET),
            Panel("Budgets above 90%", "short", ((f"count({_share()} >= 0.9) or vector(0)", "budgets"),), "Soft budgets included.", "stat",
                  steps=((1, ORANGE),)),
            Panel("Next expiry of a key", "s", ((f"min({_EXPIRES})", "time left"),),
                  "Red within a day, orange within a week. Keys without an expiry do not count.", "stat", steps=_WEEK, floor=RED),
        )),
        Row("Use", (
            Panel("Requests", "reqps", ((_sum("key, code", _KEY_REQUESTS), "{{key}} {{code}}"),),
                  "Finished requests of each key, on all routes, by HTTP status."),
            Panel("Tokens", "short", ((_sum("key, type", _rate(_TOKENS, _USED)), "{{key}} {{type}}"),),
                  "Per second, by the server's own usage.", axis="tokens/s"),
            Panel("Tokens in a day", "short", ((_sum("key", f"increase({_TOKENS}{_USED}[1d])"), "{{key}}"),),
                  "Prompt and completion tokens of the 24 hours before.", axis="tokens"),
            Panel("Models used", "short", ((_sum("key, model", _rate(_TOKENS, _USED)), "{{key}} {{model}}"),),
                  "Tokens of each key by model.", axis="tokens/s"),
            Panel("Cached prompt tokens", "percentunit",
                  ((" / ".join(_sum("key", _rate(_TOKENS, _of(_K, f'type="{kind}"'))) for kind in ("cached", "prompt")), "{{key}}"),),
                  "Share of the prompt that the server had cached. vLLM reports it only with enable-prompt-tokens-details.", most=1),
            Panel("Time until keys expire", "s", ((_EXPIRES, "{{key}}"),),
                  "An alert fires a week before. Keys without an expiry are left out.", steps=_WEEK, floor=RED),
        )),
        Row("Budgets", (
            Panel("Used share of budgets", "percentunit", _budgets(),
                  "Of all keys and teams, now. From 100% on requests are refused, unless the budget is soft.", "bargauge", steps=_BUDGET,
                  most=1),
            Panel("Use of token budgets", "percentunit", _budgets('budget=~"tokens.+"'),
                  "The course of the use. It falls when a window begins or moves on.", steps=_BUDGET),
        )),
        Row("Cost", (
            Panel("Use of cost budgets", "percentunit", _budgets('budget=~"cost.+"'),
                  "Only budgets of cost, in shares. `vllm-gateway usage` and the console show the amounts, which are no metrics.",
                  steps=_BUDGET),
            Panel("Ledger", "short",
                  ((_sum("outcome", _rate("vllm_gateway_ledger_rows_total", _ALL)), "{{outcome}} a second"),
                   (f"sum(vllm_gateway_ledger_spool_rows{_ALL})", "rows on disk"),
                   (f"sum(vllm_gateway_ledger_memory_rows{_ALL})", "rows in memory")),
                  "The rows that costs are computed from. Dropped rows never reach the database. Only with `ledger`.", axis="rows"),
        )),
        Row("Teams", (
            Panel("Use of team budgets", "percentunit", _budgets('holder=~"team .+"'),
                  "Each team's keys use its budgets together.", steps=_BUDGET),
            Panel("End users with their own limits", "short", ((f"sum by (holder) (vllm_gateway_limited_users{_ALL})", "{{holder}}"),),
                  "End users of a key or team that are counted separately. Only with `limits.per_user`.", axis="end users"),
        )),
        Row("Rejections", (
            Panel("Rejected by a limit", "reqps", ((_sum("key, reason", _LIMITED), "{{key}} {{reason}}"),),
                  "By key and limit, those of its team included."),
            Panel("Rejected for their key", "reqps", ((_sum("reason", _rate("vllm_gateway_auth_failures_total", _ALL)), "{{reason}}"),),
                  "An alert fires above one a second, if there are five times as many as in the hour before.", steps=((1, YELLOW),)),
            Panel("Connections closed because of the client", "ops",
                  ((_sum("reason", _rate("vllm_gateway_client_faults_total", _ALL)), "{{reason}}"),),
                  "Invalid, slow or too many connections. The reasons are in docs/metrics.md."),
        )),
    ),
)  # fmt: skip

ENGINE = Dashboard(
    "vllm-gateway-engine",
    "vllm-gateway / vLLM and the gateway",
    _SERVERS,
    (
        Row("Load", (
            Panel("Requests", "short",
                  ((_sum("server, instance", f"vllm_gateway_server_inflight{_BOTH}"), "{{server}} in flight ({{instance}})"),
                   (_sum("server, instance", f"vllm:num_requests_running{_ENGINE}"), "{{server}} running (vLLM, {{instance}})"),
                   (_sum("server, instance", f"vllm:num_requests_waiting{_ENGINE}"), "{{server}} waiting (vLLM, {{instance}})")),
                  "Requests in flight that neither run nor wait in vLLM are in transit.", axis="requests"),
            Panel("KV cache use", "percentunit", ((f"max by (server, instance) (vllm:kv_cache_usage_perc{_ENGINE})", _ENGINE_NAME),),
                  "A full cache makes requests wait, and preempts running ones.", steps=_FULL, most=1),
            Panel("Tokens generated", "short",
                  ((_sum("model", _rate(_TOKENS, _of(_M, 'type="completion"'))), "{{model}} (gateway)"),
                   (_sum("server, instance", _rate("vllm:generation_tokens_total", _ENGINE)), _ENGINE_NAME)),
                  "Per second. The gateway counts when a response finishes, vLLM during generation.", axis="tokens/s"),
            Panel("Finished and preempted requests", "reqps",
                  ((_sum("server, finished_reason", _rate("vllm:request_success_total", _ENGINE)) + " > 0",
                    "{{server}} {{finished_reason}}"),
                   (_sum("server", _rate("vllm:num_preemptions_total", _ENGINE)), "{{server}} preempted")),
                  "By vLLM's own counters. Preempted requests are computed again: the KV cache is too small for the load."),
        )),
        Row("Latency", (
            Panel("Time to first token, p95", "s", _beside(_FIRST, "vllm:time_to_first_token_seconds"),
                  "Both have the same buckets. vLLM counts every request, the gateway only streams.", steps=((2.5, RED),)),
            Panel("Inter-chunk latency, p95", "s", _beside(_CHUNKS, "vllm:inter_token_latency_seconds"),
                  "vLLM's time between two tokens. The gateway measures between two reads, which can contain several.",
                  steps=((0.2, YELLOW),)),
            Panel("Time in vLLM's queue, p95", "s",
                  ((_quantiles("vllm:request_queue_time_seconds", "server, instance", _ENGINE, 0.95)[0][0], _ENGINE_NAME),),
                  "A part of the time to first token. With `max_inflight`, requests wait in the gateway instead.", steps=_LATE),
        )),
        Row("Prefix cache", (
            Panel("Prefix cache hits", "percentunit",
                  ((" / ".join(_sum("server, instance", _rate(f"vllm:prefix_cache_{what}_total", _ENGINE)) for what in ("hits", "queries")),
                    _ENGINE_NAME),),
                  "Share of prompt tokens that vLLM found in its cache. Conversations with long histories should have many.", most=1),
            Panel("Cached prompt tokens, predicted and reported", "short",
                  ((_sum("model, type", _rate("vllm_gateway_predicted_tokens_total", _MODEL)), "{{model}} {{type}}"),),
                  "Only with `balance: cost`. More predicted than cached tokens: servers evict blocks, or others use them.",
                  axis="tokens/s"),
            Panel("Blocks in the prefix index", "short", ((f"max by (model) (vllm_gateway_prefix_index_blocks{_MODEL})", "{{model}}"),),
                  "The largest index of all workers. At a million blocks for a model, the oldest are forgotten.", axis="blocks",
                  steps=((1000000, YELLOW),)),
            Panel("Unbilled tokens", "short",
                  ((f"max by (model, reason) ({_hour('vllm_gateway_unbilled_tokens_total', _MODEL)})", "{{model}} {{reason}}"),),
                  "Counted by vLLM and not in the ledger. direct_use means requests that bypass the gateway; an alert fires above 1,000.",
                  axis="in the hour before"),
        )),
    ),
)  # fmt: skip

DASHBOARDS = {"overview.json": OVERVIEW, "models.json": MODELS, "keys.json": KEYS, "engine.json": ENGINE}

ANNOTATIONS: tuple[tuple[str, str, str, str], ...] = (
    # name, color, query, the text of an event
    ("Firing alerts", RED, 'ALERTS{alertname=~"VllmGateway.+", alertstate="firing"}', "{{alertname}} {{model}} {{server}} {{holder}}"),
    (
        "Configuration changes",
        BLUE,
        f"sum by (instance, outcome) (increase(vllm_gateway_config_reloads_total{_ALL}[$__rate_interval])) > 0",
        "configuration: {{outcome}} ({{instance}})",
    ),
    (
        "Versions",
        "purple",
        f"sum by (version) (vllm_gateway_build_info{_ALL}) unless sum by (version) (vllm_gateway_build_info{_ALL} offset 5m)",
        "a gateway has version {{version}}",
    ),
)


def made(dashboard: Dashboard) -> str:
    """Return a dashboard as the JSON that Grafana imports."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["vllm-gateway"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "Dashboards", "tags": ["vllm-gateway"], "includeVars": True, "keepTime": True},
            {"type": "link", "title": "Console", "url": "${console:raw}/console", "icon": "external link", "targetBlank": True},
        ],
        "annotations": {"list": [_annotation(*each) for each in ANNOTATIONS]},
        "templating": {"list": [_datasource(), *(_variable(name, query) for name, query in dashboard.variables), _console()]},
    }
    head = json.dumps(document, indent=1).removesuffix("\n}")
    panels = ",\n".join(f"  {json.dumps(panel)}" for panel in _panels(dashboard))  # a line for each, so that a change is one line
    return f'{head},\n "panels": [\n{panels}\n ]\n}}\n'


def _annotation(name: str, color: str, query: str, text: str) -> dict[str, Any]:
    return {"name": name, "datasource": _SOURCE, "enable": True, "iconColor": color, "expr": query, "step": "60s", "titleFormat": text}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _console() -> dict[str, Any]:
    value = {"text": CONSOLE, "value": CONSOLE}
    return {"name": "console", "type": "textbox", "label": "Admin port", "query": CONSOLE, "current": value, "options": [value]}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Arrange the rows below one another, and the panels of each from left to right."""
    number = y = 0
    for row in dashboard.rows:
        number += 1
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1}}
        x, y = 0, y + 1
        for panel in row.panels:
            width, height = panel.size
            if x + width > _WIDTH:
                x, y = 0, y + height
            number += 1
            yield _panel(number, panel, {"x": x, "y": y, "w": width, "h": height})
            x += width
        y += height


def _panel(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "gridPos": position,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": [_override(*color) for color in colors_of(panel)]},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": query, "legendFormat": legend, "instant": panel.kind == "bargauge"}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


_VALUE = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"colorMode": "value", "graphMode": "area", "textMode": "value", "reduceOptions": _VALUE},
    "bargauge": {"displayMode": "basic", "orientation": "horizontal", "valueMode": "color", "reduceOptions": _VALUE},
    "state-timeline": {
        "mergeValues": True,
        "showValue": "auto",
        "rowHeight": 0.8,
        "legend": {"displayMode": "list", "placement": "bottom"},
    },
}


def _defaults(panel: Panel) -> dict[str, Any]:
    """Return the unit, the thresholds and the colors of a panel."""
    by_value = panel.kind != "timeseries"
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if by_value else "palette-classic-by-name"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": None, "color": panel.floor}, *({"value": value, "color": color} for value, color in panel.steps)],
        },
    }
    if panel.states:
        named = {str(value): {"text": text, "color": color} for value, text, color in panel.states}
        return {**defaults, "mappings": [{"type": "value", "options": named}], "custom": {"fillOpacity": 80, "lineWidth": 0}}
    if panel.kind == "timeseries":
        style = "dashed" if panel.steps else "off"
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "axisLabel": panel.axis, "thresholdsStyle": {"mode": style}}
    return {**defaults, "min": 0, **({} if panel.most is None else {"max": panel.most})}


def colors_of(panel: Panel) -> list[tuple[str, str, str]]:
    """Return the fixed colors of the series that a panel has."""
    return [color for end, colors in COLORS if any(legend.endswith(end) for _, legend in panel.queries) for color in colors]


def _override(pattern: str, mode: str, color: str) -> dict[str, Any]:
    value = {"mode": mode, "fixedColor": color}
    return {"matcher": {"id": "byRegexp", "options": f"/{pattern}/"}, "properties": [{"id": "color", "value": value}]}


if __name__ == "__main__":
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(made(dashboard))
