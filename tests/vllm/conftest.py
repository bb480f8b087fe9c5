"""One gateway with one real vLLM for every test that needs both: a start takes half a minute."""

from __future__ import annotations

import pytest

from tests.support.shared import Shared
from tests.vllm.gateway import Real, real_gateway


@pytest.fixture(params=["@gateway"])
def real(shared: Shared, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Real:
    """A gateway whose real vLLM is up; a test that has killed the gateway leaves the next one another.

    Its parameter makes all tests with it one group of the distribution.
    """

    def running() -> Real:
        return shared.once(request.param, lambda: real_gateway(tmp_path_factory.mktemp("real")))

    found = running()
    if found.gateway.process.poll() is not None:
        shared.close()
        found = running()
    found.wait_until_up()
    return found
