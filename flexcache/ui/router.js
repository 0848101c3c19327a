// Live page of a router: reads /stats every two seconds and follows /decisions.

import {
  bar, byId, bytes, clock, count, draw, duration, figure, fill, get, getJson, keep, line, make,
  readings, remember, seconds, share, sum,
} from "./ui.js";

const TIERS = ["gpu", "dram", "disk"];
const NAMES = { gpu: "GPU", dram: "DRAM", disk: "disk", computed: "computed" };
const DRAW_EVERY_MS = 250;
const MAX_ROWS = 50;
const MAX_POINTS = 400;

// -- the control API ------------------------------------------------------------------------------

async function readStats() {
  const stats = await getJson("../stats");
  remember(stats, stats.process?.pid);
  showStats(stats);
}

async function followDecisions() {
  const answer = await get("../decisions");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const messages = (rest + value).split("\n\n");
    rest = messages.pop();
    for (const message of messages) {
      if (message.startsWith("data: ")) arrived.push(JSON.parse(message.slice(6)));
    }
  }
}

// -- what is shown --------------------------------------------------------------------------------

const arrived = []; // events that are not drawn yet
const rows = new Map(); // by request id, oldest first
const points = { tokens: [], ttft: [] };
let isPaused = false;

function shortName(name) {
  return name.replace(/^https?:\/\//, "");
}

function showStats(stats) {
  const process = stats.process;
  const about = [`policy ${stats.routing.policy}`];
  if (process) {
    about.unshift(process.address, `version ${process.version}`);
    about.push(`up ${duration(process.uptime_s)}`);
  }
  byId("about").textContent = about.join(" · ");
  fill(byId("trouble"), ...(stats.trouble || []).map((text) => make("li", "", text)));
  fill(byId("figures"), ...figures(stats));
  const names = Object.keys(stats.workers);
  const most = Math.max(1, ...names.map((name) => stats.workers[name].requests));
  fill(byId("engines"), ...names.map((name) => engine(name, stats.workers[name], stats, most)));
}

// -- figures --------------------------------------------------------------------------------------

function figures(stats) {
  const before = readings[0].stats.routing;
  const passed = readings.at(-1).at - readings[0].at;
  const now = stats.routing;
  const recent = {
    decisions: sum(now.decisions) - sum(before.decisions),
    matched: sum(now.matched_tokens) - sum(before.matched_tokens),
    prompt: now.prompt_tokens - before.prompt_tokens,
  };
  const predictions = now.cached_tokens;
  const compared = predictions.exact + predictions.over + predictions.under;
  const workers = Object.values(stats.workers);
  const running = workers.reduce((n, worker) => n + worker.requests, 0);
  const waiting = workers.reduce((n, worker) => n + worker.waiting_requests, 0);
  const found = [
    figure("requests per second", passed ? (recent.decisions / passed).toFixed(1) : "–",
      `${count(sum(now.decisions))} since startup`),
    figure("running", count(running), `${count(waiting)} before their first token`),
    figure("prompt tokens found", share(recent.matched, recent.prompt),
      `last minute; ${share(sum(now.matched_tokens), now.prompt_tokens)} since startup`),
    figure("predicted as reported", share(predictions.exact, compared),
      `of ${count(compared)} answers that report cached tokens`),
    figure("cached tokens", share(predictions.actual_tokens, predictions.prompt_tokens),
      `reported; predicted ${share(predictions.predicted_tokens, predictions.prompt_tokens)}`),
  ];
  if (stats.queue) {
    const refused = sum(stats.queue.refused);
    found.push(figure("queued", count(stats.queue.waiting),
      `room for ${count(stats.queue.capacity)}; ${count(refused)} refused`));
  }
  if (stats.proxy) {
    const ended = stats.proxy.ended;
    found.push(figure("retries", count(stats.proxy.retries),
      `${count(ended.aborted || 0)} aborted, ${count(ended.broken || 0)} broken`));
  }
  const peers = Object.values(stats.peers || {});
  if (peers.length) {
    const theirs = peers.reduce((n, peer) => n + peer.requests, 0);
    found.push(figure("other routers", count(peers.filter((peer) => peer.is_up).length),
      `up, of ${peers.length}; ${count(theirs)} requests`));
  }
  found.push(figure("index", `${count(stats.index.blocks)}`, `blocks, ${bytes(stats.index.bytes)}`));
  return found;
}

// -- engines --------------------------------------------------------------------------------------

function engine(name, worker, stats, most) {
  const title = make("h3", "", shortName(name));
  title.title = name;
  const isCut = worker.circuit === "open" || worker.circuit === "half_open";
  const state = worker.state === "up" && isCut ? "failing" : worker.state;
  const pill = make("span", "pill", state);
  pill.dataset.state = state;
  const load = meter(worker.requests / most, worker.waiting_requests / most);
  const matched = sum(worker.matched_tokens);
  const card = make("article", "card",
    make("header", "", title, pill),
    line("load", `${count(worker.requests)} running, wait ${seconds(worker.wait_s)}`),
    load,
    line("tokens found", share(matched, worker.prompt_tokens)),
    stack(worker.matched_tokens, worker.prompt_tokens),
    line("blocks", holdings(worker, stats)),
    line("requests", `${count(worker.decisions)}, ` +
      `${share(worker.decisions, sum(stats.routing.decisions))} of all`),
  );
  if (stats.routing.service_time.is_learned) {
    card.append(line("time factor", worker.speed_factor.toFixed(2)));
  }
  const silent = worker.sources.filter((each) => (stats.sources || {})[each]?.is_silent);
  if (silent.length) card.append(make("p", "note", `no events from ${silent.join(", ")}`));
  if (worker.is_approximate) card.append(make("p", "note", "no events: blocks are guessed"));
  return card;
}

function holdings(worker, stats) {
  const held = TIERS.map((tier) => {
    const blocks = worker.sources.map((each) => (stats.index.held_blocks[each] || {})[tier] || 0);
    return [tier, blocks.reduce((a, b) => a + b, 0)];
  });
  const told = held.filter(([, n]) => n).map(([tier, n]) => `${count(n)} ${NAMES[tier]}`);
  return told.length ? told.join(", ") : "none known";
}

// A bar of running requests; those before their first token are marked.
function meter(running, waiting) {
  return bar(["running", "running", running - waiting], ["waiting", "waiting", waiting]);
}

// A bar of prompt tokens by where they come from.
function stack(matched, whole) {
  if (!whole) return bar();
  const found = TIERS.map((tier) => [tier, NAMES[tier], ((matched || {})[tier] || 0) / whole]);
  const computed = Math.max(0, 1 - sum(matched) / whole);
  return bar(...found, ["computed", NAMES.computed, computed]);
}

function showLegend() {
  const kinds = [...TIERS, "computed"];
  byId("legend").replaceChildren(...kinds.map((k) => make("span", `key ${k}`, NAMES[k])));
}

// -- decisions ------------------------------------------------------------------------------------

function drawArrived() {
  if (!arrived.length) return;
  const events = arrived.splice(0);
  let hasPoints = false;
  for (const event of events) {
    if (event.event === "ended") hasPoints = addPoints(event) || hasPoints;
  }
  if (hasPoints) drawCharts();
  if (isPaused) return;
  for (const event of events) {
    if (event.event === "decided") addRow(event);
    else if (event.event === "ended") endRow(event);
    else if (event.event === "skipped") noteSkipped(event);
  }
}

function addRow(event) {
  const row = make("tr", "",
    make("td", "time", clock(event.time)),
    cell("id", event.request_id),
    cell("name", shortName(event.worker), event.worker),
    make("td", "why", event.attempt ? `${event.reason}, try ${event.attempt + 1}` : event.reason),
    make("td", "number prompt", count(event.num_tokens)),
    make("td", "where", event.matched === null
      ? "tokens unknown" : stack(event.matched, event.num_tokens)),
    make("td", "number cached", "…"),
    make("td", "number ttft", event.ttft_s === null ? "…" : `… (${seconds(event.ttft_s)})`),
    make("td", "outcome", event.queued_s >= 0.01 ? `queued ${seconds(event.queued_s)}` : "running"),
  );
  row.dataset.state = "running";
  keepRow(event.request_id, row);
}

function cell(className, text, title) {
  const made = make("td", className, text);
  made.title = title || text;
  return made;
}

function keepRow(id, row) {
  rows.delete(id); // an earlier attempt stays in the table
  rows.set(id, row);
  const body = byId("decisions").tBodies[0];
  body.prepend(row);
  while (body.rows.length > MAX_ROWS) body.rows[body.rows.length - 1].remove();
  if (rows.size > 2 * MAX_ROWS) rows.delete(rows.keys().next().value);
  byId("no-decisions").hidden = true;
}

function endRow(event) {
  const row = rows.get(event.request_id);
  if (!row) return;
  const predicted = event.predicted_tokens;
  const reported = event.cached_tokens;
  let cached = reported === null ? "not reported" : count(reported);
  const differs = reported !== null && predicted !== null && predicted !== reported;
  if (differs) cached += `, not ${count(predicted)}`;
  const [cachedCell] = row.getElementsByClassName("cached");
  cachedCell.textContent = cached;
  cachedCell.classList.toggle("differs", differs);
  const [ttftCell] = row.getElementsByClassName("ttft");
  const foreseen = event.predicted_ttft_s === null ? "" : ` (${seconds(event.predicted_ttft_s)})`;
  ttftCell.textContent = seconds(event.ttft_s) + foreseen;
  const [outcomeCell] = row.getElementsByClassName("outcome");
  outcomeCell.textContent = `${event.outcome}, ${seconds(event.total_s)}`;
  row.dataset.state = event.outcome;
}

function noteSkipped(event) {
  const text = make("td", "", `${count(event.count)} events not shown: too many at once`);
  text.colSpan = 9;
  keepRow(`skipped at ${event.time}`, make("tr", "skipped", text));
}

// -- charts ---------------------------------------------------------------------------------------

function addPoints(event) {
  let isAny = false;
  if (event.predicted_tokens !== null && event.cached_tokens !== null) {
    points.tokens.push([event.predicted_tokens, event.cached_tokens]);
    isAny = true;
  }
  if (event.predicted_ttft_s > 0 && event.ttft_s > 0) {
    points.ttft.push([event.predicted_ttft_s, event.ttft_s]);
    isAny = true;
  }
  for (const each of Object.values(points)) each.splice(0, each.length - MAX_POINTS);
  return isAny;
}

function drawCharts() {
  const most = Math.max(1, ...points.tokens.flat());
  const ticks = linearTicks(most);
  const top = ticks.at(-1);
  scatter(byId("tokens-chart"), points.tokens, ticks, (v) => v / top, count, "tokens");
  const times = points.ttft.flat();
  const decades = times.length ? decadeTicks(Math.min(...times), Math.max(...times)) : [0.01, 1];
  const [low, high] = [decades[0], decades.at(-1)].map(Math.log10);
  const place = (v) => (Math.log10(v) - low) / (high - low);
  scatter(byId("ttft-chart"), points.ttft, decades, place, seconds, "time");
}

function linearTicks(most) {
  const raw = most / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(1, power * [1, 2, 5, 10].find((n) => n * power >= raw));
  const num = Math.ceil(most / step);
  return Array.from({ length: num + 1 }, (_, i) => i * step);
}

function decadeTicks(least, most) {
  const low = Math.floor(Math.log10(least));
  const high = Math.max(low + 1, Math.ceil(Math.log10(most)));
  return Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
}

// Draw actual over predicted values. `place` maps a value to 0..1 of an axis.
function scatter(chart, values, ticks, place, shown, what) {
  const [width, height, left, right, top, bottom] = [420, 290, 58, 26, 10, 40];
  const x = (v) => left + place(v) * (width - left - right);
  const y = (v) => height - bottom - place(v) * (height - top - bottom);
  const parts = [];
  for (const tick of ticks) {
    parts.push(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    parts.push(draw("text", { class: "tick end", x: left - 6, y: y(tick) + 4 }, shown(tick)));
    parts.push(draw("text", { class: "tick middle", x: x(tick), y: height - bottom + 16 }, shown(tick)));
  }
  const [first, last] = [ticks[0], ticks.at(-1)];
  parts.push(draw("line", { class: "equal", x1: x(first), y1: y(first), x2: x(last), y2: y(last) }));
  parts.push(draw("text", { class: "axis middle", x: (left + width - right) / 2, y: height - 6 },
    "predicted"));
  parts.push(draw("text", {
    class: "axis middle", x: 10, y: height / 2 - 10, transform: `rotate(-90 10 ${height / 2 - 10})`,
  }, "actual"));
  for (const [predicted, actual] of values) {
    const isOff = what === "tokens" && predicted !== actual;
    const dot = draw("circle", { class: isOff ? "dot off" : "dot", cx: x(predicted), cy: y(actual), r: 4 });
    dot.append(draw("title", {}, `predicted ${shown(predicted)}, actual ${shown(actual)}`));
    parts.push(dot);
  }
  if (!values.length) {
    const [cx, cy] = [(left + width - right) / 2, (height - bottom) / 2];
    parts.push(draw("text", { class: "axis middle", x: cx, y: cy }, "no answer has told yet"));
  }
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.replaceChildren(...parts);
}

// -- start ----------------------------------------------------------------------------------------

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Continue" : "Pause";
});
showLegend();
drawCharts();
setInterval(drawArrived, DRAW_EVERY_MS);
keep(readStats);
keep(followDecisions);
