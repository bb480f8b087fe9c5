"""Guessing keys, tokens and links by errors and by time; names that are meant to deceive; requests that race each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from types import FrameType
from typing import Any

import httpx2
import pytest

from gateway.access.actor import Role
from gateway.access.tokens import Token, digest_of, presented_token
from gateway.api.errors import Refusal
from gateway.auth.keyring import Keyring
from gateway.auth.keys import mint
from gateway.auth.stored_keys import StoredKeyring
from gateway.sign_in.oidc.authorization import Attempt, attempts
from gateway.sign_in.people import SignInLink
from gateway.snapshot.link import StoredKeys
from gateway.snapshot.snapshot import Key
from gateway.store.database import KeyDatabase
from gateway.store.decisions import Named
from gateway.store.entries import Repeatable
from gateway.store.errors import Reason, RefusedChangeError
from gateway.store.service import KeyService
from tests.gateway.sign_in.ports import Ports
from tests.gateway.sign_in.test_routes import link, token_of

NAMED = Named(keys={"yaml"}, hashes=(), teams={"lab"}, models={"qwen"}, has_prices=False)
RACERS = 8


# Guessing. Steps of the interpreter are counted instead of time: they show every comparison that ends early.


def steps(work: Callable[[], object]) -> int:
    """Count the steps of the interpreter in ``work``, after it has run once."""
    work()
    count = 0

    def on_step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return on_step

    before = sys.gettrace()
    sys.settrace(on_step)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def near(secret: str) -> list[str]:
    """Return guesses that share nothing with a secret, its start, and everything but its last character."""
    return ["z" * len(secret), secret[:12] + "z" * (len(secret) - 12), secret[:-1] + ("y" if secret[-1] != "y" else "x")]


def test_a_guess_of_a_key_costs_the_same_however_near_it_is() -> None:
    """A key is found by its SHA-256, and the guess is hashed first: no comparison sees the key itself."""
    known, of_store = "a-key-without-the-form-of-minted-ones", mint("alice")
    stored = StoredKeyring()
    stored.apply(StoredKeys((Key("alice", digests=(sha256(of_store.encode()).digest(),)),)))
    ring = Keyring([Key("yaml", digests=(sha256(known.encode()).digest(),))], stored=stored)

    def refusal(guess: str) -> Refusal:
        with pytest.raises(Refusal) as refused:
            ring.authenticate(b"Bearer " + guess.encode())
        return refused.value

    def steps_of(guess: str) -> int:
        def work() -> None:
            try:
                ring.authenticate(b"Bearer " + guess.encode())
            except Refusal:
                return
            raise AssertionError(guess)

        return steps(work)

    assert len({steps_of(guess) for guess in near(known)}) == 1
    assert len({(refusal(guess).code, refusal(guess).message) for guess in near(known)}) == 1


@pytest.mark.parametrize("count", [1, 5])
def test_a_guess_of_an_admin_token_costs_the_same_however_near_it_is(count: int) -> None:
    """Each guess is compared with every token, whichever it resembles."""
    tokens = tuple(Token(f"t{number}", digest_of(b"secret-of-token-%d" % number), Role.ADMIN) for number in range(count))
    counted = [steps(partial(presented_token, b"Bearer " + guess.encode(), tokens)) for guess in near("secret-of-token-0")]
    assert len(set(counted)) == 1, counted


def test_a_guess_of_a_signature_costs_the_same_however_near_it_is() -> None:
    signer = attempts(b"k" * 32)
    body, _, mac = signer.sign(Attempt("one", "https://login.example.com", "data", "state", "/", 1000)).partition(".")
    counted = [steps(partial(signer.read, f"{body}.{guess}")) for guess in near(mac)]
    assert len(set(counted)) == 1, counted


async def test_a_refusal_does_not_show_which_links_exist(gateway: Ports, browser: httpx2.AsyncClient) -> None:
    """A used link, an expired link, and an unknown one."""
    used, unknown, expired = token_of(await link(gateway)), "A" * 43, "E" * 43
    gateway.people.add_link(expired, SignInLink("bob", Role.VIEWER, (), (), "token root", 1.0), 0.0)
    assert (await gateway.post(browser, "/sign-in/link", token=used)).status_code == 303
    for method in ("GET", "POST"):
        pages = set()
        for token in (used, unknown, expired, ""):
            async with gateway.browser() as thief:
                if method == "GET":
                    response = await thief.get(f"{gateway.origins['data']}/sign-in/link", params={"token": token})
                else:
                    response = await gateway.post(thief, "/sign-in/link", token=token)
                pages.add((response.status_code, response.text))
        assert len(pages) == 1 and {status for status, _ in pages} == {403}


async def test_a_refusal_does_not_show_which_sessions_exist(gateway: Ports, browser: httpx2.AsyncClient) -> None:
    """A revoked session, a forged session, and none."""
    await gateway.post(browser, "/sign-in/link", token=token_of(await link(gateway)))
    revoked = browser.cookies["vllm-gateway-session"]
    await gateway.post(browser, "/sign-out")
    responses = set()
    for value in (revoked, revoked[:-2] + "AA", "x", None):
        async with gateway.browser() as thief:
            if value is not None:
                thief.cookies.set("vllm-gateway-session", value, domain="127.0.0.1", path="/")
            response = await thief.get(f"{gateway.origins['data']}/sign-in/session")
            responses.add((response.status_code, response.text))
    assert responses == {(401, '{"error":"no person is signed in"}')}


async def test_a_link_signs_in_only_its_own_person(gateway: Ports, browser: httpx2.AsyncClient) -> None:
    """Fields that name another person, role or team are ignored."""
    token = token_of(await link(gateway))
    more = {"user": "root", "subject": "root", "role": "admin", "team": "ops", "owned_team": "lab"}
    assert (await gateway.post(browser, "/sign-in/link", "data", token=token, **more)).status_code == 303
    assert await gateway.person(browser) == {"name": "bob", "role": "viewer", "teams": ["lab"], "owned_teams": []}


# Names


@pytest.fixture
def service(database: KeyDatabase) -> KeyService:
    return KeyService(database, lambda: NAMED)


REFUSED_IDS: dict[str, str] = {
    "NUL": "a\0b",
    "a line break": "a\nb",
    "a terminal sequence": "a\x1b[2J",
    "a delete character": "a\x7f",
    "another direction of text": "a\u202eb",
    "a character without width": "a\u200bb",
    "a byte order mark": "\ufeffa",
    "half a character": "a\ud800",
    "a space": "a b",
    "another space": "a\u00a0b",
    "a line separator": "a\u2028b",
    "nothing": "",
    "a very long one": "x" * 257,
    "a key": mint("alice"),
    "one of the YAML": "yaml",
}


@pytest.mark.parametrize("attack", REFUSED_IDS)
@pytest.mark.parametrize("kind", ["key", "team"])
def test_a_deceiving_id_is_refused(service: KeyService, database: KeyDatabase, kind: str, attack: str) -> None:
    identity = "lab" if (kind, attack) == ("team", "one of the YAML") else REFUSED_IDS[attack]
    if (kind, attack) == ("team", "a key"):
        return  # a team's ID is shown, but it is no field in which a key is expected
    with pytest.raises(RefusedChangeError) as refused:
        (service.create_key if kind == "key" else service.create_team)({"id": identity})
    assert refused.value.reason in (Reason.INVALID, Reason.CONFLICT)
    assert str(refused.value).isprintable()
    assert database.page("key", "", 10) == database.page("team", "", 10) == []


SIMILAR = ["alice", "Alice", "\u0430lice", "\uff41lice", "al\u0131ce", "alice/", "./alice", "ALICE", "alic\u00e9", "alice\u0301"]
"""Cyrillic a, full width, a dotless i, cases, and both forms of an accent."""


def test_a_look_alike_is_another_key(service: KeyService, database: KeyDatabase) -> None:
    """A change of one key does not change the similar ones, in both databases."""
    for identity in SIMILAR:
        service.create_key({"id": identity})
    for identity in SIMILAR[1:]:
        service.revoke_key(identity, None, revoked=True)
    state = {row.id: '"revoked": true' in row.entry for row in database.page("key", "", 100)}
    assert state == {identity: identity != "alice" for identity in SIMILAR}
    service.delete_key("ALICE", None)
    assert database.find("key", "alice") is not None


HARMLESS = [
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "..",
    "'--",
    "%00",
    "%2e%2e%2f",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "a/rotate",
    "import",
]


def test_markup_and_paths_in_an_id_are_text(service: KeyService, database: KeyDatabase) -> None:
    for identity in HARMLESS:
        made = service.create_key({"id": identity})
        assert made.after.key.id == identity and made.secret is not None and made.secret.isalnum() is False
        assert identity not in made.secret
    assert sorted(row.id for row in database.page("key", "", 100)) == sorted(HARMLESS)
    for identity in HARMLESS:
        assert service.delete_key(identity, None).key.id == identity
    assert database.page("key", "", 100) == []


# Races


def race(database: KeyDatabase, work: Callable[[KeyService, int], object]) -> list[object]:
    """Run ``work`` at once in several gateways with own connections. Returns the results; of a refusal its reason."""
    outcomes: list[object] = []
    start = threading.Barrier(RACERS)

    def run(number: int) -> None:
        with closing(KeyDatabase(database.engine.url)) as own:
            service = KeyService(own, lambda: NAMED)
            start.wait(60)
            try:
                outcomes.append(work(service, number))
            except RefusedChangeError as refused:
                outcomes.append(refused.reason)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(RACERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert len(outcomes) == RACERS
    return outcomes


def made(outcomes: Sequence[object]) -> list[Any]:
    return [each for each in outcomes if not isinstance(each, Reason)]


@pytest.mark.parametrize("kind", ["key", "team"])
def test_of_two_creations_with_one_id_one_succeeds(database: KeyDatabase, kind: str) -> None:
    """Otherwise a key could be created over another one, whose holder would lose it."""

    def create(service: KeyService, number: int) -> object:
        return service.create_key({"id": "one", "priority": number}) if kind == "key" else service.create_team({"id": "one"})

    outcomes = race(database, create)
    assert len(made(outcomes)) == 1 and outcomes.count(Reason.CONFLICT) == RACERS - 1
    assert len(database.page("key", "", 10)) + len(database.page("team", "", 10)) == 1


def test_of_two_requests_with_one_idempotency_key_one_creates(database: KeyDatabase) -> None:
    """The others get no secret."""
    outcomes = race(database, lambda service, _: service.create_key({"id": "one"}, Repeatable("once", "digest")))
    assert [each.is_repeated for each in made(outcomes)].count(False) == 1 and len(made(outcomes)) == RACERS
    assert len([each for each in made(outcomes) if each.secret is not None]) == 1


def test_a_key_is_not_restored_by_a_race_with_its_revocation(service: KeyService, database: KeyDatabase) -> None:
    """Changes of other fields, which were read before the revocation, must not bring the key back."""
    version = service.create_key({"id": "one"}).after.version

    def change(of_racer: KeyService, number: int) -> object:
        if number == 0:
            return of_racer.revoke_key("one", None, revoked=True)
        return of_racer.change_key("one", {"priority": number}, version if number % 2 else None)

    race(database, change)
    row = database.find("key", "one")
    assert row is not None and '"revoked": true' in row.entry


def test_a_team_is_not_deleted_under_a_key_that_is_created_at_once(service: KeyService, database: KeyDatabase) -> None:
    """A key of a team that is missing would have no limits."""
    service.create_team({"id": "ops", "limits": {"concurrent": 1}})

    def change(of_racer: KeyService, number: int) -> object:
        return of_racer.delete_team("ops", None) if number % 2 else of_racer.create_key({"id": f"k{number}", "team": "ops"})

    race(database, change)
    keys = database.page("key", "", 10)
    assert (database.find("team", "ops") is None) == (keys == [])
