"""The input of a client's script and its output: one JSON object, case by case, on standard output.

A script runs in its package's environment as ``python -m tests.clients.scripts.NAME`` in the project's root, and imports nothing else of
the project. The rule: it asserts nothing; it uses its package as its manual says, and the tests judge what came of it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

TASK: dict[str, Any] = json.loads(os.environ["TASK"])
"""``client``, its name; ``url`` of the gateway; ``key``, ``wrong_key``; ``model``, ``unknown_model``, ``busy_model``; the texts
``hello``, ``weather``, ``too_long``, ``again`` and ``cancel``; ``slow``, extra members of the body for a long answer; ``tool``, a
function in OpenAI's form."""

LIMIT = 256
"""The maximum number of tokens of a response, for packages that require a number."""


def run(**cases: Callable[[], Any]) -> None:
    """Run the cases in order and print their results. ``ended``: the end of the last case, in seconds since the epoch."""
    results = {name: _result(case) for name, case in cases.items()}
    print(json.dumps({**results, "ended": time.time()}))


def _result(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Exception:
        return {"failed": traceback.format_exc()}


def refused(send: Callable[[], Any]) -> dict[str, Any]:
    """Return the exception of a request that must be rejected: the names of its classes, and what it contains of the response."""
    try:
        return {"answered": repr(send())}
    except Exception as error:
        classes = [f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(error).__mro__]
        return {"classes": classes, "words": str(error), **{name: getattr(error, name, None) for name in ("status_code", "code")}}


def user(text: str) -> list[dict[str, str]]:
    """Return the first message of a conversation."""
    return [{"role": "user", "content": text}]
