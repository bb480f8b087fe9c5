"""Load a configuration: read its file, its keys_file and its secrets, and validate them.

The rule: whatever the files contain, the result is a ``Config`` or one ``ConfigurationError`` with all problems.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gateway.config import explain, references
from gateway.config.models import Config, KeysFile
from gateway.config.problems import ConfigurationError, Finding, Problem, in_order
from gateway.config.references import Draft
from gateway.config.secret import Surroundings
from gateway.config.section import Section
from gateway.config.source import Source, read
from gateway.system.garbage_collector import collector_paused

S = TypeVar("S", bound=Section)


@collector_paused()  # the result stays in memory, and collecting garbage would take a quarter of the time
def load(path: str | os.PathLike[str], environ: Mapping[str, str] | None = None, instead: Mapping[Path, Source] = {}) -> Config:
    """Read and validate the configuration at ``path``, its keys_file and its secrets.

    Relative paths start from its folder. ``environ`` is for ``{env: NAME}``, by default the process's environment. ``instead`` replaces
    the content of files, by absolute path; problems are added to these sources. Raises ConfigurationError with all problems.
    """
    folder = Path(os.path.abspath(path)).parent
    around = Surroundings(os.environ if environ is None else environ, folder, [Path(os.path.abspath(path))])
    main = _read(path, instead)
    if not main.whole:
        raise ConfigurationError(main.problems, around.files)
    draft = Draft(main, _read_keys_file(main, around, instead))
    config = _validated(main, Config, around)
    more = _validated(draft.keys_file, KeysFile, around) if draft.keys_file else KeysFile()
    problems = [*main.problems, *(draft.keys_file.problems if draft.keys_file else ()), *references.problems(draft)]
    if problems or config is None or more is None:
        raise ConfigurationError(in_order(dict.fromkeys(problems), main.file), around.files)
    whole = config.model_copy(update={"keys": config.keys + more.keys})
    whole._withheld = frozenset(around.named - around.shared)
    whole._files = tuple(dict.fromkeys(around.files))
    return whole


def drafted(path: str | os.PathLike[str], instead: Mapping[Path, Source] = {}) -> Draft | None:
    """Return the raw documents of the configuration at ``path`` for further checks, None if it cannot be read completely.

    ``instead`` is as for ``load``.
    """
    source = _read(path, instead)
    if not source.whole or not isinstance(source.value, dict):
        return None
    return Draft(source, _read_keys_file(source, Surroundings({}, Path(os.path.abspath(path)).parent, []), instead))


def _read(path: str | os.PathLike[str], instead: Mapping[Path, Source]) -> Source:
    return instead.get(Path(os.path.abspath(path))) or read(path)


def _read_keys_file(main: Source, around: Surroundings, instead: Mapping[Path, Source]) -> Source | None:
    """Read the file that ``keys_file`` names. A missing file is a problem of the main file."""
    name = main.value.get("keys_file") if isinstance(main.value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    source = _read(around.file(name), instead)
    if not source.whole and any(problem.line == 0 for problem in source.problems):
        main.problems.append(main.problem(Finding(("keys_file",), f"{name} {source.problems[0].message}")))
        source.problems.clear()
    if source.whole and (source.value is None or isinstance(source.value, list)):
        source.value = [] if source.value is None else source.value
        source.wrap("keys")
    return source


def _validated(source: Source, section: type[S], around: Surroundings) -> S | None:
    """Return the section in ``source``, None if it has problems, which are added to ``source``."""
    if not source.whole:
        return None
    if not isinstance(source.value, dict):
        source.problems.append(Problem(source.file, 1, "", "expected a mapping such as models: … and keys: …"))
        return None
    try:
        return section.model_validate(source.value, context=around)
    except ValidationError as error:
        found = list(explain.findings(error, section))
    corrected = _corrected(source, found)
    source.problems.extend(corrected or map(source.problem, found))
    if corrected:
        _validated(source, section, around)
    return None


def _corrected(source: Source, found: list[Finding]) -> list[Problem]:
    """Rename misspelled settings, so that no other problem follows from them. Return their problems."""
    problems = []
    for finding in found:
        name = explain.misspelled(finding)
        parent = source.at(finding.path[:-1])
        if name is not None and isinstance(parent, dict) and name not in parent:
            problems.append(source.problem(finding))
            written, lines = finding.path[-1], source.lines[id(parent)]
            parent[name], lines[name] = parent.pop(written), lines.pop(written)
    return problems
