// One row of the view Try: three bars and two handles on one axis that begins at 0.

import { exactly, h, percent } from "./dom.js";

const STEPS = 100; // of a handle, over the axis
const REACH = 24; // px between the pointer and a handle that it can drag

export class Track {
  /** `index` is null for the row of all classes; `onSet(side, index, value)` is called when a handle moves. */
  constructor({ index, label, axis, onSet }) {
    this.index = index;
    this.axis = axis;
    this.set = (side, part) => onSet(side, index, side === "upper" && part === 1 ? 1 : part * axis);
    const handle = (side) =>
      h("input", {
        type: "range",
        min: 0,
        max: axis,
        step: axis / STEPS,
        class: `handle ${side}`,
        "aria-label": `${side === "lower" ? "Lower" : "Upper"} bound of ${label}`,
        oninput: ({ target }) => this.set(side, Math.round((target.value / axis) * STEPS) / STEPS),
      });
    this.lower = handle("lower");
    this.upper = handle("upper");
    const bars =
      index === null
        ? []
        : ["before", "calibrated", "answer"].map((kind) => h("i", { class: `bar ${kind}` }));
    this.area = h(
      "div",
      { class: "track", onpointerdown: (event) => this.grab(event) },
      h("i", { class: "allowed" }),
      bars,
      this.lower,
      this.upper,
    );
    this.chip = h("span", { class: "chip" });
    this.numbers = index === null ? [h("span", { class: "n wide" })] : bars.map(() => h("span", { class: "n" }));
    this.row = h(
      "div",
      { class: index === null ? "row general" : "row" },
      h("span", { class: "name", title: label }, label, this.chip),
      this.area,
      this.numbers,
    );
  }

  /** Show the bounds of all classes. */
  drawGeneral({ lower, upper }) {
    this.numbers[0].textContent =
      lower === 0 && upper === 1 ? "no bounds" : `${exactly(lower)} to ${exactly(upper)}`;
    this.drawHandles({ lower, upper }, () => true);
  }

  /** Show one class: the probabilities before, calibrated and now, and by which bound the last is held, if any. */
  draw(chosen, [before, calibrated, now], held) {
    this.held = held;
    [before, calibrated, now].forEach((p, k) => {
      this.numbers[k].textContent = percent(p);
      this.row.style.setProperty(`--v${k}`, p / this.axis);
    });
    this.row.classList.toggle("held", Boolean(held));
    this.row.classList.toggle("own", chosen.has(this.index));
    this.chip.textContent = held ? (held.endsWith("upper") ? "at most " : "at least ") + percent(now) : "";
    const bounds = { lower: chosen.at("lower", this.index), upper: chosen.at("upper", this.index) };
    this.drawHandles(bounds, (side) => chosen.own[side].has(this.index));
  }

  drawHandles({ lower, upper }, isOwn) {
    this.row.style.setProperty("--a", lower / this.axis);
    this.row.style.setProperty("--b", upper / this.axis);
    for (const [side, value, set] of [
      ["lower", lower, lower > 0],
      ["upper", upper, upper < 1],
    ]) {
      const input = this[side];
      if (Number(input.value) !== value) input.value = value;
      input.setAttribute("aria-valuetext", percent(value));
      input.classList.toggle("set", set);
      input.classList.toggle("own", isOwn(side));
    }
  }

  /** A pointer drags the nearest handle; keys and screen readers use the native sliders. */
  grab(event) {
    if (event.button) return;
    const area = this.area.getBoundingClientRect();
    const at = (e) => Math.min(1, Math.max(0, (e.clientX - area.left) / area.width));
    const x = at(event),
      high = Number(this.upper.value) / this.axis,
      toLow = Math.abs(x - Number(this.lower.value) / this.axis),
      toHigh = Math.abs(x - high);
    if (Math.min(toLow, toHigh) * area.width > REACH) return;
    const near = toHigh < toLow || (toHigh === toLow && x > high) ? "upper" : "lower";
    event.preventDefault();
    this[near].focus({ focusVisible: false });
    this.area.setPointerCapture(event.pointerId);
    const move = (e) => this.set(near, Math.round(at(e) * STEPS) / STEPS);
    const end = () => {
      this.area.removeEventListener("pointermove", move);
      this.area.classList.remove("dragging");
    };
    this.area.classList.add("dragging");
    this.area.addEventListener("pointermove", move);
    this.area.addEventListener("pointerup", end, { once: true });
    this.area.addEventListener("pointercancel", end, { once: true });
  }
}
