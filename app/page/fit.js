// Fit: upload validation data, follow the fit, and list earlier fits.

import { follow, get, may, remove, upload } from "./api.js";
import {
  acceptDrops, ago, button, bytes, card, cell, count, field, fileChoice, h, number, problem, QUIET, row, scroll,
  table, warnings,
} from "./dom.js";

const UNFINISHED = ["queued", "running"];
const RECONNECT_MS = 2000;

// Kept while the page is open: what is chosen, how far its upload is, and the view that shows it.
const state = { file: null, stage: null, view: null };

export function show(main) {
  const page = new Fit(main);
  page.start();
  return () => page.stopper.abort();
}

class Fit {
  constructor(main) {
    this.stopper = new AbortController();
    state.view = this;
    const kinds = "logits, labels: .npz, .parquet, .arrow, .csv, .json, .jsonl · images: .zip, one folder per class";
    const hint = [h("b", {}, "Drop validation data"), " or ", h("u", {}, "choose a file"), h("small", {}, kinds)];
    [this.file, this.drop] = fileChoice("data", "drop tall", hint, (file) => this.choose(file));
    this.method = h("select", { id: "method" }, h("option", { value: "auto" }, "auto: by cross-validation"));
    this.reads = h("p", { class: "muted small" });
    this.budget = h("input", { id: "budget", type: "number", min: 1, max: 3600, placeholder: "default" });
    this.budgetField = field("Time to compare methods, seconds", this.budget);
    this.method.addEventListener("change", () => this.methodChanged());
    const mixes = { "": "not known", as_traffic: "as frequent as in requests", resampled: "drawn by class" };
    const named = Object.entries(mixes).map(([value, text]) => h("option", { value }, text));
    this.classMix = h("select", { id: "class-mix" }, named);
    const policies = [
      ["if_better", "if it is significantly better"],
      ["always", "always"],
      ["never", "never: only report"],
    ];
    this.policy = h(
      "fieldset",
      {},
      h("legend", {}, "Activate the new calibrator"),
      policies.map(([value, text], i) =>
        h(
          "label",
          {},
          h("input", {
            type: "radio",
            name: "policy",
            value,
            disabled: value !== "never" && !may("activate"),
            checked: i === (may("activate") ? 0 : 2),
          }),
          ` ${text}`,
        ),
      ),
    );
    this.go = button("Fit", () => this.submit(), { disabled: true });
    this.live = h("div", { class: "live", "aria-live": "polite" });
    this.past = scroll("Table");
    const form = h(
      "section",
      { class: "card" },
      h("h1", {}, "Fit a calibrator"),
      this.file,
      this.drop,
      field("Method", this.method),
      this.reads,
      this.budgetField,
      field("Classes in these data", this.classMix),
      this.policy,
      this.go,
      this.live,
    );
    acceptDrops(form, this.drop, (file) => this.choose(file));
    main.append(form, card("Fits", this.past));
    if (state.file) this.choose(state.file);
    if (state.stage) this.progress(...state.stage);
  }

  async start() {
    addEventListener("boxcal:returned", () => this.lost && this.load(), this.stopper);
    await this.load();
  }

  async load() {
    if (this.lost) this.live.replaceChildren();
    this.lost = false;
    await Promise.all([this.list(), this.methods ?? this.loadMethods()]);
  }

  async loadMethods() {
    try {
      this.methods = (await get("/methods")).methods;
    } catch (error) {
      this.lost = true;
      this.fail(error);
      return;
    }
    this.method.append(...this.methods.map(({ name }) => h("option", { value: name }, name)));
  }

  methodChanged() {
    this.budgetField.hidden = this.method.value !== "auto";
    const reads = this.methods?.find(({ name }) => name === this.method.value)?.reads ?? "logits";
    this.reads.textContent = reads === "logits" ? "" : `This method also needs ${reads}.`;
  }

  choose(file) {
    state.file = file;
    this.go.disabled = Boolean(state.stage);
    this.drop.classList.add("chosen");
    this.drop.firstChild.replaceChildren(
      h("b", {}, file.name),
      ` · ${bytes(file.size)}`,
      h("small", {}, "Another file replaces it."),
    );
  }

