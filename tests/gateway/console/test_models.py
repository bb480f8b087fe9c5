"""The page of models: every state with its cause, updates by itself, opened sections, and the actions of each role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from gateway.auth.keys import hash_of
from tests.gateway.console.test_pages import Seen
from tests.support.chromium import chromium
from tests.support.process import configuration, gateway, launched, wait_for

ADMIN, VIEWER = "token-of-an-admin", "token-of-a-viewer"
HOSTILE = "sim/<img/src=x/onerror=document.title='owned'>"
ATTACK = "</pre><script>document.title='owned'</script><style>*{display:none}</style>"
STARTING = "sim/starting-a-quantized-model-with-a-name-of-the-usual-length-" + "x" * 130
PAGE = "/console/models"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    tokens = [{"name": name, "hash": hash_of(token), "role": name} for name, token in (("admin", ADMIN), ("viewer", VIEWER))]
    failing = launched("sim/failed", **{"reasoning-parser": ATTACK})
    models = [launched(), launched(STARTING, **{"sim-listen-after": 600}), failing, launched(HOSTILE)]
    models[0] |= {"aliases": ["one"], "loras": [{"id": "sim/adapter", "path": "/x"}], "max_inflight": 8, "balance": "cost"}
    models[0] |= {"cost_policy": {"kv_cache_tokens": 10000, "explain": True}}
    models[0]["launch"]["replicas"] = 2
    models.append({"id": "<b>split</b>", "split": {"sim/one": 3, HOSTILE: 1}})
    config = configuration(*models, admin={"port": 0, "tokens": tokens})
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(folder, config, ready=False) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield Seen(one, browser)


@pytest.fixture(autouse=True)
def no_complaint(seen: Seen) -> Iterator[None]:
    """Fail a test after which the browser has an error, or requested another host."""
    yield
    assert seen.browser.complaints == []
    assert {each for each in seen.browser.requests if not each.startswith((seen.url, "data:", "about:"))} == set()


def card(model: str) -> str:
    return f"[...document.querySelectorAll('.model')].find((one) => one.dataset.name === {model!r})"


def state(model: str, is_state: str) -> str:
    return f"{card(model)}?.dataset.state === {is_state!r}"


def click(seen: Seen, label: str) -> None:
    button = f"[...document.querySelectorAll('[data-act]')].find((one) => one.dataset.act === {label!r})"
    seen.wait(button)
    seen.browser.evaluate(f"{button}.click()")


def confirm(seen: Seen, *texts: str) -> None:
    """Check the texts of the open dialog, and confirm it. It closes when the action is complete."""
    seen.wait("document.querySelector('dialog[open]')")
    shown = seen.browser.evaluate("document.querySelector('dialog').innerText")
    assert all(text in shown for text in texts), shown
    seen.browser.evaluate("document.querySelector('dialog form').requestSubmit()")
    seen.wait("!document.querySelector('dialog')")


def test_every_state_is_shown_with_the_cause_first(seen: Seen) -> None:
    seen.open(PAGE, VIEWER)
    for model, is_state in (("sim/one", "ready"), (HOSTILE, "ready"), ("sim/failed", "failed"), (STARTING, "starting")):
        seen.wait(state(model, is_state))
    seen.wait("document.querySelector('.model').dataset.name === 'sim/failed'")
    seen.wait(f"{card('sim/failed')}.innerText.includes('no parser of this name')")
    text = seen.browser.evaluate(f"{card('sim/failed')}.innerText")
    assert text.index("no parser of this name") < text.index("What to do: ") < text.index("End of the log")
    assert seen.browser.evaluate(f"{card('sim/failed')}.querySelector('details').open"), "the log of a failed server is open"
    one = seen.browser.evaluate(f"{card('sim/one')}.innerText")
    assert "also one" in one and "0 of 8 in flight" in one and "sim/adapter" in one
    assert "<b>split</b>: " in seen.browser.text() and "sim/one 75%" in seen.browser.text()


def test_names_and_lines_of_logs_stay_text(seen: Seen) -> None:
    seen.open(PAGE, VIEWER)
    seen.wait(f"document.body.innerText.includes({HOSTILE!r}) && document.body.innerText.includes({ATTACK[:40]!r})")
    assert seen.browser.evaluate("document.title") == "Models · vllm-gateway"
    assert seen.browser.evaluate("document.querySelectorAll('main img, main script, main style').length") == 0


def test_a_viewer_sees_no_action(seen: Seen) -> None:
    seen.open(PAGE, VIEWER)
    seen.wait(state("sim/one", "ready"))
    assert seen.browser.evaluate("document.querySelectorAll('.model button').length") == 0


def test_the_operations_on_a_model_are_confirmed_and_shown(seen: Seen) -> None:
    seen.open(PAGE, ADMIN)
    seen.wait(state("sim/one", "ready"))
    seen.browser.evaluate("window.still = 'here'")
    click(seen, "Stop sim/one")
    confirm(seen, "Stops 2 servers of sim/one", "No request is in flight.", "vllm-gateway stop sim/one")
    seen.wait(state("sim/one", "stopped"))
    assert seen.browser.evaluate("document.querySelector('.toast').textContent") == "sim/one: It is stopped."
    click(seen, "Start sim/one")
    confirm(seen, "Starts 2 servers of sim/one", "vllm-gateway start sim/one")
    seen.wait(state("sim/one", "ready"))
    assert seen.browser.evaluate("window.still") == "here", "the page was not loaded again"
    click(seen, f"Restart {HOSTILE}")
    confirm(
        seen,
        "Replaces 1 server of",
        "New requests wait in the queue",
        "vllm-gateway restart 'sim/<img/src=x/onerror=document.title='\\''owned",
    )
    wait_for(lambda: "restart has begun" in seen.browser.text())
    seen.wait(state(HOSTILE, "ready"))


def test_one_server_leaves_the_rotation_and_returns(seen: Seen) -> None:
    seen.open(PAGE, ADMIN)
    seen.wait(state("sim/one", "ready"))
    click(seen, "Take out of rotation: sim/one#0")
    confirm(
        seen,
        "Take sim/one#0 out of rotation",
        "sim/one#0 gets no new requests",
        "Streams that can be continued move to another server",
        "1 other server of sim/one can serve.",
        "vllm-gateway cordon sim/one#0",
    )
    seen.wait(f"{card('sim/one')}.querySelector('.server .state').textContent === 'out of rotation'")
    seen.wait(f"{card('sim/one')}.querySelector('.cause code')?.textContent === 'cordon'")
    click(seen, "Return to rotation: sim/one#0")
    confirm(seen, "sim/one#0 gets new requests again.", "vllm-gateway uncordon sim/one#0")
    seen.wait(f"!{card('sim/one')}.innerText.includes('out of rotation by')")


def test_the_last_choice_is_explained_and_an_opened_section_stays_open(seen: Seen) -> None:
    seen.open(PAGE, VIEWER)
    seen.wait(state("sim/one", "ready"))
    log = f"{card('sim/one')}.querySelector('.server details')"
    seen.browser.evaluate(f"{log}.open = true; {log}.querySelector('pre').style.maxHeight = '2rem'")
    hidden = f"{log}.querySelector('pre').scrollHeight - {log}.querySelector('pre').clientHeight - {log}.querySelector('pre').scrollTop"
    wait_for(lambda: seen.browser.evaluate(hidden) < 2, why=seen.browser.text)  # it is shown from its end
    identity = seen.gateway.request().headers["x-request-id"]
    seen.wait(f"{card('sim/one')}.querySelector('.choice a')?.textContent === {identity!r}")
    seen.browser.evaluate(f"{card('sim/one')}.querySelector('.choice').open = true")
    assert seen.browser.evaluate(f"{card('sim/one')}.querySelectorAll('.choice tbody tr').length") == 2
    following = seen.gateway.request().headers["x-request-id"]
    seen.wait(f"{card('sim/one')}.querySelector('.choice a').textContent === {following!r}")
    assert seen.browser.evaluate(f"{log}.open && {card('sim/one')}.querySelector('.choice').open")


def test_the_filters_are_in_the_address(seen: Seen) -> None:
    seen.open(f"{PAGE}?state=ready&find=SIM%2FONE", VIEWER)
    seen.wait(state("sim/one", "ready"))
    assert seen.browser.evaluate("document.querySelectorAll('.model').length") == 1
    click(seen, "starting")
    seen.wait("!document.querySelector('.model') && document.getElementById('models-note').innerText.startsWith('No model matches')")
    assert seen.browser.evaluate("location.search") == "?state=starting&find=SIM%2FONE"


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_is_not_wider_than_the_window(seen: Seen, width: int) -> None:
    seen.browser.resize(width, 900)
    seen.open(PAGE, ADMIN)
    seen.wait(state("sim/one", "ready"))
    assert seen.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_route_has_the_texts_of_the_terminal(seen: Seen) -> None:
    def failed_model() -> dict[str, Any] | None:
        response = httpx2.get(seen.url + "/admin/v1/models", headers={"authorization": f"Bearer {VIEWER}"}, timeout=30)
        assert response.headers["cache-control"] == "no-store"
        found: dict[str, Any] = next(each for each in response.json()["models"] if each["id"] == "sim/failed")
        return found if found["operations"] == ["restart", "stop"] else None  # while it is started again, it can only be stopped

    failed = wait_for(failed_model)
    printed = seen.gateway.command("status").stdout
    assert failed["servers"][0]["hint"] in printed.replace("\n", " ")
