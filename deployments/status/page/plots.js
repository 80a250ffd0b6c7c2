// Two lines of the last two minutes each. Every answer is the whole window of one replica: those heard from are added up.

import { svg } from "./dom.js";

const WINDOW_S = 120;
const [HEIGHT, LEFT, BOTTOM, TOP] = [150, 44, 18, 8];
const heard = new Map(); // replica -> its last answer

export function hear(answer) {
  heard.set(answer.replica, answer);
  for (const [replica, last] of heard) if (answer.now - last.now > WINDOW_S) heard.delete(replica);
}

// Of counts by bucket, linear within one; what lies above the last bound counts as that bound.
export function quantile(share, counts, bounds) {
  const wanted = share * counts.reduce((a, b) => a + b, 0);
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] && below + counts[i] >= wanted) {
      const low = i ? bounds[i - 1] : 0;
      const high = bounds[i] ?? low;
      return low + (high - low) * (wanted - below) / counts[i];
    }
    below += counts[i];
  }
  return null;
}

function summed(now) {
  const seconds = Array.from({ length: WINDOW_S }, () => ({ scored: 0, failed: 0, rows: 0, latency: null }));
  let bounds = [];
  for (const answer of heard.values()) {
    bounds = answer.bounds_ms;
    for (const second of answer.seconds) {
      const sum = seconds[second.at - Math.floor(now) + WINDOW_S];
      if (!sum) continue;
      sum.scored += second.scored;
      sum.failed += second.failed;
      sum.rows += second.rows;
      sum.latency = sum.latency ? sum.latency.map((n, i) => n + second.latency[i]) : [...second.latency];
    }
  }
  return { seconds, bounds };
}

export const tidy = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

// The axis of counts begins at zero; latencies range from fractions of a millisecond to seconds, so theirs has decades.
function linear(values) {
  const highest = Math.max(...values, 0);
  const step = 10 ** Math.floor(Math.log10(highest || 1));
  const top = [1, 2, 5, 10].map((m) => m * step).find((c) => c >= highest);
  return { share: (v) => v / top, marks: [0, top / 2, top] };
}

function decades(values) {
  const low = Math.floor(Math.log10(Math.min(...values, 1)));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values, 10))));
  const marks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  return { share: (v) => Math.max(0, (Math.log10(v) - low) / (high - low)), marks };
}

function draw(picture, lines, axis) {
  const { share, marks } = axis(lines.flatMap((line) => line.values.filter((v) => v !== null && v > 0)));
  const width = picture.clientWidth || 560; // so that text has its size on a phone too
  const x = (i) => LEFT + (i + 0.5) * (width - LEFT - 4) / WINDOW_S;
  const y = (v) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share(v));
  const parts = [];
  for (const v of marks) {
    parts.push(svg("line", { class: "axis", x1: LEFT, x2: width, y1: y(v), y2: y(v) }));
    parts.push(svg("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, String(Number(v.toPrecision(2)))));
  }
  for (const [i, label] of [[0, "−120 s"], [60, "−60 s"], [WINDOW_S - 1, "now"]]) {
    parts.push(svg("text", { x: x(i), y: HEIGHT - 4, "text-anchor": i ? (i === 60 ? "middle" : "end") : "start" }, label));
  }
  for (const { name, values } of lines) {
    let run = [];
    for (let i = 0; i <= values.length; i++) {
      if (i < values.length && values[i] !== null) {
        run.push(`${x(i).toFixed(1)},${y(values[i]).toFixed(1)}`);
        continue;
      }
      const alone = run.length === 1; // a dot, by its round ends
      if (run.length) parts.push(svg("polyline", { class: alone ? `${name} alone` : name, points: (alone ? [...run, ...run] : run).join(" ") }));
      run = [];
    }
  }
  picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  picture.replaceChildren(...parts);
}

export function plot(throughput, latency) {
  const now = Math.max(...[...heard.values()].map((answer) => answer.now));
  const { seconds, bounds } = summed(now);
  draw(throughput, [
    { name: "failed", values: seconds.map((s) => (s.failed ? s.failed : null)) },
    { name: "scored", values: seconds.map((s) => s.scored) },
  ], linear);
  const by = (share) => seconds.map((s) => (s.latency ? quantile(share, s.latency, bounds) : null));
  draw(latency, [{ name: "p50", values: by(0.5) }, { name: "p99", values: by(0.99) }], decades);
  const last = seconds.slice(-10);
  const over = (name) => last.reduce((a, s) => a + s[name], 0) / last.length;
  const counts = last.filter((s) => s.latency).reduce((a, s) => s.latency.map((n, i) => n + (a[i] ?? 0)), []);
  const figures = { requests: over("scored"), rows: over("rows"), failed: over("failed"), replicas: heard.size };
  throughput.setAttribute("aria-label", `${tidy(figures.requests)} requests a second scored, ${tidy(figures.failed)} not`);
  figures.p50 = quantile(0.5, counts, bounds);
  figures.p99 = quantile(0.99, counts, bounds);
  const said = figures.p50 === null ? "no request in ten seconds" : `p50 ${tidy(figures.p50)} ms, p99 ${tidy(figures.p99)} ms`;
  latency.setAttribute("aria-label", said);
  return `${tidy(figures.requests)} requests and ${tidy(figures.rows)} rows a second, ${said}; of the last ten seconds, ` +
    `${figures.replicas === 1 ? "the one replica" : `${figures.replicas} replicas`} heard from`;
}
