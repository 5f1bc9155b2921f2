// Drawings as SVG: reliability diagrams, intervals of metrics, lines over time.

import { h, percent, s } from "./dom.js";

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
    s("line", { class: "grid", x1: x(0), x2: x(1), y1: y(v), y2: y(v) }),
    s("line", { class: "grid", x1: x(v), x2: x(v), y1: y(0), y2: y(1) }),
    s("text", { class: "tick", x: x(0) - 6, y: y(v) + 4, "text-anchor": "end" }, `${100 * v}`),
  ]);
  const { bands, lines } = bandAndCurve(curve, kind);
  const marks = bins.map((bin) => {
    const place = { cx: x(bin.confidence), cy: y(bin.accuracy), r: 3 + 6 * Math.sqrt(bin.count / samples) };
    const words = `Confidence ${percent(bin.low, 0)} to ${percent(bin.high, 0)}: ${bin.count} samples, ${percent(bin.accuracy)} correct (95 %: ${percent(bin.accuracy_low)} to ${percent(bin.accuracy_high)})`;
    return s(
      "g",
      { class: `bin ${kind}`, opacity: Math.min(1, 0.3 + bin.count / 30).toFixed(2) },
      s("line", {
        x1: x(bin.confidence),
        x2: x(bin.confidence),
        y1: y(bin.accuracy_low),
        y2: y(bin.accuracy_high),
      }),
      s("circle", place),
      s("circle", { ...place, r: 13, class: "catch" }, s("title", {}, words)),
    );
  });
  const floor = PAD.top + SIZE + PAD.bottom + STRIP,
    most = tallest ?? Math.max(...histogram.counts),
    w = SIZE / histogram.counts.length;
  const columns = histogram.counts.map((n, i) =>
    n
      ? s("rect", {
          class: "column",
          x: x(0) + i * w + 0.5,
          width: w - 1,
          y: floor - (STRIP * n) / most,
          height: (STRIP * n) / most,
        })
      : null,
  );
  const mark = (v, name) => s("line", { class: name, x1: x(v), x2: x(v), y1: floor - STRIP, y2: floor });
  const limits = bounds.map(([v, name]) =>
    s("line", { class: "limit", x1: x(v), x2: x(v), y1: y(0), y2: y(1) }, s("title", {}, name)),
  );
  const gap = data.mean_confidence - data.accuracy,
    beside = x(Math.min(data.accuracy, data.mean_confidence)) - 6;
  const note = (line, words, name = "note") =>
    s("text", { class: name, x: beside, y: floor - STRIP + 11 + 14 * line, "text-anchor": "end" }, words);
  const summary = `Reliability: accuracy ${percent(data.accuracy)}, mean confidence ${percent(data.mean_confidence)}.`;
  return s(
    "svg",
    { class: "reliability", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary },
    grid,
    bands,
    s("line", { class: "diagonal", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }),
    limits,
    lines,
    marks,
    s(
      "text",
      { class: "axis", transform: `translate(11 ${y(0.5)}) rotate(-90)`, "text-anchor": "middle" },
      "accuracy, %",
    ),
    s("line", { class: "base", x1: x(0), x2: x(1), y1: floor, y2: floor }),
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
    [0, 0.5, 1].map((v) =>
      s("text", { class: "tick", x: x(v), y: floor + 15, "text-anchor": "middle" }, `${100 * v}`),
    ),
    s("text", { class: "axis", x: x(0.5), y: floor + 29, "text-anchor": "middle" }, "confidence, %"),
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
        return s("text", { class: "note", x: width - 6, y: middle + 4, "text-anchor": "end" }, "infinite");
      return s(
        "g",
        { class: kind },
        s("path", {
          class: "span",
          d: `M${place(from ?? value)} ${middle - 3}v6m0 -3H${place(to ?? high)}m0 -3v6`,
        }),
        perfect === undefined
          ? null
          : s("line", {
              class: "perfect",
              x1: place(perfect),
              x2: place(perfect),
              y1: middle - 6,
              y2: middle + 6,
            }),
        s("circle", { cx: place(value), cy: middle, r: 4 }),
      );
    }),
  );
}

