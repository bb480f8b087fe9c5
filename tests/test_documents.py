"""The documents are correct: their lists match the code, and their links are valid.

The tests in tests/documents run the examples and check their output.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from docs.reference import groups
from gateway import __version__
from gateway.api.errors import ERRORS, Refusal, anthropic_error
from gateway.api.reference import document
from gateway.api.routes import REFUSED, ROUTES
from gateway.cli.main import application
from gateway.telemetry.metrics import FAMILIES, PREFIX
from tests.documents.blocks import DOCS, PAGES, ROOT, blocks, identity, prose
from tests.documents.tables import rows
from tests.fuzz.differential.registry import TARGETS
from tests.mutants.areas import is_tried
from tests.mutants.core import CORE
from tests.support.rows import each_row
from upstream.balancing.policies import POLICIES
from upstream.vllm.failures import CAUSES
from upstream.vllm.presets import PRESETS

# Lists


def test_the_table_of_errors_is_the_codes() -> None:
    documented = {cells[2]: (int(cells[0]), cells[1]) for cells in rows(DOCS / "errors.md") if len(cells) == 5 and cells[0].isdigit()}
    assert documented == {code: (row.status, row.type) for code, row in ERRORS.items()}
    assert all(len(cell) > 3 for cells in rows(DOCS / "errors.md") if len(cells) == 5 and cells[0].isdigit() for cell in cells[3:])


def test_every_code_is_explained_to_operators() -> None:
    documented = {cells[0]: cells[1:] for cells in rows(DOCS / "operators" / "errors-by-code.md") if cells[0] in ERRORS}
    assert set(documented) == set(ERRORS)
    assert all(len(cells) == 3 and all(len(cell) > 3 for cell in cells) for cells in documented.values())


def test_the_table_of_anthropics_types_is_the_codes() -> None:
    documented = {cells[0]: cells[1] for cells in rows(DOCS / "errors.md") if len(cells) == 2}
    for code, row in ERRORS.items():
        expected = documented.get(str(row.status)) or documented[f"other {row.status // 100}xx"]
        assert anthropic_error(Refusal(code, "-"))["error"]["type"] == expected, code


def test_the_table_of_metrics_is_the_codes() -> None:
    documented = {cells[0]: (cells[1], cells[2]) for cells in rows(DOCS / "metrics.md") if cells[0].startswith(PREFIX)}
    assert documented == {PREFIX + name: (family.kind, ", ".join(family.labels) or "none") for name, family in FAMILIES.items()}


def test_the_table_of_causes_is_the_codes() -> None:
    codes = {cause.code for cause in CAUSES}
    documented = [tuple(cells) for cells in rows(DOCS / "operators" / "failed-starts.md") if len(cells) == 3 and cells[0] in codes]
    assert documented == [(cause.code, cause.summary or "none of the others", cause.hint.replace("`", "")) for cause in CAUSES]


def test_the_page_of_vllms_routes_is_the_tables() -> None:
    documented = [cells for cells in rows(DOCS / "routes.md") if len(cells) == 3 and cells[1].startswith("/")]
    assert [cells[1] for cells in documented if cells[0] == "POST" and cells[2].startswith("served")] == [*ROUTES]
    refused = [
        (cells[1], (cells[0], cells[2])) for cells in documented if not cells[2].startswith(("served", "one entry", "the gateway's"))
    ]
    assert refused == [*REFUSED.items()]


def test_the_refusal_of_the_api_reference_says_how_to_turn_it_on() -> None:
    assert all("server.docs: true" in REFUSED[path][1] for path in ("/docs", "/redoc", "/openapi.json"))


def test_the_table_of_presets_is_the_codes() -> None:
    documented = [(cells[0], *cells[2:]) for cells in rows(DOCS / "configuration.md") if len(cells) == 5 and cells[0] in PRESETS]
    assert documented == [(name, each.tools or "-", each.reasoning or "-", each.template or "-") for name, each in PRESETS.items()]


def test_the_migrations_of_the_ledger_are_listed() -> None:
    files = sorted((ROOT / "gateway" / "ledger" / "migrations" / "versions").glob("step_*.py"))
    listed = [cells[0] for cells in rows(DOCS / "operators" / "upgrades.md") if cells[0].isdigit()]
    assert listed == [file.stem.removeprefix("step_") for file in files]


def has_setting(path: str) -> bool:
    return any(setting.path == path for group in groups() for setting in group.settings)


def has_module(part: str) -> bool:
    """Return whether a package or a module of the product is named for something."""
    return any(part in path.relative_to(ROOT).as_posix() for tree in ("gateway", "upstream") for path in (ROOT / tree).rglob("*.py"))


EVIDENCE: dict[str, bool] = {
    "chat, completions, embeddings": {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"} <= ROUTES.keys(),
    "vLLM's rerank, score, classify, pooling, tokenize": {"/rerank", "/score", "/classify", "/pooling", "/tokenize"} <= ROUTES.keys(),
    "Anthropic Messages": "/v1/messages" in ROUTES,
    "Responses API, stateless": "/v1/responses" in ROUTES,
    "Responses API with stored state": "/v1/responses/{response_id}" not in REFUSED,
    "batches and files": bool({"/v1/batches", "/v1/files"} & ROUTES.keys()),
    "realtime WebSocket": "/v1/realtime" not in REFUSED,
    "text to speech, images": bool({"/v1/audio/speech", "/v1/images/generations"} & ROUTES.keys()),
    "compressed requests": has_module("content_encoding"),
    "runs tools (MCP)": has_module("mcp"),
    "fallback models": has_setting("models[].fallbacks"),
    "weighted split between models": has_setting("models[].split"),
    "LoRA adapters as models": has_setting("models[].loras"),
    "load and unload LoRA adapters at runtime": "/v1/load_lora_adapter" not in REFUSED,
    "balancing by load": "least_busy" in POLICIES,
    "load from the engine's metrics": has_module("engine_load"),
    "approximate prefix routing": "prefix" in POLICIES,
    "prefix routing of long shared system prompts": "cost" in POLICIES,
    "separate prefill and decode": has_module("disaggregated"),
    "exact routing by KV-cache events": (ROOT / "upstream" / "vllm" / "kv_events").is_dir(),
    "bounded queue": has_setting("models[].queue.size"),
    "fair queueing between keys": has_module("fair_queue"),
    "priorities": has_setting("keys[].priority"),
    "retries, ejection of failing servers": has_module("retry_budget") and has_module("ejection"),
    "continues a stream on another server": has_module("regeneration") and has_module("token_record"),
    "launches vLLM": has_setting("models[].launch"),
    "on demand, stops idle models": has_setting("models[].launch.idle_stop"),
    "models alternate on a GPU": has_setting("groups[].max_running"),
    "launches on several machines": has_setting("models[].launch.machines"),
    "keys for clients": has_setting("keys[].id"),
    "keys stored as hashes": has_setting("keys[].hash"),
    "keys without a database": has_setting("keys_file"),
    "models per key": has_setting("keys[].models"),
    "tokens of an identity provider": has_setting("jwt[].issuer"),
    "users create their own keys": has_setting("teams[].self_service"),
    "single sign-on for people": has_module("sign_in"),
    "limits on requests per minute": has_setting("keys[].limits.requests_per_minute"),
    "limits on tokens per minute": has_setting("keys[].limits.tokens_per_minute"),
    "limits on concurrent requests": has_setting("keys[].limits.concurrent"),
    "budgets": has_setting("keys[].limits.budgets"),
    "limits exact over several gateways": has_setting("limits_store"),
    "a record of each request's usage": has_setting("ledger"),
    "users see their own usage": "/v1/usage" in document()["paths"],
    "response cache": has_module("response_cache"),
    "semantic cache": has_module("semantic"),
    "guardrails": has_module("guardrail"),
    "log of prompts": has_module("recording"),
    "Prometheus": has_module("telemetry/metrics"),
    "OpenTelemetry": has_setting("tracing"),
    "status page": has_module("console/pages"),
    "admin interface that makes changes": has_module("console/pages"),
    "playground": has_setting("server.portal"),
    "configuration reload without restart": has_module("control/reload"),
    "several gateways with shared state": has_setting("limits_store"),
    "plugins": has_module("plugin"),
    "Helm chart": (ROOT / "deploy" / "helm").is_dir(),
    "published packages and images": (ROOT / ".github" / "workflows" / "release.yml").exists(),
}
"""Rows of the comparison, and whether the gateway has them, from its tables."""
COMPARISONS = (DOCS / "comparison.md", DOCS / "comparison-routers.md")
MARKS = ("✓", "~", "–", "?")


def test_the_comparison_says_what_the_gateway_has() -> None:
    found = {(cells[0], cells[1]) for page in COMPARISONS for cells in rows(page) if cells[-1] in MARKS}
    partial = {name for name, mark in found if mark == "~"}
    assert partial == {"autoscaling"}  # the chart has it, with KEDA
    assert {name for name, _ in found} - partial == EVIDENCE.keys()
    assert [(name, mark) for name, mark in found if name in EVIDENCE and mark != ("✓" if EVIDENCE[name] else "–")] == []


def test_both_tables_of_the_comparison_say_the_same_of_the_gateway() -> None:
    gateways, routers = ([(cells[0], cells[1]) for cells in rows(page) if cells[-1] in MARKS] for page in COMPARISONS)
    assert gateways == routers


def test_limitations_that_a_reader_must_know_are_on_the_first_pages() -> None:
    for page in (ROOT / "README.md", DOCS / "guarantees.md", DOCS / "comparison.md"):
        text = page.read_text()
        assert re.search(r"never (?:been )?(?:on|run on) a GPU|Never run on a GPU|Not tested on GPUs", text), page.name
        assert re.search(r"no production use is known", text, re.IGNORECASE), page.name
    assert re.search(r"CPU time per event.*34\.7 µs.*vllm-router 22\.8 µs", (ROOT / "README.md").read_text())


def test_the_pages_for_developers_name_the_model_of_a_response_as_it_is() -> None:
    text = (DOCS / "developers" / "extras.md").read_text().partition("## Which model responded")[2]
    assert "servers[].model" in text and "rewrite_model" in text


def test_the_pages_for_developers_say_where_the_switch_of_reasoning_belongs() -> None:
    text = (DOCS / "developers" / "reasoning.md").read_text()
    assert "`enable_thinking` at the top level of the body" in text


def test_no_other_metric_is_mentioned() -> None:
    known = {PREFIX + name + end for name in FAMILIES for end in ("", "_bucket", "_sum", "_count")}
    for page in PAGES:
        assert set(re.findall(rf"\b{PREFIX}\w+", page.read_text())) - known == set(), page.name


def test_every_route_in_error_messages_exists() -> None:
    assert set(re.findall(r"/v1/(?:chat/|audio/)?\w+", (DOCS / "errors.md").read_text())) - set(ROUTES) == {"/v1/models", "/v1/usage"}


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# Commands and links


def written_commands(command: str) -> set[str]:
    """Return everything that follows a command's name in shell blocks and between backticks."""
    return {
        found.strip() for text in shown_texts() for found in re.findall(rf"(?:^|\n|\s\[){command}[ ,]+([a-z][a-z-]*(?: [a-z]+)?)", text)
    }


