"""Translates vLLM's validation errors to sentences with field paths: ``tools.0.function.name: Field required``. Pure.

Owns the two forms of pydantic's findings (the list of vLLM's ``validation_exception_handler``, and the text of an exception), the choice of
the helpful branch if a field may have several shapes, and the location of findings that vLLM reports without a path. The rules: a sentence
has a path and pydantic's reason, and of the client's text only the names of fields. Everything takes time in proportion to the lengths of
the error and the request, and is bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

Path = tuple[str, ...]

MAX_FINDINGS = 64
"""Maximum number of findings that are read. vLLM lists ten; the text of an exception has one for each possible shape of the field."""
MAX_SEARCHED = 4096
"""Maximum number of messages and message parts that are searched for a finding without a path."""
_MAX_SENTENCES = 10
_MAX_REASON = 300  # characters of one reason
_MAX_SEGMENT = 64  # characters of one name in a path
_MAX_SEGMENTS = 32  # names in a path
_MAX_EXPECTED = 12  # accepted values that are listed


class Branch(NamedTuple):
    """A branch of a union that was part of a path. ``depth`` is the length of the union's path."""

    depth: int
    name: str


class Finding(NamedTuple):
    """One of pydantic's findings. ``kind`` is ``missing``, ``string_type`` and so on; ``path`` is relative to the body."""

    kind: str
    path: Path
    reason: str
    branches: tuple[Branch, ...] = ()


class ErrorReport(NamedTuple):
    """The findings of an error. ``title``: the class that failed, in the text form only. ``more``: further findings were left out."""

    title: str | None
    findings: tuple[Finding, ...]
    more: bool = False


class Explanation(NamedTuple):
    """The explanation for the client: sentences, the path of the first one, and whether that field is missing."""

    message: str
    param: str | None
    missing: bool


# Reading the two forms. Both write client text as Python literals without line breaks, so the start of a line is vLLM's own text.

_LISTED = re.compile(r"\d+ validation errors?:\n")
_TITLED = re.compile(r"\d+ validation errors? for ([^\n]{0,300})\n")
_LISTED_FINDING = re.compile(
    r"""  \{'type': '(\w+)', 'loc': (?:'([^'\\]*)'|"([^"\\]*)"|\(([^()]*)\)), 'msg': (?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")"""
)
_REASON = re.compile(r"  (\S.*?) \[type=(\w+)[,\]]")
_QUOTED = re.compile(r"'([^']*)'|(\d+)")
_EXPECTED = re.compile(r"'([^']*)'")


def read(message: str) -> ErrorReport | None:
    """Return the findings of a message in either form; None for another message."""
    if (listed := _LISTED.match(message)) is not None:
        lines = message[listed.end() :].split("\n")
        more = lines[-1].startswith("  ...and ") or len(lines) > MAX_FINDINGS
        return ErrorReport(None, tuple(_listed_findings(lines[:MAX_FINDINGS])), more)
    if (titled := _TITLED.match(message)) is None:
        return None
    lines = message[titled.end() :].split("\n")
    return ErrorReport(titled[1], tuple(_text_findings(lines[: 3 * MAX_FINDINGS])), len(lines) > 3 * MAX_FINDINGS)


def _listed_findings(lines: Iterable[str]) -> Iterator[Finding]:
    for line in lines:
        if (found := _LISTED_FINDING.match(line)) is None:
            continue
        kind, one, other, several, *reasons = found.groups()
        path_text = one or other or ".".join("".join(pair) for pair in _QUOTED.findall(several or ""))
        path = tuple(path_text.split(".", _MAX_SEGMENTS))
        reason = next((each for each in reasons if each is not None), "")
        path = path[1:_MAX_SEGMENTS] if path[:1] == ("body",) else path[:_MAX_SEGMENTS]
        yield Finding(kind, path, reason.replace("\\'", "'").replace('\\"', '"'))


def _text_findings(lines: Sequence[str]) -> Iterator[Finding]:
    """Parse a line with the path, a line with the reason and the kind, and a line with a link. The path is missing for the whole value."""
    path_text = ""
    for line in lines:
        if not line.startswith("  "):
            path_text = line
        elif (found := _REASON.match(line)) is not None:
            yield Finding(found[2], tuple(path_text.split(".", _MAX_SEGMENTS)[:_MAX_SEGMENTS]) if path_text else (), found[1])
            path_text = ""


