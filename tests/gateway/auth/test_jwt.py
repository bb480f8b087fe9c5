"""Tokens of an identity provider as keys, on the worker's side: which are good, whose they are, and what bad ones cost."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jwt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm

from gateway.admission.inflight_slot import InflightCounts
from gateway.api.errors import Refusal
from gateway.auth.jwks import KeySetError, VerificationKeys, verification_keys
from gateway.auth.jwt import TokenVerifier
from gateway.auth.keyring import Keyring
from gateway.snapshot.snapshot import Allowance, Budget, Claims, Key, Limits, Model, Snapshot
from gateway.snapshot.snapshot import Issuer as Trusted
from tests.support.examples import examples
from tests.support.issuer import AUDIENCE, Issuer, SigningKey, part
from tests.support.running import KEY, key

ES = SigningKey("ES256", "es")
RS = SigningKey("RS256", "rs")
ED = SigningKey("EdDSA", "ed")
ISSUER = Issuer("https://login.example.com/", ES, RS, ED)
OTHER = Issuer("https://other.example.com/", SigningKey("ES256", "es"))
STAFF = Key(
    "staff", allowances=(Allowance("key staff", Limits(requests_per_minute=5)), Allowance("team lab", Limits(concurrent=3))), team="lab"
)


def trusted(issuer: Issuer = ISSUER, **more: Any) -> Trusted:
    given: dict[str, Any] = {"audiences": (AUDIENCE,), "keys": ("staff",), "algorithms": ("RS256", "ES256", "EdDSA")}
    return Trusted(issuer.name, **{**given, "key_set": verification_keys(issuer.document), **more})


def snapshot(*issuers: Trusted, keys: tuple[Key, ...] = (STAFF, key()), **more: Any) -> Snapshot:
    return Snapshot(1, keys, (Model("tiny", ()), Model("large", ())), issuers=issuers or (trusted(),), **more)


class Authenticator:
    """A keyring with tokens, and what was asked of control."""

    def __init__(self, served: Snapshot | None = None) -> None:
        self.requested_issuers: list[str] = []
        self.tokens = TokenVerifier(self.requested_issuers.append)
        self.take(served or snapshot())

    def take(self, served: Snapshot) -> None:
        self.tokens.apply_snapshot(served)
        self.ring = Keyring(served.keys, self.tokens)

    def key(self, token: str | bytes) -> Key:
        return self.ring.authenticate(b"Bearer " + (token.encode() if isinstance(token, str) else token))

    def refusal(self, token: str | bytes) -> str:
        with pytest.raises(Refusal) as raised:
            self.key(token)
        return f"{raised.value.code}: {raised.value.message}"


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator()


@pytest.mark.parametrize("signing", [ES, RS, ED], ids=lambda each: each.algorithm)
def test_a_token_is_a_key(authenticator: Authenticator, signing: SigningKey) -> None:
    expires = int(time.time()) + 60
    for _ in range(2):
        found = authenticator.key(ISSUER.token(signing, exp=expires, sub=f"{signing.kid}@example.com"))
        assert (found.id, found.entry, found.team) == (f"staff/{signing.kid}@example.com", "staff", "lab")
        assert found.expires == expires + 30
    assert authenticator.key(KEY).id == "team-a", "and other keys are what they were"
    assert not authenticator.requested_issuers


def test_each_subject_has_its_entrys_limits_and_shares_its_teams(authenticator: Authenticator) -> None:
    first, other = (authenticator.key(ISSUER.token(sub=name)) for name in ("alice", "bob"))
    assert [each.holder for each in first.allowances] == ["key staff/alice", "team lab"]
    assert [each.holder for each in other.allowances] == ["key staff/bob", "team lab"]
    assert [each.limits for each in first.allowances] == [each.limits for each in STAFF.allowances]


NAMES = st.text("ab/%2F", min_size=1, max_size=4)


@settings(deadline=None, max_examples=examples(100))
@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
@example(("a", "b/c"), ("a/b", "c"))
def test_distinct_subjects_share_only_their_team(one: tuple[str, str], other: tuple[str, str]) -> None:
    limits = Limits(requests_per_minute=5, session=Budget("session", tokens=9))
    of_team = Allowance("team lab", limits)
    entries = {
        name: Key(
            name,
            allowances=(Allowance(f"key {name}", limits), Allowance(f"key {name} for m", limits, ("m",)), of_team),
            fields={"cache_salt": name},
        )
        for name, _ in (one, other)
    }
    served = snapshot(trusted(keys=(*entries,), claims=Claims(key="groups")), keys=(*entries.values(),))
    authenticator = Authenticator(served)
    first, second = (authenticator.key(ISSUER.token(sub=subject, groups=entry)) for entry, subject in (one, other))
    assert (first.entry, second.entry) == (one[0], other[0])
    assert (first.id == second.id) == (one == other)
    if one != other:
        counted = [{each.holder for each in key.allowances} for key in (first, second)]
        assert counted[0] & counted[1] == {"team lab"} and len(counted[0]) == 3
        assert first.fields != second.fields, "nor cached prefixes"
        slots = InflightCounts()
        assert slots.slot(first) is not slots.slot(second)


def test_subjects_are_bounded() -> None:
    authenticator = Authenticator(snapshot(trusted(subjects=3)))
    assert [authenticator.key(ISSUER.token(sub=f"s{number}")).id for number in range(5)] == [
        "staff/s0",
        "staff/s1",
        "staff/s2",
        "staff",
        "staff",
    ]
    authenticator.take(snapshot(trusted(subjects=3), max_inflight=9))
    assert [authenticator.key(ISSUER.token(sub=name)).id for name in ("s4", "s1")] == ["staff", "staff/s1"]
    assert authenticator.key(ISSUER.token(sub="s4")).allowances == STAFF.allowances, "further ones share what their entry has"


def test_each_issuer_has_its_own_limit_of_a_tokens_size() -> None:
    authenticator = Authenticator(snapshot(trusted(limit=1000), trusted(OTHER, algorithms=("ES256",), limit=2000)))
    assert authenticator.key(OTHER.token(more="x" * 1000)).entry == "staff"
    assert authenticator.refusal(ISSUER.token(more="x" * 1000)) == "invalid_api_key: The token is larger than 1000 bytes."
    assert authenticator.refusal(OTHER.token(more="x" * 2000)) == "invalid_api_key: The token is larger than 2000 bytes."


DEEP = b'{"alg":"ES256","kid":"es","a":' + b"[" * 900 + b"]" * 900 + b"}"
BAD: dict[str, tuple[Callable[[], str], str]] = {
    "another audience": (lambda: ISSUER.token(aud="another"), "invalid_api_key: The token is for another audience."),
    "no audience": (lambda: ISSUER.token(aud=None), "invalid_api_key: The token has no claim aud."),
    "no end": (lambda: ISSUER.token(exp=None), "invalid_api_key: The token has no claim exp."),
    "over": (lambda: ISSUER.token(exp=int(time.time()) - 31), "expired_api_key: The token has expired."),
    "not begun": (lambda: ISSUER.token(nbf=int(time.time()) + 90), "invalid_api_key: The token is not valid yet."),
    "made in the future": (lambda: ISSUER.token(iat=int(time.time()) + 90), "invalid_api_key: The token is not valid yet."),
    "an unknown issuer": (
        lambda: ISSUER.token(iss="https://evil.example.com/"),
        "invalid_api_key: The token's issuer is not known here.",
    ),
    "no issuer": (lambda: ISSUER.token(iss=None), "invalid_api_key: The token's issuer is not known here."),
    "somebody else's key": (lambda: ISSUER.token(OTHER.keys[0]), "invalid_api_key: The token's signature is wrong."),
    "an unknown key": (
        lambda: ISSUER.token(SigningKey("ES256", "new")),
        "invalid_api_key: The token is signed by a key that its issuer has not",
    ),
    "no key, of several": (
        lambda: _without_kid(SigningKey("ES384")),
        "invalid_api_key: The token is not signed by one of RS256, ES256, EdDSA.",
    ),
    "a key of another algorithm": (
        lambda: ISSUER.token(ES, headers={"kid": "rs"}),
        "invalid_api_key: The token is signed by a key that its",
    ),
    "a key that is no text": (
        lambda: _unsigned({"alg": "ES256", "kid": 5}),
        "invalid_api_key: The token is signed by a key that its issuer",
    ),
    "none": (lambda: jwt.encode(_claims(), "", "none"), "invalid_api_key: The token is not signed by one of"),
    "None": (lambda: _unsigned({"alg": "None", "kid": "es"}), "invalid_api_key: The token is not signed by one of"),
    "no algorithm": (lambda: _unsigned({"kid": "es"}), "invalid_api_key: The token is not signed by one of"),
    "a list of algorithms": (lambda: _unsigned({"alg": ["ES256"], "kid": "es"}), "invalid_api_key: The token is not signed by one of"),
    "a public key as a secret": (lambda: _confused(RS), "invalid_api_key: The token is not signed by one of"),
    "an empty signature": (lambda: ISSUER.token().rpartition(".")[0] + ".", "invalid_api_key: The token's signature is wrong."),
    "a header that must be understood": (
        lambda: ISSUER.token(headers={"kid": "es", "crit": ["later"], "later": 1}),
        "invalid_api_key: The token is not valid.",
    ),
    "too large": (lambda: ISSUER.token(more="x" * 8192), "invalid_api_key: The token is larger than 8192 bytes."),
    "no subject": (lambda: ISSUER.token(sub=None), "invalid_api_key: The token's claim sub is not a name."),
    "a subject with a line break": (lambda: ISSUER.token(sub="a\nb"), "invalid_api_key: The token's claim sub is not a name."),
    "a subject without end": (lambda: ISSUER.token(sub="a" * 201), "invalid_api_key: The token's claim sub is not a name."),
    "an end beyond all": (
        lambda: _signed(b'{"iss":"https://login.example.com/","aud":"vllm-gateway","sub":"a","exp":1e999}'),
        "invalid_api_key: ",
    ),
    "a list as claims": (lambda: _signed(b"[1]"), "invalid_api_key: The token is not valid."),
    "depth": (lambda: _signed(b'{"iss":' * 1000 + b"1" + b"}" * 1000), "invalid_api_key: The token is"),
    "depth in the header": (lambda: f"{part(DEEP)}.{part(_claims())}.AAAA", "invalid_api_key: The token"),
}


def _claims(**more: Any) -> dict[str, Any]:
    return {"iss": ISSUER.name, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600, **more}


def _unsigned(header: dict[str, Any]) -> str:
    return f"{part(header)}.{part(_claims())}.{part(b'0' * 64)}"


def _signed(payload: bytes) -> str:
    return str(jwt.api_jws.PyJWS().encode(payload, ES.private, "ES256", headers={"kid": "es"}))


def _without_kid(signing: SigningKey) -> str:
    return ISSUER.token(signing, headers={})


def _confused(signing: SigningKey) -> str:
    """HS256 with the public key as the secret, which a careless checker would find right (RFC 8725, section 2.1)."""
    head = f"{part({'alg': 'HS256', 'kid': signing.kid})}.{part(_claims())}"
    return f"{head}.{part(hmac.digest(signing.pem, head.encode(), 'sha256'))}"


@pytest.mark.parametrize("name", BAD)
def test_bad_tokens(authenticator: Authenticator, name: str) -> None:
    make, text = BAD[name]
    token = make()
    for _ in range(2):  # the second time from memory
        assert authenticator.refusal(token).startswith(text)
    opened = Authenticator(snapshot(keys=(STAFF, Key("anybody", anonymous=True))))
    assert opened.refusal(token).startswith(text), "a token is never taken for no key"


def test_anything_but_a_token_is_treated_as_a_key(authenticator: Authenticator) -> None:
    for text in ("not-needed", "a.b.c", "sk-x.y.z", "eyJ.", "eyJh.eyJi", "eyJ0.eyJ0.a.b", "e.e.e"):
        assert authenticator.refusal(text) == "invalid_api_key: The API key is not valid."
    assert Authenticator(snapshot(keys=(STAFF, Key("anybody", anonymous=True)))).key("a.b.c").id == "anybody"
    plain = ISSUER.token(OTHER.keys[0])
    assert Authenticator(snapshot(keys=(STAFF, key("pinned", plain)))).key(plain).id == "pinned", "any text can be a key"


def test_a_token_that_names_no_key_means_the_only_one() -> None:
    alone = Issuer("https://login.example.com/", ES)
    assert Authenticator(snapshot(trusted(alone))).key(_without_kid(ES)).id == "staff/alice"
    both = Issuer("https://login.example.com/", ES, SigningKey("ES256", "es-2"))
    assert "has not published" in Authenticator(snapshot(trusted(both))).refusal(_without_kid(ES))


def test_clocks_may_differ_by_the_leeway(authenticator: Authenticator) -> None:
    now = int(time.time())
    assert authenticator.key(ISSUER.token(exp=now - 5, sub="late")).id == "staff/late"
    assert authenticator.key(ISSUER.token(nbf=now + 5, iat=now + 5, sub="soon")).id == "staff/soon"
    strict = Authenticator(snapshot(trusted(leeway=0.0)))
    assert strict.refusal(ISSUER.token(exp=now - 5)).startswith("expired_api_key")
    assert strict.refusal(ISSUER.token(nbf=now + 50)).startswith("invalid_api_key")


def test_a_verdict_ends_with_its_token() -> None:
    authenticator = Authenticator(snapshot(trusted(leeway=0.0)))
    token = ISSUER.token(exp=time.time() + 5.0)
    assert authenticator.key(token).id == "staff/alice"
    while time.time() < jwt.decode(token, options={"verify_signature": False})["exp"]:
        time.sleep(0.05)
    assert authenticator.refusal(token) == "expired_api_key: The token has expired."


def test_rotation() -> None:
    fresh, since = SigningKey("ES256", "fresh"), time.monotonic()
    authenticator, old, new = Authenticator(), ISSUER.token(sub="old"), ISSUER.token(fresh, sub="new")
    assert authenticator.key(old).id == "staff/old"
    assert "has not published" in authenticator.refusal(new)
    assert "has not published" in authenticator.refusal(ISSUER.token(fresh, sub="another"))
    assert 1 <= len(authenticator.requested_issuers) <= 1 + time.monotonic() - since, "control is asked once a second at most"
    assert set(authenticator.requested_issuers) == {ISSUER.name}
    both = Issuer(ISSUER.name, ES, fresh)
    authenticator.take(snapshot(trusted(both)))
    assert [authenticator.key(token).id for token in (old, new)] == ["staff/old", "staff/new"]
    authenticator.take(snapshot(trusted(Issuer(ISSUER.name, fresh))))
    assert authenticator.key(new).id == "staff/new"
    assert "has not published" in authenticator.refusal(old), "a key that was withdrawn is good for nothing, kept verdicts included"


def test_keys_that_are_not_there_yet_are_not_the_clients_fault() -> None:
    authenticator = Authenticator(snapshot(trusted(key_set=None)))
    token = ISSUER.token()
    assert authenticator.refusal(token).startswith("overloaded: ")
    authenticator.take(snapshot())
    assert authenticator.key(token).id == "staff/alice"


def test_an_entry_rules_its_tokens(authenticator: Authenticator) -> None:
    token = ISSUER.token()
    authenticator.take(snapshot(keys=(replace(STAFF, revoked=True),)))
    assert authenticator.refusal(token) == "invalid_api_key: This API key has been revoked."
    authenticator.take(snapshot(keys=(replace(STAFF, expires=time.time() - 1),)))
    assert authenticator.refusal(token).startswith("expired_api_key")
    authenticator.take(snapshot(keys=(replace(STAFF, models=("tiny",), fields={"cache_salt": "of staff", "priority": 3}),)))
    first, other = authenticator.key(token), authenticator.key(ISSUER.token(sub="bob"))
    assert first.models == ("tiny",)
    assert first.fields["priority"] == 3
    assert len({first.fields["cache_salt"], other.fields["cache_salt"], "of staff"}) == 3, "subjects do not share a prefix cache"


def test_a_subject_cannot_name_another_end_user(authenticator: Authenticator) -> None:
    authenticator.take(snapshot(keys=(replace(STAFF, user_header=b"x-user"),)))
    assert authenticator.key(ISSUER.token()).user_header is None


def test_claims() -> None:
    lab = {"lab": (Allowance("team lab", Limits(concurrent=3)),), "ops": (Allowance("team ops", Limits(concurrent=9)),)}
    claims = Claims("email", "azp", "realm.groups", "https://example.com/models", "prio")
    authenticator = Authenticator(snapshot(trusted(keys=("staff", "ci"), claims=claims), keys=(STAFF, Key("ci")), teams=lab))
    expected: dict[str, Any] = {
        "email": "a@b.c",
        "azp": "ci",
        "realm": {"groups": ["x", "ops", "lab"]},
        "https://example.com/models": "tiny other",
        "prio": -2,
    }
    found = authenticator.key(ISSUER.token(sub=None, **expected))
    assert (found.id, found.entry, found.team, found.within) == ("ci/a@b.c", "ci", "ops", ("tiny", "other"))
    assert (found.fields, found.weight) == ({"priority": -2}, 4.0)
    assert [each.holder for each in found.allowances] == ["team ops"]
    few = authenticator.key(ISSUER.token(email="a", azp=["nobody", "staff"]))
    assert (few.id, few.team, few.within, few.weight) == ("staff/a", "lab", None, 1.0)
    assert authenticator.key(ISSUER.token(**(expected | {"https://example.com/models": []}))).within == ()
    models = "https://example.com/models"
    for wrong in ({"azp": "team-a"}, {"azp": None}, {"azp": 5}, {"prio": "high"}, {"prio": True}, {"prio": 2**63}, {"email": ""},
                  {"realm": {"groups": {"a": 1}}}, {models: ["x"] * 65}, {models: [1]}):  # fmt: skip
        assert authenticator.refusal(ISSUER.token(**(expected | wrong))).startswith("invalid_api_key: The token's claim "), wrong


def test_two_issuers_have_separate_keys() -> None:
    authenticator = Authenticator(snapshot(trusted(), trusted(OTHER, keys=("ci",)), keys=(STAFF, Key("ci"))))
    assert [authenticator.key(each.token()).id for each in (ISSUER, OTHER)] == ["staff/alice", "ci/alice"]
    assert authenticator.refusal(OTHER.token(iss=ISSUER.name)) == "invalid_api_key: The token's signature is wrong."


def test_rejected_tokens_do_not_accumulate(authenticator: Authenticator) -> None:
    good = ISSUER.token()
    assert authenticator.key(good).id == "staff/alice"
    for number in range(6_000):
        authenticator.refusal(f"{part({'alg': 'ES256', 'kid': 'none of them', 'n': number})}.{part(_claims())}.AAAA")
    caches = [each for each in vars(authenticator.tokens).values() if isinstance(each, dict)]
    assert max(map(len, caches)) <= 5_000
    assert authenticator.key(good).id == "staff/alice"


@settings(deadline=None, max_examples=examples(400))
@given(st.binary(max_size=200))
def test_no_bytes_are_a_token(data: bytes) -> None:
    _refused(data)
    _refused(part(data).encode())


@settings(deadline=None, max_examples=examples(400))
@given(st.sampled_from([ES, RS, ED]), st.integers(0, 2), st.data())
def test_no_part_can_be_another(signing: SigningKey, number: int, data: st.DataObject) -> None:
    """One character of a good token is another one."""
    parts = TOKENS[signing.algorithm].split(".")
    position = data.draw(st.integers(0, len(parts[number]) - 1))
    letter = data.draw(st.sampled_from("AZaz09-_"))
    wrong = parts[number][:position] + letter + parts[number][position + 1 :]
    if _bytes_of(wrong) != _bytes_of(parts[number]):
        parts[number] = wrong
        _refused(".".join(parts).encode())


CLAIMS = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), lambda some: st.lists(some) | st.dictionaries(st.text(), some)
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64", "jwk", "x5u"]), st.text() | st.none() | st.lists(st.text())),
    CLAIMS,
    st.binary(max_size=80),
)  # fmt: skip
def test_no_made_up_token_is_good(header: dict[str, Any], claims: Any, signature: bytes) -> None:
    _refused(f"{part(header)}.{part(claims)}.{part(signature)}".encode())
    _refused(f"{part({'alg': 'ES256', 'kid': 'es'} | header)}.{part(_claims())}.{part(signature)}".encode())


TOKENS = {signing.algorithm: ISSUER.token(signing) for signing in (ES, RS, ED)}
AUTHENTICATOR = Authenticator()


def _bytes_of(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _refused(token: bytes) -> None:
    with pytest.raises(Refusal) as raised:
        AUTHENTICATOR.ring.authenticate(b"Bearer " + token)
    assert raised.value.spec.status == 401
    with pytest.raises(Refusal):
        AUTHENTICATOR.tokens.principal(token, hashlib.sha256(token).digest()) or AUTHENTICATOR.ring._unknown_key(token)


def test_what_a_key_set_may_hold() -> None:
    def found(*keys: Any) -> Iterator[str]:
        checkers = VerificationKeys(verification_keys(json.dumps({"keys": keys}).encode()), ("RS256", "RS512", "ES256", "EdDSA"))
        yield from (algorithm for algorithm in ("RS256", "RS512", "ES256", "EdDSA") if checkers.find("k", algorithm))

    assert list(found(RS.jwk(kid="k"))) == ["RS256", "RS512"]
    assert list(found(RS.jwk(kid="k", alg="RS512"))) == ["RS512"]
    assert list(found(ES.jwk(kid="k"), {"kty": "oct", "k": "c2VjcmV0", "kid": "k"}, 5, {"kty": "EC", "crv": "P-256", "x": "?"})) == [
        "ES256"
    ]
    assert list(found(ED.jwk(kid="k", alg="Ed25519"))) == ["EdDSA"]
    for unfit in (ES.jwk(use="enc"), ES.jwk(key_ops=["encrypt"]), {"kty": "oct", "k": "c2VjcmV0"}, ES.jwk(crv="P-999"), {}):
        with pytest.raises(KeySetError, match="no public key"):
            list(found(unfit))
    private = ECAlgorithm.to_jwk(ES.private, as_dict=True)
    for document, text in ((b"no", "not JSON"), (b"[]", "not a key set"), (b'{"keys": {}}', "not a key set")):
        with pytest.raises(KeySetError, match=text):
            verification_keys(document)
    with pytest.raises(KeySetError, match="private key"):
        list(found(private))
