"""The status page: one HTML document that updates itself.

It loads nothing from other hosts. Its content security policy permits only the script and the style below, by their hashes, so a model ID
or a log line is always shown as text.
"""

from __future__ import annotations

from gateway.admin.status_view import AdapterRow, ModelRow, ServerRow, StatusView, counted
from gateway.api.html import Html, page_policy, tag

_STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f9; --card: #ffffff; --line: #e3e6eb; --text: #1c2330; --quiet: #667085; --well: #f0f2f5;
  --ready: #12825a; --starting: #b26a00; --draining: #7a5af0; --sleeping: #3b74c4; --stopped: #8a93a3; --failed: #c9312b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #12151b; --card: #1a1e26; --line: #2a303b; --text: #e4e8ef; --quiet: #96a0b2; --well: #12161d;
    --ready: #3fc48e; --starting: #e9a23b; --draining: #a893ff; --sleeping: #76a9f0; --stopped: #7f899a; --failed: #ff7a70;
  }
}
* { box-sizing: border-box; margin: 0; }
body { background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.frame { max-width: 58rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.15rem; font-weight: 650; letter-spacing: -0.01em; display: flex; align-items: center; gap: .6rem; flex-wrap: wrap; }
.facts { color: var(--quiet); list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0 1.2rem; margin: .35rem 0 1.4rem; }
.model { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1rem 1.15rem; margin-bottom: .9rem; }
.title { display: flex; align-items: baseline; gap: .3rem .7rem; flex-wrap: wrap; }
h2 { font-size: 1.02rem; font-weight: 620; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); }
.small { font-size: .87rem; }
.state { color: var(--tone); font-weight: 600; font-size: .87rem; white-space: nowrap; }
.state::before { content: ""; display: inline-block; width: .55em; height: .55em; border-radius: 50%; background: currentColor;
  margin-right: .45em; vertical-align: .06em; }
