"""The pages of the sign-in: plain HTML without scripts. Every text is escaped, and the policy permits nothing but the style below."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from gateway.api.html import Html, page_policy, tag

_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --card: #fff; --line: #d5dae2; --text: #1c2330; --quiet: #566074; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12151b; --card: #1a1e26; --line: #39414f; --text: #e4e8ef; --quiet: #a3adbd; }
}
* { box-sizing: border-box; }
body { background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; margin: 0; }
main { max-width: 26rem; margin: 12vh auto 2rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; }
p { color: var(--quiet); overflow-wrap: anywhere; }
a.way, button { display: block; width: 100%; padding: .7rem 1rem; margin: .6rem 0; background: var(--card); color: var(--text);
  font: inherit; text-align: left; text-decoration: none; border: 1px solid var(--line); border-radius: 8px; cursor: pointer;
  overflow-wrap: anywhere; }
a.way:focus-visible, button:focus-visible { outline: 3px solid #3b74c4; outline-offset: 2px; }
"""

HEADERS = page_policy(_STYLE, form_action="'self'") | {
    "cache-control": "no-store",
    "referrer-policy": "same-origin",  # without a referrer a form's Origin would be null (Fetch Standard, "append a request Origin header")
}


def choice(issuers: Sequence[tuple[str, str]], return_to: str) -> str:
    """Return the page on which a person chooses an issuer. ``issuers`` are IDs and names."""
    if not issuers:
        return _page("Sign in", tag("p", "Ask an administrator of this gateway for a sign-in link (vllm-gateway login-link)."))
    links = [
        tag("a", f"Continue with {name}", class_="way", href=f"/sign-in?{urlencode({'issuer': identity, 'return_to': return_to})}")
        for identity, name in issuers
    ]
    return _page("Sign in", *links)


def confirm_link(name: str, token: str) -> str:
    """Return the page on which a person uses a sign-in link. Programs that preview a link do not use it."""
    button = tag("button", f"Sign in as {name}", type="submit")
    form = tag("form", tag("input", type="hidden", name="token", value=token), button, method="post", action="/sign-in/link")
    return _page("Sign in", tag("p", "This link works once. Continue only if you expected it."), form)


def confirm_sign_out(name: str | None) -> str:
    """Return the page on which a person signs out. ``name``: None without a session."""
    if name is None:
        return _page("You are not signed in", _again())
    form = tag("form", tag("button", "Sign out", type="submit"), method="post", action="/sign-out")
    return _page("Sign out", tag("p", f"You are signed in as {name}."), form)


def signed_out(provider: str | None) -> str:
    """Return the page after a sign-out. ``provider``: where the session at the identity provider ends, which opens by itself."""
    if provider is None:
        return _page("You are signed out", _again())
    onward = tag("a", "Sign out at the identity provider too", class_="way", href=provider)
    return _page("You are signed out here", onward, refresh=provider)


def failed(message: str) -> str:
    """Return the page about a refused sign-in."""
    return _page("Sign-in failed", tag("p", message), _again())


def _again() -> Html:
    return tag("a", "Sign in", class_="way", href="/sign-in")


def _page(title: str, *content: Html, refresh: str | None = None) -> str:
    onward = [] if refresh is None else [tag("meta", http_equiv="refresh", content=f"0; url={refresh}")]
    metas = [tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1")]
    head = tag("head", *metas, *onward, tag("title", title), tag("style", Html(_STYLE)))
    return "<!doctype html>" + tag("html", head, tag("body", tag("main", tag("h1", title), *content)), lang="en")
