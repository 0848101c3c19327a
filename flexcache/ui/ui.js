// What the live pages share: reads with a token, the state of the link, elements and figures.
// Whatever a process says is set as text and never as markup.

const TOKEN_KEY = "flexcache-token";
const READ_EVERY_MS = 2000;
const PATIENCE_MS = 10_000;
const WINDOW_S = 60;
const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);
export const sum = (table) => Object.values(table || {}).reduce((a, b) => a + b, 0);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// -- reads ----------------------------------------------------------------------------------------

class NeedsToken extends Error {}

let token = sessionStorage.getItem(TOKEN_KEY);
let tokenGiven = null; // resolves once the user has entered one

export async function get(path, signal) {
  const used = token;
  const headers = used ? { Authorization: `Bearer ${used}` } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.status === 401 && used !== token) return get(path, signal); // entered meanwhile
  if (answer.status === 401) throw new NeedsToken();
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer;
}

// A process that hangs accepts the request and never answers.
export async function getJson(path) {
  return (await get(path, AbortSignal.timeout(PATIENCE_MS))).json();
}

// Repeat a task for ever: at once after a new token, a while after an end or an error, and not while
// the page is in the background.
export async function keep(task) {
  for (;;) {
    while (document.hidden) {
      await new Promise((done) =>
        document.addEventListener("visibilitychange", done, { once: true }));
    }
    try {
      await task();
    } catch (error) {
      if (error instanceof NeedsToken) {
        await askForToken();
        continue;
      }
      showLink("lost", `no answer${lastTold ? ` since ${clock(lastTold)}` : ""}: ${error.message}`);
    }
    await sleep(READ_EVERY_MS);
  }
}

function askForToken() {
  byId("main").hidden = true;
  showLink("waiting", token === null ? "waiting for the token" : "this token is refused");
  tokenGiven ||= new Promise((done) => {
    byId("login").hidden = false;
    byId("token").focus();
    byId("login").onsubmit = (event) => {
      event.preventDefault();
      token = byId("token").value;
      sessionStorage.setItem(TOKEN_KEY, token);
      byId("token").value = "";
      byId("login").hidden = true;
      tokenGiven = null;
      done();
    };
  });
  return tokenGiven;
}

export const readings = []; // of the last minute
let lastTold = null;

// Take a reading in: the page shows it, and what has changed since the first of the last minute.
export function remember(stats, run) {
  if (readings.length && readings.at(-1).run !== run) readings.length = 0; // it was restarted
  readings.push({ at: performance.now() / 1000, stats, run });
  while (readings.length > 2 && readings.at(-1).at - readings[1].at > WINDOW_S) readings.shift();
  lastTold = Date.now() / 1000;
  byId("main").hidden = false;
  showLink("live", "live");
}

export function showLink(state, text) {
  document.body.dataset.link = state;
  if (byId("link").textContent !== text) byId("link").textContent = text; // it is read out
}

// -- elements -------------------------------------------------------------------------------------

export function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Make an element's children like these, and leave alone what is: a selection, a tooltip and the
// place that is being read stay.
export function fill(parent, ...wanted) {
  wanted.forEach((child, i) => {
    const there = parent.childNodes[i];
    if (!there) parent.append(child);
    else if (!there.isEqualNode(child)) {
      if (there.nodeType !== Node.ELEMENT_NODE || there.tagName !== child.tagName) {
        there.replaceWith(child);
        return;
      }
      for (const { name } of [...there.attributes]) {
        if (!child.hasAttribute(name)) there.removeAttribute(name);
      }
      for (const { name, value } of child.attributes) {
        if (name === "style") there.style.cssText = value; // the policy forbids the attribute
        else if (there.getAttribute(name) !== value) there.setAttribute(name, value);
      }
      fill(there, ...child.childNodes);
    }
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

export function figure(title, value, detail) {
  return make("div", "figure", make("h3", "", title), make("strong", "", value),
    make("small", "", detail));
}

export function line(title, text) {
  return make("p", "line", make("span", "", title), make("span", "", text));
}

// A bar of parts: [class, name, fraction] each.
export function bar(...parts) {
  const told = parts.map(([, name, fraction]) => `${name}: ${(100 * fraction).toFixed(1)} %`);
  const made = make("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", told.join(", ") || "nothing yet");
  parts.forEach(([kind, , fraction], i) => {
    const part = make("span", kind);
    part.style.width = `${100 * fraction}%`;
    part.title = told[i];
    made.append(part);
  });
  return made;
}

// -- numbers --------------------------------------------------------------------------------------

export const count = (n) => Math.round(n).toLocaleString("en");
export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

// The time of day, with the date if that is another.
export function clock(s) {
  const then = new Date(1000 * s);
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday ? then.toLocaleTimeString("en-GB") : then.toLocaleString("en-GB");
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  return s < 60 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : `${Math.floor(s / 60)} min`;
}

export function duration(s) {
  const [days, hours, minutes] = [s / 86400, (s / 3600) % 24, (s / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.floor(s)} s`;
}

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = n < 1 ? 0 : Math.min(Math.floor(Math.log10(n) / 3), units.length - 1);
  const scaled = n / 1000 ** power;
  return `${scaled.toFixed(!power || scaled >= 100 ? 0 : scaled < 10 ? 2 : 1)} ${units[power]}`;
}
