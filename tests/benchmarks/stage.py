"""The base of every case: the folder, the rotation of proxies, and the measurements.

The rule: turns are interleaved. Every proxy has its turn in a round before any has its next, so that whatever else the machine does in
the meantime meets all alike.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from tests.benchmarks.accounting import neighbors
from tests.benchmarks.peers import Proxy, Running, Setting, started
from tests.benchmarks.process import DidNotStart
from tests.benchmarks.results import Section, Values, machine

DIRECT = "none (direct)"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `seconds` scales every measured stretch, `crowd` every number of streams."""

    rounds: int = 3
    seconds: float = 1.0
    crowd: float = 1.0
    growth: float = 60.0
    pauses: float = 120.0

    def streams(self, count: int) -> int:
        return max(1, round(count * self.crowd))


@dataclass
class Stage:
    """A case's means. Folders are numbered, since a proxy may be started more than once."""

    section: Section
    scale: Scale
    folder: Path
    chosen: Sequence[Proxy]
    _folders: int = field(default=0)

    def path(self, name: str) -> Path:
        """Return a new path for a process; the process creates the folder."""
        self._folders += 1
        return self.folder / f"{self._folders}-{name}"

    def workshop(self) -> Path:
        """The folder for shared files."""
        path = self.folder / "load"
        path.mkdir(exist_ok=True)
        return path

    def proxies(self, only: Sequence[str] | None = None) -> Iterator[Proxy]:
        """Those that take part; the others are noted with the reason."""
        for proxy in self.chosen:
            if only is not None and proxy.name not in only:
                continue
            reason = proxy.leaves_out.get(self.section.case) or proxy.missing()
            if reason is None:
                self.section.proxies[proxy.name] = proxy.version()
                yield proxy
            else:
                self.absent(proxy.name, reason)

    def absent(self, name: str, reason: str) -> None:
        """A proxy is not measured, or no further."""
        self.section.absent[name] = reason
        say(f"{name}: absent: {reason}")

    @contextmanager
    def running(self, setting: Setting, only: Sequence[str] | None = None, more: Iterable[Proxy] = ()) -> Iterator[list[Running]]:
        """Every proxy that takes part, and ``more``, at the same time; a proxy that does not start is absent."""
        with ExitStack() as stack:
            alive: list[Running] = []
            for proxy in (*self.proxies(only), *more):
                try:
                    alive.append(stack.enter_context(started(proxy, setting, self.path(proxy.name))))
                except DidNotStart as error:
                    self.absent(proxy.name, str(error))
            yield alive

    def rotation(self, alive: Sequence[Running]) -> Iterator[Running]:
        """Yield the proxies in rotation, round by round. A proxy's files are truncated after its round."""
        for number in range(self.scale.rounds):
            say(f"round {number + 1} of {self.scale.rounds}")
            for proxy in alive:
                yield proxy
                proxy.forget_log()

    def rounds(self, proxies: Sequence[Proxy], most: int | None = None) -> Iterator[Proxy]:
        """Yield proxies in rotation, for cases that start a new process in every round."""
        count = min(self.scale.rounds, most or self.scale.rounds)
        for number in range(count):
            say(f"round {number + 1} of {count}")
            yield from (proxy for proxy in proxies if proxy.name not in self.section.absent)

    async def alone(self, proxy: Proxy, setting: Setting, round_: Callable[[Running], Awaitable[None]]) -> None:
        """Run a round with a separate process; if it does not start, the proxy is absent."""
        try:
            with started(proxy, setting, self.path(proxy.name)) as running:
                await round_(running)
        except DidNotStart as error:
            self.absent(proxy.name, str(error))

    def add(self, proxy: str, variant: str, values: Values, faults: tuple[str, ...] = ()) -> None:
        """Record the measurement of one round."""
        self.section.row(proxy, variant).add(values, faults)
        say(
            f"  {proxy:14} {variant:18} "
            + "  ".join([f"{name} {value:.4g}" for name, value in values.items()] + [f"!! {f}" for f in faults])
        )

    def note(self, proxy: str, variant: str, text: str) -> None:
        """Add a note below the table."""
        self.section.row(proxy, variant).notes.append(text)


Case = Callable[[Stage], Awaitable[None]]


async def measured(name: str, case: Case, proxies: Sequence[Proxy], scale: Scale) -> Section:
    """Run one case in a temporary folder."""
    section = Section(name, "", scale.rounds, 0.0, machine(), {})
    began = monotonic()
    with neighbors() as others, tempfile.TemporaryDirectory(prefix="vllm-gateway-bench-") as folder:
        await case(Stage(section, scale, Path(folder), proxies))
    section.others = round(others.share, 3)
    section.finished, section.seconds = datetime.now(UTC).isoformat(timespec="seconds"), round(monotonic() - began, 1)
    say(f"others took {section.others:.0%} of the machine meanwhile")
    return section


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)
