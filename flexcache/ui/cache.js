// Live page of a cache server: reads /status and /lately every two seconds.

import {
  bar, byId, bytes, clock, count, draw, duration, figure, fill, getJson, keep, line, make,
  readings, remember, seconds, share, sum,
} from "./ui.js";

const TIERS = ["CPU", "SSD", "PEER", "REMOTE"];
const NAMES = {
  CPU: "DRAM", SSD: "SSD", PEER: "other hosts", REMOTE: "remote store", computed: "computed",
};
const KINDS = { CPU: "dram", SSD: "disk", PEER: "peer", REMOTE: "remote", computed: "computed" };
const ELSEWHERE = ["PEER", "REMOTE"]; // their sizes are not known
const MINUTES = 60;
const FRESH_S = 600;

async function read() {
  const [stats, lately] = await Promise.all([getJson("../status"), getJson("../lately")]);
  remember(stats, `${stats.server_pid} ${stats.endpoint} ${Object.keys(stats.tiers)}`);
  showHealth(stats, lately);
  fill(byId("figures"), ...figures(stats));
  fill(byId("tiers"), ...TIERS.filter((name) => name in stats.tiers).map((n) => tier(n, stats)));
  showLegend(Object.keys(stats.tiers));
  showHour(stats, lately.minutes);
  showWork(stats);
  showEvents(lately.events);
  showOthers(stats, lately);
  showLost(stats);
  showTenants(stats);
  showSessions(stats, lately.sessions);
}

function showHealth(stats, lately) {
  const { version, uptime_s: up, endpoint, trouble } = stats;
  const model = (stats.fingerprint || "no model yet").split("|")[0];
  const about = [model, endpoint, `process ${stats.server_pid}`, `version ${version}`];
  byId("about").textContent = [...about, `up ${duration(up)}`].join(" · ");
  const fresh = lately.events.filter((event) => event.time > lately.time - FRESH_S).length;
  byId("health").dataset.state = trouble.length ? "bad" : "good";
  fill(byId("health"), make("strong", "", trouble.length ? "Degraded: requests are served, less comes from the cache" : "Healthy"),
    make("span", "", fresh ? ` · warnings and errors in the last 10 minutes: ${fresh}` : ""));
  document.title = `${trouble.length ? "✕" : "✓"} FlexCache ${model}`;
  fill(byId("trouble"), ...trouble.map((each) => make("li", "", each)));
}

// -- rates ----------------------------------------------------------------------------------------

// What a counter grew by in the last minute, and that each second.
function grown(read) {
  return readings.length < 2 ? 0 : read(readings.at(-1).stats) - read(readings[0].stats);
}

function rate(read) {
  return readings.length < 2 ? 0 : grown(read) / (readings.at(-1).at - readings[0].at);
}

const hits = (stats) => sum(stats.hit_blocks);
const asked = (stats) => hits(stats) + (stats.missed_blocks || 0);

function tokens(blocks, stats) {
  return count(blocks * (stats.tokens_per_block || 0));
}

// -- figures --------------------------------------------------------------------------------------

function figures(stats) {
  const ratio = (name) => {
    const rate = (stats.hit_rate || {})[name]?.rate;
    return rate === undefined ? "–" : share(rate, 1);
  };
  const ended = (stats) => sum(stats.ended_tasks);
  const failed = (stats) => Object.entries(stats.ended_tasks || {})
    .filter(([name]) => name.endsWith("_failed")).reduce((n, [, each]) => n + each, 0);
  const open = stats.tasks;
  const queues = Object.values(stats.queues || {});
  const waiting = queues.reduce((n, queue) => n + queue.waiting, 0);
  const dirty = Object.values(stats.tiers).reduce((n, each) => n + (each.dirty_blocks || 0), 0);
  const backlog = stats.store_backlog_blocks || 0;
  const engines = Object.values(stats.engines);
  return [
    figure("hit rate, 10 min", ratio("10m"), `1 min ${ratio("1m")}; 1 h ${ratio("1h")}`),
    figure("tokens/s asked for", tokens(rate(asked), stats), `${tokens(rate(hits), stats)} found`),
    figure("tasks per second", rate(ended).toFixed(1), `${count(grown(failed))} failed in the last minute`),
    figure("tasks open", count(sum(open)), `${count(stats.unlaunched_tasks || 0)} not launched yet`),
    figure("ops waiting", count(waiting), `${count(queues.reduce((n, q) => n + q.running, 0))} running`),
    figure("to be stored", bytes(backlog * (stats.block_bytes || 0)),
      `${count(backlog)} blocks; ${count(dirty)} dirty`),
    figure("early loads", count(stats.early_loads?.open_blocks || 0), "blocks on their way or waiting"),
    figure("engines", count(engines.length),
      `ranks connected: ${count(engines.reduce((n, each) => n + each.ranks, 0))}`),
  ];
}

