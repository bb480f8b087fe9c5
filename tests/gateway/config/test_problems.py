"""The configuration that is wrong: every problem at once, each with its line, its path and what would be right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import ConfigurationError, Model, load, schema
from gateway.config.source import MAX_FILE
from gateway.system.cpus import usable_cpus
from tests.support.certificates import certificate
from tests.support.examples import examples
from upstream.balancing.policies import POLICIES
from upstream.vllm.presets import PRESETS

HASH = "sha256:" + "9f" * 32
CANARY = "canary-9f2c41"
NO_KEYS = "no keys are configured, so no client could use the gateway; create a key with `vllm-gateway keys new --id NAME`"
NO_HASH = "is missing: sha256:… of a key (see `vllm-gateway keys new`), or anonymous: true for requests without a key"
NO_PORT = "expected the number of a port, 1 to 65535, or its name"
NO_MOUNT = "expected a path such as /team/model, without a trailing slash, of letters, digits and . _ ~ -"
NETWORK = "10.0.0.0/8; write 10.0.0.0/8 for the whole network, or 10.0.0.1 for one address"
SPLIT = "models between which the requests for this name are divided, with their weights, e.g. {model-a: 95, model-b: 5}"
LISTEN = "expected an address of this machine, e.g. 127.0.0.1; 0.0.0.0 is all IPv4 addresses, and :: is all addresses"
VARIABLE = "this file has no such variables; write {env: X} where a secret is expected, and elsewhere the value itself"
HOUR = "write `budgets: [{window: 1h, tokens: …}]` in `limits`, with the length of the window"
DECIMAL = "write it in decimal without leading zeros, or text in quotes"
TWICE = "; IDs, aliases and LoRA IDs share one namespace"


def problems(folder: Path, text: str, **environ: str) -> list[str]:
    """Return the problems that ``load`` reports for ``text``, without the folder."""
    path = folder / "g.yaml"
    path.write_text(text)
    try:
        load(path, environ)
    except ConfigurationError as error:
        return [str(problem).replace(f"{folder}/", "") for problem in error.problems]
    return []


def about_model(folder: Path, text: str) -> list[str]:
    """Return the problems of a model with the further settings ``text``, which start on line 3."""
    body = "".join(f"    {line}\n" for line in text.splitlines())
    found = problems(folder, f"models:\n  - id: m\n{body}keys: [{{id: k, anonymous: true}}]\n")
    return [problem.removeprefix("g.yaml:").replace("models[0].", "") for problem in found]


def about_keys(folder: Path, text: str) -> list[str]:
    found = problems(folder, f"models: [{{id: Qwen/Q, aliases: [qwen], launch: {{}}}}]\nkeys:\n{text}")
    return [problem.removeprefix("g.yaml:") for problem in found]


def about_server(folder: Path, text: str) -> list[str]:
    found = problems(folder, f"models: [{{id: m, launch: {{}}}}]\nkeys: [{{id: k, anonymous: true}}]\nserver: {text}\n")
    return [problem.removeprefix("g.yaml:3: ") for problem in found]


MANY = f"""\
server:
  prot: 8000
  port: "abc"
  workers: 1.5
  drain: 30
  body_limit: 20 MiB
  drain: 10s
models:
  - id: Qwen/Qwen3
    aliases: [qwen]
    launch:
      replicas: 2
      gpus: [[0, 1]]
      args: {{--max-model-len: 1, api_key: {CANARY}}}
    task: embeding
  - id: qwen
    servers:
      - {{url: "10.0.0.5:8000", api_key: {CANARY}}}
      - {{url: "http://10.0.0.6:8000", api_key: {{env: NOT_THERE}}}}
      - {{url: "http://u:{CANARY}@10.0.0.6:8000"}}
    fallbacks: [Qwen/Qwen4, qwen]
  - id: empty
keys:
  - id: team-a
    hash: {CANARY}
    models: ["Qwne/*"]
    team: blue
    limits: {{request_per_minute: 5}}
  - id: team-a
    hash: {HASH}
  - id: nobody
