// Try: softmax, calibrated and bounded probabilities of an image or of logits, with bounds to drag.

import { calibrators, command, get, may, submit } from "./api.js";
import { boxSoftmax, ChosenBounds, effectiveBox, max, softmax, sum } from "./box.js";
import { actions, button, exactly, field, h, LINK, milliseconds, paragraph, percent, problem, QUIET } from "./dom.js";
import { Input } from "./input.js";
import { Track } from "./track.js";

const CONFIRM_AFTER = 120; // ms without a move before the service is asked to confirm
const FEW = 12; // up to so many classes are all shown
const SHOWN = 8; // of more, so many, and those with bounds of their own
const AXES = [1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001]; // where the axis may end

// Whether the numbers are the answer to the inputs: class and words below them.
const STATUS = {
  confirmed: ["sure", "✓ confirmed by the service"],
  computed: ["unsure", "… computed in the browser, waiting for the service"],
  asking: ["unsure", "… an earlier answer, waiting for the service"],
  failed: ["bad", "not confirmed by the service"],
  infeasible: ["bad", "not sent"],
};
const CURRENT = ["confirmed", "computed"]; // the others are dimmed

// Kept while the page is open; `invalid` is text in place of bounds, until it is corrected or bounds are set otherwise.
const state = { model: null, version: "active", chosen: new ChosenBounds(), pinned: new Set(), invalid: null };

export function show(main) {
  const view = new Try(main);
  view.start();
  return () => view.stop();
}

/** The request for an input with options. */
const request = ({ blob, input, logits }, options) =>
  blob
    ? {
        path: `/predict?options=${encodeURIComponent(JSON.stringify(options))}`,
        type: blob.type || "image/png",
        body: blob,
      }
    : {
        path: input ? "/predict" : "/calibrate",
        type: "application/json",
        body: JSON.stringify(input ? { inputs: [input], options } : { logits: [logits], options }),
      };

const confirmation = (calibrator, bounds) => ({ probabilities: true, top_k: 1, calibrator, bounds });

class Try {
  constructor(main) {
    this.input = new Input({ changed: () => this.ask(), refuse: (problem) => this.withdraw(problem) });
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
    const input = h(
      "section",
      { class: "card input", "aria-label": "Input" },
      this.input.parts,
      field("Calibrator", this.chooser),
    );
    this.request = h(
      "section",
      { class: "card request", "aria-label": "The request", hidden: true },
      h("details", {}, h("summary", {}, "Exact bounds as JSON"), this.json),
      h("details", {}, h("summary", {}, "This request as curl"), this.curl),
    );
    this.headline = h("div", { class: "headline", "aria-live": "polite" });
    this.trouble = h("div", { class: "trouble" });
    this.rows = h("div", { class: "rows" });
    this.low = h("span");
    this.high = h("span");
    this.bounded = h("span", {}, this.low, " · ", this.high, " · ", button("remove all bounds", () => this.reset(), LINK));
    this.unbounded = h("span", {}, "Drag the brackets [ ] of a class, or of all classes, to bound the answer.");
    this.sums = paragraph("sums muted small", this.bounded, this.unbounded);
    this.more = h("div", { class: "more" });
    this.status = h("span", { role: "status" });
    this.origin = h("span");
    this.parts = h(
      "div",
      { class: "parts", hidden: true },
      this.headline,
      this.rows,
      this.more,
      this.sums,
      paragraph("foot muted small", this.status, this.origin),
    );
    this.result = h("section", { class: "card result", "aria-label": "Answer" }, this.parts, this.trouble);
    main.append(h("h1", { class: "visually-hidden" }, "Try the model"), input, this.result, this.request);
    this.stopper = new AbortController();
    this.input.listen(input, this.stopper.signal);
    addEventListener("boxcal:activated", () => this.activated(), this.stopper);
    const retried = () => this.trouble.firstChild && this.again && this.again();
    const renew = () => this.renew().then(retried, (error) => this.explain(error));
    addEventListener("boxcal:returned", renew, this.stopper);
    this.tracks = new Map();
  }

  async start() {
    try {
      await this.loadModel();
    } catch (error) {
      return this.explain(error, () => this.start());
    }
    this.input.offer(state.model);
    await this.loadCalibrators();
    if (!this.flight && !this.answer) this.ask();
  }

  stop() {
    this.stopper.abort();
    this.stopConfirming();
  }

  activated() {
    this.loadCalibrators();
    if (state.version === "active") this.ask();
  }

