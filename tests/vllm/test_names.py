"""Check the table of vLLM's names against the real vLLM's own parser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vllm.server import NOT_INSTALLED, installed
from upstream.vllm import installed_vllm, known_names
from upstream.vllm.presets import PRESETS

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]


def test_the_table_is_what_the_real_vllm_says(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    reported, table = installed_vllm.known_names((str(installed()), "serve"), environ, print), known_names.built_in()
    assert reported is not None and reported.version.startswith(known_names.VERSION)
    assert reported.flags - {"help"} == table.flags
    assert (reported.reasoning_parsers, reported.tool_parsers) == (table.reasoning_parsers, table.tool_parsers)
    assert {preset.tools for preset in PRESETS.values() if preset.tools} <= reported.tool_parsers
    assert {preset.reasoning for preset in PRESETS.values() if preset.reasoning} <= reported.reasoning_parsers
