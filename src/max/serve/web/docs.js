// The page of the API: routes and their fields, from openapi.json.
const at = (id) => document.getElementById(id);
let schema = {};

function element(kind, attributes, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function resolved(type) {
  if (!type.$ref) return type;
  return type.$ref
    .slice(2)
    .split("/")
    .reduce((part, name) => part[name], schema);
}

// what a value may be, in one line
function typeText(type) {
  if (type.$ref) return type.$ref.split("/").pop();
  if (type.const !== undefined) return JSON.stringify(type.const);
  if (type.enum) return type.enum.map((value) => JSON.stringify(value)).join(" | ");
  const kinds = type.anyOf || type.oneOf || type.allOf;
  if (kinds) return kinds.map(typeText).join(" | ");
  const bounds = [];
  if (type.minimum !== undefined) bounds.push(`≥ ${type.minimum}`);
  if (type.exclusiveMinimum !== undefined) bounds.push(`> ${type.exclusiveMinimum}`);
  if (type.maximum !== undefined) bounds.push(`≤ ${type.maximum}`);
  if (type.exclusiveMaximum !== undefined) bounds.push(`< ${type.exclusiveMaximum}`);
  if (type.minItems) bounds.push(`at least ${type.minItems}`);
  if (type.maxItems) bounds.push(`at most ${type.maxItems}`);
  let text = type.type || "any";
  if (text === "array" && type.items) text = `array of ${typeText(type.items)}`;
  return bounds.length ? `${text} (${bounds.join(", ")})` : text;
}

// the objects within a type whose fields can be listed
function objectsOf(type) {
  const kinds = type.anyOf || type.oneOf || type.allOf || [];
  const whole = resolved(type);
  return [
    ...(whole.properties ? [whole] : []),
    ...kinds.flatMap(objectsOf),
    ...(type.items ? objectsOf(type.items) : []),
  ];
}

function fieldList(object) {
  const list = element("ul", {});
  for (const [name, type] of Object.entries(object.properties)) {
    const row = element("li", {}, element("code", {}, name), " ");
    const needed = (object.required || []).includes(name) ? ", required" : "";
    row.append(element("span", { class: "faint" }, typeText(type) + needed));
    if (type.default !== undefined && type.default !== null)
      row.append(element("span", { class: "faint" }, `, default ${JSON.stringify(type.default)}`));
    if (type.description) row.append(element("p", {}, type.description));
    for (const inner of objectsOf(type)) row.append(lazy(inner.title || "fields", () => fieldList(inner)));
    list.append(row);
  }
  return list;
}

// its content is made when it is first opened: types may hold themselves
function lazy(title, make) {
  const made = element("details", {}, element("summary", {}, title));
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(make());
  });
  return made;
}

function routeDetails(operation) {
  const body = element("div", {});
  const about = (operation.description || "").split(/\n\s*Args:/)[0].trim();
  if (about) body.append(element("p", {}, about));
  for (const parameter of operation.parameters || []) {
    const needed = parameter.required ? ", required" : "";
    body.append(
      element(
        "p",
        {},
        element("code", {}, parameter.name),
        " ",
        element("span", { class: "faint" }, `${parameter.in}, ${typeText(parameter.schema || {})}${needed}`),
      ),
    );
  }
  for (const [media, content] of Object.entries(operation.requestBody?.content || {})) {
    body.append(element("p", { class: "faint" }, `Body, ${media}: ${typeText(content.schema || {})}`));
    for (const object of objectsOf(content.schema || {})) body.append(fieldList(object));
  }
  body.append(
    element(
      "p",
      { class: "faint" },
      `Responses: ${Object.entries(operation.responses || {})
        .map(([status, answer]) => `${status} ${answer.description}`)
        .join(", ")}`,
    ),
  );
  return body;
}

function show() {
  at("title").textContent = `${schema.info.title} ${schema.info.version}`;
  const groups = new Map();
  for (const [path, operations] of Object.entries(schema.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = (operation.tags || ["server"])[0];
      if (!groups.has(tag)) groups.set(tag, []);
      const about = (operation.description || operation.summary || "")
        .split(/[.:;]\s/)[0]
        .replace(/\.$/, "")
        .replace(/`/g, "");
      const summary = element(
        "summary",
        {},
        element("span", { class: "method" }, method.toUpperCase()),
        element("code", {}, path),
        element("span", { class: "about" }, about),
      );
      const route = element(
        "details",
        { class: "route", "data-text": `${method} ${path} ${about}`.toLowerCase() },
        summary,
      );
      route.addEventListener("toggle", () => {
        if (route.open && route.children.length === 1) route.append(routeDetails(operation));
      });
      groups.get(tag).push(route);
    }
  }
  at("routes").replaceChildren(
    ...[...groups].map(([tag, routes]) => element("section", {}, element("h2", {}, tag), ...routes)),
  );
  filter();
}

function filter() {
  const text = at("filter").value.trim().toLowerCase();
  for (const section of at("routes").children) {
    const routes = [...section.querySelectorAll("details.route")];
    for (const route of routes) route.hidden = !route.dataset.text.includes(text);
    section.hidden = routes.every((route) => route.hidden);
  }
}

async function load() {
  const key = at("key").value;
  try {
    const response = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (response.status === 401) {
      at("key").hidden = false;
      at("key").focus();
      throw new Error("This server needs an API key.");
    }
    if (!response.ok) throw new Error(`openapi.json: status ${response.status}`);
    schema = await response.json();
    at("state").hidden = true;
    show();
  } catch (error) {
    at("state").hidden = false;
    at("state").className = "error";
    at("state").textContent = error.message;
  }
}

at("filter").addEventListener("input", filter);
at("key").addEventListener("change", load);
at("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
});
load();
