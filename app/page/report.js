// The report of a calibrator, as cards; beside it the uncalibrated model, or the report of another version.

import { hasKey, save, url } from "./api.js";
import { intervals, key, reliability, small } from "./charts.js";
import {
  button, bytes, count, definitions, h, LINK, number, paragraph, percent, problem, scroll, signed, table, warnings,
} from "./dom.js";

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

/** Return the cards of a report under a heading; `other` is the report to show beside it, or null. */
export function reportCards(heading, { record, report, against, other }, labels) {
  return [
    h(
      "div",
      { class: "card" },
      heading,
      verdict(report),
      report.why ? h("p", {}, report.why) : "",
      warnings(report.warnings),
      diagrams(record, report, against, other),
    ),
    metrics(record, report, against, other),
    classes(report, labels),
    facts(record, report),
  ];
}

function verdict(report) {
  const { smooth_ece: e, nll } = report.metrics;
  const sure = e.after.p_value > 0.05;
  const { low, high } = e.difference;
  const clear = high < 0 || low > 0;
  const words = clear ? [high < 0 ? "falls from " : "rises from ", " to ", ""] : ["is ", " before and ", " after, which is not clearly different"];
  return paragraph(
    "lead",
    `On ${count(report.samples)} samples that the fit did not see, the calibration error ${words[0]}`,
    h("b", {}, percent(e.before.value)),
    words[1],
    h("b", {}, percent(e.after.value)),
    words[2],
    sure ? "; perfect calibration would look the same (p = " : "; that is more than chance explains (p = ",
    `${e.after.p_value.toFixed(2)}). `,
    nll.difference.high < 0
      ? "NLL is clearly lower."
      : nll.difference.low > 0
        ? "NLL is clearly higher."
        : "NLL is not clearly different.",
  );
}

function limits(report) {
  const { upper, lower } = report.bounds,
    found = [];
  if (upper.mean < 1) found.push([upper.mean, `learned upper bound ${percent(upper.mean)}`]);
  const ceiling = 1 - (report.classes - 1) * lower.mean;
  if (lower.mean > 0 && ceiling > 0)
    found.push([ceiling, `learned lower bound ${percent(lower.mean)} leaves ${percent(ceiling)}`]);
  return found;
}

function diagrams(record, report, against, other) {
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
      figure(other ? `v${against} ${other.method}` : "Before: softmax", left, "before", other ? limits(other) : []),
      figure(`${other ? "" : "After: "}v${record.version} ${report.method}`, after, "answer", limits(report)),
    ),
    other
      ? paragraph(
          "muted small",
          `This is not a paired comparison: each version was evaluated on its own validation data (${other.samples} and ${report.samples} samples), which the service does not keep. For a paired comparison, upload one file below.`,
        )
      : null,
    key(
      ["band", "95 % of perfectly calibrated models"],
      ["curve", "accuracy, smoothed"],
      ["ring", "bin, with its 95 % interval"],
      ["accuracy", "accuracy"],
      ["confidence", "mean confidence"],
      ...(limits(report).length ? [["limit", "learned bound"]] : []),
    ),
  );
}

function metrics(record, report, against, other) {
  const rows = METRICS.filter(([name]) => report.metrics[name]);
  const row = ([name, label, share], i) => {
    const own = report.metrics[name],
      left = other ? other.metrics[name].after : own.before,
      right = own.after;
    const write = (v) => (v === null ? "infinite" : share ? percent(v, 2) : v.toFixed(4));
    const ends = [left, right].flatMap((m) => [m.value, m.high, m.perfect]);
    const high = Math.max(...ends.filter((v) => Number.isFinite(v))) * 1.04;
    const compared = [
      { ...left, kind: "before" },
      { ...right, kind: "answer" },
    ];
    const d = other ? null : own.difference,
      verdict = !d ? "" : d.high < 0 ? "better" : d.low > 0 ? "worse" : "unclear";
    const sign = (v) =>
        v === null ? "–" : share ? `${v < 0 ? "−" : "+"}${(100 * Math.abs(v)).toFixed(2)}` : signed(v),
      unit = share ? " pp" : "";
    return h(
      "tr",
      { class: i >= FIRST ? "extra" : "" },
      h("th", { scope: "row" }, label),
      number(write(left.value)),
      h("td", { class: "n strong" }, write(right.value)),
      h("td", { class: "plot" }, intervals(compared, { low: 0, high })),
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
  const shown = table(
    "metrics short",
    [
      h("td"),
      h("th", { class: "n" }, other ? `v${against}` : "before"),
      h("th", { class: "n" }, other ? `v${record.version}` : "after"),
      h("th", {}, "95 % intervals"),
      other ? null : h("th", { class: "n" }, "difference, 95 %"),
    ],
    rows.map(row),
  );
  const flip = () => {
    const all = !shown.classList.toggle("short");
    toggle.setAttribute("aria-expanded", all);
    toggle.textContent = all ? "Fewer metrics" : `All ${rows.length} metrics`;
  };
  const toggle = button(`All ${rows.length} metrics`, flip, { ...LINK, "aria-expanded": "false" });
  return h(
    "div",
    { class: "card" },
    h("h2", {}, "Metrics"),
    scroll("Table", shown),
    h(
      "div",
      { class: "under" },
      toggle,
      key(
        ["before-dot", other ? `v${against}` : "before"],
        ["answer-dot", other ? `v${record.version}` : "after"],
        ["perfect", "if perfectly calibrated"],
      ),
    ),
  );
}

function classes(report, labels) {
  const panels = report.reliability.classes,
    all = panels.length === report.classes;
  return h(
    "details",
    { class: "card single" },
    h("summary", {}, all ? "Reliability of every class" : `The ${panels.length} worst calibrated classes`),
    h("div", { class: "multiples" }, panels.map((panel) => small(panel, labels[panel.class] ?? panel.class))),
    key(["before-line", "before"], ["curve", "after"], ["band", "95 % if calibrated"]),
  );
}

function facts(record, report) {
  const written = (value) =>
    typeof value === "number" ? String(Number(value.toPrecision(6))) : Array.isArray(value) ? `${value.length} numbers` : JSON.stringify(value);
  const entries = [
    ...Object.entries(record.spec?.parameters ?? {}).map(([name, value]) => [name, written(value)]),
    ["changed labels", `${report.changed_labels}`],
    ["folds", report.folds],
    ["backbone", `${record.backbone.name}, ${record.backbone.num_classes} classes`],
    ["artifact", `${bytes(record.size)}, sha256 ${record.sha256.slice(0, 12)}…`],
    ["made", new Date(record.created_at).toLocaleString("en-GB")],
  ];
  const link = (name, label, file) =>
    h(
      "a",
      {
        href: url(`calibrators/${record.version}/${name}`).href,
        download: name === "artifact" ? "" : null,
        onclick: (event) => {
          if (!hasKey()) return;
          event.preventDefault();
          save(`/calibrators/${record.version}/${name}`, `calibrator-${record.version}${file}`).catch((error) =>
            event.target.after(problem(error)),
          );
        },
      },
      label,
    );
  return h(
    "div",
    { class: "card facts" },
    h("h2", {}, "Details"),
    definitions(entries),
    paragraph("links", link("artifact", "artifact", ".safetensors"), link("report", "report as JSON", "-report.json"), link("reliability.svg", "diagram as SVG", ".svg")),
  );
}
