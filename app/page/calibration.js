// Calibration: the versions on the left; the report of the chosen one on the right.

import { get, post, url } from "./api.js";
import { intervals, key, reliability, small } from "./charts.js";
import { ago, bytes, h, percent, signed } from "./dom.js";

export const title = "Calibration";

const METRICS = [
  ["error_rate", "Error rate", true],
  ["nll", "NLL", false],
  ["brier", "Brier score", false],
  ["smooth_ece", "Smooth ECE", true],
  ["ece_width", "ECE, equal width", true],
  ["ece_mass", "ECE, equal mass", true],
  ["debiased_ece", "Debiased ECE", true],
  ["ks", "KS error", true],
  ["classwise_ece", "Classwise ECE", true],
  ["brier_calibration", "Brier: calibration", false],
  ["brier_refinement", "Brier: refinement", false],
  ["mce", "MCE", true],
];
const FIRST = 5;

export function show(main, [chosen, against]) {
  const page = new Calibration(
    main,
    chosen === undefined ? undefined : Number(chosen),
    against === undefined ? undefined : Number(against),
  );
  page.load();
  return () => {};
}

class Calibration {
  constructor(main, chosen, against) {
    this.chosen = chosen;
    this.against = against;
    this.rail = h("nav", { class: "card rail", "aria-label": "Calibrators" });
    this.detail = h("section", { class: "detail" });
    main.append(this.rail, this.detail);
  }

  async load() {
    try {
      const [list, history] = await Promise.all([get("/calibrators"), get("/activations")]);
      this.records = list.calibrators;
      this.rollbackTo = history.rollback_to;
    } catch (error) {
      this.refuse(error);
      return;
    }
    this.active = this.records.find((c) => c.active);
    this.chosen ??= this.active.version || this.records.find((c) => c.version)?.version || 0;
    this.drawRail();
    await this.drawDetail();
  }

  refuse(error) {
    this.detail.replaceChildren(
      h("div", { class: "card problem", role: "alert" }, h("b", {}, `${error.title}. `), error.message),
    );
  }

