// The form of one model, made from its schema and filled with its example: text in the fields, and the request's JSON from it.

import { html } from "./dom.js";
import { Literal } from "./api.js";

const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;

export function hint(feature) {
  const one = feature.kind === "numeric" ? "number" : feature.values === "int" ? "whole number" : "text";
  return feature.max_values > 1 ? `list of ${one}, at most ${feature.max_values}` : one;
}

function shown(value) {
  if (value === null || value === undefined) return "";
  return Array.isArray(value) ? `[${value.map(json).join(", ")}]` : String(value);
}

function json(value) {
  return value instanceof Literal ? value.text : JSON.stringify(value);
}

function one(feature, text) {
  const asNumber = feature.kind === "numeric" || feature.values === "int";
  // Wrong text goes as it is: the service says what is wrong.
  return asNumber && NUMBER.test(text) ? text : JSON.stringify(text);
}

// A field's text as JSON.
export function encoded(feature, text) {
  if (text === "") return "null";
  if (!(feature.max_values > 1)) return one(feature, text);
  try {
    if (Array.isArray(JSON.parse(text))) return text; // its own digits
  } catch {
    // a bare value
  }
  return feature.splitter ? JSON.stringify(text) : `[${one(feature, text)}]`;
}

export class Form {
  // `example`: a request body, or undefined. Features that it lacks go where the schema says.
  constructor(model, example, context, candidates) {
    this.model = model;
    this.table = candidates;
    const columns = Array.isArray(example?.candidates) ? byColumn(example.candidates) : example?.candidates ?? {};
    const inContext = (f) =>
      Object.hasOwn(example?.context ?? {}, f.name) || (!Object.hasOwn(columns, f.name) && f.scope === "context");
    this.context = model.features.filter(inContext);
    this.columns = model.features.filter((f) => !inContext(f));
    this.count = Math.max(1, ...Object.values(columns).map((column) => column.length));
    this.cells = new Map(); // the path of a value -> its field
    context.replaceChildren(...this.context.map((f) => {
      const input = this.field(`context.${f.name}`, f, shown(example?.context?.[f.name]));
      return html("label", {}, f.name, html("small", {}, hint(f)), input);
    }));
    this.rows = this.columns.map((f) => {
      const row = html("tr", {}, html("th", { scope: "row" }, f.name, html("small", {}, hint(f))));
      for (let i = 0; i < this.count; i++) row.append(this.cell(f, i, shown(columns[f.name]?.[i])));
      return row;
    });
    this.head = html("tr", {}, html("th", { scope: "col" }, "Candidate"));
    for (let i = 0; i < this.count; i++) this.head.append(html("th", { scope: "col" }, i));
    this.scores = html("tbody"); // above the values: seen without scrolling
    candidates.replaceChildren(html("thead", {}, this.head), this.scores, html("tbody", {}, ...this.rows));
  }

  field(path, feature, text) {
    const input = html("input", { "aria-label": path, spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
    if (!(feature.max_values > 1) && feature.kind === "numeric") input.inputMode = "decimal";
    input.value = text;
    this.cells.set(path, input);
    return input;
  }

  cell(feature, i, text) {
    return html("td", {}, this.field(`candidates.${feature.name}[${i}]`, feature, text));
  }

  more() {
    const last = this.count++;
    this.scores.replaceChildren();
    this.head.append(html("th", { scope: "col" }, last));
    this.columns.forEach((f, k) => {
      this.rows[k].append(this.cell(f, last, this.cells.get(`candidates.${f.name}[${last - 1}]`).value));
    });
  }

  fewer() {
    if (this.count === 1) return;
    const last = --this.count;
    this.scores.replaceChildren();
    this.head.lastChild.remove();
    this.columns.forEach((f, k) => {
      this.rows[k].lastChild.remove();
      this.cells.delete(`candidates.${f.name}[${last}]`);
    });
  }

  body() {
    const value = (f, path) => encoded(f, this.cells.get(path).value);
    const context = this.context.map((f) => `${JSON.stringify(f.name)}: ${value(f, `context.${f.name}`)}`);
    const candidates = this.columns.map((f) => {
      const column = Array.from({ length: this.count }, (_, i) => value(f, `candidates.${f.name}[${i}]`));
      return `${JSON.stringify(f.name)}: [${column.join(", ")}]`;
    });
    return `{"model": ${JSON.stringify(this.model.name)},\n "context": {${context.join(", ")}},\n` +
      ` "candidates": {${candidates.join(",\n  ")}}}`;
  }

  // `scores`: a list, or lists by task.
  show(scores) {
    const tasks = Array.isArray(scores) ? { score: scores } : scores;
    this.scores.replaceChildren(...Object.entries(tasks).map(([task, column]) => {
      const best = Math.max(...column.map(Number));
      const about = (score) => (column.length > 1 && Number(score) === best ? { class: "best" } : {});
      const cells = column.map((score) => html("td", about(score), Number(score).toPrecision(5)));
      return html("tr", { class: "scores" }, html("th", { scope: "row" }, task), ...cells);
    }));
  }

  // Marks the field that an error names, and takes the marks of earlier ones away.
  mark(where) {
    for (const input of this.cells.values()) input.removeAttribute("aria-invalid");
    const path = [...this.cells.keys()].find((p) => where === p || where.startsWith(`${p}[`) || where.startsWith(`${p}.`));
    const input = this.cells.get(path);
    if (!input) return;
    input.setAttribute("aria-invalid", "true");
    input.focus();
  }
}

function byColumn(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  return Object.fromEntries(names.map((name) => [name, rows.map((row) => row[name] ?? null)]));
}
