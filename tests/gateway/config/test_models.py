"""The configuration that is good: what it means, its defaults, its secrets, its notes, its schema."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.config import Config, ConfigurationError, load, plain_variables, schema
from gateway.config.quantities import DURATION_UNITS, SIZE_UNITS, duration_text, parse_duration, parse_size
from gateway.config.section import Section
from gateway.config.values import MAX_WORKERS, KeyHash, installed
from gateway.system.cpus import usable_cpus
from tests.support.certificates import certificate
from tests.support.rows import each_row

HASH = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
CANARY = "canary-9f2c41"

SAMPLE = f"""\
server:
  host: 0.0.0.0            # data port
  port: 8000
  workers: 1
  admin: {{host: 127.0.0.1, port: 9090}}      # /metrics /livez /readyz /status
  body_limit: 20MiB
  drain: 30s
  cors: {{origins: []}}        # browsers; off by default
models:
  - id: Qwen/Qwen3.6-35B-A3B-FP8
    aliases: [qwen]
    launch:                                  # the gateway starts it
      command: [vllm, serve]                 # default
      model: Qwen/Qwen3.6-35B-A3B-FP8        # default: id
      replicas: 1
      gpus: [[0, 1]]                         # per replica
      args: {{reasoning-parser: qwen3, enable-auto-tool-choice: true, tool-call-parser: qwen3_coder, max-model-len: 32768}}
      env: {{HF_HUB_OFFLINE: "1"}}
      start: eager                           # or on_demand
      idle_stop: 15m
      startup_timeout: 20m
  - id: meta-llama/Llama-3.3-70B-Instruct
    mounts: [/i-7f3a/3900]
    servers:
      - url: http://10.0.0.5:8000
        model: llama-70b                     # its served name, default: id
        api_key: {{env: LLAMA_KEY}}
      - {{url: http://10.0.0.6:8000, weight: 1}}
    balance: least_busy                      # or round_robin, prefix
    timeouts: {{connect: 2s, first_byte: 120s, idle: 60s, total: 1h}}
    defaults: {{temperature: 0.7}}
    overrides: {{}}
    fallbacks: [Qwen/Qwen3.6-35B-A3B-FP8]
keys:
  - id: team-a
    hash: {HASH}
    models: ["Qwen/*"]                       # default: all
    expires: 2027-01-01
    limits: {{requests_per_minute: 600, tokens_per_minute: 200000, tokens_per_day: 5000000, concurrent: 32}}
  - id: anonymous                            # requests with no key; only if present
    anonymous: true
    models: [meta-llama/Llama-3.3-70B-Instruct]
keys_file: keys.yaml
limits_store: redis://localhost:6379/0
ledger: sqlite:///usage.db
"""

FURTHER = """\
server:
  tls: {cert: cert.pem, key: key.pem}
  trusted_proxies: [10.0.0.0/8, "::1"]
  headers_timeout: 5s
  body_timeout: 500ms
  write_timeout: 1m
  max_inflight: 1000
  admin: {token: {file: token}}
  cors: {origins: ["https://app.example.com"]}
models:
  - id: a
    launch: {start: on_demand, idle_sleep: 5m, group: big, env: {HF_TOKEN: {env: LLAMA_KEY}}}
    loras: [{id: a-lora, path: /loras/a}]
    queue: {size: 10, wait: 1m}
    max_inflight: 64
    keepalive: 15s
    body: {allow: [priority], refuse: [logprobs], max_n: 4, max_tokens: 4096, media_hosts: [images.example.com]}
    price: {prompt: 0.5, completion: 2}
    rewrite_model: true
    running_usage: false
    resume: false
    balance: prefix
  - {id: b, discover: {kubernetes: {service: vllm, port: http}}}
  - {id: c, discover: {dns: {name: vllm.svc, port: 8000}}}
keys:
  - {id: k, anonymous: true, team: t, priority: -1, labels: {cost: "17"}}
teams:
  - {id: t, limits: {concurrent: 3}}
limits: {on_store_failure: refuse}
isolate_prefix_cache: {secret: {file: token}}
log: {level: debug, format: json}
tracing: {endpoint: "http://otel:4318", sample: 0.1}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str, name: str = "gateway.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return written


@pytest.fixture
def sample(write: Any) -> Config:
    write(f"- id: from-file\n  hash: [{'sha256:' + 'a' * 64}, {'sha256:' + 'b' * 64}]\n", "keys.yaml")
    return load(write(SAMPLE), {"LLAMA_KEY": CANARY})


@pytest.fixture
def further(write: Any, tmp_path: Path) -> Config:
    certificate(tmp_path)
    write(f"{CANARY}\n", "token")
    return load(write(FURTHER), {"LLAMA_KEY": CANARY})


def test_the_sample_means_what_it_says(sample: Config) -> None:
    qwen, llama = sample.models
    assert (sample.server.body_limit, sample.server.drain) == (20 * 2**20, 30.0)
    assert qwen.names == ("Qwen/Qwen3.6-35B-A3B-FP8", "qwen")
    assert qwen.launch is not None
    assert (qwen.launch.gpus, qwen.launch.idle_stop, qwen.launch.startup_timeout) == (((0, 1),), 900.0, 1200.0)
    assert qwen.launch.args["enable-auto-tool-choice"] is True
    assert llama.servers is not None
    assert [str(server.address) for server in llama.servers] == ["http://10.0.0.5:8000", "http://10.0.0.6:8000"]
    assert (llama.timeouts.connect, llama.timeouts.total, llama.defaults) == (2.0, 3600.0, {"temperature": 0.7})


def test_keys_come_from_both_files(sample: Config) -> None:
    assert [(key.id, len(key.hashes), key.anonymous) for key in sample.keys] == [
        ("team-a", 1, False),
        ("anonymous", 0, True),
        ("from-file", 2, False),
    ]
    assert [path.name for path in sample.files] == ["gateway.yaml", "keys.yaml"]


def test_a_scope_is_a_pattern_and_a_date_is_its_first_moment(sample: Config) -> None:
    team, _, anyone = sample.keys
    assert (team.models, anyone.models) == (("Qwen/*",), ("*",))
    assert not team.expired(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC))
    assert team.expired(datetime(2027, 1, 1, tzinfo=UTC))


def test_auto_is_a_worker_for_each_usable_cpu(write: Any) -> None:
    text = "server: {{workers: {}}}\nmodels: [{{id: m, launch: {{}}}}]\nkeys: [{{id: k, anonymous: true}}]\n"
    assert load(write(text.format("auto")), {}).server.workers == min(usable_cpus(), MAX_WORKERS)
    for wrong in ("Auto", "0", "257", "2.0"):
        with pytest.raises(ConfigurationError):
            load(write(text.format(wrong)), {})


def test_defaults(write: Any) -> None:
    config = load(write(f"models: [{{id: m, launch: {{}}}}]\nkeys: [{{id: k, hash: '{HASH.upper().replace('SHA', 'sha')}'}}]\n"), {})
    server, model = config.server, config.models[0]
    assert (server.host, server.port, server.workers, server.admin.host, server.admin.port) == ("0.0.0.0", 8000, 1, "127.0.0.1", 9090)
    assert (server.body_limit, server.drain) == (20971520, 30.0)
    assert model.launch is not None
    assert (model.launch.command, model.launch.replicas, model.launch.start, model.launch.startup_timeout) == (
        ("vllm", "serve"),
        1,
        "eager",
        1200.0,
    )
    assert (model.balance, model.timeouts.connect, model.timeouts.first_byte, model.timeouts.idle) == ("least_busy", 2.0, 120.0, 60.0)
    assert config.keys[0].hashes == (KeyHash(HASH),)
    assert config.keys[0].models == ("*",)


def test_secrets_are_found_and_never_shown(sample: Config, further: Config) -> None:
    assert sample.models[1].servers is not None
    key = sample.models[1].servers[0].api_key
    assert key is not None
    assert key.get_secret_value() == CANARY
    launch, token = further.models[0].launch, further.server.admin.token
    assert launch is not None and token is not None
    assert (plain_variables(launch.env), token.get_secret_value()) == ({"HF_TOKEN": CANARY}, CANARY)
    for config in (sample, further):
        assert CANARY not in f"{config!r} {config} {config.model_dump()}"


def test_relative_paths_start_at_the_file(further: Config, tmp_path: Path) -> None:
    assert further.server.tls is not None
    assert further.server.tls.cert == tmp_path / "cert.pem"
    assert set(further.files) == {tmp_path / name for name in ("gateway.yaml", "cert.pem", "key.pem", "token")}


def test_a_configuration_cannot_be_changed_and_can_be_sent(sample: Config) -> None:
    with pytest.raises(ValueError, match="frozen"):
        sample.server.port = 1
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_anchors_and_merges_keep_their_lines(write: Any) -> None:
    path = write(
        "models:\n"
        "  - id: a\n    launch: &usual\n      replicas: 1\n      startup_timeout: 5\n"
        "  - id: b\n    launch: {<<: *usual, replicas: 2, gpus: [[0], [1]]}\n"
        "keys: [{id: k, anonymous: true}]\n"
    )
    with pytest.raises(ConfigurationError) as caught:
        load(path, {})
    assert [(problem.line, problem.path) for problem in caught.value.problems] == [
        (5, "models[0].launch.startup_timeout"),
        (5, "models[1].launch.startup_timeout"),
    ]


def _resolved(at: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema with its reference followed and its ``null`` alternative left out."""
    if "anyOf" in at:
        at = next(option for option in at["anyOf"] if option.get("type") != "null")
    return schema()["$defs"][at["$ref"].rsplit("/", 1)[1]] if "$ref" in at else at


def _sections(of: type[Section]) -> list[type[Section]]:
    return [section for below in of.__subclasses__() for section in [below, *_sections(below)]]


@pytest.mark.parametrize("one", ["a", ["a", "b"]])
def test_the_schema_takes_one_text_where_loading_does(one: object) -> None:
    issuer = {"issuer": "https://a/", "audience": one, "jwks": "https://a/keys", "keys": one}
    Draft202012Validator(schema()).validate({"jwt": [issuer]})


def test_the_schema_uses_the_names_of_the_yaml_and_describes_every_setting() -> None:
    text = json.dumps(schema())
    assert _resolved(schema()["properties"]["keys"]["items"])["properties"]["hash"]["oneOf"][1]["type"] == "array"
    server = _resolved(schema()["properties"]["server"])
    assert (server["properties"]["body_limit"]["type"], server["properties"]["body_limit"]["default"]) == ("string", "20MiB")
    assert server["additionalProperties"] is False
    assert "writeOnly" not in text, "a secret in the schema is the object that names it"
    for section in _sections(Section):
        assert section.model_config.get("extra") == "forbid"
        assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_an_anchor_of_a_key_is_its_text(write: Any) -> None:
    config = load(write("models: [{&name id: *name, launch: {}}]\nkeys: [{id: k, anonymous: true}]\n"), {})
    assert config.models[0].id == "id"


def test_optional_packages_without_their_parent_are_not_installed() -> None:
    assert installed("pydantic.fields") and not installed("pydantic.fields", "no_such_package.below")


@pytest.mark.parametrize(("text", "size"), [("1B", 1), ("20MiB", 20971520), ("1.5KiB", 1536), ("2MB", 2000000), ("1kB", 1000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("30s", 30.0), ("15m", 900.0), ("1h", 3600.0), ("1d", 86400.0), ("0s", 0.0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@each_row("text", ["", "5", 5, 5.0, True, None, "-1s", "1 s", "s", "1s1s", "٣s", "1e3s", "1S", "inf s", "1MiB ", "1s\n", []])
def test_quantities_without_a_visible_unit_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="with its unit"):
        parse_duration(text)
    with pytest.raises(ValueError, match="with its unit"):
        parse_size(text)


@given(st.integers(0, 10**12 - 1), st.sampled_from(sorted(SIZE_UNITS)))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * SIZE_UNITS[unit]


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(DURATION_UNITS)))
def test_durations_are_as_exact_as_floats(whole: int, thousandths: int, unit: str) -> None:
    assert parse_duration(f"{whole}.{thousandths:03}{unit}") == float((whole * 1000 + thousandths) * DURATION_UNITS[unit] / 1000)


@given(st.integers(1, 10**9), st.sampled_from(list(DURATION_UNITS)))
def test_a_duration_that_is_written_is_read_again(whole: int, unit: str) -> None:
    seconds = parse_duration(f"{whole}{unit}")
    assert parse_duration(duration_text(seconds)) == seconds


@pytest.mark.parametrize(("text", "shown"), [("90d", "90d"), ("2160h", "90d"), ("90m", "90m"), ("1.5h", "90m"), ("0.5s", "500ms")])
def test_a_duration_is_written_in_its_largest_unit(text: str, shown: str) -> None:
    assert duration_text(parse_duration(text)) == shown
