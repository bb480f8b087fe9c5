"""The configuration while the gateway runs: its files are watched, read again after a change, and applied if they are valid.

The rules: an invalid configuration is rejected and the previous one stays in use. A changed launch that cannot start makes a configuration
invalid, so that no healthy server is replaced by a server that is certain to fail. Reloads run one after the other. After a failed
reload, the next change is still read.

The files are polled a few times a second. Kernel notifications would be faster, but they do not exist for every file system, do not show
a change behind a symbolic link, as Kubernetes makes it, and may be exhausted (``fs.inotify``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from gateway.access.actor import Actor, Requester
from gateway.audit.configuration import differences
from gateway.audit.entry import Audit, AuditUnavailableError, Entry
from gateway.check.preflight import Machine, certain_failures
from gateway.config import Config, ConfigurationError, Problem, diff, drafted, load
from gateway.config.references import Draft
from gateway.config.source import Source, read
from gateway.fleet.configured_servers import relaunched
from gateway.fleet.operations import Preview, ReloadResult
from gateway.system.file_stat import FileStat, file_stat
from gateway.system.tasks import wait_at_most

POLL_INTERVAL = 0.2
"""Seconds between two checks of the files."""
SETTLE = 0.1
"""Seconds without a change after which a file counts as completely written. Waited for twice at most."""
_FILES = Requester(Actor("gateway", "", None), "changed files")
_MAX_RECORDED = 20  # problems in an entry of the audit log
_PREVIEW_AGE = 60.0
"""Seconds for which a preview of unchanged files is used again, since a file with many keys takes long to read."""
RECENT = 60.0
"""Seconds for which a reload without changes names the changes that were applied before it."""
_log = logging.getLogger("vllm_gateway.control")


def _entry(action: str, requester: Requester, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Entry:
    return Entry(action, requester.actor, requester.origin, "", before, after)


class ReloadHistory:
    """The results of the reloads so far. The configuration at the start is the first result, and is not counted."""

    def __init__(self) -> None:
        self.last = ReloadResult(time.time())
        self.counts = {"success": 0, "failure": 0}

    def add(self, result: ReloadResult) -> None:
        self.last = result
        self.counts["success" if result.successful else "failure"] += 1

    def recent_changes(self, now: float) -> ReloadResult | None:
        """Return the last result with changes, if no other one was later and it is not long ago."""
        last = self.last if self.last.changes else self.last.earlier
        return last if last is not None and now - last.when < RECENT else None


class Reloadable(Protocol):
    """The gateway, to which configurations are applied."""

    history: ReloadHistory

    def reading(self) -> AbstractContextManager[None]:
        """Surround one reading of the files."""

    async def check_added(self, config: Config) -> None:
        """Check what a configuration adds, before it is applied."""

    def apply_config(self, config: Config) -> int:
        """Apply a configuration. Returns the number of the change for ``wait_applied``."""

    async def wait_applied(self, number: int) -> None:
        """Wait until every worker has applied a configuration, up to a timeout."""

    def reloaded(self, result: ReloadResult) -> None:
        """Report the result, and add it to the history."""


@dataclass(eq=False)
class Reloader:
    """Watches the files of the configuration at ``path``, and applies them to ``gateway``.

    ``machine`` returns the machine on which the launches that a configuration changes are checked. None: they are not checked. ``audit``
    records each reload before it is applied. None: nothing is recorded. ``conflicts`` returns further problems, which make a valid
    configuration unusable.
    """

    _path: Path
    _config: Config
    _gateway: Reloadable
    _machine: Callable[[Draft], Machine] | None = None
    _audit: Audit | None = None
    _conflicts: Callable[[Config], Sequence[Problem]] | None = None
    _is_half_applied: bool = False
    """Whether applying a configuration has failed, so that it may be applied in part until the next one is applied."""
    _requested: asyncio.Event = field(default_factory=asyncio.Event)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _previews: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last_preview: tuple[float, object, Preview | None] = (0.0, None, None)
    _applied: tuple[float, Requester | None] = field(default_factory=lambda: (time.time(), None))

    def __post_init__(self) -> None:
        self._files = self._config.files
        self._seen = file_stats(self._files)

    async def run(self) -> None:
        """Watch the files until cancelled."""
        while True:
            await wait_at_most(POLL_INTERVAL, self._requested.wait())
            requested = self._requested.is_set()
            self._requested.clear()
            if requested or await asyncio.to_thread(file_stats, self._files) != self._seen:
                await self.reload()

    def request(self) -> None:
        """Read the files soon, even if they are unchanged."""
        self._requested.set()

    async def reload(self, requester: Requester = _FILES) -> ReloadResult:
        """Read the files now and apply them if they are valid. Returns when every worker has applied them, or after a timeout."""
        async with self._lock:
            try:
                with self._gateway.reading():
                    return await self._reload(requester)
            except Exception as error:  # noqa: BLE001  the outer edge: the next change is read again
                _log.exception("reading the configuration failed")
                result = ReloadResult(time.time(), problems=(f"the gateway failed while reading it ({type(error).__name__}); see the log",))
                self._gateway.history.add(result)
                return result

    async def preview(self) -> Preview:
        """Read the files now, and return what a reload would do. Nothing is applied."""
        before, (applied, by) = self._config, self._applied
        loaded = Preview(before.files, applied, by, self._gateway.history.last)
        if not self._path.is_file():
            return replace(loaded, problems=(Problem(str(self._path), 0, "", "it is not a regular file, so it is read only at the start"),))
        async with self._previews:
            seen = await asyncio.to_thread(file_stats, self._files), before, self._gateway.history.last
            at, of, known = self._last_preview
            if known is None or seen != of or time.monotonic() - at > _PREVIEW_AGE:
                known = await self._previewed(loaded)
                self._last_preview = time.monotonic(), seen, known
            return known

    async def _previewed(self, loaded: Preview) -> Preview:
        before = self._config
        try:
            read = await asyncio.to_thread(self._loaded)
            if self._conflicts is not None and (conflicts := self._conflicts(read)):
                raise ConfigurationError(conflicts, read.files)
        except ConfigurationError as error:
            return replace(loaded, problems=tuple(error.problems))
        return await asyncio.to_thread(_previewed, loaded, before, read)

    async def _reload(self, requester: Requester) -> ReloadResult:
        await self._wait_for_writers()
        self._seen = await asyncio.to_thread(file_stats, self._files)
        try:
            config = await asyncio.to_thread(self._loaded)
            if self._conflicts is not None and (conflicts := self._conflicts(config)):
                raise ConfigurationError(conflicts, config.files)
        except ConfigurationError as error:
            await self._watch((*self._config.files, *error.files))
            problems = tuple(map(str, error.problems))
            if self._audit is not None:
                entry = _entry("config.reload.refused", requester, None, {"problems": problems[:_MAX_RECORDED]})
                await asyncio.to_thread(self._audit.record_refused, entry)
            return self._rejected(problems)
        try:
            return await self._apply(config, requester)
        except AuditUnavailableError as error:
            return self._rejected((f"the audit log cannot be written, so nothing was applied: {error}",))

    def _rejected(self, problems: tuple[str, ...]) -> ReloadResult:
        result = ReloadResult(time.time(), problems=problems, needs_restart=self._gateway.history.last.needs_restart)
        self._gateway.reloaded(result)
        return result

    def _loaded(self) -> Config:
        """Load the configuration. Raises ConfigurationError, also if a launch that it changes cannot start."""
        once: dict[Path, Source] = {Path(os.path.abspath(self._path)): read(self._path)}
        config = load(self._path, instead=once)
        changed, draft = relaunched(self._config, config), drafted(self._path, once)
        if changed and draft and self._machine and (problems := certain_failures(draft, self._machine(draft), changed)):
            raise ConfigurationError(sorted(problems, key=lambda problem: problem.line), config.files)
        return config

    async def _wait_for_writers(self) -> None:
        """Wait until the files have been unchanged for a moment."""
        before = await asyncio.to_thread(file_stats, self._files)
        for _ in range(2):
            await asyncio.sleep(SETTLE)
            now = await asyncio.to_thread(file_stats, self._files)
            if now == before:
                return
            before = now

    async def _apply(self, read: Config, requester: Requester) -> ReloadResult:
        before, config = self._config, diff.without_restart(self._config, read)
        await self._watch(read.files)
        changes, needs_restart = diff.changes(before, config), diff.needs_restart(config, read)
        if self._audit is not None and (changes or needs_restart or requester is not _FILES):
            before_values, after_values = await asyncio.to_thread(differences, before, read)
            await asyncio.to_thread(self._audit.record, _entry("config.reload", requester, before_values, after_values))
        now = time.time()
        earlier = None if changes else self._gateway.history.recent_changes(now)
        result = ReloadResult(now, changes=changes, needs_restart=needs_restart, earlier=earlier)
        if diff.are_equal(before, config) and not self._is_half_applied:
            self._config, self._applied = config, (now, requester)
            self._gateway.reloaded(result)
            return result
        await self._gateway.check_added(config)
        self._is_half_applied = True
        number = self._gateway.apply_config(config)
        self._config, self._is_half_applied, self._applied = config, False, (now, requester)
        self._gateway.reloaded(result)
        await self._gateway.wait_applied(number)
        return result

    async def _watch(self, files: Iterable[Path]) -> None:
        """Watch these files from now on. For watched files, the state before they were read is the reference."""
        self._files = tuple(dict.fromkeys(files))
        before, now = self._seen, await asyncio.to_thread(file_stats, self._files)
        self._seen = {file: before.get(file, stat) for file, stat in now.items()}


def _previewed(preview: Preview, before: Config, read: Config) -> Preview:
    config = diff.without_restart(before, read)
    loaded_values, read_values = differences(before, read)
    own, others = ({model.id: model.launch.replicas for model in each.models if model.launch is not None} for each in (before, config))
    changed = relaunched(before, config)
    return replace(
        preview,
        changes=diff.changes(before, config),
        needs_restart=diff.needs_restart(before, read),
        loaded=loaded_values,
        read=read_values,
        restarts={model: number for model, number in own.items() if model in changed},
        starts={model: number for model, number in others.items() if model not in own},
        stops={model: number for model, number in own.items() if model not in others},
    )


def file_stats(files: Iterable[Path]) -> Mapping[Path, FileStat]:
    """Return the state of each file."""
    return {file: file_stat(file) for file in files}
