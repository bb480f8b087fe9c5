"""``check`` on what a launch would fail on: vLLM's names, GPUs, files and ports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.check import preflight
from gateway.check.launch_check import why_not_listening
from gateway.config import Note
from gateway.config.references import Draft
from gateway.config.source import parse
from tests.support.rows import each_row
from upstream.launcher.program import why_not_executable
from upstream.vllm import gpus, installed_vllm, known_names
from upstream.vllm.known_names import KnownNames

HERE = preflight.Machine(lambda _: known_names.built_in(), 2, Path("/"))


def found_in(text: str, machine: preflight.Machine = HERE) -> list[str]:
    """Return the problems of models, one model a line from line 2, as ``line: path: message``. Notes start with a +."""
    source = parse("models:\n" + "".join(f"  - {line}\n" for line in text.splitlines()), "g.yaml")
    found = preflight.problems(Draft(source), machine)
    return ["+" * isinstance(each, Note) + str(each).removeprefix("g.yaml:").replace(".launch", "") for each in found]


def test_a_host_and_a_folder_that_this_machine_does_not_have(tmp_path: Path) -> None:
    text = "server: {host: 203.0.113.9, admin: {host: 127.0.0.1}}\nledger: {url: 'sqlite:///db/usage.db'}\nmodels: []\n"
    machine = preflight.Machine(lambda _: known_names.built_in(), 0, tmp_path, why_not_listening=why_not_listening)

    def found(text: str) -> list[str]:
        return [str(each).removeprefix("g.yaml:") for each in preflight.problems(Draft(parse(text, "g.yaml")), machine)]

    host, ledger = found(text)
    assert host.startswith("1: server.host: the gateway cannot listen here: ") and host.endswith("or 0.0.0.0 for all")
    assert ledger == f"2: ledger.url: the folder {tmp_path}/db does not exist; create it, or write the path of a file in another folder"
    (tmp_path / "db").mkdir()
    assert found(text.replace("203.0.113.9", "localhost")) == found("ledger: sqlite:///db/usage.db\n") == []


@each_row(
    ("args", "expected"),
    [
        ("max-model-len: 1, tensor_parallel_size: 2, no-enable-prefix-caching: true, enable-log-requests: false", []),
        ("hf-overrides.rope_theta: 2, hf-overrides+: x, max-model: 5", []),
        ("max-modellen: 1", ["args.max-modellen: vLLM 0.32 has no option --max-modellen; did you mean `max-model-len`?"]),
        ("max: 1", ["args.max: vLLM 0.32 has no option --max"]),
        ("max_model_len: false", ["args.max_model_len: vLLM 0.32 has no option --no-max-model-len: leave max-model-len out"]),
        (
            "reasoning-parser: qwen33",
            ["args.reasoning-parser: vLLM 0.32 has no reasoning-parser of this name; did you mean `qwen3`?"],
        ),
        (
            "tool_call_parser: hermse, enable-auto-tool-choice: true",
            ["args.tool_call_parser: vLLM 0.32 has no tool-call-parser of this name; did you mean `hermes`?"],
        ),
        ("tool-call-parser: own, enable-auto-tool-choice: true, tool-parser-plugin: /dev/null", []),
        ("enable-auto-tool-choice: true", ["args.enable-auto-tool-choice: vLLM does not start with this and without tool-call-parser"]),
        ("enable-auto-tool-choice: true, config: /dev/null", []),
        ("5: 1", ["args.5: vLLM 0.32 has no option --5"]),
    ],
)
def test_names(args: str, expected: list[str]) -> None:
    assert found_in(f"{{id: m, launch: {{args: {{{args}}}}}}}") == [f"2: models[0].{line}" for line in expected]


def test_a_tool_call_parser_without_tool_calls_is_a_note() -> None:
    text = "{id: m, launch: {args: {tool-call-parser: hermes}}}"
    expected = "note: has no effect without enable-auto-tool-choice: true; requests with tools are rejected"
    assert found_in(text) == [f"+2: models[0].args.tool-call-parser: {expected}"]


@pytest.mark.parametrize("command", ["[serve-models]", "[docker, run, vllm]", "[python, -m, other]", "text", "[]"])
def test_another_command_is_not_judged(command: str) -> None:
    assert found_in(f"{{id: m, launch: {{command: {command}, model: /none, args: {{what: 1, tool-call-parser: x}}}}}}") == []


@pytest.mark.parametrize(
    "command", ["[vllm, serve]", "[/opt/vllm/bin/vllm, serve, --seed=1]", "[python3, -m, vllm.entrypoints.openai.api_server]"]
)
def test_vllms_own_command_is(command: str) -> None:
    assert len(found_in(f"{{id: m, launch: {{command: {command}, args: {{what: 1}}}}}}")) == 1


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    machine = preflight.Machine(HERE.names, 0, tmp_path)
    text = (
        "{id: org/name, launch: {model: ./there}, loras: [{id: a, path: ./there}, {id: b, path: ./none}, {id: c, path: on/the-hub}]}\n"
        f"{{id: m, launch: {{model: {tmp_path}/none}}}}\n{{id: /no/such/folder, launch: {{}}}}"
    )
    expected = "there is no such file or folder"
    assert found_in(text, machine) == [
        f"2: models[0].loras[1].path: {expected}",
        f"3: models[1].model: {expected}",
        f"4: models[2].id: {expected}",
    ]


def test_weights_that_cannot_be_read_are_reported_as_well() -> None:
    text = f"{{id: m, launch: {{model: ./{'m' * 300}}}}}\n{{id: n, launch: {{args: {{max: 1}}}}}}"
    assert found_in(text) == [
        "2: models[0].model: cannot be read: File name too long",
        "3: models[1].args.max: vLLM 0.32 has no option --max",
    ]


def test_gpus_that_are_not_there() -> None:
    assert found_in("{id: m, launch: {gpus: [[0, 1]]}}") == []
    assert found_in("{id: m, launch: {gpus: [[1, 2]]}}") == [
        "2: models[0].gpus[0][1]: there is no GPU 2: the GPUs of this machine are 0 to 1"
    ]
    one, none, unknown = (preflight.Machine(HERE.names, count, Path("/")) for count in (1, 0, None))
    assert found_in("{id: m, launch: {gpus: [[1]]}}", one) == ["2: models[0].gpus[0][0]: there is no GPU 1: only GPU 0 exists"]
    assert found_in("{id: m, launch: {gpus: [[1]]}}", none) == ["2: models[0].gpus[0][0]: there is no GPU 1: this machine has no GPU"]
    expected = "note: there is no NVIDIA driver on this machine, so GPUs are not checked"
    assert found_in("{id: m, launch: {gpus: [[1, 7]]}}", unknown) == [f"+2: models[0].gpus[0][0]: {expected}"]
    assert found_in("{id: m, launch: {}}", unknown) == []


SHARED = "and both run at the same time: start one on_demand, or put both into one group"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("gpus: [[0, 1]]", "gpus: [[1]]", [f"3: models[1].gpus[0][0]: GPU 1 is given to `a` (line 2) too, {SHARED}"]),
        ("gpus: [[0]]", "gpus: [[1]]", []),
        ("gpus: [[0]], start: on_demand", "gpus: [[0]]", []),
        ("gpus: [[0]], group: g", "gpus: [[0]], group: g", []),
        ("gpus: [[0]], group: g", "gpus: [[0]], group: h", [f"3: models[1].gpus[0][0]: GPU 0 is given to `a` (line 2) too, {SHARED}"]),
        ("gpus: [[0], [0]]", "", ["2: models[0].gpus[1][0]: GPU 0 is already used by another replica; each replica needs its own GPUs"]),
        ("gpus: [[x, true], 5]", "gpus: 7", []),
    ],
)
def test_gpus_given_twice(first: str, second: str, expected: list[str]) -> None:
    assert found_in(f"{{id: a, launch: {{{first}}}}}\n{{id: b, launch: {{{second}}}}}") == expected


# The installed vLLM

QUERIED = """\
import pathlib
with open(pathlib.Path(__file__).with_name("asked"), "a") as file:
    file.write("x")
