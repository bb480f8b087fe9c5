"""Compare the cached tokens that the gateway predicts with those that two real vLLM servers report.

``python -m tests.vllm.kv_events [REQUESTS]`` plays conversations and questions about shared texts through all phases, and prints for each
phase the share of requests whose prediction was equal. The servers have so few KV blocks that they evict.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import zmq

from tests.support import process
from tests.support.process import Gateway, configuration, wait_for
from tests.vllm.cache_oracle import Recorded, cached_share
from tests.vllm.dialogues import Json, user
from tests.vllm.gateway import WITHOUT_THINKING
from tests.vllm.server import START_WITHIN, Flag, Server, running

BLOCK, BLOCKS = 32, 160
AT_ONCE = 8
_END = (-1).to_bytes(8, signed=True)
_WITHOUT_PYZMQ = "import sys; sys.modules['zmq'] = None; from gateway.cli.main import main; main()"
_SETTLED = 3  # replays in a row without a new batch: vLLM may have queued one when it answered the first


def flags(folder: Path, number: int, blocks: int | None = BLOCKS) -> dict[str, Flag]:
    """Return the flags of a server that publishes events on sockets in ``folder``. ``blocks``: its KV blocks; None: as many as fit."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/kv{number}",
        "replay_endpoint": f"ipc://{folder}/replay{number}",
    }
    return {
        "block-size": BLOCK,
        **({} if blocks is None else {"num-gpu-blocks-override": blocks}),
        "reasoning-parser": "qwen3",
        "enable-prompt-tokens-details": True,
        "kv-events-config": json.dumps(events),
    }


@dataclass
class Sent:
    """A request that was sent: the phase, its ID, and the cached tokens that its server has reported."""

    phase: str
    id: str
    cached: int