def shown_texts() -> list[str]:
    """The blocks for a shell, and what is between backticks."""
    return [block.text for block in blocks("sh", "bash")] + [code for page in PAGES for code in re.findall(r"`([^`\n]+)`", prose(page))]


def command_lines() -> set[str]:
    """Return every ``vllm-gateway`` command line with its arguments, up to a pipe, a redirection or a comment."""
    lines = (line for text in shown_texts() for line in text.replace("\\\n", " ").splitlines())
    found = (re.findall(r"(?:^|[$;&|(]\s*|\b(?:exec|sudo|gateway) )vllm-gateway( [a-z][^#|<>;&)\u2026]*)", line) for line in lines)
    return {command.strip() for commands in found for command in commands}


@pytest.mark.parametrize("line", sorted(command_lines()))
def test_a_shown_command_line_is_one(line: str) -> None:
    """The command exists and accepts the documented options and arguments. It is not run here."""
    arguments, command = shlex.split(line), get_command(application(with_keys=True))
    context = typer.Context(command)
    while arguments and isinstance(command, TyperGroup):
        _, found, arguments = command.resolve_command(context, arguments)
        assert found is not None
        command = found
    required = [each for each in command.params if each.required]
    if arguments or not required:  # a command that is only mentioned is shown without its arguments
        command.make_context(line, arguments)