print("a line that is no answer")
class Manager:
    @staticmethod
    def list_registered():
        return ["own_parser"]
"""
PARSER = """\
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
def make_arg_parser(parser):
    parser.add_argument("--own-flag", action=argparse.BooleanOptionalAction)
    parser.add_argument("-s", "--second")
    return parser
"""


@pytest.fixture
def own_vllm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine with a vLLM 9.9, whose command is a script of the kind that pip writes."""
    site, program = tmp_path / "site", tmp_path / "bin" / "vllm"
    files = {
        "vllm/__init__.py": "",
        "vllm/utils/__init__.py": "",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/launchers/__init__.py": "",
        "vllm/reasoning.py": f"{QUERIED}ReasoningParserManager = Manager\n",
        "vllm/tool_parsers.py": "from vllm.reasoning import Manager as ToolParserManager\n",
        "vllm/utils/argparse_utils.py": PARSER,
        "vllm/entrypoints/launchers/cli_args.py": PARSER,
        "vllm-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nraise SystemExit('this is not run')\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def ignored(_: str) -> None:
    """Ignore the progress message of a query."""


def query_count(tmp_path: Path) -> int:
    file = tmp_path / "site" / "vllm" / "asked"
    return len(file.read_text()) if file.exists() else 0


EXPECTED = KnownNames("9.9", frozenset({"help", "own-flag", "no-own-flag", "second"}), frozenset({"own_parser"}), frozenset({"own_parser"}))


def test_the_installed_vllm_is_queried_once_for_each_version(tmp_path: Path, own_vllm: dict[str, str]) -> None:
    messages: list[str] = []
    for _ in range(2):
        assert installed_vllm.known_names(("vllm", "serve"), own_vllm, messages.append) == EXPECTED
    assert (query_count(tmp_path), messages) == (1, ["reading the options of vLLM 9.9 (once; it takes some seconds)"])
    metadata = tmp_path / "site/vllm-9.9.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("9.9", "9.10"))
    again = installed_vllm.known_names(("vllm", "serve"), own_vllm, messages.append)
    assert again is not None and again.version == "9.10"
    assert query_count(tmp_path) == 2


def test_a_damaged_cache_is_rebuilt(tmp_path: Path, own_vllm: dict[str, str]) -> None:
    installed_vllm.known_names(("vllm", "serve"), own_vllm, ignored)
    [cached] = (tmp_path / "cache" / "vllm-gateway").iterdir()
    for damage in (b"{", b"[]", b'{"flags": 5}', b"\xff"):
        cached.write_bytes(damage)
        assert installed_vllm.known_names(("vllm", "serve"), own_vllm, ignored) == EXPECTED
    assert query_count(tmp_path) == 5


def test_the_interpreter_of_a_long_path_is_found_too(tmp_path: Path, own_vllm: dict[str, str]) -> None:
    (tmp_path / "bin" / "vllm").write_text(f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n")
    assert installed_vllm.known_names(("vllm", "serve"), own_vllm, ignored) == EXPECTED
    assert installed_vllm.known_names((sys.executable, "-m", "vllm.entrypoints.openai.api_server"), own_vllm, ignored) == EXPECTED


@pytest.mark.parametrize("program", ["", "#!/bin/sh\nexit 1\n", f"#!{sys.executable}\n", "#!/no/such/python\n"])
def test_a_vllm_without_readable_options_gives_no_names(tmp_path: Path, own_vllm: dict[str, str], program: str) -> None:
    (tmp_path / "bin" / "vllm").write_text(program)
    (tmp_path / "site" / "vllm" / "reasoning.py").write_text("raise RuntimeError('no')\n")
    assert installed_vllm.known_names(("vllm", "serve"), own_vllm, ignored) is None
    assert installed_vllm.known_names(("no-such-vllm", "serve"), own_vllm, ignored) is None


# GPUs


# Presets


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("{}", ["+2: models[0]: note: tool calls and reasoning are not set up; `preset: qwen3` sets up the parsers of this family"]),
        ("{preset: qwen3}", []),
        ("{args: {reasoning-parser: qwen3}}", []),
        ("{args: {config: /dev/null}}", []),
        ("{args: {runner: pooling}}", []),
        ("{command: [serve-models]}", []),
        ("{model: org/unknown}", []),
        (
            "{model: org/Llama-3.1-8B-Instruct, preset: llama3}",
            [
                ("+2: models[0].preset: note: for tool calls vLLM recommends chat-template: tool_chat_template_llama3.1_json.jinja, "
                "of the examples in its repository")
            ],
        ),
        ("{preset: qwen3, args: {tool-call-parser: hermse}}", [("2: models[0].args.tool-call-parser: vLLM 0.32 has no tool-call-parser of "
         "this name; did you mean `hermes`?")]),
        ("{preset: qwen3, args: {tool_call_parser: qwen3_coder}}", []),
    ],
)  # fmt: skip
def test_a_model_of_a_known_family(launch: str, expected: list[str]) -> None:
    assert found_in(f"{{id: Qwen/Qwen3-8B, launch: {launch}}}") == expected


