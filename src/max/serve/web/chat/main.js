// The chat page.

import { announce, at, toast } from "./dom.js";
import { Answers } from "./answers.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { Models } from "./models.js";
import { SettingsDialog } from "./settings_dialog.js";
import { setSetting, setting } from "./settings_store.js";
import { Sidebar } from "./sidebar.js";
import { Tools } from "./tools.js";

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const show = () => {
    const theme = setting("theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    at("theme").setAttribute("aria-pressed", (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark");
  };
  at("theme").onclick = () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    setSetting("theme", now === "dark" ? "light" : "dark");
    show();
  };
  dark.addEventListener("change", show);
  show();
}

/** On narrow pages the list lies over the conversation, and the rest of the page waits. */
function drawer() {
  const narrow = matchMedia("(max-width: 52rem)");
  const set = (isOpen) => {
    const covers = narrow.matches && isOpen;
    document.body.classList.toggle("listing", covers);
    at("sidebar").inert = narrow.matches && !isOpen;
    at("page").inert = covers;
    at("open-sidebar").setAttribute("aria-expanded", covers);
  };
  at("open-sidebar").onclick = () => {
    set(true);
    at("close-sidebar").focus();
  };
  at("close-sidebar").onclick = () => {
    set(false);
    at("open-sidebar").focus();
  };
  at("sidebar").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && narrow.matches) at("close-sidebar").click();
  });
  narrow.addEventListener("change", () => set(false));
  set(false);
  return set;
}

async function begin() {
  themeButton();
  const close = drawer();
  const models = new Models();
  models.read();
  const conversations = new Conversations();
  await conversations.open();
  const tools = new Tools();
  const answers = new Answers(conversations);
  const sidebar = new Sidebar(conversations);
  const composer = new Composer(conversations);
  const settings = new SettingsDialog(conversations, tools, () => models.read());
  const chat = new Chat({ conversations, answers, sidebar, composer, models, tools, settings });
  at("new").onclick = () => {
    location.hash = "";
    chat.open("");
    close(false);
    at("prompt").focus();
  };
  sidebar.addEventListener("open", ({ detail }) => {
    location.hash = `c=${detail}`;
    chat.open(detail);
    if (document.body.classList.contains("listing")) {
      close(false);
      at("prompt").focus();
    }
  });
  sidebar.addEventListener("remove", async ({ detail }) => {
    const title = conversations.get(detail)?.title;
    const wasOpen = chat.id === detail;
    await conversations.remove(detail);
    announce(`${title} was deleted.`);
    if (!(await toast(`“${title}” was deleted.`, "Undo"))) return;
    await conversations.restore(detail);
    if (wasOpen) location.hash = `c=${detail}`;
  });
  conversations.addEventListener("outdated", () =>
    toast("Another tab has a newer version of this page. Reload it.", "Reload", 3600).then((reloads) => {
      if (reloads) location.reload();
    }),
  );
  const openHash = () => chat.open(/^#c=([\w-]+)$/.exec(location.hash)?.[1] ?? "");
  addEventListener("hashchange", openHash);
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      if (at("sidebar").inert) at("open-sidebar").click();
      at("search").focus();
    } else if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
      event.preventDefault();
      at("new").click();
    } else if (event.key === "Escape" && !at("settings").open) chat.escape();
  });
  if (!conversations.lasting)
    toast("This browser stores nothing for this page: conversations end with the tab.", "", 20);
  await openHash();
  document.documentElement.dataset.ready = "";
  if (!at("prompt").value && document.activeElement === document.body) at("prompt").focus();
}

begin();
