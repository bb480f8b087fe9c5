"""The error of a sign-in."""

from __future__ import annotations


class SignInError(Exception):
    """A sign-in, a sign-out or a sign-in link that is refused.

    The text is one sentence for the person, without text of the browser or the provider. ``detail`` says more to the operator. ``status``
    is the HTTP status of the page.
    """

    def __init__(self, message: str, *, detail: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.detail = detail
        self.status = status


class UnknownKeyError(SignInError):
    """A token names a key that the issuer's known JWKS does not contain. It may be newer than the known JWKS."""
