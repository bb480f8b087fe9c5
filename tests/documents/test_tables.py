"""Tables that state facts of the code are compared with it. tests/test_documents.py has those of errors, metrics and routes."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args, get_type_hints

import openai
import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from docs.reference import groups
from gateway.admin import openapi
from gateway.api.errors import ERRORS
from gateway.api.reference import document
from gateway.api.routes import ROUTES
from gateway.api.settlement import Method
from gateway.auth import body_policy
from gateway.cli.main import application
from gateway.client.http.head import MAX_HEAD, MAX_HEADERS
from gateway.client.timeouts import KEEP_ALIVE, LEAST_RATE
from gateway.config.models import Model
from gateway.fleet.operations import OPERATIONS, SERVER_OPERATIONS
from gateway.key_management.litellm import keys_of
from gateway.ledger.spool import LIMIT as SPOOL_LIMIT
from gateway.snapshot.snapshot import Limits
from gateway.telemetry.dependencies import NAMES
from gateway.telemetry.metrics import MIRROR_RESULTS
from gateway.usage.reconciliation import Classes
from tests.benchmarks import results
from tests.documents.blocks import DOCS, README, ROOT, prose
from tests.documents.tables import codes, is_in_code, table
from tests.support.rows import each_row
from upstream.balancing.policies import POLICIES
from upstream.launcher.logfile import LIMIT as LOG_LIMIT
from upstream.launcher.logfile import ROTATED
from upstream.vllm.path_options import KINDS, PathKind

KIB, MIB = 1024, 1024 * 1024
OPERATORS = DOCS / "operators"
DEFAULTS = {setting.path: setting.shape.get("default") for group in groups() for setting in group.settings}
"""The defaults of the settings, by their paths."""

# README and development


def test_the_figures_of_the_first_page_are_the_measured_ones() -> None:
    stored = results.read(DOCS / "performance" / "results.json")

    def value(case: str, variant: str, proxy: str, name: str, factor: float, digits: int) -> str:
        row = stored[case].find(proxy, variant)
        spread = row.spread(name) if row else None
        assert spread is not None
        return f"{spread.median * factor:.{digits}f}"

    text = README.read_text()
    for case, variant, name, factor, digits, shown in (
        ("json", "64 connections", "cpu", 1e6, 0, "{vllm-gateway} µs, [compiled]"),
        ("json", "64 connections", "cpu", 1e6, 0, "(docs/performance.md#compiled-core) {vllm-gateway, compiled} µs"),
        ("json", "64 connections", "cpu", 1e6, 0, "nginx {nginx} µs, Envoy {envoy} µs, vllm-router {vllm-router} µs"),
        ("many", "5,000 streams", "rss", 1e-3, 1, "nginx {nginx} KB, Envoy {envoy} KB, vllm-router {vllm-router} KB"),
        ("many", "5,000 streams", "rss", 1e-3, 1, "{vllm-gateway} KB"),
        ("many", "2,000 streams", "cpu", 1e6, 1, "{vllm-gateway} µs, compiled {vllm-gateway, compiled} µs"),
        ("many", "2,000 streams", "cpu", 1e6, 1, "nginx {nginx} µs, vllm-router {vllm-router} µs, Envoy {envoy} µs"),
    ):
        expected = re.sub(r"\{([^}]+)\}", lambda match: value(case, variant, match[1], name, factor, digits), shown)  # noqa: B023
        assert expected in text


def test_every_target_of_make_is_shown() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "".join((DOCS / page).read_text() for page in ("development.md", "testing.md"))
    shown = {name for names in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", text) for name in names.split()}
    assert targets - shown == set()


def test_the_layout_names_every_folder() -> None:
    named = {name.rstrip("/") for cells in table(DOCS / "development.md", "path | content") for name in codes(cells[0])}
    parents = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*") if path.suffix in (".py", ".md", ".yaml")}
    assert {name for name in parents if not name.startswith((".", "build"))} - named == set()
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_layout_of_the_tests_names_every_folder() -> None:
    named = {name.rstrip("/") for cells in table(DOCS / "testing.md", "path | content") for name in codes(cells[0]) if name.endswith("/")}
    assert named == {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/__init__.py")}


OWN_CODE = table(DOCS / "development.md", "own code | lines | libraries | verdict")


@each_row("code, stated", [(cells[0], cells[1]) for cells in OWN_CODE])
def test_own_code_has_about_the_stated_lines(code: str, stated: str) -> None:
    """A package counts without the packages below it. The page is renewed when the lines have changed by a fifth."""
    files = [(DOCS / link).resolve() for link in re.findall(r"\]\(([^)]+\.py)\)", code)]
    counted = [path for file in files for path in (sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file])]
    lines = sum(len(path.read_text().splitlines()) for path in counted)
    assert lines * 0.8 <= int(stated.replace(",", "")) <= lines * 1.2, lines


# Commands and the admin API


def test_the_table_of_commands_is_the_help() -> None:
    application_ = get_command(application(with_keys=True))
    assert isinstance(application_, TyperGroup)
    helps = {f"`vllm-gateway {name}`": command.help or "" for name, command in application_.commands.items()}
    expected = [[name, " ".join(text.split("\n\n")[0].split())] for name, text in helps.items()]
    assert table(OPERATORS / "index.md", "command | effect") == expected


def test_the_operations_are_those_of_the_admin_port() -> None:
    documented = {
        (path.rpartition("/")[0] + "/" + each if "/" in path else path, each)
        for cells in table(DOCS / "monitoring.md", "operation | effect | response")
        for path in [codes(cells[0])[0].removeprefix("POST ")]
        for each in [path.rpartition("/")[2], *codes(cells[0])[1:]]
    }
    operations = {route.template for route in openapi.ROUTES if route.is_operation}
    expected = {(f"/models/{{id}}/{name}", name) for name in OPERATIONS}
    expected |= {(f"/servers/{{server}}/{name}", name) for name in SERVER_OPERATIONS}
    expected |= {(path, path[1:]) for path in operations if "{" not in path and not path.startswith("/admin/")}
    assert documented == expected


def test_the_states_of_readiness_are_the_described_ones() -> None:
    (route,) = (route for route in openapi.ROUTES if route.template == "/readyz")
    documented = {(int(cells[0]), *codes(cells[1])) for cells in table(DOCS / "monitoring.md", "status code | `status` | meaning")}
    assert {status for status, _ in documented} == set(route.meanings) - {400}  # a Host that is not the port's
    assert {name for _, name in documented} == set(codes(route.summary)) & {"ready", "degraded", "not_ready"}


@pytest.mark.parametrize(
    ("page", "header"),
    [
        ("monitoring.md", "name | `subject` | while it is down | a failure is noticed"),
        ("operators/troubleshooting.md", "dependency | where to look | what to do"),
    ],
)
def test_every_dependency_is_explained(page: str, header: str) -> None:
    names = [codes(cells[0])[0] for cells in table(DOCS / page, header)]
    assert set(names) == set(NAMES)
    assert len(names) == len(NAMES)


# Alerts and deployment


def test_the_table_of_alerts_is_the_rules() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
    expected = {rule["alert"]: rule["labels"]["severity"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    rows = table(DOCS / "alerts.md", "alert | severity | fires when | what to do")
    documented = [(name, cells[1]) for cells in rows for name in codes(cells[0])]
    assert dict(documented) == expected
    assert len(documented) == len(expected)


def test_the_values_of_engines_exist() -> None:
    values = yaml.safe_load((ROOT / "deploy/helm/vllm-gateway/values.yaml").read_text())["engineDefaults"]
    for cells in table(DOCS / "kubernetes.md", "value | purpose"):
        assert {name.partition(".")[0] for name in codes(cells[0])} - values.keys() == set()


def test_the_ports_of_compose_are_shown() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]
    ports = {port.rpartition(":")[0] for service in services.values() for port in service.get("ports", ())}
    documented = [cells[0] for cells in table(DOCS / "install.md", "address | content")]
    assert {address.replace("port ", "") for address in documented if not address.endswith(("`", ")"))} == ports


def test_the_installer_writes_the_shown_files() -> None:
    script = (ROOT / "deploy/systemd/install.sh").read_text()
    for cells in table(DOCS / "install.md", "path | content")[:-1]:
        (path,) = codes(cells[0])
        assert path.replace("vllm-gateway", "$name") in script or f"$etc/{path.rpartition('/')[2]}" in script


def test_the_bounds_of_logs_are_those_of_the_code() -> None:
    bounds = {cells[0]: cells[2] for cells in table(DOCS / "install.md", "log | location | bounded by")}
    launched = bounds["logs of launched servers"]
    assert f"at {LOG_LIMIT // MIB} MiB" in launched
    assert f"its last {ROTATED // MIB} MiB" in launched
    assert bounds["rows that wait for the ledger's database"].startswith(f"{SPOOL_LIMIT // MIB} MiB;")


# Connections, policies and settings


def test_the_timeouts_of_connections_are_the_defaults() -> None:
    rows = table(DOCS / "connections.md", "setting | default | limits the wait for | when it expires")
    documented = {codes(cells[0])[0]: cells[1] for cells in rows if codes(cells[0])}
    assert documented == {path: DEFAULTS[path] for path in DEFAULTS if re.fullmatch(r"server\.(?:headers|body|write)_timeout", path)}
    assert [cells[1] for cells in rows if cells[0] == "fixed"] == [f"{KEEP_ALIVE:.0f}s"]
    assert f"{LEAST_RATE // KIB} KiB/s" in " ".join(cells[2] for cells in rows)


def test_the_bounds_of_connections_are_those_of_the_code() -> None:
    bounds = {cells[0]: cells[1] for cells in table(DOCS / "connections.md", "subject | bound | beyond it")}
    assert bounds["request line and headers"] == f"{MAX_HEAD // KIB} KiB, {MAX_HEADERS} headers"
    assert {name for cell in bounds.values() for name in codes(cell)} - DEFAULTS.keys() == set()


def test_the_body_policy_is_the_codes() -> None:
    rows = table(DOCS / "security.md", "field | effect | reason")
    removed, *refused = ({*codes(cells[0])} for effect in ("removed", "rejected") for cells in rows if cells[1] == effect)
    assert removed == body_policy.STRIPPED
    assert set().union(*refused) - {"chat_template_kwargs", "tokenize"} == body_policy.REFUSED
    assert {"tokenize", "chat_template"} == body_policy.IN_TEMPLATE
    bounds = {name: cells[1] for cells in rows for name in codes(cells[0])}
    assert {name: bounds[name] for name in ("n", "best_of")} == dict.fromkeys(("n", "best_of"), bounds["n"])
    assert bounds["n"].startswith(f"at most {body_policy.MAXIMA['n']}, or")
    assert f"{body_policy.MAX_BATCH:,} responses" in bounds["n"]
    assert bounds["logprobs"] == f"0 to {body_policy.MAXIMA['logprobs']}" == f"0 to {body_policy.MAXIMA['top_logprobs']}"
    assert set(body_policy.TOKEN_LIMITS) == {name for name, effect in bounds.items() if "`body.max_tokens`" in effect}
    sizes = {
        f"at most {size // KIB} KiB of JSON each" if size < MIB else f"at most {size // MIB} MiB of JSON"
        for size in body_policy.SIZES.values()
    }
    bounded = {name for name, effect in bounds.items() if effect in sizes}
    assert bounded == {re.sub(r"guided_\w+", "guided_*", name) for name in body_policy.SIZES}
    items = {name for name, effect in bounds.items() if effect == f"at most {body_policy.MAX_BATCH:,} items"}
    assert items - {"input", "content"} == body_policy.BATCHES - {"prompt_embeds"}


_SETTING = re.compile(r"`([a-z_]+)(?:\[\])?((?:\.[a-z_]+(?:\[\])?)+)(?:: [^`\n]*)?`")
_OF_OTHERS = {"timeouts.request", "audit.retry", "audit.suppressed", "record.view", "server.cordon", "notices.test"}
"""A field of the Gateway API's HTTPRoute, and actions of the audit log."""


