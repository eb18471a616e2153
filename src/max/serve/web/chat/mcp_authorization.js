// Signs in at the authorization server of an MCP server: discovery, registration, code with PKCE, refresh (OAuth 2.1).

const REQUEST_MS = 20_000;
const LONGEST_ANSWER = 1 << 18;

/** What the challenge of a response says: `Bearer resource_metadata="…", scope="…"`; readable where CORS exposes it. */
export function challengeOf(response) {
  const header = response.headers.get("www-authenticate") ?? "";
  const found = {};
  for (const [, name, quoted, plain] of header.matchAll(/([a-z_]+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))/gi))
    found[name.toLowerCase()] = quoted ?? plain;
  return { metadata: found.resource_metadata ?? "", scope: found.scope ?? "", error: found.error ?? "" };
}

const isLoopback = (url) => /^(localhost|127(\.\d+){3}|\[::1\])$/.test(url.hostname);
const withoutSlash = (text) => text.replace(/\/$/, "");

/** An address that a server names: HTTPS, or HTTP among servers of this machine, as tokens are sent to it. */
function addressOf(text, server, what) {
  let url = null;
  try {
    url = new URL(text);
  } catch {
    // no address at all
  }
  const isLocal = url?.protocol === "http:" && isLoopback(url) && isLoopback(new URL(server.url));
  if (url?.protocol === "https:" || isLocal) return url;
  throw new Error(`The sign-in stops: ${what} is no HTTPS address (${String(text).slice(0, 200)}).`);
}

/** The JSON object of an answer; null where it is none. */
async function fetched(url, options = {}) {
  const response = await fetch(url, {
    ...options,
    headers: { Accept: "application/json", ...options.headers },
    credentials: "omit",
    redirect: "error",
    cache: "no-store",
    signal: AbortSignal.timeout(REQUEST_MS),
  });
  const text = await response.text();
  let value = null;
  try {
    if (text.length <= LONGEST_ANSWER) value = JSON.parse(text);
  } catch {
    // a page of an error
  }
  return { ok: response.ok, status: response.status, value: value instanceof Object ? value : null };
}

/** The first metadata that are there; null if there are none. */
async function metadataAt(places) {
  let unreached = null;
  for (const place of new Set(places)) {
    try {
      const { ok, value } = await fetched(place);
      if (ok && value) return value;
    } catch {
      unreached ??= place;
    }
  }
  if (unreached) throw new Error(`The sign-in stops: the page cannot read ${unreached} (is it there, with CORS?).`);
  return null;
}

/** Whether the resource of the metadata is the server, or a path above it. */
function covers(resource, server) {
  const [of, wanted] = [new URL(resource), new URL(server.url)];
  const path = withoutSlash(of.pathname);
  return of.origin === wanted.origin && `${withoutSlash(wanted.pathname)}/`.startsWith(`${path}/`);
}

async function resourceOf(server, challenge) {
  const { origin, pathname, search } = new URL(server.url);
  const usual = `${origin}/.well-known/oauth-protected-resource`;
  const places = challenge.metadata
    ? [addressOf(challenge.metadata, server, "the address of its metadata").href]
    : [`${usual}${withoutSlash(pathname)}${search}`, usual];
  const found = await metadataAt(places);
  if (!found) return { resource: server.url, issuer: origin, scopes: [] };
  const resource = addressOf(found.resource, server, "the resource of its metadata").href;
  if (!covers(resource, server))
    throw new Error(`The sign-in stops: the server's metadata are those of ${resource}, another server.`);
  return {
    resource: found.resource,
    issuer: addressOf(found.authorization_servers?.[0] ?? origin, server, "the authorization server").href,
    scopes: found.scopes_supported ?? [],
  };
}

async function authorizationServerOf(server, issuer) {
  const { origin, pathname } = new URL(issuer);
  const path = withoutSlash(pathname);
  const [oauth, openid] = ["/.well-known/oauth-authorization-server", "/.well-known/openid-configuration"];
  const places = [`${origin}${oauth}${path}`, `${origin}${openid}${path}`, `${origin}${path}${openid}`];
  const found = await metadataAt(places);
  if (!found) return null;
  if (withoutSlash(String(found.issuer)) !== withoutSlash(issuer))
    throw new Error(`The sign-in stops: the metadata of ${issuer} are those of ${String(found.issuer).slice(0, 200)}.`);
  if (!found.code_challenge_methods_supported?.includes("S256"))
    throw new Error(`The sign-in stops: ${issuer} does not say that it checks codes (PKCE, S256).`);
  return {
    authorization: addressOf(found.authorization_endpoint, server, "its authorization endpoint"),
    token: addressOf(found.token_endpoint, server, "its token endpoint").href,
    registration: found.registration_endpoint
      ? addressOf(found.registration_endpoint, server, "its registration endpoint").href
      : "",
    namesItself: found.authorization_response_iss_parameter_supported === true,
  };
}

