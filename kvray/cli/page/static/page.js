// Shows the state of the tier, asked for every two seconds. Whatever comes from the tier is put in as
// text, never as markup, and every figure loses its colour when it is old.
"use strict";

const EVERY_MS = 2000, PATIENCE_MS = 8000, POINTS_MAX = 900;
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let state = null;      // the latest
let heardAt = 0;       // when it came
let lostAt = 0;        // since when the page's own process has not answered; 0: it does
let lostWhy = "";
let points = [];       // of the history
const drawn = new Map();

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null).flatMap((child) => (typeof child === "string" ? prose(child) : [child])));
  return made;
}

// What commands write between backticks is code.
const prose = (text) => text.split("`").map((part, at) => {
  if (at % 2 === 0) return document.createTextNode(part);
  const code = document.createElement("code");
  code.textContent = part;
  return code;
});
const say = (id, text) => draw(id, text, prose);

// Draws what has changed alone: a selection or the focus of a reader stays.
function draw(id, data, build) {
  const text = JSON.stringify(data ?? null);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  $(id).replaceChildren(...[build(data)].flat().filter((one) => one !== null));
}

function duration(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([least]) => seconds >= least) ?? [1, "s"];
  return `${Math.round(seconds / size)} ${unit}`;
}

const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
const ago = (seconds) => (seconds < 5 ? "just now" : `${duration(seconds)} ago`);

// Roles, because a narrow screen shows rows as blocks and tables lose theirs by that.
function table(data, label) {
  if (!data) return null;
  const kind = (at) => (data.numbers[at] ? "number" : "");
  const head = data.columns.map((name, at) => make("th", { role: "columnheader", scope: "col", class: kind(at) }, name));
  const rows = data.rows.map((row) => make("tr", { role: "row" },
    ...row.map((cell, at) => make("td", { role: "cell", class: kind(at), "data-label": data.columns[at] }, cell))));
  return make("table", { role: "table", "aria-label": label },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)),
    make("tbody", { role: "rowgroup" }, ...rows));
}

// -- panels ---------------------------------------------------------------------------------------

function showFigures(figures) {
  draw("figures", figures, () => figures.map((one) => make("div", { class: one.name === "faults" && one.value !== "0" ? "figure bad" : "figure" },
    make("span", {}, one.name), make("b", {}, one.value), make("span", {}, one.of))));
}

function showFindings(findings) {
  const faults = findings.filter((one) => one.verdict === "fault");
  const hints = findings.filter((one) => one.verdict === "hint").map((one) => one.text);
  $("wrong").hidden = !faults.length;
  draw("faults", faults.map((one) => `${one.text} First seen ${ago(one.age_s)}.`), (texts) => texts.map((text) => make("p", { class: "fault" }, text)));
  $("hints").hidden = !hints.length;
  draw("hints", hints, () => [make("summary", {}, hints.length === 1 ? "1 hint" : `${hints.length} hints`),
    ...hints.map((text) => make("p", { class: "hint" }, text))]);
}

function node(one) {
  const meters = one.meters.map((meter) => make("div", { class: `meter ${meter.name}` },
    make("span", {}, meter.name),
    make("progress", { value: meter.share, max: 1, "aria-label": `${meter.name}: ${meter.text}` }),
    make("span", { class: "text" }, meter.text)));
  const old = one.old_s === null ? null : make("p", { class: "age" }, `These figures are ${duration(one.old_s)} old.`);
  return make("article", { class: one.is_healthy ? "node" : "node bad" }, make("h3", {}, one.name),
    make("p", { class: "state" }, one.message ? `${one.state}: ${one.message}` : one.state), old,
    make("div", { class: old ? "stale" : "" }, ...meters, make("p", { class: "dim" }, one.figures.join(", "))));
}

function showNodes() {
  draw("nodes", state.nodes, (nodes) => nodes.length ? nodes.map(node) : make("p", {}, "No node has a shard."));
  draw("links", [state.links, state.num_links_hidden, state.slow], ([links, hidden, slow]) => [
    links && make("h3", {}, "Between nodes"), ...(slow ?? []).map((one) => make("p", {}, one)),
    table(links, "Between nodes"),
    hidden ? make("p", {}, `${hidden} more links: kvray status has them.`) : null]);
}

