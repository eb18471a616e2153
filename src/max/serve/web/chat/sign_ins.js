// Signing in at MCP servers: the page to which the user comes back sends the answer to the tab that waits for it.

import { secret, setSecret } from "./settings_store.js";

const nameOf = (server) => `mcp.${server.id}.tokens`;
const clientOf = (server) => `mcp.${server.id}.client`;

export class SignIns {
  /**
   * ask: sends a request to the thread that speaks with the servers; signedIn: what is done when there are tokens.
   */
  constructor(ask, signedIn) {
    this.ask = ask;
    this.signedIn = signedIn;
    this.waiting = new Map();
    this.refreshing = new Map();
    this.channel = new BroadcastChannel("chat.sign-in");
    this.channel.onmessage = ({ data }) => this.cameBack(data.query ?? "");
  }

  names(server) {
    return [`mcp.${server.id}`, nameOf(server), clientOf(server)];
  }

  /** The header for a server: of the user's tokens, else the one that was given. */
  authorization(server) {
    const tokens = secret(nameOf(server));
    return tokens ? `Bearer ${tokens.access}` : secret(`mcp.${server.id}`);
  }

  isSignedIn(server) {
    return Boolean(secret(nameOf(server)));
  }

  signOut(server) {
    for (const [state, each] of this.waiting) if (each.server === server) this.waiting.delete(state);
    setSecret(nameOf(server), "");
    server.signInUrl = "";
  }

  /** Does a request; where the server wants other tokens, refreshes them once, else offers a sign-in and fails. */
  async withTokens(server, request) {
    for (let attempt = 0; ; attempt++) {
      try {
        return await request();
      } catch (error) {
        if (!error.challenge || secret(`mcp.${server.id}`)) throw error;
        if (attempt || error.challenge.error === "insufficient_scope" || !(await this.refresh(server)))
          throw await this.offer(server, error);
      }
    }
  }

  /** Gets newer tokens; false if there are none to get. */
  async refresh(server) {
    const tokens = secret(nameOf(server));
    if (!tokens?.refresh) return false;
    // a refresh token may be used once: requests at the same time share it
    if (!this.refreshing.has(server.id))
      this.refreshing.set(
        server.id,
        this.ask("refresh", server, { tokens }).finally(() => this.refreshing.delete(server.id)),
      );
    try {
      setSecret(nameOf(server), await this.refreshing.get(server.id));
      return true;
    } catch {
      return false;
    }
  }

  /** Finds out where the user signs in; the error says what to do. */
  async offer(server, error) {
    const redirect = new URL("signed-in", document.baseURI).href;
    this.signOut(server);
    server.needsClient = false;
    try {
      const client = secret(clientOf(server)) || null;
      const made = await this.ask("begin", server, { challenge: error.challenge, redirect, client });
      if (!made) return error;
      server.signInUrl = made.url;
      setSecret(clientOf(server), made.pending.client);
      this.waiting.set(made.pending.state, { server, pending: made.pending });
      return new Error(`The server wants you to sign in at ${new URL(made.url).host}.`);
    } catch (problem) {
      server.needsClient = problem.needs === "client";
      return problem;
    }
  }

  async cameBack(query) {
    const state = new URLSearchParams(query).get("state");
    const found = this.waiting.get(state);
    if (!found) return;
    this.waiting.delete(state);
    const { server, pending } = found;
    server.signInUrl = "";
    this.channel.postMessage({ state, waits: true });
    let problem = "";
    try {
      setSecret(nameOf(server), await this.ask("redeem", server, { pending, query }));
    } catch (error) {
      problem = error.message;
      setSecret(clientOf(server), "");
    }
    this.channel.postMessage({ state, problem });
    await this.signedIn(server, problem);
  }
}
