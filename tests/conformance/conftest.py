"""One stage at a time, for all of its tests in a row: a real vLLM takes half a minute to start and 2.6 GB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.stage import Stage, staged


@pytest.fixture(scope="package")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The stage that a test requests with ``on``."""
    with staged(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one
