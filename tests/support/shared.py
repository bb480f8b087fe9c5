"""What the tests of a group share, such as a real server: made on its first use, ended after the last test of the group.

The same process may run another group next, whose server would otherwise run beside this one until the session ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


class Shared:
    """The things that are shared now, by name."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """Return the thing of that name; enter the context manager that makes it if it is not there."""
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        found: T = self._made[name]
        return found

    def close(self) -> None:
        """End everything."""
        self._made.clear()
        self._stack.close()
