// The box-constrained softmax in the browser: an answer within one frame. The service confirms it afterwards.

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
  const top = Math.max(...logits);
  const weights = logits.map((g) => Math.exp(g - top));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((w) => w / sum);
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

export const sum = (values) => values.reduce((a, b) => a + b, 0);
