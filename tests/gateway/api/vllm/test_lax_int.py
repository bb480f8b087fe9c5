"""Numbers in other forms are read as vLLM's fields read them, which are pydantic's."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gateway.api.vllm.lax_int import MAX_INT, lax_int
from tests.support.examples import examples
from tests.support.rows import each_row

PYDANTIC = TypeAdapter(int)
TEXTS = st.text(alphabet="0123456789_+-. \t\u00a0ex\u0663", max_size=12)


def by_pydantic(value: object) -> int | None:
    try:
        return PYDANTIC.validate_python(value)
    except ValidationError:
        return None


@settings(deadline=None, max_examples=examples(1000))
@given(st.one_of(TEXTS, st.floats(), st.integers(-(2**63), 2**64 - 1), st.booleans(), st.integers(-(10**30), 10**30).map(str)))
@example("50000")
@example(50000.0)
@example(" +5_0.00\n")
@example("-007")
@example("0-5")
@example("0__5")
@example("9" * 4300)
@example("9" * 4301)
@example("0" * 5000 + "7")
@example("-" + "0" * 5000 + "7")
@example("7_" * 100 + "7." + "0" * 5000)
@example("7." + "0" * 5000 + "1")
@example("7." + " " * 5000)
@example("7" + " " * 5000)
@example(2.0**62)
@example(-(2.0**63))
@example(-0.0)
@example(True)
def test_what_pydantic_takes_is_the_same_number(value: object) -> None:
    expected = by_pydantic(value)
    found = lax_int(value)
    if expected is not None and expected > 0:
        assert found is not None
        assert found == expected or (found == MAX_INT and expected >= 10**18)
    elif expected is not None:
        assert found is None or found == expected or (found == -MAX_INT and expected <= -(10**18))


@each_row(
    "value",
    [0.5, 1e300, 2.0**63, float("inf"), float("nan"), "", " ", "x", "5.5", "1e3", "0x5", "5.", ".0", "+", "--5", "\u0663", None, [5], {}],
)
def test_what_is_no_whole_number(value: object) -> None:
    assert lax_int(value) is None and by_pydantic(value) is None
