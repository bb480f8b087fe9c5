"""The blocks of a server with several engines (data-parallel ranks). Pure.

vLLM chooses the rank of a request itself. The rule: a block counts as cached on the server while at least one rank has it. With more than
one rank, the known prefix is therefore an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from upstream.vllm.kv_events.blocks import Changes


class RankUnion:
    """The union of the blocks of all ranks. With one rank, changes pass through and nothing is stored."""

    def __init__(self, ranks: int) -> None:
        self._keys: list[set[int]] | None = [set() for _ in range(ranks)] if ranks > 1 else None

    def merge(self, index: int, changes: Changes) -> Changes:
        """Apply the changes of one rank, by its index. Returns the changes of the union."""
        if self._keys is None:
            return changes
        own = self._keys[index]
        others = [keys for number, keys in enumerate(self._keys) if number != index]
        removed = self._without(own if changes.cleared else changes.removed, others)
        if changes.cleared:
            own.clear()
        own.difference_update(changes.removed)
        inserted = self._without(changes.inserted, others)
        own.update(changes.inserted)
        return Changes(False, removed, inserted)

    def _without(self, keys: Iterable[int], others: Iterable[set[int]]) -> tuple[int, ...]:
        return tuple(key for key in keys if not any(key in each for each in others))
