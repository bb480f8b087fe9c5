"""The first page of the console: state, last hour, alerts and changes, live by events, for each role."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx2
import pytest

from tests.support.console import TOKENS, Console, check_quiet, console, written
from tests.support.process import configuration, launched, wait_for

FAR = "far/<img/src=x/onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder = tmp_path_factory.mktemp("audit")
    (folder / "secret").write_text("a-secret-of-the-audit-log")
    config = configuration(launched(), {"id": FAR, "servers": [{"url": "http://127.0.0.1:9"}]})
    config["audit"] = {"secret": {"file": str(folder / "secret")}, "file": str(folder / "audit.jsonl")}
    with console(tmp_path_factory, config) as one:
        yield one


@pytest.fixture(autouse=True)
def no_complaint(seen: Console) -> Iterator[None]:
    seen.browser.complaints.clear()
    yield
    check_quiet(seen)


def test_the_state_the_alerts_and_the_changes_in_words(seen: Console) -> None:
    seen.call("POST", "/servers/sim%2Fone%230/cordon")
    seen.call("POST", "/servers/sim%2Fone%230/uncordon")
    seen.open("/console")
    seen.wait_for_text("Degraded. Some requests cannot be served as configured.")
    seen.wait_for_text("No server of " + FAR)
    seen.wait_for_text("server.uncordon")
    text = seen.browser.text()
    assert "by token an-admin" in text and "VllmGatewayNoHealthyServer" in text and "no ledger is configured" in text
    assert seen.browser.evaluate("document.querySelectorAll('.chart svg').length") == 4
    seen.fits()


def test_an_alert_that_fires_is_in_the_headline_with_a_link(seen: Console) -> None:
    seen.open("/console")
    seen.wait("latest?.alerts")
    alert = "{name: 'A', summary: 'keys are nearly used', severity: 'warning', since: 1, fires: 2, page: '/console/keys'}"
    pending = "{name: 'B', summary: 'later', severity: 'warning', since: 1, fires: 1e12, page: '/console/models'}"
    shown = "paused = true; latest = {...latest, status: 'ready', reasons: [], alerts: [%s]}; showVerdict(); $('verdict').innerText"
    text = seen.browser.evaluate(shown % f"{alert}, {pending}")
    assert text.split("\n", 1)[0] == "Ready, 1 alert fires." and "Keys are nearly used" in text and "Later" not in text
    links = "[...document.querySelectorAll('#verdict a')].map((one) => one.getAttribute('href'))"
    assert seen.browser.evaluate(links) == ["#alerts-title", "/console/keys"]
    assert seen.browser.evaluate("$('verdict').dataset.status") == "degraded"
    text = seen.browser.evaluate(shown % ", ".join([alert] * 5))
    assert text.startswith("Ready, 5 alerts fire.") and "2 more alerts" in text
    assert seen.browser.evaluate(shown % pending).startswith("Ready. All models are served as configured.")


def test_the_page_follows_the_gateway_until_it_is_paused(seen: Console) -> None:
    seen.open("/console")
    seen.wait("hour.points.length > 0")
    first = seen.browser.evaluate("latest.time")
    assert seen.gateway.request().status_code == 200
    seen.wait("hour.points.some((point) => point[1] > 0)")
    assert seen.browser.evaluate("latest.time") > first
    assert seen.browser.evaluate("document.querySelectorAll('.chart table tbody tr').length") == 4 * 12
    seen.click("#pause")
    seen.wait_for_text("Paused at")
    paused = seen.browser.evaluate("latest.time")
    received = seen.call("GET", "/admin/v1/overview").json()["time"]
    wait_for(lambda: seen.call("GET", "/admin/v1/overview").json()["time"] > received)
    assert seen.browser.evaluate("latest.time") == paused
    seen.click("#pause")
    seen.wait(f"latest.time > {paused}")


def test_a_viewer_sees_no_changes_and_why(seen: Console) -> None:
    seen.open("/console", "viewer")
    seen.wait_for_text("The audit log needs the role admin.")
    assert seen.buttons() == ["Pause"]
    assert seen.call("GET", "/admin/v1/overview/changes", "operator").status_code == 403


def test_the_first_point_after_a_start_is_shown_whichever_way_its_time_is_rounded(seen: Console) -> None:
    seen.open("/console")
    seen.wait("latest?.alerts")
    event = "{...latest, time: 100.04, point: [100, ...hour.columns.slice(1).map(() => 0)]}"
    assert seen.browser.evaluate(f"paused = true; hour.points = []; showEvent({event}); hour.points.length") == 1


def test_without_a_gateway_the_page_says_so_and_recovers(seen: Console) -> None:
    seen.open("/console")
    seen.wait("hour?.points.length > 0 && !latest.history")  # after its first event: its beginning would hide the message
    seen.browser.evaluate("window.before = fetch; fetch = () => Promise.reject(new TypeError('Failed to fetch')); load(fetchAll)")
    seen.wait_for_text("The gateway does not respond. This page tries again by itself.")
    assert "Degraded" in seen.browser.text()  # it keeps what it shows
    assert "Live" not in seen.browser.text()
    seen.browser.evaluate("void (fetch = window.before)")  # a function as the value would be called
    seen.wait("document.getElementById('lost').hidden && document.body.innerText.includes('Live')")


def test_a_reader_whose_token_is_revoked_gets_no_further_event(seen: Console) -> None:
    received: list[str] = []

    def read() -> None:
        headers = {"authorization": f"Bearer {TOKENS['operator']}"}
        with httpx2.stream("GET", f"{seen.url}/admin/v1/overview/events", headers=headers, timeout=60) as response:
            received.extend(line for line in response.iter_lines() if line)
        received.append("ended")

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: seen.call("GET", "/admin/v1/overview").json())
    file, before = seen.gateway.folder / "gateway.yaml", (seen.gateway.folder / "gateway.yaml").read_text()
    written(file, ("name: an-operator\n", "name: an-operator\n      expires: 2020-01-01\n"))
    reader.join(30)
    assert received[-1] == "ended" and received[0].startswith("data: {")
    file.write_text(before)
    wait_for(lambda: seen.call("GET", "/admin/v1/overview", "operator").status_code == 200)
