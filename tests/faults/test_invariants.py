"""The checks of a gateway of several processes detect broken invariants."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.faults.invariants import ended, request_ids, soon_idle, whole
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.wire import chat, request

MODEL = "sim/one"
SLOWLY = {"tokens": 1000, "tokens_per_second": 5}
WITHIN = 4.0
"""Seconds to wait for a state that is never reached. It suffices for the states that are checked before, on a busy machine too."""
Harm = Callable[[Gateway, ExitStack], object]


def _connections(one: Gateway, stack: ExitStack) -> None:
    """Leave more connections open than could close meanwhile. A probe that was open when the block started may close."""
    for _ in range(8):
        _connection(one, stack)


def _connection(one: Gateway, stack: ExitStack) -> socket.socket:
    """Return an accepted connection that stays open until the stack is closed."""
    made = stack.enter_context(socket.create_connection(("127.0.0.1", one.data), 30))
    made.sendall(request(b"", "/health", method="GET"))
    assert made.recv(12) == b"HTTP/1.1 200"
    return made


def _stream(one: Gateway, stack: ExitStack) -> None:
    made = _connection(one, stack)
    made.sendall(request(chat(model=MODEL, stream=True, simulate=SLOWLY)))
    wait_for(lambda: one.metric(f'vllm_gateway_inflight_requests{{model="{MODEL}"}}') == 1)


def _line_twice(one: Gateway, _: ExitStack) -> None:
    """Write a line of the log again, as a worker that settled a request twice."""
    assert one.request().status_code == 200
    wait_for(lambda: one.log.endswith("\n"))
    with open(one.folder / "stdout", "a") as log:
        log.write(one.log.splitlines(keepends=True)[-1])


def _kill(one: Gateway) -> None:
    one.process.kill()
    one.process.wait(30)


BROKEN: dict[str, Harm] = {"more descriptors than before": _connections, "in flight": _stream, "recorded twice": _line_twice}


def test_broken_invariants_are_detected(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(soon_idle(launched(MODEL)))) as one:
        with whole(one):
            assert one.request().status_code == 200
        assert len(request_ids(one.log)) == 1
        for message, harm in BROKEN.items():
            with ExitStack() as stack, pytest.raises(AssertionError, match=message), whole(one, within=WITHIN):
                harm(one, stack)


def test_a_missing_line_is_detected(tmp_path: Path) -> None:
    (tmp_path / "stdout").symlink_to("/dev/null")
    with gateway(tmp_path, configuration(soon_idle(launched(MODEL)))) as one:
        with pytest.raises(AssertionError, match="not in the log once: 1"), whole(one, within=WITHIN):
            assert one.request().status_code == 200
        with whole(one, lost=2), whole(one, written=False):
            assert one.request().status_code == 200


def test_a_process_that_outlives_its_gateway_is_detected(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(soon_idle(launched(MODEL)))) as one:
        (shim,) = (each for each in psutil.Process(one.process.pid).children() if "upstream.launcher.shim" in " ".join(each.cmdline()))
        with ended(one):
            shim.suspend()
            with pytest.raises(AssertionError, match="outlives the gateway"), ended(one, within=0.5):
                _kill(one)
            shim.resume()