@dataclass
class Comparison:
    """A gateway in front of two servers, and the requests that were sent to it."""

    folder: Path
    urls: Sequence[str]
    servers: dict[int, ExitStack] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)
    predictions: dict[str, int] = field(default_factory=dict)
    _gateway: ExitStack = field(default_factory=ExitStack)
    _one: Gateway | None = None
    _context: zmq.Context[Any] = field(default_factory=zmq.Context)

    @property
    def gateway(self) -> Gateway:
        assert self._one is not None
        return self._one

    def start_server(self, number: int) -> Server:
        stack = ExitStack()
        found = stack.enter_context(running("qwen3", flags=flags(self.folder, number), uds=self.folder / f"uds{number}"))
        self.servers[number] = stack
        return found

    def restart_server(self, number: int) -> None:
        """Replace a server's engine by a new one at the same address."""
        self.servers[number].close()
        (self.folder / f"uds{number}").unlink(missing_ok=True)
        wait_for(lambda: self.status()[number]["condition"] == "down")
        assert not (self.status()[number].get("kv_events") or {}).get("blocks"), "the blocks of the engine that has exited are known"
        self.start_server(number)
        self.wait_until_followed()

    def start_gateway(self, *, with_events: bool = True) -> None:
        """Start a gateway, in place of the one before."""
        self.stop_gateway()
        model = {"id": "tiny", "balance": "cost", "cost_policy": {"explain": True}, "body": {"allow": ["cache_salt"]}}
        found = [{"url": url, "model": "tiny"} for url in self.urls]
        line = () if with_events else (sys.executable, "-c", _WITHOUT_PYZMQ, "serve", str(self.folder / "gateway.yaml"))
        config = configuration(model | {"servers": found})
        self._one = self._gateway.enter_context(process.gateway(self.folder, config, line=line))
        if with_events:
            self.wait_until_followed()

    def stop_gateway(self) -> None:
        if self._one is not None:
            self._gateway.close()
            self.read_log(self._one)
            self._one = None

    def read_log(self, one: Gateway) -> None:
        """Read the predictions from the access log."""
        for line in map(json.loads, one.log.splitlines()):
            if (explanation := line.get("balance")) is not None:
                self.predictions[line["request_id"]] = explanation["predicted_cached_tokens"]

    def status(self) -> list[Json]:
        found: list[Json] = self.gateway.get("/status").json()["models"][0]["servers"]
        return found

    def wait_until_followed(self) -> None:
        def followed() -> bool:
            events = [each.get("kv_events") or {} for each in self.status()]
            return all(each.get("ranks") == 1 and not each["problem"] for each in events)

        wait_for(followed, START_WITHIN)
        self.wait_until_applied()

    def wait_until_applied(self) -> None:
        """Wait until every batch that the engines have published was applied, and sent to the workers."""
        last = [self._last_batch(number) for number in range(len(self.urls))]
        wait_for(lambda: [(each.get("kv_events") or {"batches": [-1]})["batches"] for each in self.status()] == [[each] for each in last])

    def _last_batch(self, number: int) -> int:
        """Return the number of the last batch that an engine has published; -1 without one."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, 30_000)
            dealer.connect(f"ipc://{self.folder}/replay{number}")
            last, unchanged = -1, 0
            while unchanged < _SETTLED:
                dealer.send_multipart([b"", max(last, 0).to_bytes(8)])
                before = last
                while (frames := dealer.recv_multipart())[2] != _END:
                    last = max(last, int.from_bytes(frames[2]))
                unchanged = unchanged + 1 if last == before else 0
            return last

    def send(self, phase: str, body: Json) -> str:
        """Send a request. Returns the text of the response."""
        more = {"model": "tiny", "temperature": 0, "max_tokens": 8, "return_token_ids": True, **WITHOUT_THINKING}
        response = self.gateway.request(timeout=120, **more, **body)
        assert response.status_code == 200, response.text
        found = response.json()
        self.sent.append(Sent(phase, response.headers["x-request-id"], found["usage"]["prompt_tokens_details"]["cached_tokens"]))
        self.recorded.append(Recorded(found["prompt_token_ids"], found["choices"][0]["token_ids"], body.get("cache_salt")))
        return found["choices"][0]["message"]["content"] or ""

    def reported_share(self) -> float:
        """Return the share of prompt tokens that were cached since the start of the engines, by their counters."""
        sums = dict.fromkeys(("hits", "queries"), 0.0)
        for number in range(len(self.urls)):
            transport = httpx2.HTTPTransport(uds=str(self.folder / f"uds{number}"))
            with httpx2.Client(transport=transport, base_url="http://vllm") as client:
                for line in client.get("/metrics").text.splitlines():
                    for name in sums:
                        if line.startswith(f"vllm:prefix_cache_{name}_total{{"):
                            sums[name] += float(line.rsplit(" ", 1)[1])
        return sums["hits"] / sums["queries"]

    def play(self, phase: str, requests: int, traffic: Traffic) -> None:
        """Send one request at a time, each after the events of the one before were applied."""
        for _ in range(requests):
            traffic.send(lambda body: self.send(phase, body))
            self.wait_until_applied()

    def play_at_once(self, phase: str, requests: int, traffics: Sequence[Traffic]) -> None:
        """Send requests of several users at once, without waiting for events."""

        def one_user(traffic: Traffic) -> None:
            for _ in range(requests // len(traffics)):
                traffic.send(lambda body: self.send(phase, body))

        with ThreadPoolExecutor(len(traffics)) as pool:
            for done in [pool.submit(one_user, traffic) for traffic in traffics]:
                done.result()
        self.wait_until_applied()

    def play_with_losses(self, phase: str, requests: int, traffic: Traffic) -> int:
        """Lose the events of every fourth request on their way to the gateway, which is restarted before and after.

        The next request shows the gap. It is counted separately, because its prediction is made before that. Returns the gaps.
        """
        self.stop_gateway()
        with self._forwarder() as forwarder:
            self.start_gateway()
            for number in range(requests):
                forwarder.lossy = number % 4 == 1
                name = f"{phase}, directly after a loss" if number % 4 == 2 else phase
                traffic.send(lambda body, name=name: self.send(name, body))
                if not forwarder.lossy:
                    self.wait_until_applied()
            gaps = self.gaps()
            self.stop_gateway()
        self.start_gateway()
        return gaps

    @contextmanager
    def _forwarder(self) -> Iterator[Forwarder]:
        """Put a forwarder between the servers' sockets and the gateway's. The sockets for replays stay as they are."""
        forwarder = Forwarder(self._context)
        paths = [self.folder / f"kv{number}" for number in range(len(self.urls))]
        for path in paths:
            path.rename(path.with_suffix(".real"))
        thread = threading.Thread(target=forwarder.run, args=(paths,))
        thread.start()
        try:
            wait_for(lambda: all(path.exists() for path in paths))
            yield forwarder
        finally:
            forwarder.ended = True
            thread.join()
            for path in paths:
                path.with_suffix(".real").replace(path)

    def gaps(self) -> int:
        return sum((each.get("kv_events") or {"gaps": 0})["gaps"] for each in self.status())

    def shares(self) -> dict[str, tuple[int, int]]:
        """Return the equal predictions and the requests of each phase. Stops the gateway."""
        self.stop_gateway()
        found: dict[str, tuple[int, int]] = {}
        for each in self.sent:
            equal, count = found.get(each.phase, (0, 0))
            found[each.phase] = equal + (self.predictions[each.id] == each.cached), count + 1
        return found

    def close(self) -> None:
        self._gateway.close()
        for each in self.servers.values():
            each.close()
        self._context.destroy(linger=0)


@dataclass
class Forwarder:
    """Passes the batches of all servers on, except while it is ``lossy``."""

    context: zmq.Context[Any]
    lossy: bool = False
    ended: bool = False

    def run(self, paths: Sequence[Path]) -> None:
        with ExitStack() as stack:
            pairs = [[stack.enter_context(self.context.socket(kind)) for kind in (zmq.SUB, zmq.PUB)] for _ in paths]
            for path, (source, target) in zip(paths, pairs, strict=True):
                source.setsockopt(zmq.SUBSCRIBE, b"")
                source.connect(f"ipc://{path.with_suffix('.real')}")
                target.bind(f"ipc://{path}")
            while not self.ended:
                for source, target in pairs:
                    if source.poll(5):
                        batch = source.recv_multipart()
                        if not self.lossy:
                            target.send_multipart(batch)


class Traffic:
    """Conversations, and questions about shared texts, of tenants with and without a salt."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._texts = [" ".join(f"Item {item} of list {text} is {item * item + text}." for item in range(30)) for text in range(6)]
        self._talks: list[tuple[str | None, list[Json]]] = []

    def send(self, send: Any) -> None:
        """Send the next request with ``send``, which returns the response's text."""
        choose = self._random
        if self._talks and choose.random() < 0.6:
            salt, talk = choose.choice(self._talks)
        else:
            salt, talk = (
                choose.choice((None, None, "red", "blue")),
                [user(f"{choose.choice(self._texts)} Question {choose.randrange(10**6)}?")],
            )
            self._talks = [*self._talks[-7:], (salt, talk)]
        text = send({"messages": list(talk)} | ({} if salt is None else {"cache_salt": salt}))
        talk += [{"role": "assistant", "content": text}, user(f"And item {choose.randrange(100)}?")]
        if len(talk) > 9:
            self._talks = [each for each in self._talks if each[1] is not talk]


