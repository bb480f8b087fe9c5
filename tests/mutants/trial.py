"""Runs the tests of a module with one of its mutants, in a separate process.

The rule: this process imports no module of the project. It imports the packages that the tests need, and forks for each trial, so a trial
starts with a fresh project and does not import pytest again. The mutant is imported in place of the module; no file is changed.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import resource
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from math import ceil
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import h11  # noqa: F401  the tests import these
import httptools  # noqa: F401
import hypothesis  # noqa: F401
import msgspec  # noqa: F401
import orjson  # noqa: F401
import pydantic  # noqa: F401
import pytest
import starlette.applications  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", "--hypothesis-profile", "mutants")
_WARNINGS = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
_PASSED, _FAILED = 0, 1
_MOST_WAITS = 30  # a trial that does not use the processor ends after this many times its seconds


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


def tried(module: str, tree: ast.Module, tests: Sequence[str], timeout: float) -> Outcome:
    """Run the tests of a module whose source is this tree. ``timeout``: seconds of the processor, since others may use the machine."""
    assert "gateway" not in sys.modules and "upstream" not in sys.modules, "a trial would use modules of this process"
    before = _processor_seconds()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(module, tree, tests, ceil(timeout)))
    process.start()
    process.join(_MOST_WAITS * timeout)
    if process.is_alive():
        process.kill()
        process.join()
    return Outcome(process.exitcode != _PASSED, _processor_seconds() - before)


def _processor_seconds() -> float:
    """Return the processor's seconds of the trials that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(module: str, tree: ast.Module, tests: Sequence[str], seconds: int) -> None:
    """Run the tests, and exit with 0 only if all of them pass."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    file = ROOT / module
    try:
        code = compile(ast.fix_missing_locations(tree), str(file), "exec")
    except (SyntaxError, ValueError):
        os._exit(_FAILED)
    sys.meta_path.insert(0, _Mutated(module.removesuffix(".py").replace("/", "."), file, code))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(ROOT)
    os._exit(int(pytest.main([*_OPTIONS, *_WARNINGS, *tests])))
