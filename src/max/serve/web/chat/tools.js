// The tools of the MCP servers that the user has named.

import { at, button, element, newId } from "./dom.js";
import { startWorker } from "./markdown_view.js";
import { setSecret, setSetting, setting } from "./settings_store.js";
import { SignIns } from "./sign_ins.js";

const LONGEST_RESULT = 64_000;
const LONGEST_NAME = 64;

/** The text of a result, as the model reads it. */
export function resultText(result) {
  const parts = (Array.isArray(result?.content) ? result.content : []).map((part) => {
    if (part.type === "text") return part.text;
    if (part.type === "resource" && typeof part.resource?.text === "string") return part.resource.text;
    if (part.type === "resource_link") return part.uri;
    return `[${part.mimeType ?? part.type}, which the model cannot read]`;
  });
  const text = parts.length ? parts.join("\n") : JSON.stringify(result?.structuredContent ?? null);
  return text.length > LONGEST_RESULT ? `${text.slice(0, LONGEST_RESULT)}\n[cut: ${text.length} characters]` : text;
}

/** Events: "change". */
export class Tools extends EventTarget {
  constructor() {
    super();
    this.servers = (setting("mcp") ?? []).map((each) => ({ ...each, tools: [], state: "" }));
    this.jobs = new Map();
    this.signIns = new SignIns(
      (kind, server, more) => this.ask(kind, server, more),
      (server, problem) => (problem ? this.fail(server, problem) : this.connect(server)),
    );
    at("mcp-add").onclick = () => this.addFromForm();
    at("mcp-url").onkeydown = (event) => {
      if (event.key === "Enter") this.addFromForm();
    };
    this.draw();
    for (const server of this.servers) if (server.enabled) this.connect(server);
  }

  get secretNames() {
    return this.servers.flatMap((each) => this.signIns.names(each));
  }

  ask(kind, server, more = {}) {
    if (!this.worker) {
      this.worker = startWorker(new URL("mcp_worker.js", import.meta.url));
      this.worker.onmessage = ({ data: { job, result, error } }) => {
        const { resolve, reject } = this.jobs.get(job);
        this.jobs.delete(job);
        if (error) reject(Object.assign(new Error(error.message), error));
        else resolve(result);
      };
    }
    const { id, url, clientId } = server;
    const authorization = this.signIns.authorization(server);
    return new Promise((resolve, reject) => {
      const job = newId();
      this.jobs.set(job, { resolve, reject });
      this.worker.postMessage({ job, kind, server: { id, url, clientId, authorization }, ...more });
    });
  }

  async addFromForm() {
    const field = at("mcp-url");
    let url;
    try {
      url = new URL(field.value.trim());
    } catch {
      url = null;
    }
    if (!url || !/^https?:$/.test(url.protocol)) {
      at("mcp-state").textContent = "Give an address such as http://127.0.0.1:3000/mcp.";
      field.focus();
      return;
    }
    if (this.servers.some((each) => each.url === url.href)) {
      at("mcp-state").textContent = "This server is in the list.";
      return;
    }
    const server = { id: newId(), url: url.href, enabled: true, tools: [], state: "" };
    this.servers.push(server);
    setSecret(`mcp.${server.id}`, at("mcp-key").value.trim());
    [field.value, at("mcp-key").value, at("mcp-state").textContent] = ["", "", ""];
    this.save();
    await this.connect(server);
  }

  save() {
    setSetting(
      "mcp",
      this.servers.map(({ id, url, enabled, clientId }) => ({ id, url, enabled, clientId })),
    );
    this.draw();
    this.dispatchEvent(new Event("change"));
  }

  async connect(server) {
    server.state = "connecting…";
    server.failed = false;
    this.draw();
    try {
      const { name, tools } = await this.signIns.withTokens(server, () => this.ask("list", server));
      Object.assign(server, { name, tools, state: tools.length === 1 ? "1 tool" : `${tools.length} tools` });
    } catch (error) {
      this.fail(server, error.message);
      return;
    }
    this.draw();
    this.dispatchEvent(new Event("change"));
  }

