"""Generate the Grafana dashboards in this folder from the tables below: ``python deploy/grafana/build.py``.

The rule: a panel is a row of a table with its complete queries, so that each query can be run alone. A test compares the files
with the generated ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
_WIDTH, _HEIGHT, _STAT_HEIGHT = 24, 8, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


Query = tuple[str, str]
"""PromQL, and the legend of its series."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``unit`` is as Grafana calls it; ``says``: for the reader."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    says: str = ""
    stat: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return (6, _STAT_HEIGHT) if self.stat else (12, _HEIGHT)


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. ``variables``: name and the query for its values."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    panels: tuple[Panel, ...]


def _rate(metric: str, selector: str) -> str:
    return f"rate({metric}{selector}[$__rate_interval])"


def _sum(by: str, vector: str) -> str:
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def _quantiles(metric: str, by: str, selector: str, *shares: float) -> tuple[Query, ...]:
    """Return the quantiles of a histogram, one query each."""
    buckets = _sum(f"{by}, le".removeprefix(", "), _rate(f"{metric}_bucket", selector))
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple((f"histogram_quantile({share:g}, {buckets})", f"{legend}p{share * 100:g}") for share in shares or (0.5, 0.95))


def _beside(ours: str, theirs: str) -> tuple[Query, ...]:
    """Return a quantile of the gateway's, by model, and vLLM's own, by server."""
    (gateway, _), (engine, _) = *_quantiles(ours, "model", _MODEL, 0.95), *_quantiles(theirs, "server", _ENGINE, 0.95)
    return (gateway, "{{model}} (gateway)"), (engine, "{{server}} (vLLM)")


_MODEL = '{model=~"$model"}'
_BOTH = '{model=~"$model", server=~"$server"}'
_KEY = '{key=~"$key"}'
_ENGINE = '{job="vllm", model=~"$model", server=~"$server"}'

_MODELS = ("model", "label_values(vllm_gateway_inflight_requests, model)")
_SERVERS = ("server", 'label_values(vllm_gateway_server_up{model=~"$model"}, server)')
_KEYS = ("key", "label_values(vllm_gateway_key_requests_total, key)")

_REQUESTS = _rate("vllm_gateway_requests_total", _MODEL)
_ERRORS = _rate("vllm_gateway_requests_total", '{model=~"$model", error!=""}')
_INCOMPLETE = _rate("vllm_gateway_incomplete_total", _MODEL)
_FAILURES = " or ".join(
    (
        _rate("vllm_gateway_requests_total", '{model=~"$model", code=~"5.."}'),
        _rate("vllm_gateway_incomplete_total", '{model=~"$model", reason!="client"}'),
    )
)
_USED = '{key=~"$key", type=~"prompt|completion"}'
_TOKENS = "vllm_gateway_tokens_total"
_CACHE = ("hits_total", "queries_total")