def test_every_setting_with_a_path_exists() -> None:
    paths = {path.replace("[]", "") for path in DEFAULTS}
    parents = {part for path in paths for part in path.split(".")[:-1]}
    named = {
        (page.name, name.replace("[]", ""))
        for page in (README, *DOCS.rglob("*.md"))
        for first, rest in _SETTING.findall(prose(page))
        if first in parents and (name := first + rest) not in _OF_OTHERS
    }
    assert len(named) > 100
    assert [each for each in sorted(named) if not any(f".{path}".endswith(f".{each[1]}") for path in paths)] == []


def test_the_paths_of_launched_servers_are_those_of_the_code() -> None:
    documented = [
        name.replace(": {", ".").removesuffix(": …}")
        for cells in table(DOCS / "configuration.md", "where | is a path if | must exist")
        if cells[1] != "it begins with `./` or `../` and exists" and "launch.model" not in cells[0]
        for name in codes(cells[0])
    ]
    assert sorted(set(documented) - {"launch.args"}) == sorted(KINDS)
    written = {name for name, kind in KINDS.items() if kind is PathKind.WRITTEN}
    (cell,) = (cells[0] for cells in table(DOCS / "configuration.md", "where | is a path if | must exist") if cells[2].startswith("no: "))
    assert {name.replace(": {", ".").removesuffix(": …}") for name in codes(cell)} == written


