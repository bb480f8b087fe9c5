"""Every output shows the gateway's dependencies with their states: /status, /readyz, metrics, the command, standard error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gateway.telemetry.dependencies import NAMES, Dependencies, Observation
from gateway.telemetry.metrics import Series
from tests.support.issuer import AUDIENCE, Issuer, SigningKey, published
from tests.support.ports import refusing
from tests.support.process import Gateway, configuration, gateway, launched, wait_for, write
from tests.support.redis_server import redis_server


def test_a_state_keeps_its_time_until_it_changes() -> None:
    known = Dependencies()
    known.observe([Observation("limits_store")], 10.0)
    known.observe([Observation("limits_store", error="refused")], 20.0)
    known.observe([Observation("limits_store", error="timed out")], 30.0)
    expected = {"name": "limits_store", "subject": "", "state": "down", "since": 20.0, "last_error": "timed out"}
    assert known.as_json() == [expected] and known.down() == ["limits_store"]
    known.observe([Observation("limits_store")], 40.0)
    assert known.as_json() == [expected | {"state": "up", "since": 40.0}] and known.down() == []
    known.observe([], 50.0)
    assert known.as_json() == [] and list(known.series()) == []


def test_several_of_a_name_are_one_series_that_is_down_with_any_of_them() -> None:
    known = Dependencies()
    known.observe([Observation("identity_provider", "a"), Observation("identity_provider", "b", "503"), Observation("discovery", "m")], 1.0)
    assert list(known.series()) == [
        (Series("dependency_up", ("identity_provider",)), 0.0),
        (Series("dependency_up", ("discovery",)), 1.0),
    ]


def of(one: Gateway, name: str) -> dict[str, Any]:
    """A dependency's entry in /status; empty without one."""
    found = [each for each in one.get("/status").json()["dependencies"] if each["name"] == name]
    return found[0] if found else {}


def is_shown(one: Gateway, name: str, state: str) -> bool:
    """Whether a dependency is in this state in all places at once."""
    entry, is_down = of(one, name), state == "down"
    readiness = one.get("/readyz")
    return (
        entry.get("state") == state
        and bool(entry["last_error"]) == is_down
        and one.metric(f'vllm_gateway_dependency_up{{dependency="{name}"}}') == float(not is_down)
        and readiness.status_code == 200
        and readiness.json() == {"status": "degraded" if is_down else "ready", "reasons": [f"{name} is down"] if is_down else []}
        and one.command("status").stdout.startswith(f"degraded: {name} is down" if is_down else "ready")
    )


def test_a_limits_store_that_goes_away_and_comes_back_is_shown(tmp_path: Path) -> None:
    with redis_server() as redis:
        with redis.client() as client:
            client.config_set("requirepass", "a-password-of-redis")
        (tmp_path / "redis-url").write_text(redis.url.replace("//", "//:a-password-of-redis@"))
        config = configuration(launched(), workers=2) | {"limits_store": {"file": "redis-url"}}
        config["keys"][0]["limits"] = {"requests_per_minute": 1000}
        with gateway(tmp_path, config) as one:
            wait_for(lambda: of(one, "limits_store").get("state") == "up")
            wait_for(lambda: one.get("/readyz").json() == {"status": "ready", "reasons": []})
            redis.stop()
            wait_for(lambda: of(one, "limits_store")["state"] == "down", why=lambda: one.output)
            assert is_shown(one, "limits_store", "down")
            assert one.request().status_code == 200, "each gateway counts by itself meanwhile"
            since = of(one, "limits_store")["since"]
            page = one.get("/status").text
            redis.start()
            with redis.client() as client:
                client.config_set("requirepass", "a-password-of-redis")
            wait_for(lambda: of(one, "limits_store")["state"] == "up", why=lambda: one.output)
            back = of(one, "limits_store")
            assert back["since"] > since and back["last_error"]
            wait_for(lambda: one.metric('vllm_gateway_dependency_up{dependency="limits_store"}') == 1)
            wait_for(lambda: one.get("/readyz").json()["status"] == "ready")
            assert re.search(r"limits store at .* is unavailable", one.output) and re.search(
                r"limits store at .* is available again", one.output
            )
            assert "a-password-of-redis" not in one.output + page + one.get("/status").text


def test_a_limits_store_that_is_not_used_any_more_is_not_listed(tmp_path: Path) -> None:
    with redis_server() as redis:
        config = configuration(launched()) | {"limits_store": redis.url}
        keys = config["keys"]
        config["keys"] = [keys[0] | {"limits": {"requests_per_minute": 1000}}]
        with gateway(tmp_path, config) as one:
            redis.stop()
            wait_for(lambda: of(one, "limits_store").get("state") == "down")
            write(tmp_path / "gateway.yaml", config | {"keys": keys})
            wait_for(lambda: not of(one, "limits_store") and one.get("/readyz").json()["status"] == "ready", why=lambda: one.output)


def test_a_limits_store_that_became_a_replica_is_down_without_a_request(tmp_path: Path) -> None:
    with redis_server() as redis, redis.client() as client, refusing() as port:
        config = configuration(launched()) | {"limits_store": redis.url, "limits": {"on_store_failure": "refuse"}}
        config["keys"][0]["limits"] = {"tokens_per_day": 1000}
        with gateway(tmp_path, config) as one:
            wait_for(lambda: of(one, "limits_store").get("state") == "up")
            client.replicaof("127.0.0.1", port)
            wait_for(lambda: of(one, "limits_store")["state"] == "down", why=lambda: one.output)
            assert of(one, "limits_store")["last_error"].startswith("READONLY")
            assert is_shown(one, "limits_store", "down") and one.request().status_code == 503
            client.replicaof("NO", "ONE")
            wait_for(lambda: of(one, "limits_store")["state"] == "up", why=lambda: one.output)
            assert one.request().status_code == 200
            assert one.output.count("is unavailable") == one.output.count("is available again") == 1


def test_a_worker_that_is_replaced_reports_the_store_again(tmp_path: Path) -> None:
    with redis_server() as redis:
        config = configuration(launched()) | {"limits_store": redis.url}
        config["keys"][0]["limits"] = {"requests_per_minute": 1000}
        with gateway(tmp_path, config) as one:
            wait_for(lambda: of(one, "limits_store").get("state") == "up")
            redis.stop()
            wait_for(lambda: of(one, "limits_store")["state"] == "down")
            one.named("gateway.worker.process")[0].kill()
            wait_for(lambda: one.get("/status").json()["workers"][0]["restarts"] == 1)
            wait_for(lambda: of(one, "limits_store").get("state") == "down")


def test_an_identity_provider_that_goes_away_is_shown(tmp_path: Path) -> None:
    issuer = Issuer("https://login.example.com/", SigningKey("RS256"))
    with published(issuer) as jwks_server:
        jwt = {"issuer": issuer.name, "audience": AUDIENCE, "keys": "team-a", "jwks": jwks_server.url, "refresh": "1s"}
        with gateway(tmp_path, configuration(launched()) | {"jwt": [jwt]}) as one:
            assert of(one, "identity_provider")["state"] == "up"
            jwks_server.status = 503
            wait_for(lambda: of(one, "identity_provider")["state"] == "down", 90)
            entry = of(one, "identity_provider")
            assert (entry["subject"], "503" in entry["last_error"]) == (issuer.name, True)
            assert is_shown(one, "identity_provider", "down")
            assert "identity_provider (https://login.example.com/) is down for" in one.command("status").stdout


def test_the_names_are_those_of_the_document() -> None:
    page = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    assert all(f"`{name}`" in page for name in NAMES)