def test_shown_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {command.split()[0] for command in written_commands("make")}
    assert shown >= {"run", "test"} and shown <= targets


@each_row("page", PAGES, ids=identity)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert target.resolve().is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


_NAMED_CODE = re.compile(r"\[[\w.]+\]\(([^)]+\.py)\) ((?:`\w+`(?:, )?)+)")
"""A link to a module, followed by names in it: ``[exchange.py](../gateway/proxy/exchange.py) `handle_request` ``."""


def test_names_behind_a_link_to_a_module_are_defined_there() -> None:
    missing = [
        f"{page.name}: {link} has no {name}"
        for page in PAGES
        for link, names in _NAMED_CODE.findall(prose(page))
        for name in re.findall(r"\w+", names)
        if not re.search(rf"^ *(?:(?:async )?def|class) {name}\b|^{name}\b.*=", (page.parent / link).read_text(), re.MULTILINE)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# The trusted core

_CORE_PAGE = DOCS / "security-core.md"
_MOST_LINES = 2000
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LINKED = re.compile(r"\[[\w.]+\]\(\.\./([^)]+\.py)\)")
_SEARCHES = frozenset(
    {
        *("find", "rfind", "index", "rindex", "count", "split", "rsplit", "partition", "rpartition", "startswith", "endswith"),
        *("search", "match", "fullmatch", "finditer", "findall"),
    }
)
_SEARCHED = (
    *("gateway/client", "gateway/proxy", "upstream/http"),
    *(f"gateway/api/{name}.py" for name in ("response_fields", "strict_json", "json_scan", "rewrite_model")),
)


def definitions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield the functions and classes of a module, with the names of their classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _FUNCTION):
            yield within + node.name, node
            yield from definitions(node, f"{within}{node.name}.")


