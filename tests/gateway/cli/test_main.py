"""The command line: its output, its exit codes, and secrets that it never prints."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from gateway import __version__
from gateway.auth.keys import has_valid_checksum, hash_of, mint
from gateway.cli.main import application
from gateway.config import load
from gateway.system.compiled_core import core

COMMAND = Path(sys.executable).with_name("vllm-gateway")
KEY = mint("team-a")
EXPIRED = "keys[1].expires: note: has expired: all keys of this entry are refused"


@dataclass(frozen=True, slots=True)
class Ran:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


def gateway(*arguments: str | Path, stdin: str = "", folder: Path | None = None) -> Ran:
    """Run the installed command in ``folder``."""
    done = subprocess.run([COMMAND, *arguments], input=stdin, capture_output=True, text=True, cwd=folder, timeout=60)
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.yaml").write_text(
        "models:\n  - {id: Qwen/Q, servers: [{url: 'http://127.0.0.1:9'}]}\n"
        f"keys:\n  - {{id: team-a, hash: '{hash_of(KEY)}', models: ['Qwen/*']}}\n"
        f"  - {{id: old, hash: '{hash_of('old')}', expires: 2020-01-01}}\n"
    )
    (tmp_path / "bad.yaml").write_text("models:\n  - {id: Qwen/Q, lunch: {}}\nkeys:\n  - id: team-a\n    hash: hunter2\n")
    return tmp_path


BAD = """\
bad.yaml:2: models[0].lunch: unknown key; did you mean `launch`?
bad.yaml:5: keys[0].hash: expected sha256: and 64 hexadecimal digits, as `vllm-gateway keys hash` prints; never the key itself
"""


def test_check_prints_every_problem_plainly_and_exits_with_2(folder: Path) -> None:
    assert gateway("check", "bad.yaml", folder=folder) == Ran(2, BAD, "")


def test_check_of_a_good_file(folder: Path) -> None:
    assert gateway("check", "good.yaml", folder=folder) == Ran(
        0,
        f"good.yaml:5: {EXPIRED}\ngood.yaml is valid: 1 model, 2 keys, 1 note\n",
        "",
    )


def test_without_a_name_the_configuration_is_gateway_yaml_here(folder: Path) -> None:
    assert gateway("check", folder=folder) == Ran(2, "gateway.yaml: cannot be read: No such file or directory\n", "")
    (folder / "good.yaml").rename(folder / "gateway.yaml")
    assert gateway("check", folder=folder).out.endswith("gateway.yaml is valid: 1 model, 2 keys, 1 note\n")
    assert gateway("keys", "verify", folder=folder, stdin=KEY) == Ran(0, "team-a: valid, for Qwen/*\n", "")


def test_check_reads_standard_input(folder: Path) -> None:
    text = (folder / "good.yaml").read_text()
    expected = f"/dev/stdin:5: {EXPIRED}\n/dev/stdin is valid: 1 model, 2 keys, 1 note\n"
    assert gateway("check", "/dev/stdin", stdin=text) == Ran(0, expected, "")
    assert gateway("check", "/dev/stdin", stdin=text + "modles: []\n").out.endswith("6: modles: unknown key; did you mean `models`?\n")


def test_check_at_a_terminal_is_colored_and_not_wrapped(folder: Path) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", closefd=True) as terminal:
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "40"}
        environ.pop("NO_COLOR", None)
        done = subprocess.run([COMMAND, "check", "bad.yaml"], stdout=theirs, stderr=theirs, cwd=folder, env=environ, timeout=60)
        os.close(theirs)
        shown = all_of(terminal.fileno())
    assert done.returncode == 2
    assert "\x1b[31munknown key; did you mean `launch`?\x1b[0m" in shown
    assert len(shown.splitlines()) == len(BAD.splitlines())


def all_of(terminal: int) -> str:
    """Return the remaining output. On Linux, reading from a terminal without a writer ends with an error."""
    data = b""
    try:
        while chunk := os.read(terminal, 65_536):
            data += chunk
    except OSError:
        pass
    return data.decode()


def test_serve_refuses_a_bad_file_as_check_does(folder: Path) -> None:
    assert gateway("serve", "bad.yaml", folder=folder) == Ran(2, "", BAD)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chekc"], "vllm-gateway: No such command 'chekc'."),
        (["restart"], "vllm-gateway: Missing argument 'MODEL'."),
        (["check", "--fast", "x"], "vllm-gateway: No such option: --fast"),
        (["keys", "new"], "vllm-gateway: Missing option '--id'."),
        (["keys", "new", "--id", "a b"], "vllm-gateway: --id: must not contain spaces or control characters"),
        (["keys", "new", "--id", "a", "--expires", "soon"], "vllm-gateway: --expires: expected a date such as 2027-01-01 or"),
        (["keys", "hash"], "vllm-gateway: expected one key, on one line, on stdin"),
    ],
)
def test_an_invalid_command_line_prints_one_line_and_exits_with_2(arguments: list[str], expected: str) -> None:
    ran = gateway(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(expected)
    assert ran.err.count("\n") == 1


def test_a_new_key_is_printed_once_and_is_valid_with_its_stanza(folder: Path) -> None:
    ran = gateway("keys", "new", "--id", "team-b", "--models", "Qwen/*", "--models", "Qwen/Q", "--expires", "2999-01-01")
    key, empty, *stanza = ran.out.splitlines()
    assert (ran.code, empty, has_valid_checksum(key)) == (0, "", True)
    assert (ran.out + ran.err).count(key) == 1
    assert "not shown again" in ran.err

    more = folder / "more.yaml"
    more.write_text((folder / "good.yaml").read_text() + "\n".join(stanza) + "\n")
    assert [one.text for one in load(more).keys[-1].hashes] == [hash_of(key)]
    assert yaml.safe_load("\n".join(stanza)) == [
        {"id": "team-b", "hash": hash_of(key), "models": ["Qwen/*", "Qwen/Q"], "expires": "2999-01-01"}
    ]
    assert gateway("keys", "verify", more, stdin=key).out == "team-b: valid, until 2999-01-01T00:00:00+00:00, for Qwen/*, Qwen/Q\n"


def test_the_line_end_of_a_key_is_not_hashed() -> None:
    assert gateway("keys", "hash", stdin="test\n") == Ran(0, hash_of("test") + "\n", "")
    assert gateway("keys", "hash", stdin="two\nkeys\n").code == 2


def test_a_key_that_is_typed_at_a_terminal_is_not_shown() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        with subprocess.Popen(
            [COMMAND, "keys", "hash"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True,  # otherwise the key would be read from the terminal that the tests run in
        ) as process:  # fmt: skip
            os.close(theirs)
            assert process.stdout is not None and process.stderr is not None
            prompt = b""
            while not prompt.endswith(b": "):  # from now on the terminal does not echo
                prompt += process.stderr.read(1) or pytest.fail(f"no prompt, but {prompt!r}")
            terminal.write(b"test\n")
            out, err = process.communicate(timeout=60)
        shown = all_of(terminal.fileno())
    assert (process.returncode, out.decode(), prompt, err.strip()) == (0, hash_of("test") + "\n", b"Key: ", b"")
    assert "test" not in shown


@pytest.mark.parametrize(
    ("key", "ran"),
    [
        (KEY + "\n", Ran(0, "team-a: valid, for Qwen/*\n", "")),
        ("old", Ran(1, "", "vllm-gateway: old: expired since 2020-01-01T00:00:00+00:00\n")),
        (mint("team-a"), Ran(1, "", "vllm-gateway: the key is not in good.yaml\n")),
        (KEY[:-1] + "*", Ran(1, "", "vllm-gateway: the key is not in good.yaml\n")),
        (KEY[:-7] + "_000000", Ran(1, "", "vllm-gateway: the key is mistyped: its checksum is wrong\n")),
    ],
    ids=["valid", "expired", "unknown", "foreign", "mistyped"],
)
def test_verify(folder: Path, key: str, ran: Ran) -> None:
    assert gateway("keys", "verify", "good.yaml", stdin=key, folder=folder) == ran


def test_verify_needs_a_good_file(folder: Path) -> None:
    assert gateway("keys", "verify", "bad.yaml", stdin=KEY, folder=folder) == Ran(2, "", BAD)


def test_the_schema_is_json() -> None:
    ran = gateway("schema")
    assert (ran.code, ran.err) == (0, "")
    assert set(json.loads(ran.out)["properties"]) >= {"server", "models", "keys", "keys_file", "limits_store", "ledger"}


def test_help_lists_the_commands_and_cuts_no_line() -> None:
    for ran in (gateway(), gateway("--help")):
        assert (ran.code, ran.err) == (0, "")
        for command in ("serve", "check", "schema", "keys", "demo", "simulate"):
            assert f"\n  {command} " in ran.out
        assert "..." not in ran.out.replace("[ARGS]...", ""), "every line of help is whole"


def test_the_simulator_gets_its_arguments_untouched() -> None:
    arguments = ["--no-such-option", "--", "x", "-y"]
    direct = subprocess.run([sys.executable, "-m", "upstream.simulator", *arguments], capture_output=True, text=True, timeout=60)
    assert gateway("simulate", *arguments) == Ran(direct.returncode, direct.stdout, direct.stderr)


def test_the_simulators_help_names_the_command_that_was_typed() -> None:
    ran = gateway("simulate", "--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("usage: vllm-gateway simulate [MODEL] [flags]\n")


def tree(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command of a command line, with the words that name it."""
    for name, below in command.commands.items():
        yield (*path, name), below
        if hasattr(below, "commands"):
            yield from tree(below, *path, name)


