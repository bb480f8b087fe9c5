// An OpenID Connect provider (npm oidc-provider) on a loopback port, with one account and one client, for tests/gateway/sign_in/test_independent_issuer.py.
// The configuration is the first argument, as JSON: the client's ID, secret and redirect URIs. The port is printed when it listens.
import http from "node:http";
import Provider from "oidc-provider";

const { client_id, client_secret, redirect_uris, post_logout_redirect_uris, backchannel_logout_uri } = JSON.parse(process.argv[2]);

const server = http.createServer();
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const issuer = `http://127.0.0.1:${server.address().port}`;
const provider = new Provider(issuer, {
  clients: [{
    client_id, client_secret, redirect_uris, post_logout_redirect_uris, backchannel_logout_uri,
    backchannel_logout_session_required: true, id_token_signed_response_alg: "ES256",
  }],
  jwks: { keys: [(await import("node:crypto")).generateKeyPairSync("ec", { namedCurve: "P-256" }).privateKey.export({ format: "jwk" })] },
  claims: { openid: ["sub", "name", "groups", "sid"] },
  conformIdTokenClaims: false,
  features: { backchannelLogout: { enabled: true }, rpInitiatedLogout: { enabled: true }, devInteractions: { enabled: true } },
  fetch: (url, { dispatcher, ...options }) => fetch(url, options), // its own dispatcher refuses loopback addresses
  pkce: { required: () => true },
  findAccount: (_, sub) => ({ accountId: sub, claims: () => ({ sub, name: "Alice", groups: ["lab", "llm-admins"] }) }),
});
server.on("request", provider.callback());
console.log(server.address().port);
