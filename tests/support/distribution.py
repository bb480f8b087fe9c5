"""Distribute the suite over processes: which test items stay together, and which of them start first.

The items of a file form a group. An item with a parameter ``@NAME`` of ``SERVERS`` in its id belongs to the group of that name
instead: these items share a real server. The rules: the items of a group run in one process, in their order, so that what they
share is built once; the groups that take longest start first; at most ``REAL_AT_ONCE`` processes run groups with a real vLLM.

Implements the scheduler of pytest-xdist by its protocol, not by one of its classes. ``--dist each`` remains xdist's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from xdist.report import report_collection_diff
from xdist.workermanage import WorkerController, parse_tx_spec_config

REAL_AT_ONCE = 2
"""A real vLLM keeps a core busy while it starts, and needs 2.6 GB."""

DURATIONS = Path(__file__).parents[1] / "durations.json"
"""Seconds that each group took in the last run of ``make durations``."""

NEW = 30.0
"""Seconds assumed for a group without a known duration."""

SERVERS = ("@direct", "@gateway", "@llama", "@pooling", "@priority", "@qwen", "@scale_out")
"""Servers that tests in several files share."""

_SERVER = re.compile(rf"[\[-]({'|'.join(SERVERS)})(?=[\]-])")
_REAL = "tests/vllm/"


def group_of(nodeid: str) -> str:
    """Return the name of an item's group: its server's name, or the path of its file."""
    path, _, name = nodeid.partition("::")
    server = _SERVER.search(name)
    return path if server is None else server[1]


def is_real(group: str) -> bool:
    """Return whether the items of a group need a real vLLM."""
    return group in SERVERS or group.startswith(_REAL)


@dataclass(frozen=True, slots=True)
class Group:
    """A group of items that stay together. ``items``: their indices in the collection."""

    name: str
    items: tuple[int, ...]


def grouped(collection: Sequence[str], seconds: Mapping[str, float]) -> list[Group]:
    """Return the groups of a collection of node IDs, the longest first."""
    items: dict[str, list[int]] = {}
    for index, nodeid in enumerate(collection):
        items.setdefault(group_of(nodeid), []).append(index)
    return [Group(name, tuple(items[name])) for name in sorted(items, key=lambda name: -seconds.get(name, NEW))]


class Distribution:
    """Assign groups to xdist's nodes. A node starts an item only when it knows the next one, so each node has two items if possible."""

    def __init__(self, numnodes: int, seconds: Mapping[str, float], config: pytest.Config) -> None:
        """Take the number of nodes that must report their collection before the first item is assigned."""
        self._numnodes = numnodes
        self._seconds = seconds
        self._config = config
        self._collections: dict[WorkerController, list[str]] = {}
        self._collection: list[str] | None = None
        self._queue: list[Group] = []
        self._pending: dict[WorkerController, dict[int, str]] = {}
        """The unfinished items of each node, in order, with the names of their groups."""

    @property
    def nodes(self) -> list[WorkerController]:
        return list(self._pending)

    @property
    def collection_is_completed(self) -> bool:
        return len(self._collections) >= self._numnodes

    @property
    def tests_finished(self) -> bool:
        """Whether every item is assigned. A node may still hold its last item, which it starts when it is shut down."""
        return self.collection_is_completed and not self._queue and all(len(items) < 2 for items in self._pending.values())

    @property
    def has_pending(self) -> bool:
        return bool(self._queue) or any(self._pending.values())

    def add_node(self, node: WorkerController) -> None:
        self._pending[node] = {}

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        self._collections[node] = list(collection)

    def schedule(self) -> None:
        """Assign the first groups, or groups for a node that replaces a crashed node."""
        if self._collection is None:
            if not self._is_common():
                return
            self._collection = next(iter(self._collections.values()))
            self._queue = grouped(self._collection, self._seconds)
        for node in self.nodes:
            self._feed(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        del self._pending[node][item_index]
        self._feed(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Unassign a node's items. Return the ID of the item in which it crashed, which is not run again, or None if it had no item."""
        names = self._pending.pop(node)
        if not names or self._collection is None:
            return None
        crashed, *others = names
        left: dict[str, list[int]] = {}
        for item in others:
            left.setdefault(names[item], []).append(item)
        self._queue[:0] = [Group(name, tuple(items)) for name, items in left.items()]
        return self._collection[crashed]

    def mark_test_pending(self, item: str) -> None:
        raise NotImplementedError

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        raise NotImplementedError

    def _is_common(self) -> bool:
        """Return whether all nodes have collected the same items; report each node that has not."""
        (first, common), *others = self._collections.items()
        is_common = True
        for node, collection in others:
            if message := report_collection_diff(common, collection, first.gateway.id, node.gateway.id):
                is_common = False
                report = pytest.CollectReport(nodeid=node.gateway.id, outcome="failed", longrepr=message, result=[])
                self._config.hook.pytest_collectreport(report=report)
        return is_common

    def _feed(self, node: WorkerController) -> None:
        pending = self._pending[node]
        while len(pending) < 2 and not node.shutting_down:
            group = self._next(node)
            if group is None:
                node.shutdown()
                return
            self._queue.remove(group)
            pending.update(dict.fromkeys(group.items, group.name))
            node.send_runtest_some(list(group.items))

    def _next(self, node: WorkerController) -> Group | None:
        real = {each for each, items in self._pending.items() if any(map(is_real, items.values()))}
        may_be_real = node in real or len(real) < REAL_AT_ONCE
        return next((group for group in self._queue if may_be_real or not is_real(group.name)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> Distribution | None:
    """Distribute by groups (a hook of pytest-xdist)."""
    if config.getvalue("dist") == "each":
        return None
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return Distribution(len(parse_tx_spec_config(config)), seconds, config)


class Stopwatch:
    """Sum up the duration of each group over all processes, and write it to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}
        self._run: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        group = group_of(report.nodeid)
        self._seconds[group] = self._seconds.get(group, 0.0) + report.duration
        if not report.skipped:
            self._run.add(group)

    def pytest_sessionfinish(self) -> None:
        """Write the file. A group that exists but was not run keeps its duration."""
        before: dict[str, float] = json.loads(self._file.read_text()) if self._file.exists() else {}
        existing = {name: seconds for name, seconds in before.items() if name in SERVERS or (self._file.parents[1] / name).exists()}
        run = {name: max(round(self._seconds[name]), 1) for name in self._run}
        self._file.write_text(json.dumps(existing | run, indent=1, sort_keys=True) + "\n")


def problems(real_items: Iterable[str]) -> list[str]:
    """Return the IDs of items with a real vLLM whose group does not show that."""
    return [nodeid for nodeid in real_items if not is_real(group_of(nodeid))]