def counted(path: str, functions: str) -> int:
    """Return the lines of a file, or of its named functions and classes, with their decorators."""
    text = (ROOT / path).read_text()
    if functions == "all":
        return len(text.splitlines())
    lines = 0
    for name in functions.split(", "):
        (node,) = (node for found, node in definitions(ast.parse(text)) if f".{found}".endswith(f".{name}"))
        assert node.end_lineno is not None
        lines += node.end_lineno + 1 - min(each.lineno for each in (node, *node.decorator_list))
    return lines


def test_the_trusted_core_has_the_lines_that_its_page_states_and_is_small() -> None:
    totals, expected, documented = [], [0], []
    for cells in rows(_CORE_PAGE):
        if cells[0] == "total":
            totals.append((int(cells[2]), expected[-1]))
            expected.append(0)
        elif len(cells) == 5 and (linked := _LINKED.match(cells[0])) is not None:
            assert cells[3] == ("yes" if is_tried(linked[1]) else "no"), linked[1]
            lines = counted(linked[1], cells[1])
            documented.append((linked[1], int(cells[2]), lines))
            expected[-1] += lines
    assert [(path, lines) for path, stated, lines in documented if stated != lines] == [], "the page states other numbers"
    assert all(stated == lines for stated, lines in totals), totals
    assert 0 < totals[0][0] <= _MOST_LINES


def searching_functions() -> set[tuple[str, str]]:
    """Return the functions on the data path that search in bytes or texts, with their files."""
    found = set()
    for path in (path for name in _SEARCHED for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))):
        for _, node in definitions(ast.parse(path.read_text())):
            calls = (each.func.attr for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute))
            if not isinstance(node, ast.ClassDef) and not _SEARCHES.isdisjoint(calls):
                found.add((str(path.relative_to(ROOT)), node.name))
    return found


def test_each_search_on_the_data_path_has_a_reason() -> None:
    documented = set()
    for cells in rows(_CORE_PAGE):
        if len(cells) == 3 and (linked := _LINKED.match(cells[0])) is not None:
            assert len(cells[2]) > 20
            documented |= {(linked[1], name) for name in re.findall(r"\w+", cells[0][linked.end() :])}
    assert documented == searching_functions()


def test_the_fuzz_targets_and_mutants_of_the_trusted_core_exist() -> None:
    lines = [line for line in _CORE_PAGE.read_text().splitlines() if line.startswith(("- Fuzz target", "- Random bytes"))]
    named = [re.findall(r"`([^`]+)`", line) for line in lines]
    assert {name for names in named for name in names if name.endswith(".py")} == set(CORE)
    assert {name for names in named for name in names if not name.endswith(".py")} - {"key"} == set(TARGETS)
