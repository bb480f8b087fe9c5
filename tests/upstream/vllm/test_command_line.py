"""Settings to words and environment: pure."""

import json
from dataclasses import replace

import pytest

from tests.support.rows import each_row
from upstream.http.address import Address
from upstream.vllm.command_line import Adapter, ArgumentValue, LaunchSettings, address_for, command_line, problems

UDS = Address(host="localhost", uds="/run/x/0.sock")
KEY = "internal-key"


def settings(**args: ArgumentValue) -> LaunchSettings:
    return LaunchSettings("org/model", ("org/model", "short"), args={key.replace("_", "-"): value for key, value in args.items()})


def arguments_of(listen: Address = UDS, **args: ArgumentValue) -> tuple[str, ...]:
    return command_line(settings(**args), listen, KEY).argv


def no_port() -> int:
    raise AssertionError("no port is needed")


BASE = ("vllm", "serve", "org/model", "--served-model-name", "org/model", "short", "--uds", "/run/x/0.sock")


def test_the_model_is_positional_and_the_names_and_the_socket_follow() -> None:
    assert arguments_of() == BASE


def test_tcp_is_host_and_port() -> None:
    assert arguments_of(Address(port=8123))[6:] == ("--host", "127.0.0.1", "--port", "8123")


@each_row(
    ("value", "expected"),
    [
        (True, ("--a-flag",)),
        (False, ("--no-a-flag",)),
        (32768, ("--a-flag", "32768")),
        (0.5, ("--a-flag", "0.5")),
        ("qwen3", ("--a-flag", "qwen3")),
        ("", ("--a-flag", "")),
        ("-x", ("--a-flag=-x",)),
        (-1, ("--a-flag=-1",)),
        (["a", 2], ("--a-flag", "a", "2")),
        (({"name": "l", "path": "/p"},), ("--a-flag", '{"name": "l", "path": "/p"}')),
        ({"enable_thinking": False, "ü": [1]}, ("--a-flag", '{"enable_thinking": false, "ü": [1]}')),
    ],
)
def test_a_value_becomes_words(value: ArgumentValue, expected: tuple[str, ...]) -> None:
    assert arguments_of(a_flag=value) == (*BASE, *expected)


def test_underscores_become_dashes_but_not_in_the_field_of_a_json_argument() -> None:
    line = command_line(LaunchSettings("m", ("m",), args={"max_model_len": 1, "hf_overrides.rope_theta": 2}), UDS, KEY)
    assert line.argv[-4:] == ("--max-model-len", "1", "--hf-overrides.rope_theta", "2")


def test_adapters_are_served_beside_their_model_and_all_at_once() -> None:
    one, two = Adapter("sql", "/loras/sql"), Adapter("chat", "/loras/chat")
    alone = command_line(LaunchSettings("/m", ("org/m",), adapters=(one,)), UDS, KEY).argv[7:]
    assert alone == ("--enable-lora", "--lora-modules", '{"name": "sql", "path": "/loras/sql", "base_model_name": "org/m"}')
    both = command_line(LaunchSettings("/m", ("org/m",), adapters=(one, two)), UDS, KEY).argv[7:]
    assert both[:3] == alone and '"chat"' in both[3] and both[4:] == ("--max-loras", "2", "--max-cpu-loras", "2")


def test_the_operators_numbers_of_adapters_win() -> None:
    many = tuple(Adapter(str(number), "/x") for number in range(40))
    assert command_line(LaunchSettings("m", ("m",), adapters=many), UDS, KEY).argv[-4:] == ("--max-loras", "8", "--max-cpu-loras", "40")
    argv = command_line(LaunchSettings("m", ("m",), args={"max_loras": 2}, adapters=many), UDS, KEY).argv
    assert argv[-2:] == ("--max-loras", "2") and "--max-cpu-loras" not in argv


def test_another_command_takes_the_place_of_vllm_serve() -> None:
    line = command_line(LaunchSettings("m", ("m",), command=("python", "-m", "other")), UDS, KEY)
    assert line.argv[:4] == ("python", "-m", "other", "m")


