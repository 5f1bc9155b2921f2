// Drawings as SVG: reliability diagrams, intervals of metrics, lines over time.

import { count, h, percent, s } from "./dom.js";

const SIZE = 320,
  PAD = { left: 40, right: 12, top: 10, bottom: 10 },
  STRIP = 64,
  FOOT = 34;
const x = (v) => PAD.left + v * SIZE;
const y = (v) => PAD.top + (1 - v) * SIZE;

/** Return the index ranges of a curve without gaps: it has no points where too few samples are near. */
function runs(mesh) {
  const steps = mesh.slice(1).map((v, i) => v - mesh[i]);
  const least = Math.min(...steps, Infinity),
    found = [];
  let start = 0;
  steps.forEach((step, i) => {
    if (step > 1.5 * least) {
      found.push([start, i + 1]);
      start = i + 1;
    }
  });
  if (mesh.length) found.push([start, mesh.length]);
  return found;
}

const line = (kind, x1, y1, x2, y2, ...inside) => s("line", { class: kind, x1, y1, x2, y2 }, inside);
const text = (kind, x, y, anchor, words) => s("text", { class: kind, x, y, "text-anchor": anchor }, words);
const drawing = (kind, width, height, label, ...parts) =>
  s("svg", { class: kind, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts);

const path = (xs, ys, [px, py] = [x, y]) =>
  xs.map((v, i) => `${i ? "L" : "M"}${px(v).toFixed(1)} ${py(ys[i]).toFixed(1)}`).join("");

/** The band of a curve, and the curve, without its gaps. */
function bandAndCurve({ confidence, accuracy, band_low, band_high }, kind, axes) {
  const parts = runs(confidence).map(([a, b]) => {
    const cut = (values) => values.slice(a, b);
    const back = path(cut(confidence).reverse(), cut(band_low).reverse(), axes).replace("M", "L");
    return {
      band: s("path", { class: "band", d: `${path(cut(confidence), cut(band_high), axes)}${back}Z` }),
      line: s("path", { class: `curve ${kind}`, d: path(cut(confidence), cut(accuracy), axes) }),
    };
  });
  return { bands: parts.map(({ band }) => band), lines: parts.map(({ line }) => line) };
}

/** One reliability diagram with its histogram. `kind` is the colour: before, calibrated or answer. */
export function reliability(data, { kind, bounds = [], tallest }) {
  const { curve, bins, histogram, samples } = data;
  const height = PAD.top + SIZE + PAD.bottom + STRIP + FOOT,
    width = PAD.left + SIZE + PAD.right;
  const grid = [0, 0.25, 0.5, 0.75, 1].flatMap((v) => [
    line("grid", x(0), y(v), x(1), y(v)),
    line("grid", x(v), y(0), x(v), y(1)),
    text("tick", x(0) - 6, y(v) + 4, "end", `${100 * v}`),
  ]);
  const { bands, lines } = bandAndCurve(curve, kind);
  const marks = bins.map((bin) => {
    const place = { cx: x(bin.confidence), cy: y(bin.accuracy), r: 3 + 6 * Math.sqrt(bin.count / samples) };
    const words = `Confidence ${percent(bin.low, 0)} to ${percent(bin.high, 0)}: ${bin.count} samples, ${percent(bin.accuracy)} correct (95 %: ${percent(bin.accuracy_low)} to ${percent(bin.accuracy_high)})`;
    return s(
      "g",
      { class: `bin ${kind}`, opacity: Math.min(1, 0.3 + bin.count / 30).toFixed(2) },
      line(null, place.cx, y(bin.accuracy_low), place.cx, y(bin.accuracy_high)),
      s("circle", place),
      s("circle", { ...place, r: 13, class: "catch" }, s("title", {}, words)),
    );
  });
  const floor = PAD.top + SIZE + PAD.bottom + STRIP,
    most = tallest ?? Math.max(...histogram.counts),
    w = SIZE / histogram.counts.length;
  const columns = histogram.counts.map((n, i) => {
    const height = (STRIP * n) / most;
    return n ? s("rect", { class: "column", x: x(0) + i * w + 0.5, width: w - 1, y: floor - height, height }) : null;
  });
  const mark = (v, name) => line(name, x(v), floor - STRIP, x(v), floor);
  const limits = bounds.map(([v, name]) => line("limit", x(v), y(0), x(v), y(1), s("title", {}, name)));
  const gap = data.mean_confidence - data.accuracy,
    beside = x(Math.min(data.accuracy, data.mean_confidence)) - 6;
  const note = (place, words, name = "note") => text(name, beside, floor - STRIP + 11 + 14 * place, "end", words);
  const summary = `Reliability: accuracy ${percent(data.accuracy)}, mean confidence ${percent(data.mean_confidence)}.`;
  return drawing(
    "reliability",
    width,
    height,
    summary,
    grid,
    bands,
    line("diagonal", x(0), y(0), x(1), y(1)),
    limits,
    lines,
    marks,
    s(
      "text",
      { class: "axis", transform: `translate(11 ${y(0.5)}) rotate(-90)`, "text-anchor": "middle" },
      "accuracy, %",
    ),
    line("base", x(0), floor, x(1), floor),
    columns,
    mark(data.accuracy, "accuracy"),
    mark(data.mean_confidence, "confidence"),
    note(0, `${percent(data.accuracy)} accuracy`),
    note(1, `${percent(data.mean_confidence)} confidence`),
    note(
      2,
      Math.abs(gap) < 0.0005 ? "no gap" : `${percent(Math.abs(gap))} ${gap > 0 ? "over" : "under"}confident`,
      "note strong",
    ),
    [0, 0.5, 1].map((v) => text("tick", x(v), floor + 15, "middle", `${100 * v}`)),
    text("axis", x(0.5), floor + 29, "middle", "confidence, %"),
  );
}

/** Values with intervals on one scale, and a tick for what perfect calibration would give. */
export function intervals(rows, { width = 220, low, high }) {
  const place = (v) => 6 + ((width - 12) * (Math.min(high, Math.max(low, v)) - low)) / (high - low || 1);
  const height = rows.length * 13 + 5;
  return s(
    "svg",
    { class: "intervals", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    rows.map(({ value, low: from, high: to, perfect, kind }, i) => {
      const middle = 9 + i * 13;
      if (value === null || value === undefined)
        return text("note", width - 6, middle + 4, "end", "infinite");
      return s(
        "g",
        { class: kind },
        s("path", { class: "span", d: `M${place(from ?? value)} ${middle - 3}v6m0 -3H${place(to ?? high)}m0 -3v6` }),
        perfect === undefined ? null : line("perfect", place(perfect), middle - 6, place(perfect), middle + 6),
        s("circle", { cx: place(value), cy: middle, r: 4 }),
      );
    }),
  );
}

const finite = (series) => series.flatMap(({ points }) => points.map(([, v]) => v)).filter(Number.isFinite);

/** Lines over time, each a list of [milliseconds, value]. */
export function lines(
  series,
  { width = 560, height = 130, seconds = 300, unit = (v) => v, now = Date.now(), least = 0 },
) {
  const left = 52,
    bottom = 20,
    top = 8;
  const most = nice(Math.max(least, ...finite(series)));
  const px = (t) => width - 8 - ((width - left - 8) * (now - t)) / (1000 * seconds);
  const py = (v) => top + (height - top - bottom) * (1 - v / (most || 1));
  return drawing(
    "lines",
    width,
    height,
    series.map(({ name, points }) => `${name}: ${unit(points.at(-1)?.[1] ?? 0)}`).join("; "),
    [0, 0.5, 1].map((f) => [
      line("grid", left, py(f * most), width - 8, py(f * most)),
      text("tick", left - 6, py(f * most) + 4, "end", unit(f * most)),
    ]),
    [seconds, seconds / 2, 0].map((ago) =>
      text("tick", px(now - 1000 * ago), height - 4, ago ? "middle" : "end", ago ? `−${ago / 60} min` : "now"),
    ),
    series.map(({ kind, points }) => {
      const shown = points
        .filter(([t, v]) => Number.isFinite(v) && now - t <= 1000 * seconds)
        .map(([t, v]) => [px(t).toFixed(1), py(v).toFixed(1)]);
      if (shown.length > 1) return s("polyline", { class: `line ${kind}`, points: shown.join(" ") });
      return shown.map(([cx, cy]) => s("circle", { class: `dot ${kind}`, cx, cy, r: 2 }));
    }),
  );
}

/** Evidence by the number of labels, as odds; each line is a list of [labels, log E] with a threshold. */
export function evidence(series, { labels, width = 560, height = 200 }) {
  const left = 74,
    bottom = 22,
    top = 10,
    right = 10;
  const decades = (v) => v / Math.LN10;
  const values = finite(series);
  const high = Math.ceil(decades(Math.max(...values, ...series.map(({ threshold }) => threshold))) + 0.2),
    low = Math.max(-4, Math.floor(decades(Math.min(0, ...values))));
  const step = Math.ceil((high - low) / 5);
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) ticks.push(v);
  const px = (n) => left + ((width - left - right) * n) / (labels || 1);
  const py = (v) => top + ((height - top - bottom) * (high - Math.max(low, decades(v)))) / (high - low);
  const odds = (v) =>
    v > 6 ? `1e${v} : 1` : v < 0 ? `1 : ${(10 ** -v).toLocaleString("en")}` : `${(10 ** v).toLocaleString("en")} : 1`;
  const now = ({ points }) => odds(Number(decades(points.at(-1)[1] ?? 0).toFixed(1)));
  return drawing(
    "lines evidence",
    width,
    height,
    `Evidence after ${labels} labels: ${series.map((one) => `${one.name} ${now(one)}`).join("; ")}`,
    ticks.map((v) => [
      line("grid", left, py(v * Math.LN10), width - right, py(v * Math.LN10)),
      text("tick", left - 6, py(v * Math.LN10) + 4, "end", odds(v)),
    ]),
    [
      [0, "start", ""],
      [0.5, "middle", ""],
      [1, "end", " labels"],
    ].map(([part, anchor, unit]) =>
      text("tick", px(part * labels), height - 5, anchor, `${count(Math.round(part * labels))}${unit}`),
    ),
    series.map(({ kind, threshold, points }) => {
      const shown = points.filter(([, v]) => Number.isFinite(v)).map(([n, v]) => `${px(n).toFixed(1)},${py(v).toFixed(1)}`);
      return [
        line(`threshold ${kind}`, left, py(threshold), width - right, py(threshold)),
        s("polyline", { class: `line ${kind}`, points: shown.join(" ") }),
      ];
    }),
  );
}

function nice(v) {
  if (!(v > 0)) return 1;
  const size = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 2.5, 5, 10].map((f) => f * size).find((f) => f >= v);
}

export const key = (...entries) =>
  h(
    "p",
    { class: "keys" },
    entries.map(([kind, text]) => h("span", {}, h("i", { class: `key ${kind}` }), text)),
  );

/** Before and after of one class, small. */
export function small(panel, label) {
  const side = 120,
    at = (v) => 4 + v * side,
    up = (v) => 4 + (1 - v) * side;
  const before = bandAndCurve(panel.before.curve, "before", [at, up]),
    after = bandAndCurve(panel.after.curve, "answer", [at, up]);
  return h(
    "figure",
    {},
    h("figcaption", {}, label, h("small", {}, ` ${panel.positives}`)),
    drawing(
      "small-multiple",
      side + 8,
      side + 8,
      `Reliability of class ${label}`,
      s("rect", { class: "frame", x: 4, y: 4, width: side, height: side }),
      after.bands,
      line("diagonal", 4, 4 + side, 4 + side, 4),
      before.lines,
      after.lines,
    ),
  );
}
