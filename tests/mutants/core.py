"""The trusted core: the modules that decide whose request it is, what it may do, and where it ends. Each with the tests of its invariant.

The rule: the tests of a module run in this process, need no socket where a property can say the same, and take a few seconds together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_DIFFERENTIAL = "tests/fuzz/test_differential.py::test_a_target_finds_no_difference[{}-0]"

CORE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gateway/client/http/parser.py": ("tests/gateway/client/http/test_parser.py", _DIFFERENTIAL.format("client")),
        "upstream/http/connection.py": ("tests/upstream/http/test_connection.py", _DIFFERENTIAL.format("server")),
        "gateway/auth/keyring.py": ("tests/gateway/auth/test_keyring.py",),
        "gateway/auth/catalog.py": ("tests/gateway/auth/test_catalog.py", _DIFFERENTIAL.format("addresses")),
        "gateway/proxy/form.py": ("tests/gateway/proxy/test_form.py",),
        "gateway/proxy/body.py": ("tests/gateway/proxy/test_body.py", _DIFFERENTIAL.format("bodies")),
    }
)
"""Tests by module, the fastest first: the first failure ends a trial."""
