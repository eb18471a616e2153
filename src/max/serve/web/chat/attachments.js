// Files of text that go with a message.

import { at, button, element, toast } from "./dom.js";

const LARGEST = 1 << 20;
const MOST = 20;

/** The text of a file, or an error that says why it has none. */
export async function textOf(file) {
  if (file.size > LARGEST)
    throw new Error(`${file.name} has ${(file.size / (1 << 20)).toFixed(1)} MiB; at most 1 MiB can be attached.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text.replaceAll("\r\n", "\n");
  } catch {
    /* not UTF-8 */
  }
  throw new Error(`${file.name} is no text in UTF-8; text and code can be attached.`);
}

/** The attachments of the message that is written. */
export class Attachments {
  constructor(changed) {
    this.changed = changed;
    this.list = [];
    this.node = at("attachments");
    const form = at("form");
    at("attach").onclick = () => at("file").click();
    at("file").onchange = async () => {
      await this.add([...at("file").files]);
      at("file").value = "";
      at("prompt").focus();
    };
    form.addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    for (const file of files) {
      if (this.list.length === MOST) {
        toast(`At most ${MOST} files can be attached.`);
        break;
      }
      try {
        this.list.push({ name: file.name, text: await textOf(file) });
      } catch (error) {
        toast(error.message);
      }
    }
    this.draw();
    this.changed();
  }

  set(list) {
    this.list = [...list];
    this.draw();
  }

  draw() {
    this.node.hidden = !this.list.length;
    this.node.replaceChildren(
      ...this.list.map((each, number) =>
        element(
          "li",
          {},
          element(
            "span",
            {},
            `${each.name} `,
            element("span", { class: "hint" }, `${each.text.length.toLocaleString("en")} characters`),
          ),
          button(
            "✕",
            () => {
              this.list.splice(number, 1);
              this.draw();
              this.changed();
              at("prompt").focus();
            },
            { class: "quiet", "aria-label": `Remove ${each.name}` },
          ),
        ),
      ),
    );
  }
}
