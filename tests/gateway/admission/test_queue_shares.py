"""Shares of a busy server in tokens, over sockets: whatever the length of requests, and however their clients behave."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from gateway.admission.fair_queue import MANY
from gateway.admission.weighted_tokens import ServiceWeights, Tokens
from gateway.auth.keys import hash_of
from gateway.snapshot.snapshot import Key, Queue, QueueClass, Slo
from tests.gateway.admission.simulated_queue import Client, SimulatedQueue, simulated_workers
from tests.support.controlled import controlled
from tests.support.running import key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import DONE, HELLO, chat, client, request

SLOTS = 4
REQUESTS = 200
"""The requests of the flow with fewer requests."""
QUEUE = Queue(size=1000, wait=60.0)
WEIGHTS = ServiceWeights()
SPEED = 0.00005  # seconds of the server for a token of service


@dataclass
class Load:
    """The requests of some keys, which are one flow: ``clients`` send one after the other. ``length``: tokens of a prompt and an output."""

    keys: Sequence[Key]
    length: Callable[[], tuple[int, int]]
    clients: int = 12
    weight: float = 1.0
    every: float = 0.0
    """Seconds between two pulses, in which each client sends one request; 0: a client sends the next request at once."""
    disconnects: bool = False
    """Its clients disconnect when they have 90% of the output."""
    service: float = field(default=0.0, init=False)
    ended: int = field(default=0, init=False)


async def respond(talk: Conversation) -> None:
    """Answer with as many tokens as the request names. A stream has an event for each."""
    if talk.request.head.startswith(b"GET"):  # a probe
        await talk.respond(b'{"object":"list","data":[]}')
        return
    document: dict[str, Any] = talk.request.json
    prompt, output = map(int, document["messages"][0]["content"].split())
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    await asyncio.sleep(WEIGHTS.prompt * prompt * SPEED)
    if not document["stream"]:
        await asyncio.sleep(WEIGHTS.completion * output * SPEED)
        await talk.respond(orjson.dumps({"id": "x", "object": "chat.completion", "choices": [], "usage": usage}))
        return
    await talk.begin_stream()
    for _ in range(output):
        await asyncio.sleep(WEIGHTS.completion * SPEED)
        await talk.chunk(HELLO)
    await talk.chunk(DONE)
    await talk.end_stream()


async def play(port: int, loads: Sequence[Load]) -> None:
    """Send requests until each load has had ``REQUESTS``, and count the service of each."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(send(port, load, load.keys[number % len(load.keys)]))
            for load in loads
            for number in range(max(load.clients, len(load.keys)))
        ]
        await until(lambda: all(load.ended >= REQUESTS for load in loads), 120)
        for task in tasks:
            task.cancel()


async def send(port: int, load: Load, sender: Key) -> None:
    """Send the requests of one client, one after the other."""
    while True:
        prompt, output = load.length()
        text = chat(messages=[{"role": "user", "content": f"{prompt} {output}"}], stream=load.disconnects)
        async with client(port) as one:
            one.send(request(text, token=f"sk-{sender.id}"))
            if load.disconnects:
                output = output * 9 // 10
                await one.events(output)
            else:
                assert (await one.reply()).status == 200
        load.service += WEIGHTS.service(Tokens(prompt, output))
        load.ended += 1
        if load.every:
            await asyncio.sleep(load.every)


def keys(name: str, count: int = 1, **more: Any) -> list[Key]:
    return [key(f"{name}{number}", f"sk-{name}{number}", **more) for number in range(count)]


def fixed(prompt: int, output: int) -> Callable[[], tuple[int, int]]:
    return lambda: (prompt, output)


def varied(seed: int, mean: float) -> Callable[[], tuple[int, int]]:
    random = Random(seed)
    return lambda: (10, int(random.lognormvariate(mean, 0.7)) + 1)


CASES: dict[str, Callable[[], tuple[Load, Load]]] = {
    "long and short outputs": lambda: (Load(keys("a"), fixed(10, 200)), Load(keys("b"), fixed(10, 20))),
    "long prompts and long outputs": lambda: (Load(keys("a"), fixed(800, 10)), Load(keys("b"), fixed(10, 40))),
    "a team of one key and a team of fifty": lambda: (
        Load(keys("a", team="one"), fixed(10, 40)),
        Load(keys("b", 50, team="many"), fixed(10, 40)),
    ),
    "weights 1 : 3": lambda: (Load(keys("a"), fixed(10, 40)), Load(keys("b", weight=3.0), fixed(10, 40), weight=3.0)),
    "teams with weights 1 : 3": lambda: (
        Load(keys("a", team="one"), fixed(10, 40)),
        Load(keys("b", team="three"), fixed(10, 40), weight=3.0),
    ),
    "log-normal lengths": lambda: (Load(keys("a"), varied(1, 4.0)), Load(keys("b"), varied(2, 3.0))),
    "a flow that pulses": lambda: (Load(keys("a"), fixed(10, 40), clients=40, every=0.1), Load(keys("b"), fixed(10, 40))),
    "clients that disconnect": lambda: (Load(keys("a"), fixed(10, 40), disconnects=True), Load(keys("b"), fixed(10, 20))),
}


@pytest.mark.parametrize("case", CASES)
async def test_service_is_shared_by_weight(case: str) -> None:
    loads = CASES[case]()
    every_key = [each for load in loads for each in load.keys]
    bounded = partial(model, queue=QUEUE, max_inflight=SLOTS)
    async with scripted(respond) as server, serving([bounded(server.port)], every_key, team_weights={"three": 3.0}) as served:
        await play(served.port, loads)
    first, second = (load.service / load.weight for load in loads)
    assert first / second == pytest.approx(1, abs=0.02), f"{[load.ended for load in loads]} requests"


