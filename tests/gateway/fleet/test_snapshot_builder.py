"""Build snapshots, launches and health checks from the configuration and the observed servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, load
from gateway.fleet.configured_servers import configured_servers, launches
from gateway.fleet.observed_servers import (
    ObservedServers,
    health_check_targets,
    loaded_models,
    max_model_len,
    tasks,
    without_first_result,
)
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.snapshot.snapshot import BodyRules, Mirror, Queue, Slo
from tests.gateway.config.test_models import HASH
from tests.support.rows import each_row
from upstream.balancing.server import Condition
from upstream.http.address import Address
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.vllm.command_line import Adapter
from upstream.vllm.health import ModelCard, ProbeTarget, ServerHealth

UDS = Address("localhost", uds="/run/x.sock")


def by_name(statuses: list[LaunchStatus]) -> dict[str, LaunchStatus]:
    return {status.name: status for status in statuses}


NOTHING = ObservedServers({}, {}, {})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    document: dict[str, Any] = {
        "server": {"body_limit": "1MiB"},
        "models": [
            {"id": "launched", "launch": {"replicas": 2, "args": {"seed": 1}, "gpus": [[0], [1]]}, "aliases": ["l"]},
            {"id": "found", "servers": [{"url": "http://10.0.0.5:8000", "model": "inner", "api_key": {"env": "INNER_KEY"}, "weight": 2},
                                        {"url": "http://10.0.0.6:8000"}]},
            {"id": "shared", "servers": [{"url": "http://10.0.0.6:8000", "model": "lora"}], "timeouts": {"first_byte": "9s"},
             "overrides": {"seed": 1}, "mounts": ["/i/1"]},
        ],
        "keys": [{"id": "a", "hash": HASH}, {"id": "b", "hash": [HASH.replace("9f", "8f")], "models": ["found"], "expires": "2027-01-01"}],
    }  # fmt: skip
    return _written(tmp_path, document)


def _loaded(folder: Path, *models: dict[str, Any]) -> Config:
    return _written(folder, {"models": list(models), "keys": [{"id": "a", "hash": HASH}]})


def _written(folder: Path, document: dict[str, Any]) -> Config:
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    return load(path, {"INNER_KEY": "k"})


def status(name: str, state: LaunchState, *, concluded: bool = False) -> LaunchStatus:
    return LaunchStatus(name, state, 0.0, UDS, Path("/log"), first_start_finished=concluded)


NAMES = ["launched#0", "launched#1", "http://10.0.0.5:8000", "http://10.0.0.6:8000#found", "http://10.0.0.6:8000#shared"]


def test_every_server_has_one_name(config: Config) -> None:
    assert [server.name for server in configured_servers(config)] == NAMES
    assert [server.served_model for server in configured_servers(config)] == ["launched", "launched", "inner", "found", "lora"]


def test_launches(config: Config) -> None:
    first, second = launches(config)
    assert (first.name, second.name) == ("launched#0", "launched#1")
    assert (first.settings.gpus, second.settings.gpus) == ((0,), (1,))
    assert first.settings.served_names == ("launched",), "so that answers carry the model's id"
    assert first.settings.args == {"seed": 1}


def test_the_state(config: Config) -> None:
    observed = ObservedServers(
        by_name([status("launched#0", LaunchState.READY), status("launched#1", LaunchState.STARTING)]),
        {},
        {"launched#0": "x", "launched#1": "y"},
    )
    snapshot = build_snapshot(config, observed, 3, 1_760_000_000)
    assert (snapshot.version, snapshot.body_limit, snapshot.models[0].created) == (3, 1 << 20, 1_760_000_000)
    specs = [spec for model in snapshot.models for spec in model.servers]
    assert [spec.name for spec in specs] == NAMES
    assert [(spec.model, spec.api_key, spec.weight) for spec in specs] == [
        ("launched", "x", 1), ("launched", "y", 1), ("inner", "k", 2), ("found", None, 1), ("lora", None, 1)
    ]  # fmt: skip
    assert specs[0].address is UDS and specs[2].address == Address("10.0.0.5", 8000)
    assert specs[0].keep_idle < 75 and specs[2].keep_idle < 5, "below the servers' own limits"
    assert snapshot.models[2].timeouts.first_byte == 9.0
    assert (snapshot.models[2].overrides, snapshot.models[2].mounts, snapshot.models[0].aliases) == ({"seed": 1}, ("/i/1",), ("l",))
    a, b = snapshot.keys
    assert a.digests == (bytes.fromhex(HASH.removeprefix("sha256:")),)
    assert (a.models, a.expires, b.models) == (None, None, ("found",))
    assert b.expires is not None and b.expires == 1798761600.0


def test_an_adapter_is_a_model_on_the_servers_of_its_base(tmp_path: Path) -> None:
    loras = [{"id": "sql", "path": "./loras/sql", "aliases": ["s"]}]
    servers = [{"url": "http://10.0.0.5:8000", "model": "inner"}]
    config = _loaded(
        tmp_path,
        {"id": "launched", "launch": {"model": "../base"}, "loras": loras, "mounts": ["/i"], "defaults": {"seed": 1}},
        {"id": "found", "servers": servers, "loras": [{"id": "chat"}]},
    )
    (spec,) = launches(config)
    assert spec.settings.model == str(tmp_path.parent / "base"), "from the folder of the configuration"
    assert spec.settings.adapters == (Adapter("sql", str(tmp_path / "loras/sql")),)
    observed = ObservedServers(by_name([status("launched#0", LaunchState.READY)]), {}, {"launched#0": "x"})
    snapshot = build_snapshot(config, observed, 1, 0)
    base, adapter, found, other = snapshot.models
    assert base.servers[0].loads == spec.settings.model, "another path under the same ID is another model"
    assert snapshot.bases == (base, found)
    assert (adapter.id, adapter.aliases, adapter.parent, adapter.served) == ("sql", ("s",), "launched", "sql")
    assert (adapter.servers, adapter.defaults, adapter.mounts) == (base.servers, {"seed": 1}, ())
    assert (other.id, other.parent, other.served, other.servers) == ("chat", "found", "chat", found.servers)
    probes = {"http://10.0.0.5:8000": ServerHealth("", True, models=(ModelCard("inner", 4096), ModelCard("chat")))}
    assert max_model_len(config, ObservedServers({}, probes, {})) == {"found": 4096, "chat": 4096}


UP, DOWN, LOADING = Condition.UP, Condition.DOWN, Condition.LOADING


@each_row("up", [None, True, False])
@each_row("stage", [None, *LaunchState])
def test_a_condition(stage: LaunchState | None, up: bool | None) -> None:
    observed = ObservedServers(
        {} if stage is None else {"s": status("s", stage)}, {} if up is None else {"s": ServerHealth("s", up)}, {}
    )  # fmt: skip
    probed = {None: LOADING, True: UP, False: DOWN}[up]
    if stage is None:
        expected = probed
    elif stage is LaunchState.READY:
        expected = UP if up is None else probed
    else:
        expected = LOADING if stage is LaunchState.STARTING else DOWN
    assert observed.condition("s") is expected


def test_probed_servers(config: Config) -> None:
    observed = ObservedServers(
        by_name([status("launched#0", LaunchState.READY), status("launched#1", LaunchState.STARTING)]),
        {},
        {"launched#0": "x", "launched#1": "y"},
    )
    targets = health_check_targets(config, observed)
    assert {target.name for target in targets} == {*NAMES} - {"launched#1"}
    assert ProbeTarget("launched#0", UDS, "x") in targets
    assert ProbeTarget("http://10.0.0.5:8000", Address("10.0.0.5", 8000), "k") in targets


def test_context_lengths(config: Config) -> None:
    probes = {
        "http://10.0.0.5:8000": ServerHealth("", True, models=(ModelCard("inner", 4096), ModelCard("found", 1))),
        "http://10.0.0.6:8000#found": ServerHealth("", False, models=(ModelCard("found", 2048),)),
        "http://10.0.0.6:8000#shared": ServerHealth("", True, models=(ModelCard("lora"), ModelCard("base", 7))),
    }
    assert max_model_len(config, ObservedServers({}, probes, {})) == {"found": 2048}
    assert max_model_len(config, NOTHING) == {}


def test_what_servers_have_loaded(config: Config) -> None:
    """The configuration shows what the launched ones load."""
    loaded = ServerHealth("", True, models=(ModelCard("inner", 4096, "/models/a"), ModelCard("launched", 10, "/models/b")))
    probes = {"http://10.0.0.5:8000": loaded, "launched#0": loaded}
    assert loaded_models(config, ObservedServers({}, probes, {})) == {"http://10.0.0.5:8000": "/models/a, 4096 tokens"}


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (("chat", "chat"), {"m": "chat", "a": "chat"}),
        (("chat", None), {"m": "chat", "a": "chat"}),
        (("chat", "embedding"), {}),
        ((None, None), {}),
    ],
)
def test_the_task_comes_from_what_servers_report(tmp_path: Path, reported: tuple[str | None, ...], expected: dict[str, str]) -> None:
    servers = [{"url": f"http://127.0.0.1:{port}"} for port in (8001, 8002)]
    config = _loaded(tmp_path, {"id": "m", "servers": servers, "loras": [{"id": "a"}]})
    probes = {server["url"]: ServerHealth(server["url"], True, task=task) for server, task in zip(servers, reported, strict=True)}
    assert tasks(config, ObservedServers({}, probes, {})) == expected


def test_fields_of_the_model_list(tmp_path: Path) -> None:
    configured = {"task": "rerank", "capabilities": ["image"], "servers": [{"url": "http://127.0.0.1:8001"}]}
    args = {"reasoning-parser": "qwen3"}
    models = _loaded(tmp_path, {"id": "said", **configured}, {"id": "seen", "launch": {"args": args}}, {"id": "bare", "launch": {}})
    shown = [(each.task, each.capabilities, each.launched_with) for each in build_snapshot(models, NOTHING, 1, 0).models]
    assert shown == [
        ("rerank", ("image",), None),
        ("chat", None, ("structured_outputs", "reasoning")),
        (None, None, ("structured_outputs",)),
    ]


def test_servers_without_a_first_result(config: Config) -> None:
    assert without_first_result(config, NOTHING) == NAMES
    observed = ObservedServers(
        by_name([status("launched#0", LaunchState.STARTING), status("launched#1", LaunchState.STARTING, concluded=True)]),
        {"launched#0": ServerHealth("launched#0", True), "http://10.0.0.5:8000": ServerHealth("", False)},
        {},
    )
    assert without_first_result(config, observed) == ["launched#0", *NAMES[3:]], "what failed is concluded too"


@pytest.fixture
def lazy(tmp_path: Path) -> Config:
    document = {
        "server": {"workers": 3, "drain": "45s"},
        "models": [
            {"id": "lazy", "launch": {"start": "on_demand", "gpus": [[0, 1]]}, "keepalive": "9s"},
            {"id": "neighbor", "launch": {"gpus": [[1]], "idle_sleep": "1m"}, "queue": {"size": 9, "wait": "5s"}},
            {"id": "alone", "launch": {"gpus": [[2]]}},
        ],
        "keys": [{"id": "a", "hash": HASH}],
    }
    path = tmp_path / "lazy.yaml"
    path.write_text(yaml.safe_dump(document))
    return load(path, {})


def test_a_model_that_may_be_stopped_has_a_queue_and_each_worker_its_share(lazy: Config) -> None:
    assert [lazy.may_stop(model) for model in lazy.models] == [True, True, False]
    models = build_snapshot(lazy, NOTHING, 1, 0).models
    assert [model.queue for model in models] == [Queue(43, 30.0, deficit=10_000), Queue(3, 5.0, deficit=10_000), None]
    assert [model.keepalive for model in models] == [9.0, None, None]
    assert [model.servers for model in models] == [(), (), ()], "none is launched"


def test_objectives_of_models_and_classes(tmp_path: Path) -> None:
    model = {"id": "m", "servers": [{"url": "http://10.0.0.5:8000"}], "loras": [{"id": "lora"}], "slo": {"ttft": "2s", "itl": "60ms"}}
    classes = [{"id": "chat", "slo": {"ttft": "500ms"}}, {"id": "batch"}]
    document = {"models": [model], "classes": classes, "keys": [{"id": "k", "anonymous": True}]}
    snapshot = build_snapshot(_written(tmp_path, document), NOTHING, 1, 0)
    assert [each.slo for each in snapshot.models] == [Slo(2.0, 0.06)] * 2
    assert [each.slo for each in snapshot.classes] == [Slo(0.5), Slo()]
    assert [each.slo.with_defaults(snapshot.models[0].slo) for each in snapshot.classes] == [Slo(0.5, 0.06), Slo(2.0, 0.06)]


def test_bounds_and_weights(tmp_path: Path) -> None:
    servers = [{"url": "http://10.0.0.5:8000"}]
    document = {
        "server": {"workers": 2, "max_inflight": 100},
        "models": [
            {"id": "bounded", "servers": servers, "max_inflight": 8, "loras": [{"id": "lora"}]},
            {"id": "free", "servers": [{"url": "http://10.0.0.6:8000"}]},
        ],
        "keys": [{"id": name, "hash": f"sha256:{n:064x}", "priority": n} for n, name in ((0, "usual"), (1, "later"))]
        + [{"id": "anonymous", "anonymous": True, "priority": -1}],
    }
    path = tmp_path / "bounds.yaml"
    path.write_text(yaml.safe_dump(document))
    made = build_snapshot(load(path, {}), NOTHING, 1, 0)
    assert (made.max_inflight, made.workers) == (100, 2)
    assert [(model.id, model.max_inflight, model.queue) for model in made.models] == [
        ("bounded", 8, Queue(64, 30.0, deficit=10_000)),
        ("lora", 8, Queue(64, 30.0, deficit=10_000)),
        ("free", None, Queue(64, 30.0, deficit=10_000)),  # for requests before the first health check
    ]
    assert {key.id: key.weight for key in made.keys} == {"usual": 1.0, "later": 0.5, "anonymous": 2.0}


def test_a_launch_carries_the_settings_for_sleeping_and_draining(lazy: Config) -> None:
    assert [(spec.settings.sleeps, spec.settings.drain) for spec in launches(lazy)] == [(False, 45.0), (True, 45.0), (False, 45.0)]


def test_a_server_out_of_rotation(lazy: Config) -> None:
    observed = ObservedServers({"neighbor#0": status("neighbor#0", LaunchState.READY)}, {}, {}, frozenset({"neighbor#0"}))
    assert observed.condition("neighbor#0") is Condition.OUT_OF_ROTATION
    assert without_first_result(lazy, observed) == ["alone#0"], "what starts on demand, or was stopped, counts from the beginning"


def _with_keys(folder: Path, secret: str | None, *keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields that each key adds to a request."""
    (folder / "secret").write_text(secret or "-")
    hashes = [HASH[:-1] + str(number) for number in range(len(keys))]
    document: dict[str, Any] = {
        "models": [{"id": "m", "servers": [{"url": "http://10.0.0.5:8000"}]}],
        "keys": [{"hash": each} | key for each, key in zip(hashes, keys, strict=True)],
    }
    if secret is not None:
        document["isolate_prefix_cache"] = {"secret": {"file": "secret"}}
    return [dict(key.fields) for key in build_snapshot(_written(folder, document), NOTHING, 1, 0).keys]


