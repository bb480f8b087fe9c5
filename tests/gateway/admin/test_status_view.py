"""The status for people: how the page and the terminal show the JSON."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from gateway.admin.status_terminal import show
from gateway.admin.status_view import STATES, StatusView, duration, in_a_line, status_view
from gateway.telemetry.token_rates import ModelTokens, TokenRates

NOTHING = {"prompt": 0.0, "completion": 0.0}


def status(*servers: dict[str, Any], **model: Any) -> dict[str, Any]:
    """Return a /status document of one model with these servers."""
    shown = {"id": "m", "in_flight": 2, "tokens_per_second": NOTHING, "state": "ready", "since": 940.0, "servers": servers, **model}
    workers = [{"up": True}, {"up": False}]
    return {"time": 1000.0, "started": 10.0, "ready": False, "reason": "waiting", "version": "1", "workers": workers, "models": [shown]}


def terminal(shown: StatusView) -> str:
    """Return what a terminal shows."""
    out = io.StringIO()
    show(shown, Console(file=out, width=200))
    return out.getvalue()


def server(**known: Any) -> dict[str, Any]:
    return {"name": "m#0", "condition": "up", "in_flight": 2, "since": 990.0, **known}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3660, "1 h 1 min"), (86400, "1 d"), (93600, "1 d 2 h")],
)
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_failed_models_come_first_in_the_headline_and_in_the_list() -> None:
    shown = status()
    [model] = shown["models"]
    states = {"slow": "starting", "a": "failed", "b": "ready", "c": "failed"}
    models = [model | {"id": name, "state": state} for name, state in states.items()]
    view = status_view(shown | {"models": models, "reason": "waiting for slow#0"})
    assert view.headline == "2 of 4 models failed; waiting for slow#0"
    assert [model.id for model in view.models] == ["a", "c", "slow", "b"]
    assert status_view(shown | {"models": [model]}).headline == "waiting"


def test_a_split_is_a_line_with_its_shares() -> None:
    splits = [
        {"id": "chat", "aliases": [], "models": {"a": 999, "b": 1}, "sticky": None},
        {"id": "c", "models": {"a": 0, "b": 2}, "sticky": "key"},
    ]
    shown = status_view(status(server()) | {"splits": splits})
    assert shown.splits == ("chat: a 99.9%, b 0.1%", "c: a 0%, b 100%, sticky by key")
    assert all(line in terminal(shown) for line in shown.splits)
    assert status_view(status(server())).splits == ()


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({"condition": "up"}, "ready"),
        ({"condition": "loading"}, "starting"),
        ({"condition": "down"}, "failed"),
        ({"condition": "up", "state": "ready"}, "ready"),
        ({"condition": "down", "state": "ready"}, "failed"),
        ({"condition": "down", "state": "crashed"}, "failed"),
        ({"condition": "down", "state": "backing_off"}, "failed"),
        ({"condition": "down", "state": "stopping"}, "draining"),
        ({"condition": "down", "state": "stopped"}, "stopped"),
        ({"condition": "down", "state": "sleeping"}, "sleeping"),
    ],
)
def test_a_servers_state_is_one_of_six(known: dict[str, Any], state: str) -> None:
    assert state in STATES
    assert status_view(status(server(**known))).models[0].servers[0].state == state


@pytest.mark.parametrize("state", ["sleeping", "draining", "stopped"])
def test_a_server_out_of_rotation_has_the_state_of_its_model(state: str) -> None:
    for known in ({}, {"state": "ready"}):
        shown = status_view(status(server(condition="out_of_rotation", **known), state=state))
        assert shown.models[0].servers[0].state == state


@pytest.mark.parametrize(("known", "state"), [({"state": "ready"}, "draining"), ({}, "stopped"), ({"state": "starting"}, "starting")])
def test_a_server_out_of_rotation_of_a_ready_model_is_not_ready(known: dict[str, Any], state: str) -> None:
    model = status(server(condition="out_of_rotation", **known), server(name="m#1"))["models"][0]
    assert in_a_line(model) == f"m: ready (m#0: {state})"
    assert status_view(status(*model["servers"])).models[0].servers[0].state == state


def test_a_model_in_a_line() -> None:
    assert in_a_line(status(server(), server(name="m#1"))["models"][0]) == "m: ready"
    down = [server(condition="down"), server(), server(condition="loading", name="m#2")]
    assert in_a_line(status(*down)["models"][0]) == "m: ready (m#0: failed, m#2: starting)"


def test_a_bounded_server_shows_its_bound() -> None:
    assert status_view(status(server())).models[0].servers[0].load == "2"
    shown = status_view(status(server(), max_inflight=8))
    assert shown.models[0].servers[0].load == "2 of 8"


def test_a_server_shows_the_limit_that_was_found_and_why() -> None:
    found = server(max_inflight=41, max_inflight_reason="3 requests wait in the engine")
    shown = status_view(status(found, max_inflight="auto"))
    assert shown.models[0].servers[0].load == "2 of 41"
    assert "at most 41 requests at once: 3 requests wait in the engine" in terminal(shown)


def test_the_progress_of_a_start() -> None:
    line = "Loading safetensors checkpoint shards:  50% Completed | 1/2"
    starting = server(condition="loading", state="starting", last_log_lines=["INFO", line])
    (shown,) = status_view(status(starting, state="starting")).models[0].servers
    assert (shown.progress, shown.percent) == (line, 50)
    (reported,) = status_view(status(starting | {"progress": "Capturing graphs"}, state="starting")).models[0].servers
    assert (reported.progress, reported.percent) == ("Capturing graphs", None)
    assert f"m#0: {line}" in terminal(status_view(status(starting, state="starting")))


def test_the_summary_and_the_fields_of_a_model() -> None:
    adapters = [{"id": "l", "in_flight": 3, "tokens_per_second": {"prompt": 4.0, "completion": 12.34}}]
    shown = status_view(status(server(), queued=4, waiting_s=61, loras=adapters, aliases=["a"]))
    assert (shown.headline, shown.facts[:3]) == ("waiting", ("1 of 1 model ready", "5 in flight", "1 of 2 workers up"))
    (model,) = shown.models
    assert (model.since, model.queued, model.waiting, model.speed) == ("1 min", 4, "1 min", "-")
    assert model.adapters[0].speed == "12 out, 4.0 in"


def test_the_root_cause_and_the_hint_come_before_the_log() -> None:
    known = {"reason": "m#0 could not start: no memory: ValueError: x (exit code 1)", "hint": "Raise it.", "cause": "kv_cache_too_small"}
    failed = server(condition="down", state="failed", log="/l", last_log_lines=["boom"], **known)
    lines = terminal(status_view(status(failed))).splitlines()[-4:]
    assert lines == ["m#0: could not start: no memory: ValueError: x (exit code 1)", "  Hint: Raise it.", "  end of /l:", "  | boom"]


def test_a_configuration_that_is_not_in_use_is_reported() -> None:
    known = status(server())
    read = {
        "problems": ["g.yaml:3: x: unknown key", "g.yaml:9: y: <b>bad</b>"],
        "when": known["time"] - 65,
        "needs_restart": ["server.port needs a restart"],
    }
    shown = status_view(known | {"configuration": read})
    first, *rest = shown.warnings
    assert first == "the configuration on disk has been invalid for 1 min: g.yaml:3: x: unknown key"
    assert rest == ["g.yaml:9: y: <b>bad</b>", "server.port needs a restart"]
    assert status_view(known).warnings == ()


def dependency(name: str, state: str, subject: str = "", last_error: str = "") -> dict[str, Any]:
    return {"name": name, "subject": subject, "state": state, "since": 940.0, "last_error": last_error}


def test_each_dependency_that_is_down_is_shown_with_its_error() -> None:
    known = [
        dependency("identity_provider", "down", "https://a.example", "it answered with status 503"),
        dependency("identity_provider", "up", "https://b.example", "it did not answer once"),
        dependency("limits_store", "down", "", "<b>refused</b>"),
    ]
    shown = status_view(status(server()) | {"dependencies": known})
    assert shown.warnings == (
        "identity_provider (https://a.example) is down for 1 min: it answered with status 503",
        "limits_store is down for 1 min: <b>refused</b>",
    )


def test_rows_in_memory_are_shown_while_they_cannot_be_stored() -> None:
    known = status(server()) | {"ledger": {"memory_rows": 23}}
    both = [dependency("ledger_database", "down", "", "full"), dependency("ledger_spool", "down", "", "full")]
    assert status_view(known | {"dependencies": both}).warnings[-1] == "23 rows of the ledger in memory only"
    assert len(status_view(known | {"dependencies": both[1:]}).warnings) == 1


def test_budgets_that_are_not_restored_are_shown() -> None:
    known = status(server())
    assert status_view(known | {"budgets": None}).warnings == status_view(known | {"budgets": {"restored": True}}).warnings == ()
    shown = status_view(known | {"budgets": {"restored": False, "last_error": "refused"}})
    assert shown.warnings == ("budgets are not restored yet: refused",)


def test_a_ready_gateway_with_problems_is_degraded() -> None:
    known = status(server()) | {"ready": True, "reason": None}
    assert (status_view(known).state, status_view(known).headline) == ("ready", "ready")
    shown = status_view(known | {"degraded": ["1 of 1 model without a ready server", "limits_store is down"]})
    assert (shown.state, shown.headline) == ("degraded", "degraded: 1 of 1 model without a ready server, limits_store is down")
    assert status_view(status(server())).state == "not ready"


def test_nothing_acts_on_a_terminal() -> None:
    failed = server(condition="down", reason="\x1b]0;owned\x07 [bold]x", last_log_lines=["\x1b[2J", "[red]y"], state="failed", log="/l")
    shown = terminal(status_view(status(failed, id="[link=x]m")))
    assert "\x1b" not in shown and "\x07" not in shown
    assert all(text in shown for text in ("[link=x]m", "[bold]x", "[red]y", "\\x1b[2J"))


def test_rates_are_over_the_window() -> None:
    rates = TokenRates()
    assert rates.rate("m") == ModelTokens()
    rates.observe(0.0, {})
    assert rates.rate("m") == ModelTokens()
    for second in range(1, 31):
        rates.observe(float(second), {"m": ModelTokens(10.0 * second, 100.0 * min(second, 15))})
    assert rates.rate("m") == ModelTokens(10.0, 0.0)
    rates.observe(35.0, {"m": ModelTokens(310.0, 1500.0)})
    assert rates.rate("m") == ModelTokens((310.0 - 250.0) / 10.0, 0.0)
    assert rates.rate("other") == ModelTokens()
