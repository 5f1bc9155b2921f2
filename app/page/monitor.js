// Monitor: is the active calibrator still calibrated on the labels that arrive, and what was decided about it.

import { get, may, post } from "./api.js";
import { evidence, key } from "./charts.js";
import {
  actions, ago, alone, button, card, cell, count, definitions, h, number, paragraph, percent, problem, QUIET, row, scroll,
  signed, table, tiles,
} from "./dom.js";

const EVERY = 5000; // ms between requests; decisions arrive by events
const DECISIONS = 20;

const CHANGES = {
  overconfident: "too confident",
  underconfident: "not confident enough",
  label_shift: "other class frequencies",
  class_bias: "some classes too probable, others too improbable",
  classes: "wrong where some classes are predicted",
  confidence_range: "wrong in one range of confidence",
  none: "nothing stands out",
};

export function show(main) {
  const page = new Monitor(main);
  page.start();
  return () => page.stopper.abort();
}

class Monitor {
  constructor(main) {
    this.stopper = new AbortController();
    this.act = alone(this.act.bind(this));
    this.lost = h("div", { class: "wide" });
    this.refused = h("div", { class: "wide" });
    this.state = h("section", { class: "card wide state", "aria-live": "polite" });
    this.tiles = h("div", { class: "tiles" });
    this.chart = h("div");
    this.change = h("div");
    this.decisions = scroll("Decisions");
    this.note = h("input", { id: "note", maxlength: 500, placeholder: "optional: why" });
    main.append(
      h("h1", { class: "visually-hidden" }, "Monitoring of calibration"),
      this.lost,
      this.refused,
      this.state,
      this.tiles,
      card(
        "Evidence against the calibrator",
        this.chart,
        key(["line-answer", "strict: not exact"], ["line-material", "material: worth a recalibration"], ["threshold", "alarm from here"]),
      ),
      card("What changed", this.change),
      h("section", { class: "card wide" }, h("h2", {}, "Decisions"), this.decisions),
    );
  }

  /** Refresh while the tab is visible: every five seconds, and at every event. */
  start() {
    const { signal } = this.stopper;
    const refresh = () => document.hidden || this.refresh();
    const timer = setInterval(refresh, EVERY);
    signal.addEventListener("abort", () => clearInterval(timer));
    document.addEventListener("visibilitychange", refresh, { signal });
    addEventListener("boxcal:decided", refresh, { signal });
    refresh();
  }

  async refresh() {
    let monitor, decisions;
    try {
      [monitor, { decisions }] = await Promise.all([get("/monitor"), get(`/refits?limit=${DECISIONS}`)]);
    } catch (error) {
      this.lost.replaceChildren(problem(error));
      return;
    }
    this.lost.replaceChildren();
    this.drawState(monitor);
    this.drawTiles(monitor);
    this.drawChart(monitor);
    this.drawChange(monitor);
    this.drawDecisions(decisions);
  }

  async act(path, body) {
    this.refused.replaceChildren();
    try {
      await post(path, body);
    } catch (error) {
      this.refused.replaceChildren(problem(error));
      return;
    }
    dispatchEvent(new Event("boxcal:changed"));
    this.note.value = "";
    await this.refresh();
  }