# Paths: which segments are fields, and which segments name the branch of a union

_CLASS = re.compile(r"[A-Z]\w*\Z")
_INTERNAL = re.compile(
    r"[\[\]{}()]|(?:str|int|float|bool|bytes|list|tuple|dict|set|none|function-(?:wrap|after|before|plain)|constrained-.*)\Z"
)
_UNKNOWN = object()


def _locate(finding: Finding, document: Any) -> Finding:
    """Return a finding whose path has the segments of the document alone; the others are its branches."""
    path: list[str] = []
    branches: list[Branch] = []
    value = document
    last = len(finding.path) - 1
    for at, segment in enumerate(finding.path):
        below = _below(value, segment)
        if below is _UNKNOWN and (_CLASS.match(segment) or _INTERNAL.search(segment)):
            branches.append(Branch(len(path), segment))
        elif below is _UNKNOWN and segment.isdecimal() and isinstance(value, dict | str):
            return Finding("list_type", tuple(path), "", tuple(branches))  # vLLM iterated over it without a check that it is a list
        elif below is _UNKNOWN and at < last and isinstance(value, dict) and value.get("type") == segment:
            continue  # the branch that the value's own type selects
        else:
            path.append(segment)
            value = below
    if _lacks_arguments(finding, value):
        path.append(_ARGUMENTS)
    return finding._replace(path=tuple(path), branches=tuple(branches))


_ARGUMENTS = "arguments"
"""A field of tool calls that vLLM mistakes for one of pydantic's own names and omits from paths (``_INTERNAL_LOC_MARKERS``)."""


def _lacks_arguments(finding: Finding, value: Any) -> bool:
    """Return whether a finding about a tool call's ``function``, which exists and is an object, is about its arguments."""
    about = finding.path[-1:] == ("function",) and finding.kind in ("missing", "string_type")
    return about and isinstance(value, dict) and not isinstance(value.get(_ARGUMENTS), str)


def _below(value: Any, segment: str) -> Any:
    """Return the field of an object or the item of a list by this name; _UNKNOWN if it does not exist."""
    if isinstance(value, dict):
        return value.get(segment, _UNKNOWN)
    if isinstance(value, list) and segment.isdecimal() and len(segment) < 10 and int(segment) < len(value):
        return value[int(segment)]
    return _UNKNOWN


def value_at(document: Any, path: Path) -> Any:
    """Return the value of a document at a path; a private marker if it does not exist."""
    for segment in path:
        document = _below(document, segment)
    return document


def holds(document: Any, path: Path) -> bool:
    """Return whether a document has a value at a path."""
    return value_at(document, path) is not _UNKNOWN


# Findings without a path: vLLM validates some values again, separately from the body

_KINDS: Mapping[str, tuple[str, ...]] = {
    "a valid string": ("string_type",),
    "a valid list": ("list_type", "iterable_type", "sequence_str"),
    "an object": ("dict_type", "model_type", "model_attributes_type", "dataclass_type"),
    "a valid integer": ("int_type", "int_parsing", "int_from_float"),
    "a valid number": ("float_type", "float_parsing"),
    "true or false": ("bool_type", "bool_parsing"),
}
"""pydantic's kinds of findings about a value of the wrong type, by the right one in words."""
_NOUNS = {kind: noun for noun, kinds in _KINDS.items() for kind in kinds}
_TYPES: Mapping[str, type] = {"a valid string": str, "a valid list": list, "an object": dict}


def _rebased(report: ErrorReport, document: Any) -> tuple[Finding, ...]:
    """Return the findings with paths that start at the body, also those that are reported relative to a part of it."""
    findings = report.findings
    is_relative = report.title is not None or any(map(_starts_with_item, findings))
    if not is_relative or not isinstance(document, dict) or not findings:
        return findings
    if not _starts_with_item(findings[0]):
        return _below_first(_separate(document), findings) or findings
    return _below_first(_lists(document), findings) or _of_names(document) or findings


def _starts_with_item(finding: Finding) -> bool:
    return bool(finding.path) and finding.path[0].isdecimal()


