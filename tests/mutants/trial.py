"""Runs the tests of a module with one of its mutants, in a separate process.

The rule: this process imports no module of the project. It imports the packages that the tests need, and forks for each trial, so a trial
starts with a fresh project and does not import pytest again. The mutant is imported in place of the module; no file is changed. A script in
Lua is read by its package, which is imported from a copy of its folder.
"""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from math import ceil
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", "--hypothesis-profile", "mutants")
_WARNINGS = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
_PASSED, _FAILED = 0, 1
_CHECKED = 3.0  # seconds after which a trial is checked again
_IDLE = 0.02  # of these seconds, the share below which a trial waits for what never comes


_PRELOADED = (
    "anyio.pytest_plugin",
    "h11",
    "httptools",
    "httpx2",
    "hypothesis.strategies",
    "msgspec",
    "orjson",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pytest_asyncio.plugin",
    "pytest_timeout",
    "redis",
    "rich.console",
    "starlette.applications",
    "uvicorn",
    "uvloop",
    "xdist.plugin",
    "yaml",
)
"""Packages that the tests import."""


class Outcome(NamedTuple):
    """The end of a trial. ``killed``: a test failed, or the tests did not end in time. ``seconds``: of the processor."""

    killed: bool
    seconds: float


class _Mutated(MetaPathFinder, Loader):
    """Imports one module from code."""

    def __init__(self, name: str, file: Path, code: CodeType) -> None:
        self._name, self._file, self._code = name, file, code

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self, origin=str(self._file)) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._file)
        exec(self._code, module.__dict__)


class _Copied(MetaPathFinder):
    """Imports one package from a copy of its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return spec_from_file_location(fullname, self._folder / "__init__.py", submodule_search_locations=[str(self._folder)])


def tried(module: str, changed: ast.Module | str, tests: Sequence[str], timeout: float) -> Outcome:
    """Run the tests of a module whose source is this. ``timeout``: seconds of the processor, since others may use the machine."""
    assert "gateway" not in sys.modules and "upstream" not in sys.modules, "a trial would use modules of this process"
    for package in _PRELOADED:
        importlib.import_module(package)
    before = _processor_seconds()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        os.chmod(folder, 0o755)  # servers of the tests may run as another user
        process = multiprocessing.get_context("fork").Process(target=_run, args=(module, changed, tests, ceil(timeout), Path(folder)))
        process.start()
        assert process.pid is not None
        busy = 0.0
        process.join(_CHECKED)
        while process.is_alive():
            earlier, busy = busy, _busy_seconds(process.pid)
            if busy - earlier < _IDLE * _CHECKED:
                process.kill()
            process.join(_CHECKED)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # servers that a test did not stop
    return Outcome(process.exitcode != _PASSED, _processor_seconds() - before)


def _busy_seconds(pid: int) -> float:
    """Return the seconds for which a process has used the processor or waited for it."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(ran) + int(waited)) / 1e9


def _processor_seconds() -> float:
    """Return the processor's seconds of the trials that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(module: str, changed: ast.Module | str, tests: Sequence[str], seconds: int, folder: Path) -> None:
    """Run the tests, and exit with 0 only if all of them pass. ``folder``: for all files of the trial."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    tempfile.tempdir = str(folder)
    try:
        sys.meta_path.insert(0, _finder(ROOT / module, changed, folder))
    except (SyntaxError, ValueError):
        os._exit(_FAILED)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(ROOT)
    os._exit(int(pytest.main([*_OPTIONS, *_WARNINGS, *tests])))


def _finder(file: Path, changed: ast.Module | str, folder: Path) -> MetaPathFinder:
    """Return what imports the mutant. Raises SyntaxError or ValueError if it is no module."""
    path = file.relative_to(ROOT)
    if isinstance(changed, ast.Module):
        name = ".".join(path.with_suffix("").parts)
        return _Mutated(name, file, compile(ast.fix_missing_locations(changed), str(file), "exec"))
    copy = Path(shutil.copytree(file.parent, folder / "package"))
    (copy / file.name).write_text(changed)
    return _Copied(".".join(path.parent.parts), copy)