  /** Draw the state if it has changed; the note, or the button of the same name, keeps the focus. */
  drawState({ sentence, alarms, labels, phase, challenger, calibrator, ...more }) {
    const { acknowledged_at: acknowledged, refit_in: missing } = more;
    const drawn = JSON.stringify([sentence, phase, challenger, calibrator, acknowledged, missing]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const alarm = alarms?.material.alarm ? "material" : alarms?.strict.alarm ? "strict" : null;
    const mark = alarm ? `▲ Alarm: ${alarm}` : labels < 50 ? "… Not enough labels" : "✓ Calm";
    const next = {
      fitting: "Candidates of a refit are being fitted.",
      duel: `Version ${challenger} competes with it on the labels that arrive.`,
      proposed: `Version ${challenger} is better and is proposed.`,
      watching: missing ? `The next refit needs ${count(missing)} more labels.` : "",
    }[phase];
    const proposed = phase === "proposed";
    const activate = () => this.act(`/calibrators/${challenger}/activate?expected=${calibrator.version}`);
    const acknowledge = () => this.act("/monitor/acknowledge", this.note.value ? { note: this.note.value } : {});
    const focused = this.state.contains(document.activeElement) ? document.activeElement : null;
    const same = (control) => control === focused || (control.textContent && control.textContent === focused.textContent);
    this.state.replaceChildren(
      h("p", { class: `signal ${alarm ? "alarm" : labels < 50 ? "" : "calm"}` }, mark),
      h("p", { class: "lead" }, sentence, next ? ` ${next}` : ""),
      alarm || proposed
        ? actions(
            proposed ? button(`Activate v${challenger}`, activate, { disabled: !may("activate") }) : null,
            h("label", { class: "field note", for: "note" }, h("span", {}, "Note"), this.note),
            button(proposed ? "Acknowledge and decline" : "Acknowledge", acknowledge, { ...QUIET, disabled: !may("activate") }),
          )
        : "",
      paragraph(
        "muted small",
        alarm || proposed
          ? "An acknowledgement begins the test anew and declines a proposed version."
          : acknowledged
            ? `Alarms were acknowledged ${ago(acknowledged)}.`
            : "Ask for predictions with the option feedback, and send their true labels to POST /feedback.",
      ),
    );
    if (focused) [...this.state.querySelectorAll("input, button")].find(same)?.focus();
  }

  drawTiles({ labels, expected_accuracy: accuracy, metrics, drift, log, skipped }) {
    const sources = Object.entries(log.sources).map(([name, n]) => `${name} ${count(n)}`);
    const span = accuracy && accuracy.low !== undefined && accuracy.low !== null;
    const rows = [
      ["Labels", count(labels), skipped ? `since the test began; ${count(skipped)} entries of others` : "since the test began"],
      [
        "Expected accuracy",
        percent(accuracy?.value),
        !accuracy
          ? "no answers yet"
          : span
            ? `${percent(accuracy.low)} to ${percent(accuracy.high)}, from labels`
            : "from confidence alone: no interval",
      ],
      [
        "NLL",
        metrics?.count ? metrics.nll.toFixed(4) : "–",
        metrics?.count ? `${metrics.nll_low?.toFixed(3) ?? "–"} to ${metrics.nll_high?.toFixed(3) ?? "–"}` : "needs labels",
      ],
      [
        "ECE",
        metrics?.count ? percent(metrics.ece, 2) : "–",
        metrics?.count ? `${percent(metrics.ece_if_calibrated, 2)} if calibrated` : "needs labels",
      ],
      ["Confidences", drift?.alarm ? "changed" : "as before", "since it became active, without labels", drift?.alarm],
      ["Kept predictions", count(log.rows), sources.length ? sources.slice(0, 2).join(", ") : "for labels that arrive later"],
    ];
    this.tiles.replaceChildren(...tiles(rows));
  }

  drawChart({ evidence: history, alarms, labels }) {
    if (!history?.labels.length) {
      this.chart.replaceChildren(h("p", { class: "muted" }, "It begins after 50 labels."));
      return;
    }
    const line = (test, kind) => ({
      name: test,
      kind,
      threshold: alarms[test].threshold,
      points: [
        [0, 0],
        ...history.labels.map((n, i) => [n, history[test][i]]),
        [labels, alarms[test].log_evidence ?? null],
      ],
    });
    this.chart.replaceChildren(
      evidence([line("strict", "answer"), line("material", "material")], {
        labels,
        width: this.chart.clientWidth || 560,
      }),
    );
  }

  drawChange({ diagnosis }) {
    if (!diagnosis?.since) {
      this.change.replaceChildren(h("p", { class: "muted" }, "The labels show no change."));
      return;
    }
    const { kind, classes, confidence, since, began_at: began } = diagnosis;
    const rows = [
      ["diagnosis", CHANGES[kind] ?? kind],
      classes.length ? ["classes", classes.join(", ")] : null,
      confidence ? ["confidence", `${percent(confidence[0], 0)} to ${percent(confidence[1], 0)}`] : null,
      ["began", `about ${count(since)} labels ago${began ? `, ${ago(1000 * began)}` : ""}`],
      ["recoverable NLL", `${signed(-diagnosis.recoverable_nll)} nats a label by a recalibration`],
      ["at least", `${signed(-diagnosis.recoverable_nll_lower)} nats a label (99 %)`],
    ].filter(Boolean);
    this.change.replaceChildren(
      definitions(rows),
      h("p", { class: "muted small" }, "The diagnosis names the bet that gained most; it is not a test."),
    );
  }

  drawDecisions(decisions) {
    const rows = decisions.map(({ created_at: at, kind, sentence, labels }) =>
      row(cell(ago(at)), cell(kind.replaceAll("_", " ")), number(count(labels)), cell(sentence)),
    );
    const head = ["when", "what", "labels", "reason"].map((name) => h("th", { class: name === "labels" ? "n" : "" }, name));
    this.decisions.replaceChildren(
      decisions.length ? table("fits decisions", head, rows) : paragraph("muted", "None yet."),
    );
  }
}
