// Bounds in the browser: those that a person sets in the view Try, and the box-constrained softmax, which gives
// an answer within one frame. The service confirms it afterwards.

/** p_i = clip(exp(g_i + u), a_i, b_i) with the u for which the sum is 1. Bisection, then one exact step. */
export function boxSoftmax(logits, lower, upper) {
  const K = logits.length;
  let top = -Infinity,
    bottom = Infinity;
  for (const g of logits) {
    if (g > top) top = g;
    if (g > -Infinity && g < bottom) bottom = g;
  }
  let low = -top - 60 - Math.log(K),
    high = -bottom + 1;
  const at = (u) => {
    let sum = 0;
    for (let i = 0; i < K; i++) sum += Math.min(upper[i], Math.max(lower[i], Math.exp(logits[i] + u)));
    return sum;
  };
  for (let step = 0; step < 60 && high - low > 1e-15 * Math.max(1, Math.abs(low)); step++) {
    const middle = (low + high) / 2;
    if (at(middle) < 1) low = middle;
    else high = middle;
  }
  let fixed = 0,
    free = 0;
  const u = (low + high) / 2;
  const side = logits.map((g, i) => {
    const e = Math.exp(g + u);
    return e <= lower[i] ? -1 : e >= upper[i] ? 1 : 0;
  });
  for (let i = 0; i < K; i++) {
    if (side[i] < 0) fixed += lower[i];
    else if (side[i] > 0) fixed += upper[i];
    else free += Math.exp(logits[i] + u);
  }
  const scale = free > 0 ? (1 - fixed) / free : 1;
  return logits.map((g, i) =>
    side[i] < 0
      ? lower[i]
      : side[i] > 0
        ? upper[i]
        : Math.min(upper[i], Math.max(lower[i], scale * Math.exp(g + u))),
  );
}

export function softmax(logits) {
  const top = max(logits);
  const weights = logits.map((g) => Math.exp(g - top));
  const whole = sum(weights);
  return weights.map((w) => w / whole);
}

/** The effective box: fitted bounds clipped into the request's, and relaxed as little as possible. */
export function effectiveBox(fitted, request) {
  const clip = (x, a, b) => Math.min(b, Math.max(a, x));
  let lower = fitted.lower.map((x, i) => clip(x, request.lower[i], request.upper[i]));
  let upper = fitted.upper.map((x, i) => clip(x, request.lower[i], request.upper[i]));
  const relax = (bound, target) => {
    const here = sum(bound),
      there = sum(target),
      t = (1 - there) / (here - there);
    return bound.map((x, i) => target[i] + Math.min(1, Math.max(0, t)) * (x - target[i]));
  };
  let relaxed = false;
  if (sum(lower) > 1 + 1e-12) {
    lower = relax(lower, request.lower);
    relaxed = true;
  }
  if (sum(upper) < 1 - 1e-12) {
    upper = relax(upper, request.upper);
    relaxed = true;
  }
  return { lower, upper, relaxed };
}

/** Of more numbers than a call takes. */
export const max = (values) => values.reduce((a, b) => Math.max(a, b));
export const sum = (values) => values.reduce((a, b) => a + b, 0);

const OTHER = { lower: "upper", upper: "lower" };
const VACUOUS = { lower: 0, upper: 1 };

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

  /** The option `bounds` of a request, in its shortest form; {} if nothing is bounded. */
  option(labels) {
    const written = ["lower", "upper"].flatMap((side) => {
      const own = this.own[side],
        general = this.all[side];
      if (!own.size) return general === VACUOUS[side] ? [] : [[side, general]];
      if (general === VACUOUS[side])
        return [[side, Object.fromEntries([...own].map(([i, value]) => [labels[i], value]))]];
      return [[side, labels.map((_, i) => this.at(side, i))]];
    });
    return Object.fromEntries(written);
  }

  /** The bounds of such an option, which may be infeasible; null if it is not one. */
  static read(option, labels) {
    if (!isObject(option) || Object.keys(option).some((side) => !Object.hasOwn(VACUOUS, side))) return null;
    const chosen = new ChosenBounds();
    for (const [side, value] of Object.entries(option)) {
      if (typeof value === "number") chosen.all[side] = value;
      else if (Array.isArray(value) && value.length === labels.length)
        value.forEach((x, i) => x !== VACUOUS[side] && chosen.own[side].set(i, x));
      else if (isObject(value))
        for (const [label, x] of Object.entries(value)) chosen.own[side].set(labels.indexOf(label.normalize()), x);
      else return null;
    }
    const { lower, upper } = chosen.box(labels.length);
    const valid = (a, i) => Number.isFinite(a) && Number.isFinite(upper[i]) && 0 <= a && a <= upper[i] && upper[i] <= 1;
    return chosen.has(-1) || !lower.every(valid) ? null : chosen;
  }

  /** Make infeasible bounds feasible: every bound of a side moves by the same share of its distance to 0 or 1. */
  relax(side, K) {
    const total = sum(this.box(K)[side]),
      steps = 10 ** (3 + Math.ceil(Math.log10(K)));
    const relaxed = (x) =>
      side === "upper"
        ? Math.min(1, Math.ceil((x + ((1 - total) / (K - total)) * (1 - x)) * steps) / steps)
        : Math.floor((x / total) * steps) / steps;
    this.all[side] = relaxed(this.all[side]);
    for (const [i, x] of this.own[side]) this.own[side].set(i, relaxed(x));
  }
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
