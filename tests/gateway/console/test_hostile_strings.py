"""Strings of markup and script in each field that a page of the console or the portal shows: they appear as text, and nothing runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest

from tests.support.console import Console, console
from tests.support.http_server import threaded
from tests.support.process import configuration, launched, wait_for
from tests.support.running import KEY

RUN = "alert(window.__hit=1)"
STRINGS = (
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"<SCRIPT SRC=https://example.com/x.js></SCRIPT><script>{RUN}</script>",
    f"<scr<script>ipt>{RUN}</scr</script>ipt>",
    f"<script type=module>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f'"><img src=x onerror="{RUN}">',
    f"'><img src=x onerror='{RUN}'>",
    f"<img src='https://example.com/x.png' onload={RUN}>",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f"<math><mtext><img src=x onerror={RUN}></math>",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    f'<iframe src="javascript:parent.{RUN}"></iframe>',
    f"<object data='data:text/html,<script>{RUN}</script>'></object>",
    "<embed src=https://example.com/x.swf>",
    "<link rel=stylesheet href=https://example.com/x.css>",
    "<base href=https://example.com/>",
    "<meta http-equiv=refresh content='0;url=https://example.com/'>",
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>",
    f"<input autofocus onfocus={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<marquee onstart={RUN}>",
    f'<a href="javascript:{RUN}">a</a>',
    f"javascript:{RUN}",
    f"JaVaScRiPt:{RUN}//",
    f"data:text/html,<script>{RUN}</script>",
    "vbscript:msgbox(1)",
    f"[a](javascript:{RUN})",
    f"![a](javascript:{RUN})",
    f"[a](data:text/html,<script>{RUN}</script>)",
    f"<javascript:{RUN}>",
    "{{7*7}}",
    "${7*7}",
    "#{7*7}",
    "<%= 7*7 %>",
    "{% for x in y %}{{ x }}{% endfor %}",
    "{{constructor.constructor('window.__hit=1')()}}",
    f"<template><script>{RUN}</script></template>",
    f'<noscript><p title="</noscript><img src=x onerror={RUN}>">',
    f"<textarea></textarea><img src=x onerror={RUN}>",
    f"<title></title><script>{RUN}</script>",
    f"</style><script>{RUN}</script>",
    "<style>@import 'https://example.com/x.css';:root{display:none}</style>",
    "expression(window.__hit=1)",
    "]]>",
    f"<![CDATA[<script>{RUN}</script>]]>",
    f"<!--><script>{RUN}</script>-->",
    f"<?xml version='1.0'?><script>{RUN}</script>",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    "&#x3c;b&#62;&amp;&nbsp;&quot",
    "&#0;&#xffffffff;&notanentity",
    "\u202egnp.exe\u202c\u2066abc",
    "null",
    "undefined",
    "__proto__",
    "[object Object]",
    "'; DROP TABLE gateway_usage; --",
    "=HYPERLINK('https://example.com/','x')",
    "W" * 200,
    "مفتاح <b>مفتاح</b>",
)
NAMES = tuple(dict.fromkeys(re.sub(r"\s", "/", text)[:200] for text in STRINGS if text.isprintable()))
"""The strings that may be an ID: without spaces."""

FEW = 20
"""A long table contains only the rows in its window."""


HEADERS = tuple(text for text in STRINGS if text.isascii() and text.isprintable())[:40]


class Hostile(BaseHTTPRequestHandler):
    """A model server with the strings in the headers of its responses."""

    def do_GET(self) -> None:
        self.respond(200, "application/json", b'{"data": [{"id": "hostile"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "refuse" in str(body["messages"][-1]["content"]):
            error = {"message": HEADERS[0], "type": HEADERS[1], "code": 400}
            return self.respond(400, "application/json", json.dumps({"error": error}).encode())
        chunk = {
            "id": "x",
            "object": "chat.completion.chunk",
            "model": "hostile",
            "choices": [{"index": 0, "delta": {"content": "Served."}}],
        }
        return self.respond(200, "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def respond(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status, HEADERS[0])
        for name, value in {"content-type": kind, "content-length": str(len(body)), "x-request-id": HEADERS[0]}.items():
            self.send_header(name, value)
        for number, text in enumerate(HEADERS):
            self.send_header(f"x-hostile-{number}", text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hostile() -> Iterator[int]:
    with threaded(ThreadingHTTPServer(("127.0.0.1", 0), Hostile)) as server:
        yield server.server_port


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, hostile: int) -> Iterator[Console]:
    folder = tmp_path_factory.mktemp("data")
    config = configuration(launched(**{"sim-preface": "\n\n".join(STRINGS)}), portal=True)
    program = f"import sys; [print(each, file=sys.stderr) for each in {list(STRINGS[:12])!r}]; sys.exit(1)"
    config["models"].append({"id": "broken", "launch": {"command": [sys.executable, "-c", program], "args": {}}})
    config["models"].append({"id": "hostile", "servers": [{"url": f"http://127.0.0.1:{hostile}"}]})
    config["models"][0]["aliases"] = list(NAMES)
    config["keys"] += [{"id": f"{name}", "hash": f"sha256:{at:064x}", "team": name} for at, name in enumerate(NAMES)]
    config["teams"] = [{"id": name, "limits": {"tokens_per_day": 1000}} for name in NAMES]
    config |= {"ledger": {"url": f"sqlite:///{folder / 'usage.db'}", "user": True}, "store": "ledger"}
    config |= {"record": {"store": str(folder / "records"), "keys": ["team-a"], "share": "100%"}}
    with console(tmp_path_factory, config) as one:
        yield one


def send(seen: Console, text: str, model: str) -> str:
    body = {"model": model, "user": text, "max_tokens": 4, "messages": [{"role": "user", "content": "\n\n".join(STRINGS)}]}
    headers = {"authorization": f"Bearer {KEY}", "user-agent": "x"}
    return httpx2.post(f"{seen.gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60).headers["x-request-id"]


def logged(seen: Console) -> list[str]:
    """Return the lines of the log of the model that does not start."""
    found = seen.call("GET", "/status").text
    return [text for text in STRINGS[:12] if json.dumps(text)[1:-1] in found]


def check_text(seen: Console, texts: tuple[str, ...], least: int | None = None) -> None:
    """Wait until the content of the page has all texts, or at least a number of them, and check that nothing ran."""
    missing = f"{json.dumps(texts)}.filter((each) => !document.getElementById('page').textContent.includes(each))"
    most = 0 if least is None else len(texts) - least
    wait_for(lambda: len(seen.browser.evaluate(missing)) <= most, 20, why=lambda: f"these do not appear: {seen.browser.evaluate(missing)}")
    assert seen.browser.evaluate("typeof window.__hit") == "undefined"
    made = "script, iframe, object, embed, base, link, style, math, [onerror], [onload], a[href^='javascript'], a[href^='data']"
    assert seen.browser.evaluate(f"document.querySelectorAll({json.dumps(made)}).length") == seen.browser.evaluate(
        "document.scripts.length + document.querySelectorAll('head > :is(style, link)').length"
    )
    assert seen.browser.evaluate("document.scripts.length") == 1
    assert [each for each in seen.browser.complaints if "status of 404" not in each] == []  # there is no store of keys
    assert {each for each in seen.browser.requests if not each.startswith((seen.url, seen.gateway.url, "data:", "about:"))} == set()


def test_every_field_shows_them_as_text(seen: Console) -> None:
    """One test, because the pages show what the requests have left behind."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: send(seen, text, text or "x"), STRINGS))
    identity = send(seen, STRINGS[0], "sim/one")
    labels = {f"label-{at}": text for at, text in enumerate(STRINGS)}
    created = seen.call("POST", "/admin/v1/keys", json={"id": "labeled", "labels": labels})
    assert created.status_code == 201, created.text
    wait_for(lambda: seen.call("GET", f"/admin/v1/requests/{identity}/record").status_code == 200)
    wait_for(lambda: len(seen.call("GET", "/admin/v1/requests").json()["requests"]) > len(STRINGS))
    seen.browser.resize(1440, 9000)
    seen.open("/console/requests")
    rows: list[dict[str, Any]] = seen.call("GET", "/admin/v1/requests").json()["requests"]
    fields = {each[name] for each in rows for name in ("user", "requested_model") if each.get(name)}
    assert len(fields & set(STRINGS)) > 50
    check_text(seen, tuple(fields))
    seen.open(f"/console/requests?id={identity}")
    seen.click("#show-record")
    seen.wait("!document.getElementById('show-record')")
    check_text(seen, tuple(json.dumps(text, ensure_ascii=False)[1:-1] for text in STRINGS[:50]))
    for path in ("/console/keys", "/console/teams"):
        seen.open(path)
        check_text(seen, NAMES, FEW)
    seen.open("/console/keys?id=labeled")
    check_text(seen, tuple(labels.values()))
    lines = wait_for(lambda: logged(seen), 20)
    seen.open("/console/models")
    check_text(seen, (*lines, *NAMES))