def test_fields_that_keys_add_to_requests(tmp_path: Path) -> None:
    keys: list[dict[str, Any]] = [{"id": "a", "priority": -3}, {"id": "b"}]
    assert _with_keys(tmp_path, None, *keys) == [{"priority": -3}, {}]
    first, second = _with_keys(tmp_path, "s3cret", *keys)
    salts = [first["cache_salt"], second["cache_salt"]]
    assert first["priority"] == -3 and len(set(salts)) == 2
    assert all(len(salt) == 64 and int(salt, 16) for salt in salts), "vLLM takes 128 characters, and no / among them"
    assert _with_keys(tmp_path, "s3cret", *keys) == [first, second], "the same after a restart"
    assert _with_keys(tmp_path, "another", *keys)[0]["cache_salt"] not in salts


def test_rules_for_bodies(tmp_path: Path) -> None:
    body = {"allow": ["chat_template"], "refuse": ["tools"], "max_n": 2, "max_tokens": 9, "media_hosts": ["*.Example.com"]}
    config = _loaded(tmp_path, {"id": "m", "servers": [{"url": "http://10.0.0.5:8000"}], "body": body, "loras": [{"id": "l"}]})
    rules = BodyRules(("chat_template",), ("tools",), 2, 9, ("*.example.com",))
    assert [model.body for model in build_snapshot(config, NOTHING, 1, 0).models] == [rules, rules], "its adapters' too"


