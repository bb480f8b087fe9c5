"""A worker process and what control sends it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from array import array
from contextlib import ExitStack, aclosing, closing
from typing import Any

from gateway.control.serve import listen
from gateway.limits.shared_counts import Buckets
from gateway.snapshot.link import BlockChanges, CachedBlocks, Health
from gateway.snapshot.snapshot import Snapshot
from gateway.telemetry.shared_counters import SharedCounters
from gateway.worker.supervisor import WorkerEvents, WorkerSupervisor
from tests.support.running import key, model, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import chat, request, request_once
from upstream.balancing.placement_log import PlacementLog
from upstream.balancing.server import Condition
from upstream.vllm.kv_events.keys import prompt_keys

SIZE = 16
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


async def respond(talk: Conversation) -> None:
    """Respond as a server whose tokens are bytes."""
    if talk.request.head.startswith(b"POST /tokenize "):
        document: Any = talk.request.json
        ids = list(document["messages"][0]["content"].encode())
        await talk.respond(json.dumps({"count": len(ids), "max_model_len": 4096, "tokens": ids}).encode())
    else:
        usage = {"prompt_tokens": len(TEXT), "completion_tokens": 1}
        await talk.respond(json.dumps({"port": talk.writer.get_extra_info("sockname")[1], "usage": usage}).encode())


async def test_requests_reach_the_server_that_has_their_blocks_by_its_events() -> None:
    async with scripted(respond) as one, scripted(respond) as other:
        served = model(one.port, other.port, balance="cost", policy={"explain": True})
        with closing(listen("127.0.0.1", 0, "server.port")) as listener:
            async with aclosing(WorkerSupervisor(listener, 1, WorkerEvents(lambda: None, lambda _: None))) as supervisor:
                health = Health({spec.name: Condition.UP for spec in served.servers}, {})
                supervisor.apply_snapshot(Snapshot(1, (key(),), (served,)), health)
                await until(lambda: supervisor.statuses[0].up, 60)
                blocks = array("Q", prompt_keys(list(TEXT.encode()), SIZE)).tobytes()
                for number, server in enumerate((one, other, one)):
                    changes = [
                        BlockChanges(spec.name, SIZE, True, True, b"", blocks if spec.address.port == server.port else b"")
                        for spec in served.servers
                    ]
                    supervisor.send(CachedBlocks(tuple(changes)))
                    applied = supervisor.apply_health(health)
                    await until(lambda applied=applied: supervisor.have_applied(applied))
                    body = chat(messages=[{"role": "user", "content": TEXT}], seed=number)
                    reply = await request_once(listener.getsockname()[1], request(body))
                    assert json.loads(reply.body)["port"] == server.port
                await until(lambda: supervisor.last_choice("tiny") is not None)


def test_a_worker_whose_control_exits_before_the_first_snapshot_exits() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours, theirs = socket.socketpair()
        fds = {
            "--listen-fd": listener.fileno(),
            "--control-fd": theirs.fileno(),
            "--counters-fd": stack.enter_context(closing(SharedCounters.create("test"))).fd,
            "--buckets-fd": stack.enter_context(closing(Buckets.create("test", 1))).fd,
            "--placements-fd": stack.enter_context(closing(PlacementLog.create(2, 1))).fd,
        }
        with theirs:
            arguments = [argument for flag, fd in fds.items() for argument in (flag, str(fd))]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gateway.worker.process", "worker", "0", *arguments], pass_fds=tuple(fds.values())
            )
        ours.close()
        assert process.wait(60) == 0
