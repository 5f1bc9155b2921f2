// The bounds that a person sets in the view Try: one pair for all classes, and bounds of single classes.

import { sum } from "./box.js";

const OTHER = { lower: "upper", upper: "lower" };
const VACUOUS = { lower: 0, upper: 1 };
const STEP = 1e4; // relaxed bounds are rounded to 1 / STEP

export class ChosenBounds {
  constructor() {
    this.clear();
  }

  clear() {
    this.all = { ...VACUOUS };
    this.own = { lower: new Map(), upper: new Map() };
  }

  has(i) {
    return this.own.lower.has(i) || this.own.upper.has(i);
  }

  at(side, i) {
    return this.own[side].get(i) ?? this.all[side];
  }

  /** Set a bound of the class `index`, or of all classes if it is null; bounds that it crosses follow it. */
  set(side, index, value) {
    const other = OTHER[side];
    const clean = Math.min(1, Math.max(0, Math.round(value * 1e6) / 1e6));
    const crosses = (x) => (side === "lower" ? x < clean : x > clean);
    if (index === null) {
      this.all[side] = clean;
      if (crosses(this.all[other])) this.all[other] = clean;
    } else {
      if (clean === this.all[side]) this.own[side].delete(index);
      else this.own[side].set(index, clean);
      if (crosses(this.at(other, index))) this.own[other].set(index, clean);
    }
    for (const [i, low] of this.own.lower) if (low > this.at("upper", i)) this.own.upper.set(i, low);
    for (const [i, high] of this.own.upper) if (high < this.at("lower", i)) this.own.lower.set(i, high);
  }

  /** The bounds of each of K classes. */
  box(K) {
    const each = (side) => Array.from({ length: K }, (_, i) => this.at(side, i));
    return { lower: each("lower"), upper: each("upper") };
  }

  /** The option `bounds` of a request, in its shortest form; undefined if nothing is bounded. */
  option(labels) {
    const written = ["lower", "upper"].flatMap((side) => {
      const own = this.own[side],
        general = this.all[side];
      if (!own.size) return general === VACUOUS[side] ? [] : [[side, general]];
      if (general === VACUOUS[side])
        return [[side, Object.fromEntries([...own].map(([i, value]) => [labels[i], value]))]];
      return [[side, labels.map((_, i) => this.at(side, i))]];
    });
    return written.length ? Object.fromEntries(written) : undefined;
  }

  /** Take the bounds of such an option; throws an error that names an unknown class. */
  read(option, labels) {
    this.clear();
    for (const side of ["lower", "upper"]) {
      const value = option[side] ?? VACUOUS[side];
      if (typeof value === "number") this.all[side] = value;
      else if (Array.isArray(value))
        value.forEach((x, i) => x !== VACUOUS[side] && this.own[side].set(i, x));
      else
        for (const [label, x] of Object.entries(value)) {
          const i = labels.indexOf(label);
          if (i < 0) throw new Error(`there is no class ${JSON.stringify(label)}`);
          this.own[side].set(i, x);
        }
    }
  }

  /** Make infeasible bounds feasible: every bound of a side moves by the same share of its distance to 0 or 1. */
  relax(side, K) {
    const total = sum(this.box(K)[side]);
    const relaxed = (x) =>
      side === "upper"
        ? Math.min(1, Math.ceil((x + ((1 - total) / (K - total)) * (1 - x)) * STEP) / STEP)
        : Math.floor((x / total) * STEP) / STEP;
    this.all[side] = relaxed(this.all[side]);
    for (const [i, x] of this.own[side]) this.own[side].set(i, relaxed(x));
  }
}
