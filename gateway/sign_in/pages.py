"""The pages of the sign-in: their texts and links. They run no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from starlette.responses import HTMLResponse

from gateway.pages.render import render


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a page."""

    text: str
    url: str


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a page, with one button. ``fields`` are hidden."""

    button: str
    action: str
    fields: tuple[tuple[str, str], ...] = ()


_AGAIN = (Link("Sign in", "/sign-in"),)


def choice(issuers: Sequence[tuple[str, str]], return_to: str) -> HTMLResponse:
    """Return the page on which a person chooses an issuer. ``issuers`` are IDs and names."""
    if not issuers:
        return _page("Sign in", "Ask an administrator of this gateway for a sign-in link (vllm-gateway login-link).")
    queries = [(name, urlencode({"issuer": identity, "return_to": return_to})) for identity, name in issuers]
    return _page("Sign in", links=[Link(f"Continue with {name}", f"/sign-in?{query}") for name, query in queries])


def confirm_link(name: str, token: str) -> HTMLResponse:
    """Return the page on which a person uses a sign-in link. A link preview does not use it up."""
    form = Form(f"Sign in as {name}", "/sign-in/link", (("token", token),))
    return _page("Sign in", "This link works once. Continue only if you expected it.", form=form)


def confirm_sign_out(name: str | None) -> HTMLResponse:
    """Return the page on which a person signs out. ``name``: None without a session."""
    if name is None:
        return _page("You are not signed in", links=_AGAIN)
    return _page("Sign out", f"You are signed in as {name}.", form=Form("Sign out", "/sign-out"))


def signed_out(provider: str | None) -> HTMLResponse:
    """Return the page after a sign-out. ``provider``: where the session at the identity provider ends, which opens by itself."""
    if provider is None:
        return _page("You are signed out", links=_AGAIN)
    return _page("You are signed out here", links=[Link("Sign out at the identity provider too", provider)], refresh=provider)


def failed(message: str, status: int) -> HTMLResponse:
    """Return the page about a refused sign-in."""
    return _page("Sign-in failed", message, links=_AGAIN, status=status)


def _page(
    title: str, text: str = "", *, links: Sequence[Link] = (), form: Form | None = None, refresh: str | None = None, status: int = 200
) -> HTMLResponse:
    return render(
        "sign_in/page.html",
        "sign_in/page.css",
        status=status,
        headers={"cache-control": "no-store"},
        has_forms=True,
        title=title,
        text=text,
        links=links,
        form=form,
        refresh=refresh,
    )
