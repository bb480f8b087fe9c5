"""The console's page of the queue: why requests wait, shares by key, team and class, sorting, filters, and each state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from gateway.auth.keys import hash_of
from tests.support.accessibility import audit
from tests.support.console import Console, check_quiet, console
from tests.support.process import configuration, launched, wait_for

HOSTILE = "<img/src=x/onerror=document.title='owned'>"
PAGE = "/console/queue"
KEYS = {"notebooks": "research", "reports": "research", "assistant": "sales", HOSTILE: None, "nightly": "sales"}
LOADING = "sim/loading"


def secret_of(key: str) -> str:
    return f"sk-of-{list(KEYS).index(key)}-{'x' * 24}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    full = launched(**{"sim-tokens": "4", "sim-tokens-per-second": "40"}) | {"max_inflight": 1}
    loading = launched(LOADING, **{"sim-listen-after": "600"})
    loading["launch"]["start"] = "on_demand"
    loading["queue"] = {"wait": "10m"}
    config = configuration(full, loading)
    config["classes"] = [{"id": "chat"}, {"id": "batch"}]
    config["teams"] = [{"id": "research", "weight": 3}, {"id": "sales"}]
    config["keys"] += [
        {"id": key, "hash": hash_of(secret_of(key)), "class": "batch" if key == "nightly" else "chat", **({"team": team} if team else {})}
        for key, team in KEYS.items()
    ]
    with console(tmp_path_factory, config) as one:
        yield one


@pytest.fixture(autouse=True)
def no_complaint(seen: Console) -> Iterator[None]:
    seen.browser.complaints.clear()
    yield
    check_quiet(seen)


def send(seen: Console, key: str, model: str = "sim/one") -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": f"Bearer {secret_of(key)}"}
    return httpx2.post(f"{seen.gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=600).status_code


def rows(seen: Console) -> list[list[str]]:
    """Return the visible rows of the table."""
    shown = "[...document.querySelectorAll('#flows tbody tr:not([aria-hidden])')]"
    found: list[list[str]] = seen.browser.evaluate(f"{shown}.map((row) => [...row.children].map((cell) => cell.innerText))")
    return found


def show(
    seen: Console, flows: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]] = (), open_slots: Sequence[object] = ()
) -> None:
    """Show responses of the gateway that a small gateway does not give."""
    responses = json.dumps({"/queue": {"flows": flows, "open_slots": open_slots}, "/admin/v1/models": {"models": models}})
    seen.browser.evaluate(f"(() => {{ const data = {responses}; request = async (path) => new Response(JSON.stringify(data[path])); }})()")
    seen.browser.evaluate("load(showQueue)")


def choose(seen: Console, field: str, value: str) -> None:
    write = f"const one = document.getElementById({field!r}); one.value = {json.dumps(value)}"
    seen.browser.evaluate(f"(() => {{ {write}; one.dispatchEvent(new Event('input', {{bubbles: true}})); }})()")


def flow(key: str, **more: Any) -> dict[str, Any]:
    names = {"model": "m", "class": "default", "team": "", "key": key}
    return names | {"waiting": 0, "dispatched": 1, "refused": 0, "wait_seconds": 1.0, "service": 10, "service_share": 0.5} | more


def test_nothing_has_waited(seen: Console) -> None:
    seen.open(PAGE, "viewer")
    seen.wait_for_text("No requests wait. Requests wait while all servers of a model are full, or while it is being loaded.")
    seen.wait_for_text("No request has waited since the gateway started.")
    assert seen.buttons() == []
    audit(seen.browser)


def test_why_requests_wait_and_the_shares(seen: Console) -> None:
    """The shares come by themselves, and the links from the other pages lead here."""
    seen.open(PAGE, "viewer")
    seen.wait_for_text("No requests wait.")
    with ThreadPoolExecutor(12) as pool:
        waiting = pool.submit(send, seen, "reports", LOADING)
        assert list(pool.map(lambda key: send(seen, key), [*KEYS] * 2)) == [200] * 10
        seen.wait_for_text("No server is up. The requests wait until one is.")
        seen.wait(f"[...document.querySelectorAll('#waiting h3')].some((one) => one.textContent === {LOADING!r})")
        wait_for(lambda: {HOSTILE, *KEYS} <= {each[0] for each in rows(seen)}, why=seen.browser.text)
        assert seen.browser.evaluate("document.querySelectorAll('#flows progress').length") == len(rows(seen))
        assert seen.browser.evaluate("document.querySelectorAll('#page img').length") == 0
        seen.open("/console/models", "viewer")
        link = f"document.querySelector('[data-act={json.dumps(f'Queue of {LOADING}')}]')"
        seen.wait(f"{link}?.textContent === '1'")
        assert seen.browser.evaluate(f"{link}.getAttribute('href')") == "/console/queue?model=sim%2Floading"
        seen.open("/console", "viewer")
        seen.wait("document.querySelector('.now a')?.textContent === '1 queued'")
        assert seen.browser.evaluate("document.querySelector('.now a').getAttribute('href')") == PAGE
        seen.open(f"{PAGE}?model=sim%2Floading", "viewer")
        wait_for(lambda: [each[:3] for each in rows(seen)] == [["reports", "research", "chat"]])
        assert seen.call("POST", "/models/sim%2Floading/stop").status_code == 200
        assert waiting.result() == 503


def test_a_full_model_is_shown_with_its_load(seen: Console) -> None:
    seen.open(PAGE, "viewer")
    seen.wait_for_text("Shares")
    servers = [{"state": "ready", "load": "8 of 8"}, {"state": "ready", "load": "7 of 8"}, {"state": "failed", "load": "0 of 8"}]
    show(seen, [flow("a", waiting=3)], [{"id": "m", "state": "ready", "queued": 3, "waiting": "", "servers": servers}])
    seen.wait_for_text("2 servers up, with 15 of at most 16 requests in flight.")
    assert "3 waiting" in seen.browser.evaluate("document.getElementById('waiting').innerText")


def test_reserved_slots_are_shown_with_the_times_that_they_follow(seen: Console) -> None:
    seen.open(PAGE, "viewer")
    seen.wait_for_text("Shares")
    assert not seen.browser.evaluate("document.getElementById('slots-section').checkVisibility()")
    fixed = {"model": "m", "class": "chat", "slots": 22, "objectives": {}}
    adaptive = {"model": HOSTILE, "class": "chat", "slots": 1, "objectives": {"itl": 0.962, "ttft": 0.41}}
    show(seen, [flow("a")], open_slots=[fixed, adaptive])
    seen.wait_for_text("Time to the first token: 41% of the objective, time between tokens: 96% of the objective.")
    seen.wait_for_text("22 open")
    seen.wait_for_text("Open to the classes after chat, on each server.")
    audit(seen.browser)


def test_shares_are_added_up_by_team_and_class(seen: Console) -> None:
    flows = [
        flow("a", team="x", service=60, service_share=0.6, dispatched=3, wait_seconds=1.0, refused=2),
        flow("b", team="x", service=20, service_share=0.2, dispatched=1, wait_seconds=5.0, refused=5),
        flow("c", service=15, service_share=0.15, **{"class": "batch"}),
        flow("d", service=5, service_share=0.05),
    ]
    seen.open(f"{PAGE}?by=team", "viewer")
    seen.wait_for_text("Shares")
    show(seen, flows)
    team, alone, other = ["x", "80.0%", "80", "0", "2 s", "4", "7"], "c without a team", "d without a team"
    wait_for(lambda: [each[0] for each in rows(seen)] == ["x", alone, other], why=seen.browser.text)
    assert [each.strip() for each in rows(seen)[0]] == team
    choose(seen, "by", "class")
    assert [each[:2] for each in rows(seen)] == [["default", "85.0%"], ["batch", "15.0%"]]
    assert seen.browser.evaluate("location.search") == "?by=class"


def test_the_table_is_sorted_and_filtered_and_the_address_keeps_both(seen: Console) -> None:
    flows = [flow(f"key-{at}", service=10 * at, waiting=at % 2, model=f"m{at % 2}") for at in range(1, 12)]
    seen.open(f"{PAGE}?sort=service-ascending&show=waiting", "viewer")
    seen.wait_for_text("Shares")
    show(seen, flows)
    wait_for(lambda: [each[0] for each in rows(seen)] == [f"key-{at}" for at in (1, 3, 5, 7, 9, 11)], why=seen.browser.text)
    header = "[...document.querySelectorAll('th .sort')].find((one) => one.textContent === 'Key')"
    seen.browser.evaluate(f"{header}.click()")
    assert seen.browser.evaluate(f"{header}.parentNode.getAttribute('aria-sort')") == "ascending"
    seen.browser.evaluate(f"{header}.click()")
    assert [each[0] for each in rows(seen)][:2] == ["key-11", "key-9"]
    choose(seen, "show", "")
    choose(seen, "find", "KEY-1")
    assert [each[0] for each in rows(seen)] == ["key-11", "key-10", "key-1"]
    choose(seen, "model", "m0")
    assert [each[0] for each in rows(seen)] == ["key-10"]
    assert seen.browser.evaluate("location.search") == "?sort=key-descending&find=KEY-1&model=m0"
    choose(seen, "find", "nothing")
    assert rows(seen) == [] and "Nothing matches these filters." in seen.browser.text()


def test_ten_thousand_keys_keep_the_place_of_the_reader(seen: Console) -> None:
    flows = [flow(f"{at}-{'x' * 190}", model="m" * 200, team="مفتاح" * 40) for at in range(10_000)]
    seen.open(PAGE, "viewer")
    seen.wait_for_text("Shares")
    show(seen, flows, [{"id": "m" * 200, "state": "ready", "queued": 1, "waiting": "", "servers": []}])
    seen.wait_for_text("10,000 rows")
    assert len(rows(seen)) < 100
    table = "document.querySelector('#flows .scroll')"
    seen.browser.evaluate(f"{table}.scrollTop = 100000")
    wait_for(lambda: seen.browser.evaluate(f"{table}.querySelector('tbody th').textContent[0] !== '0'"))
    before = rows(seen)
    seen.browser.evaluate("document.querySelectorAll('#flows tbody th')[6].firstChild.same = true")
    show(seen, [*flows[:-1], flow("last", model="m" * 200, service_share=0)])
    wait_for(lambda: seen.browser.evaluate("flows.at(-1).key") == "last")
    assert rows(seen) == before
    assert seen.browser.evaluate("document.querySelectorAll('#flows tbody th')[6].firstChild.same")
    for width in (390, 1440):
        seen.browser.resize(width, 900)
        assert seen.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_error_of_the_gateway_is_shown(seen: Console) -> None:
    seen.open(PAGE, "viewer")
    seen.wait_for_text("Shares")
    seen.browser.evaluate('request = async () => new Response(\'{"error": "the workers do not respond"}\', {status: 503})')
    seen.browser.evaluate("load(showQueue)")
    seen.wait_for_text("the workers do not respond")
    assert "Shares" in seen.browser.text()


def test_the_page_with_data_is_accessible(seen: Console) -> None:
    seen.open(PAGE, "admin")
    seen.wait_for_text("Shares")
    servers = [{"state": "ready", "load": "8 of 8"}]
    show(seen, [flow("a", team="x"), flow("b")], [{"id": "m", "state": "ready", "queued": 3, "waiting": "", "servers": servers}])
    seen.wait_for_text("1 server up, with 8 of at most 8 requests in flight.")
    audit(seen.browser)
