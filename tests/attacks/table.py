"""The table of attacks. A row names the attack, what the attacker does, what must happen, and the test that fails if the attack works.

To add a row, write the test where it belongs, add the row, and run ``python -m tests.attacks``. Several cases of one test are one row each
if they are different attacks, and one row without ``case`` if they are forms of the same attack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.attacks import test_audit_log as audit
from tests.attacks import test_cross_site as cross_site
from tests.attacks import test_hostile_issuer as hostile
from tests.attacks import test_keys as keys
from tests.attacks import test_privileges as privileges
from tests.gateway.admin import test_guard as guard
from tests.gateway.admin import test_roles as roles
from tests.gateway.admin import test_unix_socket as unix_socket
from tests.gateway.auth import test_catalog as catalog
from tests.gateway.client.http import test_cors as cors
from tests.gateway.control import test_key_store as key_store
from tests.gateway.self_service import test_routes as own_keys
from tests.gateway.sign_in import test_browser as browser
from tests.gateway.sign_in import test_gateway as whole
from tests.gateway.sign_in import test_people as people
from tests.gateway.sign_in import test_routes as routes
from tests.gateway.sign_in import test_sessions as sessions
from tests.gateway.sign_in import test_signature as signature
from tests.gateway.sign_in.oidc import test_authorization as authorization
from tests.gateway.sign_in.oidc import test_provider as provider
from tests.gateway.sign_in.oidc import test_roles as oidc_roles
from tests.gateway.sign_in.oidc import test_tokens as tokens
from tests.gateway.store import test_service as store


class Attack(NamedTuple):
    """One attack. ``case`` is the ID of the test's case; None: all of its cases."""

    name: str
    attempt: str
    expected: str
    test: Callable[..., Any]
    case: str | None = None

    @property
    def node(self) -> str:
        """The test as pytest names it."""
        function = f"{self.test.__module__.replace('.', '/')}.py::{self.test.__name__}"
        return function if self.case is None else f"{function}[{self.case}]"


NO_SESSION = "no session; it is recorded"
NO_TOKEN = "refused"
NOTHING = "nothing changes"

response = routes.test_a_response_that_was_not_requested_is_refused
attempt = authorization.test_a_response_that_does_not_belong_to_the_attempt_is_refused
issuer_of_response = authorization.test_a_response_of_another_issuer_has_no_code
forged = tokens.test_a_forged_id_token_is_refused
forged_logout = tokens.test_a_forged_logout_token_is_refused
metadata = provider.test_hostile_metadata_is_refused
elsewhere = browser.test_a_path_to_another_origin_is_not_returned_to
presented = privileges.test_only_a_valid_token_in_its_place_authenticates
foreign_session = privileges.test_another_page_cannot_use_a_session

