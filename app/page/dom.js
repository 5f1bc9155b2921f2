// Builds elements without parsing strings as HTML, and formats numbers.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars")
      for (const [key, entry] of Object.entries(value)) node.style.setProperty(key, entry);
    else if (name === "value" && "value" in node) node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) =>
  fill(document.createElementNS(SVG, tag), properties, children);

/** What went wrong, and what to do about it. */
export const problem = ({ title, message }, ...actions) =>
  h("div", { class: "problem", role: "alert" }, h("b", {}, `${title ?? "Error"}. `), message, actions);

/** Warnings of a fit or comparison, or nothing. */
export const warnings = (found) =>
  found?.length
    ? h(
        "ul",
        { class: "warnings" },
        found.map(({ severity, message }) => h("li", { class: severity }, h("b", {}, `${severity}: `), message)),
      )
    : "";

/** A button; `more` has its other attributes. A double click is one: what it drew may lie under the pointer. */
export const button = (text, work, more) =>
  h("button", { type: "button", onclick: (event) => event.detail < 2 && work(event), ...more }, text);

/** Work that does not begin again while it runs. */
export function alone(work) {
  let running;
  return (...given) => (running ??= work(...given).finally(() => (running = null)));
}

/** Replace the children of a node; the control of the same label, or at the same place, keeps the focus. */
export function redraw(node, ...children) {
  const controls = () => [...node.querySelectorAll("a, button, input, select")];
  const place = controls().indexOf(document.activeElement);
  const { ariaLabel } = document.activeElement;
  node.replaceChildren(...children);
  if (place >= 0) (controls().find((one) => ariaLabel && one.ariaLabel === ariaLabel) ?? controls()[place])?.focus();
}
export const QUIET = { class: "quiet" };
export const LINK = { class: "link" };

export const paragraph = (kind, ...content) => h("p", { class: kind }, content);
export const actions = (...buttons) => h("div", { class: "actions" }, buttons);
export const card = (name, ...content) => h("section", { class: "card" }, h("h2", {}, name), content);
export const field = (name, control) =>
  h("label", { class: "field", for: control.id }, h("span", {}, name), control);
export const definitions = (entries) =>
  h("dl", {}, entries.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

const DATA = ".npz,.parquet,.arrow,.csv,.json,.jsonl,.gz,.zip";

/** A choice of a file, and the label on which it is dropped. */
export function fileChoice(id, kind, hint, choose, accept = DATA) {
  const onchange = () => file.files[0] && choose(file.files[0]);
  const onclick = () => (file.value = ""); // choosing the same file again is a change too
  const file = h("input", { type: "file", class: "visually-hidden", id, accept, onchange, onclick });
  return [file, h("label", { class: kind, for: id }, h("span", { class: "hint" }, hint))];
}

export const cell = (...content) => h("td", {}, content);
export const number = (...content) => h("td", { class: "n" }, content);
export const row = (...cells) => h("tr", {}, cells);
export const count = (n) => (n ?? 0).toLocaleString("en");

export const table = (kind, head, rows) =>
  h("table", { class: kind }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));

/** A part that scrolls sideways, also by keyboard. */
export const scroll = (name, ...content) =>
  h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, content);

/** Tiles of a name, a value, a unit and whether it is an alarm. */
export const tiles = (rows) =>
  rows.map(([name, value, unit, alarm]) =>
    h("div", { class: alarm ? "tile alarm" : "tile" }, h("span", {}, name), h("b", {}, value), h("small", {}, unit)),
  );

/** Take the first of the files that are dropped on `target`; `zone` is highlighted while one is over it. */
export function acceptDrops(target, zone, take) {
  const highlight = (on) => zone.classList.toggle("over", on);
  target.addEventListener("dragover", (event) => {
    event.preventDefault();
    highlight(true);
  });
  target.addEventListener("dragleave", () => highlight(false));
  target.addEventListener("drop", (event) => {
    event.preventDefault();
    highlight(false);
    const [file] = event.dataTransfer.files;
    if (file) take(file);
  });
}

/** A bound as a percentage, as it was set. */
export const exactly = (bound) => `${Number((100 * bound).toPrecision(8))} %`;

/** A probability as a percentage that never rounds up to 100 % nor down to 0 %. */
export function percent(p, digits = 1) {
  if (p === null || p === undefined) return "–";
  if (p === 0) return "0 %";
  if (p === 1) return "100 %";
  if (p > 0.9995) {
    const places = Math.ceil(-Math.log10(100 * (1 - p)));
    return places > 6 ? "> 99.9999 %" : `${(100 * p).toFixed(Math.max(digits, places))} %`;
  }
  if (p < 0.01) return p < 1e-6 ? "< 0.0001 %" : `${Number((100 * p).toPrecision(2))} %`;
  const text = (100 * p).toFixed(digits);
  return text % 100 === 0 ? percent(p, digits + 1) : `${text} %`;
}

export const signed = (value, digits = 4) =>
  value === null ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;

export function milliseconds(ms) {
  if (!Number.isFinite(ms)) return "–";
  return ms >= 100 ? `${ms.toFixed(0)} ms` : ms >= 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(2)} ms`;
}

export function ago(when) {
  const seconds = (Date.now() - new Date(when)) / 1000;
  const units = [
    [60, "s"],
    [3600, "min", 60],
    [86400, "h", 3600],
    [Infinity, "d", 86400],
  ];
  for (const [limit, unit, size = 1] of units)
    if (seconds < limit) return `${Math.max(0, Math.round(seconds / size))} ${unit} ago`;
}

export function bytes(n) {
  return n > 1e9
    ? `${(n / 2 ** 30).toFixed(1)} GiB`
    : n > 1e6
      ? `${(n / 2 ** 20).toFixed(0)} MiB`
      : `${(n / 1024).toFixed(1)} KiB`;
}
