// Service: throughput, latency, stages, queue, errors and confidence, from /stats every five seconds.

import { get } from "./api.js";
import { key, lines } from "./charts.js";
import {
  bytes, card, cell, count, h, milliseconds, number, paragraph, percent, problem, row, scroll, table, tiles,
} from "./dom.js";

const EVERY = 5000; // ms between requests, as often as the service reads its metrics

export function show(main) {
  const page = new Service(main);
  page.refresh();
  const timer = setInterval(() => document.hidden || page.refresh(), EVERY);
  return () => clearInterval(timer);
}

class Service {
  constructor(main) {
    this.tiles = h("div", { class: "tiles" });
    this.traffic = h("div");
    this.latency = h("div");
    this.stages = h("div");
    this.rejected = h("div");
    this.confidence = h("div");
    this.lost = h("div", { class: "wide" });
    main.append(
      h("h1", { class: "visually-hidden" }, "The service"),
      this.lost,
      this.tiles,
      card("Requests per second", this.traffic, key(["line-answer", "answered"], ["line-bad", "failed or rejected"])),
      card("Latency", this.latency, key(["line-answer", "p50"], ["line-bad", "p99"])),
      card("Latency by stage", this.stages),
      h("div", { class: "stack" }, card("Confidence", this.confidence), card("Rejected", this.rejected)),
      paragraph(
        "muted small wide",
        "Tiles and stages show the last 30 seconds of this process, charts the last 15 minutes. ",
        h("code", {}, "docker compose up"),
        " starts Prometheus and Grafana for longer history, replicas and alerts.",
      ),
    );
  }

  async refresh() {
    let stats;
    try {
      stats = await get("/stats");
      this.model ??= await get("/model");
      this.lost.replaceChildren();
    } catch (error) {
      this.lost.replaceChildren(problem(error));
      return;
    }
    if (!stats.history) return;
    this.drawTiles(stats);
    this.drawCharts(stats);
    this.drawStages(stats);
    this.drawRejected(stats);
    this.drawConfidence(stats);
  }

  drawTiles(stats) {
    const good = stats.requests_per_second,
      bad = stats.failed_per_second,
      limit = this.model.limits.queue_samples;
    const rows = [
      ["Requests", (good + bad).toFixed(good + bad < 10 ? 1 : 0), "per second"],
      ["Median latency", milliseconds(stats.p50_ms ?? NaN), "p50"],
      ["99th percentile", milliseconds(stats.p99_ms ?? NaN), "p99"],
      ["Queue", stats.queue_samples, `of ${limit} samples`, stats.queue_samples > 0.8 * limit],
      ["Failed", bad ? percent(bad / (good + bad)) : "0 %", "of requests", bad > 0],
      ["Memory", bytes(stats.memory_bytes ?? 0), `${(stats.cores ?? 0).toFixed(2)} cores busy`],
    ];
    this.tiles.replaceChildren(...tiles(rows));
  }

  drawCharts({ at, every_seconds: step, history }) {
    const now = 1000 * at;
    const line = (name, kind, values) => ({
      name,
      kind,
      points: values.map((v, i) => [now - 1000 * step * (values.length - 1 - i), v ?? NaN]),
    });
    const short = (v) => (v >= 10 ? v.toFixed(0) : v.toFixed(1).replace(".0", ""));
    const draw = (place, unit, ...series) =>
      place.replaceChildren(lines(series, { now, seconds: 900, least: 1, width: place.clientWidth || 560, unit }));
    draw(
      this.traffic,
      short,
      line("answered", "answer", history.requests_per_second),
      line("failed or rejected", "bad", history.failed_per_second),
    );
    draw(this.latency, (v) => `${short(v)} ms`, line("p50", "answer", history.p50_ms), line("p99", "bad", history.p99_ms));
  }

  drawStages({ stages_ms: stages, batches, median_batch: size }) {
    const longest = Math.max(1, ...Object.values(stages).map((row) => row[2] ?? 0));
    const head = ["stage", "", "p50", "p95", "p99"].map((name) =>
      name ? h("th", { class: name.startsWith("p") ? "n" : "" }, name) : h("td"),
    );
    const rows = Object.entries(stages).map(([stage, [a, b, c]]) => {
      const vars = { "--a": (a ?? 0) / longest, "--b": (b ?? 0) / longest, "--c": (c ?? 0) / longest };
      return row(
        h("th", { scope: "row" }, stage),
        h("td", { class: "wide" }, h("div", { class: "whisker", vars }, ["c", "b", "a"].map((kind) => h("i", { class: kind })))),
        [a, b, c].map((v) => number(milliseconds(v ?? NaN))),
      );
    });
    this.stages.replaceChildren(
      scroll("Table", table("stages", head, rows)),
      paragraph(
        "muted small",
        size === null
          ? "No forward pass in the last 30 seconds."
          : `${batches} forward passes, median batch size ${Math.ceil(size)}.`,
      ),
    );
  }

  drawRejected({ rejected }) {
    const rows = Object.entries(rejected);
    this.rejected.replaceChildren(
      rows.length
        ? table(
            "plain",
            [h("th", {}, "reason"), h("th", { class: "n" }, "since the start")],
            rows.map(([reason, times]) => row(cell(reason), number(count(times)))),
          )
        : h("p", { class: "muted" }, "None since the start."),
    );
  }

  drawConfidence({ confidence, expected_accuracy: expected, bound_hits: hits }) {
    const most = Math.max(1, ...confidence.map(([, times]) => times));
    this.confidence.replaceChildren(
      h("p", {}, "Expected accuracy: ", h("b", {}, percent(expected)), " (by labels, if there are enough, else by confidence)."),
      h(
        "div",
        { class: "columns", role: "img", "aria-label": "Number of answers by confidence" },
        confidence.map(([bound, times]) =>
          h(
            "div",
            { title: `up to ${percent(bound, 0)}: ${times}` },
            h("i", { vars: { "--v": times / most } }),
            h("small", {}, `${Math.round(100 * bound)}`),
          ),
        ),
      ),
      paragraph(
        "muted small",
        `Confidence up to …, %, since the start. Probabilities equal to an upper bound: ${count(hits.upper)}; to a lower bound: ${count(hits.lower)}.`,
      ),
    );
  }
}
