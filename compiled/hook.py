"""Compile the core while hatchling builds a wheel: ``HATCH_BUILD_HOOKS_ENABLE=1`` (``make compiled``). Needs Cython and a C compiler.

The wheel contains the Python modules and, beside them, the extension modules, which Python prefers. It is for one version of Python and one
platform, because the stable ABI takes back a third of the gain (docs/performance.md).
"""

from __future__ import annotations

import os
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
    "gateway.api.translation",
    "gateway.api.usage",
    "gateway.auth.body_policy",
    "gateway.auth.catalog",
    "gateway.client.body",
    "gateway.client.connection",
    "gateway.client.flow_control",
    "gateway.client.http.parser",
    "gateway.client.request",
    "gateway.client.worker_context",
    "gateway.ledger.journal",
    "gateway.ledger.recorder",
    "gateway.ledger.row",
    "gateway.limits.buckets",
    "gateway.limits.estimate",
    "gateway.limits.headers",
    "gateway.limits.limiter",
    "gateway.limits.reservation",
    "gateway.limits.rules",
    "gateway.limits.states",
    "gateway.limits.windows",
    "gateway.proxy.body",
    "gateway.proxy.context",
    "gateway.proxy.exchange",
    "gateway.proxy.fast_path",
    "gateway.proxy.mirror",
    "gateway.proxy.response",
    "gateway.proxy.upstream_request",
    "gateway.telemetry.access_log",
    "gateway.telemetry.metrics",
    "gateway.telemetry.request_record",
    "gateway.telemetry.shared_counters",
    "upstream.balancing.attempt",
    "upstream.balancing.pool",
    "upstream.balancing.server",
    "upstream.http.connection",
    "upstream.http.deadlines",
    "upstream.http.inline_task",
    "upstream.http.write_batching",
)
"""The modules that an ordinary request goes through."""


class CompiledCore(BuildHookInterface[Any]):
    """Adds the extension modules to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable installation runs the sources
            return
        root = Path(self.root)
        for extension in built(root, root / "build" / "core"):
            build_data["force_include"][str(extension)] = str(extension.relative_to(root / "build" / "core" / "lib"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def built(root: Path, folder: Path) -> list[Path]:
    """Compile the modules of ``root``, and return the extension modules, in ``folder``/lib. Raises NotCompilableError."""
    sys.path.insert(0, str(root))  # a build backend runs elsewhere
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    from compiled.declarations import compilable

    source = folder / "source"
    modules = compilable({name: _file(root, name).read_text() for name in MODULES})
    for name, each in modules.items():
        file = _file(source, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in file.relative_to(source).parents:
            (source / package / "__init__.py").touch()
        file.write_text(each.source)
        file.with_suffix(".pxd").write_text(each.declarations)
    (source / "__init__.py").unlink()
    cores = os.cpu_count() or 1
    with chdir(source):  # tracebacks name files relative to it
        made = []
        for binding in (False, True):  # without it, methods are built-in methods, which are called faster
            names = [name for name, each in modules.items() if each.binding is binding]
            extensions = [Extension(name, [str(_file(Path(), name))], extra_compile_args=["-O2", "-g0", "-w"]) for name in names]
            directives = {"language_level": 3, "binding": binding, "nonecheck": True}  # None raises AttributeError, as in Python
            made += cythonize(extensions, compiler_directives=directives, nthreads=cores, quiet=True, force=True)
        command = build_ext(Distribution({"name": "vllm-gateway", "ext_modules": made}))
        command.build_lib, command.build_temp, command.parallel = str(folder / "lib"), str(folder / "objects"), cores
        command.ensure_finalized()
        command.run()
    return [Path(each) for each in command.get_outputs()]


def _file(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")
