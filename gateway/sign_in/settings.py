"""From the configuration to the values of the protocol. Pure."""

from __future__ import annotations

from gateway import config as conf
from gateway.access.actor import Role
from gateway.sign_in.browser import Port
from gateway.sign_in.oidc.provider import Client
from gateway.sign_in.oidc.roles import GrantRules
from gateway.sign_in.sessions import LINK_ISSUER
from gateway.snapshot.snapshot import SessionRules


def key_of(settings: conf.SignIn) -> bytes:
    """Return the key from which every signature is derived."""
    return settings.key.get_secret_value().encode()


def origin_of(settings: conf.SignIn, port: Port) -> str | None:
    """Return the address of a port in browsers; None: people do not sign in there."""
    return settings.url if port == "data" else settings.admin_url


def session_rules(settings: conf.SignIn, port: Port) -> SessionRules | None:
    """Return the rules for the sessions of a port; None: people do not sign in there."""
    if (origin := origin_of(settings, port)) is None:
        return None
    return SessionRules(
        key=key_of(settings),
        secure=origin.startswith("https:"),
        idle=settings.session.idle,
        lifetime=settings.session.lifetime,
        issuers=(LINK_ISSUER, *(issuer.issuer for issuer in settings.issuers)),
    )


def client_of(issuer: conf.SignInIssuer) -> Client:
    """Return the gateway as a client of an issuer."""
    return Client(
        id=issuer.id,
        issuer=issuer.issuer,
        name=issuer.name or issuer.id,
        client_id=issuer.client_id,
        client_secret=None if issuer.client_secret is None else issuer.client_secret.get_secret_value(),
        scopes=issuer.scopes,
        algorithms=issuer.algorithms,
        leeway=issuer.leeway,
        ca=None if issuer.ca is None else str(issuer.ca),
    )


def grant_rules(issuer: conf.SignInIssuer, settings: conf.SignIn) -> GrantRules:
    """Return what the claims of an issuer grant."""
    claims, values = issuer.claims, {role: getattr(settings.roles, role) for role in Role}
    return GrantRules(issuer.id, claims.name, claims.roles, claims.teams, claims.owned_teams, values)
