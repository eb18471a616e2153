// The dialog of the settings.

import { at, download, toast } from "./dom.js";
import { FIELDS, keepsKeys, secret, setKeepsKeys, setSecret, setSetting, setting } from "./settings_store.js";
import { exportText, importedOf } from "./transfer.js";

export class SettingsDialog {
  constructor(conversations, tools, keyChanged) {
    this.conversations = conversations;
    this.tools = tools;
    this.dialog = at("settings");
    at("options").onclick = () => this.open();
    at("close-settings").onclick = () => this.dialog.close();
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
    for (const name of FIELDS) {
      at(name).value = setting(name) ?? "";
      at(name).onchange = () => {
        const { badInput, rangeOverflow, rangeUnderflow } = at(name).validity;
        if (!badInput && !rangeOverflow && !rangeUnderflow) setSetting(name, at(name).value);
        else at(name).reportValidity();
      };
    }
    at("key").value = secret("key");
    at("key").onchange = () => {
      setSecret("key", at("key").value.trim());
      keyChanged();
    };
    at("remember").checked = keepsKeys();
    at("remember").onchange = () => setKeepsKeys(at("remember").checked, ["key", ...tools.secretNames]);
    at("export").onclick = () => this.export();
    at("import").onclick = () => at("import-file").click();
    at("import-file").onchange = () => this.import(at("import-file").files[0]);
    at("delete-all").onclick = () => this.deleteAll();
  }

  open() {
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** Opens the dialog where the key is given. */
  askForKey() {
    this.open();
    at("key").focus();
  }

  async export() {
    const all = await this.conversations.whole(this.conversations.list().map((each) => each.id));
    download(`chats-${new Date().toISOString().slice(0, 10)}.json`, "application/json", exportText(all));
  }

  async import(file) {
    at("import-file").value = "";
    if (!file) return;
    try {
      const made = importedOf(await file.text(), (id) => this.conversations.records.has(id));
      await this.conversations.addAll(made);
      this.dialog.close();
      toast(made.length === 1 ? "1 conversation was imported." : `${made.length} conversations were imported.`);
    } catch (error) {
      this.dialog.close();
      toast(error.message, "", 15);
    }
  }

  async deleteAll() {
    const ids = this.conversations.list().map((each) => each.id);
    this.dialog.close();
    if (!ids.length) return;
    await this.conversations.remove(...ids);
    if (await toast(`${ids.length} conversations were deleted.`, "Undo", 15)) await this.conversations.restore(...ids);
  }
}
