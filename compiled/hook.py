"""Compile the core while hatchling builds a wheel: ``HATCH_BUILD_HOOKS_ENABLE=1`` (``make compiled``). Needs Cython and GCC.

The wheel contains the Python modules and, beside them, the extension modules, which Python prefers. It is for one version of Python and one
platform, because the stable ABI takes back a third of the gain (docs/performance.md).

The core is compiled twice if ``PROFILE_WITH`` names a Python with the packages of the project: an instrumented core runs ``training`` with
it, and the second core is compiled with the counts of that run (GCC's manual, "-fprofile-use").
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES = (
    "gateway.admission.inflight_slot",
    "gateway.api.media_urls",
    "gateway.api.response_fields",
    "gateway.api.settlement",
    "gateway.api.strict_json",
    "gateway.api.translation",
    "gateway.api.usage",
    "gateway.auth.body_policy",
    "gateway.auth.catalog",
    "gateway.client.body",
    "gateway.client.connection",
    "gateway.client.connection_context",
    "gateway.client.flow_control",
    "gateway.client.http.framing",
    "gateway.client.http.head",
    "gateway.client.request",
    "gateway.continuation.plan",
    "gateway.continuation.record_memory",
    "gateway.continuation.sent_text",
    "gateway.continuation.token_record",
    "gateway.ledger.journal",
    "gateway.ledger.recorder",
    "gateway.ledger.row",
    "gateway.limits.decision",
    "gateway.limits.estimate",
    "gateway.limits.expected_use",
    "gateway.limits.headers",
    "gateway.limits.key_limits",
    "gateway.limits.limiter",
    "gateway.limits.reservation",
    "gateway.limits.response_headers",
    "gateway.limits.shared_counts",
    "gateway.limits.states",
    "gateway.limits.windows",
    "gateway.proxy.context",
    "gateway.proxy.continued",
    "gateway.proxy.event_template",
    "gateway.proxy.exchange",
    "gateway.proxy.fast_path",
    "gateway.proxy.json_body",
    "gateway.proxy.mirror",
    "gateway.proxy.payload",
    "gateway.proxy.request_services",
    "gateway.proxy.response",
    "gateway.proxy.token_chunks",
    "gateway.proxy.upstream_request",
    "gateway.system.file_lock",
    "gateway.telemetry.access_log",
    "gateway.telemetry.metrics",
    "gateway.telemetry.request_record",
    "gateway.telemetry.shared_counters",
    "upstream.balancing.attempt",
    "upstream.balancing.pool",
    "upstream.balancing.server",
    "upstream.balancing.shared_limit",
    "upstream.http.chunked",
    "upstream.http.connection",
    "upstream.http.deadlines",
    "upstream.http.inline_task",
    "upstream.http.repeated_headers",
    "upstream.http.response_head",
    "upstream.http.write_batching",
)
"""The modules that an ordinary request goes through."""


_FLAGS = ("-O2", "-g0", "-w")
_COUNT, _USE_COUNTS = "-fprofile-generate", "-fprofile-use"


class CompiledCore(BuildHookInterface[Any]):
    """Adds the extension modules to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable installation runs the sources
            return
        root = Path(self.root)
        for extension in built(root, root / "build" / "core", os.environ.get("PROFILE_WITH")):
            build_data["force_include"][str(extension)] = str(extension.relative_to(root / "build" / "core" / "lib"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def built(root: Path, folder: Path, trainer: str | None) -> list[Path]:
    """Compile the modules of ``root``, and return the extension modules, in ``folder``/lib.

    ``trainer``: the Python that runs the training; None for no training. Raises NotCompilableError.
    """
    sys.path.insert(0, str(root))  # a build backend runs elsewhere
    shutil.rmtree(folder, ignore_errors=True)
    extensions = _translated(root, folder / "source")
    with chdir(folder / "source"):  # tracebacks name files relative to it
        if trainer is not None:
            _compile(extensions, folder, "instrumented", [*_FLAGS, _COUNT], [_COUNT])
            for package in ("gateway", "upstream"):
                shutil.copytree(root / package, folder / "instrumented" / package, dirs_exist_ok=True)
            environ = {**os.environ, "PYTHONPATH": f"{folder / 'instrumented'}{os.pathsep}{root}"}
            subprocess.run([trainer, "-P", "-m", "compiled.training"], cwd=root, env=environ, check=True)  # noqa: S603  named by the Makefile
        return _compile(extensions, folder, "lib", [*_FLAGS, *([_USE_COUNTS] if trainer is not None else [])], [])


def _translated(root: Path, source: Path) -> list[Any]:
    """Translate the modules to C, in the folder ``source``, and return their extensions."""
    from Cython.Build import cythonize
    from setuptools import Extension

    from compiled.declarations import compilable

    modules = compilable({name: _file(root, name).read_text() for name in MODULES})
    for name, each in modules.items():
        file = _file(source, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in file.relative_to(source).parents:
            (source / package / "__init__.py").touch()
        file.write_text(each.source)
        file.with_suffix(".pxd").write_text(each.declarations)
    (source / "__init__.py").unlink()
    made: list[Any] = []
    with chdir(source):
        for binding in (False, True):  # without it, methods are built-in methods, which are called faster
            extensions = [Extension(name, [str(_file(Path(), name))]) for name, each in modules.items() if each.binding is binding]
            directives = {"language_level": 3, "binding": binding, "nonecheck": True}  # None raises AttributeError, as in Python
            made += cythonize(extensions, compiler_directives=directives, nthreads=os.cpu_count() or 1, quiet=True, force=True)
    return made


def _compile(extensions: list[Any], folder: Path, into: str, flags: list[str], link_flags: list[str]) -> list[Path]:
    """Compile extensions into a folder below ``folder``, and return the files. The counts of a training lie beside the object files."""
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    for each in extensions:
        each.extra_compile_args, each.extra_link_args = flags, link_flags
    command = build_ext(Distribution({"name": "vllm-gateway", "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(folder / into), str(folder / "objects")
    command.parallel, command.force = os.cpu_count() or 1, True
    command.ensure_finalized()
    command.run()
    return [Path(each) for each in command.get_outputs()]


def _file(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")