  async loadCalibrators() {
    try {
      const records = may("read") ? await calibrators() : [];
      const named = (c) => (c ? (c.version ? `v${c.version} ${c.method}` : "v0 uncalibrated") : "");
      const active = records.find((c) => c.active);
      this.active = active?.version;
      this.chooser.replaceChildren(
        h("option", { value: "active" }, ["active", named(active)].filter(Boolean).join(": ")),
        ...records.map((c) => h("option", { value: c.version }, named(c))),
      );
      this.chooser.value = state.version;
    } catch (error) {
      this.explain(error);
    }
  }

  /** Read the model; returns whether it is another one than before. */
  async loadModel() {
    const model = await get("/model");
    const { labels, bounds } = model;
    const known = (m) => JSON.stringify([m?.name, m?.labels, m?.bounds]);
    if (known(model) === known(state.model)) return false;
    const chosen = ChosenBounds.read(bounds, labels);
    Object.assign(state, { model, version: "active", chosen, pinned: new Set(), invalid: null });
    return true;
  }

  async renew() {
    if (!(await this.loadModel())) return;
    this.input.offer(state.model);
    this.loadCalibrators();
    this.ask();
  }

  /** Ask the service for the unbounded answer, with what the browser needs to apply any bounds. */
  async ask() {
    if (!state.model) return;
    const sent = this.input.value();
    if (!sent) {
      this.withdraw();
      return;
    }
    this.stopConfirming();
    const flight = (this.flight = {});
    this.trouble.replaceChildren();
    if (this.answer) this.mark("asking");
    try {
      const options = { logits: true, explain: true, ...confirmation(chosenVersion(), {}) };
      const answer = await submit(request(sent, options));
      if (this.stopper.signal.aborted || flight !== this.flight) return;
      if (isOfOthers(answer)) await this.renew();
      if (flight !== this.flight) return;
      this.flight = null;
      this.accept(answer, sent);
    } catch (error) {
      if (flight === this.flight) this.withdraw(error);
    }
  }

  /** Show no answer, and why. */
  withdraw(problem) {
    this.flight = null;
    this.stopConfirming();
    this.answer = null;
    this.parts.hidden = this.request.hidden = true;
    this.trouble.replaceChildren();
    this.result.removeAttribute("aria-busy");
    if (problem) this.explain(problem);
  }

  /** Say whether the numbers are the answer to the present inputs. */
  mark(status) {
    const [kind, words] = STATUS[status];
    this.status.className = kind;
    this.status.textContent = words;
    this.result.setAttribute("aria-busy", status === "asking");
    this.json.readOnly = status === "asking";
    this.result.classList.toggle("stale", !CURRENT.includes(status));
  }

  accept(answer, sent) {
    const [prediction] = answer.predictions;
    const { labels } = state.model;
    const { logits: mapped, lower, upper } = prediction.explain;
    const calibrated = prediction.probabilities;
    const each = (bound) => (typeof bound === "number" ? labels.map(() => bound) : bound);
    this.answer = {
      calibrator: answer.calibrator,
      labels,
      sent,
      before: softmax(prediction.logits),
      calibrated,
      mapped: mapped.map((g) => g ?? -Infinity),
      fitted: { lower: each(lower), upper: each(upper) },
      timing: answer.timing_ms,
    };
    this.answer.order = labels
      .map((_, i) => i)
      .sort((a, b) => calibrated[b] - calibrated[a] || mapped[b] - mapped[a]);
    if (state.version === "active" && this.active !== answer.calibrator.version) this.loadCalibrators();
    this.parts.hidden = this.request.hidden = false;
    this.build();
    const bounded = isBounded(state.chosen, labels); // the answer was asked for without bounds
    this.update(bounded ? "computed" : "confirmed");
    if (bounded || state.invalid !== null) this.check();
  }

  /** Have the bounds confirmed, or say again that the text in their place is not valid. */
  check() {
    if (state.invalid === null) this.confirmSoon(0);
    else this.readJson();
  }

  visible() {
    const { labels, order, before } = this.answer;
    if (labels.length <= FEW) return order;
    const own = new Set([...state.chosen.own.lower.keys(), ...state.chosen.own.upper.keys(), ...state.pinned]);
    const likely = new Set(order.slice(0, SHOWN));
    likely.add(before.indexOf(max(before)));
    return order.filter((i) => likely.has(i) || own.has(i));
  }