OVERVIEW = Dashboard(
    "vllm-gateway-overview",
    "vllm-gateway / Overview",
    (_MODELS,),
    (
        Panel("Requests a second", "reqps", ((_sum("", _REQUESTS), ""),), stat=True),
        Panel(
            "Failed",
            "percentunit",
            ((f"{_sum('', _FAILURES)} / {_sum('', _REQUESTS)}", ""),),
            "5xx, and responses that a server or a stop truncated.",
            stat=True,
        ),
        Panel("Requests in flight", "short", ((f"sum(vllm_gateway_inflight_requests{_MODEL})", ""),), stat=True),
        Panel("Ready servers", "short", ((f"sum(vllm_gateway_ready_servers{_MODEL})", ""),), stat=True),
        Panel("Requests by status", "reqps", ((_sum("code", _REQUESTS), "{{code}}"),), "499: the client disconnected first."),
        Panel(
            "Tokens a second",
            "short",
            ((_sum("type", _rate(_TOKENS, _MODEL)), "{{type}}"),),
            "cached is a part of prompt, reasoning of completion.",
        ),
        Panel(
            "Time to first token",
            "s",
            _quantiles("vllm_gateway_time_to_first_token_seconds", "", _MODEL, 0.5, 0.95, 0.99),
            "Streams only.",
        ),
        Panel("Duration", "s", _quantiles("vllm_gateway_request_duration_seconds", "", _MODEL, 0.5, 0.95, 0.99)),
        Panel(
            "In flight and queued",
            "short",
            (
                (_sum("model", f"vllm_gateway_inflight_requests{_MODEL}"), "{{model}} in flight"),
                (_sum("model", f"vllm_gateway_queued_requests{_MODEL}"), "{{model}} queued"),
            ),
        ),
        Panel("Time in the gateway", "s", _quantiles("vllm_gateway_overhead_seconds", "", "", 0.5, 0.99)),
        Panel("Incomplete requests", "reqps", ((_sum("reason", _INCOMPLETE), "by {{reason}}"),)),
        Panel("Errors by code", "reqps", ((_sum("error", _ERRORS), "{{error}}"),), "The codes are in docs/errors.md."),
        Panel(
            "Dependencies",
            "short",
            (("min by (dependency) (vllm_gateway_dependency_up)", "{{dependency}}"),),
            "1: works. 0: down; /status shows the error.",
        ),
        Panel(
            "Gateway",
            "short",
            (
                ("vllm_gateway_config_last_reload_successful", "configuration applied"),
                ("increase(vllm_gateway_config_reloads_total[1h])", "reloads in an hour: {{outcome}}"),
                ("increase(vllm_gateway_worker_restarts_total[1h])", "workers replaced in an hour"),
                ("increase(vllm_gateway_log_lines_dropped_total[1h])", "dropped access log lines in an hour"),
                ("vllm_gateway_build_info", "version {{version}}"),
            ),
        ),
        Panel(
            "Workers: CPU",
            "percentunit",
            ((_rate("vllm_gateway_worker_cpu_seconds_total", ""), "{{instance}} worker {{worker}}"),),
            "100% is one core, the maximum of a worker.",
        ),
        Panel("Workers: memory", "bytes", (("vllm_gateway_worker_resident_memory_bytes", "{{instance}} worker {{worker}}"),)),
        Panel(
            "Workers: event loop lag, p99",
            "s",
            _quantiles("vllm_gateway_worker_event_loop_lag_seconds", "worker", "", 0.99),
            "The worker delays each of its requests by about as much.",
        ),
        Panel(
            "Workers: file descriptors in use",
            "percentunit",
            (("vllm_gateway_worker_open_fds / vllm_gateway_worker_max_fds", "{{instance}} worker {{worker}}"),),
        ),
    ),
)

MODELS = Dashboard(
    "vllm-gateway-models",
    "vllm-gateway / Models and servers",
    (_MODELS, _SERVERS),
    (
        Panel("Requests", "reqps", ((f"{_sum('model, endpoint', _REQUESTS)} > 0", "{{model}} {{endpoint}}"),)),
        Panel("Status", "reqps", ((_sum("model, code", _REQUESTS), "{{model}} {{code}}"),)),
        Panel("Errors by code", "reqps", ((_sum("model, error", _ERRORS), "{{model}} {{error}}"),), "The codes are in docs/errors.md."),
        Panel("In flight, by server", "short", ((f"vllm_gateway_server_inflight{_BOTH}", "{{server}}"),)),
        Panel(
            "Up",
            "short",
            (
                (f"vllm_gateway_server_up{_BOTH}", "{{server}}"),
                (f"-vllm_gateway_server_out_of_rotation{_BOTH}", "{{server}} out of rotation"),
            ),
            "1: accepts requests. -1: stopped, asleep or draining by the gateway itself.",
        ),
        Panel("Time to first token", "s", _quantiles("vllm_gateway_time_to_first_token_seconds", "model", _MODEL)),
        Panel(
            "Inter-chunk latency",
            "s",
            _quantiles("vllm_gateway_inter_chunk_latency_seconds", "model", _MODEL),
            "Time between two reads of a stream; a read can contain several tokens.",
        ),
        Panel(
            "Queued",
            "short",
            ((f"vllm_gateway_queued_requests{_MODEL}", "{{model}}"),),
            "Requests in the queue: they wait for a server or for capacity.",
        ),
        Panel(
            "Failed attempts",
            "reqps",
            (
                (_sum("server, reason", _rate("vllm_gateway_server_failures_total", _BOTH)), "{{server}} {{reason}}"),
                (_sum("model", _rate("vllm_gateway_retries_total", _MODEL)), "{{model}} sent again"),
            ),
        ),
        Panel("Incomplete requests", "reqps", ((_sum("model, reason", _INCOMPLETE), "{{model}} by {{reason}}"),)),
        Panel(
            "Ejected servers and fallbacks",
            "short",
            (
                (f"vllm_gateway_server_ejected{_BOTH}", "{{server}} ejected"),
                (_sum("model, fallback", _rate("vllm_gateway_fallbacks_total", _MODEL)), "{{model}} served by {{fallback}}"),
            ),
            "Number of workers that skip a server because it keeps failing; requests a second that a fallback served.",
        ),
        Panel(
            "Splits and mirrors",
            "reqps",
            (
                (_sum("split, model", _rate("vllm_gateway_split_requests_total", _MODEL)), "{{split}} served by {{model}}"),
                (_sum("to, result", _rate("vllm_gateway_mirrored_requests_total", _MODEL)), "copies for {{to}} {{result}}"),
            ),
            "Requests for a split by the model that served them; copies of requests by result.",
        ),
        Panel(
            "Starts",
            "short",
            (
                (f"increase(vllm_gateway_launches_total{_MODEL}[1h])", "{{model}} {{outcome}}"),
                (f"increase(vllm_gateway_server_restarts_total{_BOTH}[1h])", "{{server}} restarts"),
            ),
            "In an hour.",
        ),
    ),
)