function showPrefixes(found) {
  draw("prefixes", found, () => {
    if (!found.namespaces) return make("p", {}, "Nothing is stored yet. Blocks come with the first prompts of a replica.");
    const silent = make("p", {}, found.silent.length ? `No answer from ${found.silent.join(", ")}: their blocks are not counted.` : "");
    const hottest = found.hottest.flatMap((one) => [
      make("h3", {}, `Most used of ${one.of}`),
      one.table.rows.length ? table(one.table, `Prefixes of ${one.of}`) : make("p", {}, "Nothing of it is in memory."),
    ]);
    return [silent, table(found.namespaces, "Namespaces"), ...hottest];
  });
}

// Requests keep their elements, so that the selection in one stays; an open one stays until it is closed.
function listRequests(place, list) {
  const kept = new Map([...place.children].map((one) => [one.dataset.id, one]));
  list.forEach((one, at) => {
    const element = kept.get(one.id) ?? make("details", { "data-id": one.id }, make("summary"), make("div"));
    kept.delete(one.id);
    if (place.children[at] !== element) place.insertBefore(element, place.children[at] ?? null);
    const bar = make("span", { class: "share", "aria-hidden": "true" });
    one.sources.forEach((tokens, number) => {
      const part = make("i", { class: `s${number}` });
      part.style.width = `${(100 * tokens) / Math.max(1, one.tokens)}%`;
      bar.append(part);
    });
    const shares = one.sources.map((tokens, number) => [tokens, state.shares.names[number]]).filter(([tokens]) => tokens);
    const words = [...shares, [one.missed, "missed"]].map(([tokens, name]) => `${tokens.toLocaleString("en")} ${name}`).join(", ");
    element.dataset.at = Date.now() / 1000 - one.age_s;
    element.firstChild.replaceChildren(make("span", { class: "line" }, bar, make("b", {}, one.number),
      `${one.replica}, `, make("time"), `${one.tokens.toLocaleString("en")} tokens: ${words}`));
    if (element.dataset.drawn === JSON.stringify(one.report)) return;
    element.dataset.drawn = JSON.stringify(one.report);
    element.lastChild.replaceChildren(...one.report.map((part) => typeof part === "string" ? make("p", {}, part) : table(part, "Ranges of tokens")));
  });
  kept.forEach((element) => element.open || element.remove());
  for (const one of place.children) one.querySelector("time").textContent = ago(Date.now() / 1000 - one.dataset.at);
}

let wanted = "";  // the number of a request that is looked for

function showRequests(found) {
  const silent = found.silent.length ? ` No answer from ${found.silent.join(", ")}, which may know more.` : "";
  say("requests-says", found.says + silent);
  listRequests($("requests"), found.list);
  const isFound = wanted !== "" && found.found.id === wanted;
  say("found-says", wanted === "" ? "" : isFound ? found.found.says : `Looking for request ${wanted}.`);
  if (isFound) listRequests($("found"), found.found.requests);
}

// -- charts ---------------------------------------------------------------------------------------

const charts = new Map();
let rowsNow = [];  // the shares behind the stacked series
const PERCENT = { size: 56, values: (_plot, ticks) => ticks.map((tick) => `${tick} %`) };

function axis(more) {
  const thin = { stroke: css("--line"), width: 1 };
  return { stroke: css("--dim"), grid: thin, ticks: thin, ...more };
}

function plot(id, data, options) {
  const place = $(id), size = { width: place.clientWidth, height: 256 };
  const key = JSON.stringify([size.width, matchMedia("(prefers-color-scheme: dark)").matches, options.key]);
  const known = charts.get(id);
  if (known?.key === key) return known.chart.setData(data);
  known?.chart.destroy();
  return charts.set(id, { key, chart: new uPlot({ ...size, cursor: { drag: { x: false, y: false } }, ...options }, data, place) });
}

