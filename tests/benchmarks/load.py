"""JSON requests, each sent when the previous response has arrived: wrk (Debian's) with a script and one thread.

The rule: errors are never timed. One response is compared in full before each run (`whole_answer`). During the run every status and the
number of bytes are compared with it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from tests.benchmarks.wire import TOKEN, completion

SCRIPT = Path(__file__).with_name("load.lua")
_ERRORS = ("connect", "read", "write", "status", "timeout")
_MARGIN = 30.0  # seconds that wrk may take beyond the time it was given


class LoadFailed(Exception):
    """The load generator itself did not work."""


@dataclass(frozen=True, slots=True)
class Load:
    """A run. `p50`, `p99` and `p999` (99.9%) are latencies in seconds; `faults` says what went wrong, empty when all was well."""

    requests: int
    seconds: float
    p50: float
    p99: float
    p999: float
    faults: tuple[str, ...] = ()


async def load(
    port: int, body: bytes, response: int, connections: int, seconds: float, folder: Path, tokens: Sequence[str] = (TOKEN,)
) -> Load:
    """Load a proxy whose answers have a body of `answer` bytes, for whole seconds, at least one; files for wrk go to `folder`.

    Raises:
        LoadFailed: with wrk's words.
    """
    (folder / "body").write_bytes(body)
    (folder / "tokens").write_text("\n".join(tokens))
    environ = {**os.environ, "BENCH_BODY": str(folder / "body"), "BENCH_TOKENS": str(folder / "tokens")}
    arguments = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout=20s", f"--script={SCRIPT}"]
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    pipe = asyncio.subprocess.PIPE
    wrk = await asyncio.create_subprocess_exec("wrk", *arguments, url, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environ)
    try:
        text, _ = await asyncio.wait_for(wrk.communicate(), seconds + _MARGIN)
    except TimeoutError as error:
        raise LoadFailed("wrk did not end in time") from error
    finally:
        if wrk.returncode is None:
            wrk.kill()
            await wrk.wait()
    return summary(text.decode(errors="replace"), response)


def summary(text: str, response: int) -> Load:
    """Parse the output of wrk and its script. ``response``: bytes of a response body. Raises LoadFailed."""
    line = next((line for line in text.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise LoadFailed(text.strip()[-400:])
    result = json.loads(line.removeprefix("RESULT "))
    faults = [f"{result[name]} × {name}" for name in _ERRORS if result[name]]
    if result["bytes"] < result["requests"] * response:
        faults.append(f"{result['requests'] * response - result['bytes']} bytes too few")
    seconds, p50, p99, p999 = (result[name] / 1e6 for name in ("microseconds", "p50", "p99", "p999"))
    return Load(result["requests"], seconds, p50, p99, p999, tuple(faults))


def difference(status: int, body: bytes) -> str | None:
    """Describe what is wrong with a response; None if it is the upstream's, or the same message and usage in other bytes."""
    if status != 200:
        return f"status {status}: {body[:200]!r}"
    if body == completion():
        return None
    theirs, ours = json.loads(body), json.loads(completion())
    same = theirs["choices"][0]["message"]["content"] == ours["choices"][0]["message"]["content"]
    return None if same and theirs["usage"]["total_tokens"] == ours["usage"]["total_tokens"] else f"another answer: {body[:200]!r}"


def whole_response(port: int, body: bytes) -> tuple[int, bytes]:
    """Status and body of one answer. Raises httpx2.HTTPError."""
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    response = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", content=body, headers=headers, timeout=20, verify=False)
    return response.status_code, response.content
