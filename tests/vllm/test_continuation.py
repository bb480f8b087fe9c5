"""The table of docs/continuation.md is what real servers do with cut streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.shared import Shared
from tests.vllm.continuation import FLAGS, Results, measured_on, stored
from tests.vllm.dialogues import Architecture
from tests.vllm.server import NOT_INSTALLED, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]


@pytest.fixture(scope="module", params=["@scale_out"])
def urls(shared: Shared, request: pytest.FixtureRequest) -> Iterator[dict[Architecture, str]]:
    qwen = shared.once(request.param, lambda: running("qwen3", flags=FLAGS["qwen3"]))
    with running("llama", flags=FLAGS["llama"]) as llama:
        yield {"qwen3": qwen.url, "llama": llama.url}


def test_the_table_is_current(urls: dict[Architecture, str]) -> None:
    """A replaced prompt is wrong after some cuts only, so that its column may have different results in another run."""
    assert without_replaced_prompts(measured_on(urls)) == without_replaced_prompts(stored())


def without_replaced_prompts(measured: dict[tuple[str, str], Results]) -> dict[tuple[str, str], Results]:
    return {row: {name: result for name, result in results.items() if name != "replaced prompt"} for row, results in measured.items()}