  build() {
    const { labels, before, calibrated } = this.answer;
    this.tracks.clear();
    const shown = this.visible();
    const { lower, upper } = state.chosen.box(labels.length);
    const bounds = shown.flatMap((i) => [lower[i], upper[i]]).filter((bound) => bound < 1);
    const highest = Math.max(...bounds, ...shown.flatMap((i) => [before[i], calibrated[i]]));
    const axis = AXES.findLast((end) => end >= 1.1 * highest) ?? 1;
    const column = (kind, text) => h("span", { class: "n" }, h("i", { class: `key ${kind}` }), text);
    const mark = (part) => h("i", {}, `${Number((100 * part * axis).toPrecision(3))}`);
    const head = h(
      "div",
      { class: "row head", "aria-hidden": "true" },
      h("span", {}, ""),
      h("span", { class: "scale" }, [0, 0.25, 0.5, 0.75, 1].map(mark)),
      column("before", "softmax"),
      column("calibrated", "calibrated"),
      column("answer", "answer"),
    );
    const onSet = (side, index, value) => {
      state.chosen.set(side, index, value);
      this.moved();
    };
    this.general = new Track({ index: null, label: "all classes", axis, onSet });
    for (const i of shown) this.tracks.set(i, new Track({ index: i, label: labels[i], axis, onSet }));
    const rows = [...this.tracks.values()].map(({ row }) => row);
    this.rows.replaceChildren(head, this.general.row, ...rows);
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
          const named = search.value.trim().normalize();
          const found = [named, named.toLowerCase()].map((name, i) => labels.findIndex((l) => name === (i ? l.toLowerCase() : l)));
          const index = found.find((i) => i >= 0);
          search.setCustomValidity(index === undefined && named ? `There is no class ${named}.` : "");
          if (!search.reportValidity() || index === undefined) return;
          state.pinned.add(index);
          this.build();
          this.update("computed");
          this.check();
          this.tracks.get(index)?.upper.focus();
        },
      });
      this.rest = h("span", { class: "muted" });
      this.more.append(search, list, this.rest);
    }
  }

  /** A handle moved: draw new bars in this frame and confirm with the service later. */
  moved() {
    performance.mark("boxcal-move");
    state.invalid = null;
    this.update("computed");
    performance.measure("boxcal-move", "boxcal-move");
    this.confirmSoon(CONFIRM_AFTER);
  }

  update(status, exact) {
    const { before, calibrated, mapped, fitted, labels } = this.answer;
    const box = state.chosen.box(labels.length);
    const low = sum(box.lower),
      high = sum(box.upper),
      feasible = isFeasible(box);
    this.mark(this.flight ? "asking" : feasible ? status : "infeasible");
    if (feasible) {
      const effective = effectiveBox(fitted, box);
      this.now = exact ?? boxSoftmax(mapped, effective.lower, effective.upper);
      this.effective = effective;
    }
    const now = this.now ?? calibrated;
    this.general.drawGeneral(state.chosen.all);
    for (const [i, track] of this.tracks)
      track.draw(state.chosen, [before[i], calibrated[i], now[i]], feasible ? this.held(i, now[i], box) : null);
    if (this.rest)
      this.rest.textContent = `${labels.length - this.tracks.size} others together ${percent(sum(now.filter((_, i) => !this.tracks.has(i))))}`;
    this.say(now, feasible, low, high);
    const { sent } = this.answer,
      bounds = state.chosen.option(labels);
    this.json.value = state.invalid ?? JSON.stringify(bounds, null, 1);
    this.curl.textContent = command(request(sent, confirmation(chosenVersion(), bounds)), sent);
  }

  /** Which effective bound a probability is equal to, "fitted …" if the bound is not the request's; or null. */
  held(i, probability, box) {
    const slack = 1e-12,
      { lower, upper } = this.effective;
    if (upper[i] < 1 && probability >= upper[i] - slack)
      return box.upper[i] <= upper[i] + slack ? "upper" : "fitted upper";
    if (lower[i] > 0 && probability <= lower[i] + slack)
      return box.lower[i] >= lower[i] - slack ? "lower" : "fitted lower";
    return null;
  }

  say(now, feasible, low, high) {
    const { labels, before, calibrated, mapped, calibrator, timing } = this.answer;
    const most = max(now);
    const best = now
      .map((_, i) => i)
      .filter((i) => now[i] >= most - 1e-15)
      .sort((a, b) => mapped[b] - mapped[a])[0];
    const held = this.tracks.get(best)?.held;
    const changed = best !== before.indexOf(max(before));
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
      paragraph("words", words),
    );
    this.trouble.replaceChildren();
    const K = labels.length;
    if (!feasible) {
      const tooLow = high < 1;
      const relax = () => {
        state.chosen.relax(tooLow ? "upper" : "lower", K);
        this.build();
        this.moved();
      };
      this.trouble.replaceChildren(
        problem(
          {
            title: "No distribution satisfies these bounds",
            message: tooLow
              ? `The upper bounds of the ${K} classes add up to ${exactly(high)}. They must add up to at least 100 %: ${exactly(1 - high)} is missing.`
              : `The lower bounds of the ${K} classes add up to ${exactly(low)}. They may add up to at most 100 %: ${exactly(low - 1)} too much.`,
          },
          actions(
            button(tooLow ? "Raise the upper bounds to 100 % in total" : "Lower the lower bounds to 100 % in total", relax),
            button("Remove all bounds", () => this.reset(), QUIET),
          ),
        ),
      );
    }
    const bounded = isBounded(state.chosen, labels);
    this.bounded.hidden = !bounded;
    this.unbounded.hidden = bounded;
    this.low.textContent = `Lower bounds add up to ${exactly(low)} of at most 100 %`;
    this.low.className = low > 1 ? "bad" : "";
    this.high.textContent = `upper bounds to ${exactly(high)} of at least 100 %`;
    this.high.className = high < 1 ? "bad" : "";
    const stages = Object.entries(timing).map(([stage, ms]) => `${stage} ${ms} ms`);
    this.origin.replaceChildren(
      ` · ${calibrator.version ? `v${calibrator.version} ${calibrator.method}` : "uncalibrated"} · `,
      h("span", { title: stages.join(", ") }, `${milliseconds(timing.total)} in the service`),
      this.effective?.relaxed ? " · fitted bounds were relaxed to fit yours" : "",
    );
  }

  reset() {
    state.chosen.clear();
    this.moved();
    this.general.upper.focus({ preventScroll: true });
  }

  /** Take the bounds that are written as JSON; the service refuses what the page cannot read. */
  async readJson() {
    this.stopConfirming();
    const check = (this.confirming = {});
    state.invalid = this.json.value;
    const { sent, calibrator, labels } = this.answer;
    try {
      const written = JSON.parse(this.json.value || "{}");
      const chosen = ChosenBounds.read(written, labels);
      if (chosen) {
        state.chosen = chosen;
        this.build();
        this.moved();
        return;
      }
      this.mark("failed");
      await submit(request(sent, confirmation(calibrator.version, written)));
      throw new Error("Bounds are an object with the members lower and upper.");
    } catch (error) {
      if (check !== this.confirming) return;
      this.mark("failed");
      const { message } = error;
      this.explain({ title: "These bounds are not valid", ...error, message }, () => this.readJson());
    }
  }

  stopConfirming() {
    clearTimeout(this.timer);
    this.confirming = null;
  }

  confirmSoon(wait) {
    this.stopConfirming();
    this.timer = setTimeout(() => this.confirm(), wait);
  }

  async confirm() {
    if (this.flight) return; // the answer to come is confirmed
    const { sent, calibrator, labels } = this.answer;
    if (!isFeasible(state.chosen.box(labels.length))) return;
    const flight = (this.confirming = {});
    try {
      const options = confirmation(calibrator.version, state.chosen.option(labels));
      const answer = await submit(request(sent, options));
      if (this.stopper.signal.aborted || flight !== this.confirming) return;
      if (isOfOthers(answer)) await this.renew();
      if (flight !== this.confirming) return;
      const exact = answer.predictions[0].probabilities;
      this.result.dataset.difference = max(exact.map((p, i) => Math.abs(p - this.now[i])));
      this.effective.relaxed = answer.bounds_relaxed;
      this.update("confirmed", exact);
    } catch (error) {
      if (flight !== this.confirming) return;
      this.mark("failed");
      this.explain(error, () => this.confirm());
    }
  }

  /** Show a problem; `again` is offered where the service may answer later. */
  explain({ title, message, status }, again = () => this.ask()) {
    const retry = status === 0 || status === 429 || status >= 500;
    this.again = retry && again;
    this.trouble.replaceChildren(problem({ title, message }, retry && actions(button("Ask again", again))));
  }
}

const chosenVersion = () => (state.version === "active" ? "active" : Number(state.version));
const isBounded = (chosen, labels) => Object.keys(chosen.option(labels)).length > 0;
const isFeasible = ({ lower, upper }) => sum(lower) <= 1 + 1e-9 && sum(upper) >= 1 - 1e-9;

/** Whether an answer is of other classes. */
function isOfOthers({ predictions: [{ label, probabilities: p }] }) {
  const { labels } = state.model;
  return p.length !== labels.length || p[labels.indexOf(label)] !== max(p);
}