def test_a_preset_that_the_installed_vllm_does_not_have_the_parsers_for() -> None:
    old = KnownNames("0.9", known_names.built_in().flags, frozenset({"qwen3"}), frozenset())
    machine = preflight.Machine(lambda _: old, 2, Path("/"))
    assert found_in("{id: m, launch: {preset: qwen3}}", machine) == ["2: models[0].preset: vLLM 0.9 has no tool-call-parser of this name"]


# Programs and files


def executable(file: Path, text: str = "#!/bin/sh\n") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def on(folder: Path, path: str = "/usr/bin:/bin") -> preflight.Machine:
    """A machine whose servers have this PATH."""
    return preflight.Machine(HERE.names, 0, folder, lambda program, own: why_not_executable(program, own or path))


@pytest.mark.parametrize(("command", "is_right"), [("simulate, --seed=1", True), ("simulator", False), ("serve", False)])
def test_a_command_of_the_gateway_itself(tmp_path: Path, command: str, is_right: bool) -> None:
    program = tmp_path / "vllm-gateway"
    program.touch(0o755)
    found = found_in(f"{{id: m, launch: {{command: [{program}, {command}]}}}}")
    assert found == ([] if is_right else ["2: models[0].command: this command serves no model; write [vllm-gateway, simulate]"])


