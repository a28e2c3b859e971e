// The live view: asks /live once a second while the page can be seen, and never else.

import { getJson } from "/web/api.js";
import { difference, quantile } from "/web/histogram.js";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const INTERVAL_MS = 1000;
const WINDOW_S = 30;
const SPARK_S = 60;
const MAX_SLOTS = 96;
const COLUMNS = 24;
const ROWS = 8;

export class LiveView {
  #samples = [];
  #rates = [];
  #key;
  #onState;
  #onModel;
  #timer = 0;
  #abort = null;

  /** onState is told "serving", "draining", "not serving", "locked", "forbidden" or "down". */
  constructor({ key, onState, onModel }) {
    this.#key = key;
    this.#onState = onState;
    this.#onModel = onModel;
    document.addEventListener("visibilitychange", () => this.ask());
  }

  /** At once, and from then on every second. */
  async ask() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    if (document.visibilityState === "hidden") return;
    const abort = new AbortController();
    this.#abort = abort;
    try {
      this.#take(await getJson("/live", this.#key(), abort.signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#miss(error);
    }
    if (this.#abort === abort) this.#timer = setTimeout(() => this.ask(), INTERVAL_MS);
  }

  #miss(error) {
    const state = { 401: "locked", 403: "forbidden" }[error.status] ?? "down";
    this.#samples = [];
    this.#note(
      {
        locked: "This server asks for an API key, under Settings.",
        forbidden: "This key may not see the live view: it has not the role metrics.",
      }[state] ?? error.message,
    );
    this.#onState(state);
  }

  #note(text) {
    byId("live-note").textContent = text;
    byId("live-note").hidden = !text;
  }

  #take(now) {
    this.#note("");
    this.#onState(now.serving ? "serving" : now.draining ? "draining" : "not serving");
    this.#onModel(now.model);
    const last = this.#samples.at(-1);
    // Another server, or this one started anew: its totals begin again.
    if (last && now.life !== last.life) {
      this.#samples = [];
      this.#rates = [];
    }
    this.#samples.push(now);
    while (this.#samples.length > 2 && now.at - this.#samples[0].at > WINDOW_S) this.#samples.shift();
    this.#show(now, this.#samples.at(-2) ?? now, this.#samples[0]);
  }

  #show(now, last, first) {
    for (const [id, value] of [
      ["running", now.running],
      ["waiting", now.waiting],
      ["in-flight", now.in_flight],
      ["blocks-used", now.blocks.used],
      ["blocks-cached", now.blocks.cached],
      ["blocks-free", now.blocks.free],
    ]) {
      byId(id).textContent = value.toLocaleString("en");
    }
    drawSlots(now);
    drawBlocks(now.blocks);
    const seconds = now.at - last.at;
    const rate = (name) => (seconds > 0 ? (now.totals[name] - last.totals[name]) / seconds : null);
    const output = rate("output_tokens");
    byId("output-rate").textContent = figure(output);
    byId("prompt-rate").textContent = figure(rate("prompt_tokens"));
    const asked = now.totals.prefix_cache_queries - first.totals.prefix_cache_queries;
    const hits = now.totals.prefix_cache_hits - first.totals.prefix_cache_hits;
    byId("hit-rate").textContent = asked > 0 ? `${Math.round((100 * hits) / asked)}%` : "–";
    if (output !== null) this.#rates.push({ at: now.at, value: output });
    while (this.#rates.length && now.at - this.#rates[0].at > SPARK_S) this.#rates.shift();
    drawSpark(this.#rates, now.at);
    for (const name of ["ttft", "itl", "e2e"]) {
      const recent = difference(now[name], first[name]);
      const cells = byId(name).querySelectorAll("td");
      for (const [i, q] of [0.5, 0.9, 0.99].entries()) cells[i].textContent = duration(quantile(recent, q));
    }
    showEngines(now.engines);
  }
}

function drawSlots({ running, waiting, max_num_seqs: most }) {
  const all = Math.max(most, running) + waiting;
  const each = Math.max(1, Math.ceil(all / MAX_SLOTS));
  const on = Math.ceil(running / each);
  const slots = Math.max(on, Math.ceil(most / each));
  const queued = Math.ceil(waiting / each);
  const svg = byId("slots");
  const count = slots + queued;
  fill(svg, "circle", count, (circle, i) => {
    circle.setAttribute("cx", 6 + 12 * (i % COLUMNS));
    circle.setAttribute("cy", 6 + 12 * Math.floor(i / COLUMNS));
    circle.setAttribute("r", 4);
  });
  svg.setAttribute("viewBox", `0 0 ${12 * COLUMNS} ${12 * Math.max(1, Math.ceil(count / COLUMNS))}`);
  for (const [i, circle] of [...svg.children].entries()) {
    circle.setAttribute("class", i < on ? "on" : i < slots ? "" : "queued");
  }
  svg.setAttribute("aria-label", `${running} of ${most} sequences running, ${waiting} waiting`);
}

function drawBlocks({ total, used, cached, free }) {
  const svg = byId("blocks");
  const cells = COLUMNS * ROWS;
  fill(svg, "rect", cells, (rect, i) => {
    rect.setAttribute("x", 1.5 + 12 * (i % COLUMNS));
    rect.setAttribute("y", 1.5 + 12 * Math.floor(i / COLUMNS));
    rect.setAttribute("width", 9);
    rect.setAttribute("height", 9);
    rect.setAttribute("rx", 2);
  });
  svg.setAttribute("viewBox", `0 0 ${12 * COLUMNS} ${12 * ROWS}`);
  // What is there at all can be seen, be it one block of a million.
  const cellsOf = (blocks) => (total > 0 ? Math.ceil((cells * blocks) / total) : 0);
  const usedCells = Math.min(cells, cellsOf(used));
  const cachedCells = Math.min(cells - usedCells, cellsOf(cached));
  for (const [i, rect] of [...svg.children].entries()) {
    rect.setAttribute("class", i < usedCells ? "used" : i < usedCells + cachedCells ? "cached" : "");
  }
  svg.setAttribute("aria-label", `Of ${total} KV blocks ${used} are used, ${cached} cached, ${free} free`);
}

function fill(svg, name, count, place) {
  while (svg.children.length > count) svg.lastChild.remove();
  while (svg.children.length < count) {
    const made = document.createElementNS(SVG, name);
    place(made, svg.children.length);
    svg.append(made);
  }
}

function drawSpark(rates, now) {
  const most = Math.max(1, ...rates.map((rate) => rate.value));
  const points = rates.map((rate) => [SPARK_S - (now - rate.at), 1 - (0.95 * rate.value) / most]);
  const line = points.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(4)}`);
  byId("spark-line").setAttribute("points", line.join(" "));
  const area = points.length ? [`${points[0][0].toFixed(2)},1`, ...line, `${SPARK_S},1`] : [];
  byId("spark-area").setAttribute("points", area.join(" "));
}

function showEngines(engines) {
  byId("engines-section").hidden = engines.length < 2;
  const items = engines.length < 2 ? [] : engines;
  byId("engines").replaceChildren(
    ...items.map((engine) => {
      const item = document.createElement("li");
      const state = document.createElement("span");
      const standing = engine.ready ? (engine.draining ? "draining" : "ready") : "gone";
      const use = engine.blocks.total ? Math.round((100 * engine.blocks.used) / engine.blocks.total) : 0;
      item.textContent = engine.address;
      state.textContent = `${standing}, ${engine.running} running, ${engine.waiting} waiting, KV ${use}%`;
      item.append(state);
      return item;
    }),
  );
}

function figure(value) {
  if (value === null) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds === Infinity) return "∞";
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}