h1 .state { white-space: normal; overflow-wrap: anywhere; min-width: 0; }
.starting::before { animation: breathe 1.6s ease-in-out infinite; }
@keyframes breathe { 50% { opacity: .25; } }
@media (prefers-reduced-motion: reduce) { .starting::before { animation: none; } }
.ready { --tone: var(--ready); } .starting, .degraded { --tone: var(--starting); } .draining { --tone: var(--draining); }
.sleeping { --tone: var(--sleeping); } .stopped { --tone: var(--stopped); } .failed { --tone: var(--failed); }
.numbers { display: flex; flex-wrap: wrap; gap: .3rem 2rem; margin: .7rem 0 .2rem; }
.numbers dt { color: var(--quiet); font-size: .78rem; }
.numbers dd { margin: 0; font-variant-numeric: tabular-nums; font-weight: 600; }
.parts { list-style: none; padding: 0; }
.parts > li { border-top: 1px solid var(--line); padding: .55rem 0 .1rem; margin-top: .55rem; }
.row { display: flex; flex-wrap: wrap; gap: 0 .9rem; align-items: baseline; }
.name, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.name { font-size: .85rem; overflow-wrap: anywhere; }
.reason { color: var(--failed); overflow-wrap: anywhere; font-size: .9rem; margin-top: .2rem; }
.hint { overflow-wrap: anywhere; font-size: .9rem; margin-top: .2rem; }
ul.reason { padding-left: 1.2rem; margin-bottom: .9rem; }
.progress { color: var(--quiet); font-size: .87rem; overflow-wrap: anywhere; margin-top: .2rem; }
progress { width: 100%; height: .4rem; margin-top: .4rem; accent-color: var(--starting); display: block; }
summary { color: var(--quiet); cursor: pointer; font-size: .87rem; margin-top: .25rem; width: fit-content; }
pre { background: var(--well); border-radius: 8px; padding: .7rem .8rem; margin: .4rem 0 .3rem; overflow: auto; font-size: .78rem;
  line-height: 1.55; max-height: 24rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.path { color: var(--quiet); font-size: .78rem; overflow-wrap: anywhere; margin-bottom: .4rem; }
.lost { display: none; background: var(--failed); color: var(--card); border-radius: 8px; padding: .5rem .9rem; margin-bottom: 1rem; }
.silent .lost { display: block; }
.silent main { opacity: .5; }
"""

# A part with unchanged markup is not replaced, so that a selection in it is not lost.
_SCRIPT = """
"use strict";
const EVERY = 2000;
const keyed = (root) => new Map([...root.querySelectorAll("details")].map((one) => [one.dataset.key, one]));
function takeOver(next) {
  document.title = next.title;
  const open = keyed(document), places = new Map([...open].map(([key, one]) => [key, place(one)]));
  for (const [key, one] of keyed(next)) if (open.has(key)) one.open = open.get(key).open;
  const now = [...document.querySelectorAll("[data-part]")], then = [...next.querySelectorAll("[data-part]")];
  if (now.map((one) => one.dataset.part).join() !== then.map((one) => one.dataset.part).join())
    document.querySelector("main").replaceWith(next.querySelector("main"));
  else now.forEach((one, at) => { if (one.outerHTML !== then[at].outerHTML) one.replaceWith(then[at]); });
  for (const [key, one] of keyed(document)) scroll(one, places.get(key));
}
// A log is shown from its end, and stays where the reader has scrolled.
function place(one) {
  const log = one.querySelector("pre");
  return one.open && log.scrollTop + log.clientHeight < log.scrollHeight - 4 ? log.scrollTop : undefined;
}
function scroll(one, top) {
  const log = one.querySelector("pre");
  log.scrollTop = top ?? log.scrollHeight;
}
document.addEventListener("toggle", (event) => { if (event.target.open) scroll(event.target); }, true);
async function update() {
  try {
    const response = await fetch(location.pathname, { headers: { accept: "text/html" }, cache: "no-store" });
    takeOver(new DOMParser().parseFromString(await response.text(), "text/html"));
    document.body.classList.remove("silent");
  } catch {
    document.body.classList.add("silent");
  }
  setTimeout(update, EVERY);
}
for (const one of keyed(document).values()) scroll(one);
setTimeout(update, EVERY);
"""


HEADERS = page_policy(_STYLE, _SCRIPT)
"""The response headers of the page."""


_TONES = {"ready": "ready", "degraded": "degraded", "not ready": "starting"}


def page(shown: StatusView) -> str:
    """Return the page."""
    head = _html_head(shown.headline, tag("noscript", tag("meta", http_equiv="refresh", content="5")))
    lost = tag("p", "The gateway does not respond. This is its last known status.", class_="lost", role="alert")
    main = tag("main", _head(shown), *map(_model, shown.models), _splits(shown))
    body = tag("body", tag("div", lost, main, class_="frame"), tag("script", Html(_SCRIPT)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}"


def token_page() -> str:
    """Return the page for a browser without the required token: it explains how to see the status."""
    ways = (
        ("On the gateway's own machine, as its user, no token is needed:", "vllm-gateway status"),
        ("From elsewhere, with the token in a file:", "vllm-gateway status --admin http://HOST:PORT --token-file FILE"),
        ("Or with any HTTP client:", 'curl -H "Authorization: Bearer TOKEN" http://HOST:PORT/status'),
    )
    steps = [tag("div", tag("p", text), tag("pre", command)) for text, command in ways]
    cause = "The admin port requires its token (server.admin.token), and a browser does not send one by itself."
    title = tag("h1", "vllm-gateway", _state("degraded", "a token is required"))
    card = tag("article", *steps, class_="model")
    body = tag("body", tag("div", tag("main", tag("header", title, _list((cause,), "facts")), card), class_="frame"))
    return f"<!doctype html>\n{tag('html', _html_head('a token is required'), body, lang='en')}"


def _html_head(title: str, *more: Html) -> Html:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} \N{MIDDLE DOT} vllm-gateway"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_STYLE)),
        *more,
    )


def _head(shown: StatusView) -> Html:
    title = tag("h1", "vllm-gateway", _state(_TONES[shown.state], shown.headline))
    warnings = _list(shown.warnings, "reason") if shown.warnings else Html()
    return tag("header", title, _list(shown.facts, "facts"), warnings, data_part="head")


def _splits(shown: StatusView) -> Html:
    return tag("section", _list(shown.splits, "facts"), data_part="splits") if shown.splits else Html()


def _list(texts: tuple[str, ...], kind: str) -> Html:
    return tag("ul", *(tag("li", text) for text in texts), class_=kind)


def _state(state: str, text: str | None = None) -> Html:
    return tag("span", text or state, class_=f"state {state}")


def _quiet(text: str) -> Html:
    return tag("span", text, class_="quiet small") if text else Html()


def _model(model: ModelRow) -> Html:
    notes = (_quiet(_for(model.since)), _quiet(f"also {', '.join(model.aliases)}" if model.aliases else ""))
    title = tag("div", tag("h2", model.id), _state(model.state), *notes, class_="title")
    parts = [*(tag("li", _server(server)) for server in model.servers), *(tag("li", _adapter(one)) for one in model.adapters)]
    return tag("article", title, _numbers(model), tag("ul", *parts, class_="parts"), class_="model", data_part=model.id)


def _for(since: str) -> str:
    return f"for {since}" if since else ""


def _numbers(model: ModelRow) -> Html:
    queued = f"{model.queued} (longest {model.waiting})" if model.waiting else str(model.queued)
    pairs = {"in flight": str(model.in_flight), "queued": queued, "tokens per second": model.speed}
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs.items()), class_="numbers")


def _server(server: ServerRow) -> Html:
    counts = [f"{server.load} in flight"] + ([counted(server.restarts, "restart")] if server.restarts else [])
    row = tag("div", tag("span", server.name, class_="name"), _state(server.state), _quiet(_for(server.since)), _quiet(", ".join(counts)),
              class_="row")  # fmt: skip
    bar = tag("progress", value=str(server.percent), max="100") if server.percent is not None else Html()
    progress = tag("p", server.progress, class_="progress") if server.progress else Html()
    reason = tag("p", server.reason, class_="reason") if server.reason else Html()
    failure = tag("p", server.last_failure, class_="progress") if server.last_failure else Html()
    hint = tag("p", f"Hint: {server.hint}", class_="hint") if server.hint else Html()
    return Html(row + bar + progress + reason + failure + hint + _log(server))


def _log(server: ServerRow) -> Html:
    """Return the end of the log. It is expanded if the server has failed."""
    if not server.lines:
        return Html()
    key = f"{server.name} {server.state}"
    inside = (tag("summary", "end of the log"), tag("pre", "\n".join(server.lines)), tag("p", server.log, class_="path"))
    return tag("details", *inside, open=server.state == "failed", data_key=key)


def _adapter(one: AdapterRow) -> Html:
    counts = f"{one.in_flight} in flight" + (f", {one.speed} tokens per second" if one.speed != "-" else "")
    return tag("div", tag("span", one.id, class_="name"), _quiet("LoRA adapter"), _quiet(counts), class_="row")
