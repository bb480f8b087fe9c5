"""The page of requests: why one failed, the filters in the address, pages of the list, and text that is never markup."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import httpx2
import pytest

from gateway.auth import keys
from tests.gateway.console.test_pages import Seen
from tests.support.chromium import chromium
from tests.support.process import configuration, gateway, launched, wait_for
from tests.support.running import KEY

VIEWER, ADMIN, LIMITED = "token-of-a-viewer", "token-of-an-admin", keys.mint("limited")
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
TRACES = "https://traces.example.com/'\"<b>?id={trace_id}"
PAGE, REQUESTS = "/console/requests", "/admin/v1/requests"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("gateway")
    far = {"id": "far", "servers": [{"url": "http://127.0.0.1:9"}]}
    tokens = [{"name": role, "hash": keys.hash_of(token), "role": role} for role, token in (("viewer", VIEWER), ("admin", ADMIN))]
    config = configuration(launched(), far, admin={"port": 0, "tokens": tokens})
    (folder / "record.key").write_text(base64.b64encode(bytes(32)).decode())
    (folder / "audit.secret").write_text("a secret of the audit log, 32 bytes")
    for name in ("record.key", "audit.secret"):
        (folder / name).chmod(0o600)
    config |= {"ledger": {"url": f"sqlite:///{folder / 'usage.db'}", "user": True}, "audit": {"secret": {"file": "audit.secret"}}}
    config |= {"tracing": {"endpoint": "http://127.0.0.1:9", "sample": 0.5, "trace_url": TRACES}}
    config |= {"record": {"store": "records", "keys": ["team-a"], "share": "100%", "key": {"file": "record.key"}}}
    config["keys"][0]["team"] = "lab"
    config["keys"].append({"id": "limited", "hash": keys.hash_of(LIMITED), "limits": {"requests_per_minute": 1}})
    config["teams"] = [{"id": "lab"}]
    with gateway(folder, config, ready=False) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        wait_for(lambda: one.request().status_code == 200)
        yield Seen(one, browser)


@pytest.fixture(autouse=True)
def no_complaint(seen: Seen) -> Iterator[None]:
    """Fail a test after which the browser has an error other than a refused query, or requested another host."""
    yield
    assert [each for each in seen.browser.complaints if "status of 40" not in each] == []
    assert {each for each in seen.browser.requests if not each.startswith(("http://127.0.0.1:", "data:", "about:"))} == set()


def sent(seen: Seen, key: str = KEY, headers: Mapping[str, str] = MappingProxyType({}), **body: object) -> str:
    """Send a request, and return its ID when the ledger has it."""
    headers = {"authorization": f"Bearer {key}", **headers}
    document = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **body}
    response = httpx2.post(f"{seen.gateway.url}/v1/chat/completions", json=document, headers=headers, timeout=60)
    identity = response.headers["x-request-id"]
    wait_for(lambda: get(seen, f"/admin/v1/requests/{identity}").status_code == 200)
    return identity


def get(seen: Seen, path: str, token: str = VIEWER) -> httpx2.Response:
    return httpx2.get(seen.url + path, headers={"authorization": f"Bearer {token}"}, timeout=30)


def shown(seen: Seen, identity: str, token: str = VIEWER) -> str:
    """Open a request, and return its text."""
    seen.open(f"{PAGE}?id={identity}", token)
    seen.wait("document.querySelector('.happened')")
    return str(seen.browser.evaluate("document.getElementById('request').innerText"))


def test_a_limit_that_refused_a_request_is_named_with_its_holder(seen: Seen) -> None:
    sent(seen, LIMITED)
    text = shown(seen, sent(seen, LIMITED))
    assert "Rejected with rate_limit_exceeded (429)" in text and "A rate limit is reached." in text
    assert "requests_per_minute of key limited" in text
    assert text.index("A rate limit is reached.") < text.index("What happened")
    assert "not read. This limit is checked before the body is read, and the body names the model." in text
    seen.open(f"{PAGE}?key=limited&status=429", VIEWER)
    seen.wait("document.querySelector('#requests tbody tr')")
    row = seen.browser.evaluate("document.querySelector('#requests tbody tr').innerText")
    assert "not read" in row and "Rejected" in row and "429 rate_limit_exceeded" in row


def test_the_counts_of_the_overview_open_the_requests_that_they_count(seen: Seen) -> None:
    for _ in range(2):
        sent(seen, model="far")
    sent(seen, temperature="hot")
    sent(seen, model="missing")
    httpx2.get(f"{seen.gateway.url}/v1/missing", headers={"authorization": f"Bearer {KEY}"}, timeout=30)  # it has no row
    listed = {status: len(get(seen, f"{REQUESTS}?status={status}&limit=1000").json()["requests"]) for status in ("errors", "rejected")}
    assert listed["errors"] >= 2 and listed["rejected"] >= 2
    for status, text in (("errors", f"{listed['errors']} errors"), ("rejected", f"{listed['rejected']} rejected")):
        seen.open("/console", VIEWER)
        seen.wait(f"document.getElementById('outcomes').textContent.includes({text!r})")
        seen.browser.evaluate(f"document.querySelector('#outcomes a[href*={status}]').click()")
        seen.wait(f"document.querySelectorAll('#requests tbody tr').length === {listed[status]}")
        marks = seen.browser.evaluate("[...document.querySelectorAll('#requests .state')].map((one) => one.textContent)")
        assert {*marks} == {"errors": {"Error"}, "rejected": {"Rejected"}}[status]


def test_a_stream_has_a_time_line_with_words(seen: Seen) -> None:
    text = shown(seen, sent(seen, stream=True, user=HOSTILE))
    seen.wait("document.querySelector('.time-line svg rect.tokens') && document.querySelector('.time-line svg rect.server')")
    label = seen.browser.evaluate("document.querySelector('.time-line svg').getAttribute('aria-label')")
    assert "until the first token" in label and label.endswith(" tokens")
    assert "sent to sim/one#0" in text and "Tokens: " in text and HOSTILE in text and "lab" in text
    assert seen.browser.evaluate("document.querySelectorAll('main img').length") == 0
    seen.browser.evaluate("document.querySelector('#request details').open = true")
    copied = seen.browser.evaluate("[...document.querySelectorAll('#request pre')].map((one) => one.textContent).join()")
    assert "vllm-gateway record show req_" in copied and "--model OTHER" in copied


def test_the_invalid_field_and_the_model_that_was_not_found(seen: Seen) -> None:
    assert "temperature" in shown(seen, sent(seen, temperature="hot"))
    assert HOSTILE in shown(seen, sent(seen, model=HOSTILE))
    assert "no valid key (127.0.0.1)" in shown(seen, sent(seen, "sk-wrong"))


def test_an_exported_request_links_to_its_trace(seen: Seen) -> None:
    """The trace ID decides whether a trace is exported."""
    links = "[...document.querySelectorAll('#request a[target=_blank]')].map((one) => [one.href, one.rel, one.textContent])"
    for trace_id, is_exported in (("0af7651916cd43dd0448eb211c80319c", True), ("0af7651916cd43dd8448eb211c80319c", False)):
        text = shown(seen, sent(seen, headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}))
        href = f"https://traces.example.com/'%22%3Cb%3E?id={trace_id}"
        assert seen.browser.evaluate(links) == ([[href, "noopener noreferrer", "Open the trace"]] if is_exported else [])
        assert (trace_id in text) == is_exported


def test_the_filters_are_in_the_address_and_the_back_button_returns(seen: Seen) -> None:
    sent(seen)
    sent(seen, temperature="hot")
    seen.open(PAGE, VIEWER)
    seen.wait("document.querySelectorAll('#requests tbody tr').length > 1")
    seen.browser.evaluate("document.querySelector('[data-status=rejected]').click()")
    seen.wait("location.search === '?status=rejected' && document.querySelector('#requests tbody .state.degraded')")
    seen.wait("!document.querySelector('#requests tbody .state.up')")
    seen.browser.evaluate("document.querySelector('#requests tbody th a').click()")
    seen.wait("document.querySelector('.happened') && location.search.includes('id=req_')")
    seen.browser.evaluate("history.back()")
    seen.wait("document.getElementById('request').hidden && location.search === '?status=rejected'")
    assert seen.browser.evaluate("document.querySelector('input[name=status]').value") == "rejected"


def test_the_next_page_is_added_below(seen: Seen) -> None:
    first, second = sent(seen), sent(seen)
    seen.open(PAGE, VIEWER)
    seen.wait("document.querySelector('#requests tbody tr')")
    seen.browser.evaluate(
        "const api_ = request; request = (path, options) => api_(path.includes('/requests?') ? path + '&limit=1' : path, options)"
    )
    seen.browser.evaluate("go({key: 'team-a'})")
    seen.wait("document.querySelectorAll('#requests tbody tr').length === 1 && !document.getElementById('more').hidden")
    seen.browser.evaluate("document.getElementById('more').click()")
    seen.wait("document.querySelectorAll('#requests tbody tr').length === 2")
    found = seen.browser.evaluate("[...document.querySelectorAll('#requests tbody th a')].map((one) => one.innerText).join()")
    assert found == f"{second},{first}"


def test_an_unknown_id_an_invalid_filter_and_no_match_are_explained(seen: Seen) -> None:
    seen.open(f"{PAGE}?id=req_unknown", VIEWER)
    seen.wait("document.querySelector('#request .error')?.textContent === 'There is no request req_unknown in the ledger'")
    seen.open(f"{PAGE}?status=many", VIEWER)
    seen.wait("document.querySelector('#requests .error')?.textContent.startsWith('Status: expected a status')")
    seen.open(f"{PAGE}?key=nothing", VIEWER)
    seen.wait("document.getElementById('requests-note').textContent.startsWith('No request matches')")


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_is_not_wider_than_the_window(seen: Seen, width: int) -> None:
    identity = sent(seen, user="x" * 200)
    seen.browser.resize(width, 900)
    shown(seen, identity)
    assert seen.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    seen.open(PAGE, VIEWER)
    seen.wait("document.querySelector('#requests tbody tr')")
    assert seen.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    inside = seen.browser.evaluate("((one) => one.scrollWidth <= one.clientWidth)(document.querySelector('#requests .scroll'))")
    assert inside or width > 390  # on a phone, all of a request is visible


def test_without_a_ledger_the_page_says_how_to_configure_one(seen: Seen, tmp_path_factory: pytest.TempPathFactory) -> None:
    with gateway(tmp_path_factory.mktemp("without"), configuration(launched())) as one:
        other = Seen(one, seen.browser)

        assert other.gateway.get("/admin/v1/requests/req_x").status_code == 404
        other.open(PAGE, "any")
        other.wait("document.querySelector('#requests pre')?.textContent.includes('ledger: sqlite:')")


@pytest.mark.parametrize("stream", [False, True])
def test_an_admin_sees_what_was_recorded_and_the_audit_log_says_so(seen: Seen, stream: bool) -> None:
    identity = sent(seen, messages=[{"role": "user", "content": HOSTILE}], stream=stream)
    record = f"/admin/v1/requests/{identity}/record"
    wait_for(lambda: get(seen, record, ADMIN).status_code == 200, why=lambda: get(seen, record, ADMIN).text)
    assert b"Hello" not in b"".join(file.read_bytes() for file in (seen.gateway.folder / "records").rglob("*.enc"))
    assert "Show the recorded" not in shown(seen, identity) and get(seen, record).status_code == 403
    assert "The audit log records that you view them." in shown(seen, identity, ADMIN)
    seen.browser.evaluate("document.getElementById('show-record').click()")
    seen.wait("!document.getElementById('show-record')")
    text = seen.browser.evaluate("[...document.querySelectorAll('#request pre')].map((one) => one.textContent).join('\\n')")
    assert f'"content": "{HOSTILE}"' in text and ("data: [DONE]" in text if stream else '"finish_reason"' in text)
    assert seen.browser.evaluate("document.querySelectorAll('main img').length") == 0
    entries = get(seen, f"/admin/v1/audit?action=record.view&target={identity}", ADMIN).json()["entries"]
    assert len(entries) >= 2 and entries[0]["actor"] == "token admin"


def test_a_request_without_a_record_says_so(seen: Seen) -> None:
    identity = sent(seen, LIMITED)
    shown(seen, identity, ADMIN)
    seen.browser.evaluate("document.getElementById('show-record').click()")
    seen.wait(f"document.body.innerText.includes('There is no record of {identity}: the request was not recorded')")
    assert get(seen, "/admin/v1/requests/x/record", ADMIN).json()["error"].startswith("expected the ID of a request")
