"""Measures the pages: 200 open consoles, the first paint of each page, and scrolling through 10,000 rows.

``python -m tests.benchmarks.console`` prints the figures and writes nothing. The rule: what is compared is measured in one run, in phases
that take turns, on the same gateway.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from gateway.console import pages as console
from gateway.portal import pages as portal
from tests.support.chromium import Chromium, chromium
from tests.support.console import TOKENS, admin_tokens
from tests.support.process import Gateway, configuration, gateway, launched
from tests.support.running import KEY

CONSOLES = 200
ROUNDS = 3
PHASE = 10.0
"""Seconds of each phase."""
KEYS = 10_000
_BODY = json.dumps({"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
_FRAMES = """(async (step) => {
  const shown = document.querySelector("#keys .scroll"), frames = [];
  shown.scrollTop = 0;
  await new Promise((done) => setTimeout(done, 500));
  let last = performance.now();
  for (let y = 0; frames.length < 400 && y < shown.scrollHeight - 3000; y += step) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
    shown.scrollTop = y;
  }
  frames.sort((a, b) => a - b);
  return [frames[frames.length >> 1], frames[Math.floor(frames.length * 0.99)], frames.at(-1)];
})"""
_LOAD_ALL = """(async (rows) => {
  const shown = document.querySelector("#keys .scroll"), text = () => document.getElementById("count").textContent;
  const count = () => parseInt(text().replace(/\\D/g, ""));
  while (count() < rows) {
    shown.scrollTop = shown.scrollHeight;
    await new Promise((done) => setTimeout(done, 20));
  }
  return count();
})"""


def main() -> int:
    """Run all measurements and print them."""
    config = configuration(launched(), portal=True)
    config["server"]["admin"]["tokens"] = admin_tokens()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config |= {"ledger": f"sqlite:///{folder}/usage.db", "store": "ledger"}
        for name in ("gateway", "chromium"):
            (Path(folder) / name).mkdir()
        one = stack.enter_context(gateway(Path(folder) / "gateway", config))
        _print_consoles(one)
        browser = stack.enter_context(chromium(Path(folder) / "chromium"))
        _print_first_paints(one, browser)
        _print_scrolling(one, browser)
    return 0


def _print_consoles(one: Gateway) -> None:
    """Print the CPU time of control and the times of JSON requests, alone and beside open consoles."""
    shares: dict[int, list[float]] = {0: [], CONSOLES: []}
    times: dict[int, list[float]] = {0: [], CONSOLES: []}
    for _ in range(ROUNDS):
        for count in shares:
            with _followers(one.admin, count):
                time.sleep(1)
                before, begun = _cpu(one), time.monotonic()
                times[count] += _requests(one.data, begun + PHASE)
                shares[count].append((_cpu(one) - before) / (time.monotonic() - begun))
    alone, beside = (statistics.median(shares[count]) for count in shares)
    print(f"control: {alone:.2%} of a core alone, {beside:.2%} with {CONSOLES} open consoles: {beside - alone:+.2%}")
    for share in (0.5, 0.99):
        first, second = (sorted(times[count])[int(share * len(times[count]))] for count in times)
        print(f"JSON, p{100 * share:.0f}: {1000 * first:.2f} ms alone, {1000 * second:.2f} ms beside them: {second / first:.2f} times")


def _cpu(one: Gateway) -> float:
    used = psutil.Process(one.process.pid).cpu_times()
    return float(used.user + used.system)


def _requests(port: int, until: float) -> list[float]:
    """Send requests one after the other, and return the seconds of each."""
    found, connection = [], HTTPConnection("127.0.0.1", port, timeout=60)
    while (begun := time.monotonic()) < until:
        connection.request("POST", "/v1/chat/completions", _BODY, {"authorization": f"Bearer {KEY}", "content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        found.append(time.monotonic() - begun)
    connection.close()
    return found


@contextmanager
def _followers(port: int, count: int) -> Iterator[None]:
    """Read the events of so many consoles. Fail if a console got no event."""
    stop, received = threading.Event(), [0] * count

    def follow(number: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/admin/v1/overview/events", headers={"authorization": f"Bearer {TOKENS['viewer']}"})
        response = connection.getresponse()
        while not stop.is_set() and (line := response.readline()):
            received[number] += line.startswith(b"data: ")
        connection.close()

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(count)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in threads:
            each.join()
    assert all(received), "a console got no event"


def _print_first_paints(one: Gateway, browser: Chromium) -> None:
    """Print the first contentful paint of each page, the median of three."""
    for base, secret, paths in (
        (one.url, KEY, portal.PAGES),
        (f"http://127.0.0.1:{one.admin}", TOKENS["admin"], console.PAGES),
    ):
        for path in paths:
            found = [_first_paint(browser, f"{base}{path}#key={secret}") for _ in range(3)]
            print(f"first paint of {path}: {statistics.median(found):.0f} ms")


def _first_paint(browser: Chromium, url: str) -> float:
    browser.open("about:blank")
    browser.open(url)
    browser.wait("performance.getEntriesByName('first-contentful-paint').length && !document.getElementById('page').hidden")
    return float(browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))


def _print_scrolling(one: Gateway, browser: Chromium) -> None:
    """Print the times of frames while 10,000 keys are scrolled."""
    lines = "\n".join(f"key-{number:05},sk-{number:05}-{'x' * 32}" for number in range(KEYS))
    call(one, "POST", "/admin/v1/keys/import", lines)
    browser.open(f"http://127.0.0.1:{one.admin}/console/keys#key={TOKENS['admin']}")
    browser.wait("document.querySelectorAll('#keys tbody tr').length > 20")
    print(f"{browser.evaluate(f'{_LOAD_ALL}({KEYS})'):,} keys are shown")
    for step in (120, 900):
        median, late, most = browser.evaluate(f"{_FRAMES}({step})")
        print(f"scrolling by {step} px: a frame takes {median:.0f} ms (median), {late:.0f} ms (p99), {most:.0f} ms (most)")


def call(one: Gateway, method: str, path: str, body: str) -> Any:
    """Send a request with the token of an administrator, and return its JSON."""
    connection = HTTPConnection("127.0.0.1", one.admin, timeout=600)
    connection.request(method, path, body, {"authorization": f"Bearer {TOKENS['admin']}"})
    response = connection.getresponse()
    content = response.read()
    assert response.status < 300, content
    connection.close()
    return json.loads(content)


if __name__ == "__main__":
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}")
    sys.exit(main())
