"""Names that are resolved periodically, by the system's resolver and by a resolver of the test."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import until
from upstream.discovery.dns import DnsName, system_resolver
from upstream.discovery.endpoints import Endpoint
from upstream.discovery.kubernetes import Cluster
from upstream.discovery.sources import DiscoveryStatus, Sources

ROOT = Path(__file__).parents[3]
NAME = DnsName("vllm.models", 8000, 0.02)
OWN_NETWORK = ["unshare", "--map-root-user", "--mount", "--net"]
"""Namespaces in which the loopback interface, port 53 and /etc/resolv.conf belong to the test."""
SETUP = 'mount --bind "$1" /etc/resolv.conf && ip link set lo up && exec "$2" -m tests.upstream.discovery.resolving vllm'


def possible() -> bool:
    command = [*OWN_NETWORK, "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


def test_the_systems_resolver_with_a_name_server(tmp_path: Path) -> None:
    if not possible():
        pytest.skip("needs unshare and ip, and to be allowed namespaces of its own")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nsearch models.svc.test\noptions timeout:1 attempts:1\n")
    command = [*OWN_NETWORK, "sh", "-c", SETUP, "sh", str(tmp_path / "resolv.conf"), sys.executable]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None

        def then(wanted: Callable[[dict[str, Any]], Any], **orders: Any) -> dict[str, Any]:
            """Give orders, and wait for a line like this."""
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(orders) + "\n")
            process.stdin.flush()
            deadline = time.monotonic() + 60
            for line in process.stdout:
                if wanted(reported := json.loads(line)):
                    return dict(reported)
                assert time.monotonic() < deadline, f"not said, but {reported}"
            raise AssertionError("it has ended")

        name = "vllm.models.svc.test"
        both = then(lambda reported: reported.get("seen"), table={name: ["10.0.0.2", "10.0.0.1", "fd00::1"]})
        assert both["seen"] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
        assert then(lambda reported: reported.get("seen") == ["http://10.0.0.3:8000"], table={name: ["10.0.0.3"]})
        assert "vllm: " in then(lambda reported: "trouble" in reported, fails=True)["trouble"]
        assert then(lambda reported: "seen" in reported, fails=False)["seen"] == ["http://10.0.0.3:8000"]
        assert "vllm: " in then(lambda reported: "trouble" in reported, table={})["trouble"]
        process.stdin.close()
        assert process.wait(60) == 0


async def test_the_hosts_file_counts() -> None:
    assert "127.0.0.1" in await system_resolver("localhost")
    with pytest.raises(UnicodeError, match="label empty"):
        await system_resolver("..")


async def test_a_cancelled_lookup_does_not_block() -> None:
    lookup = asyncio.create_task(system_resolver("localhost"))
    await asyncio.sleep(0)
    lookup.cancel()
    await asyncio.gather(lookup, return_exceptions=True)
    assert lookup.cancelled()


class Names:
    """A resolver that knows one name, or fails."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.fails = False
        self.queries = 0

    async def __call__(self, name: str) -> list[str]:
        assert name == NAME.name
        self.queries += 1
        if self.fails:
            raise OSError(-3, "Temporary failure in name resolution")
        return [*self.addresses, *self.addresses]


async def test_a_failure_leaves_what_was_found() -> None:
    names, reported = Names("10.0.0.1", "10.0.0.2"), []
    async with Sources(lambda: reported.append(1), Cluster("", ""), names) as sources:
        sources.set_sources([NAME, NAME])

        def finding() -> DiscoveryStatus:
            return sources.statuses()[NAME]

        assert not finding().first_result
        await until(lambda: finding().endpoints == (Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)))
        names.fails = True
        await until(lambda: finding().problem == "vllm.models: Temporary failure in name resolution")
        assert len(finding().endpoints) == 2 and finding().first_result
        names.fails, names.addresses = False, ["10.0.0.2"]
        await until(lambda: finding().endpoints == (Endpoint("10.0.0.2", 8000),))
        assert finding().problem == ""
        count, queries = len(reported), names.queries
        await until(lambda: names.queries > queries + 5)
        assert len(reported) <= count + 1, "nothing is told where nothing has changed"
        sources.set_sources([])
        assert sources.statuses() == {}


async def test_a_mistake_about_one_source_does_not_end_its_watch(caplog: pytest.LogCaptureFixture) -> None:
    names = Names("10.0.0.1")

    async def mistaken(name: str) -> list[str]:
        found = await names(name)
        return found if names.queries > 1 else [found[7]]

    async with Sources(lambda: None, Cluster("", ""), mistaken) as sources:
        sources.set_sources([NAME])
        await until(lambda: sources.statuses()[NAME].problem.startswith("IndexError"))
        await until(lambda: sources.statuses()[NAME].endpoints == (Endpoint("10.0.0.1", 8000),))
    assert "dns vllm.models:8000" in caplog.text
