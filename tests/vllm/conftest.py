"""One gateway with one real vLLM for every test that needs both: a start takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.vllm.gateway import Real, real_gateway


class House:
    """Holds the gateway from its first use until the session ends; a test that has killed it leaves the next one a new one."""

    def __init__(self, folders: pytest.TempPathFactory, stack: ExitStack) -> None:
        self._folders = folders
        self._stack = stack
        self._real: Real | None = None

    def real(self) -> Real:
        if self._real is None or self._real.gateway.process.poll() is not None:
            self._stack.close()
            self._real = self._stack.enter_context(real_gateway(self._folders.mktemp("real")))
        self._real.wait_until_up()
        return self._real


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(tmp_path_factory, stack)


@pytest.fixture
def real(house: House) -> Real:
    """A gateway whose real vLLM is up."""
    return house.real()
