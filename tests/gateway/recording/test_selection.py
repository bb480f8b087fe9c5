"""The selection of requests: by key, model and a share of the IDs, the same in every worker."""

from __future__ import annotations

import itertools

from gateway.recording.selection import Selection
from gateway.snapshot.snapshot import Key, Model, Recording
from gateway.telemetry.request_ids import request_ids

IDS = list(itertools.islice(request_ids(), 4000))


def selection(**settings: object) -> Selection:
    return Selection(Recording("records", **{"share": 1.0, **settings}))  # type: ignore[arg-type]


def test_a_share_of_the_ids_is_selected_by_every_worker() -> None:
    one, other, key = selection(share=0.25), selection(share=0.25), Key("a")
    chosen = [identity for identity in IDS if one.includes(key, identity)]
    assert chosen == [identity for identity in IDS if other.includes(key, identity)]
    assert 0.2 < len(chosen) / len(IDS) < 0.3


def test_a_larger_share_includes_the_smaller_one() -> None:
    key = Key("a")
    small, large = ({identity for identity in IDS if selection(share=share).includes(key, identity)} for share in (0.1, 0.5))
    assert small < large


def test_keys_are_selected_by_patterns() -> None:
    one = selection(keys=("eval-*", "ci"))
    assert [one.includes(Key(name), IDS[0]) for name in ("eval-a", "ci", "ci-2", "Ci", "another")] == [True, True, False, False, False]


def test_a_token_counts_as_the_key_of_its_entry() -> None:
    one = selection(keys=("people",))
    assert one.includes(Key("alice", entry="people"), IDS[0])
    assert not one.includes(Key("people", entry="others"), IDS[0])


def test_models_are_selected_by_ids_and_aliases() -> None:
    one = selection(models=("small", "org/*"))
    models = (Model("small", ()), Model("org/large", ()), Model("big", (), aliases=("small",)), Model("big", ()))
    assert [one.includes_model(model) for model in models] == [True, True, True, False]
