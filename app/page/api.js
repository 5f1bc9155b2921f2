// Calls the service. Every error response becomes a Problem with the message of the service.

/** The service's root: one level above this page, behind any gateway prefix. */
const root = new URL("../", document.baseURI);
export function url(path) {
  const url = new URL(path.replace(/^\//, ""), root);
  if (model) url.searchParams.set("model", model);
  return url;
}

const { model } = sessionStorage;
let shown;

export function useModel(name) {
  if (name) sessionStorage.model = name;
  else delete sessionStorage.model;
  location.reload();
}

/** The models' active versions and the model shown; a chosen one that is gone is forgotten. */
export async function ready(signal) {
  const { models, model: first } = await get("/health/ready", signal);
  if (model && !Object.hasOwn(models, model)) await new Promise(() => useModel(null));
  return { models, name: (shown = model ?? first) };
}

const PAGE = 1000; // versions of an answer, the most

/** Those of the model shown: without a name, the service lists all. */
export async function calibrators(before) {
  const query = new URLSearchParams({ limit: PAGE, ...(shown && { model: shown }), ...before });
  const { calibrators: found } = await get(`/calibrators?${query}`);
  return found.length < PAGE ? found : found.concat(await calibrators({ before_version: found.at(-1).version }));
}

const KEY = "boxcal-api-key";
let apiKey = sessionStorage.getItem(KEY);

/** Keep an API key for this tab, or forget it with null; never in a URL. */
export function useKey(key) {
  apiKey = key;
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export const hasKey = () => Boolean(apiKey);

let scopes = new Set();
const PATIENCE_MS = 10_000; // for the first answer

/** Ask what the key permits; where the service requires no keys, everything is permitted. */
export async function identify() {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const [identity] = await Promise.all([get("/whoami", signal), ready(signal).catch(() => null)]);
  scopes = new Set(identity.scopes);
}

/** Whether the key has a scope. */
export const may = (scope) => scopes.has(scope);
const headers = (more) => ({ ...more, ...(apiKey && { Authorization: `Bearer ${encodeURI(apiKey)}` }) });

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail ?? document.title ?? `HTTP ${status}`);
    this.status = status;
    this.title = document.title ?? "The request failed";
    this.kind = document.type ?? "";
  }
}

let isLost = false;

/** Whether a request has had no answer, or one of a service that fails, since this was asked last. */
export function wasLost() {
  const was = isLost;
  isLost = false;
  return was;
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(url(path), { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    isLost = true;
    throw await lost("The service is unreachable", "No response: is it running?", [options.body]);
  }
  if (response.ok) return response;
  isLost ||= response.status >= 500;
  throw await problemOf(response.status, await response.text());
}

/** Browsers send no file that has changed. */
async function lost(title, detail, sent) {
  try {
    for (const part of sent) if (part instanceof File) await part.slice(0, 1).arrayBuffer();
    return new Problem(0, { title, detail });
  } catch {
    return new Problem(0, { title: "The file has changed since you chose it", detail: "Choose it again." });
  }
}

async function problemOf(status, text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    document = { detail: text.slice(0, 300) };
  }
  const problem = new Problem(status, document);
  if (status === 401 || status === 403) dispatchEvent(new CustomEvent("boxcal:denied", { detail: problem }));
  return problem;
}

const ask = async (path, options) => (await send(path, options)).json();

export const get = (path, signal) => ask(path, { signal });
export const remove = (path) => ask(path, { method: "DELETE" });
export const blob = async (path) => (await send(path, {})).blob();

/** Save a file. A link cannot send the key, so the file is fetched first. */
export async function save(path, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await blob(path));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

export const post = (path, body) =>
  body === undefined
    ? ask(path, { method: "POST" })
    : submit({ path, type: "application/json", body: JSON.stringify(body) });

/** Send a body of some media type. */
export const submit = ({ path, type, body }) =>
  ask(path, { method: "POST", headers: { "Content-Type": type }, body });

/** Upload a form with progress, which fetch cannot report. */
export function upload(path, form, progress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", url(path));
    for (const [name, value] of Object.entries(headers({}))) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onload = async () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(await problemOf(request.status, request.responseText));
    };
    request.onerror = async () => reject(await lost("The upload failed", "The connection was lost.", form.values()));
    request.send(form);
  });
}

/** Read server-sent events with fetch: EventSource cannot send an API key. */
export async function follow(path, signal, onEvent) {
  const response = await send(path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r\n", "\n");
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart());
      if (data.length) onEvent(JSON.parse(data.join("\n")));
    }
  }
}

/** One word of a shell command: nothing between single quotes is expanded. */
const quoted = (word) => `'${word.replaceAll("'", String.raw`'\''`)}'`;

/** `input` gives an image's file name, or its PNG in base64 if it is an example. */
export function command({ path, type, body }, { name, png }) {
  const source =
    typeof body === "string" ? `printf %s ${quoted(body)} |\n` : png ? `printf %s ${quoted(png)} | base64 -d |\n` : "";
  const key = hasKey() ? ' -H "X-API-Key: $BOXCAL_API_KEY"' : "";
  const data = source ? "@-" : quoted(`@./${name}`);
  return `${source}curl -s ${quoted(url(path).href)}${key} -H ${quoted(`Content-Type: ${type}`)} --data-binary ${data}`;
}
