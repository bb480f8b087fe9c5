"""The configuration while the gateway runs: its files are watched, read again when they change, and taken when they are good.

The rules: a configuration that has a problem is not taken, and the one before continues to serve; a problem is also a changed launch that
cannot start, so that no healthy server is replaced by one that is certain to fail; readings come one after the other; whatever goes wrong
with one, the next change is read all the same.

The files are looked at a few times a second. Notifications of the kernel would come sooner, but not for every file system,
nor for a change behind a symbolic link, as Kubernetes makes it; and there may be none left to be had (``fs.inotify``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

from gateway.check.launch_check import LaunchCheck
from gateway.config import Config, ConfigurationError, diff, drafted, load
from gateway.config.source import Source, read
from gateway.fleet.operations import Reading
from gateway.fleet.plan import relaunched
from gateway.system.file_stat import Look, look

LOOK = 0.2
"""Seconds between two looks at the files."""
SETTLE = 0.1
"""Seconds without a change after which a file counts as written; waited for twice at most."""
_log = logging.getLogger("vllm_gateway.control")
Looks = Mapping[Path, Look]


class History:
    """What has become of the readings so far. The first one, with which the gateway was started, is not counted."""

    def __init__(self) -> None:
        self.last = Reading(time.time())
        self.counts = {"success": 0, "failure": 0}

    def note(self, reading: Reading) -> None:
        self.last = reading
        self.counts["success" if reading.successful else "failure"] += 1


class Taker(Protocol):
    """Who serves by a configuration."""

    history: History

    def reading(self) -> AbstractContextManager[None]:
        """What is around one reading of the files."""

    async def acquaint(self, config: Config) -> None:
        """Get to know what a configuration brings, before anything is served by it."""

    def take(self, config: Config) -> int:
        """Serve by it from now on; returns the number by which ``taken`` knows it."""

    async def taken(self, number: int) -> None:
        """Wait until every worker does, within reason."""

    def read(self, reading: Reading) -> None:
        """Tell the operator."""


class Reloader:
    """Watches the files of the configuration at ``path``, and has ``taker`` serve by them.

    ``launches`` checks the launches that a configuration changes; None: they are not checked.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        taker: Taker,
        environ: Mapping[str, str] | None = None,
        launches: LaunchCheck | None = None,
    ) -> None:
        self._path = path
        self._launches = launches
        self._config = config
        self._taker = taker
        self._environ = environ
        self._half_taken = False
        """The taker has failed over one: what it serves by is known again when it has taken another."""
        self._files = config.files
        self._seen = looked(self._files)
        self._asked = asyncio.Event()
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Look at the files until cancelled."""
        while True:
            asked = await self._woken()
            if asked or await asyncio.to_thread(looked, self._files) != self._seen:
                await self.reload()

    def ask(self) -> None:
        """Have the files read even if they look the same."""
        self._asked.set()

    async def _woken(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK):
                await self._asked.wait()
        asked = self._asked.is_set()
        self._asked.clear()
        return asked

    async def reload(self) -> Reading:
        """Read the files now and serve by them if they are good; returns when every worker does, or has had time to."""
        async with self._turn:
            try:
                with self._taker.reading():
                    return await self._read()
            except Exception as error:  # noqa: BLE001  the outer edge: the next change is read
                _log.exception("a reading of the configuration")
                reading = Reading(time.time(), problems=(f"the gateway failed on it ({type(error).__name__}); its log says where",))
                self._taker.history.note(reading)
                return reading

    async def _read(self) -> Reading:
        await self._settled()
        self._seen = await asyncio.to_thread(looked, self._files)
        try:
            config = await asyncio.to_thread(self._loaded)
        except ConfigurationError as error:
            return await self._failed(error)
        return await self._good(config)

    def _loaded(self) -> Config:
        """The configuration of the files. Raises ConfigurationError, also where a launch that it changes cannot start."""
        once: dict[Path, Source] = {Path(os.path.abspath(self._path)): read(self._path)}
        config = load(self._path, self._environ, once)
        changed = relaunched(self._config, config)
        draft = drafted(self._path, once)
        if changed and self._launches is not None and draft is not None:
            problems = self._launches.certain_failures(draft, changed)
            if problems:
                raise ConfigurationError(sorted(problems, key=lambda problem: problem.line), config.files)
        return config

    async def _settled(self) -> None:
        """Wait a moment for whoever is writing."""
        before = await asyncio.to_thread(looked, self._files)
        for _ in range(2):
            await asyncio.sleep(SETTLE)
            now = await asyncio.to_thread(looked, self._files)
            if now == before:
                return
            before = now

    async def _failed(self, error: ConfigurationError) -> Reading:
        await self._watch((*self._config.files, *error.files))
        reading = Reading(time.time(), problems=tuple(map(str, error.problems)), waiting=self._taker.history.last.waiting)
        self._tell(reading)
        return reading

    async def _good(self, read: Config) -> Reading:
        before, config = self._config, diff.pinned(self._config, read)
        await self._watch(read.files)
        reading = Reading(time.time(), changes=diff.between(before, config), waiting=diff.waiting(config, read))
        if diff.is_none(before, config) and not self._half_taken:
            self._config = config
            self._tell(reading)
            return reading
        await self._taker.acquaint(config)
        self._half_taken = True
        number = self._taker.take(config)
        self._config, self._half_taken = config, False
        self._tell(reading)
        await self._taker.taken(number)
        return reading

    async def _watch(self, files: Iterable[Path]) -> None:
        """Look at these from now on; of those that are looked at already, what was seen before they were read counts."""
        self._files = tuple(dict.fromkeys(files))
        before, now = self._seen, await asyncio.to_thread(looked, self._files)
        self._seen = {file: before.get(file, look) for file, look in now.items()}

    def _tell(self, reading: Reading) -> None:
        self._taker.history.note(reading)
        self._taker.read(reading)


def looked(files: Iterable[Path]) -> Looks:
    """How each file looks."""
    return {file: look(file) for file in files}
