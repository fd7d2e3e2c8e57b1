// Fetches campaigns every two seconds, fills the tables, draws four charts. Text is set as text, never as markup.
"use strict";

const EVERY = 2000; // milliseconds
const at = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const say = (x) => (x === null || x === undefined || !Number.isFinite(x) ? "–" : number.format(x));

// Characters that are not seen and may turn or hide the text around them.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const nameOf = (c) => (c.name || c.id).replace(HIDDEN, "\ufffd");
const cpa = (t) => (t.conversions > 0 ? t.spend / t.conversions : null);
// Without a conversion, what was spent is the least that one may cost.
const overTarget = (c) => c.spend / Math.max(c.conversions, 1) > c.target_cpa;
const overBudget = (c) => c.spend > c.budget * 1.0001; // else it is rounding
const troubled = (c) => c.status === "open" && (overTarget(c) || overBudget(c));
const statusOf = (c) => [c.status, overTarget(c) && "over target", overBudget(c) && "over budget"].filter(Boolean).join(", ");

// Open campaigns with trouble first, then open ones, then ended ones; the newest of each first.
function byTrouble(campaigns) {
  const rank = (c) => (troubled(c) ? 0 : c.status === "open" ? 1 : 2);
  return [...campaigns].sort((a, b) => rank(a) - rank(b));
}

class Unauthorised extends Error {} // another token may help
class Refused extends Error {}

async function get(path) {
  const token = sessionStorage.getItem("token");
  const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store" });
  if (answer.status === 401) throw new Unauthorised(token ? "The token is wrong" : "A token is needed");
  if (answer.status === 403) throw new Unauthorised("The token lacks the right to read");
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Refused(`The server answered ${answer.status}; retrying`);
  return answer.json();
}

function status(text, trouble = false) {
  at("status").classList.toggle("trouble", trouble);
  if (at("status").textContent !== text) at("status").textContent = text; // screen readers announce changes only
}

// Existing rows are kept, so that keyboard focus on one of them stays.
function fill(body, items) {
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach(({ key, cells }, i) => {
    const row = old.get(key) ?? made(key, cells.length);
    old.delete(key);
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null);
    cells.forEach((cell, j) => {
      const place = row.cells[j].firstElementChild ?? row.cells[j];
      if (place.textContent !== cell) place.textContent = cell;
    });
  });
  old.forEach((row) => row.remove());
}

function made(key, columns) {
  const row = document.createElement("tr");
  row.dataset.key = key;
  for (let j = 0; j < columns; j++) row.append(document.createElement(j ? "td" : "th"));
  row.cells[0].scope = "row";
  return row;
}