teams: [{{id: blues}}]
ledger: postgresql://u:{CANARY}@db/usage
default_model: Qwen/Qwen4
"""

EXPECTED = """\
g.yaml:2: server.prot: unknown key; did you mean `port`?
g.yaml:3: server.port: expected a whole number, found 'abc'
g.yaml:4: server.workers: expected a whole number, found 1.5
g.yaml:5: server.drain: expected a duration with its unit, e.g. 30s (ms, s, m, h, d)
g.yaml:6: server.body_limit: expected a size with its unit, e.g. 20MiB (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)
g.yaml:7: server.drain: this key is already on line 5
g.yaml:13: models[0].launch.gpus: has GPUs for 1 replicas, but replicas is 2; write one list of GPUs for each, e.g. [[0, 1]]
g.yaml:14: models[0].launch.args.--max-model-len: write the option without its dashes
g.yaml:14: models[0].launch.args.api_key: the gateway gives every launched server its own key
g.yaml:15: models[0].task: expected `chat`, `completion`, `embedding`, `rerank`, `classify` or `transcription`; did you mean `embedding`?
g.yaml:16: models[1].id: this model name is already on line 10; IDs, aliases and LoRA IDs share one namespace
g.yaml:18: models[1].servers[0].url: a server's URL starts with http://, https:// or unix:; expected e.g. http://10.0.0.5:8000
g.yaml:18: models[1].servers[0].api_key: secrets must not be in this file: write {env: NAME} or {file: PATH}
g.yaml:19: models[1].servers[1].api_key: the environment variable NOT_THERE is not set
g.yaml:20: models[1].servers[2].url: a server's URL has no credentials, query or fragment; use api_key for its key; expected e.g. http://10.0.0.5:8000
g.yaml:21: models[1].fallbacks[0]: there is no such model; did you mean `Qwen/Qwen3`?
g.yaml:21: models[1].fallbacks[1]: a model cannot be its own fallback
g.yaml:22: models[2]: has no servers: write one of launch ({} for the defaults), servers, discover, split
g.yaml:25: keys[0].hash: expected sha256: and 64 hexadecimal digits, as `vllm-gateway keys hash` prints; never the key itself
g.yaml:26: keys[0].models[0]: matches no model; did you mean `qwen`?
g.yaml:27: keys[0].team: there is no such team; did you mean `blues`?
g.yaml:28: keys[0].limits.request_per_minute: unknown key; did you mean `requests_per_minute`?
g.yaml:29: keys[1].id: this key id is already on line 24
g.yaml:31: keys[2].hash: is missing: sha256:… of a key (see `vllm-gateway keys new`), or anonymous: true for requests without a key
g.yaml:33: ledger: passwords must not be in this file: write {env: NAME} or {file: PATH} for the whole URL
g.yaml:34: default_model: there is no such model; did you mean `Qwen/Qwen3`?
""".splitlines()


def test_an_unknown_balance_policy_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "models: [{id: a, servers: [{url: http://a}], balance: least_bussy}]\nkeys: [{id: b, anonymous: true}]")
    assert found.startswith("g.yaml:1: models[0].balance: expected ") and found.endswith("; did you mean `least_busy`?")
    assert all(f"`{balance}`" in found for balance in POLICIES)


def test_every_problem_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    found = problems(tmp_path, MANY)
    assert found == EXPECTED
    assert CANARY not in "".join(found)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("a: [1\nb: 2", "g.yaml:2: this is not YAML: did not find expected ',' or ']'"),
        ("models:\n\t- id: a", "g.yaml:2: a tab is used for indentation; YAML requires spaces"),
        ("a: \x01", "g.yaml:1: the character '\\x01' is not allowed in YAML"),
        ("a: 1\n---\nb: 1", "g.yaml:2: a second YAML document begins here; a configuration is one document"),
        ("[" * 100_000, "g.yaml:1: more than 64 levels of nesting"),
        ("a: &a [*a]", "g.yaml:1: `*a` refers to itself"),
        ("a: *b", "g.yaml:1: `*b` refers to no anchor before it"),
        ("? [a]\n: b", "g.yaml:1: a key is text, not a list or mapping"),
        ("", "g.yaml:1: expected a mapping such as models: … and keys: …"),
        ("a: 'b", "g.yaml:1: this is not YAML: found unexpected end of stream"),
        ("a: 1\nb\nc: 2", "g.yaml:3: this is not YAML: could not find expected ':' (is a colon missing, or a quote not closed?)"),
        ("a: &b c\n*b : d", "g.yaml:2: a key must not be an alias"),
    ],
)
def test_what_cannot_be_understood_is_one_problem(tmp_path: Path, text: str, reported: str) -> None:
    found = problems(tmp_path, text)
    assert found[0] == reported
    assert len(found) == 1 or not text


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    layers = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]\n" for i in range(1, 30))
    assert problems(tmp_path, f"x0: &x0 [{', '.join(['1'] * 10)}]\n{layers}") == ["g.yaml:5: aliases expand to more than 100000 values"]


def test_tags_run_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made"
    found = problems(tmp_path, f"server:\n  host: !!python/object/apply:os.mkdir [{target}]\n  port: !env PORT\n")
    assert "g.yaml:2: server.host: the tag `!!python/object/apply:os.mkdir` is not allowed; write a plain value" in found
    assert "g.yaml:3: server.port: the tag `!env` is not allowed; write a plain value" in found
    assert not target.exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: cannot be read: No such file or directory"):
        load(tmp_path / "none.yaml", {})
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe4\n")
    with pytest.raises(ConfigurationError, match=r"latin\.yaml:2: this is not UTF-8 text"):
        load(tmp_path / "latin.yaml", {})
    (tmp_path / "large.yaml").touch()
    os.truncate(tmp_path / "large.yaml", MAX_FILE + 1)
    with pytest.raises(ConfigurationError, match=r"large\.yaml: cannot be read: it is larger than 64 MiB"):
        load(tmp_path / "large.yaml", {})


def test_without_models_or_keys_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert problems(tmp_path, "models: []\n") == [
        "g.yaml:1: models: no model is configured; write at least one, e.g. models: [{id: my-model, launch: {}}]",
        f"g.yaml:1: keys: {NO_KEYS}",
    ]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (
            "launch: {}\nservers: [{url: 'http://a'}]",
            ["4: servers: a model has only one of launch, servers, discover and split; this one already has launch"],
        ),
        ("servers: []", ["3: servers: expected at least 1 entry, found a list"]),
        (
            "servers: [{url: 'http://h:x'}]",
            ["3: servers[0].url: the port is not a number from 0 to 65535; expected e.g. http://10.0.0.5:8000"],
        ),
        ("servers: [{url: 'http://a'}, {url: 'http://a'}]", ["3: servers[1].url: this server is already on line 3"]),
        ("discover: {}", ["3: discover: expected one of kubernetes and dns"]),
        ("launch: {}\nloras: [{id: l}]", ["4: loras[0]: path is missing: where the launched server loads the adapter from"]),
        (
            "launch: {}\naliases: [a]\nloras: [{id: m, path: /l}, {id: l, path: /l, aliases: [a, l]}]",
            [f"5: loras[0].id: this model name is already on line 2{TWICE}"]
            + [f"5: loras[1].aliases[{at}]: this model name is already on line {line}{TWICE}" for at, line in ((0, 4), (1, 5))],
        ),
        ("launch: {args: {enable-lora: true}}\nloras: [{id: l, path: /l}]", ["3: launch.args.enable-lora: loras says it already"]),
        ("launch: {}\naliases: x", ["4: aliases: expected a list, found 'x'; write [x]"]),
        ("launch: {command: a b}", ["3: launch.command: expected a list, found text; write [a, b]"]),
        ("launch: {}\naliases: [m]", [f"4: aliases[0]: this model name is already on line 2{TWICE}"]),
        ("launch: {}\nmounts: [/a/]", [f"4: mounts[0]: {NO_MOUNT}"]),
        ("launch: {}\nmounts: [/v1]", ["4: mounts[0]: the first part is reserved for the gateway's own routes; choose another"]),
        ("launch: {}\nmounts: [/a, /a]", ["4: mounts[1]: this mount is already on line 4"]),
        ("launch: {}\nmounts: [/a/../b]", [f"4: mounts[0]: {NO_MOUNT}"]),
        ("launch: {}\nfallbacks: [m]", ["4: fallbacks[0]: a model cannot be its own fallback"]),
        ("launch: {}\nfallbacks: [5]", ["4: fallbacks[0]: expected text, found 5; write it in quotes"]),
        ("launch: {}\n<<: [1]", ["4: <<: `<<` merges mappings only"]),
        ("launch: {}\ncost_policy: {explain: true}", ["2: models[0]: cost_policy has no effect without `balance: cost`"]),
        ("launch: {}\noverrides: {a: 9223372036854775808}", ["4: overrides: a whole number has at most 64 bits"]),
        (
            "launch: {}\nbody: {media_hosts: ['*.example.com', a/b]}",
            ["4: body.media_hosts[1]: expected a host such as images.example.com, *.example.com or 10.0.0.7:8080, or *"],
        ),
        ("launch: {args: {--x: 1}}", ["3: launch.args.--x: write the option without its dashes"]),
        ("launch: {args: {a b: 1}}", ["3: launch.args.a b: this is not an option name"]),
        (
            "launch: {preset: qwen9}",
            [f"3: launch.preset: there is no such preset; did you mean `qwen3`?; the presets are {', '.join(PRESETS)}"],
        ),
        (f"launch: {{model: {'x' * 300}}}", []),  # too long for a file's name
        ("launch: {group: ''}", ["3: launch.group: expected some text, found nothing"]),
        ("discover: {kubernetes: {service: s, port: 65535}}", []),
        ("discover: {kubernetes: {service: s, port: 65536}}", [f"3: discover.kubernetes.port: {NO_PORT}"]),
        ("discover: {kubernetes: {service: s, port: A_B}}", [f"3: discover.kubernetes.port: {NO_PORT}"]),
        ("launch: {}\noverrides: {model: x}", ["4: overrides: `model` is set by the request and cannot be set here"]),
        ("launch: {}\ndefaults: {a: [.inf]}", ["4: defaults: JSON has no infinite numbers and no NaN"]),
        ("launch: {}\nbody: {allow: [x], refuse: [x]}", ["4: body.allow[0]: is also in body.refuse; write the field in one list only"]),
        ("launch: {env: {A: 1}}", ["3: launch.env.A: expected text: write the value in quotes"]),
        ("launch: {env: {'1 A': b}}", ["3: launch.env.1 A: expected a name such as HF_HOME, found text"]),
        ("launch: {gpus: [[0, 0]]}", ["3: launch.gpus[0]: expected the numbers of this replica's GPUs, each once"]),
        ("launch: {args: {x: }}", ["3: launch.args.x: has no value; write true for an option without a value"]),
        (
            "launch: {replicas: 2, args: {port: 8001}}",
            ["3: launch.args.port: 2 replicas cannot share one port; omit it, and each gets its own socket"],
        ),
        (
            "launch: {replicas: 2, args: {uds: /x.sock}}",
            ["3: launch.args.uds: 2 replicas cannot share one uds; omit it, and each gets its own socket"],
        ),
        ("launch: {replicas: 1, args: {port: 8001}}", []),
        ("launch: {replicas: true}", ["3: launch.replicas: expected a whole number, found true"]),
        ("launch: {replicas: '2'}", ["3: launch.replicas: expected a whole number, found '2'; write it without quotes"]),
        ("launch: {model: 7}", ["3: launch.model: expected text, found 7; write it in quotes"]),
        ("launch: {startup_timeout: 0s}", ["3: launch.startup_timeout: must be more than zero"]),
        ("launch: 5", ["3: launch: expected a mapping, found 5; servers that the gateway launches; {} for the defaults"]),
        ("launch: {}\nbad key: 1", [f"4: bad key: unknown key; known here: {', '.join(Model.model_fields)}"]),
    ],
)
def test_models(tmp_path: Path, text: str, reported: list[str]) -> None:
    assert about_model(tmp_path, text) == reported


NOT_FOR_A_SPLIT = "a split has no servers, and so no such setting; set it for the models of the split"
ONLY_A_SPLIT = "matches only a split, whose requests count for the models that serve them; write these"
SERVED = """\
models:
  - {id: a, aliases: [also-a], launch: {}, loras: [{id: a-lora, path: /l}]}
  - {id: b, launch: {}}
