"""Which options of vLLM are paths, and where a relative one begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from upstream.vllm import known_names
from upstream.vllm.command_line import ArgumentValue
from upstream.vllm.path_options import KINDS, absolute, absolute_command

FOLDER = Path("/etc/gateway")
THERE = {FOLDER / name for name in ("t.jinja", "org/name", "serve.sh", "p.py")}


def resolved(own: bool = True, **args: ArgumentValue) -> dict[str, ArgumentValue]:
    return absolute(args, FOLDER, THERE.__contains__, own=own)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("./t.jinja", "/etc/gateway/t.jinja"),
        ("t.jinja", "/etc/gateway/t.jinja"),
        ("../t.jinja", "/etc/t.jinja"),
        ("/t.jinja", "/t.jinja"),
        ("{{ messages }}", "{{ messages }}"),
        ("line\nline", "line\nline"),
        ("template_chatml.jinja", "template_chatml.jinja"),
    ],
)
def test_a_chat_template(written: str, meant: str) -> None:
    assert resolved(chat_template=written) == {"chat_template": meant}


def test_a_name_on_the_hub_stays_unless_it_is_a_folder_here() -> None:
    assert resolved(tokenizer="other/name") == {"tokenizer": "other/name"}
    assert resolved(tokenizer="org/name") == {"tokenizer": "/etc/gateway/org/name"}
    assert resolved(tokenizer="./other") == {"tokenizer": "/etc/gateway/other"}
    assert resolved(generation_config="vllm") == {"generation_config": "vllm"}


def test_a_field_of_an_option_that_takes_json() -> None:
    before: dict[str, ArgumentValue] = {"model": "./draft", "method": "eagle"}
    assert resolved(speculative_config=before) == {"speculative_config": {"model": "/etc/gateway/draft", "method": "eagle"}}
    assert before["model"] == "./draft", "what was read is not changed"
    args: dict[str, ArgumentValue] = {"logging-config.pylogging_config_file": "l.json"}
    assert absolute(args, FOLDER, THERE.__contains__, own=True) == {"logging-config.pylogging_config_file": "/etc/gateway/l.json"}


def test_what_is_no_path_stays() -> None:
    args: dict[str, ArgumentValue] = {"seed": 1, "chat-template": True, "config": ["x"], "served": "./t.jinja", "download-dir": ""}
    assert absolute(args, FOLDER, THERE.__contains__, own=True) == args


def test_for_another_command_only_what_is_here_is_certain_to_be_meant() -> None:
    assert resolved(own=False, chat_template="t.jinja", config="./in-the-container.yaml", download_dir="models") == {
        "chat_template": "/etc/gateway/t.jinja",
        "config": "./in-the-container.yaml",
        "download_dir": "models",
    }


def test_the_words_of_a_command() -> None:
    command = absolute_command(("./serve.sh", "../p", "vllm", "./t.jinja"), FOLDER, THERE.__contains__)
    assert command == ("/etc/gateway/serve.sh", "../p", "vllm", "/etc/gateway/t.jinja")


def test_the_table_names_options_that_vllm_has() -> None:
    assert {name.partition(".")[0] for name in KINDS} <= known_names.built_in().flags
