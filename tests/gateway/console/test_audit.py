"""The page of the audit log: readable differences, filters, pages, who may read it, and text that is never markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gateway.auth.keys import hash_of
from tests.gateway.console.test_pages import Seen
from tests.support.chromium import chromium
from tests.support.process import configuration, gateway, launched

ADMIN, VIEWER = "token-of-an-admin", "token-of-a-viewer"
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
PAGE = "/console/audit"


def configured(folder: Path) -> dict[str, object]:
    (folder / "audit.secret").write_text("a-secret-of-the-audit-log")
    roles = (("root", ADMIN, "admin"), ("looker", VIEWER, "viewer"))
    tokens = [{"name": name, "hash": hash_of(token), "role": role} for name, token, role in roles]
    more = {"audit": {"secret": {"file": "audit.secret"}, "file": "audit.jsonl"}, "store": f"sqlite:///{folder / 'keys.db'}"}
    return configuration(launched(), admin={"port": 0, "tokens": tokens}) | more


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(folder, configured(folder)) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        made = Seen(one, browser)
        assert call(made, "POST", "/admin/v1/keys", json={"id": "of-ops", "name": HOSTILE}).status_code == 201
        changed = {"name": "x" * 100, "limits": {"requests_per_minute": 7}, "labels": {HOSTILE: "1"}}
        assert call(made, "PATCH", "/admin/v1/keys/of-ops", json=changed).status_code == 200
        assert call(made, "POST", "/servers/sim%2Fone%230/cordon").status_code == 200
        assert call(made, "POST", "/drain", token=VIEWER).status_code == 403
        yield made


@pytest.fixture(autouse=True)
def no_complaint(seen: Seen) -> Iterator[None]:
    """Fail a test after which the browser has an error other than a refused query, or requested another host."""
    yield
    assert [each for each in seen.browser.complaints if "status of 40" not in each] == []
    assert {each for each in seen.browser.requests if not each.startswith(("http://127.0.0.1:", "data:", "about:"))} == set()


def call(seen: Seen, method: str, path: str, token: str = ADMIN, json: object = None) -> httpx2.Response:
    headers = {"authorization": f"Bearer {token}", "if-match": "*"}
    return httpx2.request(method, seen.url + path, headers=headers, json=json, timeout=60)


def rows(seen: Seen) -> list[str]:
    found: list[str] = seen.browser.evaluate("[...document.querySelectorAll('#audit tbody tr')].map((one) => one.innerText)")
    return found


def test_an_entry_has_its_actor_its_target_and_the_difference(seen: Seen) -> None:
    seen.open(PAGE, ADMIN)
    seen.wait("document.querySelectorAll('#audit tbody tr').length === 5")
    refused, cordon, change, create, start = rows(seen)
    assert "token looker" in refused and "request.refused" in refused and "POST /drain" in refused
    assert all(text in cordon for text in ("token root", "server.cordon", "sim/one#0", "cordoned: ", "false → ", "true"))
    assert "key.change" in change and f"name: before {HOSTILE} → after {'x' * 100}" in " ".join(change.split()) and "of-ops" in create
    assert "gateway.start" in start
    assert seen.browser.evaluate("document.querySelectorAll('main img').length") == 0
    assert seen.browser.evaluate("document.title") == "Audit log · vllm-gateway"


def test_filters_are_in_the_address(seen: Seen) -> None:
    seen.open(f"{PAGE}?action=key.*&actor=token+root", ADMIN)
    seen.wait("document.querySelectorAll('#audit tbody tr').length === 2")
    seen.browser.evaluate("document.querySelector('input[name=action]').value = '*.refused'")
    seen.browser.evaluate("document.querySelector('input[name=actor]').value = ''")
    seen.browser.evaluate("document.getElementById('audit-filter').requestSubmit()")
    seen.wait("location.search === '?action=*.refused' && document.querySelectorAll('#audit tbody tr').length === 1")
    seen.browser.evaluate("history.back()")
    seen.wait("document.querySelectorAll('#audit tbody tr').length === 2")
    seen.open(f"{PAGE}?target=nothing", ADMIN)
    seen.wait("document.getElementById('audit-note').textContent.startsWith('No entry matches these filters')")


def test_earlier_entries_are_added_below(seen: Seen) -> None:
    seen.open(PAGE, ADMIN)
    seen.wait("document.querySelector('#audit tbody tr')")
    limited = "path.startsWith(AUDIT) ? `${path}${path.includes('?') ? '&' : '?'}limit=2` : path"
    seen.browser.evaluate(f"const all = request; request = (path, options) => all({limited}, options); 1")
    seen.browser.evaluate("go({})")
    seen.wait("document.querySelectorAll('#audit tbody tr').length === 2 && !document.getElementById('more').hidden")
    for count in (4, 5):
        seen.browser.evaluate("document.getElementById('more').click()")
        seen.wait(f"document.querySelectorAll('#audit tbody tr').length === {count}")
    assert len(set(rows(seen))) == 5 and seen.browser.evaluate("document.getElementById('more').hidden")


def test_the_chain_is_verified_on_the_page_and_the_first_bad_line_is_named(seen: Seen) -> None:
    seen.open(PAGE, ADMIN)
    seen.browser.wait("document.getElementById('verify').hidden === false")
    seen.browser.evaluate("document.getElementById('verify-now').click()")
    entries = len((seen.gateway.folder / "audit.jsonl").read_text().splitlines())
    seen.wait(f"document.getElementById('verified').textContent.startsWith('Chain intact: {entries} lines.')")
    log = seen.gateway.folder / "audit.jsonl"
    before = log.read_bytes()
    moved = log.with_name("audit.jsonl.1")
    try:
        first, *others = before.splitlines(keepends=True)
        moved.write_bytes(first)
        log.write_bytes(b"".join(others))
        seen.browser.evaluate("document.getElementById('verify-now').click()")
        seen.wait(f"document.getElementById('verified').textContent.startsWith('Chain intact: {entries} lines, with 1 rotated file.')")
        moved.unlink()
        log.write_bytes(before.replace(b"of-ops", b"of-opz", 1))
        bad = 1 + next(number for number, line in enumerate(log.read_bytes().splitlines()) if b"of-opz" in line)
        seen.browser.evaluate("document.getElementById('verify-now').click()")
        seen.wait("document.getElementById('verified').textContent.startsWith('The chain is broken at ')")
        assert f"audit.jsonl:{bad}" in seen.browser.text() and "HMAC is wrong" in seen.browser.text()
    finally:
        moved.unlink(missing_ok=True)
        log.write_bytes(before)
    assert call(seen, "GET", "/admin/v1/audit/verification", VIEWER).status_code == 403
    assert call(seen, "GET", "/admin/v1/audit/verification").json()["broken"] is None


def test_a_viewer_gets_a_sentence_and_no_entry(seen: Seen) -> None:
    seen.open(PAGE, VIEWER)
    seen.wait("document.getElementById('audit-note').textContent.endsWith('needs the role admin.')")
    assert call(seen, "GET", "/admin/v1/audit?action=nothing", VIEWER).status_code == 403


@pytest.mark.parametrize("query", ["since=yesterday", "limit=0", "cursor=x", "cursor=eA"])
def test_an_invalid_parameter_is_refused(seen: Seen, query: str) -> None:
    response = call(seen, "GET", f"/admin/v1/audit?{query}")
    assert response.status_code == 400 and response.json()["error"].startswith(f"{query.split('=')[0]}: expected ")


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_is_not_wider_than_the_window(seen: Seen, width: int) -> None:
    seen.browser.resize(width, 900)
    seen.open(PAGE, ADMIN)
    seen.wait("document.querySelector('#audit tbody tr')")
    assert seen.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_a_log_the_page_says_how_to_configure_one(seen: Seen, tmp_path: Path) -> None:
    with gateway(tmp_path, {name: value for name, value in configured(tmp_path).items() if name != "audit"}) as one:
        other = Seen(one, seen.browser)
        other.open(PAGE, ADMIN)
        other.wait("document.querySelectorAll('#audit pre').length === 2")
        assert "No audit log is configured" in seen.browser.text()
