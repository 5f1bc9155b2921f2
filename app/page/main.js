// The frame of the page: the view that the address names, and the active calibrator in the header.

import { follow, get, hasKey, identify, may, ready, useKey, useModel, wasLost } from "./api.js";
import { actions, button, field, h, LINK, paragraph, problem, QUIET } from "./dom.js";

const views = {
  try: () => import("./try.js"),
  calibration: () => import("./calibration.js"),
  fit: () => import("./fit.js"),
  monitor: () => import("./monitor.js"),
  service: () => import("./service.js"),
};
const NEEDED = { try: "predict", calibration: "read", fit: "fit", monitor: "read", service: "read" }; // scopes
const REFRESH_MS = 10_000;
const RECONNECT_MS = 2000;
const main = document.getElementById("view");
const status = document.getElementById("status");
let leave = () => {};
let turn = 0;
let here;

/** Show the view that the address names: that it loads, the view itself, or why it could not be loaded. */
async function route() {
  const [name, ...rest] = location.hash.replace(/^#\//, "").split("/");
  if (location.hash === "#view" && turn) return history.replaceState(null, "", here); // the link to the content
  const permitted = Object.keys(views).filter((each) => may(NEEDED[each]));
  const view = permitted.includes(name) ? name : permitted[0];
  if (!view) {
    const links = [...document.querySelectorAll("nav a")];
    const needs = links.map((link) => `${link.textContent} ${NEEDED[link.hash.slice(2)]}`);
    const message = `The views need scopes: ${needs.join(", ")}.`;
    return main.replaceChildren(problem({ title: "No view for this key", message }));
  }
  if (name && name !== view) history.replaceState(null, "", `#/${view}`);
  let title;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${view}`) {
      link.setAttribute("aria-current", "page");
      title = link.textContent;
    } else link.removeAttribute("aria-current");
  }
  const own = ++turn;
  const focused = main.contains(document.activeElement);
  here = location.hash;
  leave();
  leave = () => {};
  document.title = `${title} · boxcal`;
  main.className = "";
  main.replaceChildren(h("p", { class: "muted", role: "status" }, `The view ${title} is loading …`));
  try {
    const module = await views[view]();
    if (own !== turn) return; // another view was chosen meanwhile
    main.className = `view-${view}`;
    main.replaceChildren();
    leave = module.show(main, rest);
    if (focused) main.focus();
  } catch ({ message }) {
    if (own !== turn) return;
    main.className = "";
    const again = () => location.reload(); // browsers keep the failure of an import as long as the page is open
    main.replaceChildren(
      problem({ title: `The view ${title} could not be loaded`, message }, actions(button("Try again", again))),
    );
  }
}

let shown, active;
const lost = (why) => [h("span", { class: "dot bad", "aria-hidden": "true" }), h("span", {}, why)];

/** Show the active version, and tell the view when it changed. One cheap request every ten seconds; two if the version changed. */
async function refreshStatus() {
  if (declined) return;
  try {
    const { models, name } = await ready();
    const version = models[name];
    const names = Object.keys(models);
    if (wasLost()) dispatchEvent(new Event("boxcal:returned"));
    if (shown === version) return;
    const { method } = may("read") ? await get(`/calibrators/${version}`) : {};
    if (active !== undefined && active !== version) dispatchEvent(new Event("boxcal:activated"));
    shown = active = version;
    const badge = { class: "badge", title: "The active calibrator" };
    status.replaceChildren(
      h("span", { class: "dot ok", "aria-hidden": "true" }),
      names[1]
        ? h("select", { title: "Model", onchange: (event) => useModel(event.target.value) }, names.map((each) => h("option", { selected: each === name }, each)))
        : h("span", { class: "model" }, name),
      may("read")
        ? h("a", { ...badge, href: `#/calibration/${version}` }, `v${version} ${method}`)
        : h("span", badge, `v${version}`),
      hasKey() ? button("Sign out", signOut, LINK) : "",
    );
  } catch (error) {
    shown = undefined;
    status.replaceChildren(...lost(error.title ?? "unreachable"));
  }
}

let listening;

/** Follow activations and decisions while the tab is visible; the header and the views refresh at each. */
async function listen() {
  listening?.abort();
  if (document.hidden || !may("read")) return;
  const { signal } = (listening = new AbortController());
  while (!signal.aborted) {
    refreshStatus(); // what happened without a stream
    dispatchEvent(new Event("boxcal:returned"));
    try {
      await follow("/monitor/events", signal, (event) => {
        if (event.kind === "activated") refreshStatus();
        dispatchEvent(new Event("boxcal:decided"));
      });
    } catch (error) {
      if (error.status >= 400 && error.status < 500) return;
    }
    await pause();
  }
}

function signOut() {
  useKey(null);
  location.reload();
}

let asking = false;
let declined = false;

/** Show the sign-in form where the service asks for an API key, until it is closed. */
function signIn({ detail: problem }) {
  if (asking || (declined && problem.status === 401)) return;
  asking = true;
  const input = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const form = h(
    "form",
    { method: "dialog", class: "sign-in" },
    h("h2", {}, problem.status === 401 ? "Sign in" : "This key is not allowed to do that"),
    paragraph("muted", problem.message),
    field("API key", input),
    actions(h("button", { type: "submit" }, "Use this key"), button("Cancel", () => dialog.close(), QUIET)),
  );
  const dialog = h("dialog", { "aria-label": "Sign in" }, form);
  form.addEventListener("submit", () => {
    useKey(input.value.trim());
    location.reload();
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    asking = false;
    if (problem.status === 401) refuse(problem);
  });
  document.body.append(dialog);
  dialog.showModal();
}

function refuse(problem) {
  declined = true;
  const again = () => {
    declined = false;
    signIn({ detail: problem });
  };
  status.replaceChildren(...lost(problem.title), button("Sign in", again, LINK));
}

for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.dataTransfer.types.includes("Files") && event.preventDefault()); // beside a target
addEventListener("hashchange", route);
addEventListener("boxcal:changed", refreshStatus);
addEventListener("online", refreshStatus);
addEventListener("boxcal:denied", signIn);

const pause = () => new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));

/** Show what the key permits. Without a key where one is required, the sign-in form appears; without an answer, ask again. */
async function start() {
  for (let unknown = true; unknown; )
    try {
      await identify();
      unknown = false;
    } catch (error) {
      const refused = error.status === 401 || error.status === 403;
      status.replaceChildren(...lost(error.title));
      main.replaceChildren(
        problem(error, h("p", {}, refused ? "Sign in to use this page." : "This page asks again every two seconds.")),
      );
      if (refused) return refuse(error);
      do await pause();
      while (document.hidden);
    }
  for (const link of document.querySelectorAll("nav a")) link.hidden = !may(NEEDED[link.hash.slice(2)]);
  refreshStatus();
  setInterval(() => document.hidden || refreshStatus(), REFRESH_MS);
  document.addEventListener("visibilitychange", listen);
  listen();
  route();
}

start();
