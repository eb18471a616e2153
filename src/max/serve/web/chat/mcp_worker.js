// Speaks with MCP servers by streamable HTTP. The page itself has a policy that lets it reach its own server only.

import { eventsOf } from "./event_stream.js";
import { beginning, challengeOf, redeemed, refreshed } from "./mcp_authorization.js";

const VERSION = "2025-06-18";
const KNOWN = ["2025-06-18", "2025-03-26", "2025-11-25"];
const REQUEST_MS = 60_000;
const MOST_PAGES = 20;
const MOST_TOOLS = 200;

const sessions = new Map();
let nextId = 1;

function headersOf(server, session) {
  const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
  if (server.authorization) headers.Authorization = server.authorization;
  if (session?.id) headers["Mcp-Session-Id"] = session.id;
  if (session?.version) headers["MCP-Protocol-Version"] = session.version;
  return headers;
}

async function post(server, session, message) {
  const signal = AbortSignal.timeout(REQUEST_MS);
  try {
    const response = await fetch(server.url, {
      method: "POST",
      headers: headersOf(server, session),
      body: JSON.stringify(message),
      signal,
      credentials: "omit",
      redirect: "error",
    });
    return response;
  } catch (error) {
    if (signal.aborted) throw new Error(`The server has not answered for ${REQUEST_MS / 1000} s.`);
    throw new Error(await whyUnreached(server.url));
  }
}

/** A browser hides whether a server is down or forbids the page: a request without a readable answer tells. */
async function whyUnreached(url) {
  try {
    await fetch(url, { mode: "no-cors", signal: AbortSignal.timeout(5000), credentials: "omit" });
  } catch {
    return "The server cannot be reached: is it running, and is its address right?";
  }
  return (
    `The server does not allow this page (CORS): its answers need the headers Access-Control-Allow-Origin: ${self.location.origin}, ` +
    "Access-Control-Allow-Headers: Content-Type, Authorization, Mcp-Session-Id, MCP-Protocol-Version, and " +
    "Access-Control-Expose-Headers: Mcp-Session-Id."
  );
}

/** The result of a request; the answer is JSON, or a stream of events of which one is the answer. */
async function call(server, session, method, params) {
  const id = nextId++;
  const response = await post(server, session, { jsonrpc: "2.0", id, method, params });
  if (response.status === 404 && session) throw Object.assign(new Error("The session has ended."), { isOver: true });
  if (response.status === 401 || response.status === 403) {
    const text =
      `The server wants another authorization header (status ${response.status}), and names no place to sign in ` +
      "(OAuth): get an access token from its provider, and give it as Bearer TOKEN.";
    throw Object.assign(new Error(text), { challenge: challengeOf(response) });
  }
  if (!response.ok) throw new Error(`The server answers ${method} with status ${response.status}.`);
  const kind = response.headers.get("content-type") ?? "";
  let found = null;
  if (kind.startsWith("text/event-stream")) {
    for await (const text of eventsOf(response.body)) {
      const message = JSON.parse(text);
      if (message.id === id) {
        found = message;
        break;
      }
    }
  } else if (kind.includes("json")) found = await response.json();
  if (found?.id !== id)
    throw new Error(`The server has not answered ${method}: its address may not be that of an MCP server.`);
  if (found.error) throw new Error(`${method}: ${found.error.message}`);
  return { result: found.result, response };
}

async function sessionOf(server) {
  if (!sessions.has(server.id)) {
    const opening = connect(server);
    sessions.set(server.id, opening);
    opening.catch(() => sessions.delete(server.id));
  }
  return sessions.get(server.id);
}

async function connect(server) {
  const { result, response } = await call(server, null, "initialize", {
    protocolVersion: VERSION,
    capabilities: {},
    clientInfo: { name: "chat page", version: "1" },
  });
  if (!KNOWN.includes(result.protocolVersion))
    throw new Error(`The server speaks version ${result.protocolVersion} of MCP; this page ${KNOWN.join(", ")}.`);
  const session = {
    id: response.headers.get("mcp-session-id"),
    version: result.protocolVersion,
    name: result.serverInfo?.name ?? "",
  };
  await post(server, session, { jsonrpc: "2.0", method: "notifications/initialized" });
  return session;
}

/** A call in the session, which is opened again if the server has forgotten it. */
async function inSession(server, work) {
  const session = await sessionOf(server);
  try {
    return await work(session);
  } catch (error) {
    if (!error.isOver) throw error;
    sessions.delete(server.id);
    return work(await sessionOf(server));
  }
}

async function list(server) {
  return inSession(server, async (session) => {
    const tools = [];
    let cursor;
    for (let page = 0; page < MOST_PAGES; page++) {
      const { result } = await call(server, session, "tools/list", cursor ? { cursor } : {});
      tools.push(...result.tools);
      cursor = result.nextCursor;
      if (!cursor || tools.length >= MOST_TOOLS) break;
    }
    return {
      name: session.name,
      tools: tools
        .slice(0, MOST_TOOLS)
        .map(({ name, description, inputSchema }) => ({ name, description, inputSchema })),
    };
  });
}

const work = {
  list: ({ server }) => list(server),
  call: ({ server, name, given }) =>
    inSession(
      server,
      async (session) => (await call(server, session, "tools/call", { name, arguments: given })).result,
    ),
  begin: ({ server, challenge, redirect, client }) => beginning({ ...server, client }, challenge, redirect),
  redeem: ({ server, pending, query }) => {
    // a session belongs to the user who has opened it
    sessions.delete(server.id);
    return redeemed(pending, query);
  },
  refresh: ({ tokens }) => refreshed(tokens),
};

self.onmessage = async ({ data }) => {
  try {
    self.postMessage({ job: data.job, result: await work[data.kind](data) });
  } catch (error) {
    const { message, challenge, needs } = error;
    self.postMessage({ job: data.job, error: { message, challenge, needs } });
  }
};
