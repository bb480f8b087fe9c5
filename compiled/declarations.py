"""Derive from annotated Python modules what Cython needs to compile them well. Pure.

The rule: everything follows from the source, which mypy has checked. So there is nothing to keep in step with it.

- A class becomes an extension type if it is undecorated and has no base, a transport's or protocol's base of asyncio, a class that became
  one, or ``msgspec.Struct`` with ``eq=False``. Its attributes become C fields: ``bool``, ``float``, the usual containers and other such
  classes by their types, everything else as an object.
- Its methods can be called without arguments being packed (``cpdef``) if they are ordinary, and never used as values.
- A parameter has its type if that is such a class, and so has a variable that is declared without a value. All other annotations of
  functions are removed, because Cython would refuse subclasses.

A line of the result is the same line of the source, so tracebacks name the lines of the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef

_DROPPED_BASES = frozenset({"asyncio.Protocol", "asyncio.Transport"})
"""Bases without a state. An event loop uses an object for what it can do, not for its class."""
_TYPES = {"bool": "bint", "float": "double", **{name: name for name in ("dict", "list", "set", "bytes", "bytearray")}}
_NO_NONE = frozenset({"bint", "double"})
_CLOSURES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp)
_COROUTINES = (ast.Yield, ast.YieldFrom, ast.Await)


class NotCompilableError(Exception):
    """A module contains something that the compiled core would do differently. ``str()``: the module, the line, and what to do."""


class Compilable(NamedTuple):
    """The source of a module for Cython, and its declarations (a ``.pxd`` file)."""

    source: str
    declarations: str
    binding: bool
    """Whether its functions must be of Cython's own type. Otherwise an inner function never releases the defaults of its parameters."""


@dataclass
class _Class:
    """A class that becomes an extension type."""

    node: ast.ClassDef
    base: str | None
    is_struct: bool
    frozen: bool = False
    has_gc: bool = True
    fields: dict[str, str] = field(default_factory=dict)
    """C types by attribute."""
    defaults: list[ast.AnnAssign | ast.Assign] = field(default_factory=list)
    """The statements of the class's body that declare attributes."""
    direct: list[ast.FunctionDef] = field(default_factory=list)
    """Methods that can be called directly."""


@dataclass
class _Module:
    """A module and the extension types that it knows, by their names in it."""

    name: str
    source: str
    tree: ast.Module
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Names that come from compiled modules: the module and the name there."""
    known: dict[str, _Class] = field(default_factory=dict)
    """Extension types, its own and imported."""
    classes: dict[str, _Class] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def error(self, node: ast.stmt | ast.expr, reason: str) -> NotCompilableError:
        return NotCompilableError(f"{self.name}, line {node.lineno}: {reason}")


def compilable(sources: Mapping[str, str]) -> dict[str, Compilable]:
    """Return what Cython compiles, by module. ``sources``: the source texts by module, which may import from one another.

    Raises NotCompilableError.
    """
    trees = {name: ast.parse(source) for name, source in sources.items()}
    values = {name for tree in trees.values() for name in _used_as_values(tree)}
    modules: dict[str, _Module] = {}
    for name in _in_import_order(trees):
        modules[name] = _analyze(_Module(name, sources[name], trees[name]), modules, values)
    return {
        name: Compilable(_transformed(module), _declarations(module), _has_inner_defaults(module.tree)) for name, module in modules.items()
    }


def _in_import_order(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield modules after those that they import when they are loaded."""
    done: set[str] = set()
    while len(done) < len(trees):
        ready = [name for name, tree in trees.items() if name not in done and not (_imports(tree) & trees.keys()) - done]
        if not ready:
            raise NotCompilableError(f"these modules import each other: {', '.join(sorted(trees.keys() - done))}")
        done.update(ready)
        yield from ready


def _imports(tree: ast.Module) -> set[str]:
    return {each.module for each in tree.body if isinstance(each, ast.ImportFrom) and each.module}