// Shares are stacked: each series is drawn down to zero, and the next one over it.
function showShares() {
  const names = state.shares.names, chosen = $("replica").value;
  const replicas = [...new Set(points.flatMap((one) => Object.keys(one.rates)))].filter(Boolean).sort();
  if (chosen && !replicas.includes(chosen)) replicas.push(chosen);
  draw("replica", replicas, () => [make("option", { value: "" }, "all"), ...replicas.map((one) => make("option", { value: one }, one))]);
  $("replica").value = chosen;
  const total = (rates) => rates.reduce((sum, rate) => sum + rate, 0);
  const first = points.findIndex((one) => total(one.rates[chosen] ?? []) > 0);
  const shown = first < 0 ? [] : points.slice(first);
  const rows = rowsNow = shown.map((one) => {
    const rates = one.rates[chosen] ?? [], sum = total(rates);
    return sum ? rates.map((rate) => (100 * rate) / sum) : null;
  });
  $("shares").hidden = !rows.length;
  $("shares-none").textContent = rows.length ? "" : "No prompt tokens in the last half hour, or since this page was started.";
  if (!rows.length) return;
  const order = names.map((_, at) => at).reverse();
  const stacked = order.map((at) => rows.map((row) => row && total(row.slice(0, at + 1))));
  plot("shares", [shown.map((one) => one.at), ...stacked], {
    key: names,
    scales: { y: { range: [0, 100] } },
    axes: [axis({ space: 80, values: (_plot, ticks) => ticks.map(clock) }), axis(PERCENT)],
    series: [{ label: "time", value: (_plot, at) => (at === null ? "" : clock(at)) }, ...order.map((at) => ({
      label: names[at], stroke: css(`--s${at}`), fill: css(`--s${at}`), width: 1, points: { show: false },
      value: (_plot, _sum, _series, index) => (rowsNow[index] ? `${rowsNow[index][at].toFixed(0)} %` : ""),
    }))],
  });
  const last = rows.findLast((row) => row !== null);
  const words = names.map((name, at) => `${name} ${last[at].toFixed(0)} %`).join(", ");
  $("shares").setAttribute("aria-label", `Shares of prompt tokens over time; the latest: ${words}.`);
}

// Sizes on a logarithmic scale; the band is two standard errors of the sample around the sum.
function showCurve(found) {
  const has = found.points !== null;
  $("curve").hidden = !has;
  draw("curve-says", found, () => found.says.map((text) => make("p", {}, text)));
  if (!has) return;
  const { sizes, own, disk, remote, error, now, unit } = found.points;
  const pool = sizes.map(() => 100 * own), host = found.points.host.map((share) => 100 * (own + share));
  const below = host.map((share, at) => share + 100 * disk[at]), both = below.map((share, at) => share + 100 * remote[at]);
  const band = (sign) => both.map((share, at) => Math.min(100, Math.max(0, share + 200 * sign * error[at])));
  const line = (label, color, more) => ({ label, stroke: css(color), width: 2, value: (_plot, share) => (share === null ? "" : `${share.toFixed(1)} %`), ...more });
  const mark = (chart) => {
    chart.ctx.fillStyle = css("--dim");
    chart.ctx.fillRect(chart.valToPos(now, "x", true) - 1, chart.bbox.top, 2, chart.bbox.height);
  };
  plot("curve", [sizes, pool, host, below, both, band(1), band(-1)], {
    key: [now, unit],
    scales: { x: { time: false, distr: 3, log: 2 }, y: { range: [0, 100] } },
    axes: [axis({ label: `host memory, ${unit} (line: now)` }), axis(PERCENT)],
    series: [{ label: unit }, line("engines' own pools", "--s0"), line("and host memory", "--s1"), line("and disk", "--s2"), line("and other nodes", "--s3"),
      line("at most", "--dim", { width: 0, points: { show: false } }), line("at least", "--dim", { width: 0, points: { show: false } })],
    bands: [{ series: [5, 6], fill: `${css("--dim")}30` }],
    hooks: { draw: [mark] },
  });
  $("curve").setAttribute("aria-label", found.says.join(" "));
}

// -- what is old ----------------------------------------------------------------------------------

