"""Edits of YAML: what was written stays byte by byte, and what is new says what it should."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.key_management.yaml_edit import UneditableError, append_entries, set_field, stanza
from tests.support.rows import each_row

H1, H2, H3 = (f"sha256:{letter * 64}" for letter in "abc")
ENTRY = {"id": "team-b", "hash": H2, "models": ["Qwen/*", "x"], "limits": {"requests_per_minute": 6}}
WRITTEN = f'- id: "team-b"\n  hash: {H2}\n  models: ["Qwen/*", "x"]\n  limits: {{"requests_per_minute": 6}}'

FILE = f"""\
# Who may use what.
models:   # three of them
    - id:   m
      launch: {{}}

keys:
  # the first team
  - id: team-a      # since 2020
    hash: {H1}   # its key

# where usage is kept
ledger: 'sqlite:///x.db'
"""


def test_an_entry_goes_behind_the_last_one_and_comments_stay_where_they_are() -> None:
    made = append_entries(FILE, ("keys",), [ENTRY])
    lines = made.splitlines()
    at = lines.index(f"    hash: {H1}   # its key")
    assert lines[at + 1 : at + 5] == ["  " + line for line in stanza(ENTRY, 0).splitlines()]
    assert "\n".join(lines[: at + 1] + lines[at + 5 :]) + "\n" == FILE
    assert yaml.safe_load(made)["keys"][1] == ENTRY


@each_row(
    ("before", "path"),
    [
        ("keys: []\n", ("keys",)),
        ("keys:\n", ("keys",)),
        ("keys:   # nobody yet\nmodels: [m]\n", ("keys",)),
        ("keys: null\n", ("keys",)),
        ("keys: [{id: a}]\nmodels: [m]\n", ("keys",)),
        ("keys: [\n  {id: a},   # one\n]\n", ("keys",)),
        ("keys:\n- id: a\n  hash:\n  - x\n  - y\n\n\nmodels: [m]\n", ("keys",)),
        ("keys:\n- id: a\n  note: |\n    several\n    lines\nmodels: [m]\n", ("keys",)),
        ("models: [m]\n", ("keys",)),
        ("models: [m]", ("keys",)),
        ("", ("keys",)),
        ("- id: a\n", ()),
        ("[]", ()),
        ("keys:\r\n- id: a\r\nmodels: [m]\r\n", ("keys",)),
    ],
)
def test_lists_of_every_form_take_an_entry(before: str, path: tuple[str, ...]) -> None:
    if before == "keys: null\n":
        with pytest.raises(UneditableError):
            append_entries(before, path, [ENTRY])
        return
    made = append_entries(before, path, [ENTRY, {"id": "c"}])
    was, now = yaml.safe_load(before), yaml.safe_load(made)
    if path:
        was = was or {}
        was["keys"] = [*(was.get("keys") or []), ENTRY, {"id": "c"}]
        assert now == was
    else:
        assert now == [*was, ENTRY, {"id": "c"}]


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [
        (f"- id: a\n  hash: {H1}   # old\n", [H1, H2], f"- id: a\n  hash: [{H1}, {H2}]   # old\n"),
        (f"- {{id: a, hash: '{H1}'}}\n", H2, f"- {{id: a, hash: {H2}}}\n"),
        (
            f"- id: a\n  hash:\n    - {H1}  # one\n    # more\n  x: 1\n",
            [H1, H2],
            f"- id: a\n  hash:\n    - {H1}  # one\n    - {H2}\n    # more\n  x: 1\n",
        ),
        (
            f"- id: a\n  hash:\n    - {H1}  # one\n    - {H2}  # two\n",
            [{"hash": H1, "expires": "x"}, H2, H3],
            f'- id: a\n  hash:\n    - {{hash: {H1}, expires: "x"}}  # one\n    - {H2}  # two\n    - {H3}\n',
        ),
        (f"- id: a\n  hash: [{H1}, {H2}]\n", [H2], f"- id: a\n  hash: [{H2}]\n"),
        (f"- hash: {H1}\n  id: a\n# end\n", None, f"- hash: {H1}\n  id: a\n  revoked: true\n# end\n"),
        (f"- {{id: a, hash: {H1}}}  # x\n", None, f"- {{id: a, hash: {H1}, revoked: true}}  # x\n"),
    ],
)  # fmt: skip
def test_a_member_is_set_in_its_place(before: str, value: Any, after: str) -> None:
    made = set_field(before, (0,), "hash", value) if value is not None else set_field(before, (0,), "revoked", True)
    assert made == after
    assert yaml.safe_load(made)[0] == yaml.safe_load(before)[0] | ({"revoked": True} if value is None else {"hash": value})


@pytest.mark.parametrize("before", [FILE, "keys:\n- id: a\n  hash: x", "models: [m]\n", "keys: []\n"])
def test_lines_end_as_the_others_of_the_file_do(before: str) -> None:
    text = before.replace("\n", "\r\n")
    added = append_entries(text, ("keys",), [ENTRY, {"id": "c"}])
    for made in (added, set_field(added, ("keys", 0), "hash", [H1, {"hash": H2}]), set_field(added, ("keys", 0), "revoked", True)):
        assert made.count("\n") == made.count("\r") == made.count("\r\n")
    assert append_entries(before, ("keys",), [ENTRY, {"id": "c"}]) == added.replace("\r\n", "\n")


def test_positions_are_of_characters() -> None:
    text = f"\ufeff# é€😀\nkeys:\n  - {{id: 'é€😀', hash: {H1}}}   # 😀 ist da\n"
    assert set_field(text, ("keys", 0), "hash", H2) == text.replace(H1, H2)
    assert set_field(text, ("keys", 0), "revoked", True) == text.replace("}   #", ", revoked: true}   #")
    assert append_entries(text, ("keys",), [{"id": "é"}]) == text.removesuffix("\n") + '\n  - id: "é"\n'


@pytest.mark.parametrize("number", [1e-09, 0.00001, 0.25, 5.0, 9e6, 1e22])
def test_a_number_is_read_as_it_was_written(number: float) -> None:
    """YAML 1.1 has no exponents without a decimal point."""
    assert yaml.safe_load(stanza({"id": "a", "limits": {"cost_per_day": number}}, 0)) == [{"id": "a", "limits": {"cost_per_day": number}}]


def test_the_stanza_is_for_pasting() -> None:
    assert stanza(ENTRY, 0) == WRITTEN.replace('{"requests_per_minute": 6}', "{requests_per_minute: 6}")


@settings(deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="\ufeff\u2028\u2029\x85"), min_size=1)
    )
)
def test_any_text_is_written_so_that_it_is_read_again(texts: list[str]) -> None:
    entry = {"id": "a", "models": texts}
    assert yaml.safe_load(stanza(entry, 0)) == [entry]
    assert yaml.safe_load(append_entries("keys: []", ("keys",), [entry])) == {"keys": [entry]}
