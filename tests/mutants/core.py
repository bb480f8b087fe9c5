"""The trusted core: the modules that decide whose request it is, what it may do, and where it ends. Each with the tests of its invariant.

The rule: the tests of a module run in this process and take a few seconds together, with fixed seeds. They need no socket where a property
can say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.mutants.area import Tested

_DIFFERENTIAL = "tests/fuzz/test_differential.py::test_a_target_finds_no_difference[{}-0]"
_CLIENT, _SERVER, _STREAMS, _FORMS = map(_DIFFERENTIAL.format, ("client", "server", "streams", "forms"))
_FORM = "tests/gateway/proxy/test_form.py"


CORE: Mapping[str, Tested] = MappingProxyType(
    {
        "gateway/client/http/head.py": Tested(
            ("tests/gateway/client/http/test_head.py", "tests/gateway/client/http/test_framing.py", _CLIENT)
        ),
        "gateway/client/http/framing.py": Tested(("tests/gateway/client/http/test_framing.py", _CLIENT)),
        "upstream/http/repeated_headers.py": Tested(("tests/upstream/http/test_repeated_headers.py",)),
        "upstream/http/chunked.py": Tested(("tests/upstream/http/test_chunked.py", _CLIENT, _SERVER)),
        "upstream/http/response_head.py": Tested(("tests/upstream/http/test_response_head.py", _SERVER)),
        "upstream/http/connection.py": Tested(
            (_SERVER, "tests/upstream/http/test_connection.py"),
            (
                "Connection.send",
                "Connection.send_more",
                "Connection.divert_reads",
                "Connection._stop_diverting",
                "Connection.close",
                "Connection.data_received",
                "Connection._take_held",
                "Connection._check_held",
                "Connection._read_head",
                "Connection._read_body",
                "Connection.connection_lost",
                "Connection._finish",
                "Connection._fail",
                "IdleConnections.add",
                "IdleConnections.pop",
            ),
        ),
        "gateway/proxy/form.py": Tested(
            (_FORMS, _FORM, f"--deselect={_FORM}::test_a_large_file_streams_through", f"--deselect={_FORM}::test_what_a_form_costs")
        ),
        "gateway/proxy/event_template.py": Tested(("tests/gateway/proxy/test_event_template.py", _STREAMS)),
        "gateway/proxy/fast_path.py": Tested(("tests/gateway/proxy/test_fast_path.py", _STREAMS)),
        "gateway/auth/keyring.py": Tested(("tests/gateway/auth/test_keyring.py", "tests/gateway/auth/test_stored_keys.py")),
        "gateway/auth/stored_keys.py": Tested(("tests/gateway/auth/test_stored_keys.py",)),
        "gateway/snapshot/identity.py": Tested(("tests/gateway/snapshot/test_identity.py",)),
        "gateway/auth/catalog.py": Tested(
            ("tests/gateway/auth/test_catalog.py",),
            (
                "Catalog.mounted",
                "Catalog.resolve",
                "Catalog._resolve_unnamed",
                "Catalog.fallbacks",
                "Catalog.visible",
                "Catalog._allows",
                "Catalog._scope",
            ),
        ),
    }
)