  drawRail() {
    this.rail.replaceChildren(
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
              {
                href: `#/calibration/${c.version}`,
                "aria-current": c.version === this.chosen ? "true" : null,
              },
              h("span", { class: "version" }, `v${c.version}`),
              h("span", { class: "method" }, c.method),
              c.active ? h("span", { class: "badge" }, "active") : null,
              h(
                "small",
                {},
                c.version
                  ? `${c.samples.toLocaleString("en")} samples, ${ago(c.created_at)}`
                  : "the uncalibrated model",
              ),
            ),
          ),
        ),
      ),
      h(
        "div",
        { class: "actions" },
        h(
          "button",
          {
            type: "button",
            class: "quiet",
            disabled: this.rollbackTo === null,
            onclick: () => this.rollback(),
          },
          this.rollbackTo === null ? "Nothing to roll back" : `Roll back to v${this.rollbackTo}`,
        ),
        h("a", { class: "button quiet", href: "#/fit" }, "Fit a new one"),
      ),
    );
  }

  async act(path, said) {
    try {
      const now = await post(path);
      this.notice = h("p", { class: "notice", role: "status" }, said(now));
      dispatchEvent(new Event("boxcal:changed"));
    } catch (error) {
      this.notice = h(
        "p",
        { class: "notice problem", role: "alert" },
        h("b", {}, `${error.title}. `),
        error.message,
      );
    }
    await this.load();
  }

  rollback() {
    return this.act(
      "/calibrators/rollback",
      (now) => `Rolled back: v${now.version} ${now.method} is active.`,
    );
  }

  async drawDetail() {
    const record = this.records.find((c) => c.version === this.chosen);
    if (!record) {
      this.detail.replaceChildren(h("p", { class: "card" }, `There is no calibrator ${this.chosen}.`));
      return;
    }
    const others = this.records.filter((c) => c.version && c.version !== this.chosen);
    const chooser = h(
      "select",
      {
        "aria-label": "Compare with",
        onchange: () => {
          location.hash = `#/calibration/${this.chosen}${chooser.value === "before" ? "" : `/${chooser.value}`}`;
        },
      },
      h("option", { value: "before" }, "softmax, on the same data"),
      others.map((c) => h("option", { value: c.version }, `v${c.version} ${c.method}`)),
    );
    if (this.against !== undefined) chooser.value = this.against;
    const activate = record.active
      ? h("span", { class: "badge" }, "active")
      : h(
          "button",
          {
            type: "button",
            onclick: () =>
              this.act(
                `/calibrators/${record.version}/activate`,
                (now) => `v${now.version} ${now.method} is active.`,
              ),
          },
          `Activate v${record.version}`,
        );
    const heading = h(
      "header",
      {},
      h("h1", {}, `v${record.version} `, h("span", {}, record.method)),
      activate,
      record.version ? h("label", { class: "field compare" }, h("span", {}, "compared with"), chooser) : null,
    );
    const notice = this.notice;
    this.notice = null;
    if (!record.version) {
      this.detail.replaceChildren(
        notice ?? "",
        h(
          "div",
          { class: "card" },
          heading,
          h(
            "p",
            { class: "lead" },
            "The softmax of the model. It was never fitted, so it has no report: the left half of any other report shows it.",
          ),
        ),
      );
      return;
    }
    let report, other;
    try {
      [report, other] = await Promise.all([
        get(`/calibrators/${record.version}/report`),
        this.against === undefined ? null : get(`/calibrators/${this.against}/report`),
      ]);
    } catch (error) {
      this.refuse(error);
      return;
    }
    this.detail.replaceChildren(
      notice ?? "",
      h(
        "div",
        { class: "card" },
        heading,
        this.verdict(report),
        this.warnings(report),
        this.diagrams(report, other, record),
      ),
      this.metrics(report, other),
      this.classes(report),
      this.facts(record, report),
    );
  }

  verdict(report) {
    const { smooth_ece: e, nll } = report.metrics;
    const sure = e.after.p_value > 0.05;
    return h(
      "p",
      { class: "lead" },
      `On ${report.samples.toLocaleString("en")} samples that the fit did not see, the calibration error ${e.after.value < e.before.value ? "falls" : "rises"} from `,
      h("b", {}, percent(e.before.value)),
      " to ",
      h("b", {}, percent(e.after.value)),
      sure ? "; perfect calibration would look the same (p = " : "; that is more than chance explains (p = ",
      `${e.after.p_value.toFixed(2)}). `,
      nll.difference.high < 0
        ? "NLL is clearly lower."
        : nll.difference.low > 0
          ? "NLL is clearly higher."
          : "NLL is not clearly different.",
    );
  }

  /** What is wrong with the data, and why `auto` chose this method. */
  warnings(report) {
    const found = report.warnings ?? [];
    return [
      report.why ? h("p", {}, report.why) : "",
      found.length
        ? h(
            "ul",
            { class: "warnings" },
            found.map(({ severity, message }) =>
              h("li", { class: severity }, h("b", {}, `${severity}: `), message),
            ),
          )
        : "",
    ];
  }

  limits(report) {
    const { upper, lower } = report.bounds,
      found = [];
    if (upper.mean < 1) found.push([upper.mean, `learned upper bound ${percent(upper.mean)}`]);
    const ceiling = 1 - (report.classes - 1) * lower.mean;
    if (lower.mean > 0 && ceiling > 0)
      found.push([ceiling, `learned lower bound ${percent(lower.mean)} leaves ${percent(ceiling)}`]);
    return found;
  }

  diagrams(report, other, record) {
    const { before, after } = report.reliability,
      left = other ? other.reliability.after : before;
    const tallest = Math.max(...left.histogram.counts, ...after.histogram.counts);
    const figure = (name, data, kind, bounds) =>
      h("figure", {}, h("figcaption", {}, name), reliability(data, { kind, bounds, tallest }));
    return h(
      "div",
      {},
      h(
        "div",
        { class: "pair" },
        figure(
          other ? `v${this.against} ${other.method}` : "Before: softmax",
          left,
          "before",
          other ? this.limits(other) : [],
        ),
        figure(
          `${other ? "" : "After: "}v${record.version} ${report.method}`,
          after,
          "answer",
          this.limits(report),
        ),
      ),
      other
        ? h(
            "p",
            { class: "muted small" },
            `Each was evaluated on its own validation data: ${other.samples} and ${report.samples} samples. The comparison is valid only if both come from the same distribution.`,
          )
        : null,
      key(
        ["band", "95 % of perfectly calibrated models"],
        ["curve", "accuracy, smoothed"],
        ["ring", "bin, with its 95 % interval"],
        ["accuracy", "accuracy"],
        ["confidence", "mean confidence"],
        ...(this.limits(report).length ? [["limit", "learned bound"]] : []),
      ),
    );
  }

  metrics(report, other) {
    const rows = METRICS.filter(([name]) => report.metrics[name]);
    const row = ([name, label, share], i) => {
      const own = report.metrics[name],
        left = other ? other.metrics[name].after : own.before,
        right = own.after;
      const write = (v) => (v === null ? "infinite" : share ? percent(v, 2) : v.toFixed(4));
      const high =
        Math.max(
          ...[left, right]
            .flatMap((m) => [m.value, m.high, m.perfect])
            .filter((v) => v !== null && Number.isFinite(v)),
        ) * 1.04;
      const d = other ? null : own.difference,
        verdict = !d ? "" : d.high < 0 ? "better" : d.low > 0 ? "worse" : "unclear";
      const sign = (v) =>
          v === null ? "–" : share ? `${v < 0 ? "−" : "+"}${(100 * Math.abs(v)).toFixed(2)}` : signed(v),
        unit = share ? " pp" : "";
      return h(
        "tr",
        { class: i >= FIRST ? "extra" : "" },
        h("th", { scope: "row" }, label),
        h("td", { class: "n" }, write(left.value)),
        h("td", { class: "n strong" }, write(right.value)),
        h(
          "td",
          { class: "plot" },
          intervals(
            [
              { ...left, kind: "before" },
              { ...right, kind: "answer" },
            ],
            { low: 0, high },
          ),
        ),
        d
          ? h(
              "td",
              { class: `n verdict ${verdict}` },
              h("span", { class: "mark" }, { better: "▼ ", worse: "▲ ", unclear: "≈ " }[verdict]),
              sign(d.value),
              unit,
              h("small", {}, ` ${sign(d.low)} to ${sign(d.high)}`),
            )
          : null,
      );
    };
    const table = h(
      "table",
      { class: "metrics short" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("td"),
          h("th", { class: "n" }, other ? `v${this.against}` : "before"),
          h("th", { class: "n" }, other ? `v${this.chosen}` : "after"),
          h("th", {}, "95 % intervals"),
          other ? null : h("th", { class: "n" }, "difference, 95 %"),
        ),
      ),
      h("tbody", {}, rows.map(row)),
    );
    const toggle = h(
      "button",
      {
        type: "button",
        class: "link",
        "aria-expanded": "false",
        onclick: () => {
          const all = !table.classList.toggle("short");
          toggle.setAttribute("aria-expanded", all);
          toggle.textContent = all ? "Fewer metrics" : `All ${rows.length} metrics`;
        },
      },
      `All ${rows.length} metrics`,
    );
    return h(
      "div",
      { class: "card" },
      h("h2", {}, "Metrics"),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, table),
      h(
        "div",
        { class: "under" },
        toggle,
        key(
          ["before-dot", other ? `v${this.against}` : "before"],
          ["answer-dot", other ? `v${this.chosen}` : "after"],
          ["perfect", "if perfectly calibrated"],
        ),
      ),
    );
  }

  classes(report) {
    const panels = report.reliability.classes,
      all = panels.length === report.classes;
    return h(
      "details",
      { class: "card single" },
      h("summary", {}, all ? "Reliability of every class" : `The ${panels.length} worst calibrated classes`),
      h(
        "div",
        { class: "multiples" },
        panels.map((panel) => small(panel, String(panel.class))),
      ),
      key(["before-line", "before"], ["curve", "after"], ["band", "95 % if calibrated"]),
    );
  }

  facts(record, report) {
    const parameters = Object.entries(record.spec?.parameters ?? {}).map(([name, value]) => [
      name,
      typeof value === "number"
        ? String(Number(value.toPrecision(6)))
        : Array.isArray(value)
          ? `${value.length} numbers`
          : JSON.stringify(value),
    ]);
    const entries = [
      ...parameters,
      ["changed labels", `${report.changed_labels}`],
      ["folds", report.folds],
      ["backbone", `${record.backbone.name}, ${record.backbone.num_classes} classes`],
      ["artifact", `${bytes(record.size)}, sha256 ${record.sha256.slice(0, 12)}…`],
      ["made", new Date(record.created_at).toLocaleString("en-GB")],
    ];
    const link = (name, label) =>
      h(
        "a",
        {
          href: url(`calibrators/${record.version}/${name}`).href,
          download: name === "artifact" ? "" : null,
        },
        label,
      );
    return h(
      "div",
      { class: "card facts" },
      h("h2", {}, "Details"),
      h(
        "dl",
        {},
        entries.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
      ),
      h(
        "p",
        { class: "links" },
        link("artifact", "artifact"),
        link("report", "report as JSON"),
        link("reliability.svg", "diagram as SVG"),
      ),
    );
  }
}
