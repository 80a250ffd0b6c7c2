// A stored profile (a Chrome trace) as bars on a row for each stream, each section with its own scale of time.

import { html, svg } from "./dom.js";

const [WIDTH, LEFT, BAR, APART, COLORS] = [1000, 96, 22, 6, 7];

function sections(trace) {
  const found = new Map(); // pid -> { name, rows: tid -> { name, spans } }
  const section = (pid) => found.get(pid) ?? found.set(pid, { name: String(pid), rows: new Map() }).get(pid);
  const row = (pid, tid) => {
    const { rows } = section(pid);
    return rows.get(tid) ?? rows.set(tid, { name: String(tid), spans: [] }).get(tid);
  };
  for (const e of trace.traceEvents) {
    if (e.ph === "M" && e.name === "process_name") section(e.pid).name = String(e.args?.name);
    else if (e.ph === "M" && e.name === "thread_name") row(e.pid, e.tid).name = String(e.args?.name);
    else if (e.ph === "X") {
      const name = String(e.args?.node ?? e.name);
      row(e.pid, e.tid).spans.push({ at: Number(e.ts), took: Number(e.dur), name, module: String(e.cat) });
    }
  }
  return [...found.values()].filter((s) => [...s.rows.values()].some((r) => r.spans.length));
}

function ticks(whole) {
  const powers = Array.from({ length: 11 }, (_, i) => 10 ** (i - 3));
  const step = powers.flatMap((p) => [p, 2 * p, 5 * p]).find((s) => whole / s <= 10);
  return step ? Array.from({ length: Math.floor(whole / step) + 1 }, (_, i) => i * step) : [0];
}

function picture(section, color, whole) {
  const x = (us) => LEFT + us * (WIDTH - LEFT - 24) / whole;
  const rows = [...section.rows.values()].filter((r) => r.spans.length);
  const bottom = rows.length * (BAR + APART);
  const parts = ticks(whole).flatMap((us) => [
    svg("line", { class: "axis", x1: x(us), x2: x(us), y1: 0, y2: bottom }),
    svg("text", { x: x(us), y: bottom + 12, "text-anchor": "middle" }, Number(us.toPrecision(6))),
  ]);
  rows.forEach((row, k) => {
    const y = k * (BAR + APART);
    parts.push(svg("text", { x: LEFT - 8, y: y + BAR / 2 + 4, "text-anchor": "end" }, row.name));
    for (const span of row.spans) {
      const width = Math.max(x(span.at + span.took) - x(span.at) - 0.6, 0.6);
      const about = svg("title", {}, `${span.name} (${span.module}): ${span.took.toFixed(1)} µs from ${span.at.toFixed(1)}`);
      parts.push(svg("rect", { class: `c${color(span.module)}`, x: x(span.at), y, width, height: BAR }, about));
      if (width > 6.4 * span.name.length + 6) {
        const middle = { x: x(span.at) + width / 2, y: y + BAR / 2 + 4, "text-anchor": "middle" };
        parts.push(svg("text", { class: "in", "pointer-events": "none", ...middle }, span.name));
      }
    }
  });
  const size = { class: "timeline", viewBox: `0 0 ${WIDTH} ${bottom + 18}`, role: "img" };
  return svg("svg", { ...size, "aria-label": `Timeline, ${section.name}` }, ...parts);
}

function tableOf(spans) {
  const head = ["run", "row", "what", "module", "from, µs", "took, µs"].map((text) => html("th", { scope: "col" }, text));
  const rows = spans.map((s) => {
    const cells = [s.section, s.row, s.name, s.module, s.at.toFixed(1), s.took.toFixed(1)];
    return html("tr", {}, ...cells.map((text) => html("td", {}, text)));
  });
  const table = html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows));
  const scroll = html("div", { class: "wide", role: "region", "aria-label": "Spans", tabindex: "0" }, table);
  return html("details", {}, html("summary", {}, `The same as a table: ${spans.length} spans`), scroll);
}

export function timeline(trace) {
  const found = sections(trace);
  const spans = found.flatMap((section) =>
    [...section.rows.values()].flatMap((row) => row.spans.map((span) => ({ ...span, section: section.name, row: row.name }))));
  const modules = [...new Set(spans.map((s) => s.module).filter((m) => m !== "host"))];
  const color = (module) => (module === "host" ? 0 : 1 + modules.indexOf(module) % COLORS);
  const key = (module) => {
    const square = svg("rect", { class: `c${color(module)}`, width: 1, height: 1 });
    return html("span", {}, svg("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, square), module);
  };
  const pictures = found.flatMap((section) => {
    const ends = [...section.rows.values()].flatMap((row) => row.spans.map((s) => s.at + s.took));
    const whole = Math.max(...ends, 1e-3);
    const scroll = { class: "wide", role: "region", "aria-label": `Timeline, ${section.name}`, tabindex: "0" };
    return [html("h3", {}, `${section.name}: ${whole.toFixed(1)} µs`), html("div", scroll, picture(section, color, whole))];
  });
  return [...pictures, html("p", { class: "legend" }, ...["host", ...modules].map(key)), tableOf(spans)];
}
