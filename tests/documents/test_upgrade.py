"""An upgrade needs no change: files and commands of the last version without a store, a sign-in, roles and an audit log still work.

The folder beside this file has what the pages showed at that commit: every configuration, and the quickstart.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.documents.stage import follow, possible, run_here
from tests.documents.test_shown_files import checked, whole

BEFORE = Path(__file__).parent / "commit_4a4a5df"
CONFIGURATIONS = sorted(file for file in BEFORE.glob("*.yaml") if not file.name.endswith(".keys.yaml"))
KEYS = (BEFORE / "configuration-2.keys.yaml").read_text()
QUICKSTART = BEFORE / "quickstart.md"
FEATURES = ("store:", "sign_in:", "audit:", "tokens:")


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: file.stem)
def test_a_former_configuration_is_valid_without_a_new_note(tmp_path: Path, file: Path) -> None:
    text = file.read_text()
    assert not any(line.strip().startswith(FEATURES) for line in text.splitlines()), "it is of the version before"
    output = checked(tmp_path, whole(text), KEYS)
    assert output.startswith("gateway.yaml is valid: ") and output.endswith(", 0 notes\n"), output


def test_the_former_quickstart_is_followed_to_its_end() -> None:
    """A key is created, requests are served, and status, usage and metrics are read, as before."""
    if not possible():
        pytest.skip("needs unshare and ip, and to be allowed namespaces of its own")
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:  # a short path: unix sockets allow 107 bytes
        followed = follow(QUICKSTART, Path(folder))
    assert followed.code == 0, followed.output[-4000:]
    assert list(followed.reached) == [block.line for block in run_here(QUICKSTART)]