"""


@pytest.mark.parametrize(
    ("mirror", "reported"),
    [
        ("{to: b, share: 5%}", []),
        ("{to: a-lora, share: 0.5%, max_inflight: 1}", []),
        ("{to: c, share: 100%}", []),
        ("{to: bb, share: 5%}", ["to: there is no such model; did you mean `b`?"]),
        ("{to: also-a, share: 5%}", ["to: is the model itself; name another model"]),
        ("{to: chat, share: 5%}", ["to: is a split; write one of its models"]),
        ("{share: 5%}", ["to: is missing: model that gets the copies"]),
        ("{to: b}", ["share: is missing: share of the requests that are copied"]),
        ("{to: b, share: 0.05}", ["share: expected a share in percent, e.g. 5%"]),
        ("{to: b, share: 101%}", ["share: a share is at most 100%"]),
        ("{to: b, share: 0%}", ["share: must be more than zero"]),
        ("{to: b, share: 5%, max_inflight: 0}", ["max_inflight: expected 1 or more, found 0"]),
    ],
)
def test_mirrors(tmp_path: Path, mirror: str, reported: list[str]) -> None:
    models = SERVED.replace("id: b,", "id: b, aliases: [c],").replace("launch: {}, loras", f"mirror: {mirror}, launch: {{}}, loras")
    found = problems(tmp_path, f"{models}  - {{id: chat, split: {{b: 1}}}}\nkeys: [{{id: k, anonymous: true}}]\n")
    assert [problem.removeprefix("g.yaml:2: models[0].mirror.") for problem in found] == reported


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ("split: {a: 95, b: 5}", []),
        ("split: {also-a: 1, a-lora: 1, b: 0}, sticky: session, aliases: [x], mounts: [/x], task: chat, capabilities: []", []),
        ("split: {a: 1, c: 1}", ["split.c: there is no such model"]),
        ("split: {a: 1, Chat: 1}", ["split.Chat: there is no such model"]),
        ("split: {a: 1, chat: 1}", ["split.chat: a split cannot contain itself"]),
        ("split: {a: 1, x: 1}, aliases: [x]", ["split.x: a split cannot contain itself"]),
        ("split: {a: 1, other: 1}", ["split.other: is a split itself; write its models"]),
        ("split: {a: 1, also-a: 1}", ["split.also-a: is the same model as a"]),
        ("split: {a: 0, b: 0}", ["split: all weights are 0, so no model would get a request"]),
        ("split: {}", ["split: expected at least 1 entry, found a mapping"]),
        ("split: {a: 5%}", ["split.a: expected a whole number, found text"]),
        ("split: {a: -1}", ["split.a: expected 0 or more, found -1"]),
        ("split: [a, b]", [f"split: expected a mapping, found a list; {SPLIT}"]),
        ("split: {a: 1}, servers: [{url: 'http://h'}]",
         ["split: a model has only one of launch, servers, discover and split; this one already has servers"]),
        ("split: {a: 1}, price: {prompt: 1}, fallbacks: [b]",
         [f"{name}: {NOT_FOR_A_SPLIT}" for name in ("fallbacks", "price")]),
        ("split: {a: 1}, price: null", []),
        ("split: {a: 1}, sticky: user", ["sticky: expected `key` or `session`"]),
        ("launch: {}, sticky: key", ["sticky: has no effect without split"]),
        ("launch: {}, fallbacks: [other]", ["fallbacks[0]: is a split; write one of its models"]),
    ],
)  # fmt: skip
def test_splits(tmp_path: Path, settings: str, reported: list[str]) -> None:
    text = f"{SERVED}  - {{id: other, split: {{b: 1}}}}\n  - {{id: chat, {settings}}}\nkeys: [{{id: k, anonymous: true}}]\n"
    found = problems(tmp_path, text)
    assert [problem.removeprefix("g.yaml:5: models[3].") for problem in found] == reported


def test_a_limit_for_a_split_alone_would_count_nothing(tmp_path: Path) -> None:
    limits = "{id: k, anonymous: true, limits: {models: [{models: [PATTERN], concurrent: 1}]}}"
    text = f"{SERVED}  - {{id: chat, aliases: [c], split: {{b: 1}}}}\nkeys: [{limits}]\n"
    for pattern in ("chat", "c", "c*"):
        found = problems(tmp_path, text.replace("PATTERN", pattern))
        assert found == [f"g.yaml:5: keys[0].limits.models[0].models[0]: {ONLY_A_SPLIT}"]
    assert problems(tmp_path, text.replace("PATTERN", "'*'")) == []


def _falling_back(**fallbacks: str) -> str:
    """Models by id, each with the alias ALSO-id and these fallbacks."""
    models = "".join(f"- {{id: {name}, aliases: [also-{name}], launch: {{}}, fallbacks: [{to}]}}\n" for name, to in fallbacks.items())
    return f"models:\n{models}keys: [{{id: k, hash: {HASH}}}]\n"


def test_fallbacks_that_go_round(tmp_path: Path) -> None:
    assert problems(tmp_path, _falling_back(a="b, d", b="c, d", c="also-d", d="")) == []
    (reported,) = problems(tmp_path, _falling_back(x="a", a="also-b", b="c, d", c="also-a", d=""))
    assert "fallbacks[0]: the fallbacks form a loop: " in reported and reported.count("->") == 3


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (
            f"- {{id: a, hash: {HASH}}}\n- {{id: b, hash: [{HASH.upper().replace('SHA', 'sha')}]}}\n",
            ["4: keys[1].hash[0]: this hash is already on line 3; a key belongs to one entry"],
        ),
        ("- {id: a, anonymous: true}\n- {id: b, anonymous: true}\n", ["4: keys[1].anonymous: only one entry can be anonymous; `a` is"]),
        (
            f"- {{id: a, anonymous: true, hash: {HASH}}}\n",
            ["3: keys[0].hash: the anonymous entry must not have a hash: it is for requests without a key"],
        ),
        ("- {id: a, anonymous: yes please}\n", ["3: keys[0].anonymous: expected true or false, found text"]),
        ("- {anonymous: true}\n", ["3: keys[0].id: is missing: name of the principal in metrics and usage records"]),
        ("- {id: a, anonymous: true, models: []}\n", ["3: keys[0].models: expected at least 1 entry, found a list"]),
        ("- {id: a, anonymous: true, models: [gpt-4]}\n", ["3: keys[0].models[0]: matches no model"]),
        ("- {id: a, anonymous: true, models: [qwen, 'Q*']}\n", []),
        ("- {id: a, anonymous: true, models: [5]}\n", ["3: keys[0].models[0]: expected text, found 5; write it in quotes"]),
        (
            '- {id: a, anonymous: true, expires: "0001-01-01T00:00:00+14:00"}\n',
            ["3: keys[0].expires: expected a time within the years 1 to 9999 in UTC"],
        ),
        (
            f"- {{id: a, hash: {{hash: sha256:{'a' * 64}, expires: 9999-12-31T23:59:59-12:00}}}}\n",
            ["3: keys[0].hash: expected a time within the years 1 to 9999 in UTC"],
        ),
        (
            "- {id: a, anonymous: true, expires: soon}\n",
            ["3: keys[0].expires: expected a date such as 2027-01-01 or a time such as 2027-01-01T12:00:00Z"],
        ),
        (
            "- {id: a, anonymous: true, expires: 2027-02-30}\n",
            ["3: keys[0].expires: this is not a valid timestamp; for text, write it in quotes"],
        ),
        ("- {id: a, anonymous: true, limits: {concurrent: 0}}\n", ["3: keys[0].limits.concurrent: expected 1 or more, found 0"]),
        ('- {id: a, anonymous: true, labels: {center: "1\\0"}}\n', ["3: keys[0].labels.center: must not contain a NUL"]),
        (
            "- {id: a, anonymous: true, user_header: X-User}\n",
            ["3: keys[0].user_header: an anonymous entry is used by unknown clients, which could name any user"],
        ),
        (
            "- {id: a, anonymous: true, limits: {per_user: {concurrent: 1}}}\n",
            ["3: keys[0].limits.per_user: an anonymous entry is used by unknown clients, whose end users are not known"],
        ),
        (
            f"- {{id: a, hash: sha256:{'a' * 64}, user_header: 'X User'}}\n",
            ["3: keys[0].user_header: expected the name of a header such as X-OpenWebUI-User-Id"],
        ),
        (
            f"- {{id: a, hash: sha256:{'a' * 64}, user_header: Authorization}}\n",
            ["3: keys[0].user_header: this header carries credentials, which the ledger must not store"],
        ),
        ("- {id: 'a b', anonymous: true}\n", ["3: keys[0].id: must not contain spaces or control characters"]),
        ("- 5\n", ["3: keys[0]: expected a mapping, found 5; write {id: …}"]),
    ],
)
def test_keys(tmp_path: Path, text: str, reported: list[str]) -> None:
    assert about_keys(tmp_path, text) == reported


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("{port: 9090}", ["server.admin.port: the admin port and the data port are both 9090; use different ports"]),
        ("{host: 127.0.0.2, port: 9090}", []),
        ("{port: 0, admin: {port: 0}}", []),
        ("{port: 70000}", ["server.port: expected 65535 or less, found 70000"]),
        (f"{{max_inflight: {2**63}}}", [f"server.max_inflight: expected less than {2**63}, found {2**63}"]),
        (
            "{tls: {cert: none.pem, key: 5}}",
            ["server.tls.cert: the file none.pem cannot be read: No such file or directory", "server.tls.key: expected the path of a file"],
        ),
        ("{trusted_proxies: [10.0.0.1/8]}", [f"server.trusted_proxies[0]: expected an address or network such as {NETWORK}"]),
        (
            "{cors: {origins: ['https://a/b']}}",
            ["server.cors.origins[0]: expected an origin such as https://app.example.com, with no path, or *"],
        ),
        (
            "{admin: {token: {env: A, file: b}}}",
            ["server.admin.token: a secret has exactly one of env and file: write {env: NAME} or {file: PATH}"],
        ),
        ("{admin: {token: {file: /}}}", ["server.admin.token: / is not a file"]),
        ('{admin: {token: {file: "a\\0b"}}}', ["server.admin.token: embedded null byte"]),
        ("{body_limit: 1.5B}", ["server.body_limit: a size is a whole number of bytes"]),
    ],
)
def test_server(tmp_path: Path, text: str, reported: list[str]) -> None:
    assert about_server(tmp_path, text) == reported


def test_a_certificate_and_its_key_belong_together(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    assert about_server(tmp_path, f"{{tls: {{cert: {cert}, key: {key}}}}}") == []
    assert about_server(tmp_path, f"{{tls: {{cert: {cert}, key: {cert}}}}}") == [
        "server.tls: cert and key are unusable: one of the files is not PEM"
    ]
    (tmp_path / "other").mkdir()
    other, _ = certificate(tmp_path / "other")
    assert about_server(tmp_path, f"{{tls: {{cert: {other}, key: {key}}}}}") == [
        "server.tls: cert and key are unusable: key values mismatch"
    ]


@pytest.mark.parametrize(
    ("first", "second", "reported"),
    [
        (
            "args: {port: 9001}",
            "args: {port: '9001'}",
            ["4: models[1].launch.args.port: port 9001 is given to `a` too, and both may run at the same time"],
        ),
        (
            "args: {port: 9001}, start: on_demand",
            "args: {port: 9001}, gpus: [[1]]",
            ["4: models[1].launch.args.port: port 9001 is given to `a` too, and both may run at the same time"],
        ),
        ("args: {port: 9001, host: 127.0.0.2}", "args: {port: 9001}", []),
        ("args: {port: 9001}, group: g", "args: {port: 9001}, group: g, start: on_demand", []),
        ("args: {port: 9001}, gpus: [[0]], start: on_demand", "args: {port: 9001}, gpus: [[0]]", []),
        ("args: {port: 8000}", "", ["3: models[0].launch.args.port: port 8000 is the gateway's own, server.port"]),
        ("args: {port: 9090, host: '::'}", "", ["3: models[0].launch.args.port: port 9090 is the gateway's own, server.admin.port"]),
        ("args: {port: 9090, host: 10.0.0.7}", "", []),
        (
            "args: {uds: /run/s.sock}",
            "args: {uds: /run/s.sock}",
            ["4: models[1].launch.args.uds: /run/s.sock is given to `a` too, and both may run at the same time"],
        ),
        ("args: {uds: /run/s.sock}", "args: {uds: /run/t.sock}", []),
        ("args: {uds: /run/s.sock}, group: g", "args: {uds: /run/s.sock}, group: g, start: on_demand", []),
    ],
)
def test_places_of_launched_servers(tmp_path: Path, first: str, second: str, reported: list[str]) -> None:
    models = f"models:\n  # two\n  - {{id: a, launch: {{{first}}}}}\n  - {{id: b, launch: {{{second}}}}}\n"
    assert problems(tmp_path, f"{models}keys: [{{id: k, anonymous: true}}]\n") == [f"g.yaml:{line}" for line in reported]


def about_limits(folder: Path, key: str, *, price: str = "", rest: str = "") -> list[str]:
    """Return the problems of a key with these limits, without file and line."""
    models = f"models: [{{id: m, launch: {{}}{price}}}]\n"
    found = problems(folder, f"{models}keys:\n  - {{id: k, anonymous: true, limits: {{{key}}}}}\n{rest}\n")
    return [each.split(": ", 1)[1] for each in found]


def test_limits(tmp_path: Path) -> None:
    assert about_limits(tmp_path, "concurrent: 1", rest="server: {workers: 4}") == []
    assert about_limits(tmp_path, "models: [{models: [m], max_tokens: 5}]") == []
    assert about_limits(tmp_path, "models: [{models: [n], max_tokens: 5}]") == ["keys[0].limits.models[0].models[0]: matches no model"]
    assert about_limits(tmp_path, "models: [{models: [m]}]") == ["keys[0].limits.models[0]: contains no limit, e.g. requests_per_minute"]
    assert about_limits(tmp_path, "cost_per_day: 0") == [
        "keys[0].limits.cost_per_day: expected more than 0.0, found 0",
        "keys[0].limits.cost_per_day: no model has a price, so no request has a cost; set models[].price",
    ]
    assert about_limits(tmp_path, "cost_per_day: 0.5", price=", price: {prompt: 1}") == []
    assert about_limits(tmp_path, "cost_per_day: 1", price=", price: {prompt: 1000000001}") == [
        "models[0].price.prompt: expected 1000000000.0 or less, found 1000000001"
    ]
    digits = "expected at most 9 digits after the decimal point, and at most 15 in total"
    assert about_limits(tmp_path, "cost_per_day: 0.0000000001", price=", price: {cached: 0.1234567891, reasoning: -1}") == [
        f"models[0].price.cached: {digits}",
        "models[0].price.reasoning: expected 0.0 or more, found -1",
        f"keys[0].limits.cost_per_day: {digits}",
    ]
    assert about_limits(tmp_path, "cost_per_month: 9000001", price=", price: {prompt: .inf, completion: '1'}") == [
        "models[0].price.prompt: expected a finite number, found inf",
        "models[0].price.completion: expected a number, found '1'; write it without quotes",
        "keys[0].limits.cost_per_month: expected 9000000.0 or less, found 9000001",
    ]
    assert about_limits(tmp_path, "concurrent: 1", rest="teams: [{id: t, limits: {models: [{models: [x], concurrent: 1}]}}]") == [
        "teams[0].limits.models[0].models[0]: matches no model"
    ]
    policy = "{max_keys: 0, models: [x], limits: {cost_per_day: 1, models: [{models: [y], concurrent: 1}]}}"
    assert about_limits(tmp_path, "concurrent: 1", rest=f"teams: [{{id: t, self_service: {policy}}}]") == [
        "teams[0].self_service.max_keys: expected 1 or more, found 0",
        "teams[0].self_service.models[0]: matches no model",
        "teams[0].self_service.limits.models[0].models[0]: matches no model",
        "teams[0].self_service.limits.cost_per_day: no model has a price, so no request has a cost; set models[].price",
    ]


@pytest.mark.parametrize(
    ("slo", "reported"),
    [
        ("{ttft: 2s, itl: 60ms}", []),
        ("{itl: 60ms}", []),
        ("{}", ["4: slo: contains no objective: set ttft, itl, or both"]),
        ("{ttft: 0s}", ["4: slo.ttft: must be more than zero"]),
    ],
)
def test_objectives(tmp_path: Path, slo: str, reported: list[str]) -> None:
    assert about_model(tmp_path, f"launch: {{}}\nslo: {slo}") == reported


@pytest.mark.parametrize(
    ("limits", "reported"),
    [
        ("budgets: [{window: 168h, tokens: 1}, {window: 7d, tokens: 1, soft: true}, {window: day, tokens: 1}]", None),
        ("budgets: [{window: 7d}]", "budgets[0]: contains no budget: set tokens, cost, or both"),
        ("session: {}", "session: contains no budget: set tokens, cost, or both"),
        (
            "budgets: [{window: 7w, tokens: 1}]",
            "budgets[0].window: expected day, week, month, or the length of a rolling window, e.g. 7d (m, h, d)",
        ),
        ("budgets: [{window: 90s, tokens: 1}]", "budgets[0].window: a rolling window is whole minutes, up to 366d"),
        ("budgets: [{window: 367d, tokens: 1}]", "budgets[0].window: a rolling window is whole minutes, up to 366d"),
        (
            "budgets: [{window: 168h, tokens: 1}, {window: 7d, tokens: 2}]",
            "budgets: two entries have the same window; write tokens and cost into one entry",
        ),
    ],
)
def test_budgets(tmp_path: Path, limits: str, reported: str | None) -> None:
    assert about_limits(tmp_path, limits) == ([] if reported is None else [f"keys[0].limits.{reported}"])


@pytest.mark.parametrize(
    ("limits", "reported"),
    [
        ("requests_per_minute: 1, budgets: [{window: 7d, tokens: 1}], missing: refused, max_users: 100000", None),
        ("missing: unlimited", ": contains no limit, e.g. requests_per_minute"),
        ("concurrent: 1, missing: refuse", ".missing: expected `shared`, `refused` or `unlimited`; did you mean `refused`?"),
        (
            "concurrent: 1, max_tokens: 5",
            ".max_tokens: unknown key; it belongs in `models[].body` or `keys[].limits` or `keys[].limits.models[]`",
        ),
        ("concurrent: 1, max_users: 0", ".max_users: expected 1 or more, found 0"),
        ("cost_per_day: 1", ".cost_per_day: no model has a price, so no request has a cost; set models[].price"),
    ],
)
def test_limits_of_end_users(tmp_path: Path, limits: str, reported: str | None) -> None:
    keys = f"keys: [{{id: k, hash: sha256:{'a' * 64}, limits: {{per_user: {{{limits}}}}}}}]"
    found = problems(tmp_path, f"models: [{{id: m, launch: {{}}}}]\n{keys}\n")
    assert [each.split(": ", 1)[1] for each in found] == ([] if reported is None else [f"keys[0].limits.per_user{reported}"])


def test_the_address_of_a_collector(tmp_path: Path) -> None:
    assert about_limits(tmp_path, "concurrent: 1", rest="tracing: {endpoint: 'otel:4318'}") == [
        "tracing.endpoint: expected a URL such as http://otel-collector:4318"
    ]


@pytest.mark.parametrize(
    ("url", "is_valid"),
    [
        ("https://jaeger.example.com/trace/{trace_id}", True),
        ('http://localhost:3000/explore?panes={"a":{"datasource":"tempo","queries":[{"query":"{trace_id}"}]}}', True),
        ("https://jaeger.example.com/trace/", False),
        ("https://{trace_id}.example.com/", False),
        ("https://user@jaeger.example.com/{trace_id}", False),
        ("javascript:alert('{trace_id}')//https://jaeger.example.com/{trace_id}", False),
        ("https://jaeger.example.com/ {trace_id}", False),
    ],
)
def test_the_address_of_a_trace(tmp_path: Path, url: str, is_valid: bool) -> None:
    rest = yaml.safe_dump({"tracing": {"endpoint": "http://otel:4318", "trace_url": url}})
    message = "tracing.trace_url: expected a URL with {trace_id}, such as https://jaeger.example.com/trace/{trace_id}"
    assert about_limits(tmp_path, "concurrent: 1", rest=rest) == ([] if is_valid else [message])


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        ("redis://localhost", None),
        ("rediss://me@redis.example:6380/2", None),
        ("unix:///run/redis.sock?db=1", None),
        ("unix://", "the path of the socket is missing: unix:///run/redis.sock"),
        ("redis:///0", "the host is missing: redis://localhost:6379/0"),
        ("redis://h:0x/0", "the host or the port is not valid"),
        ("redis://h/one", "the path must be the number of a database, as in redis://localhost:6379/0"),
        ("http://h", "expected a URL such as redis://localhost:6379/0"),
        ("'redis://[::1/0'", "expected a URL such as redis://localhost:6379/0"),
    ],
)
def test_where_limits_are_counted(tmp_path: Path, url: str, reported: str | None) -> None:
    expected = [] if reported is None else [f"limits_store: {reported}"]
    assert about_limits(tmp_path, "concurrent: 1", rest=f"limits_store: {url}") == expected


def test_the_file_of_keys_speaks_for_itself(tmp_path: Path) -> None:
    text = f"models: [{{id: m, launch: {{}}}}]\nkeys: [{{id: a, hash: {HASH}}}]\nkeys_file: k.yaml\n"
    assert problems(tmp_path, text) == ["g.yaml:3: keys_file: k.yaml cannot be read: No such file or directory"]
    (tmp_path / "k.yaml").write_text(f"keys:\n  - {{id: a, hash: {HASH}}}\n  - {{id: b, hahs: x}}\n")
    assert problems(tmp_path, text) == [
        "k.yaml:2: keys[0].id: this key id is already on g.yaml:2",
        "k.yaml:2: keys[0].hash: this hash is already on g.yaml:2; a key belongs to one entry",
        "k.yaml:3: keys[1].hahs: unknown key; did you mean `hash`?",
        "k.yaml:3: keys[1].hash: expected sha256: and 64 hexadecimal digits, as `vllm-gateway keys hash` prints; never the key itself",
    ]
    (tmp_path / "k.yaml").write_text("keys: [")
    assert problems(tmp_path, text) == ["k.yaml:1: this is not YAML: did not find expected node content"]
    (tmp_path / "k.yaml").write_text("")
    assert problems(tmp_path, text) == []
    assert problems(tmp_path, text.replace(f"keys: [{{id: a, hash: {HASH}}}]", "")) == [f"g.yaml:3: keys_file: {NO_KEYS}"]


def test_a_secret_that_is_no_line_of_text(tmp_path: Path) -> None:
    text = "models: [{id: m, launch: {}}]\nkeys: [{id: k, anonymous: true}]\nserver: {admin: {token: {file: t}}}\n"
    contents = {
        b"": "the file t is empty",
        b"a\nb": "the secret contains line breaks or other control characters",
        b"\xff": "the file t is not UTF-8 text",
    }
    for content, reported in contents.items():
        (tmp_path / "t").write_bytes(content)
        assert problems(tmp_path, text) == [f"g.yaml:3: server.admin.token: {reported}"]
    (tmp_path / "t").write_bytes(b"x" * 70_000)
    assert problems(tmp_path, text) == ["g.yaml:3: server.admin.token: the file t is larger than 65536 bytes"]


def test_many_keys_load(tmp_path: Path) -> None:
    entries = "".join(f"  - {{id: k{i}, hash: 'sha256:{i:064x}', models: ['Qwen/*']}}\n" for i in range(5_000))
    path = tmp_path / "g.yaml"
    path.write_text(f"models: [{{id: Qwen/Q, launch: {{}}}}]\nkeys:\n{entries}")
    assert len(load(path, {}).keys) == 5_000


_YAML_TERMS = st.sampled_from(
    [
        "models",
        "keys",
        "id",
        "launch",
        "servers",
        "url",
        "hash",
        "server",
        "port",
        "gpus",
        "args",
        "env",
        "limits",
        "<<",
        "&a",
        "*a",
        "null",
        "!!x",
    ]
)
_TEXTS = st.lists(st.one_of(_YAML_TERMS, st.text(max_size=5), st.sampled_from(": -[]{},\n \t'\"#|>%&*!")), max_size=40).map("".join)
_SECTIONS = schema()["$defs"]
_NAMES = st.sampled_from(sorted({name for section in _SECTIONS.values() for name in section["properties"]}))
_GOOD = st.sampled_from(["m", "/a", "1s", "20MiB", HASH, "*", "http://h:1", "redis://h"])
_VALUES = st.one_of(_GOOD, _NAMES, st.integers(-5, 10**6), st.booleans(), st.none(), st.floats(), st.dates(), st.text(max_size=8))
_TREES = st.recursive(
    _VALUES, lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(_NAMES, below, max_size=4)), max_leaves=20
)


def _section(name: str) -> st.SearchStrategy[dict[str, object]]:
    """A section with its own keys and whatever values."""
    return st.dictionaries(st.sampled_from(sorted(_SECTIONS[name]["properties"])), _TREES, max_size=6)


_MODELS = st.builds(
    lambda model, launch: {**model, **launch}, _section("Model"), st.fixed_dictionaries({}, optional={"launch": _section("Launch")})
)
_DOCUMENTS = st.fixed_dictionaries(
    {"models": st.lists(_MODELS, max_size=3), "keys": st.lists(_section("Key"), max_size=3)},
    optional={"server": _section("ServerSection"), "teams": _TREES, "limits_store": _TREES, "keys_file": _TREES, "tracing": _TREES},
)


@pytest.mark.parametrize("kind", ["text", "bytes"])
def test_whatever_is_in_the_file_it_loads_or_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "g.yaml"
    contents = st.binary(max_size=200) if kind == "bytes" else _TEXTS.map(lambda text: text.encode("utf-8", "replace"))

    @settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(contents)
    def check(content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(ConfigurationError) as caught:
            load(path, {})
        assert all("\n" not in str(problem) for problem in caught.value.problems)

    check()


def test_whatever_shape_the_document_has_it_is_judged_in_words(tmp_path: Path) -> None:
    pydantics = ("Input ", "Value ", "String ", "Tuple ", "Dictionary ")

    @settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(_DOCUMENTS)
    def check(document: object) -> None:
        reported = problems(tmp_path, yaml.safe_dump(document))
        assert [one for one in reported if "\n" in one or one.split(": ", 2)[-1].startswith(pydantics)] == []

    check()


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ("server: {host: all}", [f"server.host: {LISTEN}"]),
        ("server: {host: 300.1.1.1}", [f"server.host: {LISTEN}"]),
        ("server: {host: '*'}", [f"server.host: {LISTEN}"]),
        ("server: {host: localhost, admin: {host: '::1'}}", []),
        ("server: {port: 08000}", ["server.port: expected a whole number, found '08000'; write it without quotes"]),
        ("server: {port: 010}", ["server.port: YAML reads this number as 8; write it in decimal without leading zeros, or text in quotes"]),
        (
            "server: {port: 1:30}",
            ["server.port: YAML reads this number as 90; write it in decimal without leading zeros, or text in quotes"],
        ),
        ("server: {max_inflight: 1_000}", []),
        ("server: {max_inflight: 1e3}", ["server.max_inflight: expected a whole number, found '1e3'; write 1000"]),
        ("server: {max_inflight: '1,000'}", ["server.max_inflight: expected a whole number, found '1,000'; write 1000"]),
        ("server: {cors: {origins: '*'}}", ["server.cors.origins: expected a list, found '*'; write [*]"]),
        ("server.port: 8001", ["server.port: unknown key; write `server: {port: …}`"]),
        ("server: {admin: {token: '${X}'}}", [f"server.admin.token: {VARIABLE}"]),
        ("server: {host: $X}", [f"server.host: {VARIABLE}"]),
        ("ledger: os.environ/X", [f"ledger: {VARIABLE}"]),
        ("default_model: '${X}'", [f"default_model: {VARIABLE}", "default_model: there is no such model"]),
        ("ledger: mysql://a/b", ["ledger: expected a URL such as sqlite:///usage.db or postgresql://user@host:5432/name"]),
        ("ledger: postgresql://me@a:1,b:2/db?target_session_attrs=read-write", []),
        ("ledger: postgresql://a:1,b:x/db", ["ledger: expected hosts such as postgresql://user@a:5432,b:5432/name"]),
        ("ledger: sqlite:///usage.db\nstore: ledger", []),
        ("ledger: sqlite:///usage.db\nstore: {url: ledger, max_age: 1h}", []),
        ("store: sqlite:///keys.db", []),
        ("store: ledger", ["store: there is no ledger; set ledger, or write the URL of a database here"]),
        ("store: {url: ledger}", ["store.url: there is no ledger; set ledger, or write the URL of a database here"]),
        ("store: mysql://a/b", ["store: expected a URL such as sqlite:///usage.db or postgresql://user@host:5432/name"]),
        ("store: {max_age: 1h}", ["store.url: is missing: database: `ledger`, or a URL as for the ledger; SQLite is for one gateway"]),
        ("teams: [{id: t, rpm_limit: 5}]", ["teams[0].rpm_limit: unknown key; write `limits: {requests_per_minute: …}`"]),
        ("teams: [{id: t, limits: {tokens_per_hour: 5}}]", [f"teams[0].limits.tokens_per_hour: unknown key; {HOUR}"]),
        ("drain: 5s", ["drain: unknown key; it belongs in `server`"]),
        ("trusted_proxies: []", ["trusted_proxies: unknown key; it belongs in `server`"]),
    ],
)
def test_a_message_says_what_to_write(tmp_path: Path, settings: str, reported: list[str]) -> None:
    found = problems(tmp_path, f"{settings}\nmodels: [{{id: m, launch: {{}}}}]\nkeys: [{{id: k, anonymous: true}}]\n")
    assert [problem.removeprefix("g.yaml:1: ") for problem in found] == reported


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ("launch: {gpus: [0]}", ["3: launch.gpus[0]: expected a list, found 0; GPU numbers of each replica, e.g. [[0, 1], [2, 3]]"]),
        ("launch: {gpus: '0,1'}", ["3: launch.gpus: expected a list, found '0,1'; GPU numbers of each replica, e.g. [[0, 1], [2, 3]]"]),
        ("servers: ['http://a:1']", ["3: servers[0]: expected a mapping, found text; write {url: …}"]),
        ("launch: {}\ntensor_parallel_size: 2", ["4: tensor_parallel_size: unknown key; it belongs in `models[].launch.args`"]),
        ("launch: {max-model-len: 2}", ["3: launch.max-model-len: unknown key; it belongs in `models[].launch.args`"]),
        ("launch: {env: {A: '${X}'}}\ndefaults: {user: '${X}'}", []),
    ],
)
def test_a_message_about_a_model_says_what_to_write(tmp_path: Path, settings: str, reported: list[str]) -> None:
    assert about_model(tmp_path, settings) == reported


def test_a_misspelled_section_is_one_problem_and_its_content_is_checked(tmp_path: Path) -> None:
    text = "modles:\n  - {id: m, launch: {}, fallbacks: [n]}\nkeys: [{id: k, anonymous: true, models: [m]}]\ndefault_model: m\n"
    assert problems(tmp_path, text) == [
        "g.yaml:1: modles: unknown key; did you mean `models`?",
        "g.yaml:2: models[0].fallbacks[0]: there is no such model",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  relays: 2\n", "g.yaml:2: server.relays: this setting was renamed; write `workers`"),
        ("log:\n  levels: {relay: debug}\n", "g.yaml:2: log.levels.relay: this part was renamed; write `worker`"),
    ],
)
def test_a_renamed_setting_is_refused_with_its_new_name(tmp_path: Path, text: str, message: str) -> None:
    assert message in problems(tmp_path, f"{text}models: [{{id: m, launch: {{}}}}]\nkeys: [{{id: k, anonymous: true}}]\n")


def test_a_bound_that_the_workers_cannot_share(tmp_path: Path) -> None:
    keys = "keys: [{{id: k, anonymous: true}}]\n"
    text = "server: {{workers: 4, max_inflight: {}}}\nmodels: [{{id: m, launch: {{}}, max_inflight: {}}}]\n" + keys
    assert problems(tmp_path, text.format(4, 4)) == []
    message = "4 workers cannot share 3 requests: each needs at least one; raise this limit or lower server.workers"
    assert problems(tmp_path, text.format(3, 3)) == [
        f"g.yaml:1: server.max_inflight: {message}",
        f"g.yaml:2: models[0].max_inflight: {message}",
    ]


@pytest.mark.parametrize(
    ("limit", "reported"),
    [
        ("auto", []),
        ("1", []),
        ("many", ["4: max_inflight: expected a whole number of at least 1, or auto"]),
        ("0", ["4: max_inflight: expected a whole number of at least 1, or auto"]),
        ("true", ["4: max_inflight: expected a whole number of at least 1, or auto"]),
    ],
)
def test_the_limit_of_a_server_is_a_number_or_auto(tmp_path: Path, limit: str, reported: list[str]) -> None:
    assert about_model(tmp_path, f"launch: {{}}\nmax_inflight: {limit}") == reported


def test_a_word_for_the_number_of_workers(tmp_path: Path) -> None:
    text = "server: {workers: many}\nmodels: [{id: m, launch: {}}]\nkeys: [{id: k, anonymous: true}]\n"
    assert problems(tmp_path, text) == ["g.yaml:1: server.workers: expected a whole number or auto"]


def test_a_bound_that_the_workers_of_every_cpu_cannot_share(tmp_path: Path) -> None:
    text = "server: {workers: auto, max_inflight: 1}\nmodels: [{id: m, launch: {}}]\nkeys: [{id: k, anonymous: true}]\n"
    message = "workers cannot share 1 requests: each needs at least one; raise this limit or lower server.workers"
    expected = [f"g.yaml:1: server.max_inflight: {usable_cpus()} {message}"] if usable_cpus() > 1 else []
    assert problems(tmp_path, text) == expected


def about_launches(folder: Path, groups: str, *launches: str) -> list[str]:
    """Return the problems of models with these launches, without file and line."""
    models = "".join(f"  - {{id: m{number}, launch: {{{launch}}}}}\n" for number, launch in enumerate(launches))
    return [each.split(": ", 1)[1] for each in problems(folder, f"models:\n{models}keys: [{{id: k, anonymous: true}}]\n{groups}\n")]


def test_groups(tmp_path: Path) -> None:
    two = "groups: [{id: a, max_running: 2}, {id: b}]"
    assert about_launches(tmp_path, two, "group: a", "group: a", "group: b", "group: b, start: on_demand") == []
    assert about_launches(tmp_path, "", "group: free", "group: free, start: on_demand") == []
    assert about_launches(tmp_path, two, "group: aa") == ["models[0].launch.group: there is no such group; did you mean `a`?"]
    assert about_launches(tmp_path, "groups: [{id: a}, {id: a}]", "group: a") == ["groups[1].id: this group is already on line 4"]
    assert about_launches(tmp_path, two, "group: b", "group: b") == [
        "models[1].launch.start: the group `b` runs 1 at once, and more of its models are eager; write on_demand"
    ]


def test_idleness(tmp_path: Path) -> None:
    assert about_launches(tmp_path, "", "idle_stop: 2m, idle_sleep: 1m") == []
    assert about_launches(tmp_path, "", "idle_stop: 1m, idle_sleep: 60s") == [
        "models[0].launch.idle_sleep: the servers would stop before they sleep: idle_stop must be longer"
    ]
    assert about_launches(tmp_path, "", "idle_sleep: 1m, args: {enable_sleep_mode: false}") == [
        "models[0].launch.args.enable_sleep_mode: idle_sleep needs it"
    ]


@pytest.mark.parametrize(
    ("workers", "model", "chat", "message"),
    [
        (1, "max_inflight: 8", "reserved_slots: 7", None),
        (1, "max_inflight: 8", "reserved_slots: 8", "of the 8 slots of m, none is left for later classes; reserve fewer"),
        (2, "max_inflight: 8", "reserved_slots: 6", None),
        (
            2,
            "max_inflight: 8",
            "reserved_slots: 7",
            "of the 8 slots of m, none is left for later classes for each of the 2 workers; reserve fewer",
        ),
        (1, "max_inflight: 8", "reserved_slots: auto", "auto needs an objective to follow: set `slo` of the class, or of the model m"),
        (1, "max_inflight: 8", "reserved_slots: auto, slo: {ttft: 1s}", None),
        (1, "max_inflight: 8, slo: {itl: 50ms}", "reserved_slots: auto", None),
        (1, "", "reserved_slots: 100", None),
        (1, "", "reserved_slots: auto", None),
    ],
)
def test_reserved_slots_leave_some_and_follow_an_objective(
    tmp_path: Path, workers: int, model: str, chat: str, message: str | None
) -> None:
    text = f"server: {{workers: {workers}}}\nmodels: [{{id: m, launch: {{}}, {model}}}]\nclasses: [{{id: chat, {chat}}}]\n"
    found = problems(tmp_path, text + "keys: [{id: k, anonymous: true}]\n")
    assert found == ([] if message is None else [f"g.yaml:3: classes[0].reserved_slots: {message}"])


def test_a_wrong_number_of_reserved_slots(tmp_path: Path) -> None:
    text = "models: [{id: m, launch: {}}]\nclasses: [{id: chat, reserved_slots: %s}]\nkeys: [{id: k, anonymous: true}]\n"
    for wrong in ("0", "some", "1.5", "true"):
        assert problems(tmp_path, text % wrong) == ["g.yaml:2: classes[0].reserved_slots: expected a whole number of at least 1, or auto"]