@contextmanager
def comparison() -> Iterator[Comparison]:
    """Run two servers and a gateway."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        one = Comparison(Path(folder), [f"unix:{folder}/uds{number}" for number in range(2)])
        try:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(one.start_server, range(2)))
            one.start_gateway()
            yield one
        finally:
            one.close()


def main() -> None:
    """Play all phases, and print their shares."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    part, traffic, began = requests // 10, Traffic(7), time.monotonic()
    with comparison() as one:
        one.play("one at a time", 4 * part, traffic)
        reached, possible = one.reported_share(), cached_share(one.recorded, len(one.urls), BLOCKS, BLOCK)
        print(
            f"cached share: {reached:.1%}; with exact knowledge of all caches: {possible:.1%} ({reached / possible:.1%} of it)", flush=True
        )
        gaps = one.play_with_losses("with lost events", 2 * part, traffic)
        print(f"gaps that the gateway noticed: {gaps}", flush=True)
        one.play("after a restart of the gateway", part, traffic)
        one.restart_server(0)
        one.play("after a restart of an engine", part, traffic)
        one.play_at_once(f"{AT_ONCE} at once", part, [Traffic(seed) for seed in range(AT_ONCE)])
        one.start_gateway(with_events=False)
        for _ in range(part):
            traffic.send(lambda body: one.send("without events", body))
        for phase, (equal, count) in one.shares().items():
            print(f"{phase}: {equal} of {count} ({equal / count:.1%})", flush=True)
    print(f"{len(one.sent)} requests in {time.monotonic() - began:.0f} s, {sum(each.cached for each in one.sent)} cached tokens")


if __name__ == "__main__":
    main()