def _below_first(values: Iterable[tuple[Path, Any]], findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings below the first of the values that could have all of them; nothing if no value could."""
    for path, value in islice(values, MAX_SEARCHED):
        if all(_fits(each, value) for each in findings):
            return tuple(each._replace(path=path + each.path) for each in findings)
    return ()


def _of_names(document: Any) -> tuple[Finding, ...]:
    """Return the findings for the first message with an object in place of a list: vLLM iterated over the names of its fields."""
    for path, message in messages(document):
        if isinstance(message.get("content"), dict):
            return (Finding("string_type", (*path, "content"), ""), Finding("list_type", (*path, "content"), ""))
        if isinstance(message.get("tool_calls"), dict | str):
            return (Finding("list_type", (*path, "tool_calls"), ""),)
    return ()


def messages(document: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Return the first messages and input items of a body with their paths, also of several conversations."""
    return ((path, message) for path, message in islice(_messages(document), MAX_SEARCHED) if isinstance(message, dict))


def _messages(document: Any) -> Iterator[tuple[Path, Any]]:
    for name in ("messages", "input"):
        for path, value in _items(document, (), name):
            if isinstance(value, list):
                yield from (((*path, str(inner)), each) for inner, each in enumerate(value))
            else:
                yield path, value


def parts(document: Any, *names: str) -> Iterator[tuple[Path, Any]]:
    """Return the items of the lists with these names in the first messages, with their paths."""
    return (part for path, message in messages(document) for name in names for part in _items(message, path, name))


def _items(value: Any, path: Path, name: str) -> Iterator[tuple[Path, Any]]:
    """Return the items of the list with this name in the value at a path, with their paths."""
    items = value.get(name) if isinstance(value, dict) else None
    return (((*path, name, str(at)), item) for at, item in enumerate(items if isinstance(items, list) else ()))


_LISTS = ("content", "tool_calls", "output")


def _lists(document: Any) -> Iterator[tuple[Path, Any]]:
    for path, message in messages(document):
        yield from (((*path, name), message[name]) for name in _LISTS if isinstance(message.get(name), list))


def _separate(document: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values that vLLM validates separately: parts of messages, tools, the tool choice, the body itself."""
    yield from parts(document, *_LISTS)
    yield from _items(document, (), "tools")
    yield ("tool_choice",), document.get("tool_choice")
    yield (), document


def _fits(finding: Finding, value: Any) -> bool:
    """Return whether pydantic would report this finding for a value."""
    path = [segment for segment in finding.path if not _CLASS.match(segment) and not _INTERNAL.search(segment)]
    last = path.pop() if finding.kind == "missing" and path else None
    value = value_at(value, tuple(path))
    if last is not None:
        return isinstance(value, dict) and (last not in value or _lacks_arguments(finding, value[last]))
    if value is _UNKNOWN:
        return False
    if _NOUNS.get(finding.kind) in _TYPES:
        return not _is_of_type(value, finding.kind)
    return finding.kind != "literal_error" or value not in _EXPECTED.findall(finding.reason)


def _is_of_type(value: Any, kind: str) -> bool:
    """Return whether a value has the type that a finding of this kind misses."""
    return isinstance(value, _TYPES[_NOUNS[kind]])


# Choosing the helpful findings

_DISCRIMINATORS = ("type", "role")
_BODIES = (
    ("input",),
    ("messages",),
    ("prompt",),
    ("data",),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""The alternative bodies of vLLM's routes for pooling and tokenizing: what each requires."""
_BODY_FIELDS = frozenset(name for body in _BODIES for name in body)
_TEXT, _LIST_KIND = ("string_type",), ("list_type",)
_REQUIRED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "function_call": {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT},
    "function_call_output": {"call_id": _TEXT, "output": (*_TEXT, *_LIST_KIND)},
    "custom_tool_call": {"call_id": _TEXT, "name": _TEXT, "input": _TEXT},
    "custom_tool_call_output": {"call_id": _TEXT, "output": (*_TEXT, *_LIST_KIND)},
    "reasoning": {"id": _TEXT, "summary": _LIST_KIND},
    "item_reference": {"id": _TEXT},
    "compaction": {"encrypted_content": _TEXT},
}
"""The required fields of an input item and their types, by its own type. vLLM's list of findings ends before it reaches them."""
KNOWN_ROLES = frozenset({"developer", "system", "user", "assistant", "tool", "function"})
"""The roles of messages."""
_KNOWN = KNOWN_ROLES | _REQUIRED.keys() | {"message"}


def _chosen(located: list[Finding], document: Any, more: bool) -> list[Finding]:
    """Remove the findings of branches that the client did not intend."""
    while (first := next((each for each in located if each.branches), None)) is not None:
        depth = first.branches[0].depth
        union = first.path[:depth]
        branches: dict[str, list[Finding]] = {}
        others = []
        for each in located:
            if each.branches and each.branches[0].depth == depth and each.path[:depth] == union:
                branches.setdefault(each.branches[0].name, []).append(each._replace(branches=each.branches[1:]))
            else:
                others.append(each)
        located = others + _branch(union, branches, value_at(document, union), more)
    return located


def _branch(union: Path, branches: Mapping[str, list[Finding]], value: Any, more: bool) -> list[Finding]:
    """Return the findings to report for a value that fits none of these branches."""
    found = [each for branch in branches.values() for each in branch]
    if value is not _UNKNOWN and not isinstance(value, dict):
        return [each for each in found if each.path == union] or found
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    has_type = isinstance(fields.get("type"), str)
    given = fields.get("type" if has_type else "role")
    is_named = isinstance(given, str)
    # A branch that finds the type or the role wrong is for another kind of value.
    marks = {(*union, name) for name in (("type",) if has_type else _DISCRIMINATORS)}
    is_unlike = {name: any(each.path in marks for each in branch) for name, branch in branches.items()}
    complete = list(branches)
    if more and len(branches) > 1:
        complete.pop()  # findings of the last listed branch may be missing
    fitting = next((branches[name] for name in complete if not is_unlike[name]), None)
    if fitting is not None and (is_named or value is _UNKNOWN or not any(is_unlike.values())):
        return fitting
    if more and is_named and given in _KNOWN:
        return _unlisted(union, [branches[name] for name in complete], marks, value, given)
    return _discriminator(union, found, value, more)


def _unlisted(union: Path, branches: Sequence[list[Finding]], marks: set[Path], value: Any, given: str) -> list[Finding]:
    """Return the findings to report for a value whose type or role exists, but whose branch vLLM has not listed."""
    required = _REQUIRED.get(given, {})
    if absent := [Finding("missing", (*union, name), "") for name in required if name not in value]:
        return absent
    wrong = [name for name, kinds in required.items() if not any(_is_of_type(value[name], kind) for kind in kinds)]
    if wrong:
        return [Finding(kind, (*union, name), "") for name in wrong for kind in required[name]]
    first = branches[0]
    shared = set.intersection(*({each.path for each in branch if not each.branches} - marks for branch in branches))
    if shared and given in KNOWN_ROLES:
        path = next(each.path for each in first if each.path in shared)
        return [each for each in first if each.path == path]
    return [Finding("branch", union, f"The fields do not fit '{given}'")]


def _discriminator(union: Path, found: Sequence[Finding], value: Any, more: bool) -> list[Finding]:
    """Return a finding about the type or the role, with the values that any of the branches accepts."""
    by_name = {name: [each for each in found if each.path == (*union, name)] for name in _DISCRIMINATORS}
    present = [name for name in _DISCRIMINATORS if isinstance(value, dict) and name in value]
    name = next((each for each in (*present, "role", "type") if by_name[each]), "type")
    wrong = [each for each in by_name[name] if each.kind == "literal_error"]
    if name in present and wrong:
        expected = dict.fromkeys(value for each in wrong for value in _EXPECTED.findall(each.reason))
        return [Finding("literal_error", (*union, name), " ".join(f"'{value}'" for value in expected) + ("…" if more else ""))]
    missing = [each for each in by_name[name] if each.kind == "missing"]
    return (missing or by_name[name])[:1]


def _without_other_bodies(located: list[Finding], document: Any) -> list[Finding]:
    """Remove the fields that only another kind of body requires."""
    if not isinstance(document, dict) or not located:
        return located
    if _fits_a_body(located):
        return [each for each in located if each.path[:1] and each.path[0] not in _BODY_FIELDS]
    meant = max(_BODIES, key=lambda body: sum(name in document for name in body))
    if _BODY_FIELDS.isdisjoint(document):
        meant = next((body for body in _BODIES for each in located if _lacks_one_of(body, each)), meant)
    foreign = _BODY_FIELDS.difference(meant)
    return [each for each in located if not _lacks_one_of(foreign, each)] or located


def _lacks_one_of(names: Container[str], finding: Finding) -> bool:
    """Return whether a finding is that the body itself lacks one of these fields."""
    return finding.kind == "missing" and len(finding.path) == 1 and finding.path[0] in names


def _fits_a_body(located: Sequence[Finding]) -> bool:
    """Return whether only other fields than the text are wrong: one of the alternatives reports nothing about its text.

    The alternatives are reported one after another. So two of them have the same finding with nothing in between.
    """
    has_alternatives = any(_lacks_one_of(_BODY_FIELDS, each) for each in located)
    repeated = (one.path for one, other in pairwise(located) if one[:2] == other[:2])
    return has_alternatives and any(len(path) == 1 and path[0] not in _BODY_FIELDS for path in repeated)


def _missing_bodies(located: list[Finding], document: Any) -> Explanation | None:
    """Return the explanation for a body with the required fields of none of its alternatives."""
    if not isinstance(document, dict) or not _BODY_FIELDS.isdisjoint(document):
        return None
    missing = [each.path[0] for each in located if _lacks_one_of(_BODY_FIELDS, each)]
    bodies = sorted((body for body in _BODIES if set(body) <= set(missing)), key=lambda body: missing.index(body[0]))
    if len(bodies) < 2:
        return None
    return Explanation(f"{_either([' and '.join(body) for body in bodies])}: Field required", bodies[0][0], missing=True)


def _without_mixtures(located: list[Finding], document: Any) -> list[Finding]:
    """Keep the findings for the type that the client sent, in a union without branch names whose branches differ by type.

    A branch of another type reports the type first, so what precedes the first of these findings is of the right one.
    """
    types = Counter(each.path for each in located if each.kind in ("literal_error", "missing") and each.path[-1:] == ("type",))
    for path in sorted((path for path, count in types.items() if count > 1), key=len):
        own = [each for each in located if each.path == path]
        if not own:
            continue  # an outer union has removed the branch with this one
        union, depth = path[:-1], len(path) - 1
        inside = [each for each in located if each.path[:depth] == union and len(each.path) > depth]
        keep = [each for each in inside if len(each.path) > depth + 1 and holds(document, each.path[: depth + 1])]
        if not keep and holds(document, path):
            keep = inside[: inside.index(own[0])]
        keep = keep or own
        located = [each for each in located if each not in inside or each in keep]
    return located


def _without_other_types(located: list[Finding]) -> list[Finding]:
    """Keep, for each union without branch names, the findings of the branch for the type that the client sent.

    A value of the wrong type has no findings inside of it, and no other finding. So if there are both, the former is of another branch.
    Of several remaining branches, the branch that accepted most of the value's items is meant.
    """
    for path in sorted({each.path for each in located if each.kind in _NOUNS}, key=len):
        inside = [each for each in located if each.path[: len(path)] == path]
        rest = [each for each in inside if each.path != path or each.kind not in _NOUNS]
        if not rest:
            continue  # the value has none of the types, or its findings were removed before
        branches = _split_branches(rest)
        furthest = max(_position(branch[0].path) for branch in branches)
        meant = [each for branch in branches if _position(branch[0].path) == furthest for each in branch]
        exact = {each.path for each in meant if each.kind not in _NOUNS}
        removed = [each for each in inside if each not in meant or (each.kind in _NOUNS and each.path in exact)]
        located = [each for each in located if each not in removed]
    return located


def _split_branches(located: Iterable[Finding]) -> list[list[Finding]]:
    """Split the findings of one value by branch.

    pydantic reports a branch after another, each from the first item to the last. All items of a list have the same type.
    """
    branches: list[list[Finding]] = []
    for each in located:
        if not branches or not _is_of_same_branch(branches[-1][-1], each):
            branches.append([])
        branches[-1].append(each)
    return branches


def _is_of_same_branch(last: Finding, each: Finding) -> bool:
    shared = min(len(last.path), len(each.path))
    if last.path[:shared] == each.path[:shared] or _position(each.path) < _position(last.path):
        return False
    are_items = last.path[:-1] == each.path[:-1] and each.path[-1].isdecimal()
    return not are_items or _NOUNS.get(last.kind) == _NOUNS.get(each.kind)


def _position(path: Path) -> tuple[int, ...]:
    """Return where in the lists of a body a path is."""
    return tuple(int(segment) if segment.isdecimal() and len(segment) < 10 else 0 for segment in path)


def _without_prefixes(located: list[Finding]) -> list[Finding]:
    """Remove findings about a value if there are findings inside of it, which are more specific."""
    above = {each.path[:depth] for each in located for depth in range(len(each.path))}
    return [each for each in located if each.path not in above]


# Sentences

_PREFIXES = ("Value error, ", "Assertion failed, ")
_NAMED = re.compile(r"[`']?([A-Za-z_]\w{0,63}(?:\.\w{1,63}){0,8})\b")
_NAME = re.compile(r"[a-z_]\w+")
_NEEDS = re.compile(r"\w+ with type='\w+' requires ([\w.]{1,64})\Z")  # a class in vLLM's Cohere API


def explain(report: ErrorReport, document: Any = None) -> Explanation | None:
    """Explain a report to the client; None if no finding could be read. ``document``: the body that the server got."""
    located = [_locate(each, document if document is not None else _UNKNOWN) for each in _rebased(report, document)]
    located = _chosen(located, document, report.more)
    if (alternatives := _missing_bodies(located, document)) is not None:
        return alternatives
    located = _without_mixtures(_without_other_bodies(located, document), document)
    located = _without_prefixes(_without_other_types(located))
    by_path: dict[Path, list[Finding]] = {}
    for each in located:
        by_path.setdefault(each.path, []).append(each)
    if not (sentences := [_sentence(path, found) for path, found in by_path.items()][:_MAX_SENTENCES]):
        return None
    message, param = "; ".join(dict.fromkeys(each.message for each in sentences)), sentences[0].param
    if param is None and isinstance(document, dict):  # text about the body as a whole
        param = next((value for value in _NAME.findall(message) if value in document), None)
    return Explanation(message, param, sentences[0].missing)


def dotted(path: Path) -> str:
    """Return a path in dotted form, as clients read it."""
    return ".".join(segment if len(segment) <= _MAX_SEGMENT and segment.isprintable() else "…" for segment in path)


def without_classes(path: str) -> str:
    """Return a field's path as vLLM reports it, without the names of pydantic's classes."""
    return dotted(tuple(segment for segment in path.split(".") if not _CLASS.match(segment)))


def _sentence(path: Path, found: Sequence[Finding]) -> Explanation:
    """Return the sentence for one path. pydantic's message about a tag repeats the client's value: the expected values replace it."""
    kinds = [each.kind for each in found]
    first = found[0]
    if first.kind.startswith("union_tag"):
        path = (*path, "type")
    reason, needs = _reason(found), _NEEDS.match(first.reason.removeprefix(_PREFIXES[0]))
    if needs is not None:
        path, reason = (*path, *needs[1].split(".")), "Field required"
    where = dotted(path)
    missing = "missing" in kinds or "union_tag_not_found" in kinds or needs is not None
    named = _NAMED.match(reason)
    if where and named is not None and (named[1] == where or named[1].startswith(f"{where}.")):
        return Explanation(reason, named[1], missing)
    if not where:  # about the whole body; the reason may name a field
        return Explanation(reason, named[1] if named is not None and ("." in named[1] or "_" in named[1]) else None, missing)
    return Explanation(f"{where}: {reason}", where, missing)


def _reason(found: Sequence[Finding]) -> str:
    first = found[0]
    if any(each.kind in ("missing", "union_tag_not_found") for each in found):
        return "Field required"
    literals = [each for each in found if each.kind in ("literal_error", "enum")]
    nouns = dict.fromkeys(_NOUNS[each.kind] for each in found if each.kind in _NOUNS)
    if literals:
        expected = dict.fromkeys(value for each in literals for value in _EXPECTED.findall(each.reason))
        return _one_of(expected, literals[0].reason.endswith("…"))
    if first.kind == "union_tag_invalid":
        return _one_of(dict.fromkeys(_EXPECTED.findall(first.reason.rpartition("expected tags: ")[2])), False)
    if nouns:
        return "Input should be " + _either(list(nouns))
    reason = first.reason
    for prefix in _PREFIXES:
        reason = reason.removeprefix(prefix)
    return reason.strip()[:_MAX_REASON] or "Input is not valid"


def _one_of(expected: Iterable[str], more: bool) -> str:
    values = [f"'{value}'" for value in expected]
    if len(values) > _MAX_EXPECTED or (more and values):
        return "Input should be " + _either([*values[:_MAX_EXPECTED], "another accepted value"])
    return "Input should be " + _either(values) if values else "Input should be one of the accepted values"


def _either(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