function showAges() {
  const passed = (Date.now() - heardAt) / 1000;
  for (const section of state ? document.querySelectorAll("section[data-part]") : []) {
    const part = state.parts[section.dataset.part], note = section.querySelector(".age");
    const age = part.age_s === null ? null : part.age_s + passed;
    const isOld = lostAt > 0 || part.trouble !== "" || (age !== null && age > part.old_after_s);
    const why = section.dataset.part === "status" ? "" : part.trouble;  // of the status the banner says it
    let text = isOld ? `These figures are ${duration(age)} old. ${why}` : "";
    if (age === null) text = part.trouble || "Asking the tier.";
    section.classList.toggle("old", isOld);
    note.hidden = text === "";
    if (note.textContent !== text) note.replaceChildren(...prose(text));
  }
  showBanner(passed, state?.parts.status);
}

// A tier that is gone is said by the whole page: in large letters on top, and in the tab.
function showBanner(passed, status) {
  let text = "", isGone = true;
  if (lostAt) text = `This page has had no answer for ${duration((Date.now() - lostAt) / 1000)}: ${lostWhy}`;
  else if (status?.trouble) text = `The tier has not answered for ${duration(status.trouble_s + passed)}: ${status.trouble}`;
  else if (status && status.age_s !== null && status.age_s + passed > status.old_after_s) text = `The tier last answered ${ago(status.age_s + passed)}.`;
  else isGone = false;
  if (!isGone && (!status || status.age_s === null)) text = "Asking the tier.";
  document.body.classList.toggle("gone", isGone);
  document.title = `${isGone ? "GONE: " : ""}${state?.tier ?? ""} kvray`.trim();
  // Its time changes each second, which nobody wants to hear each second.
  $("banner").setAttribute("aria-live", isGone ? "off" : "polite");
  say("banner", text);
}

// -- asking ---------------------------------------------------------------------------------------

function drawAll() {
  if ($("main").hidden) return;
  say("headline", state.headline);
  showFigures(state.figures);
  showFindings(state.findings);
  showNodes();
  $("totals").textContent = `${state.totals} ${state.without}`.trim();
  draw("replicas", [state.replicas, state.without], ([found, without]) => table(found, "Replicas") ?? make("p", {},
    without ? "" : "No replica has registered yet. Give each engine the connector: kvray connector-config writes its options."));
  showShares();
  showCurve(state.curve);
  if (state.prefixes) showPrefixes(state.prefixes);
  if (state.requests) showRequests(state.requests);
}

function take(told) {
  [state, heardAt, lostAt] = [told, Date.now(), 0];
  points = [...points, ...told.shares.points.filter((one) => one.at > lastAt())].slice(-POINTS_MAX);
  $("tier").textContent = state.tier;
  $("main").hidden = state.parts.status.age_s === null;
  drawAll();
}

const lastAt = () => (points.length ? points[points.length - 1].at : 0);

// Asks once, and again after a while unless the tier's token is missing.
async function ask(token) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let told = null, isLocked = false;
  try {
    const answer = await fetch(`state?since=${lastAt()}${wanted === "" ? "" : `&find=${wanted}`}`, { headers, signal: AbortSignal.timeout(PATIENCE_MS) });
    const content = await answer.json();
    isLocked = answer.status === 401;
    if (answer.ok) told = content; else lostWhy = content.says;
  } catch {
    lostWhy = "this page's own process is gone or cut off; start `kvray dashboard serve` again.";
  }
  $("login").hidden = !isLocked;
  $("refused").textContent = isLocked && token ? "That is not the token." : "";
  $("main").hidden ||= isLocked;
  if (isLocked) return;
  setTimeout(ask, EVERY_MS);
  if (told) take(told); else lostAt ||= Date.now();
  showAges();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  ask($("token").value);
  $("token").value = "";
});
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("wanted").value.trim();
  wanted = given === "" ? "" : BigInt(given).toString();
  $("found").replaceChildren();
  if (state?.requests) showRequests(state.requests);
});
$("replica").addEventListener("change", showShares);
window.addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
for (const heading of document.querySelectorAll("section[data-part] > h2")) heading.after(make("p", { class: "age" }));
setInterval(() => { if ($("login").hidden) showAges(); }, 1000);
$("login").hidden = !("locked" in document.documentElement.dataset);
if ($("login").hidden) ask();