def test_the_environment_has_the_key_the_gpus_and_the_defaults() -> None:
    line = command_line(LaunchSettings("m", ("m",), gpus=(0, 3), env={"HF_HUB_OFFLINE": "1"}), UDS, KEY)
    assert line.env == {
        "VLLM_API_KEY": KEY,
        "CUDA_VISIBLE_DEVICES": "0,3",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_the_operators_environment_wins_over_the_defaults_and_no_gpus_say_nothing() -> None:
    line = command_line(LaunchSettings("m", ("m",), env={"DO_NOT_TRACK": "0", "CUDA_VISIBLE_DEVICES": "7"}), UDS, KEY)
    assert line.env["DO_NOT_TRACK"] == "0"
    assert line.env["CUDA_VISIBLE_DEVICES"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in command_line(settings(), UDS, KEY).env


def test_secrets_are_in_no_word_and_no_repr() -> None:
    secret = LaunchSettings("m", ("m",), env={"HF_TOKEN": "hf_canary"})
    line = command_line(secret, UDS, KEY)
    assert KEY not in repr(line) + " ".join(line.argv)
    assert "hf_canary" not in repr(line) + repr(secret)


@each_row(
    ("wrong", "path"),
    [
        (settings(api_key="x"), "args.api-key"),
        (settings(served_model_name="x"), "args.served-model-name"),
        (settings(model="x"), "args.model"),
        (settings(ssl_keyfile="x"), "args.ssl-keyfile"),
        (settings(uds="/x", port=1), "args.uds"),
        (settings(port=70000), "args.port"),
        (settings(port="http"), "args.port"),
        (settings(port=True), "args.port"),
        (settings(lora_modules=[]), "args.lora-modules"),
        (LaunchSettings("m", ("m",), args={"lora_modules": ["a=/a"]}, adapters=(Adapter("b", "/b"),)), "args.lora-modules"),
        (LaunchSettings("m", ("m",), args={"max-model-len": 1, "max_model_len": 2}), "args"),
        (LaunchSettings("m", ("m",), args={"api_key": "x"}), "args.api-key"),
        (LaunchSettings("m", ("m",), env={"VLLM_API_KEY": "x"}), "env.VLLM_API_KEY"),
        (LaunchSettings("m", ("m",), env={"CUDA_VISIBLE_DEVICES": "0"}, gpus=(0,)), "env.CUDA_VISIBLE_DEVICES"),
        (LaunchSettings("m", ()), "served_names"),
        (LaunchSettings("m", ("m",), command=()), "command"),
    ],
)
def test_invalid_settings_are_rejected_with_their_path(wrong: LaunchSettings, path: str) -> None:
    (problem,) = problems(wrong)
    assert problem.startswith(f"{path}: ")
    with pytest.raises(ValueError, match=path):
        command_line(wrong, UDS, KEY)


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems(settings(api_key="x", port=0))) == 2


def test_the_private_socket_is_the_default() -> None:
    assert address_for(settings(), uds="/run/x/0.sock", free_port=no_port) == UDS


def test_a_command_without_uds_gets_a_free_port() -> None:
    tcp = LaunchSettings("m", ("m",), listen="tcp")
    assert address_for(tcp, uds="/x", free_port=lambda: 4711) == Address(port=4711)


@pytest.mark.parametrize(
    ("args", "expected", "flags"),
    [
        ({"uds": "/own.sock"}, Address(host="localhost", uds="/own.sock"), ("--uds", "/own.sock")),
        ({"port": 9000}, Address(port=9000), ("--host", "127.0.0.1", "--port", "9000")),
        ({"host": "0.0.0.0"}, Address(port=4711), ("--host", "0.0.0.0", "--port", "4711")),
        ({"host": "::", "port": "9000"}, Address(host="::1", port=9000), ("--host", "::", "--port", "9000")),
        ({"host": "10.0.0.7", "port": 9000}, Address(host="10.0.0.7", port=9000), ("--host", "10.0.0.7", "--port", "9000")),
    ],
)
def test_where_the_operator_says_to_listen_wins(args: dict[str, ArgumentValue], expected: Address, flags: tuple[str, ...]) -> None:
    own = LaunchSettings("m", ("m",), args=args)
    address = address_for(own, uds="/x", free_port=lambda: 4711)
    assert address == expected
    assert command_line(own, address, KEY).argv[5:] == flags


def test_a_server_that_sleeps_has_the_flag_and_its_routes_are_open() -> None:
    sleeper = LaunchSettings("m", ("m",), sleeps=True)
    line = command_line(sleeper, UDS, KEY)
    assert line.argv[-1] == "--enable-sleep-mode" and line.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in command_line(settings(), UDS, KEY).env
    assert problems(replace(sleeper, args={"enable_sleep_mode": False})) == ("args.enable-sleep-mode: idle_sleep needs it",)


@pytest.mark.parametrize(
    ("command", "receives"),
    [
        (("vllm", "serve"), True),
        (("/opt/v/bin/vllm", "serve"), True),
        (("python", "tee.py", "/opt/v/bin/vllm", "serve"), True),
        (("python", "-m", "vllm.entrypoints.openai.api_server"), True),
        (("vllm-gateway", "simulate"), True),
        (("python", "-m", "upstream.simulator"), True),
        (("my-server",), False),
    ],
)
def test_vllm_receives_the_drain_time_and_other_commands_do_not(command: tuple[str, ...], receives: bool) -> None:
    line = command_line(LaunchSettings("m", ("m",), command=command, drain=29.5), UDS, KEY)
    assert line.argv[-2:] == ("--shutdown-timeout", "30") if receives else "--shutdown-timeout" not in line.argv


def test_the_operators_drain_wins() -> None:
    line = command_line(LaunchSettings("m", ("m",), args={"shutdown-timeout": 5}, drain=30.0), UDS, KEY)
    assert line.argv[line.argv.index("--shutdown-timeout") + 1] == "5" and "30" not in line.argv


EVENTS = LaunchSettings("m", ("m",), kv_events=True)


def test_events_are_published_on_sockets_of_the_private_folder() -> None:
    argv = command_line(EVENTS, UDS, KEY, "/run/x/0").argv
    events = json.loads(argv[argv.index("--kv-events-config") + 1])
    assert events["enable_kv_cache_events"] is True
    assert (events["endpoint"], events["replay_endpoint"]) == ("ipc:///run/x/0/inproc-kv", "ipc:///run/x/0/inproc-kv-replay")


@each_row(
    ("settings", "folder"),
    [
        (replace(EVENTS, kv_events=False), "/run/x/0"),
        (EVENTS, None),
        (replace(EVENTS, command=("serve-model",)), "/run/x/0"),
        (replace(EVENTS, args={"kv_events_config.topic": "kv"}), "/run/x/0"),
    ],
    ids=["not wanted", "no folder", "another program", "set by the operator"],
)
def test_otherwise_the_flag_is_not_added(settings: LaunchSettings, folder: str | None) -> None:
    assert "--kv-events-config" not in command_line(settings, UDS, KEY, folder).argv


@pytest.mark.parametrize("command", [("vllm", "serve"), ("serve-model",)])
def test_flags_for_the_gateway_are_set_where_they_are_known(command: tuple[str, ...]) -> None:
    argv = command_line(LaunchSettings("m", ("m",), command=command, cached_tokens=True, scale_out=True), UDS, KEY).argv
    for flag in ("--enable-prompt-tokens-details", "--enable-scale-out"):
        assert (flag in argv) is (command[0] == "vllm")


def test_the_operator_may_close_the_scale_out_routes() -> None:
    argv = command_line(LaunchSettings("m", ("m",), args={"enable-scale-out": False}, scale_out=True), UDS, KEY).argv
    assert argv[-1] == "--no-enable-scale-out" and "--enable-scale-out" not in argv
