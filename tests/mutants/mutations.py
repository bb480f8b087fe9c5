"""Small changes of a module's syntax tree. Pure: a mutant is a tree with one change, which is compiled and never written to a file.

The kinds are those of mistakes: another comparison, ``and`` for ``or``, another operator, another constant, ``None`` returned, a statement
removed. Texts for readers are not changed: docstrings, messages and annotations.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_REMOVED = (ast.Assign, ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)


class Mutant(NamedTuple):
    """One change: its line and definition (``Catalog.resolve``), the source before and after, and the changed module.

    The changed module is a syntax tree; a text if it is no Python.
    """

    line: int
    where: str
    before: str
    after: str
    changed: ast.Module | str


def mutants(source: str, only: Sequence[str] = ()) -> Iterator[Mutant]:
    """Yield every mutant of a module, or of some of its definitions, in the order of the lines."""
    tree = ast.parse(source)
    positions = [each for each in _inside(tree, (), "") if not only or any(f"{each.where}.".startswith(f"{name}.") for name in only)]
    positions.sort(key=lambda position: (position.node.lineno, position.node.col_offset))
    for position in positions:
        for replacement in _replacements(position.node):
            changed = _replaced(tree, position, replacement)
            yield Mutant(position.node.lineno, position.where, _text(position.node), _text(replacement), changed)


class _Position(NamedTuple):
    """Where a node is in its tree: the fields, and the indexes of lists, on the way from the module."""

    path: tuple[str | int, ...]
    node: ast.expr | ast.stmt
    where: str


def _inside(node: ast.AST, path: tuple[str | int, ...], where: str) -> Iterator[_Position]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        where = f"{where}.{node.name}" if where else node.name
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or _is_text(node, child):
                continue
            here = (*path, name) if index is None else (*path, name, index)
            if isinstance(child, ast.expr | ast.stmt):
                yield _Position(here, child, where)
            yield from _inside(child, here, where)


def _is_text(parent: ast.AST, child: ast.AST) -> bool:
    """Return whether a node is for readers or type checkers only."""
    if isinstance(child, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
        return True
    if isinstance(child, ast.ClassDef):
        return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in child.bases)
    if isinstance(child, ast.If):
        return isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
    if isinstance(child, ast.Assign):
        return any(isinstance(target, ast.Name) and (target.id == "__slots__" or _is_alias(child)) for target in child.targets)
    return isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)


def _is_alias(node: ast.Assign) -> bool:
    """Return whether an assignment names a type: ``Headers = dict[bytes, bytes]``."""
    return (
        isinstance(node.value, ast.Subscript)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id in ("dict", "tuple", "Callable")
    )


def _replacements(node: ast.expr | ast.stmt) -> list[ast.expr | ast.stmt]:
    """Return what may replace a node."""
    changed = copy.copy(node)
    match changed:
        case ast.Compare():
            changed.ops = [_COMPARISONS[type(changed.ops[0])](), *changed.ops[1:]]
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return [changed.operand]
        case ast.BinOp() if type(changed.op) in _OPERATORS:
            changed.op = _OPERATORS[type(changed.op)]()
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value)):
            changed.value = value + 1
        case ast.Constant(value=bytes(value)):
            changed.value = value + b"x"
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call()) | ast.While(test=ast.Name() | ast.Attribute()):
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
        case ast.Return() if changed.value is not None and not (isinstance(changed.value, ast.Constant) and changed.value.value is None):
            changed.value = ast.Constant(None)
        case ast.Expr(value=ast.Call() | ast.Await()):
            return [ast.Pass()]
        case _ if isinstance(changed, _REMOVED):
            return [ast.Pass()]
        case _:
            return []
    return [changed]


def _replaced(tree: ast.Module, position: _Position, replacement: ast.expr | ast.stmt) -> ast.Module:
    """Return the tree with another node at a position. Only the nodes on the way to it are copied."""

    def replaced(node: object, path: tuple[str | int, ...]) -> object:
        if not path:
            return ast.copy_location(replacement, position.node)
        first, rest = path[0], path[1:]
        if isinstance(first, int):
            assert isinstance(node, list)
            return [*node[:first], replaced(node[first], rest), *node[first + 1 :]]
        changed = copy.copy(node)
        setattr(changed, first, replaced(getattr(node, first), rest))
        return changed

    changed = replaced(tree, position.path)
    assert isinstance(changed, ast.Module)
    return changed


def _text(node: ast.AST) -> str:
    """Return the first line of a node's source."""
    return ast.unparse(node).partition("\n")[0]
