// Comparison of versions, and of methods, on one validation set that is uploaded: all differences are paired.

import { get, upload } from "./api.js";
import {
  acceptDrops, actions, button, bytes, count, definitions, field, fileChoice, h, LINK, number, paragraph, problem,
  row, scroll, signed, table, warnings,
} from "./dom.js";

const COLUMNS = [
  ["error_rate", "Error rate", true],
  ["smooth_ece", "smECE", true],
  ["ece_mass", "emECE", true],
  ["ece_width", "ewECE", true],
  ["nll", "NLL", false],
  ["brier", "Brier", false],
];
const PAIRED = ["nll", "brier", "smooth_ece", "error_rate"];
const TITLES = { nll: "NLL", brier: "Brier score", smooth_ece: "Smooth ECE", error_rate: "Error rate" };
const MOST = 8; // versions of a request
const PRESELECTED = ["pb", "ts", "ts+pb"];

// Kept while the page is open: the reports of several versions are read after one upload; `view` is what is shown.
const state = { file: null, result: null, stage: null, view: null };

export class Compare {
  constructor({ records, chosen, against }) {
    state.view = this;
    const initial = [against ?? 0, chosen];
    [this.file, this.drop] = fileChoice("compared", "drop", "", (file) => this.choose(file));
    const check = (name, value, label, checked) =>
      h(
        "label",
        {},
        h("input", { type: "checkbox", name, value, checked, onchange: () => this.changed() }),
        ` ${label}`,
      );
    this.versions = h(
      "fieldset",
      { class: "choices" },
      h("legend", {}, "Versions, as they are"),
      records.map((c) =>
        check("version", c.version, `v${c.version} ${c.method}`, initial.includes(c.version)),
      ),
    );
    this.methods = h("fieldset", { class: "choices" }, h("legend", {}, "Methods, cross-fitted on the file"));
    this.reference = h("select", { id: "reference", onchange: () => this.changed() });
    this.go = button("Compare", () => this.submit());
    this.live = h("div", { class: "live", "aria-live": "polite" });
    this.preferred = initial[0];
    this.card = h(
      "details",
      { class: "card single compared", open: Boolean(state.result ?? state.stage) },
      h("summary", {}, "Compare versions and methods on one file"),
      paragraph(
        "muted small",
        "Every version and method answers the same samples, so the differences are paired. Use data that no version was fitted to.",
      ),
      this.file,
      this.drop,
      this.versions,
      field("Compare versions with", this.reference),
      h("details", {}, h("summary", {}, "Methods"), this.methods),
      actions(this.go),
      this.live,
    );
    acceptDrops(this.card, this.drop, (file) => this.choose(file));
    this.card.addEventListener("toggle", () => this.card.open && this.loadMethods(check), { once: true });
    this.describe();
    this.changed();
    if (state.result) this.show(state.result);
    else if (state.stage) this.progress(...state.stage);
  }

  async loadMethods(check) {
    try {
      const { methods } = await get("/methods");
      const preselect = () => {
        for (const box of this.methods.querySelectorAll("input")) box.checked = PRESELECTED.includes(box.value);
        this.changed();
      };
      this.methods.append(
        ...methods.filter(({ reads }) => reads === "logits").map(({ name }) => check("method", name, name, false)),
        button(`choose ${PRESELECTED.join(", ")}`, preselect, LINK),
      );
    } catch (error) {
      this.fail(error);
    }
  }

  choose(file) {
    Object.assign(state, { file, result: null });
    if (!state.stage) this.live.replaceChildren();
    this.describe();
    this.changed();
  }

  describe() {
    const { file } = state;
    this.drop.classList.toggle("chosen", Boolean(file));
    this.drop.firstChild.replaceChildren(
      ...(file
        ? [h("b", {}, file.name), ` · ${bytes(file.size)}`]
        : [h("b", {}, "Drop labelled data"), " or ", h("u", {}, "choose a file"), ", as for a fit"]),
    );
  }

  checked(fieldset) {
    return [...fieldset.querySelectorAll(":checked")].map((box) => box.value);
  }

