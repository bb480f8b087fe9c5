"""Share one gateway with one real vLLM among the tests that need both, since a start takes half a minute."""

from __future__ import annotations

import pytest

from tests.support.shared import Shared
from tests.vllm.gateway import Real, real_gateway


@pytest.fixture(params=["@gateway"])
def real(shared: Shared, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Real:
    """Yield a gateway whose real vLLM is up. After a test that killed the gateway, the next test gets another gateway.

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
