// What is on the page, and when it is asked for.

import { ask, Refused, useToken } from "./api.js";
import { at, html } from "./dom.js";
import { Form, hint } from "./form.js";
import { hear, plot, tidy } from "./plots.js";
import { timeline } from "./timeline.js";

const POLL_MS = 1000;
let models = [];
let examples = {};
let form;
let polling = 0; // the number of the loop that may go on

function askForToken(error) {
  at("token-form").hidden = false;
  at("token-why").textContent = error.message;
}

// `serving`: the version of each model by its name, now.
function showState(serving) {
  const said = (of) => Object.entries(of).map(([name, version]) => `${name} ${version}`).sort().join(", ");
  const shown = said(Object.fromEntries(models.map((m) => [m.name, m.version])));
  const older = said(serving) === shown ? "" : ` (this page shows ${shown}: reload it)`;
  at("state").textContent = `Serving ${said(serving)}${older}`;
}

function factsOf(model) {
  const rows = model.tables.reduce((sum, table) => sum + Number(table.rows), 0);
  const facts = {
    name: model.name, version: model.version, architecture: model.architecture.type, tasks: model.tasks.join(", "),
    device: model.device, precision: model.precision,
    features: model.features.length, tables: `${model.tables.length}, of ${rows.toLocaleString("en")} rows in all`,
  };
  return Object.entries(facts).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]);
}

function schemaOf(model) {
  const head = ["feature", "takes", "encoder", "table", "null"].map((text) => html("th", { scope: "col" }, text));
  const rows = model.features.map((f) => {
    const encoder = f.kind === "numeric" ? f.transforms.map((t) => t.type).join(", ") || "as it is" : f.encoder.type;
    const missing = f.missing_id ?? f.missing_value ?? null;
    const cells = [hint(f), encoder, f.table ?? "", missing === null ? "refused" : `reads ${missing}`];
    return html("tr", {}, html("th", { scope: "row" }, f.name), ...cells.map((text) => html("td", {}, text)));
  });
  return [html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows)];
}

async function showProfile(model) {
  at("profile").replaceChildren();
  try {
    const trace = await ask(`v1/profile?model=${encodeURIComponent(model.name)}`);
    const f = trace.otherData;
    const other = f.version === model.version ? "" : ` (version ${f.version}, not the one that is served)`;
    const where = `${f.precision} on ${f.gpu ?? f.device}`;
    at("profile-about").textContent = `${f.model}${other}: a request of ${f.rows} rows, ${where}, ${f.date}`;
    at("profile").replaceChildren(...timeline(trace));
  } catch (error) {
    at("profile-about").textContent = error.message;
  }
}

function show(model) {
  form = new Form(model, examples[model.name], at("context"), at("candidates"));
  at("context-box").hidden = !form.context.length;
  at("facts").replaceChildren(...factsOf(model));
  at("schema-count").textContent = `${model.features.length} features`;
  at("schema").replaceChildren(...schemaOf(model));
  for (const id of ["fault", "timing", "request"]) at(id).textContent = "";
  showProfile(model);
}

async function score() {
  const body = form.body();
  at("request").textContent = body;
  at("fault").textContent = "";
  at("score").disabled = true;
  try {
    const start = performance.now();
    const answer = await ask("v1/score", body);
    const seen = performance.now() - start;
    form.mark("");
    form.show(answer.scores);
    const inside = Object.entries(answer.timing_ms).map(([step, ms]) => `${step} ${tidy(Number(ms))}`).join(", ");
    at("timing").textContent = `${answer.model} ${answer.version}, ms: ${inside}; seen from here ${tidy(seen)}. ` +
      `Values unknown to the model: ${answer.oov_count}. Request ${answer.request_id}.`;
  } catch (error) {
    at("timing").textContent = "";
    at("fault").textContent = error.message;
    if (error instanceof Refused) form.mark(error.where);
    if (error.status === 401) askForToken(error);
  } finally {
    at("score").disabled = false;
  }
}

async function poll() {
  const mine = ++polling;
  while (mine === polling) {
    if (!document.hidden) {
      try {
        const answer = await ask("v1/recent");
        hear(answer);
        showState(answer.serving);
        at("live-about").textContent = plot(at("throughput"), at("latency"));
      } catch (error) {
        at("live-about").textContent = error.message;
        if (error.status === 401 || error.status === 403) return; // until another token is given
      }
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

async function start() {
  try {
    ({ models } = await ask("v1/models"));
    const { paths } = await ask("openapi.json");
    const given = paths["/v1/score"].post.requestBody.content["application/json"].examples ?? {};
    examples = Object.fromEntries(Object.entries(given).map(([name, example]) => [name, example.value]));
  } catch (error) {
    at("state").textContent = error.status === 401 ? "Asks for a token" : error.message;
    if (error.status === 401) askForToken(error);
    return;
  }
  at("token-form").hidden = true;
  showState(Object.fromEntries(models.map((m) => [m.name, m.version])));
  at("choice").hidden = models.length < 2;
  at("model").replaceChildren(...models.map((m, i) => html("option", { value: i }, `${m.name} ${m.version}`)));
  if (models.length) show(models[0]);
  poll();
}

at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(at("token").value);
  at("token").value = "";
  at("token-why").textContent = "";
  start();
});
at("model").addEventListener("change", () => show(models[Number(at("model").value)]));
at("try").addEventListener("submit", (event) => {
  event.preventDefault();
  if (form) score();
});
at("more").addEventListener("click", () => form?.more());
at("fewer").addEventListener("click", () => form?.fewer());
start();