KEYS = Dashboard(
    "vllm-gateway-keys",
    "vllm-gateway / Keys and limits",
    (_KEYS,),
    (
        Panel("Requests", "reqps", ((_sum("key, code", _rate("vllm_gateway_key_requests_total", _KEY)), "{{key}} {{code}}"),)),
        Panel("Tokens a second", "short", ((_sum("key, type", _rate(_TOKENS, _USED)), "{{key}} {{type}}"),)),
        Panel("Tokens in a day", "short", ((_sum("key", f"increase({_TOKENS}{_USED}[1d])"), "{{key}}"),)),
        Panel(
            "Cached prompt tokens",
            "percentunit",
            (
                (
                    " / ".join(_sum("key", _rate(_TOKENS, f'{{key=~"$key", type="{kind}"}}')) for kind in ("cached", "prompt")),
                    "{{key}}",
                ),
            ),
            "vLLM reports it only with enable-prompt-tokens-details.",
        ),
        Panel("Models used", "short", ((_sum("key, model", _rate(_TOKENS, _USED)), "{{key}} {{model}}"),), "Tokens a second."),
        Panel("Rejected by a limit", "reqps", ((_sum("key, reason", _rate("vllm_gateway_limited_total", _KEY)), "{{key}} {{reason}}"),)),
        Panel(
            "Used share of budgets",
            "percentunit",
            (("max by (holder, budget, soft) (vllm_gateway_budget_used_ratio)", "{{holder}} {{budget}} (soft: {{soft}})"),),
            "Of all keys and teams with budgets. From 100% on requests are refused, unless the budget is soft.",
        ),
        Panel("Rejected for their key", "reqps", ((_sum("reason", _rate("vllm_gateway_auth_failures_total", "")), "{{reason}}"),)),
        Panel(
            "Connections closed because of the client",
            "ops",
            ((_sum("reason", _rate("vllm_gateway_client_faults_total", "")), "{{reason}}"),),
        ),
        Panel(
            "Ledger",
            "short",
            (
                (_sum("outcome", _rate("vllm_gateway_ledger_rows_total", "")), "{{outcome}} a second"),
                ("vllm_gateway_ledger_spool_rows", "rows on disk"),
                ("vllm_gateway_ledger_memory_rows", "rows in memory"),
            ),
            "Only with `ledger`.",
        ),
        Panel("Time until keys expire", "s", (("vllm_gateway_key_expires_timestamp_seconds - time()", "{{key}}"),)),
    ),
)

