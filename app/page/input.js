// The input of the view Try: an image (a file, dropped, pasted or an example), another input of the model or logits as text.

import { acceptDrops, button, fileChoice, h } from "./dom.js";

// Kept while the page is open, so that other views do not reset it.
const state = { mode: "image", blob: null, name: "", png: null, input: null, written: "", logits: null, text: "" };

const NAMES = { image: "Image", input: "Input", logits: "Logits" };
const READS = { images: "images", tensors: "tensors", rows: "rows of features", texts: "texts", none: "logits" };

/** A colour gradient, as an example for a model of images that comes with none. */
function drawn() {
  const canvas = h("canvas", { width: 224, height: 224 });
  const context = canvas.getContext("2d");
  const gradient = context.createLinearGradient(0, 0, 224, 224);
  for (const [place, colour] of [[0, "navy"], [0.5, "orange"], [1, "white"]]) gradient.addColorStop(place, colour);
  context.fillStyle = gradient;
  context.fillRect(0, 0, 224, 224);
  return { name: "colour gradient", png: canvas.toDataURL("image/png").split(",")[1] };
}

export class Input {
  /** `changed` is called when there is something new to send, `refuse` with a problem of the input. */
  constructor({ changed, refuse }) {
    this.changed = changed;
    this.refuse = refuse;
    this.preview = h("img", { class: "thumb", alt: "" });
    const hint = [h("b", {}, "Drop an image"), ", paste one, or ", h("u", {}, "choose a file")];
    [this.file, this.drop] = fileChoice("image", "drop", hint, (file) => this.take(file, file.name), "image/*");
    this.drop.prepend(this.preview);
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
    this.written = h(
      "textarea",
      {
        rows: 8,
        spellcheck: "false",
        class: "code",
        "aria-label": "Input as JSON",
        onchange: () => this.readWritten(),
      },
      state.written,
    );
    this.next = h("p", { class: "muted small" });
    this.modes = h(
      "div",
      { class: "segments", role: "radiogroup", "aria-label": "Input" },
      Object.entries(NAMES).map(([mode, name]) =>
        h("label", {}, h("input", { type: "radio", name: "mode", value: mode, onchange: () => this.setMode(mode) }), name),
      ),
    );
    this.parts = [this.modes, this.file, this.drop, this.examples, this.written, this.area, this.next];
    this.show();
  }

  /** Accept images that are dropped on `target` or pasted, until the signal. */
  listen(target, signal) {
    acceptDrops(target, this.drop, (file) => this.take(file, file.name));
    const paste = (event) => {
      const { items = [], types } = event.clipboardData ?? {};
      if (event.target.matches("textarea, input") && types?.includes("text/plain")) return; // cells of a table
      const item = [...items].find((i) => i.type.startsWith("image/"));
      if (item) this.take(item.getAsFile(), "pasted image");
    };
    document.addEventListener("paste", paste, { signal });
  }

  /** Offer what the model takes, and take its first example, or one that is made here, if there is no input yet. */
  offer({ examples, formats, inputs, input_shape: shape, example, num_classes: K }) {
    this.area.placeholder = `${K} logits: [9.1, 0.3, …] or 9.1 0.3 …`;
    this.reads = READS[inputs];
    const own = formats.length ? "image" : example ? "input" : "logits";
    for (const radio of this.modes.querySelectorAll("input"))
      radio.parentNode.hidden = radio.value !== own && radio.value !== "logits";
    const isFirst = !state.blob && !state.input && !state.logits;
    if (isFirst) state.mode = own;
    this.show();
    const made = `The example is made by this page: ${own === "image" ? "drop an image of yours" : "write yours over it"}.`;
    this.next.textContent = examples.length
      ? ""
      : inputs === "none"
        ? `This service has no model: paste logits of yours. ${made}`
        : own === "logits"
          ? `This model reads ${this.reads} of the shape ${shape.join(" × ")}: send them to POST /predict. Here you can try logits. ${made}`
          : made;
    if (own === "image" && !examples.length) examples = [drawn()];
    this.examples.replaceChildren(
      ...examples.map((example, i) => {
        const image = h("img", { src: `data:image/png;base64,${example.png}`, alt: "" });
        const named = { title: example.name, "aria-label": `Example ${i + 1}: ${example.name}` };
        return button(image, () => this.takeExample(example), named);
      }),
    );
    if (!isFirst) return;
    if (own === "image") this.takeExample(examples[0]);
    else if (own === "input") {
      this.written.value = JSON.stringify(example, null, 1);
      this.readWritten();
    } else {
      this.area.value = Array.from({ length: K }, (_, i) => [4, 2, 1][i] ?? 0).join(", ");
      this.readLogits();
    }
  }

  /** What to send, an image with its file's name or its PNG in base64, another input, or logits; null if there is nothing. */
  value() {
    const { mode, blob, name, png, input, logits } = state;
    if (mode === "image") return blob && { blob, name, png };
    if (mode === "input") return input && { input };
    return logits && { logits };
  }

  setMode(mode) {
    state.mode = mode;
    this.show();
    this.changed();
  }

  take(blob, name, png = null) {
    if (this.reads !== "images" || !(blob.type || "image/").startsWith("image/")) {
      const message = `This model reads ${this.reads}; ${name} is ${blob.type ? `of the type ${blob.type}` : "a file"}.`;
      this.refuse({ title: "Not sent", message });
      return;
    }
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
    this.written.hidden = state.mode !== "input";
    this.area.hidden = state.mode !== "logits";
    for (const radio of this.modes.querySelectorAll("input")) radio.checked = radio.value === state.mode;
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = state.blob ? URL.createObjectURL(state.blob) : null;
    this.drop.classList.toggle("filled", Boolean(this.url));
    if (this.url) {
      this.preview.src = this.url;
      this.preview.alt = state.name;
    } else this.preview.removeAttribute("src");
  }

  readWritten() {
    state.written = this.written.value;
    try {
      state.input = JSON.parse(state.written);
    } catch ({ message }) {
      state.input = null;
      this.refuse({ title: "The input is not JSON", message });
      return;
    }
    this.changed();
  }

  readLogits() {
    state.text = this.area.value;
    const numbers = state.text.split(/[\s[\],;]+/).filter(Boolean).map(Number);
    if (numbers.some((x) => !Number.isFinite(x))) {
      state.logits = null;
      this.refuse({ title: "Not a number", message: "Logits are finite numbers, separated by commas or spaces." });
      return;
    }
    state.logits = numbers.length ? numbers : null;
    this.changed();
  }
}
