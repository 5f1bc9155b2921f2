// Try: an image or logits in; softmax, calibrated and bounded probabilities out, with bounds to drag.

import { get, post, predict, url } from "./api.js";
import { boxSoftmax, softmax, sum, effectiveBox } from "./box.js";
import { h, milliseconds, percent } from "./dom.js";

export const title = "Try";

const CONFIRM_AFTER = 120; // ms without a move before the service is asked to confirm
const FEW = 12; // up to so many classes are all shown
const SHOWN = 8; // of more, so many, and those with bounds of their own
const STEPS = 100; // of a handle, over the axis
const AXES = [1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001]; // where the axis may end

// Kept while the page is open, so that other views do not reset it.
const state = {
  model: null,
  mode: "image",
  blob: null,
  name: "",
  logits: null,
  text: "",
  version: "active",
  calibrators: [],
  answer: null,
  all: { lower: 0, upper: 1 },
  lower: new Map(),
  upper: new Map(),
  pinned: new Set(),
};

export function show(main) {
  const view = new Try(main);
  view.start();
  return () => view.stop();
}

class Try {
  constructor(main) {
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
      ...["image", "logits"].map((mode) =>
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
    this.chooser = h("select", {
      id: "which",
      onchange: () => {
        state.version = this.chooser.value;
        this.ask();
      },
    });
    this.json = h("textarea", {
      rows: 4,
      spellcheck: "false",
      class: "code",
      "aria-label": "Bounds as JSON",
      onchange: () => this.readJson(),
    });
    this.curl = h("pre", { class: "code" });
    this.input = h(
      "section",
      { class: "card input", "aria-label": "Input" },
      this.modes,
      this.file,
      this.drop,
      this.examples,
      this.area,
      h("label", { class: "field", for: "which" }, h("span", {}, "Calibrator"), this.chooser),
    );
    this.request = h(
      "section",
      { class: "card request", "aria-label": "The request" },
      h("details", {}, h("summary", {}, "Exact bounds as JSON"), this.json),
      h("details", {}, h("summary", {}, "This request as curl"), this.curl),
    );
    this.headline = h("div", { class: "headline", "aria-live": "polite" });
    this.trouble = h("div", { class: "trouble", role: "alert" });
    this.rows = h("div", { class: "rows" });
    this.sums = h("p", { class: "sums" });
    this.more = h("div", { class: "more" });
    this.foot = h("p", { class: "foot" });
    this.result = h(
      "section",
      { class: "card result", "aria-label": "Answer" },
      this.headline,
      this.rows,
      this.more,
      this.trouble,
      this.sums,
      this.foot,
    );
    main.append(
      h("h1", { class: "visually-hidden" }, "Try the model"),
      this.input,
      this.result,
      this.request,
    );
    this.stopper = new AbortController();
    this.tracks = new Map();
  }

  async start() {
    const on = (target, type, act) => target.addEventListener(type, act, { signal: this.stopper.signal });
    on(document, "paste", (event) => {
      const item = [...(event.clipboardData?.items ?? [])].find((i) => i.type.startsWith("image/"));
      if (item) this.take(item.getAsFile(), "pasted image");
    });
    on(this.input, "dragover", (event) => {
      event.preventDefault();
      this.drop.classList.add("over");
    });
    on(this.input, "dragleave", () => this.drop.classList.remove("over"));
    on(this.input, "drop", (event) => {
      event.preventDefault();
      this.drop.classList.remove("over");
      const [file] = event.dataTransfer.files;
      if (file) this.take(file, file.name);
    });
    this.applyMode();
    await Promise.all([this.loadCalibrators(), this.loadModel()]);
    if (!this.flight) this.ask();
  }

  stop() {
    this.stopper.abort();
    clearTimeout(this.timer);
  }

  async loadCalibrators() {
    try {
      state.calibrators = (await get("/calibrators")).calibrators;
    } catch (error) {
      this.explain(error);
      return;
    }
    this.chooser.replaceChildren(
      h("option", { value: "active" }, `active: ${this.named(state.calibrators.find((c) => c.active))}`),
      ...state.calibrators.map((c) => h("option", { value: c.version }, this.named(c))),
    );
    this.chooser.value = state.version;
  }

  named(c) {
    return c ? (c.version ? `v${c.version} ${c.method}` : "v0 uncalibrated") : "";
  }

  async loadModel() {
    try {
      state.model ??= await get("/model");
    } catch (error) {
      this.explain(error);
      return;
    }
    const { examples, formats, num_classes: K } = state.model;
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

  takeExample(example) {
    const raw = Uint8Array.from(atob(example.png), (c) => c.charCodeAt(0));
    this.take(new Blob([raw], { type: "image/png" }), example.name);
  }

  setMode(mode) {
    state.mode = mode;
    this.applyMode();
    this.ask();
  }

  applyMode() {
    const image = state.mode === "image";
    this.drop.hidden = this.examples.hidden = !image;
    this.area.hidden = image;
    for (const radio of this.modes.querySelectorAll("input")) radio.checked = radio.value === state.mode;
    this.showImage();
  }

  take(blob, name) {
    state.blob = blob;
    state.name = name;
    state.mode = "image";
    this.applyMode();
    this.ask();
  }

  showImage() {
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
    const numbers = state.text
      .replaceAll(/[[\],;]/g, " ")
      .trim()
      .split(/\s+/)
      .filter(Boolean)
      .map(Number);
    if (!numbers.length) {
      state.logits = null;
      return;
    }
    if (numbers.some((x) => !Number.isFinite(x))) {
      this.explain({
        title: "Not a number",
        message: "Logits are finite numbers, separated by commas or spaces.",
      });
      return;
    }
    state.logits = numbers;
    this.ask();
  }

  /** Ask the service for the unbounded answer, with what the browser needs to apply any bounds. */
  async ask() {
    if (!state.model) return;
    const flight = (this.flight = {});
    const version = state.version === "active" ? "active" : Number(state.version);
    const options = { probabilities: true, logits: true, explain: true, top_k: 1, calibrator: version };
    try {
      let answer;
      if (state.mode === "image") {
        if (!state.blob) return;
        answer = await predict(state.blob, options);
      } else {
        if (!state.logits) return;
        answer = await post("/calibrate", { logits: [state.logits], options });
      }
      if (this.stopper.signal.aborted || flight !== this.flight) return;
      this.accept(answer);
    } catch (error) {
      if (error.name !== "AbortError") this.explain(error);
    }
  }

  accept(answer) {
    const [prediction] = answer.predictions;
    const { labels } = state.model;
    const { logits: mapped, lower, upper } = prediction.explain;
    const calibrated = prediction.probabilities;
    const each = (bound) => (typeof bound === "number" ? labels.map(() => bound) : bound);
    state.answer = {
      calibrator: answer.calibrator,
      labels,
      raw: prediction.logits,
      before: softmax(prediction.logits),
      calibrated,
      mapped: mapped.map((g) => g ?? -Infinity),
      fitted: { lower: each(lower), upper: each(upper) },
      timing: answer.timing_ms,
    };
    state.answer.order = labels
      .map((_, i) => i)
      .sort((a, b) => calibrated[b] - calibrated[a] || mapped[b] - mapped[a]);
    this.result.classList.add("ready");
    this.trouble.replaceChildren();
    this.build();
    this.update("service");
  }

  /** The request's bounds, a number for each class. */
  box() {
    const { labels } = state.answer;
    return {
      lower: labels.map((_, i) => state.lower.get(i) ?? state.all.lower),
      upper: labels.map((_, i) => state.upper.get(i) ?? state.all.upper),
    };
  }

  /** The same as a person would write it. */
  bounds() {
    const { labels } = state.answer;
    const side = (own, general, vacuous) => {
      if (!own.size) return general === vacuous ? undefined : general;
      if (general === vacuous) return Object.fromEntries([...own].map(([i, value]) => [labels[i], value]));
      return labels.map((_, i) => own.get(i) ?? general);
    };
    const lower = side(state.lower, state.all.lower, 0),
      upper = side(state.upper, state.all.upper, 1);
    return lower === undefined && upper === undefined
      ? undefined
      : { ...(lower !== undefined && { lower }), ...(upper !== undefined && { upper }) };
  }

  visible() {
    const { labels, order, before } = state.answer;
    if (labels.length <= FEW) return order;
    const own = new Set([...state.lower.keys(), ...state.upper.keys(), ...state.pinned]);
    const likely = new Set(order.slice(0, SHOWN));
    likely.add(before.indexOf(Math.max(...before)));
    return order.filter((i) => likely.has(i) || own.has(i));
  }

  build() {
    const { labels } = state.answer;
    this.tracks.clear();
    const shown = this.visible();
    const { before, calibrated } = state.answer;
    const largest = Math.max(...shown.flatMap((i) => [before[i], calibrated[i]]));
    this.axis = AXES.findLast((end) => end >= 1.1 * largest) ?? 1;
    const column = (kind, text) => h("span", { class: "n" }, h("i", { class: `key ${kind}` }), text);
    const head = h(
      "div",
      { class: "row head", "aria-hidden": "true" },
      h("span", {}, ""),
      h(
        "span",
        { class: "scale" },
        [0, 0.25, 0.5, 0.75, 1].map((part) =>
          h("i", {}, `${Number((100 * part * this.axis).toPrecision(3))}`),
        ),
      ),
      column("before", "softmax"),
      column("calibrated", "calibrated"),
      column("answer", "answer"),
    );
    const general = new Track(this, null, "all classes");
    this.tracks.set(null, general);
    const rows = shown.map((i) => {
      const track = new Track(this, i, labels[i]);
      this.tracks.set(i, track);
      return track.row;
    });
    this.rows.replaceChildren(head, general.row, ...rows);
    const hidden = labels.length - rows.length;
    this.more.replaceChildren();
    if (hidden > 0) {
      const list = h(
        "datalist",
        { id: "labels" },
        labels.slice(0, 2000).map((label) => h("option", { value: label })),
      );
      const search = h("input", {
        list: "labels",
        placeholder: `Add one of ${hidden} more classes`,
        "aria-label": "Add a class",
        onchange: () => {
          const found = labels.indexOf(search.value.trim());
          if (found >= 0) {
            state.pinned.add(found);
            this.build();
            this.update("browser");
          }
        },
      });
      this.rest = h("span", { class: "muted" });
      this.more.append(search, list, this.rest);
    }
  }

  /** A handle moved: draw new bars in this frame and confirm with the service later. */
  moved() {
    performance.mark("boxcal-move");
    this.update("browser");
    performance.measure("boxcal-move", "boxcal-move");
    this.confirmSoon(CONFIRM_AFTER);
  }

  set(side, index, value) {
    const own = state[side],
      other = side === "lower" ? "upper" : "lower";
    const clean = Math.min(1, Math.max(0, Math.round(value * 1e6) / 1e6));
    const beyond = (x) => (side === "lower" ? x < clean : x > clean);
    if (index === null) {
      state.all[side] = clean;
      if (beyond(state.all[other])) state.all[other] = clean;
    } else {
      if (clean === state.all[side]) own.delete(index);
      else own.set(index, clean);
      const opposite = state[other].get(index) ?? state.all[other];
      if (beyond(opposite)) state[other].set(index, clean);
    }
    // A bound of one class may cross the bound of all classes: the class's other bound follows.
    for (const [i, low] of state.lower)
      if (low > (state.upper.get(i) ?? state.all.upper)) state.upper.set(i, low);
    for (const [i, high] of state.upper)
      if (high < (state.lower.get(i) ?? state.all.lower)) state.lower.set(i, high);
  }

  update(source, exact) {
    const { before, calibrated, mapped, fitted, labels } = state.answer;
    const box = this.box();
    const low = sum(box.lower),
      high = sum(box.upper),
      slack = 1e-9;
    const feasible = low <= 1 + slack && high >= 1 - slack;
    this.result.classList.toggle("stale", !feasible);
    if (feasible) {
      const effective = effectiveBox(fitted, box);
      this.now = exact ?? boxSoftmax(mapped, effective.lower, effective.upper);
      this.effective = effective;
    }
    const now = this.now ?? calibrated;
    for (const [i, track] of this.tracks) {
      if (i === null) track.draw(state.all, false);
      else {
        const held =
          feasible && this.effective.upper[i] < 1 && now[i] >= this.effective.upper[i] - 1e-12
            ? "upper"
            : feasible && this.effective.lower[i] > 0 && now[i] <= this.effective.lower[i] + 1e-12
              ? "lower"
              : null;
        const byRequest =
          held &&
          (held === "upper"
            ? box.upper[i] <= this.effective.upper[i] + 1e-12
            : box.lower[i] >= this.effective.lower[i] - 1e-12);
        track.draw(
          { lower: box.lower[i], upper: box.upper[i] },
          state.lower.has(i) || state.upper.has(i),
          before[i],
          calibrated[i],
          now[i],
          held && (byRequest ? held : `fitted ${held}`),
          feasible,
        );
      }
    }
    if (this.rest)
      this.rest.textContent = `${labels.length - this.tracks.size + 1} others together ${percent(sum(now.filter((_, i) => !this.tracks.has(i))))}`;
    this.say(now, feasible, low, high, source);
    this.json.value = JSON.stringify(this.bounds() ?? {}, null, 1);
    this.writeCurl();
  }

  say(now, feasible, low, high, source) {
    const { labels, before, calibrated, mapped, calibrator, timing } = state.answer;
    const most = Math.max(...now);
    const best = now
      .map((_, i) => i)
      .filter((i) => now[i] >= most - 1e-15)
      .sort((a, b) => mapped[b] - mapped[a])[0];
    const held = this.tracks.get(best)?.held;
    const changed = best !== before.indexOf(Math.max(...before));
    const words = feasible
      ? [
          held ? `held by its ${held} bound; ` : "",
          `softmax ${percent(before[best])}`,
          calibrated[best] !== now[best] ? `, calibrated ${percent(calibrated[best])}` : "",
          changed ? "; a bound changed the label" : "",
        ].join("")
      : h("span", { class: "bad" }, "no distribution satisfies these bounds; this is the last answer");
    this.headline.replaceChildren(
      h("div", { class: "label" }, labels[best]),
      h("div", { class: "big" }, percent(now[best])),
      h("p", { class: "words" }, words),
    );
    this.trouble.replaceChildren();
    const K = labels.length,
      part = (x) => `${(100 * x).toFixed(x < 0.1 ? 1 : 0)} %`;
    if (!feasible) {
      const tooLow = high < 1;
      this.trouble.replaceChildren(
        h(
          "div",
          { class: "problem" },
          h("b", {}, "No distribution satisfies these bounds. "),
          tooLow
            ? `The upper bounds of the ${K} classes add up to ${part(high)}. They must add up to at least 100 %: ${part(1 - high)} is missing.`
            : `The lower bounds of the ${K} classes add up to ${part(low)}. They may add up to at most 100 %: ${part(low - 1)} too much.`,
          h(
            "div",
            { class: "actions" },
            h(
              "button",
              {
                type: "button",
                onclick: () => {
                  this.mend(tooLow);
                  this.moved();
                },
              },
              tooLow
                ? "Raise the upper bounds to 100 % in total"
                : "Lower the lower bounds to 100 % in total",
            ),
            h("button", { type: "button", class: "quiet", onclick: () => this.reset() }, "Remove all bounds"),
          ),
        ),
      );
    }
    const bounded = this.bounds() !== undefined;
    this.sums.replaceChildren(
      ...(bounded
        ? [
            h(
              "span",
              { class: low > 1 ? "bad" : "" },
              `Lower bounds add up to ${part(low)} of at most 100 %`,
            ),
            " · ",
            h("span", { class: high < 1 ? "bad" : "" }, `upper bounds to ${part(high)} of at least 100 %`),
            " · ",
            h("button", { type: "button", class: "link", onclick: () => this.reset() }, "remove all bounds"),
          ]
        : ["Drag the brackets [ ] of a class, or of all classes, to bound the answer."]),
    );
    if (timing) {
      const sure =
        source === "service"
          ? h("span", { class: "sure" }, "✓ confirmed by the service")
          : h("span", { class: "unsure" }, "… computed in the browser, waiting for the service");
      this.foot.replaceChildren(
        feasible ? sure : h("span", { class: "bad" }, "not sent"),
        ` · ${calibrator.version ? `v${calibrator.version} ${calibrator.method}` : "uncalibrated"} · `,
        h(
          "span",
          {
            title: Object.entries(timing)
              .map(([k, v]) => `${k} ${v} ms`)
              .join(", "),
          },
          `${milliseconds(timing.total)} in the service`,
        ),
        this.effective?.relaxed ? " · fitted bounds were relaxed to fit yours" : "",
      );
    }
  }

  mend(tooLow) {
    const box = this.box(),
      { labels } = state.answer;
    const side = tooLow ? "upper" : "lower",
      total = sum(box[side]);
    // Every bound moves by the same share of its distance to 0 or 1.
    const t = tooLow ? (1 - total) / (labels.length - total) : 1 / total;
    const eased = box[side].map((x) =>
      tooLow ? Math.min(1, Math.ceil((x + t * (1 - x)) * 1e4) / 1e4) : Math.floor(x * t * 1e4) / 1e4,
    );
    const general = tooLow ? state.all.upper + t * (1 - state.all.upper) : state.all.lower * t;
    state.all[side] = tooLow ? Math.min(1, Math.ceil(general * 1e4) / 1e4) : Math.floor(general * 1e4) / 1e4;
    for (const i of state[side].keys()) state[side].set(i, eased[i]);
  }

  reset() {
    state.all = { lower: 0, upper: 1 };
    state.lower.clear();
    state.upper.clear();
    this.moved();
  }

  readJson() {
    try {
      const { lower = 0, upper = 1 } = JSON.parse(this.json.value || "{}"),
        { labels } = state.answer;
      state.lower.clear();
      state.upper.clear();
      for (const [side, value, vacuous] of [
        ["lower", lower, 0],
        ["upper", upper, 1],
      ]) {
        state.all[side] = typeof value === "number" ? value : vacuous;
        if (Array.isArray(value)) value.forEach((x, i) => x !== vacuous && state[side].set(i, x));
        else if (typeof value === "object")
          for (const [label, x] of Object.entries(value)) {
            const i = labels.indexOf(label);
            if (i < 0) throw new Error(`there is no class ${JSON.stringify(label)}`);
            state[side].set(i, x);
          }
      }
      this.build();
      this.moved();
    } catch (error) {
      this.explain({ title: "These bounds are not valid", message: error.message });
    }
  }

  confirmSoon(wait) {
    clearTimeout(this.timer);
    this.confirming = null;
    this.timer = setTimeout(() => this.confirm(), wait);
  }

  async confirm() {
    const { raw, calibrator } = state.answer;
    const box = this.box();
    if (sum(box.lower) > 1 + 1e-9 || sum(box.upper) < 1 - 1e-9) return;
    const flight = (this.confirming = {});
    const options = { probabilities: true, top_k: 1, calibrator: calibrator.version, bounds: this.bounds() };
    try {
      const answer =
        state.mode === "logits"
          ? await post("/calibrate", { logits: [raw], options })
          : await predict(state.blob, options);
      if (this.stopper.signal.aborted || flight !== this.confirming) return;
      const exact = answer.predictions[0].probabilities;
      this.result.dataset.difference = Math.max(...exact.map((p, i) => Math.abs(p - this.now[i])));
      this.effective.relaxed = answer.bounds_relaxed;
      this.update("service", exact);
    } catch (error) {
      if (error.name !== "AbortError") this.explain(error);
    }
  }

  explain(error) {
    this.trouble.replaceChildren(
      h("div", { class: "problem" }, h("b", {}, `${error.title ?? "The request failed"}. `), error.message),
    );
  }

  writeCurl() {
    const bounds = this.bounds(),
      origin = url("").href.replace(/\/$/, "");
    const options = JSON.stringify({ ...(bounds && { bounds }), top_k: 3 });
    this.curl.textContent =
      state.mode === "image"
        ? `curl -s ${origin}/predict \\\n  -F file=@image.png \\\n  -F 'options=${options}'`
        : `curl -s ${origin}/calibrate -H 'Content-Type: application/json' -d '{\n  "logits": [[${state.logits?.slice(0, 3).join(", ")}, …]],\n  "options": ${options}}'`;
  }
}

/** One class: three bars and two handles on one axis from 0 to 1. */
class Track {
  constructor(view, index, label) {
    this.view = view;
    this.index = index;
    this.label = label;
    const handle = (side) =>
      h("input", {
        type: "range",
        min: 0,
        max: view.axis,
        step: view.axis / STEPS,
        class: `handle ${side}`,
        "aria-label": `${side === "lower" ? "Lower" : "Upper"} bound of ${label}`,
        oninput: (event) => this.typed(side, event),
      });
    this.lower = handle("lower");
    this.upper = handle("upper");
    this.allowed = h("i", { class: "allowed" });
    this.bars =
      index === null
        ? []
        : ["before", "calibrated", "answer"].map((kind) => h("i", { class: `bar ${kind}` }));
    this.area = h(
      "div",
      { class: "track", onpointerdown: (event) => this.grab(event) },
      this.allowed,
      ...this.bars,
      this.lower,
      this.upper,
    );
    this.chip = h("span", { class: "chip" });
    this.numbers = [0, 1, 2].map(() => h("span", { class: "n" }));
    this.row = h(
      "div",
      { class: index === null ? "row general" : "row" },
      h("span", { class: "name", title: label }, label, this.chip),
      this.area,
      ...(index === null ? [h("span", { class: "n wide" })] : this.numbers),
    );
  }

  draw(bounds, own, before, calibrated, now, held, feasible) {
    const end = this.view.axis;
    const vars = { "--a": bounds.lower / end, "--b": bounds.upper / end };
    this.held = held;
    if (this.index !== null) {
      Object.assign(vars, { "--v0": before / end, "--v1": calibrated / end, "--v2": now / end });
      [before, calibrated, now].forEach((p, k) => {
        this.numbers[k].textContent = percent(p);
      });
      this.row.classList.toggle("held", Boolean(held));
      this.row.classList.toggle("own", own);
      this.chip.textContent = held ? (held.endsWith("upper") ? "at most " : "at least ") + percent(now) : "";
    } else {
      const { lower, upper } = bounds;
      this.row.lastChild.textContent =
        lower === 0 && upper === 1 ? "no bounds" : `${percent(lower, 0)} to ${percent(upper, 0)}`;
    }
    for (const [name, value] of Object.entries(vars)) this.row.style.setProperty(name, value);
    for (const [input, value] of [
      [this.lower, bounds.lower],
      [this.upper, bounds.upper],
    ]) {
      if (Number(input.value) !== value) input.value = value;
      input.setAttribute("aria-valuetext", percent(value));
      const side = input === this.lower ? "lower" : "upper";
      input.classList.toggle("set", side === "lower" ? value > 0 : value < 1);
      input.classList.toggle("own", this.index === null || state[side].has(this.index));
    }
  }

  typed(side, event) {
    this.view.set(side, this.index, Number(event.target.value));
    this.view.moved();
  }

  /** A pointer drags the nearest handle; keys and screen readers use the native sliders. */
  grab(event) {
    if (event.button) return;
    const area = this.area.getBoundingClientRect();
    const axis = this.view.axis;
    const at = (e) => Math.min(1, Math.max(0, (e.clientX - area.left) / area.width));
    const x = at(event),
      low = Number(this.lower.value) / axis,
      high = Number(this.upper.value) / axis;
    const near =
      Math.abs(x - low) === Math.abs(x - high)
        ? x > high
          ? "upper"
          : "lower"
        : Math.abs(x - low) < Math.abs(x - high)
          ? "lower"
          : "upper";
    if (Math.abs(x - (near === "lower" ? low : high)) * area.width > 24) return;
    event.preventDefault();
    this[near].focus({ focusVisible: false });
    this.area.setPointerCapture(event.pointerId);
    const move = (e) => {
      const part = Math.round(at(e) * STEPS) / STEPS;
      this.view.set(near, this.index, part === 1 ? 1 : part * axis); // the end of the axis means no upper bound
      this.view.moved();
    };
    const end = () => {
      this.area.removeEventListener("pointermove", move);
      this.area.classList.remove("dragging");
    };
    this.area.classList.add("dragging");
    this.area.addEventListener("pointermove", move);
    this.area.addEventListener("pointerup", end, { once: true });
    this.area.addEventListener("pointercancel", end, { once: true });
  }
}
