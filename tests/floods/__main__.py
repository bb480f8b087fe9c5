"""``make floods``: measure how much slower one client is while another sends each of the floods. Prints, and writes nothing.

The rule: rounds with and without the flood alternate, so that other load of the machine affects both, and the median round counts. The
clients are separate processes; the gateway has one worker, so they share its event loop.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from time import monotonic, sleep

from gateway.auth import keys
from tests.faults.report import machine
from tests.floods.requests import FLOODS, ISSUER, post
from tests.proxies.origin import origin
from tests.support.issuer import AUDIENCE, published
from tests.support.process import configuration, gateway
from tests.support.running import MODEL

_OTHER = "sk-other-client"
_EVERY = 0.005
"""Seconds between two requests of the other client."""
_CONNECTIONS = 4


def attack(name: str, port: int) -> None:
    """Send a flood on several connections until standard input closes."""
    stop, flood = threading.Event(), FLOODS[name]

    def send(first: int) -> None:
        number = first
        while not stop.is_set():
            number += _CONNECTIONS
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(flood.make(number))
                received = b""
                while received.count(b"HTTP/1.1 ") < flood.responses and (piece := connection.recv(65536)):
                    received += piece

    threads = [threading.Thread(target=send, args=(number,)) for number in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


@contextmanager
def _attacked(name: str, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.floods", "--attack", name, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(60)


def late(port: int, seconds: float) -> float:
    """Send ordinary requests for some seconds on one connection. Return the time within which 99 of 100 were served, in milliseconds."""
    body = b'{"model":"%b","messages":[{"role":"user","content":"Hello"}]}' % MODEL.encode()
    data, times, end = post(body, token=_OTHER), list[float](), monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        while monotonic() < end:
            began = monotonic()
            connection.sendall(data)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200"), "the other client was refused"
            times.append(monotonic() - began)
            sleep(_EVERY)
    return sorted(times)[int(0.99 * (len(times) - 1))] * 1000


def measured(names: Sequence[str], seconds: float, rounds: int) -> Iterator[tuple[str, float, float]]:
    """Yield each flood with the median of the rounds without it and with it, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="floods-") as name, published(ISSUER) as shown, origin(Path(name) / "received") as (port, _):
        config = configuration({"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{port}", "model": "m"}]}, workers=1)
        config["keys"] += [{"id": "other", "hash": keys.hash_of(_OTHER)}, {"id": "staff"}]
        config["jwt"] = [{"issuer": ISSUER.name, "audience": AUDIENCE, "jwks": shown.url, "keys": ["staff"]}]
        with gateway(Path(name), config) as one:
            late(one.data, 1)
            for flood in names:
                alone, beside = [], []
                for _ in range(rounds):
                    alone.append(late(one.data, seconds))
                    with _attacked(flood, one.data):
                        beside.append(late(one.data, seconds))
                yield flood, median(alone), median(beside)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of floods, or send a flood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *FLOODS], help="these floods; all by default")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "PORT"), help="send a flood until standard input closes")
    options = parser.parse_args(arguments)
    if options.attack:
        attack(options.attack[0], int(options.attack[1]))
        return 0
    print(f"99 of 100 requests of another client, {_CONNECTIONS} connections of the flood. {machine()}")
    print(f"{'flood':36} {'alone':>9} {'beside it':>10} {'ratio':>6}")
    for name, alone, beside in measured(options.names or list(FLOODS), options.seconds, options.rounds):
        print(f"{name:36} {alone:6.1f} ms {beside:7.1f} ms {beside / alone:6.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
