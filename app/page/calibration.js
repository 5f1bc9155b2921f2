// Calibration: the versions on the left; the report of the chosen one on the right.

import { calibrators, get, may, post } from "./api.js";
import { Compare } from "./compare.js";
import { actions, ago, alone, button, count, h, paragraph, problem, QUIET, redraw } from "./dom.js";
import { reportCards } from "./report.js";

export function show(main, [chosen, against]) {
  const version = (part) => (part === undefined ? undefined : Number(part));
  const page = new Calibration(main, version(chosen), version(against));
  page.start();
  return () => page.stopper.abort();
}

class Calibration {
  constructor(main, chosen, against) {
    this.chosen = chosen;
    this.against = against;
    this.rail = h("nav", { class: "card rail", "aria-label": "Calibrators" });
    this.said = h("div", { class: "said" });
    this.activation = h("div");
    this.detail = h("section", { class: "detail", tabindex: -1 }, this.said);
    this.stopper = new AbortController();
    this.act = alone(this.act.bind(this));
    main.append(this.rail, this.detail);
  }

  async start() {
    addEventListener("boxcal:activated", () => this.load(), this.stopper);
    addEventListener("boxcal:returned", () => this.failed && this.renew(), this.stopper);
    await this.renew();
  }

  async renew() {
    if (!(await this.load())) return;
    this.said.replaceChildren();
    await this.drawDetail();
  }

  fail(error) {
    this.failed = true;
    this.said.replaceChildren(problem(error));
  }

  /** Read and show which versions there are and which is active; returns whether it could. */
  async load() {
    try {
      const [records, history] = await Promise.all([calibrators(), get("/activations")]);
      const active = history.activations[0]?.version ?? 0;
      if (active !== this.active) this.said.replaceChildren(); // it was about another one
      this.records = records;
      this.rollbackTo = history.rollback_to;
      this.active = active;
      this.failed = false;
    } catch (error) {
      this.fail(error);
      return false;
    }
    this.chosen ??= this.active || this.records.find((c) => c.version)?.version || 0;
    this.drawRail();
    this.drawActivation();
    return true;
  }

  drawRail() {
    redraw(
      this.rail,
      h("h2", {}, "Calibrators"),
      h(
        "ul",
        {},
        this.records.map((c) =>
          h(
            "li",
            {},
            h(
              "a",
              { href: `#/calibration/${c.version}`, "aria-current": c.version === this.chosen ? "true" : null },
              h("span", { class: "version" }, `v${c.version}`),
              h("span", { class: "method" }, c.method),
              c.version === this.active ? h("span", { class: "badge" }, "active") : null,
              h("small", {}, c.version ? `${count(c.samples)} samples, ${ago(c.created_at)}` : "the uncalibrated model"),
            ),
          ),
        ),
      ),
      actions(
        button(
          this.rollbackTo === null ? "Nothing to roll back" : `Roll back to v${this.rollbackTo}`,
          () => this.act("/calibrators/rollback", (now) => `Rolled back: v${now.version} ${now.method} is active.`),
          { ...QUIET, disabled: this.rollbackTo === null || !may("activate") },
        ),
        may("fit") ? h("a", { class: "button quiet", href: "#/fit" }, "Fit a new one") : null,
      ),
    );
  }

  /** Activate; the service refuses if another version than the one shown here is active. */
  async act(path, said) {
    let outcome;
    try {
      outcome = h("p", { class: "notice", role: "status" }, said(await post(`${path}?expected=${this.active}`)));
    } catch (error) {
      outcome = problem(error);
    }
    dispatchEvent(new Event("boxcal:changed"));
    await this.load();
    this.said.replaceChildren(outcome);
    if (document.activeElement === document.body) this.detail.focus();
  }

  drawActivation() {
    redraw(
      this.activation,
      this.chosen === this.active
        ? h("span", { class: "badge" }, "active")
        : button(
            `Activate v${this.chosen}`,
            () => this.act(`/calibrators/${this.chosen}/activate`, (now) => `v${now.version} ${now.method} is active.`),
            { disabled: !may("activate") },
          ),
    );
  }

  async drawDetail() {
    const record = this.records.find((c) => c.version === this.chosen);
    if (!record) {
      this.detail.replaceChildren(this.said, h("p", { class: "card" }, `There is no calibrator ${this.chosen}.`));
      return;
    }
    const others = this.records.filter((c) => c.version && c.version !== this.chosen);
    const chooser = h(
      "select",
      {
        "aria-label": "Compare with",
        onchange: () => {
          this.against = chooser.value === "before" ? undefined : Number(chooser.value);
          history.replaceState(null, "", ["#/calibration", this.chosen, this.against].filter((part) => part !== undefined).join("/"));
          this.drawDetail();
        },
      },
      h("option", { value: "before" }, "softmax, on the same data"),
      others.map((c) => h("option", { value: c.version }, `v${c.version} ${c.method}`)),
    );
    if (this.against !== undefined) chooser.value = this.against;
    const heading = h(
      "header",
      {},
      h("h1", {}, `v${record.version} `, h("span", {}, record.method)),
      this.activation,
      record.version ? h("label", { class: "field compare" }, h("span", {}, "compared with"), chooser) : null,
    );
    if (!record.version) {
      this.detail.replaceChildren(
        this.said,
        h(
          "div",
          { class: "card" },
          heading,
          paragraph(
            "lead",
            "The softmax of the model. It was never fitted, so it has no report: the left half of any other report shows it.",
          ),
        ),
      );
      return;
    }
    const compared = this.against;
    let report, other, model;
    try {
      [report, other, model] = await Promise.all([
        get(`/calibrators/${record.version}/report`),
        compared === undefined ? null : get(`/calibrators/${compared}/report`),
        get("/model"),
      ]);
    } catch (error) {
      this.fail(error);
      return;
    }
    const { records, chosen, against } = this;
    if (against !== compared) return; // another one was chosen meanwhile
    redraw(
      this.detail,
      this.said,
      ...reportCards(heading, { record, report, against, other }, model.labels),
      may("fit") ? new Compare({ records, chosen, against }).card : "",
    );
  }
}