ATTACKS: Mapping[str, tuple[Attack, ...]] = MappingProxyType(
    {
        "Responses of identity providers": (
            Attack("login CSRF", "sends a victim the response to the attacker's own sign-in", NO_SESSION, response, "no_cookie"),
            Attack("login CSRF in time", "sends it while the victim signs in", NO_SESSION, response, "cookie_of_another_attempt"),
            Attack("code injection", "puts a stolen code into their own sign-in", "PKCE refuses it", response, "code_of_another_attempt"),
            Attack("state replay", "sends a response again, with its cookie and a new code", NO_SESSION, response, "replayed_response"),
            Attack(
                "issuer mix-up", "leads a sign-in at one issuer to another", "the hostile issuer gets no code", response, "mixed_up_issuers"
            ),
            Attack(
                "mix-up without `iss`",
                "the same, at issuers without RFC 9207",
                "each issuer has its own redirect URI",
                response,
                "mixed_up_without_the_parameter",
            ),
            Attack("removed `iss`", "removes the announced `iss`", NO_SESSION, response, "without_the_announced_issuer"),
            Attack("swapped `iss`", "names another issuer in the response", NO_SESSION, issuer_of_response, "another issuer"),
            Attack("port swap", "uses a response for one port on the other", NO_SESSION, response, "the_other_port"),
            Attack("cookie confusion", "sends a session as the cookie of a sign-in", NO_SESSION, response, "a_session_as_an_attempt"),
            Attack("cookie tossing", "adds a second cookie from a neighboring host", NO_SESSION, response, "a_cookie_twice"),
            Attack("unknown issuer", "names an issuer that is not configured", "404", response, "an_unknown_issuer"),
            Attack("repeated code", "sends two codes", NO_SESSION, response, "a_code_twice"),
            Attack("repeated state", "sends two states", NO_SESSION, attempt, "the state twice"),
            Attack("parameter flood", "sends hundreds of parameters", "400", response, "too_many_parameters"),
            Attack("markup in an error", "sends a script as the error's text", "the page has no text of the issuer", response, "an_error"),
            Attack("guessed state", "guesses the state", NO_SESSION, attempt, "a guessed state"),
            Attack("forged cookie", "signs the cookie of a sign-in with their own key", NO_SESSION, attempt, "a forged cookie"),
            Attack("late response", "sends a response after ten minutes", NO_SESSION, attempt, "an attempt that has expired"),
            Attack(
                "leaked verifier",
                "looks for the PKCE verifier in URL and cookie",
                "it is in neither",
                authorization.test_neither_the_url_nor_the_cookie_reveals_the_verifier,
            ),
            Attack(
                "other methods",
                "sends a response with HEAD, PUT or DELETE",
                "405, and the code stays unused",
                routes.test_other_methods_change_nothing,
            ),
        ),
        "ID tokens": (
            Attack("`alg: none`", "removes the signature", NO_TOKEN, forged, "alg none"),
            Attack("`alg: none`, signed", "adds any signature", NO_TOKEN, forged, "alg none with a signature"),
            Attack("`alg` twice", "names two algorithms", NO_TOKEN, forged, "the algorithm twice"),
            Attack(
                "HS256 with the public key", "uses the public key as a shared secret", NO_TOKEN, forged, "the public key as a shared secret"
            ),
            Attack(
                "shared secret",
                "signs with the client secret, also published as a key",
                NO_TOKEN,
                hostile.test_a_shared_secret_verifies_nothing,
            ),
            Attack("swapped claims", "puts other claims before a valid signature", NO_TOKEN, forged, "claims of another token"),
            Attack("stolen key ID", "signs with their own key under a known `kid`", NO_TOKEN, forged, "another key with the same ID"),
            Attack("`kid` as path", "names a file", NO_TOKEN, forged, "a path as key ID"),
            Attack("`kid` as SQL", "names an SQL expression", NO_TOKEN, forged, "SQL as key ID"),
            Attack("`kid` as URL", "names a URL with their own keys", NO_TOKEN, forged, "a URL as key ID"),
            Attack("`kid` as list", "names a list", NO_TOKEN, forged, "a list as key ID"),
            Attack("`kid` in capitals", "writes a known `kid` differently", NO_TOKEN, forged, "another form of the key ID"),
            Attack("no `kid`", "names no key where several exist", NO_TOKEN, forged, "no key ID"),
            Attack(
                "unknown `kid`",
                "names a new key",
                "the keys are fetched again, every 5 s at most",
                tokens.test_a_token_with_an_unknown_key_leads_to_a_fetch,
            ),
            Attack("`jwk`", "brings the key in the header", NO_TOKEN, forged, "a key in the header"),
            Attack("`x5c`", "brings a certificate in the header", NO_TOKEN, forged, "a certificate in the header"),
            Attack(
                "`jku`, `x5u`",
                "names where to fetch their own keys",
                "no request is sent there",
                hostile.test_keys_that_a_token_names_are_not_fetched,
            ),
            Attack(
                "other algorithm",
                "uses an algorithm that is not configured",
                NO_TOKEN,
                tokens.test_an_algorithm_that_is_not_configured_is_refused,
            ),
            Attack("`crit`", "demands an unknown extension", NO_TOKEN, forged, "a critical extension"),
            Attack(
                "token of another issuer",
                "uses a valid token of a second issuer",
                NO_SESSION,
                hostile.test_a_token_of_another_issuer_is_refused,
            ),
            Attack("similar issuer", "adds a slash to `iss`", NO_TOKEN, forged, "nearly the issuer"),
            Attack("other audience", "uses a token for another client", NO_TOKEN, forged, "another audience"),
            Attack("further audience", "uses a token for two clients", NO_TOKEN, forged, "a further audience"),
            Attack("`azp`", "uses a token that another client received", NO_TOKEN, forged, "another authorized party"),
            Attack("expired token", "uses an old token", NO_TOKEN, forged, "expired"),
            Attack("no expiry", "removes `exp`", NO_TOKEN, forged, "no expiry"),
            Attack("endless expiry", "sets an infinite `exp`", NO_TOKEN, forged, "an infinite expiry"),
            Attack("future token", "sets `iat` an hour ahead", NO_TOKEN, forged, "issued in the future"),
            Attack("`nbf`", "uses a token before its time", NO_TOKEN, forged, "not valid yet"),
            Attack("nonce replay", "uses the token of another sign-in", NO_SESSION, routes.test_the_token_of_another_sign_in_is_refused),
            Attack("no nonce", "removes the nonce", NO_TOKEN, forged, "no nonce"),
            Attack("access token", "sends an access token instead", NO_TOKEN, forged, "an access token"),
            Attack("logout token", "sends a logout token instead", NO_TOKEN, forged, "a logout token"),
            Attack("huge token", "sends more than 64 KiB", "it is refused unparsed", forged, "too large"),
            Attack("encrypted token", "sends a JWE", NO_TOKEN, forged, "an encrypted token"),
            Attack(
                "text that cannot be stored",
                "puts NUL or a lone surrogate into claims",
                NO_SESSION,
                hostile.test_a_claim_that_no_database_can_store_is_refused,
            ),
        ),
        "Hostile identity providers": (
            Attack("foreign metadata", "publishes another issuer's name", "no sign-in there", metadata, "another issuer"),
            Attack("PKCE downgrade", "announces only `plain`", "no sign-in there", metadata, "no PKCE"),
            Attack("tokens over HTTP", "announces a token endpoint without TLS", "no sign-in there", metadata, "tokens without TLS"),
            Attack("keys over HTTP", "announces a JWKS without TLS", "no sign-in there", metadata, "keys without TLS"),
            Attack(
                "sign-in over HTTP", "announces an authorization endpoint without TLS", "no sign-in there", metadata, "sign-in without TLS"
            ),
            Attack("local files", "announces `file:` or `unix:` URLs", "no sign-in there", metadata, "a file"),
            Attack("script as endpoint", "announces a `javascript:` URL", "no sign-in there", metadata, "a script"),
            Attack("header injection", "puts line breaks into an endpoint", "no sign-in there", metadata, "a header"),
            Attack(
                "redirect of metadata",
                "redirects to another host",
                "it is not followed",
                hostile.test_a_redirect_is_not_followed,
                "metadata",
            ),
            Attack("redirect of keys", "the same", "it is not followed", hostile.test_a_redirect_is_not_followed, "keys"),
            Attack(
                "redirect of the token endpoint",
                "the same, to collect code and secret",
                "it is not followed",
                hostile.test_a_redirect_is_not_followed,
                "token",
            ),
            Attack("endless response", "sends without end", "cut at 1 MiB", hostile.test_an_endless_response_is_cut),
            Attack("slow response", "sends a byte at a time", "cut after 10 s", hostile.test_a_slow_response_is_cut),
            Attack(
                "compressed response",
                "sends 128 MiB compressed",
                "less than 32 MiB of memory",
                hostile.test_a_compressed_response_takes_no_memory,
            ),
            Attack(
                "substituted user",
                "offers claims at UserInfo or elsewhere",
                "no request is sent there",
                hostile.test_claims_come_only_from_the_id_token,
            ),
            Attack("private key", "publishes a private key", "no sign-in there", hostile.test_a_private_key_in_the_jwks_is_refused),
            Attack("weak key", "publishes RSA with 1,024 bits", "no sign-in there", hostile.test_a_weak_key_is_not_used),
            Attack(
                "people of another issuer",
                "uses the other's issuer, subjects and groups",
                "a separate person, with this entry's rights",
                routes.test_one_issuer_cannot_sign_in_the_people_of_another,
            ),
            Attack(
                "role by text",
                "sends a text with several groups",
                "it is one value",
                oidc_roles.test_a_person_without_a_role_and_a_team_is_refused,
            ),
            Attack("unverified address", "claims an admin's address", "no role", oidc_roles.test_only_a_verified_address_grants_a_role),
            Attack(
                "deceiving name",
                "chooses the name of an admin token",
                "the actor stays different",
                oidc_roles.test_the_display_name_is_not_the_identity,
            ),
            Attack("markup in a name", "chooses a script as name", "it is shown as text", routes.test_names_with_markup_are_shown_as_text),
        ),
        "Redirects": (
            Attack("double slash", "returns to `//evil.example.com`", "`/`", elsewhere, "slashes"),
            Attack("backslash", "uses backslashes, which browsers read as slashes", "`/`", elsewhere, "backslashes"),
            Attack("scheme", "uses `https:`, `javascript:` or `data:`", "`/`", elsewhere, "a scheme"),
            Attack("user information", "hides the host behind `user@`", "`/`", elsewhere, "user information"),
            Attack("control characters", "uses tabs and line breaks, which browsers remove", "`/`", elsewhere, "control characters"),
            Attack("response splitting", "adds a header after a line break", "`/`", elsewhere, "a header"),
            Attack("encoded slashes", "percent-encodes them", "`/`", elsewhere, "encoded slashes"),
            Attack("Unicode", "uses characters that normalize to slashes", "`/`", elsewhere, "other characters"),
            Attack(
                "arbitrary paths",
                "tries random combinations of these",
                "the origin stays the same",
                browser.test_no_text_leads_to_another_origin,
            ),
            Attack(
                "redirect after sign-in",
                "starts a victim's sign-in with such a path",
                "`/`",
                routes.test_a_sign_in_leads_to_no_other_origin,
            ),
        ),
        "Sessions and logout": (
            Attack(
                "fixation",
                "plants a session before the victim signs in",
                "a new session; the planted one ends",
                routes.test_a_new_sign_in_gets_a_new_session_and_ends_the_old_one,
            ),
            Attack("guessed cookie", "invents a cookie", "401", routes.test_an_arbitrary_cookie_is_no_session),
            Attack("changed cookie", "changes any character", "401", signature.test_no_changed_value_is_read),
            Attack(
                "assembled cookie",
                "combines, cuts or extends cookies of two people",
                "401",
                sessions.test_parts_of_two_sessions_make_no_session,
            ),
            Attack("former key", "uses a cookie of an earlier key", "401", sessions.test_a_session_is_not_valid_elsewhere, "another key"),
            Attack(
                "port swap",
                "uses a session of one port on the other",
                "401",
                sessions.test_a_session_is_not_valid_elsewhere,
                "the other port",
            ),
            Attack(
                "removed issuer",
                "uses a session of a removed issuer",
                "401",
                sessions.test_a_session_is_not_valid_elsewhere,
                "an issuer that was removed",
            ),
            Attack(
                "unknown revocations",
                "uses a session right after a restart",
                "401 until they are known",
                sessions.test_a_session_is_not_valid_elsewhere,
                "unknown revocations",
            ),
            Attack(
                "neighboring host", "sets the cookie without `__Host-`", "401", sessions.test_a_cookie_of_a_neighboring_host_is_not_read
            ),
            Attack(
                "renewal after logout",
                "renews a revoked session",
                "401",
                sessions.test_a_revoked_session_is_not_valid_after_a_renewal_either,
            ),
            Attack(
                "endless session",
                "keeps using a session",
                "it ends with its lifetime",
                sessions.test_use_extends_a_session_but_not_beyond_its_lifetime,
            ),
            Attack(
                "stolen cookie",
                "uses a copy after the sign-out",
                "401 in every worker",
                whole.test_a_session_holds_in_every_worker_and_so_does_its_end,
            ),
            Attack(
                "other port after logout",
                "uses the other port's cookie after a sign-out",
                "401",
                routes.test_a_sign_out_holds_on_both_ports,
            ),
            Attack(
                "other gateway after logout",
                "uses a cookie on another gateway after a logout",
                "401",
                whole.test_a_logout_holds_on_every_gateway,
            ),
            Attack("restart after logout", "waits until the workers restart", "401", whole.test_a_restarted_worker_knows_what_was_revoked),
            Attack(
                "database away",
                "restarts the gateway without its database",
                "401",
                whole.test_no_session_is_valid_until_the_revoked_ones_are_known,
            ),
            Attack(
                "late sign-in",
                "completes a sign-in whose session has ended",
                "400",
                routes.test_a_sign_in_whose_session_has_ended_meanwhile_is_refused,
            ),
            Attack(
                "session oracle",
                "compares refusals of forged and revoked sessions",
                "they are equal",
                keys.test_a_refusal_does_not_show_which_sessions_exist,
            ),
        ),
        "Back-channel logout": (
            Attack("forged token", "signs with their own key", NOTHING, forged_logout, "another key"),
            Attack("`alg: none`", "removes the signature", NOTHING, forged_logout, "alg none"),
            Attack("ID token", "sends an ID token", NOTHING, forged_logout, "an ID token"),
            Attack("nonce", "adds a nonce", NOTHING, forged_logout, "an ID token with the event"),
            Attack("no event", "removes `events`", NOTHING, forged_logout, "no event"),
            Attack("other event", "names another event", NOTHING, forged_logout, "another event"),
            Attack("other audience", "uses a token for another client", NOTHING, forged_logout, "another audience"),
            Attack("expired token", "uses an old token", NOTHING, forged_logout, "expired"),
            Attack(
                "replay",
                "sends a token again after the next sign-in",
                NOTHING,
                routes.test_a_repeated_logout_token_does_not_end_later_sessions,
            ),
            Attack(
                "people of another issuer",
                "names the other's subjects and sessions",
                NOTHING,
                routes.test_one_issuer_cannot_sign_out_the_people_of_another,
            ),
            Attack(
                "text that cannot be stored",
                "puts NUL or a lone surrogate into it",
                NOTHING,
                hostile.test_a_logout_that_no_database_can_store_is_refused,
            ),
            Attack(
                "large form", "sends 100 kB", "413; the port stays usable", whole.test_a_large_form_is_refused_and_the_port_stays_usable
            ),
        ),
        "Sign-in links": (
            Attack("second use", "uses a link again", "403", routes.test_a_sign_in_link_signs_a_person_in_once),
            Attack("race", "uses a link eight times at once", "one succeeds", routes.test_of_many_uses_at_once_one_succeeds),
            Attack("expired link", "uses a link after its time", "403", people.test_a_link_is_used_once_within_its_time),
            Attack("guessed link", "guesses a token", "403", routes.test_a_guessed_link_is_refused),
            Attack(
                "other person",
                "names another person and role in the form",
                "they are ignored",
                keys.test_a_link_signs_in_only_its_own_person,
            ),
            Attack(
                "person of an issuer",
                "makes a link with a subject of an issuer",
                "a separate person",
                routes.test_a_link_names_no_person_of_an_issuer,
            ),
            Attack(
                "link oracle",
                "compares refusals of used, expired and unknown links",
                "they are equal",
                keys.test_a_refusal_does_not_show_which_links_exist,
            ),
            Attack(
                "stolen table",
                "reads the tokens of links in the database",
                "it has digests only",
                people.test_the_token_of_a_link_is_not_stored,
            ),
            Attack(
                "link without a role",
                "makes a link as a viewer or without a session",
                "403",
                whole.test_links_are_not_made_over_the_admin_port_without_a_role,
            ),
        ),
        "Other sites": (
            Attack(
                "CSRF at the sign-in",
                "sends forms and JSON to every route with a cookie",
                "403",
                cross_site.test_another_page_changes_nothing,
            ),
            Attack(
                "CSRF by loading", "loads every route as an image or frame", NOTHING, cross_site.test_a_page_that_is_loaded_changes_nothing
            ),
            Attack("same site", "acts from a page of the other port", "403", cross_site.test_a_page_of_the_other_port_changes_nothing),
            Attack("clickjacking", "frames the pages", "the policy forbids it", cross_site.test_no_page_can_be_framed),
            Attack(
                "DNS rebinding",
                "reaches the sign-in under their own host name",
                "421",
                cross_site.test_a_name_of_another_host_reaches_no_route,
            ),
            Attack(
                "DNS rebinding, admin port",
                "reads the open loopback port under their own host name",
                "421",
                guard.test_a_page_of_another_site_cannot_read_the_loopback_port,
            ),
            Attack("CSRF without headers", "acts on every admin route without `Origin`", NOTHING, foreign_session, "no header"),
            Attack("CSRF of another origin", "the same from another origin", NOTHING, foreign_session, "another origin"),
            Attack("CSRF of an opaque origin", "the same from a sandboxed frame", NOTHING, foreign_session, "an opaque origin"),
            Attack("CSRF with a referrer", "the same with a matching `Referer`", NOTHING, foreign_session, "a referrer alone"),
            Attack("contradicting headers", "the same with a matching `Origin` only", NOTHING, foreign_session, "contradicting headers"),
            Attack(
                "reading by another page",
                "reads every admin route with the cookie",
                "no CORS header",
                privileges.test_another_page_reads_nothing,
            ),
            Attack("page with a token", "acts from a page with a token", "403", privileges.test_another_page_cannot_use_a_token),
            Attack("unknown origin", "reads the data port from another page", "no CORS header", cors.test_another_page_gets_nothing),
        ),
        "Privileges": (
            Attack(
                "viewer acts", "uses every route with a viewer's token", "403", roles.test_a_role_may_use_its_routes_and_no_others, "viewer"
            ),
            Attack(
                "operator administers",
                "uses every admin's route with an operator's token",
                "403",
                roles.test_a_role_may_use_its_routes_and_no_others,
                "operator",
            ),
            Attack(
                "person as viewer",
                "the same with a viewer's session",
                "403",
                privileges.test_a_person_uses_only_the_routes_of_the_own_role,
                "viewer",
            ),
            Attack(
                "person as operator",
                "the same with an operator's session",
                "403",
                privileges.test_a_person_uses_only_the_routes_of_the_own_role,
                "operator",
            ),
            Attack(
                "owner of another team",
                "uses every route, on entries of another team",
                "403 or 404",
                privileges.test_an_owner_of_another_team_uses_no_route,
            ),
            Attack("member", "belongs to a team, and uses every route", "403", privileges.test_a_member_of_a_team_uses_no_route),
            Attack("no token", "uses every route without one", "401", presented, "nothing"),
            Attack("expired token", "uses an expired token", "401", presented, "an expired one"),
            Attack("token in the query", "sends it as a parameter", "401", presented, "in the query"),
            Attack("token in another header", "sends it as `X-API-Key` and others", "401", presented, "in another header"),
            Attack("token in a cookie", "sends it as a cookie", "401", presented, "in a cookie"),
            Attack("hash of a token", "sends the hash from a stolen configuration", "401", presented, "its hash"),
            Attack("client's key", "sends a key of the data port", "401", presented, "a key of the data port"),
            Attack(
                "session of a client", "sends a session of the data port", "401", privileges.test_a_session_of_the_data_port_has_no_rights
            ),
            Attack(
                "two identities",
                "sends a wrong token with a valid session",
                "401",
                privileges.test_a_session_does_not_replace_a_token_that_is_refused,
            ),
            Attack("two tokens", "sends two `Authorization` headers", "400", guard.test_a_second_authorization_is_refused),
            Attack("two hosts", "sends two `Host` headers", "400", guard.test_a_second_host_is_refused),
            Attack(
                "data port",
                "requests every admin route on the data port",
                "404",
                privileges.test_the_data_port_has_no_route_of_the_admin_port,
            ),
            Attack(
                "other path",
                "writes paths differently (`..`, `//`, encoded)",
                "401 or 404",
                privileges.test_another_form_of_a_path_opens_no_route,
            ),
            Attack(
                "other method",
                "overrides method and path in headers",
                NOTHING,
                privileges.test_a_header_does_not_change_the_method_or_the_path,
            ),
            Attack(
                "admin socket",
                "opens it as another user",
                "modes 0700 and 0600 forbid it",
                unix_socket.test_only_this_user_can_open_the_socket_and_it_is_removed_at_the_end,
            ),
            Attack(
                "planted folder",
                "replaces the socket's folder by a link",
                "the gateway refuses it",
                unix_socket.test_a_link_instead_of_the_folder_is_refused,
            ),
            Attack(
                "forged log lines",
                "puts line breaks into paths that are logged",
                "no line begins with it",
                privileges.test_no_request_writes_a_line_of_the_log,
            ),
            Attack(
                "hidden attempts", "repeats refused requests", "recorded or counted", privileges.test_refused_attempts_are_in_the_audit_log
            ),
        ),
        "Guesses": (
            Attack(
                "key by timing",
                "guesses a key part by part",
                "equal steps, equal error",
                keys.test_a_guess_of_a_key_costs_the_same_however_near_it_is,
            ),
            Attack(
                "admin token by timing",
                "guesses a token part by part",
                "equal steps",
                keys.test_a_guess_of_an_admin_token_costs_the_same_however_near_it_is,
            ),
            Attack(
                "signature by timing",
                "guesses a cookie's signature part by part",
                "equal steps",
                keys.test_a_guess_of_a_signature_costs_the_same_however_near_it_is,
            ),
            Attack(
                "token oracle",
                "compares refusals of expired and unknown tokens",
                "they are equal",
                privileges.test_a_refusal_does_not_show_why_a_token_is_refused,
            ),
            Attack(
                "model oracle",
                "compares errors of hidden and unknown models",
                "they are equal",
                catalog.test_hidden_and_unknown_models_get_the_same_error,
            ),
        ),
        "Keys made at run time": (
            Attack(
                "deceiving ID",
                "uses control, direction and invisible characters, spaces, 257 characters",
                "400",
                keys.test_a_deceiving_id_is_refused,
            ),
            Attack("look-alike", "uses similar letters, cases and accents", "a separate key", keys.test_a_look_alike_is_another_key),
            Attack(
                "markup or path as ID", "uses scripts, `..`, SQL, templates", "plain text", keys.test_markup_and_paths_in_an_id_are_text
            ),
            Attack(
                "invalid body", "sends lone surrogates, NaN, 1 MiB, other types", NOTHING, key_store.test_an_invalid_request_changes_nothing
            ),
            Attack(
                "ID of the YAML", "takes over an ID or a hash of the YAML", "409", key_store.test_what_the_yaml_names_is_not_in_the_store
            ),
            Attack(
                "race for an ID", "creates one ID eight times at once", "one succeeds", keys.test_of_two_creations_with_one_id_one_succeeds
            ),
            Attack(
                "race for a secret",
                "repeats a creation at once",
                "one secret",
                keys.test_of_two_requests_with_one_idempotency_key_one_creates,
            ),
            Attack(
                "race with a revocation",
                "changes a key while it is revoked",
                "it stays revoked",
                keys.test_a_key_is_not_restored_by_a_race_with_its_revocation,
            ),
            Attack(
                "race with a team",
                "creates keys while their team is deleted",
                "no key without its team",
                keys.test_a_team_is_not_deleted_under_a_key_that_is_created_at_once,
            ),
            Attack(
                "lost update", "changes an earlier version", "412", store.test_two_changes_at_once_cannot_both_have_read_the_same_version
            ),
            Attack(
                "stolen table",
                "looks for keys in responses, logs and database",
                "hashes only",
                key_store.test_the_key_of_an_entry_is_shown_once,
            ),
            Attack(
                "former copy",
                "restarts a gateway whose copy lacks a revocation",
                "it stays revoked",
                key_store.test_a_copy_that_lacks_a_change_is_written_again,
            ),
        ),
        "Audit log": tuple(
            Attack(f"{where}: {name}", f"{does} without the key", "`audit verify` names the entry", test, f"{database}{name}")
            for where, test, database in (
                ("file", audit.test_a_file_that_was_tampered_with_is_detected, ""),
                ("SQLite", audit.test_a_table_that_was_tampered_with_is_detected, "sqlite-"),
                ("PostgreSQL", audit.test_a_table_that_was_tampered_with_is_detected, "postgresql-"),
            )
            for name, does in (
                ("changed", "changes an entry"),
                ("removed", "removes an entry and renumbers"),
                ("inserted", "inserts an entry and renumbers"),
                ("reordered", "swaps entries and renumbers"),
                ("tail removed", "removes the last entries"),
                ("computed again", "computes the chain again"),
            )
        ),
        "Self-service": (
            Attack(
                "key of another person",
                "uses each route with the ID of another person's key",
                "404, as for a missing key",
                own_keys.test_the_key_of_another_person_does_not_exist,
            ),
            Attack(
                "usage of another person",
                "requests the usage and limits of another person's key",
                "404, as for a missing key",
                own_keys.test_the_usage_and_limits_of_anothers_key_do_not_exist,
            ),
            Attack(
                "team of another owner",
                "requests the keys, members, usage and limits of a team that they do not own",
                "404, as for a missing team",
                own_keys.test_a_team_that_one_does_not_own_does_not_exist,
            ),
            Attack(
                "self-raised limits",
                "creates a key with limits, models or a lifetime beyond the policy",
                "refused; it is recorded",
                own_keys.test_a_key_beyond_the_policy_is_refused_and_recorded,
            ),
            Attack(
                "self-raised limits later",
                "changes another field of a key than its name",
                "refused",
                own_keys.test_a_person_changes_only_the_name,
            ),
            Attack("key without a team", "creates a key in no team", "refused", own_keys.test_a_person_without_a_team_creates_no_key),
            Attack(
                "key of a former member",
                "rotates a key after they have left its team",
                "refused",
                own_keys.test_a_key_is_not_rotated_after_its_maker_has_left_the_team,
            ),
            Attack("revoked key", "restores a key that was revoked", "refused", own_keys.test_a_person_restores_no_key),
            Attack(
                "race at the ceiling",
                "creates two keys at once when one more is allowed",
                "one key",
                own_keys.test_two_creations_at_the_ceiling,
            ),
            Attack(
                "race at the ceiling over two gateways",
                "creates keys at once on two gateways",
                "as many keys as the policy allows",
                own_keys.test_a_race_at_the_ceiling_of_two_gateways,
            ),
            Attack(
                "foreign page",
                "sends each change from a page of another origin",
                "403, and nothing changes; it is recorded",
                own_keys.test_another_page_changes_nothing,
            ),
            Attack(
                "form of another page", "sends a form instead of JSON", "403, and nothing changes", own_keys.test_a_form_changes_nothing
            ),
            Attack("other host name", "uses the gateway under another name", "403", own_keys.test_another_host_name_is_refused),
            Attack(
                "no valid session",
                "uses each route without a session, or with an invalid one",
                "401",
                own_keys.test_without_a_valid_session_nothing_is_served,
            ),
            Attack("ended session", "uses a session that was ended", "401", own_keys.test_a_session_that_was_ended_holds_no_longer),
            Attack(
                "markup in an ID",
                "sends IDs with markup and control characters",
                "404",
                own_keys.test_an_id_with_markup_or_control_characters_is_no_key,
            ),
            Attack(
                "markup in a name",
                "names a key with markup and control characters",
                "it is shown as text, or refused",
                own_keys.test_a_name_is_shown_as_text_or_refused,
            ),
            Attack("many requests", "sends more requests than a person may", "429", own_keys.test_too_many_requests_of_a_person_wait),
        ),
    }
)
"""The attacks by area."""