def test_the_table_of_balance_policies_is_the_registry() -> None:
    rows = table(DOCS / "configuration.md", "`balance` | The server that gets a request")
    assert {*codes(*(cells[0] for cells in rows))} == POLICIES.keys()


def test_the_ways_to_stick_to_a_model_are_the_settings() -> None:
    values = {each for part in get_args(get_type_hints(Model)["sticky"]) for each in get_args(part)}
    assert {*codes(*(cells[0] for cells in table(DOCS / "split-and-mirror.md", "`sticky` | requests that go to the same model")))} == values


def test_the_results_of_mirrors_are_the_metrics() -> None:
    assert codes(*(cells[0] for cells in table(DOCS / "split-and-mirror.md", "`result` | meaning"))) == [*MIRROR_RESULTS]


# Keys, limits and usage


@each_row("theirs, ours", [(codes(cells[0]), codes(cells[1])) for cells in table(DOCS / "keys.md", "LiteLLM | vllm-gateway")])
def test_a_key_of_litellm_is_imported_as_shown(theirs: list[str], ours: list[str]) -> None:
    if theirs[0] == "max_budget":
        for duration in theirs[2:]:
            more = imported(max_budget=3, budget_duration=duration)
            assert more["limits"] == {ours[0]: 3}
    elif theirs[0] == "rpm_limit":
        assert imported(**dict.fromkeys(theirs, 3))["limits"] == dict.fromkeys(ours, 3)


