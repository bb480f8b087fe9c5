"""Small changes of a Lua script's text. Pure.

The kinds are those of ``mutations.py``: another comparison, ``and`` for ``or``, another operator, another number, a negated condition, and
a command of Redis removed. Comments and texts are not changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.mutants.mutations import Mutant

_OPERATORS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "~=",
    "~=": "==",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "%": "*",
    "and": "or",
    "or": "and",
    "math.min": "math.max",
    "math.max": "math.min",
    "math.floor": "math.ceil",
    "math.ceil": "math.floor",
}
_TOKEN = re.compile(
    r"(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|--.*)"
    r"|(?P<number>(?<![\w.])\d+(?:\.\d+)?(?:e\d+)?)"
    r"|(?P<operator>math\.\w+|[<>=~]=|(?<!\.)[-+*/%<>](?!\.)|\b(?:and|or)\b)"
)
_OPERAND = re.compile(r"(?:[)\]]|\b(?!(?:and|or|not|return)\b)\w+)\s*$")
_COMMAND = re.compile(r"\s*(?P<command>redis\.call\(.*\))\s*")
_CONDITION = re.compile(r"\s*(?:else)?if (?P<condition>[\w.]+) then\b")
_FUNCTION = re.compile(r"(?:local )?function (?P<name>\w+)")


def lua_mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a script in the order of the lines. Its source before and after are whole lines."""
    lines, where = source.splitlines(), ""
    for number, line in enumerate(lines):
        started = _FUNCTION.match(line)
        where = started["name"] if started is not None else where
        for changed in _changed_lines(line):
            yield Mutant(number + 1, where, line.strip(), changed.strip(), "\n".join([*lines[:number], changed, *lines[number + 1 :], ""]))
        if line == "end" or (started is not None and line.endswith(" end")):
            where = ""


def _changed_lines(line: str) -> Iterator[str]:
    command = _COMMAND.fullmatch(line)
    if command is not None:
        yield line.replace(command["command"], "")
    condition = _CONDITION.match(line)
    if condition is not None:
        start, end = condition.span("condition")
        yield f"{line[:start]}not {line[start:end]}{line[end:]}"
    for token in _TOKEN.finditer(line):
        if token["number"]:
            yield _with(line, token, _next(token["number"]))
        elif token["operator"] in _OPERATORS and not _is_sign(line, token):
            yield _with(line, token, _OPERATORS[token["operator"]])


def _next(number: str) -> str:
    """Return a number that differs: a tenth of a fraction, which is a tolerance, and one more otherwise."""
    return f"{float(number) * 10:g}" if "." in number else f"{int(float(number)) + 1}"


def _is_sign(line: str, token: re.Match[str]) -> bool:
    """Return whether a minus is the sign of a number."""
    return token["operator"] == "-" and _OPERAND.search(line[: token.start()]) is None


def _with(line: str, token: re.Match[str], text: str) -> str:
    return line[: token.start()] + text + line[token.end() :]