/** Lines over time, each a list of [milliseconds, value]. */
export function lines(
  series,
  { width = 560, height = 130, seconds = 300, unit = (v) => v, now = Date.now(), least = 0 },
) {
  const left = 52,
    bottom = 20,
    top = 8;
  const most = nice(
    Math.max(least, ...series.flatMap((line) => line.points.map(([, v]) => v)).filter(Number.isFinite)),
  );
  const px = (t) => width - 8 - ((width - left - 8) * (now - t)) / (1000 * seconds);
  const py = (v) => top + (height - top - bottom) * (1 - v / (most || 1));
  return s(
    "svg",
    {
      class: "lines",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": series.map((line) => `${line.name}: ${unit(line.points.at(-1)?.[1] ?? 0)}`).join("; "),
    },
    [0, 0.5, 1].map((f) => [
      s("line", { class: "grid", x1: left, x2: width - 8, y1: py(f * most), y2: py(f * most) }),
      s("text", { class: "tick", x: left - 6, y: py(f * most) + 4, "text-anchor": "end" }, unit(f * most)),
    ]),
    [seconds, seconds / 2, 0].map((ago) =>
      s(
        "text",
        { class: "tick", x: px(now - 1000 * ago), y: height - 4, "text-anchor": ago ? "middle" : "end" },
        ago ? `−${ago / 60} min` : "now",
      ),
    ),
    series.map((line) => {
      const points = line.points
        .filter(([t, v]) => Number.isFinite(v) && now - t <= 1000 * seconds)
        .map(([t, v]) => `${px(t).toFixed(1)},${py(v).toFixed(1)}`);
      return points.length > 1
        ? s("polyline", { class: `line ${line.kind}`, points: points.join(" ") })
        : points.length
          ? s("circle", {
              class: `dot ${line.kind}`,
              cx: points[0].split(",")[0],
              cy: points[0].split(",")[1],
              r: 2,
            })
          : null;
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
  const values = series.flatMap((line) => line.points.map(([, v]) => v)).filter(Number.isFinite);
  const high = Math.ceil(decades(Math.max(...values, ...series.map((line) => line.threshold))) + 0.2),
    low = Math.max(-4, Math.floor(decades(Math.min(0, ...values))));
  const step = Math.ceil((high - low) / 5);
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) ticks.push(v);
  const px = (n) => left + ((width - left - right) * n) / (labels || 1);
  const py = (v) => top + ((height - top - bottom) * (high - Math.max(low, decades(v)))) / (high - low);
  const odds = (v) =>
    v > 6 ? `1e${v} : 1` : v < 0 ? `1 : ${(10 ** -v).toLocaleString("en")}` : `${(10 ** v).toLocaleString("en")} : 1`;
  const now = (line) => odds(Number(decades(line.points.at(-1)[1] ?? 0).toFixed(1)));
  return s(
    "svg",
    {
      class: "lines evidence",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `Evidence after ${labels} labels: ${series.map((line) => `${line.name} ${now(line)}`).join("; ")}`,
    },
    ticks.map((v) => [
      s("line", { class: "grid", x1: left, x2: width - right, y1: py(v * Math.LN10), y2: py(v * Math.LN10) }),
      s("text", { class: "tick", x: left - 6, y: py(v * Math.LN10) + 4, "text-anchor": "end" }, odds(v)),
    ]),
    [0, 0.5, 1].map((part) =>
      s(
        "text",
        {
          class: "tick",
          x: px(part * labels),
          y: height - 5,
          "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle",
        },
        `${Math.round(part * labels).toLocaleString("en")}${part === 1 ? " labels" : ""}`,
      ),
    ),
    series.map((line) => [
      s("line", {
        class: `threshold ${line.kind}`,
        x1: left,
        x2: width - right,
        y1: py(line.threshold),
        y2: py(line.threshold),
      }),
      s("polyline", {
        class: `line ${line.kind}`,
        points: line.points
          .filter(([, v]) => Number.isFinite(v))
          .map(([n, v]) => `${px(n).toFixed(1)},${py(v).toFixed(1)}`)
          .join(" "),
      }),
    ]),
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
    s(
      "svg",
      {
        class: "small-multiple",
        viewBox: `0 0 ${side + 8} ${side + 8}`,
        role: "img",
        "aria-label": `Reliability of class ${label}`,
      },
      s("rect", { class: "frame", x: 4, y: 4, width: side, height: side }),
      after.bands,
      s("line", { class: "diagonal", x1: 4, y1: 4 + side, x2: 4 + side, y2: 4 }),
      before.lines,
      after.lines,
    ),
  );
}