def test_the_portal_shows_them_as_text(seen: Console) -> None:
    seen.browser.open("about:blank")
    seen.browser.open(f"{seen.gateway.url}/portal/playground?model=sim/one#key={KEY}")
    seen.wait("document.querySelector('.column')")
    seen.browser.evaluate(f"document.getElementById('prompt').value = {json.dumps(chr(10).join(STRINGS))}")
    seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
    seen.wait("document.querySelector('.figures') && document.getElementById('send').textContent === 'Send'")
    reply = "document.querySelector('.answer').textContent"
    lost = f"{json.dumps(STRINGS)}.filter((each) => !{reply}.includes(each))"
    assert seen.browser.evaluate(lost) == []
    check_text(seen, STRINGS)


def test_the_headers_of_a_response_change_nothing_in_the_portal(seen: Console) -> None:
    seen.browser.complaints.clear()
    seen.browser.open("about:blank")
    seen.browser.open(f"{seen.gateway.url}/portal/playground?model=hostile#key={KEY}")
    for prompt, part, text in (("Hello", ".answer", "Served."), ("refuse", ".answer .error", HEADERS[0])):
        seen.wait("document.querySelector('.column')")
        seen.browser.evaluate(f"document.getElementById('prompt').value = {prompt!r}")
        seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
        seen.wait(f"[...document.querySelectorAll({part!r})].some((one) => one.textContent.includes({json.dumps(text)}))")
        seen.wait("document.getElementById('send').textContent === 'Send'")
    seen.browser.complaints[:] = [each for each in seen.browser.complaints if "status of 400" not in each]
    check_text(seen, (HEADERS[0],))
    conversation = seen.browser.evaluate("document.querySelector('.column').textContent")
    assert [text for text in HEADERS if text in conversation] == [HEADERS[0]], "a header is shown"