COMMANDS = dict(tree(get_command(application(with_keys=True))))
CONFIGURED = {path: one for path, one in COMMANDS.items() if any("--config" in each.opts for each in one.params)}


@pytest.mark.parametrize("path", [path for path in COMMANDS if path != ("simulate",)], ids=" ".join)
def test_every_command_has_help(path: tuple[str, ...]) -> None:
    ran = gateway(*path, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"Usage: vllm-gateway {' '.join(path)} ")


def test_every_command_takes_its_configuration_in_the_same_way() -> None:
    groups = {("keys",), ("teams",), ("people",), ("audit",), ("record",), ("notices",)}
    without = {("schema",), ("demo",), ("simulate",), ("keys", "hash"), *groups}
    assert COMMANDS.keys() - CONFIGURED.keys() == without
    for names, command in CONFIGURED.items():
        *_, last = (each for each in command.params if each.param_type_name == "argument")
        assert (last.name, last.metavar, last.required, last.nargs) == ("file", "FILE", False, 1), names


@pytest.mark.parametrize("path", CONFIGURED, ids=" ".join)
def test_a_configuration_is_an_argument_or_an_option_and_not_both(tmp_path: Path, path: tuple[str, ...]) -> None:
    arguments = [each for each in CONFIGURED[path].params if each.param_type_name == "argument" and each.required]
    (tmp_path / "keys.txt").write_text("sk-0123456789abcdef\n")
    required = {"new": ["--id", "x"], "login-link": ["--user", "x"], "set": ["--requests-per-minute", "5"], "raise": ["--until", "1h"]}
    required["requests"] = ["x"]  # without an ID before it, FILE would be the ID
    options = required.get(path[-1], [])
    line = [*path, *("keys.txt" if each.metavar == "KEYS" else "x" for each in arguments), *options]
    by_argument = gateway(*line, "absent.yaml", folder=tmp_path, stdin="x")
    by_option = gateway(*line, "--config", "absent.yaml", folder=tmp_path, stdin="x")
    assert by_argument == by_option
    assert by_argument.code in (1, 2) and "absent.yaml" in by_argument.err + by_argument.out
    twice = gateway(*line, "one.yaml", "--config", "two.yaml", folder=tmp_path, stdin="x")
    assert twice == Ran(2, "", "vllm-gateway: the configuration is given twice: one.yaml and --config two.yaml\n")


def test_a_closed_output_causes_no_traceback() -> None:
    with subprocess.Popen([COMMAND, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_the_version_command_imports_no_configuration_packages() -> None:
    code = (
        "import sys, gateway.cli.main; code = gateway.cli.main.run(['--version']);"
        "print(code, [name for name in ('pydantic', 'yaml', 'uvicorn', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"vllm-gateway {__version__} ({core()} core)\n0 []\n"