def test_a_command_that_cannot_be_executed(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "vllm")
    executable(tmp_path / "own.sh")
    executable(tmp_path / "orphan", "#!/no/such/python\n")
    (tmp_path / "text").write_text("")
    machine = on(tmp_path)
    found = "is not found in PATH: write its whole path, or set PATH in launch.env"
    [missing] = found_in("{id: m, launch: {}}", machine)
    assert missing.startswith("2: models[0]: vllm is not found in PATH. Install vLLM (") and "[vllm-gateway, simulate]" in missing
    assert found_in("{id: m, launch: {command: [no-such, x]}}", machine) == [f"2: models[0].command: no-such {found}"]
    assert found_in(f"{{id: m, launch: {{env: {{PATH: {tmp_path}/bin}}}}}}", machine) == []
    assert found_in("{id: m, launch: {}}", on(tmp_path, f"{tmp_path}/bin")) == []
    assert found_in("{id: m, launch: {command: [./own.sh]}}", machine) == []
    for name, why in (("none", "does not exist"), ("text", "is not executable"), ("bin", "is a folder")):
        assert found_in(f"{{id: m, launch: {{command: [{tmp_path}/{name}]}}}}", machine) == [
            f"2: models[0].command: {tmp_path}/{name} {why}"
        ]
    orphan = f"{tmp_path}/orphan cannot be executed: its interpreter /no/such/python does not exist"
    assert found_in(f"{{id: m, launch: {{command: [{tmp_path}/orphan]}}}}", machine) == [f"2: models[0].command: {orphan}"]


@pytest.mark.parametrize(
    "args",
    [
        "chat-template: ./t.jinja",
        "chat_template: t.jinja",
        "chat-template: '{{ messages }}'",
        "chat-template: template_chatml.jinja",
        "tokenizer: org/name, generation-config: vllm, hf-config-path: org/name",
        "tool-parser-plugin: plugins/p.py, speculative-config: {model: ./draft}",
        "download-dir: ./made-by-vllm",
    ],
)
def test_existing_files_and_values_that_are_not_files(tmp_path: Path, args: str) -> None:
    for name in ("t.jinja", "plugins/p.py", "draft/config.json"):
        executable(tmp_path / name)
    assert found_in(f"{{id: m, launch: {{args: {{{args}}}}}}}", preflight.Machine(HERE.names, 0, tmp_path)) == []


