"""The page at /status in a browser: every state, automatic updates, and text that is never markup."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.support.chromium import Chromium, chromium
from tests.support.process import SIMULATOR, Gateway, configuration, gateway, launched, wait_for

HOSTILE = "sim/<img/src=x/onerror=document.title='owned'>"
ATTACK = "</pre><script>document.title='owned'</script><style>*{display:none}</style>"
STATES = ("ready", "starting", "failed", "stopped")
STARTING = "sim/starting-a-quantized-model-with-a-name-of-the-usual-length"
"""The headline has its name, which does not fit into one line of a phone."""
PICTURES = os.environ.get("PICTURES")


@dataclass
class Seen:
    gateway: Gateway
    browser: Chromium

    def state(self, model: str) -> str:
        """Return the state on the card of a model."""
        cards = "[...document.querySelectorAll('article')]"
        return str(self.browser.evaluate(f"{cards}.find((one) => one.dataset.part === {model!r})?.querySelector('.state').innerText"))


def command(one: Gateway, *arguments: str) -> str:
    """Run a command on the gateway and check that it succeeds."""
    done = one.command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("gateway")
    failing = launched("sim/failed", **{"reasoning-parser": ATTACK})
    models = [launched(), launched(STARTING, **{"sim-listen-after": 600}), failing, launched("sim/stopped"), launched(HOSTILE)]
    models[0] |= {"aliases": ["one"], "loras": [{"id": "sim/adapter", "path": "/x"}]}
    with gateway(folder, configuration(*models), ready=False) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        wait_for(lambda: one.get("/livez").status_code == 200)
        command(one, "stop", "sim/stopped")
        browser.resize(1000, 1700)
        browser.open(f"http://127.0.0.1:{one.admin}/status")
        yield Seen(one, browser)


def test_every_state_is_shown(seen: Seen) -> None:
    wait_for(lambda: seen.state("sim/one") == seen.state(HOSTILE) == "ready" and seen.state("sim/failed") == "failed")
    assert (seen.state(STARTING), seen.state("sim/stopped")) == ("starting", "stopped")
    wait_for(lambda: "1 of 1 worker up" in seen.browser.text() and "no parser of this name" in seen.browser.text())
    text = seen.browser.text()
    assert "also one" in text and "sim/adapter" in text
    for width in (1000, 390):
        for scheme in ("light", "dark"):
            seen.browser.resize(width, 1700)
            seen.browser.prefer(scheme)
            assert seen.browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
            if PICTURES:
                seen.browser.screenshot(Path(PICTURES) / f"status-{width}-{scheme}.png")


def test_a_change_appears_by_itself(seen: Seen) -> None:
    wait_for(lambda: seen.state("sim/stopped") == "stopped")
    seen.browser.evaluate("window.still = 'here'")
    assert command(seen.gateway, "start", "sim/stopped").startswith("sim/stopped: ")
    wait_for(lambda: seen.state("sim/stopped") == "ready")
    command(seen.gateway, "stop", "sim/stopped")
    wait_for(lambda: seen.state("sim/stopped") == "stopped")
    assert seen.browser.evaluate("window.still") == "here", "the page was not loaded again"


def test_an_opened_section_stays_open(seen: Seen) -> None:
    wait_for(lambda: seen.state("sim/one") == "ready")
    details = "[...document.querySelectorAll('details')].find((one) => one.dataset.key === 'sim/one#0 ready')"
    seen.browser.evaluate(f"{details}.open = true")
    seen.browser.evaluate(f"{details}.dataset.old = 'yes'")
    log = f"{details}.querySelector('pre')"
    seen.browser.evaluate(f"{log}.style.maxHeight = '2rem'")
    hidden = f"{log}.scrollHeight - {log}.clientHeight - {log}.scrollTop"
    wait_for(lambda: seen.browser.evaluate(hidden) < 2, why=seen.browser.text)  # it is shown from its end
    seen.gateway.request()
    wait_for(lambda: seen.browser.evaluate(f"{details}.dataset.old") is None, why=seen.browser.text)
    assert seen.browser.evaluate(f"{details}.open") is True


def test_names_and_lines_of_logs_stay_text(seen: Seen) -> None:
    wait_for(lambda: HOSTILE in seen.browser.text() and ATTACK in seen.browser.text())
    assert "owned" not in seen.browser.evaluate("document.title")
    assert seen.browser.evaluate("document.querySelectorAll('img').length") == 0
    assert seen.browser.evaluate("document.querySelectorAll('script').length") == 1


def test_the_browser_reports_no_violation_and_runs_no_other_script(seen: Seen) -> None:
    wait_for(lambda: seen.state("sim/one") == "ready")
    assert seen.browser.complaints == []
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = true'; document.body.append(s); 1"
    seen.browser.evaluate(script)
    seen.browser.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0); 1")
    wait_for(lambda: (seen.browser.text(), len(seen.browser.complaints))[1] >= 2)
    assert seen.browser.evaluate("window.ran === undefined")
    assert all("Content Security Policy" in complaint for complaint in seen.browser.complaints)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "text/html; charset=utf-8"),
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("application/json, text/html;q=0.5", "application/json"),
        ("text/html;q=0", "application/json"),
        ("text/html;q=nonsense", "application/json"),
        ("", "application/json"),
    ],
)
def test_a_client_that_accepts_html_gets_html(seen: Seen, accept: str, kind: str) -> None:
    response = httpx2.get(f"http://127.0.0.1:{seen.gateway.admin}/status", headers={"accept": accept}, timeout=10)
    assert (response.status_code, response.headers["content-type"], response.headers["vary"]) == (200, kind, "accept")


def test_a_stopped_gateway_is_reported(tmp_path: Path, seen: Seen) -> None:
    with gateway(tmp_path, configuration(launched())) as one:
        seen.browser.open(f"http://127.0.0.1:{one.admin}/status")
        wait_for(lambda: seen.state("sim/one") == "ready")
        assert "does not respond" not in seen.browser.text()
    wait_for(lambda: "The gateway does not respond" in seen.browser.text())


def test_a_request_that_wakes_a_model_is_shown(tmp_path: Path, seen: Seen) -> None:
    """The request has the name of an adapter, so its base is woken."""
    fifo, model = tmp_path / "fifo", launched("sim/lazy") | {"loras": [{"id": "sim/l", "path": "/x"}]}
    os.mkfifo(fifo)
    model["launch"] |= {"start": "on_demand", "command": ["sh", "-c", f'read go <{fifo} && exec "$@"', "-", *SIMULATOR]}
    model["queue"] = {"wait": "2m"}
    with gateway(tmp_path, configuration(model)) as one:
        seen.browser.open(f"http://127.0.0.1:{one.admin}/status")
        wait_for(lambda: seen.state("sim/lazy") == "stopped", why=seen.browser.text)
        responses: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: responses.append(one.request(model="sim/l")))
        thread.start()
        wait_for(lambda: seen.state("sim/lazy") == "starting" and "1 (longest" in seen.browser.text(), why=seen.browser.text)
        fifo.write_text("go\n")
        wait_for(lambda: seen.state("sim/lazy") == "ready", why=seen.browser.text)
        thread.join(60)
        assert (responses[0].status_code, responses[0].json()["model"]) == (200, "sim/l")
