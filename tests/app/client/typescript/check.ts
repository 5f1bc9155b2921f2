// Asks a running service through the generated types: node check.js URL IMAGE_AS_BASE64 CSV
import createClient from "openapi-fetch";
import type { paths } from "./schema.js";

declare const process: { argv: string[] };
const [baseUrl, image, csv] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl });

/** The answer is JSON unless `Accept` asks for an array. */
function json<T>(data: T | string): T {
  if (typeof data === "string") throw new Error(data);
  return data;
}

const calibrated = await client.POST("/calibrate", {
  body: { logits: [[3, 1, 0, 0, 0, 0, 0, 0, 0, 0]], options: { probabilities: true, bounds: { upper: 0.5 } } },
});
if (calibrated.error) throw new Error(calibrated.error.detail);
const predicted = await client.POST("/predict", {
  body: { inputs: [{ image }], options: { top_k: 2 } },
});
if (predicted.error) throw new Error(predicted.error.detail);
const wrong = await client.POST("/calibrate", { body: { logits: [[1, 2]] } });
const calibrators = await client.GET("/calibrators");
const form = new FormData();
form.append("file", new Blob([csv]), "validation.csv");
form.append("method", "ts");
form.append("activate", "never");
const uploaded = await client.POST("/fit", {
  body: { file: csv, method: "ts", activate: "never" },
  bodySerializer: () => form,
});
const refused = await client.POST("/fit", { body: { texts: ["a good film"], labels: ["9"], method: "ts" } });
console.log(
  JSON.stringify({
    probabilities: json(calibrated.data).predictions[0].probabilities,
    label: json(predicted.data).predictions[0].label,
    error: wrong.error?.status,
    uploaded: uploaded.data?.samples,
    refused: refused.error?.detail,
    calibrators: calibrators.data?.calibrators.map((one) => one.version),
  }),
);