def test_every_budget_of_litellm_that_is_imported_is_shown() -> None:
    shown = {name for cells in table(DOCS / "keys.md", "LiteLLM | vllm-gateway") for name in codes(cells[0]) if name[0].isdigit()}
    durations = {f"{number}{unit}" for number in range(1, 400) for unit in ("s", "m", "h", "d", "w", "mo", "y")}
    assert {duration for duration in durations if "limits" in imported(max_budget=3, budget_duration=duration)} == shown


def imported(**fields: object) -> dict[str, object]:
    """Return the entry for a key of LiteLLM with these fields."""
    (key,) = keys_of(f'[{{"token": "{"0" * 64}"{"".join(f", {quoted(name)}: {quoted(value)}" for name, value in fields.items())}}}]')
    return dict(key.more)


def quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_the_table_of_limits_is_the_settings() -> None:
    rows = table(DOCS / "limits.md", "limit | counts | resets | error")
    assert {*codes(*(cells[0] for cells in rows))} == {each.name for each in fields(Limits) if each.init} - {"raised"}  # by an operator
    assert {code for cells in rows for code in codes(*cells[3:])} <= ERRORS.keys()


def test_the_classes_of_a_reconciliation_are_the_columns() -> None:
    assert codes(*(cells[0] for cells in table(DOCS / "reconciliation.md", "class | content"))) == [
        each.name for each in fields(Classes) if each.name != "engine"
    ]


def test_every_way_to_estimate_is_explained() -> None:
    header = "end of the request | prompt tokens | completion tokens | `estimated_by`"
    assert {name for cells in table(DOCS / "accounting.md", header) for name in codes(cells[3])} == {*Method}