function list(campaigns, chosen) {
  const body = at("campaigns");
  for (const campaign of campaigns) {
    const { id } = campaign;
    if ([...body.rows].some((row) => row.dataset.key === id)) continue;
    const row = made(id, 6), link = document.createElement("a");
    link.href = `#${encodeURIComponent(id)}`;
    link.title = nameOf(campaign);
    row.cells[0].append(link);
    body.append(row);
  }
  fill(body, campaigns.map((c) => ({
    key: c.id,
    cells: [
      nameOf(c), statusOf(c), `${say(cpa(c))} / ${say(c.target_cpa)}`, `${say(c.spend)} / ${say(c.budget)}`,
      say(c.conversions), `${Math.min(c.step, c.horizon)} of ${c.horizon}`,
    ],
  })));
  campaigns.forEach((c, i) => body.rows[i].cells[1].classList.toggle("trouble", troubled(c)));
  for (const row of body.rows) {
    const link = row.cells[0].firstElementChild;
    if (row.dataset.key === chosen) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  at("none").hidden = campaigns.length > 0 || at("search").value !== "";
}

function show(campaign) {
  at("campaign").hidden = !campaign;
  if (!campaign) return;
  const c = { ...campaign, step: Math.min(campaign.step, campaign.horizon) };
  c.ticks = c.ticks.filter((t) => t.index < c.horizon); // the report after the last step is not a step
  const held = (t) => [t.fallback && `fallback: ${t.fallback}`, ...(t.guards ?? [])].filter(Boolean);
  const changed = (t, i) => (i > 0 && t.model !== c.ticks[i - 1].model ? [`model ${t.model}`] : []);
  const now = { index: c.step, spend: c.spend, conversions: c.conversions };
  const marks = c.ticks.filter((t) => held(t).length).map((t) => t.index);
  const over = overTarget(c);
  const even = (c.budget * c.step) / c.horizon;
  at("name").textContent = nameOf(c);
  const progress = c.status === "open" ? `Tick ${c.step} of ${c.horizon}` : `Ended after ${c.step} of ${c.horizon} ticks`;
  if (at("progress").textContent !== progress) at("progress").textContent = progress;
  const last = c.ticks.at(-1);
  figures({
    "Spend / budget": `${say(c.spend)} / ${say(c.budget)}${overBudget(c) ? ", over budget" : ""}`, "Even pacing": say(even), Conversions: say(c.conversions),
    "CPA / target": `${say(cpa(now))} / ${say(c.target_cpa)}${over ? ", over target" : ""}`, Multiplier: say(last?.multiplier), Category: String(c.category ?? "–"),
    Model: c.model || "–",
  }, [over && "CPA / target", overBudget(c) && "Spend / budget"].filter(Boolean));
  const points = (value, ticks) => ticks.map((t) => [t.index, value(t)]).filter(([, y]) => Number.isFinite(y));
  const rings = marks.length ? ` Rings mark ${marks.length} ticks with a guard or a fallback.` : "";
  draw("pacing", c.horizon, points((t) => t.spend, [...c.ticks, now]), {
    label: `Spend ${say(c.spend)} of ${say(c.budget)} after ${c.step} of ${c.horizon} ticks; spent evenly it would be ${say(even)}.`,
    lines: [["limit", "budget", [[0, c.budget], [c.horizon, c.budget]]], ["even", "even pacing", [[0, 0], [c.horizon, c.budget]]]],
  });
  draw("cost", c.horizon, points((t) => cpa(t) ?? NaN, [...c.ticks, now]), {
    label: `CPA ${say(cpa(now))} so far; the target is ${say(c.target_cpa)}${over ? ": over target" : ""}.`,
    lines: [["limit", "target", [[0, c.target_cpa], [c.horizon, c.target_cpa]]]],
  });
  const shadow = points((t) => t.shadow?.multiplier ?? NaN, c.ticks);
  const other = shadow.length ? ` The shadow policy decided ${shadow.length} ticks, the last by ${say(shadow.at(-1)[1])}.` : "";
  draw("multiplier", c.horizon, points((t) => t.multiplier, c.ticks), {
    label: `Bid multiplier ${say(last?.multiplier)} at the last tick.${other}${rings}`, marks, lines: shadow.length ? [["shadow", "shadow", shadow]] : [],
  });
  const togo = points((t) => t.return_to_go ?? NaN, c.ticks);
  at("togo").hidden = togo.length === 0; // of a policy that conditions on no return
  draw("togo", c.horizon, togo, { label: `Return to go ${say(last?.return_to_go)} at the last tick.` });
  fill(at("ticks"), c.ticks.map((t, i) => ({
    key: String(t.index),
    cells: [String(t.index), say(t.multiplier), say(t.shadow?.multiplier), say(t.return_to_go), say(t.spend), say(t.conversions), say(cpa(t)), [...held(t), ...changed(t, i)].join(", ")],
  })));
}

function figures(values, troubles) {
  const body = at("figures");
  if (!body.children.length) {
    for (const name of Object.keys(values)) {
      const pair = document.createElement("div"), term = document.createElement("dt");
      term.textContent = name;
      pair.append(term, document.createElement("dd"));
      body.append(pair);
    }
  }
  Object.entries(values).forEach(([name, text], i) => {
    const place = body.children[i].lastElementChild;
    place.textContent = text;
    place.classList.toggle("trouble", troubles.includes(name));
  });
}

const W = 360, H = 190, LEFT = 46, RIGHT = 10, TOP = 12, BOTTOM = 22;

// A line of [tick, value] points, named reference lines, rings at some ticks, and a label that describes the chart.
function draw(id, horizon, points, { label, lines = [], marks = [] }) {
  const every = [...points, ...lines.flatMap(([, , ends]) => ends)].map(([, y]) => y);
  const top = nice(Math.max(...every, 0)), low = Math.min(...every, 0) < 0 ? -nice(-Math.min(...every)) : 0;
  const x = (t) => LEFT + ((W - LEFT - RIGHT) * t) / horizon;
  const y = (v) => TOP + ((H - TOP - BOTTOM) * (top - v)) / (top - low);
  const path = (ends) => ends.map(([t, v], i) => `${i ? "L" : "M"}${x(t).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  const svg = part("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  for (const v of [low, (low + top) / 2, top]) {
    svg.append(part("path", { class: "grid", d: path([[0, v], [horizon, v]]) }));
    svg.append(part("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, say(v)));
  }
  for (const t of [0, horizon / 2, horizon]) {
    svg.append(part("text", { x: x(t), y: H - 6, "text-anchor": t ? (t < horizon ? "middle" : "end") : "start" }, say(t)));
  }
  for (const [kind, name, ends] of lines) {
    svg.append(part("path", { class: kind, d: path(ends) }));
    const even = kind === "even", [t, v] = even ? [horizon / 2, (ends[0][1] + ends[1][1]) / 2] : ends.at(-1);
    svg.append(part("text", { class: "named", x: x(t) + (even ? 6 : 0), y: y(v) + (even ? 14 : -4), "text-anchor": even ? "start" : "end" }, name));
  }
  if (points.length) {
    const [t, v] = points.at(-1);
    svg.append(part("path", { class: "ours", d: path(points) }), part("circle", { class: "dot", cx: x(t), cy: y(v), r: 4 }));
  }
  for (const [t, v] of points.filter(([t]) => marks.includes(t))) svg.append(part("circle", { class: "mark", cx: x(t), cy: y(v), r: 4 }));
  const figure = at(id);
  figure.querySelector("svg")?.remove();
  figure.prepend(svg);
}

function part(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The next round number: 37 -> 40.
function nice(most) {
  if (!(most > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((k) => k * unit >= most * 0.999999) * unit;
}

let due; // timer of the next update
let turn = 0; // an outdated update draws nothing
let before = ""; // only campaigns opened before this one are listed

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function turned(id) {
  before = id;
  update();
}

async function update() {
  clearTimeout(due);
  const mine = ++turn;
  try {
    const query = new URLSearchParams({ search: at("search").value, ...(before && { before }) });
    const { campaigns: latest, older, open } = await get(`v1/campaigns?${query}`);
    const campaigns = byTrouble(latest);
    const wanted = decoded(location.hash.slice(1));
    const chosen = wanted && wanted !== "campaign" ? wanted : (at("campaign").dataset.id ?? campaigns.find((c) => c.status === "open")?.id ?? campaigns[0]?.id);
    const campaign = chosen ? await get(`v1/campaigns/${encodeURIComponent(chosen)}`) : null;
    if (mine !== turn) return;
    if (campaign) at("campaign").dataset.id = campaign.id;
    list(campaigns, campaign?.id);
    at("older").hidden = !older;
    at("newest").hidden = !before;
    at("older").value = older ?? "";
    show(campaign);
    at("key").hidden = true;
    if (chosen && !campaign) status(`There is no campaign ${chosen}`, true);
    else status(`Live: ${open} open`);
  } catch (trouble) {
    if (mine !== turn) return;
    if (trouble instanceof Unauthorised) {
      const first = at("key").hidden;
      at("key").hidden = false;
      if (first) at("token").focus();
      status(trouble.message, true);
    } else {
      status(trouble instanceof Refused ? trouble.message : "No answer from the server; retrying", true);
    }
  }
  if (!document.hidden) due = setTimeout(update, EVERY);
}

at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value);
  at("token").value = "";
  update();
});
at("search").addEventListener("input", () => turned(""));
at("older").addEventListener("click", () => turned(at("older").value));
at("newest").addEventListener("click", () => turned(""));
addEventListener("hashchange", update);
document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
update();