def _used_as_values(tree: ast.Module) -> set[str]:
    """Return the names of attributes that are used without being called, or set. A direct method has no object that could be passed on."""
    called = {id(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    return {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute) and id(each) not in called}


def _has_inner_defaults(tree: ast.Module) -> bool:
    """Return whether a function inside a function has parameters with defaults."""
    functions = [each for each in ast.walk(tree) if isinstance(each, Function)]
    inner = (each for outer in functions for each in ast.walk(outer) if each is not outer and isinstance(each, Function | ast.Lambda))
    return any(each.args.defaults or any(each.args.kw_defaults) for each in inner)


# Analysis


def _analyze(module: _Module, modules: Mapping[str, _Module], values: set[str]) -> _Module:
    """Find the extension types and the direct functions of a module."""
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module in modules:
            origin = modules[node.module]
            for each in node.names:
                local = each.asname or each.name
                if each.name in origin.classes:
                    module.known[local] = origin.classes[each.name]
                if each.name in origin.classes or each.name in origin.functions:
                    module.imported[local] = node.module, each.name
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and (made := _extension_type(module, node)) is not None:
            module.classes[node.name] = module.known[node.name] = made
    for made in module.classes.values():
        _find_fields(module, made)
        _find_direct_methods(module, made, values)
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and _is_ordinary(node):
            module.functions[node.name] = node
    for outer in ast.walk(module.tree):
        if isinstance(outer, ast.AsyncFunctionDef):
            for inner in ast.walk(outer):
                if inner is not outer and isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    raise module.error(inner, "a function in a coroutine refers to itself through the coroutine's variables; use a method")
    return module


def _extension_type(module: _Module, node: ast.ClassDef) -> _Class | None:
    bases = [ast.unparse(base) for base in node.bases]
    options = {each.arg: getattr(each.value, "value", None) for each in node.keywords}
    if node.decorator_list or len(bases) > 1:
        return None
    if not bases or bases[0] in _DROPPED_BASES:
        return _Class(node, None, is_struct=False)
    base = module.known.get(bases[0])
    if base is None:
        is_struct = bases[0] == "msgspec.Struct" and options.get("eq") is False
        return _Class(node, None, is_struct, bool(options.get("frozen")), options.get("gc", True) is not False) if is_struct else None
    if base.is_struct and not options.get("kw_only"):
        raise module.error(node, "a Struct with a compiled base needs kw_only=True")
    return _Class(node, bases[0], base.is_struct, base.frozen, base.has_gc)


def _c_type(module: _Module, annotation: ast.expr | None) -> str:
    """Return the C type of an annotation: ``object`` for all that Cython does not know."""
    if isinstance(annotation, ast.BinOp):
        sides = [each for each in (annotation.left, annotation.right) if not (isinstance(each, ast.Constant) and each.value is None)]
        found = _c_type(module, sides[0]) if len(sides) == 1 else "object"
        return "object" if found in _NO_NONE else found
    if isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    if not isinstance(annotation, ast.Name):
        return "object"
    return annotation.id if annotation.id in module.known else _TYPES.get(annotation.id, "object")


def _find_fields(module: _Module, made: _Class) -> None:
    """Find the attributes of an extension type: declared in its body, annotated where they are set, or set by ``__init__``."""
    node, fields = made.node, made.fields
    methods = [each for each in node.body if isinstance(each, Function)]
    assigned = {name for method in methods for name, _ in _assigned(method)}
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(name)) if not ast.unparse(each.annotation).startswith("ClassVar"):
                fields[name] = _c_type(module, each.annotation)
                made.defaults.append(each)
            case ast.Assign(targets=[ast.Name(name)]) if name in assigned:
                fields[name] = _type_of_value(module, each.value, {})
                made.defaults.append(each)
    if made.is_struct:
        return
    for each in made.defaults:
        if each.value is not None and ast.unparse(each.value) not in ("None", "False"):
            raise module.error(each, "a default other than None and False must be set by __init__")
    for method in methods:
        for at in ast.walk(method):
            if isinstance(at, ast.AnnAssign) and (name := _own_attribute(at.target)):
                fields[name] = _c_type(module, at.annotation)
    inherited = {name for base in _bases(module, made) for name in base.fields}
    for method in methods:
        parameters = {each.arg: each.annotation for each in (*method.args.args, *method.args.kwonlyargs)}
        for name, value in _assigned(method):
            if name not in fields and name not in inherited:
                fields[name] = _type_of_value(module, value, parameters) if method.name == "__init__" else "object"
    for method in methods:
        fields.pop(method.name, None)  # a property