// -- tiers ----------------------------------------------------------------------------------------

function tier(name, stats) {
  const now = stats.tiers[name];
  const of = (what) => (stats) => stats.tiers[name]?.[what] || 0;
  const state = now.available ? pill("in use", "up") : pill("not available", "down");
  const size = (blocks) => bytes(blocks * stats.block_bytes);
  const card = make("article", `card ${KINDS[name]}`, make("header", "", make("h3", "", NAMES[name]), state));
  if (ELSEWHERE.includes(name)) {
    card.append(line("known there", `${count(now.indexed)} blocks`));
  } else {
    const held = now.indexed + now.leased;
    card.append(
      line("used", `${Math.round((100 * held) / now.capacity)} % of ${size(now.capacity)}`),
      bar([KINDS[name], "cached", (now.indexed - now.pinned) / now.capacity],
        ["pinned", "pinned", now.pinned / now.capacity],
        ["leased", "held by tasks", now.leased / now.capacity]),
    );
  }
  card.append(
    line("found here, last minute", share(grown((s) => s.hit_blocks?.[name] || 0), grown(asked))),
    line("read", `${bytes(rate(of("read_bytes")))}/s`),
    line("written", `${bytes(rate(of("written_bytes")))}/s`),
    line("stored", `${count(rate(of("stored_blocks")))} blocks/s`),
    line("evicted", `${count(rate(of("evicted_blocks")))} blocks/s`),
    ...tierNotes(name, now, stats).map((text) => make("p", "note", text)),
  );
  return card;
}

function tierNotes(name, now, stats) {
  const notes = [];
  if (now.restoring) notes.push(`${count(now.restoring)} blocks from before the restart are being indexed`);
  if (now.dirty_blocks) notes.push(`${count(now.dirty_blocks)} blocks wait to be written back`);
  if (now.writes_paused) notes.push("nothing is written: nothing that was written came back");
  if (now.write_limit_bytes_per_s) notes.push(`writes limited to ${bytes(now.write_limit_bytes_per_s)}/s`);
  const breaker = stats.remote?.breaker;
  if (name === "REMOTE" && breaker && breaker.state !== "closed") notes.push(breaker.last_reason);
  return notes;
}

function showLegend(names) {
  const kinds = [...TIERS.filter((name) => names.includes(name)), "computed"];
  fill(byId("legend"), ...kinds.map((kind) => make("span", `key ${KINDS[kind]}`, NAMES[kind])));
}

// -- the last hour --------------------------------------------------------------------------------