# Routes and errors


def test_the_gateways_own_routes_are_the_described_ones() -> None:
    section = (DOCS / "routes.md").read_text().partition("\n## Routes of the gateway itself\n")[2].partition("\n## ")[0]
    documented = {path for line in section.splitlines() if line.startswith("| GET") for path in codes(line.split(" | ")[1])}
    assert documented - {"/docs", "/openapi.json", "/portal", "/portal/…"} == document()["paths"].keys() - ROUTES.keys()


def test_the_classes_of_openais_sdk_are_those_that_it_raises() -> None:
    rows = table(DOCS / "developers" / "errors-and-retries.md", "status | class in OpenAI's SDK | can a retry help?")
    statuses = {int(status): codes(cells[1]) for cells in rows for status in re.findall(r"\b\d{3}\b", cells[0])}
    assert {row.status for row in ERRORS.values()} - statuses.keys() == {405}  # a wrong method: no SDK sends it
    for status, names in statuses.items():
        assert raised(status) in names, status
    assert {code for cells in rows for code in codes(cells[0])} <= ERRORS.keys()


def raised(status: int) -> str:
    """Return the name of the class that OpenAI's SDK raises for a status."""
    kinds = {kind.status_code: kind.__name__ for kind in openai.APIStatusError.__subclasses__() if "status_code" in vars(kind)}
    return kinds.get(status) or ("InternalServerError" if status >= 500 else "APIStatusError")


QUOTED: tuple[tuple[str, str], ...] = (
    ("limits.md", "situation | message"),
    ("operators/failed-starts.md", "message | what to do"),
    ("operators/failed-starts.md", "message | meaning"),
    ("operators/troubleshooting.md", "message | meaning"),
    ("discovery.md", "`discovery.problem` | what to do"),
)
"""Tables of messages. A message of the operating system is not in the code."""
_OF_THE_SYSTEM = ("ConnectionRefusedError", "…/token: No such file or directory")


@each_row(
    "message",
    [message for page, header in QUOTED for cells in table(DOCS / page, header) for message in codes(cells[0]) or codes(cells[1])],
)
def test_a_shown_message_is_in_the_code(message: str) -> None:
    assert message.startswith(_OF_THE_SYSTEM) or is_in_code(message)


def test_the_disabled_features_are_the_messages() -> None:
    source = (ROOT / "gateway" / "api" / "vllm" / "errors.py").read_text()
    subjects = re.findall(r"_not_enabled\(\s*r\"[^\"]*\",\s*\"([^\"]+)\"", source)
    messages = {f"{subject} not enabled for this model" for subject in (*subjects, "This request needs a feature that is")}
    assert {*codes(*(cells[0] for cells in table(OPERATORS / "errors-by-code.md", "`message` | option")))} == messages


# Clients


def test_the_tested_versions_of_python_packages_are_the_locked_ones() -> None:
    locks = sorted((ROOT / "tests" / "clients" / "environments").glob("*.lock"))
    locked: dict[str, set[str]] = {}
    for name, version in re.findall(
        r"^(openai|anthropic|langchain-openai|litellm)==(\S+)", "\n".join(path.read_text() for path in locks), re.M
    ):
        locked.setdefault(name, set()).add(version)
    shown = {cells[0]: cells[3] for cells in table(DOCS / "developers" / "clients.md", "tool | base URL | route | tested version")}
    assert minors(shown["[OpenAI SDK](#openai-sdk)"]) == {minor for version in locked["openai"] for minor in minors(version)}
    assert minors(shown["[Anthropic SDK](#anthropic-sdk)"]) == {minor for version in locked["anthropic"] for minor in minors(version)}
    assert set(re.findall(r"\d+\.\d+\.\d+", shown["[LangChain](#langchain)"])) == locked["langchain-openai"]
    assert minors(shown["[LiteLLM](#litellm)"]) == {minor for version in locked["litellm"] for minor in minors(version)}


def minors(text: str) -> set[str]:
    """Return the minor versions in a text, such as 2.12."""
    return set(re.findall(r"\b\d+\.\d+", text))