ENGINE = Dashboard(
    "vllm-gateway-engine",
    "vllm-gateway / vLLM and the gateway",
    (_MODELS, _SERVERS),
    (
        Panel(
            "Requests",
            "short",
            (
                (f"vllm_gateway_server_inflight{_BOTH}", "{{server}} in flight (gateway)"),
                (_sum("server", f"vllm:num_requests_running{_ENGINE}"), "{{server}} running (vLLM)"),
                (_sum("server", f"vllm:num_requests_waiting{_ENGINE}"), "{{server}} waiting (vLLM)"),
            ),
            "Requests in flight that neither run nor wait in vLLM are in transit.",
        ),
        Panel("KV cache use", "percentunit", ((f"max by (server) (vllm:kv_cache_usage_perc{_ENGINE})", "{{server}}"),)),
        Panel(
            "Time to first token, p95",
            "s",
            _beside("vllm_gateway_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
            "Both have the same buckets. vLLM counts every request, the gateway only streams.",
        ),
        Panel("Inter-chunk latency, p95", "s", _beside("vllm_gateway_inter_chunk_latency_seconds", "vllm:inter_token_latency_seconds")),
        Panel(
            "Tokens generated a second",
            "short",
            (
                (_sum("model", _rate(_TOKENS, '{model=~"$model", type="completion"}')), "{{model}} (gateway)"),
                (_sum("server", _rate("vllm:generation_tokens_total", _ENGINE)), "{{server}} (vLLM)"),
            ),
            "The gateway counts when a response finishes, vLLM during generation.",
        ),
        Panel(
            "Unbilled tokens in an hour",
            "short",
            (('max by (model, reason) (increase(vllm_gateway_unbilled_tokens_total{model=~"$model"}[1h]))', "{{model}} {{reason}}"),),
            "Counted by vLLM and not in the ledger, by the reason. Only with `ledger`.",
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            (
                (
                    " / ".join(_sum("server", _rate(f"vllm:prefix_cache_{what}_total", _ENGINE)) for what in ("hits", "queries")),
                    "{{server}}",
                ),
            ),
        ),
        Panel(
            "Cached prompt tokens, predicted and reported",
            "short",
            ((_sum("model, type", _rate("vllm_gateway_predicted_tokens_total", '{model=~"$model"}')), "{{model}} {{type}}"),),
            "Per second; only with `balance: cost`. More predicted than cached tokens: servers evict blocks, or others use them.",
        ),
        Panel(
            "Blocks in the prefix index",
            "short",
            (('max by (model) (vllm_gateway_prefix_index_blocks{model=~"$model"})', "{{model}}"),),
            "The largest index of all workers. At most a million blocks for each model.",
        ),
        Panel(
            "Time in vLLM's queue, p95",
            "s",
            tuple((query, "{{server}}") for query, _ in _quantiles("vllm:request_queue_time_seconds", "server", _ENGINE, 0.95)),
        ),
        Panel(
            "Finished and preempted requests",
            "short",
            (
                (_sum("server, finished_reason", _rate("vllm:request_success_total", _ENGINE)), "{{server}} {{finished_reason}}"),
                (_sum("server", _rate("vllm:num_preemptions_total", _ENGINE)), "{{server}} preempted"),
            ),
            "Per second.",
        ),
    ),
)

DASHBOARDS = {"overview.json": OVERVIEW, "models.json": MODELS, "keys.json": KEYS, "engine.json": ENGINE}


def made(dashboard: Dashboard) -> str:
    """Return a dashboard as the JSON that Grafana imports."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["vllm-gateway"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(name, query) for name, query in dashboard.variables)]},
        "panels": list(_panels(dashboard)),
    }
    return json.dumps(document, indent=1) + "\n"


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Arrange the panels in their order, from left to right and from the top."""
    x = y = 0
    for number, panel in enumerate(dashboard.panels, 1):
        width, height = panel.size
        if x + width > _WIDTH:
            x, y = 0, y + height
        yield _panel(number, panel, {"x": x, "y": y, "w": width, "h": height})
        x += width
        if x == _WIDTH:
            x, y = 0, y + height


def _panel(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.says,
        "gridPos": position,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **({} if panel.unit == "short" else {"min": 0})}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": query, "legendFormat": legend or "__auto"}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(made(dashboard))