function showHour(stats, minutes) {
  const size = stats.tokens_per_block || 0;
  const columns = minutes.map((minute) => {
    const parts = TIERS.map((name) => [KINDS[name], (minute.hit_blocks[name] || 0) * size]);
    parts.push([KINDS.computed, minute.missed_blocks * size]);
    const whole = parts.reduce((n, [, each]) => n + each, 0);
    const found = share(whole - parts.at(-1)[1], whole);
    return { ago: minute.minutes_ago, parts, whole, found };
  }).filter(({ whole, ago }) => whole && ago < MINUTES);
  const most = niceAbove(Math.max(1, ...columns.map(({ whole }) => whole)));
  drawHour(byId("share-chart"), columns, ({ whole }) => whole, (v) => `${100 * v} %`, 1);
  drawHour(byId("tokens-chart"), columns, () => most, short, most);
  const told = columns.slice(-1).map((c) => `the last minute with gets, ${c.ago} minutes ago: ` +
    `${c.found} of ${count(c.whole)} tokens found`)[0] || "no gets";
  byId("share-chart").setAttribute("aria-label", `Share of tokens found by minute; ${told}`);
  byId("tokens-chart").setAttribute("aria-label", `Tokens asked for by minute; ${told}`);
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((n) => n * power >= value);
}

function short(n) {
  if (n >= 1e6) return `${n / 1e6} M`;
  return n >= 1000 ? `${n / 1000} k` : `${n}`;
}

