"""Resources that the tests of a group share, such as a real server: created on first use, released after the group's last test.

The same process may run another group next. Without the release, both servers would run until the session ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


class Shared:
    """The shared resources by name."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """Return the resource with that name. If it does not exist, enter the context manager that creates it."""
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        found: T = self._made[name]
        return found

    def close(self) -> None:
        """Release all resources."""
        self._made.clear()
        self._stack.close()
