"""Every kind of tampering with a chain is detected, and names the first broken entry."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.access.actor import Actor, Role
from gateway.audit.chain import START, Checkpoint, next_line, read_line, signed_checkpoints
from gateway.audit.entry import Entry
from gateway.audit.lines import moved_files
from gateway.audit.log import Where
from gateway.audit.verification import TooLongError, Verified, verify, verify_log

KEY, OTHER = b"k" * 32, b"o" * 32
WHEN = datetime(2027, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
ADMIN = Actor("token", "ci", Role.ADMIN, frozenset({"b", "a"}))


def chain(count: int, key: bytes = KEY, name: str = "a" * 32) -> tuple[list[bytes], Checkpoint]:
    """Return the lines of a chain, and its checkpoint."""
    lines, checkpoint = [], Checkpoint(name, 0, START)
    for number in range(count):
        entry = Entry("key.create", ADMIN, "10.0.0.1", f"key-{number}", None, {"limit": number, "note": 'a ","mac":" b'})
        line, checkpoint = next_line(checkpoint, entry, WHEN, key)
        lines.append(line)
    return lines, checkpoint


def result(lines: Sequence[bytes], *checkpoints: Checkpoint, keys: Sequence[bytes] = (KEY,)) -> Verified:
    return verify([(f"log:{number}", line) for number, line in enumerate(lines, 1)], keys, checkpoints)


def broken(lines: Sequence[bytes], *checkpoints: Checkpoint) -> str:
    found = result(lines, *checkpoints).broken
    assert found is not None
    return str(found)


def test_a_verification_ends_after_its_time(tmp_path: Path) -> None:
    lines, checkpoint = chain(20)
    log = Where(tmp_path / "audit.jsonl", tmp_path)
    log.file.write_bytes(b"".join(line + b"\n" for line in lines))
    (tmp_path / "checkpoint").write_text(checkpoint.signed(KEY) + "\n")
    found = verify_log(log, [KEY])
    assert (found.broken, found.entries, found.compared) == (None, 20, 1)
    with pytest.raises(TooLongError) as error:
        verify_log(log, [KEY], seconds=-1)
    assert error.value.entries == 0


def test_the_files_that_a_rotation_has_moved_are_found_in_their_order(tmp_path: Path) -> None:
    """The names of a rotation by number count backwards. Other files are copies, or something else."""
    lines, _ = chain(20)
    other, _ = chain(2, name="b" * 32)
    log = Where(tmp_path / "audit.jsonl", tmp_path)
    parts = {".2": lines[4:8], ".10": lines[:4], "-20270131": lines[8:12], "": lines[16:], ".bak": lines[:4], ".1.tmp": other}
    for name, some in parts.items():
        (tmp_path / f"audit.jsonl{name}").write_bytes(b"".join(line + b"\n" for line in some))
    with gzip.open(tmp_path / "audit.jsonl-20270201.gz", "wb") as packed:
        packed.write(b"".join(line + b"\n" for line in lines[12:16]))
    (tmp_path / "audit.jsonl.3").write_text("something else\n")
    found = moved_files(log)
    assert [file.name.removeprefix("audit.jsonl") for file in found] == [".10", ".2", "-20270131", "-20270201.gz"]
    verified = verify_log(log, [KEY], older=found)
    assert (verified.broken, verified.entries) == (None, 20)
    packed_file = tmp_path / "audit.jsonl-20270201.gz"
    whole = packed_file.read_bytes()
    packed_file.write_bytes(whole[:-9])
    with pytest.raises(OSError, match="it is damaged"):
        verify_log(log, [KEY], older=found)
    packed_file.write_bytes(whole)
    (tmp_path / "audit.jsonl.2").write_bytes(lines[4] + b"\n")
    changed = verify_log(log, [KEY], older=moved_files(log)).broken
    assert changed is not None and changed.where.startswith(str(tmp_path / "audit.jsonl-20270131")) and "6 to 8 are missing" in changed.why


def test_a_whole_chain_is_verified() -> None:
    lines, checkpoint = chain(20)
    verified = result(lines, checkpoint, Checkpoint(checkpoint.chain, 3, msgspec.json.decode(lines[2])["mac"]))
    assert (verified.broken, verified.entries, verified.checkpoints) == (None, 20, [checkpoint])
    first = read_line(lines[0])
    assert first is not None and (first.seq, first.time, first.actor["teams"]) == (1, WHEN, ["a", "b"])


def test_an_empty_log_is_whole() -> None:
    assert result([]).broken is None


def test_a_changed_entry_is_found() -> None:
    lines, checkpoint = chain(10)
    lines[4] = lines[4].replace(b"key-4", b"key-5")
    assert broken(lines, checkpoint).startswith("log:5: its HMAC is wrong")


@pytest.mark.parametrize("seed", range(5))
def test_every_changed_byte_is_found(seed: int) -> None:
    lines, checkpoint = chain(5)
    whole = b"\n".join(lines)
    choose = random.Random(seed)
    for at in choose.sample(range(len(whole)), 100):
        changed = bytearray(whole)
        changed[at] ^= 1 << choose.randrange(8)
        assert result(bytes(changed).split(b"\n"), checkpoint).broken is not None, at


def test_a_removed_entry_is_found() -> None:
    lines, checkpoint = chain(10)
    assert broken(lines[:3] + lines[4:], checkpoint) == "log:4: has the number 5, but entry 4 is missing before it"
    assert broken(lines[3:], checkpoint) == "log:1: has the number 4, but entries 1 to 3 are missing before it"


def test_an_inserted_entry_is_found() -> None:
    lines, checkpoint = chain(10)
    copied = [*lines[:5], lines[2], *lines[5:]]
    assert broken(copied, checkpoint) == "log:6: has the number 3, but follows entry 5: it was inserted or moved"
    forged, _ = next_line(
        Checkpoint(checkpoint.chain, 5, msgspec.json.decode(lines[4])["mac"]), Entry("x", ADMIN, "", "", None, None), WHEN, OTHER
    )
    assert broken([*lines[:5], forged, *lines[5:]], checkpoint).startswith("log:6: its HMAC is wrong")


def test_reordered_entries_are_found() -> None:
    lines, checkpoint = chain(10)
    lines[3], lines[6] = lines[6], lines[3]
    assert broken(lines, checkpoint).startswith("log:4: has the number 7")


def test_a_removed_tail_is_found_by_a_checkpoint() -> None:
    lines, checkpoint = chain(10)
    assert result(lines[:7]).broken is None, "nothing in the log itself shows it"
    assert (
        broken(lines[:7], checkpoint)
        == f"chain {checkpoint.chain}, entry 8: is missing: a checkpoint names entry 10, and the chain ends with entry 7"
    )
    assert broken([], checkpoint).startswith(f"chain {checkpoint.chain}, entry 1: is missing")


def test_a_chain_computed_again_without_the_key_is_found() -> None:
    lines, _ = chain(10, OTHER)
    assert broken(lines).startswith("log:1: its HMAC is wrong: it was changed, or the chain has another key")


def test_a_chain_computed_again_with_the_key_is_found_by_a_checkpoint() -> None:
    """An attacker with the key cannot sign what was written elsewhere before."""
    _, checkpoint = chain(10)
    lines, _ = chain(9)
    entry = Entry("key.create", ADMIN, "10.0.0.1", "another", None, None)
    line, _ = next_line(Checkpoint(checkpoint.chain, 9, msgspec.json.decode(lines[-1])["mac"]), entry, WHEN, KEY)
    assert broken([*lines, line], checkpoint) == "log:10: is not the entry that a checkpoint names, so the chain was replaced"


def test_a_tail_that_continues_without_the_key_is_found() -> None:
    lines, checkpoint = chain(5)
    line, _ = next_line(checkpoint, Entry("key.create", ADMIN, "", "", None, None), WHEN, OTHER)
    assert broken([*lines, line]).startswith("log:6: its HMAC is wrong")


def test_chains_of_several_gateways_may_be_mixed_and_have_own_keys() -> None:
    one, _ = chain(4)
    two, checkpoint = chain(4, OTHER, "b" * 32)
    mixed = [line for pair in zip(one, two, strict=True) for line in pair]
    assert result(mixed, keys=(KEY, OTHER)).broken is None
    assert broken([*one, *two], checkpoint).startswith("log:5: ")


def test_an_entry_of_another_chain_is_found() -> None:
    one, _ = chain(4)
    two, _ = chain(4, KEY, "b" * 32)
    stolen = two[2].replace(b"b" * 32, b"a" * 32)
    assert broken([*one[:2], stolen]).startswith("log:3: its HMAC is wrong")


def test_other_text_is_found() -> None:
    lines, _ = chain(2)
    for other in (b"", b"{}", b"null", lines[0][:-1], lines[0] + b" ", b"\xff", lines[0] * 2):
        assert broken([other]).startswith("log:1: ")


def test_checkpoints_are_read_from_a_log_and_forged_ones_are_not() -> None:
    _, checkpoint = chain(3)
    text: Any = checkpoint.signed(KEY)
    log = f"12:00 INFO started\n12:01 INFO {text}\n" + f'{{"message": "{Checkpoint(checkpoint.chain, 2, START).signed(KEY)}"}}\n'
    assert signed_checkpoints(log, KEY) == [checkpoint, Checkpoint(checkpoint.chain, 2, START)]
    assert signed_checkpoints(log, OTHER) == signed_checkpoints(text.replace(" 3 ", " 4 "), KEY) == []
