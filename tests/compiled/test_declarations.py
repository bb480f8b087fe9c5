"""Cython's input is derived from the sources alone, line by line."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from compiled.declarations import Compilable, NotCompilableError, compilable
from compiled.hook import MODULES

ROOT = Path(__file__).parents[2]


def one(source: str) -> Compilable:
    return compilable({"a": dedent(source)})["a"]


@pytest.fixture(scope="module")
def core() -> dict[str, tuple[str, Compilable]]:
    sources = {name: (ROOT / (name.replace(".", "/") + ".py")).read_text() for name in MODULES}
    return {name: (sources[name], made) for name, made in compilable(sources).items()}


def test_attributes_have_the_types_of_their_annotations() -> None:
    made = one(
        """
        class Slot:
            __slots__ = ("busy", "name", "since", "sizes", "waiter")
            waiter: Slot | None

            def __init__(self, name: str, since: float, left: float | None) -> None:
                self.name, self.since = name, since
                self.left = left
                self.busy = False
                self.sizes: dict[str, int] | None = None
        """
    )
    assert made.declarations.splitlines() == [
        "cimport cython",
        "cdef class Slot:",
        "    cdef public Slot waiter",
        "    cdef public dict sizes",
        "    cdef public object name",
        "    cdef public double since",
        "    cdef public object left",
        "    cdef public bint busy",
    ]
    assert "self.sizes= None" in made.source and "def __init__(self, name, since, left) :" in made.source


def test_a_declared_variable_has_its_type_if_that_is_compiled() -> None:
    made = one(
        """
        class Slot:
            busy: bool

        def free(slots: list[Slot], sizes: list[int]) -> None:
            slot: Slot
            for slot in slots:
                slot.busy = False
            size: int
            for size in sizes:
                print(size)
        """
    )
    assert "    slot: Slot\n" in made.source
    assert "size: int" not in made.source


def test_a_class_with_another_base_stays_as_it_is() -> None:
    source = """
        from typing import NamedTuple

        class Pair(NamedTuple):
            one: int
            two: int

        class Wrong(Exception):
            code: int = 3
        """
    made = one(source)
    assert made.declarations == "cimport cython\n" and made.source == dedent(source)


def test_a_transports_base_is_dropped_and_a_compiled_base_remains() -> None:
    made = one(
        """
        import asyncio

        class Base(asyncio.Protocol):
            def reset(self) -> None:
                self.count = 0

        class Derived(Base):
            def reset(self) -> None:
                self.count = 1
        """
    )
    assert "class Base:" in made.source and "class Derived(Base):" in made.source
    assert made.declarations.count("cpdef reset(self)") == 2 and made.declarations.count("count") == 1


def test_methods_are_direct_unless_they_are_used_as_values() -> None:
    made = compilable(
        {
            "a": dedent(
                """
                class Timer:
                    def start(self, after: float = 1.0) -> Timer:
                        return self

                    def stop(self) -> None: ...

                    async def wait(self) -> None: ...

                    def each(self) -> list[int]:
                        return [number for number in range(3)]

                def timer() -> Timer:
                    return Timer()
                """
            ),
            "b": "from a import Timer, timer\n\ndef use(one: Timer) -> None:\n    call(one.stop)\n    one.start()\n",
        }
    )
    assert [line.strip() for line in made["a"].declarations.splitlines() if "cpdef" in line] == [
        "cpdef Timer start(self, after=*)",
        "cpdef Timer timer()",
    ]
    assert made["b"].declarations == "cimport cython\nfrom a cimport Timer\nfrom a cimport timer\ncpdef use(Timer one)\n"


def test_a_parameter_of_a_coroutine_has_the_type_of_its_class_only() -> None:
    made = one("class A: ...\n\nasync def use(one: A, other: A | None, name: str) -> bool: ...\n")
    assert "async def use(one: A, other: A | None, name) : ..." in made.source


def test_a_struct_gets_an_initializer() -> None:
    made = one(
        """
        import msgspec
        from msgspec import field

        class Record(msgspec.Struct, frozen=True, eq=False, gc=False):
            name: str
            sizes: list[int] = []
            since: float = field(default_factory=clock)

            def __post_init__(self) -> None: ...
        """
    )
    expected = (
        "def __init__(self, name, sizes=..., since=...): self.name = name; self.sizes = [] if sizes is ... else sizes; "
        "self.since = clock() if since is ... else since; self.__post_init__()"
    )
    assert expected in made.source and "class Record:" in made.source
    assert "@cython.no_gc\ncdef class Record:\n    cdef readonly object name\n" in made.declarations


def test_inner_functions_with_defaults_need_functions_of_cython() -> None:
    assert one("def f(a):\n    def g(b=a): ...\n    return g\n").binding
    assert not one("def f(a=1):\n    def g(): ...\n    return g\n").binding


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("async def f():\n    def g(): ...\n", "a, line 2: a function in a coroutine refers to itself"),
        ("class A:\n    b = 3\n    def f(self): self.b = 4\n", "a, line 2: a default other than None and False"),
        ("class A:\n    b = 0\n    def f(self): self.b = 4\n", "a, line 2: a default other than None and False"),
        (
            "import msgspec\nclass A(msgspec.Struct, eq=False): ...\nclass B(A):\n    c: int\n",
            "a, line 3: a Struct with a compiled base needs kw_only=True",
        ),
    ],
)
def test_what_would_differ_is_refused(source: str, reason: str) -> None:
    with pytest.raises(NotCompilableError) as refused:
        one(source)
    assert str(refused.value).startswith(reason)


def test_modules_that_import_each_other_are_refused() -> None:
    with pytest.raises(NotCompilableError, match="these modules import each other: a, b"):
        compilable({"a": "from b import c\n", "b": "from a import c\n"})


def test_every_function_of_the_core_keeps_its_line(core: dict[str, tuple[str, Compilable]]) -> None:
    def lines(source: str) -> set[tuple[str, int]]:
        found = ast.walk(ast.parse(source))
        return {(each.name, each.lineno) for each in found if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}

    for source, made in core.values():
        assert lines(source) <= lines(made.source)
        assert source.count("\n") == made.source.count("\n")


def test_the_classes_of_a_request_are_compiled(core: dict[str, tuple[str, Compilable]]) -> None:
    declared = "".join(made.declarations for _, made in core.values())
    for name in ("ClientConnection", "ClientRequest", "HttpParser", "RequestContext", "UpstreamResponse", "Connection", "RequestRecord"):
        assert f"cdef class {name}" in declared