@pytest.mark.parametrize(
    ("args", "where"),
    [
        ("chat-template: ./t.jinja", "chat-template"),
        ("chat_template: t.jinja", "chat_template"),
        ("config: vllm.yaml", "config"),
        ("tokenizer: ./tokenizer", "tokenizer"),
        ("reasoning-parser-plugin: /no/such.py", "reasoning-parser-plugin"),
        ("speculative-config: {model: ./draft, method: eagle}", "speculative-config.model"),
        ("logging-config.pylogging_config_file: l.json", "logging-config.pylogging_config_file"),
    ],
)
def test_files_that_are_missing(tmp_path: Path, args: str, where: str) -> None:
    text = f"{{id: m, launch: {{args: {{{args}}}}}}}"
    assert found_in(text, preflight.Machine(HERE.names, 0, tmp_path)) == [f"2: models[0].args.{where}: there is no such file or folder"]


def test_certain_failures_are_reported_for_changed_models_only(tmp_path: Path) -> None:
    source = parse("models:\n  - {id: a, launch: {args: {what: 1}}}\n  - {id: b, launch: {args: {what: 1}, gpus: [[9]]}}\n", "g.yaml")
    found = preflight.certain_failures(Draft(source), HERE, {"b"})
    assert [each.line for each in found] == [3, 3] and not any(isinstance(each, Note) for each in found)
    assert preflight.missing(Draft(source), on(tmp_path, "/nowhere"))[0].line == 2


@pytest.mark.parametrize(
    ("script", "count"),
    [
        (
            "echo 'GPU 0: H100 (UUID: GPU-1)'; echo '  MIG 1g.10gb Device 0: (UUID: MIG-1)'; echo 'GPU 1: H100 (UUID: GPU-2)'",
            2,
        ),
        ("echo 'No devices found.'", 0),
    ],
)
def test_gpus_are_counted_by_nvidias_own_word(tmp_path: Path, script: str, count: int) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus.count({"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}) == count


def test_a_driver_that_does_not_respond_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    without = gpus.count({"PATH": "/nowhere"})
    assert gpus.count({"PATH": str(tmp_path)}) == without


# The command


def test_check_says_all_of_it_in_the_order_of_the_lines(tmp_path: Path, own_vllm: dict[str, str]) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: one (UUID: GPU-1)'\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    (tmp_path / "g.yaml").write_text(
        "models:\n  - id: m\n    launch:\n      gpus: [[3]]\n      args: {secnd: 1}\n    lunch: 1\nkeys: [{id: k, anonymous: true}]\n"
    )
    program = Path(sys.executable).with_name("vllm-gateway")
    command = [str(program), "check", "g.yaml"]
    runs = [subprocess.run(command, cwd=tmp_path, env=own_vllm, capture_output=True, text=True, timeout=60) for _ in range(2)]
    assert [run.returncode for run in runs] == [2, 2]
    assert [run.stderr for run in runs] == ["reading the options of vLLM 9.9 (once; it takes some seconds)\n", ""]
    assert runs[0].stdout == runs[1].stdout == (
        "g.yaml:4: models[0].launch.gpus[0][0]: there is no GPU 3: only GPU 0 exists\n"
        "g.yaml:5: models[0].launch.args.secnd: vLLM 9.9 has no option --secnd; did you mean `second`?\n"
        "g.yaml:6: models[0].lunch: unknown key; did you mean `launch`?\n"
    )  # fmt: skip


def test_a_priority_that_vllm_would_ignore_is_a_note() -> None:
    def notes(models: str, keys: str) -> list[str]:
        source = parse(f"models: [{models}]\nkeys:\n{keys}", "g.yaml")
        return [str(each) for each in preflight.problems(Draft(source), HERE) if isinstance(each, Note)]

    launched, key = "{id: m, aliases: [alias], launch: {}}", "  - {id: a, priority: 5"
    note = "keys[0].priority: note: has no effect on `m` without max_inflight, or scheduling-policy: priority in its launch.args"
    assert notes(launched, f"{key}}}") == notes(launched, f"{key}, models: [ali*]}}") == [f"g.yaml:3: {note}"]
    assert notes(launched, f"{key}, models: [other]}}") == notes(launched, "  - {id: a}") == []
    for args in ("scheduling-policy: priority", "scheduling_policy: priority", "config: /x.yaml"):
        assert notes(f"{{id: m, launch: {{args: {{{args}}}}}}}", f"{key}}}") == []
    assert notes("{id: m, servers: [{url: 'http://a'}]}", f"{key}}}") == notes("{id: m, max_inflight: 8, launch: {}}", f"{key}}}") == []