  async submit() {
    const form = new FormData();
    form.append("method", this.method.value);
    form.append("activate", this.policy.querySelector(":checked").value);
    if (this.method.value === "auto" && this.budget.value)
      form.append("budget_seconds", this.budget.value);
    if (this.classMix.value) form.append("class_mix", this.classMix.value);
    form.append("file", state.file);
    this.go.disabled = true;
    this.turn();
    const advance = (...stage) => state.view.progress(...(state.stage = stage));
    advance("Uploading", 0);
    let fit;
    try {
      fit = await upload("/fit", form, (share) => advance(share < 1 ? "Uploading" : "Checking", share));
    } catch (error) {
      state.view.fail(error);
    }
    state.stage = null;
    state.view.uploaded(fit, form.get("file") === state.file);
  }

  /** Show the fit of an upload, if it began one. */
  async uploaded(fit, isChosen) {
    const signal = this.turn();
    this.go.disabled = isChosen;
    if (fit && may("read")) await this.follow(fit.id, signal).catch((error) => this.fail(error));
    else if (fit) this.live.replaceChildren(h("p", { role: "status" }, `Fit ${fit.id} is queued.`));
    if (!signal.aborted) this.go.disabled = false;
  }

  /** Show another fit; returns the signal that ends this. */
  turn() {
    this.resumed = true;
    this.shown?.abort();
    this.shown = new AbortController();
    return AbortSignal.any([this.shown.signal, this.stopper.signal]);
  }

  fail(error) {
    this.live.replaceChildren(problem(error));
  }

  progress(stage, share, cancel) {
    this.live.replaceChildren(
      h("div", { class: "stage" }, h("span", {}, stage), h("span", { class: "n" }, `${Math.round(100 * share)} %`)),
      h("progress", { "aria-label": stage, ...(share > 0 && { max: 1, value: share }) }),
      cancel ? button("Cancel", cancel, QUIET) : "",
    );
  }

  /** Follow a fit by its events; open the stream again if the connection breaks before the fit has ended. */
  async follow(id, signal) {
    for (;;) {
      let last = null;
      try {
        await follow(`/fits/${id}/events`, signal, (fit) => this.update((last = fit)));
      } catch (error) {
        if (signal.aborted) return;
        if (error.status >= 400 && error.status < 500) throw error;
      }
      if (last && !UNFINISHED.includes(last.state)) return;
      await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
      if (signal.aborted) return;
    }
  }

  update(fit) {
    if (UNFINISHED.includes(fit.state)) {
      const cancel = async () => {
        try {
          await remove(`/fits/${fit.id}`);
        } catch (error) {
          if (error.status !== 409) this.fail(error);
        }
      };
      this.progress(`${fit.method}: ${fit.stage ?? fit.state}`, fit.progress ?? 0, cancel);
      return;
    }
    dispatchEvent(new Event("boxcal:changed"));
    this.live.replaceChildren(
      fit.state === "succeeded"
        ? h(
            "div",
            { class: "done" },
            h("b", {}, `Fitted v${fit.calibrator}. `),
            fit.decision,
            " ",
            h("a", { class: "button", href: `#/calibration/${fit.calibrator}` }, "Open the report"),
          )
        : problem({
            title: `The fit has ${fit.state === "failed" ? "failed" : `been ${fit.state}`}`,
            message: fit.error,
          }),
      warnings(fit.warnings),
    );
    this.list();
  }

  async list() {
    if (!may("read")) return;
    let fits;
    try {
      ({ fits } = await get("/fits?limit=20", this.stopper.signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      this.lost = true;
      this.fail(error);
      return;
    }
    const running = fits.find((fit) => UNFINISHED.includes(fit.state));
    if (running && !this.resumed && !state.stage)
      this.follow(running.id, this.turn()).catch((error) => this.fail(error));
    this.past.replaceChildren(fits.length ? fitTable(fits) : h("p", { class: "muted" }, "None yet."));
  }
}

function fitTable(fits) {
  const seconds = (fit) => ((new Date(fit.finished_at) - new Date(fit.started_at)) / 1000).toFixed(1);
  const shown = (fit) =>
    row(
      cell(ago(fit.created_at)),
      cell(fit.method),
      number(fit.samples === undefined ? "" : count(fit.samples)),
      number(fit.finished_at && fit.started_at ? `${seconds(fit)} s` : ""),
      fit.state === "succeeded"
        ? cell(h("a", { href: `#/calibration/${fit.calibrator}` }, `v${fit.calibrator}`), " ", fit.decision)
        : cell(h("b", {}, fit.state), " ", fit.error ?? fit.stage),
    );
  const head = ["when", "method", "samples", "duration", "outcome"].map((name) => h("th", {}, name));
  return table("fits", head, fits.map(shown));
}