/** This page as a client of the authorization server: as it is known there, else registered now. */
async function clientOf(server, { registration }, issuer, redirect) {
  if (server.clientId) return { id: server.clientId, method: "none" };
  const known = server.client;
  if (known?.issuer === issuer && known.redirect === redirect) return known;
  if (!registration)
    throw Object.assign(
      new Error(
        `${issuer} registers no clients by itself. Register one there with the redirect address ${redirect}, and give its client ID.`,
      ),
      { needs: "client" },
    );
  const body = {
    client_name: "Chat page",
    redirect_uris: [redirect],
    grant_types: ["authorization_code", "refresh_token"],
    response_types: ["code"],
    token_endpoint_auth_method: "none",
    application_type: isLoopback(new URL(redirect)) ? "native" : "web",
  };
  const { ok, status, value } = await fetched(registration, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!ok || typeof value?.client_id !== "string")
    throw new Error(`The sign-in stops: ${issuer} does not register this page (${reasonOf(status, value)}).`);
  const secret = value.client_secret ?? "";
  const method = value.token_endpoint_auth_method ?? (secret ? "client_secret_basic" : "none");
  return { id: value.client_id, secret, method, issuer, redirect };
}

const reasonOf = (status, value) => String(value?.error_description ?? value?.error ?? `status ${status}`).slice(0, 300);

const encoded = (bytes) =>
  btoa(String.fromCharCode(...new Uint8Array(bytes)))
    .replaceAll("+", "-")
    .replaceAll("/", "_")
    .replaceAll("=", "");
const randomText = () => encoded(crypto.getRandomValues(new Uint8Array(32)));

/** The address where the user signs in, and what the page keeps until the user comes back; null: the server names none. */
export async function beginning(server, challenge, redirect) {
  const { resource, issuer, scopes } = await resourceOf(server, challenge);
  const provider = await authorizationServerOf(server, issuer);
  if (!provider) return null;
  // browsers hash for pages of HTTPS and of this machine only
  if (!crypto.subtle)
    throw new Error("The sign-in stops: open this page by HTTPS or at localhost, other pages cannot check codes (PKCE).");
  const client = await clientOf(server, provider, issuer, redirect);
  const [state, verifier] = [randomText(), randomText()];
  const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier));
  const scope = challenge.scope || scopes.join(" ");
  const query = {
    response_type: "code",
    client_id: client.id,
    redirect_uri: redirect,
    state,
    code_challenge: encoded(hash),
    code_challenge_method: "S256",
    resource,
    ...(scope ? { scope } : {}),
  };
  const url = provider.authorization;
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const { token, namesItself } = provider;
  return { url: url.href, pending: { state, verifier, issuer, client, redirect, resource, token, namesItself } };
}

async function granted({ token, client, resource }, fields) {
  const body = new URLSearchParams({ ...fields, client_id: client.id, resource });
  const headers = {};
  if (client.method === "client_secret_basic") {
    const [id, secret] = [client.id, client.secret].map(encodeURIComponent);
    headers.Authorization = `Basic ${btoa(`${id}:${secret}`)}`;
  } else if (client.method === "client_secret_post") body.set("client_secret", client.secret);
  const { ok, status, value } = await fetched(token, { method: "POST", headers, body });
  if (!ok || typeof value?.access_token !== "string" || !/^bearer$/i.test(value.token_type ?? "Bearer"))
    throw new Error(`The sign-in failed: ${reasonOf(status, value)}.`);
  return { access: value.access_token, refresh: value.refresh_token ?? fields.refresh_token ?? "", token, client, resource };
}

/** The tokens for the answer of the authorization server, the query of the address to which the user came back. */
export async function redeemed(pending, query) {
  const answer = new URLSearchParams(query);
  const issuer = answer.get("iss");
  // an answer of another server would send it our code
  if (issuer === null ? pending.namesItself : withoutSlash(issuer) !== withoutSlash(pending.issuer))
    throw new Error("The sign-in failed: the answer is not of the server that was asked.");
  if (!answer.get("code"))
    throw new Error(`The sign-in failed: ${reasonOf("?", Object.fromEntries(answer))}.`);
  return granted(pending, {
    grant_type: "authorization_code",
    code: answer.get("code"),
    redirect_uri: pending.redirect,
    code_verifier: pending.verifier,
  });
}

/** Newer tokens. */
export const refreshed = (tokens) => granted(tokens, { grant_type: "refresh_token", refresh_token: tokens.refresh });