def _assigned(method: Function) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the attributes of the object that a method sets without an annotation, with their values where they are known."""
    for each in ast.walk(method):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                if name := _own_attribute(target):
                    yield name, each.value
                elif isinstance(target, ast.Tuple):
                    known = each.value.elts if isinstance(each.value, ast.Tuple) else [None] * len(target.elts)
                    yield from ((name, value) for part, value in zip(target.elts, known, strict=True) if (name := _own_attribute(part)))


def _own_attribute(target: ast.expr) -> str:
    """Return the name of an attribute of ``self``; empty for other targets."""
    return target.attr if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self" else ""


def _type_of_value(module: _Module, value: ast.expr | None, parameters: Mapping[str, ast.expr | None]) -> str:
    """Return the C type that mypy infers for an attribute from the first value."""
    match value:
        case ast.Constant(bool()):
            return "bint"
        case ast.Constant(float()):
            return "double"
        case ast.Constant(bytes()):
            return "bytes"
        case ast.Name(name) if name in parameters:
            return _c_type(module, parameters[name])
        case ast.Call(func=ast.Name(name)) if name in module.known:
            return name
    return "object"


def _bases(module: _Module, made: _Class) -> Iterator[_Class]:
    while made.base is not None:
        made = module.known[made.base]
        yield made


def _find_direct_methods(module: _Module, made: _Class, values: set[str]) -> None:
    """Find the methods that can be called directly. A method that overrides another one is direct if the other one is."""
    bases = list(_bases(module, made))
    for each in made.node.body:
        if not isinstance(each, Function):
            continue
        direct = _is_ordinary(each) and not each.decorator_list and not each.name.startswith("__") and each.name not in values
        overridden = [base for base in bases if any(isinstance(own, Function) and own.name == each.name for own in base.node.body)]
        for base in overridden:
            if not direct:
                base.direct = [own for own in base.direct if own.name != each.name]
            direct = direct and any(own.name == each.name for own in base.direct)
        if direct and isinstance(each, ast.FunctionDef):
            made.direct.append(each)


def _is_ordinary(function: Function) -> bool:
    """Return whether a function has only ordinary parameters, and neither suspends nor contains a function."""
    given = function.args
    if isinstance(function, ast.AsyncFunctionDef) or given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
        return False
    for each in ast.walk(function):
        if each is not function and isinstance(each, (*_CLOSURES, *_COROUTINES)):
            return False
        if isinstance(each, ast.Name) and each.id == "super":
            return False
    return True


# Results


class _Editor:
    """Replaces parts of a source text without moving its lines."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, bytes]] = []

    def start(self, node: ast.stmt | ast.expr | ast.arg) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.stmt | ast.expr | ast.arg) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def find(self, text: bytes, after: int) -> int:
        return self._data.index(text, after)

    def find_before(self, text: bytes, before: int) -> int:
        return self._data.rindex(text, 0, before)

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace a part by one line of text; the lines that it has more follow."""
        self._edits.append((start, end, text.encode() + b"\n" * self._data.count(b"\n", start, end)))

    def cut(self, start: int, end: int) -> None:
        """Remove a part in the middle of a statement."""
        self._edits.append((start, end, b""))

    def result(self) -> str:
        pieces, at = list[bytes](), 0
        for start, end, text in sorted(self._edits):
            pieces += self._data[at:start], text
            at = end
        return b"".join((*pieces, self._data[at:])).decode()


def _transformed(module: _Module) -> str:
    editor = _Editor(module.source)
    direct = {id(each) for made in module.classes.values() for each in made.direct} | {id(each) for each in module.functions.values()}
    declared = {id(each) for made in module.classes.values() for each in made.defaults}
    ordinary_bodies = (each.body for each in ast.walk(module.tree) if isinstance(each, ast.ClassDef) and each.name not in module.classes)
    ordinary = {id(each) for body in ordinary_bodies for each in body}
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            _edit_signature(editor, module, node, id(node) in direct)
        elif isinstance(node, ast.AnnAssign) and id(node) not in declared | ordinary:
            if node.value is not None:
                editor.cut(editor.end(node.target), editor.find(b"=", editor.end(node.annotation)))
            elif not (isinstance(node.target, ast.Name) and _c_type(module, node.annotation) in module.known):
                editor.replace(editor.start(node), editor.end(node), "pass")
    for made in module.classes.values():
        _edit_class(editor, made)
    return editor.result()


def _edit_signature(editor: _Editor, module: _Module, node: Function, is_direct: bool) -> None:
    """Remove annotations. A direct function has its types in the declarations."""
    given = node.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None and each.annotation is not None and (is_direct or _c_type(module, each.annotation) not in module.known):
            editor.cut(editor.start(each) + len(each.arg.encode()), editor.end(each.annotation))
    if node.returns is not None:
        editor.cut(editor.find_before(b"->", editor.start(node.returns)), editor.end(node.returns))


def _edit_class(editor: _Editor, made: _Class) -> None:
    node = made.node
    if node.bases or node.keywords:
        last = node.keywords[-1].value if node.keywords else node.bases[-1]
        editor.replace(
            editor.find(b"(", editor.start(node)), editor.find(b")", editor.end(last)) + 1, f"({made.base})" if made.base else ""
        )
    for number, each in enumerate(made.defaults):
        editor.replace(editor.start(each), editor.end(each), _initializer(made) if made.is_struct and number == 0 else "pass")


def _initializer(made: _Class) -> str:
    """Return the ``__init__`` of a Struct, on one line."""
    parameters, statements = ["self"], []
    if made.base:
        parameters.append("*inherited")
        statements.append(f"{made.base}.__init__(self, *inherited, **named)")
    for each in made.defaults:
        assert isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        name, value, default = each.target.id, each.target.id, each.value
        match default:
            case None:
                parameters.append(name)
            case ast.Call(keywords=[ast.keyword(arg="default_factory", value=factory)]):
                parameters.append(f"{name}=...")
                value = f"{ast.unparse(factory)}() if {name} is ... else {name}"
            case ast.List() | ast.Dict():
                parameters.append(f"{name}=...")
                value = f"{ast.unparse(default)} if {name} is ... else {name}"
            case _:
                parameters.append(f"{name}={ast.unparse(default)}")
        statements.append(f"self.{name} = {value}")
    if made.base:
        parameters.append("**named")
    if any(isinstance(each, Function) and each.name == "__post_init__" for each in made.node.body):
        statements.append("self.__post_init__()")
    return f"def __init__({', '.join(parameters)}): {'; '.join(statements)}"


def _declarations(module: _Module) -> str:
    lines = ["cimport cython"]
    for local, (origin, name) in module.imported.items():
        lines.append(f"from {origin} cimport {name}{'' if name == local else f' as {local}'}")
    for name, made in module.classes.items():
        if not made.has_gc:
            lines.append("@cython.no_gc")
        lines.append(f"cdef class {name}{f'({made.base})' if made.base else ''}:")
        body = [f"    cdef {'readonly' if made.frozen else 'public'} {kind} {attribute}" for attribute, kind in _own_fields(module, made)]
        if _is_referenced_weakly(made):
            body.append("    cdef object __weakref__")
        body += [f"    {_signature(module, each)}" for each in made.direct]
        lines += body or ["    pass"]
    lines += [_signature(module, each) for each in module.functions.values()]
    return "\n".join(lines) + "\n"


def _own_fields(module: _Module, made: _Class) -> Iterable[tuple[str, str]]:
    inherited = {name for base in _bases(module, made) for name in base.fields}
    return ((name, kind) for name, kind in made.fields.items() if name not in inherited)


def _is_referenced_weakly(made: _Class) -> bool:
    """Return whether objects of a class without a compiled base can have weak references, as without being compiled."""
    slots = [each.value for each in made.node.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__slots__"]
    return made.base is None and not made.is_struct and (not slots or "__weakref__" in ast.literal_eval(slots[0]))


def _signature(module: _Module, function: ast.FunctionDef) -> str:
    """Return the declaration of a direct function. Only extension types are named: containers may be subclasses."""
    given = function.args.args
    first_default = len(given) - len(function.args.defaults)
    parameters = []
    for number, each in enumerate(given):
        kind = _c_type(module, each.annotation)
        parameters.append((f"{kind} " if kind in module.known else "") + each.arg + ("=*" if number >= first_default else ""))
    returned = _c_type(module, function.returns)
    return f"cpdef {f'{returned} ' if returned in module.known else ''}{function.name}({', '.join(parameters)})"
