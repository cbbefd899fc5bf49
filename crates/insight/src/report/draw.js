"use strict";
// What every report is drawn with. All figures were computed before; here they only get a place and
// a colour.

const page = document.documentElement;
const byId = (id) => document.getElementById(id);

function fail(message) {
  page.dataset.error = message;
  const note = document.createElement("p");
  note.className = "failure";
  note.textContent = "This report could not be drawn: " + message;
  document.querySelector("main").prepend(note);
}
window.addEventListener("error", (event) => fail(event.message));

const data = JSON.parse(byId("data").textContent);

// Numbers and elements

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}
function duration(seconds) {
  if (seconds === 0) return "0";
  const size = Math.abs(seconds);
  if (size < 0.0009995) return (seconds * 1e6).toFixed(0) + " µs";
  if (size < 0.9995) return digits(seconds * 1e3) + " ms";
  return digits(seconds) + " s";
}
function percent(share) {
  const value = share * 100;
  return value.toFixed(value >= 0.05 && value < 9.95 ? 1 : 0) + " %";
}
const count = (value) => Math.round(value).toLocaleString("en");
// A number is never parted from its unit at the end of a line.
const unbroken = (text) => text.replace(/(\d) (?=(?:%|µs|ms|s|B|kB|MB|GB|TB)(?:[^\w]|$))/g, "$1\u00a0");
const range = (what, first, last) =>
  first === last ? `${what} ${first}` : `${what}s ${first} to ${last}`;

// An element with attributes and children; strings among these become text, never markup.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function draw(parent, name, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// A drawing as wide as its place, so that its text has the size of all other text.
function canvasIn(place, height, label) {
  place.replaceChildren();
  const width = Math.max(place.clientWidth, 200);
  const svg = draw(place, "svg", {
    viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label,
  });
  return { svg, width, height };
}

// Tooltips

const tooltip = byId("tooltip");
function showTooltip(event, title, rows) {
  tooltip.replaceChildren(element("b", {}, title));
  for (const [name, value, part] of rows) {
    const label = element("span");
    if (part) label.append(element("i", { class: part }));
    label.append(name);
    tooltip.append(element("div", {}, label, element("span", {}, value)));
  }
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
  tooltip.style.left = Math.max(4, left) + "px";
  tooltip.style.top = Math.min(Math.max(4, event.clientY - box.height / 2), innerHeight - box.height - 4) + "px";
}
const hideTooltip = () => { tooltip.hidden = true; };

// Axes

// The round number that is next to `rough` or above it.
function roundUp(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= rough * 0.999);
}
// Round values from 0 to at least `top`.
function ticks(top) {
  if (!(top > 0)) return [0, 1];
  const step = roundUp(top / 5);
  const values = [];
  for (let i = 0; i * step < top + step * 0.999; i++) values.push(i * step);
  return values;
}

// Horizontal lines from 0 to at least `top`, labelled, in a drawing as wide as its place. Below is room
// for another axis.
function grid(place, height, label, top, format) {
  const { svg, width } = canvasIn(place, height, label);
  const values = ticks(top);
  const texts = values.map((value) => (value === 0 ? "0" : format(value).replace(/\.0+(?= |$)|(\.\d*?[1-9])0+(?= |$)/, "$1")));
  const left = Math.max(...texts.map((text) => text.length)) * 7 + 10;
  const right = width - 6, upper = 8, lower = height - 24;
  const highest = values[values.length - 1];
  const y = (value) => lower - (Math.min(value, highest) / highest) * (lower - upper);
  values.forEach((value, i) => {
    draw(svg, "line", { class: value ? "grid" : "axis", x1: left, x2: right, y1: y(value), y2: y(value) });
    draw(svg, "text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, texts[i]);
  });
  return { svg, width, height, y, left, right, upper, lower, highest };
}

// Horizontal bars on one scale, each with segments and a label above.
function drawBars(place, label, bars) {
  const rowHeight = 50;
  const { svg, width } = canvasIn(place, bars.length * rowHeight - 8, label);
  const longest = Math.max(...bars.map((bar) => bar.segments.reduce((sum, s) => sum + s.value, 0)));
  bars.forEach((bar, row) => {
    const top = row * rowHeight;
    draw(svg, "text", { class: "strong", x: 0, y: top + 12 }, bar.name);
    draw(svg, "text", { x: width, y: top + 12, "text-anchor": "end" }, bar.text);
    let at = 0;
    for (const segment of bar.segments) {
      const length = longest > 0 ? (segment.value / longest) * width : 0;
      const rect = draw(svg, "rect", { class: segment.part, x: at, y: top + 19, width: Math.max(0, length - 1), height: 16, rx: 2 });
      draw(rect, "title", {}, segment.title);
      at += length;
    }
  });
  return bars.length;
}

// Text that every report has

function fillCommon() {
  document.title = `${data.name} – Unisono run report`;
  byId("name").textContent = data.name;
  byId("subtitle").textContent = data.subtitle;
  byId("headline").textContent = unbroken(data.verdict.headline);
  const items = (texts) => texts.map((text) => element("li", {}, unbroken(text)));
  byId("findings").replaceChildren(...items(data.verdict.findings));
  byId("advice").replaceChildren(...items(data.verdict.advice));
  byId("help").hidden = data.verdict.advice.length === 0;
  byId("tiles").replaceChildren(...data.tiles.map(({ label, value, note }) =>
    element("div", {}, element("div", { class: "label" }, label), element("div", { class: "value" }, unbroken(value)), element("div", { class: "note" }, unbroken(note)))));
  byId("settings").replaceChildren(...data.settings.map(([key, value]) =>
    element("div", {}, element("dt", {}, key), element("dd", {}, value))));
}

// Draws again when the width changes, and marks the page as complete for programs that wait for it.
function finish(drawAll) {
  let width = innerWidth;
  window.addEventListener("resize", () => {
    if (innerWidth !== width) drawAll();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  page.dataset.height = document.body.scrollHeight;
  page.dataset.rendered = "yes";
}