  changed() {
    const versions = this.checked(this.versions);
    const before = this.reference.value || String(this.preferred);
    this.reference.replaceChildren(...versions.map((v) => h("option", { value: v }, `v${v}`)));
    this.reference.value = versions.includes(before) ? before : (versions.at(-1) ?? "");
    this.go.disabled = state.stage || !state.file || versions.length > MOST || !(versions.length + this.checked(this.methods).length);
  }

  async submit() {
    const others = this.checked(this.versions).filter((v) => v !== this.reference.value);
    const versions = [this.reference.value, ...others].filter(Boolean);
    const query = [
      ...versions.map((v) => `versions=${v}`),
      ...this.checked(this.methods).map((name) => `methods=${encodeURIComponent(name)}`),
    ].join("&");
    const form = new FormData();
    form.append("file", state.file);
    const advance = (...stage) => state.view.progress(...(state.stage = stage));
    state.result = null;
    advance("Uploading");
    try {
      state.result = await upload(`/compare?${query}`, form, (share) =>
        advance(share < 1 ? "Uploading" : "Comparing", share < 1 ? share : undefined),
      );
      state.result.file = form.get("file").name;
      state.view.show(state.result);
    } catch (error) {
      state.view.fail(error);
    }
    state.stage = null;
    state.view.changed();
  }

  progress(stage, share) {
    this.go.disabled = true;
    this.live.replaceChildren(
      h("div", { class: "stage" }, stage),
      h("progress", { "aria-label": stage, ...(share !== undefined && { max: 1, value: share }) }),
    );
  }

  fail(error) {
    this.live.replaceChildren(problem(error));
  }

  show(result) {
    const left = Object.entries(result.left_out);
    this.live.replaceChildren(
      ...result.sentences.map((sentence) => paragraph("lead", sentence)),
      warnings(result.warnings),
      scroll("Comparison", results(result)),
      paragraph(
        "muted small",
        `${result.file}: ${count(result.fit_samples)} samples. Lower is better; the standard error is in brackets. ▼ lower and ▲ higher than the row that it is compared with; *: the paired 95 % interval does not contain 0; bold: the best of its column.`,
        left.length ? ` Left out: ${left.map(([name, why]) => `${name} (${why})`).join("; ")}.` : "",
      ),
      ...result.methods.filter((row) => row.method.startsWith("version")).map(differences),
    );
  }
}

const write = (value, share, digits = share ? 2 : 4) =>
  value === null ? "infinite" : ((share ? 100 : 1) * value).toFixed(digits);

function results({ methods }) {
  const best = Object.fromEntries(
    COLUMNS.map(([name, , share]) => [
      name,
      Math.min(...methods.map((row) => Number(write(row.metrics[name].value ?? Infinity, share)))),
    ]),
  );
  const cell = (row, [name, , share]) => {
    const { value, standard_error: error, improves, clear } = row.metrics[name];
    const mark = improves === null ? "" : ` ${improves ? "▼" : "▲"}${clear ? "*" : ""}`;
    const text = write(value, share);
    return number(
      Number(text) === best[name] ? h("b", {}, text) : text,
      h("small", {}, ` (${error === null ? "–" : write(error, share)})`),
      h("span", { class: `mark ${improves === null ? "" : improves ? "better" : "worse"}` }, mark),
    );
  };
  const head = COLUMNS.map(([, label, share]) => h("th", { class: "n" }, share ? `${label} %` : label));
  return table(
    "papers",
    [h("th", {}, ""), head, h("th", { class: "n" }, "changed labels")],
    methods.map((one) =>
      row(h("th", { scope: "row" }, one.method), COLUMNS.map((column) => cell(one, column)), number(one.changed_labels)),
    ),
  );
}

/** The paired differences of one version, with their intervals on one scale per metric. */
function differences(row) {
  return h(
    "details",
    { class: "differences", open: true },
    h("summary", {}, `${row.method} less ${row.base}`),
    definitions(
      PAIRED.map((name) => {
        const { change } = row.metrics[name];
        const share = name === "smooth_ece" || name === "error_rate";
        const text = (v) => (v === null ? "–" : signed(share ? 100 * v : v, share ? 2 : 4));
        const span = () => `95 % interval ${text(change.low)} to ${text(change.high)}`;
        return [TITLES[name], change ? `${text(change.value)}${share ? " pp" : ""}, ${span()}` : "–"];
      }),
    ),
  );
}