@pytest.mark.parametrize(
    ("hosts", "follows"), [([], None), (["a.example.com"], "0"), (["*.example.com"], "0"), (["*"], None), (["a.b", "*:8080"], None)]
)
def test_a_server_that_fetches_from_listed_hosts_follows_no_redirects(tmp_path: Path, hosts: list[str], follows: str | None) -> None:
    config = _loaded(tmp_path, {"id": "m", "launch": {}, "body": {"media_hosts": hosts}})
    assert launches(config)[0].settings.env.get("VLLM_MEDIA_URL_ALLOW_REDIRECTS") == follows


def test_operators_may_have_redirects_followed(tmp_path: Path) -> None:
    name = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
    config = _loaded(tmp_path, {"id": "m", "launch": {"env": {name: "1"}}, "body": {"media_hosts": ["a.example.com"]}})
    assert launches(config)[0].settings.env[name] == "1"


def test_names_in_splits_and_mirrors_become_ids_and_each_worker_has_a_part_of_the_copies(tmp_path: Path) -> None:
    launch = {"launch": {"preset": "qwen3"}}
    mirrored = {
        "id": "b",
        **launch,
        "loras": [{"id": "b-lora", "path": "/l"}],
        "mirror": {"to": "also-a", "share": "5%", "max_inflight": 9},
    }
    split = {"id": "chat", "split": {"also-a": 3, "b-lora": 0}, "sticky": "session"}
    document = {"server": {"workers": 2}, "models": [{"id": "a", "aliases": ["also-a"], **launch}, mirrored, split]}
    config = _written(tmp_path, document | {"keys": [{"id": "a", "hash": HASH}]})
    models = {model.id: model for model in build_snapshot(config, NOTHING, 1, 7).models}
    assert models["b"].mirror == Mirror("a", 0.05, 5) and models["b-lora"].mirror is None
    assert (models["chat"].split, models["chat"].sticky, models["chat"].servers) == ((("a", 3), ("b-lora", 0)), "session", ())
    assert (models["chat"].task, models["chat"].launched_with) == ("chat", models["a"].launched_with) and models["a"].launched_with