// Draw a stacked column for each minute. `scale` is what a column's full height stands for.
function drawHour(chart, columns, scale, shown, top) {
  const [width, height, left, right, above, below] = [chart.clientWidth, 190, 46, 8, 8, 22];
  const step = (width - left - right) / MINUTES;
  const y = (v) => height - below - v * (height - above - below);
  const parts = [];
  for (const tick of [0, 0.5, 1]) {
    parts.push(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    parts.push(draw("text", { class: "tick end", x: left - 6, y: y(tick) + 4 }, shown(tick * top)));
  }
  for (const ago of [60, 40, 20, 0]) {
    const x = width - right - ago * step;
    const place = ago === MINUTES ? "" : ago ? "middle" : "end";
    parts.push(draw("text", { class: `tick ${place}`, x, y: height - 6 }, ago ? `${ago} min` : "now"));
  }
  for (const column of columns) {
    const x = width - right - (column.ago + 1) * step;
    let base = 0;
    const group = draw("g", {});
    group.append(draw("title", {}, `${column.ago} min ago: ${count(column.whole)} tokens, ${column.found} found`));
    for (const [kind, amount] of column.parts) {
      const part = amount / scale(column);
      if (part) {
        group.append(draw("rect", { class: kind, x: x + 0.5, width: step - 1, y: y(base + part), height: y(base) - y(base + part) }));
      }
      base += part;
    }
    parts.push(group);
  }
  if (!columns.length) {
    parts.push(draw("text", { class: "axis middle", x: (left + width) / 2, y: y(0.5) - 8 }, "no engine has asked for anything"));
  }
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  fill(chart, ...parts);
}

// -- tables ---------------------------------------------------------------------------------------

// Fill a table. A title that begins with # heads numbers; the first cell of a row names it.
function table(id, titles, rows, ifNone) {
  const kind = (i) => (titles[i].startsWith("#") ? "number" : "");
  const heads = titles.map((title, i) => {
    const head = make("th", kind(i), title.replace("#", ""));
    head.scope = "col";
    return head;
  });
  const body = rows.map((cells) => make("tr", "", ...cells.map((cell, i) => {
    const made = make(i ? "td" : "th", kind(i), cell);
    if (!i) [made.scope, made.title] = ["row", cell]; // it may be cut
    return made;
  })));
  if (!rows.length) {
    const none = make("td", "none", ifNone);
    none.colSpan = titles.length;
    body.push(make("tr", "", none));
  }
  fill(byId(id), make("thead", "", make("tr", "", ...heads)), make("tbody", "", ...body));
}

function pill(text, state) {
  const made = make("span", "pill", text);
  made.dataset.state = state;
  return made;
}

function showWork(stats) {
  const rows = Object.entries(stats.queues || {}).map(([name, queue]) => {
    const restarts = stats.worker_restarts[name];
    const isWorker = restarts !== undefined;
    return [
      name === "device" ? "engines' ranks" : `${name} worker`, count(queue.waiting), count(queue.running),
      isWorker ? (stats.worker_up[name] ? pill("up", "up") : pill("down", "down")) : "",
      isWorker ? count(restarts) : "",
    ];
  });
  table("queues", ["copies by", "#ops waiting", "#running", "process", "#restarts"], rows,
    "No engine has said yet what is cached.");
  const told = (counts) => Object.entries(counts).filter(([, n]) => n)
    .map(([name, n]) => `${count(n)} ${name}`).join(", ") || "none";
  fill(byId("waits"),
    line("tasks of engines", told({ ...stats.tasks, "of them not launched": stats.unlaunched_tasks })),
    line("look-ups in other hosts and the store", told({ open: stats.open_lookups })),
    line("early loads since startup", told({
      "blocks in time": stats.early_loads?.early, late: stats.early_loads?.late,
      wasted: stats.early_loads?.wasted,
    })),
  );
}

function showEvents(events) {
  table("events", ["time", "level", "what happened"], events.map((event) => [
    clock(event.time), pill(event.level.toLowerCase(), event.level === "WARNING" ? "draining" : "down"),
    make("span", "said", event.text),
  ]), "None since the process began.");
}

function showOthers(stats, lately) {
  table("engines", ["engine", "#process", "#ranks", "#open tasks"],
    Object.entries(stats.engines).map(([name, each]) =>
      [name, String(each.pid), each.ranks ? count(each.ranks) : pill("none", "down"), count(each.open_tasks)]),
    "No engine is connected.");
  byId("peers-section").hidden = !stats.peers && !lately.peers.length;
  table("peers", ["cache", "state", "#answers within", "why it failed last"],
    lately.peers.map((peer) =>
      [peer.name, pill(peer.state, peer.state === "up" ? "up" : "down"), seconds(peer.answer_s || null),
        peer.reason]),
    "No other host's cache is known.");
  const loans = stats.peers;
  fill(byId("loans"), ...(loans ? [
    line("blocks lent to them now", count(loans.blocks)),
    line("loans: given, refused, expired",
      `${count(loans.lent)}, ${count(loans.refused)}, ${count(loans.expired)}`),
  ] : []));
}

function showLost(stats) {
  const rows = [];
  for (const [what, name] of [["dropped_blocks", "not stored"], ["skipped_blocks", "not loaded"]]) {
    for (const [reason, blocks] of Object.entries(stats[what] || {})) {
      if (!blocks) continue;
      const lately = grown((s) => (s[what] || {})[reason] || 0);
      rows.push([reason.replaceAll("_", " "), name, count(lately), count(blocks)]);
    }
  }
  table("lost", ["reason", "what", "#blocks, last minute", "#since startup"], rows, "Nothing since startup.");
}

function showTenants(stats) {
  const rows = TIERS.flatMap((name) => Object.entries(stats.tiers[name]?.quotas || {}).map(
    ([tenant, part]) => [
      tenant === "*" ? "all others" : tenant, NAMES[name], bytes(part.used * stats.block_bytes),
      bytes(part.quota * stats.block_bytes), share(part.hit, part.hit + part.missed), count(part.evicted),
    ]));
  table("tenants", ["namespace", "tier", "#used", "#quota", "#found", "#evicted blocks"], rows,
    "Counted only for namespaces with a quota.");
}

function showSessions(stats, sessions) {
  const what = (session) => {
    if (session.is_over) return "over";
    const rest = session.returns_in_s;
    return rest === undefined ? "" : `returns in ${seconds(rest)}`;
  };
  table("sessions", ["session", "#tokens of its last prompt", "which is in", "#prompts", "hint"],
    sessions.map((each) => [each.session_id, tokens(each.blocks, stats), NAMES[each.tier] || "no tier whole",
      count(each.prompts), what(each)]),
    "No engine names its users' sessions.");
}

for (const region of document.querySelectorAll(".scroll")) {
  region.tabIndex = 0; // by the keyboard too
  region.setAttribute("role", "region");
  region.setAttribute("aria-labelledby", region.closest("section").getAttribute("aria-labelledby"));
}
keep(read);
