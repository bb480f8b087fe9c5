"""The table of vLLM's names, held against the real vLLM's own parser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vllm.server import NOT_INSTALLED, installed
from upstream.vllm import installed_vllm, known_names
from upstream.vllm.presets import PRESETS

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED), pytest.mark.timeout(300)]


def test_the_table_is_what_the_real_vllm_says(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    told, table = installed_vllm.known_names((str(installed()), "serve"), environ, print), known_names.built_in()
    assert told is not None and told.version.startswith(known_names.VERSION)
    assert told.flags - {"help"} == table.flags
    assert (told.reasoning_parsers, told.tool_parsers) == (table.reasoning_parsers, table.tool_parsers)
    assert {preset.tools for preset in PRESETS.values() if preset.tools} <= told.tool_parsers
    assert {preset.reasoning for preset in PRESETS.values() if preset.reasoning} <= told.reasoning_parsers