FAST, SLOW = WEIGHTS.completion * SPEED, 0.01
"""Seconds for a token of an output: hundreds of requests end between two ticks of a worker, or one."""
CASES_OF_WORKERS: dict[str, tuple[float, int, Callable[[], tuple[Load, Load]]]] = {
    "long and short outputs": (FAST, REQUESTS, lambda: (Load(keys("a"), fixed(10, 200), 40), Load(keys("b"), fixed(10, 20), 40))),
    "weights 1 : 3": (
        FAST,
        REQUESTS,
        lambda: (Load(keys("a"), fixed(10, 40), 40), Load(keys("b", weight=3.0), fixed(10, 40), 40, weight=3.0)),
    ),
    "a team of one key and a team of fifty": (
        SLOW,
        3 * REQUESTS,  # of 200 equal requests, those in flight are more than 2%
        lambda: (Load(keys("a", team="one"), fixed(10, 40), 50), Load(keys("b", 50, team="many"), fixed(10, 40), 50)),
    ),
}


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("case", CASES_OF_WORKERS)
def test_shares_over_workers_are_as_exact_as_in_one(monkeypatch: pytest.MonkeyPatch, workers: int, case: str) -> None:
    """In simulated time. Each request goes to any worker."""
    step, requests, make = CASES_OF_WORKERS[case]
    loads, draw = make(), Random(workers)
    with simulated_workers(monkeypatch, workers, 2 * SLOTS, Slo(), step=step, prefill=step) as simulated:
        clock = simulated[0].clock

        def send_next(load: Load, sender: Key) -> None:
            prompt, output = load.length()
            one = Client(sender, output, size=4 * prompt, ended=partial(count, load))
            clock.at(clock.now + draw.random() / 1000, partial(draw.choice(simulated).send, one))

        def count(load: Load, ended: Client) -> None:
            if min(each.ended for each in loads) < requests:
                load.ended += 1
                load.service += WEIGHTS.service(Tokens(ended.size // 4, ended.output))
                send_next(load, ended.key)

        for number in range(loads[0].clients):
            for load in loads:
                send_next(load, load.keys[number % len(load.keys)])
        clock.run(math.inf, lambda: min(each.ended for each in loads) >= requests)
    first, second = (load.service / load.weight for load in loads)
    assert first / second == pytest.approx(1, abs=0.02), f"{[load.ended for load in loads]} requests"


@pytest.mark.parametrize("classes", [(), (QueueClass("one"), QueueClass("many"))])
def test_a_flow_is_charged_for_a_key_that_another_worker_serves(monkeypatch: pytest.MonkeyPatch, classes: Sequence[QueueClass]) -> None:
    """A key of the team has half of the slots by the other worker, so the other team gets the rest."""
    served = Counter[str]()
    with simulated_workers(monkeypatch, 2, 2 * SLOTS, Slo(), step=SLOW, classes=classes) as simulated:

        def count(worker: SimulatedQueue, ended: Client) -> None:
            if worker.now < 1060.0:
                served[ended.key.id] += 1
                worker.send(ended)

        for number, name, team in ((0, "a", "one"), (0, "b", "many"), (1, "c", "many")) * 20:
            worker = simulated[number]
            one = Client(Key(name, team=team, queue_class=team), ended=partial(count, worker))
            worker.clock.at(worker.now, partial(worker.send, one))
        simulated[0].clock.run(1060.0)
    assert served["a"] / (served["b"] + served["c"]) == pytest.approx(1, abs=0.05), served


@pytest.mark.parametrize("workers", [2, 4])
async def test_service_is_shared_by_weight_over_all_workers(tmp_path: Path, workers: int) -> None:
    """The bound is wider than in simulated time: on a busy machine, a key may have no queued request for a moment."""
    loads = CASES_OF_WORKERS["long and short outputs"][2]()
    entries = [{"id": each, "hash": hash_of(f"sk-{each}")} for each in ("a0", "b0")]
    async with scripted(respond) as server:
        bounded = {
            "id": "tiny",
            "max_inflight": 2 * SLOTS,
            "queue": {"size": 1000, "wait": "60s"},
            "servers": [{"url": f"http://127.0.0.1:{server.port}"}],
        }
        async with controlled(tmp_path, bounded, keys=entries, workers=workers) as one:
            await play(one.port, loads)
    first, second = (load.service for load in loads)
    assert first / second == pytest.approx(1, abs=0.05), f"{[load.ended for load in loads]} requests"


async def test_refused_requests_of_invented_end_users_leave_few_flows() -> None:
    async def hold(talk: Conversation) -> None:
        await talk.closed_by_peer()

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(scripted(hold))
        named = model(server.port, max_inflight=1, queue=Queue(size=1, wait=600.0))
        served = await stack.enter_async_context(serving([named]))
        busy, waiting, refused = [await stack.enter_async_context(client(served.port)) for _ in range(3)]
        for number, each in enumerate((busy, waiting)):
            each.writer.write(request({**chat(), "user": f"holds {number}"}))
        queue = served.context.queues._queues["tiny"]
        await until(lambda: len(queue._waiting) == 1)
        for number in range(2 * MANY):
            refused.writer.write(request({**chat(), "user": f"user {number}"}))
            await refused.reader.readuntil(b"}}")
        assert max(len(key.flow.children) for key in queue._keys.values()) <= MANY
