"""The targets by name. ``python -m tests.fuzz`` and the test suite run them; docs/fuzzing.md reports a full run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from random import Random
from types import MappingProxyType
from typing import Any

from tests.fuzz.differential import addresses, bodies, client, server, streams
from tests.fuzz.differential.cases import Case, Target, check

_TABLE = {
    "client": Target(client.opened, 10_000_000, 100_000, "requests on one connection, with h11 and llhttp"),
    "server": Target(server.opened, 2_000_000, 50_000, "responses on reused connections, with h11 and llhttp"),
    "streams": Target(streams.opened, 1_000_000, 8_000, "the bytes and the charges of streams, with Python's `json`"),
    "bodies": Target(bodies.opened, 10_000_000, 200_000, "JSON bodies as they are checked and sent, with Python's `json` and pydantic"),
    "addresses": Target(addresses.opened, 10_000_000, 300_000, "targets, hosts and URLs of media, with urllib and Starlette"),
}


def _targets() -> Mapping[str, Target]:
    """Return the table, with the forms if their module is there."""
    if find_spec("tests.fuzz.forms") is None:
        return MappingProxyType(_TABLE)
    opened = partial(_forms_opened, import_module("tests.fuzz.forms"))
    forms = Target(opened, 1_000_000, 20_000, "forms as they are checked and sent, with Starlette's parser")
    return MappingProxyType({**_TABLE, "forms": forms})


@contextmanager
def _forms_opened(forms: Any) -> Iterator[Case]:
    """Provide the function for one form. The parser's log of invalid forms is off meanwhile."""
    log = logging.getLogger("python_multipart")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield partial(_compare_form, forms)
    finally:
        log.setLevel(level)


def _compare_form(forms: Any, random: Random) -> None:
    """Compare one form, in two ways of reading it. ``forms.outcome`` compares what is sent with what a server reads."""
    boundary, body = forms.form(random)
    first, second = (forms.outcome(boundary, forms.split(random, body), random) for _ in range(2))
    check(first == second, "the reads change what is sent", boundary, body, first, second)


TARGETS = _targets()