  fail(server, state) {
    Object.assign(server, { tools: [], state, failed: true });
    this.draw();
    this.dispatchEvent(new Event("change"));
  }

  /** All tools of enabled servers by the names that the model uses; equal names get a number. */
  get byName() {
    const named = new Map();
    for (const server of this.servers.filter((each) => each.enabled)) {
      for (const tool of server.tools) {
        const plain = tool.name.replace(/[^A-Za-z0-9_-]/g, "_").slice(0, LONGEST_NAME) || "tool";
        let name = plain;
        for (let number = 2; named.has(name); number++) name = `${plain.slice(0, LONGEST_NAME - 4)}_${number}`;
        named.set(name, { server, tool });
      }
    }
    return named;
  }

  /** The tools of a request. */
  get definitions() {
    return [...this.byName].map(([name, { tool }]) => ({
      type: "function",
      function: {
        name,
        description: tool.description ?? "",
        parameters: tool.inputSchema ?? { type: "object", properties: {} },
      },
    }));
  }

  /** Runs a call that the user has allowed, and puts its result into it. */
  async run(call) {
    const found = this.byName.get(call.name);
    try {
      if (!found) throw new Error(`There is no tool ${call.name}.`);
      let given;
      try {
        given = JSON.parse(call.arguments || "{}");
      } catch {
        throw new Error("The arguments are no JSON.");
      }
      const { server, tool } = found;
      const result = await this.signIns
        .withTokens(server, () => this.ask("call", server, { name: tool.name, given }))
        .finally(() => this.draw());
      Object.assign(call, { state: result.isError ? "failed" : "done", result: resultText(result) });
    } catch (error) {
      Object.assign(call, { state: "failed", result: `Error: ${error.message}` });
    }
  }

  draw() {
    at("mcp-servers").replaceChildren(...this.servers.map((server) => this.row(server)));
  }

  row(server) {
    const box = element("input", {
      type: "checkbox",
      onchange: () => {
        server.enabled = box.checked;
        this.save();
        if (server.enabled) this.connect(server);
      },
    });
    box.checked = server.enabled;
    const signIn = server.signInUrl
      ? element(
          "a",
          { href: server.signInUrl, target: "_blank", rel: "noopener noreferrer" },
          `Sign in at ${new URL(server.signInUrl).host}`,
        )
      : null;
    const client = server.needsClient
      ? element("input", { "aria-label": `Client ID at the provider of ${server.url}`, placeholder: "Client ID" })
      : null;
    client?.addEventListener("change", () => {
      server.clientId = client.value.trim();
      this.save();
      this.connect(server);
    });
    const signOut = button(
      "Sign out",
      () => {
        this.signIns.signOut(server);
        this.connect(server);
      },
      { "aria-label": `Sign out of ${server.url}` },
    );
    const tools = server.tools.length
      ? element(
          "details",
          {},
          element("summary", {}, server.state),
          element(
            "ul",
            {},
            ...server.tools.map((tool) =>
              element("li", {}, element("code", {}, tool.name), ` ${tool.description ?? ""}`),
            ),
          ),
        )
      : null;
    return element(
      "li",
      {},
      element(
        "div",
        { class: "bar" },
        element("label", { class: "check" }, box, ` ${server.name ? `${server.name}, ` : ""}${server.url}`),
        this.signIns.isSignedIn(server) ? signOut : null,
        button("Connect", () => this.connect(server), { "aria-label": `Connect to ${server.url} again` }),
        button(
          "✕",
          () => {
            this.servers = this.servers.filter((each) => each !== server);
            this.signIns.signOut(server);
            for (const name of this.signIns.names(server)) setSecret(name, "");
            this.save();
            at("mcp-url").focus();
          },
          { class: "quiet", "aria-label": `Remove ${server.url}` },
        ),
      ),
      tools ?? element("p", { class: server.failed && !signIn ? "error" : "hint" }, server.state),
      signIn,
      client,
    );
  }
}
