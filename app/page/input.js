// The input of the view Try: an image (a file, dropped, pasted or an example) or logits as text.

import { acceptDrops, h } from "./dom.js";

// Kept while the page is open, so that other views do not reset it.
const state = { mode: "image", blob: null, name: "", png: null, logits: null, text: "" };

export class Input {
  /** `changed` is called when there is something new to send, `refuse` with a problem of the logits. */
  constructor({ changed, refuse }) {
    this.changed = changed;
    this.refuse = refuse;
    this.preview = h("img", { class: "thumb", alt: "" });
    this.file = h("input", {
      type: "file",
      accept: "image/*",
      class: "visually-hidden",
      id: "image",
      onchange: () => this.file.files[0] && this.take(this.file.files[0], this.file.files[0].name),
    });
    this.drop = h(
      "label",
      { class: "drop", for: "image" },
      this.preview,
      h(
        "span",
        { class: "hint" },
        h("b", {}, "Drop an image"),
        ", paste one, or ",
        h("u", {}, "choose a file"),
      ),
    );
    this.examples = h("div", { class: "examples", role: "group", "aria-label": "Example images" });
    this.area = h(
      "textarea",
      {
        rows: 5,
        spellcheck: "false",
        "aria-label": "Logits",
        placeholder: "Logits: K numbers, [9.1, 0.3, …] or 9.1 0.3 …",
        oninput: () => this.readLogits(),
      },
      state.text,
    );
    this.modes = h(
      "div",
      { class: "segments", role: "radiogroup", "aria-label": "Input" },
      ["image", "logits"].map((mode) =>
        h(
          "label",
          {},
          h("input", {
            type: "radio",
            name: "mode",
            value: mode,
            checked: mode === state.mode,
            onchange: () => this.setMode(mode),
          }),
          mode === "image" ? "Image" : "Logits",
        ),
      ),
    );
    this.parts = [this.modes, this.file, this.drop, this.examples, this.area];
    this.show();
  }

  /** Accept images that are dropped on `target` or pasted, until the signal. */
  listen(target, signal) {
    acceptDrops(target, this.drop, (file) => this.take(file, file.name));
    const paste = (event) => {
      const item = [...(event.clipboardData?.items ?? [])].find((i) => i.type.startsWith("image/"));
      if (item) this.take(item.getAsFile(), "pasted image");
    };
    document.addEventListener("paste", paste, { signal });
  }

  /** Offer what the model takes, and take its first example if there is no input yet. */
  offer({ examples, formats, num_classes: K }) {
    this.area.placeholder = `${K} logits: [9.1, 0.3, …] or 9.1 0.3 …`;
    const images = this.modes.querySelector("[value=image]");
    images.disabled = !formats.length;
    if (images.disabled && state.mode === "image") this.setMode("logits");
    this.examples.replaceChildren(
      ...examples.map((example, i) =>
        h(
          "button",
          {
            type: "button",
            title: example.name,
            "aria-label": `Example ${i + 1}: ${example.name}`,
            onclick: () => this.takeExample(example),
          },
          h("img", { src: `data:image/png;base64,${example.png}`, alt: "" }),
        ),
      ),
    );
    if (!state.blob && !state.logits && examples.length) this.takeExample(examples[0]);
  }

  /** What to send, an image with its file's name or its PNG in base64, or logits; null if there is nothing. */
  value() {
    const { mode, blob, name, png, logits } = state;
    if (mode === "image") return blob && { blob, name, png };
    return logits && { logits };
  }

  setMode(mode) {
    state.mode = mode;
    this.show();
    this.changed();
  }

  take(blob, name, png = null) {
    Object.assign(state, { blob, name, png });
    this.setMode("image");
  }

  takeExample(example) {
    const raw = Uint8Array.from(atob(example.png), (c) => c.charCodeAt(0));
    this.take(new Blob([raw], { type: "image/png" }), example.name, example.png);
  }

  show() {
    const image = state.mode === "image";
    this.drop.hidden = this.examples.hidden = !image;
    this.area.hidden = image;
    for (const radio of this.modes.querySelectorAll("input")) radio.checked = radio.value === state.mode;
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = state.blob ? URL.createObjectURL(state.blob) : null;
    this.drop.classList.toggle("filled", Boolean(this.url));
    if (this.url) {
      this.preview.src = this.url;
      this.preview.alt = state.name;
    } else this.preview.removeAttribute("src");
  }

  readLogits() {
    state.text = this.area.value;
    const words = state.text
      .replaceAll(/[[\],;]/g, " ")
      .trim()
      .split(/\s+/)
      .filter(Boolean);
    const numbers = words.map(Number);
    if (numbers.some((x) => !Number.isFinite(x))) {
      state.logits = null;
      this.refuse({
        title: "Not a number",
        message: "Logits are finite numbers, separated by commas or spaces.",
      });
      return;
    }
    state.logits = numbers.length ? numbers : null;
    this.changed();
  }
}
