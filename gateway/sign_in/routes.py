"""The routes of the sign-in, the same on both ports, as an ASGI application for control.

The rules: a request that changes something must come from a page of this origin, and every request must name this host. The exception is
the back-channel logout, which an identity provider sends, and which needs its signed token. No response is stored by a browser or a proxy.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from gateway.audit.entry import AuditUnavailableError
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.sign_in import pages
from gateway.sign_in.browser import Headers, Port, delete_cookie, is_for, is_from_this_origin, local_path, set_cookie
from gateway.sign_in.errors import SignInError
from gateway.sign_in.oidc.authorization import ATTEMPT_SECONDS
from gateway.sign_in.paths import BACK_CHANNEL, CALLBACK, LINK, MAX_FORM, SESSION, SIGN_IN, SIGN_OUT
from gateway.sign_in.service import SignedIn, SignIn
from gateway.sign_in.sessions import Session

Handler = Callable[[Request], Awaitable[Response]]
_NOT_STORED = {"cache-control": "no-store"}
_UNAVAILABLE = "The sign-in is not available at the moment. Try again later."
_MAX_PARAMETERS = 50


def application(service: SignIn, port: Port) -> Starlette:
    """Return the routes of a port as an ASGI application. People must sign in there."""
    routes = _Routes(service, port)
    handlers: tuple[tuple[str, str, Handler], ...] = (
        ("GET", SIGN_IN, routes.start),
        ("GET", SESSION, routes.session),
        ("GET", LINK, routes.show_link),
        ("POST", LINK, routes.use_link),
        ("GET", f"{CALLBACK}{{issuer}}", routes.finish),
        ("GET", SIGN_OUT, routes.show_sign_out),
        ("POST", SIGN_OUT, routes.sign_out),
    )
    made = [Route(path, routes.checked(handler), methods=[method]) for method, path, handler in handlers]
    made.append(Route(BACK_CHANNEL, routes.back_channel_logout, methods=["POST"]))
    unavailable = dict.fromkeys((DatabaseUnavailableError, AuditUnavailableError), _on_unavailable)
    return Starlette(routes=made, exception_handlers={SignInError: _on_refused, **unavailable})  # type: ignore[dict-item]


class _Routes:
    """The handlers of one port."""

    def __init__(self, service: SignIn, port: Port) -> None:
        self._service = service
        self._port = port

    @property
    def _origin(self) -> str:
        if (origin := self._service.origin(self._port)) is None:
            raise SignInError("People do not sign in on this port.", status=404)
        return origin

    def checked(self, handler: Handler) -> Handler:
        """Return a handler that refuses other hosts, and other origins where a request changes something."""

        async def handle(request: Request) -> Response:
            headers = _headers(request)
            if not is_for(headers, self._origin):
                if request.method == "GET" and request.scope["path"] == SIGN_IN:
                    return RedirectResponse(f"{self._origin}{SIGN_IN}", 303, _NOT_STORED)  # another name of this gateway
                raise SignInError("Use the configured address of this gateway.", status=421)
            if request.method == "HEAD":  # Starlette adds it to GET; a program that only looks must not use a code
                return Response(status_code=405, headers={"allow": "GET"})
            if request.method == "POST" and not is_from_this_origin(headers, self._origin):
                raise SignInError("This request came from another page.", status=403)
            return await handler(request)

        return handle

    async def start(self, request: Request) -> Response:
        """Send the browser to the only issuer, or to the chosen one, or let the person choose."""
        issuers, return_to = self._service.issuers, local_path(request.query_params.get("return_to"))
        chosen = request.query_params.get("issuer") or (issuers[0][0] if len(issuers) == 1 else None)
        if chosen is None:
            return pages.choice(issuers, return_to)
        started = await self._service.start(self._port, chosen, return_to)
        response = RedirectResponse(started.url, 303, _NOT_STORED)
        response.headers.append("set-cookie", set_cookie(self._service.attempt_cookie(self._port), started.cookie, ATTEMPT_SECONDS))
        return response

    async def finish(self, request: Request) -> Response:
        """Complete a sign-in at the redirect URI. The cookie of the attempt is deleted in any case."""
        deleted = delete_cookie(self._service.attempt_cookie(self._port))
        response: Response
        try:
            issuer, query = request.path_params["issuer"], _fields(request.scope["query_string"])
            response = _signed_in(await self._service.finish(self._port, issuer, query, _headers(request), _client(request)))
        except SignInError as error:
            response = pages.failed(str(error), error.status)
        response.headers.append("set-cookie", deleted)
        return response

    async def session(self, request: Request) -> Response:
        """Return the person of the session, as JSON."""
        if (session := self._session(request)) is None:
            return JSONResponse({"error": "no person is signed in"}, 401, _NOT_STORED)
        return JSONResponse(session.document(), headers=_NOT_STORED | self._service.sessions(self._port).renewal(session, time.time()))

    async def show_link(self, request: Request) -> Response:
        """Show what a sign-in link is for, without using it."""
        token = request.query_params.get("token", "")
        return pages.confirm_link((await self._service.link(token)).subject, token)

    async def use_link(self, request: Request) -> Response:
        """Use a sign-in link."""
        token = (await _form(request)).get("token", "")
        return _signed_in(await self._service.use_link(self._port, token, _headers(request), _client(request)))

    async def show_sign_out(self, request: Request) -> Response:
        """Show a button: a page of another site must not sign people out."""
        session = self._session(request)
        return pages.confirm_sign_out(None if session is None else session.person.name)

    async def sign_out(self, request: Request) -> Response:
        """End the sessions of the browser."""
        response = pages.signed_out(await self._service.sign_out(self._port, _headers(request), _client(request)))
        response.headers.append("set-cookie", self._service.sessions(self._port).delete())
        return response

    async def back_channel_logout(self, request: Request) -> Response:
        """End the sessions that an identity provider names (OpenID Connect Back-Channel Logout 1.0, section 2.7)."""
        try:
            await self._service.back_channel_logout((await _form(request)).get("logout_token", ""), _client(request))
        except SignInError as error:
            return JSONResponse({"error": "invalid_request", "error_description": str(error)}, 400, _NOT_STORED)
        return Response(headers=_NOT_STORED)

    def _session(self, request: Request) -> Session | None:
        return self._service.sessions(self._port).read(_headers(request), time.time())


def _signed_in(signed_in: SignedIn) -> Response:
    response = RedirectResponse(signed_in.return_to, 303, _NOT_STORED)
    response.headers.append("set-cookie", signed_in.cookie)
    return response


def _headers(request: Request) -> Headers:
    headers: Headers = request.scope["headers"]
    return headers


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises SignInError for another kind of body, and for a body that is too large."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
        raise SignInError("This request is not a form.", status=415)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM:
            raise SignInError("This form is too large.", status=413)
    return dict(_fields(body))


def _fields(encoded: bytes) -> list[tuple[str, str]]:
    """Return the fields of a form or of a query. Raises SignInError."""
    try:
        return parse_qsl(encoded.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise SignInError("This request is not valid.") from None


async def _on_refused(_: Request, error: SignInError) -> Response:
    return pages.failed(str(error), error.status)


async def _on_unavailable(_: Request, __: Exception) -> Response:
    return pages.failed(_UNAVAILABLE, 503)
