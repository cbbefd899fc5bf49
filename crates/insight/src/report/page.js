
// Draws the report of a run of common steps.

const PARTS = [
  ["compute", "Compute"],
  ["exposed", "Exposed communication"],
  ["straggler", "Waiting for a straggler"],
  ["rest", "Rest"],
];
const total = (step) => PARTS.reduce((sum, [part]) => sum + step[part], 0);

// A frame whose horizontal axis is the bins of the curves and whose vertical axis starts at 0.
function frame(place, height, label, top, format) {
  const f = grid(place, height, label, top, format);
  const { svg, width, left, right } = f;
  const bins = data.curves.first.length;
  const x = (bin) => left + (bin / bins) * (right - left);
  const first = data.curves.first[0], last = data.curves.last[bins - 1];
  const step = Math.max(1, roundUp((last - first + 1) / (width < 500 ? 3 : 6)));
  for (let mark = Math.ceil(first / step) * step; mark <= last; mark += step) {
    const at = left + ((mark - first + 0.5) / (last - first + 1)) * (right - left);
    const anchor = at - left < 30 ? "start" : right - at < 20 ? "end" : "middle";
    const text = at - left < 30 ? "step " + count(mark) : count(mark);
    draw(svg, "text", { x: anchor === "start" ? left : at, y: height - 5, "text-anchor": anchor }, text);
  }
  return { ...f, x, bins };
}

// Follows the pointer over a frame with a line and a tooltip.
function hover(f, rows) {
  const cursor = draw(f.svg, "line", { class: "cursor", y1: f.upper, y2: f.lower, visibility: "hidden" });
  const area = draw(f.svg, "rect", {
    x: f.left, y: f.upper, width: f.right - f.left, height: f.lower - f.upper, fill: "transparent",
  });
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const bin = Math.min(f.bins - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * f.bins)));
    const at = f.x(bin + 0.5);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    showTooltip(event, range("Step", count(data.curves.first[bin]), count(data.curves.last[bin])), rows(bin));
  });
  area.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    hideTooltip();
  });
}

// Charts. Each returns how many marks it drew.

// The typical step as one bar.
function drawStep(place) {
  const whole = total(data.step);
  const label = PARTS.map(([part, name]) => `${name} ${duration(data.step[part])}`).join(", ");
  const { svg, width } = canvasIn(place, 34, "A typical step: " + label);
  let at = 0;
  for (const [part, name] of PARTS) {
    const length = whole > 0 ? (data.step[part] / whole) * width : 0;
    const bar = draw(svg, "rect", { class: part, x: at, y: 0, width: Math.max(0, length - 1.5), height: 34, rx: 2 });
    draw(bar, "title", {}, `${name}: ${duration(data.step[part])}`);
    const text = percent(whole > 0 ? data.step[part] / whole : 0);
    if (length > text.length * 8 + 10) {
      draw(svg, "text", { class: "inside", x: at + length / 2, y: 21, "text-anchor": "middle" }, text);
    }
    at += length;
  }
  return PARTS.length;
}

function drawLegend(place) {
  place.replaceChildren(...PARTS.map(([part, name]) =>
    element("div", {}, element("i", { class: part }), element("span", {}, name), element("b", {}, duration(data.step[part])))));
  return PARTS.length;
}

// Step time over the run, stacked. A few slow steps, such as the first ones, must not flatten all
// others: the axis ends soon above nine tenths of the bins if the longest is far above those.
function drawSteps(place) {
  const curves = data.curves;
  const totals = curves.first.map((_, bin) => PARTS.reduce((sum, [part]) => sum + curves[part][bin], 0));
  const sorted = [...totals].sort((a, b) => a - b);
  const longest = sorted[sorted.length - 1];
  const most = sorted[Math.floor((sorted.length - 1) * 0.9)];
  const top = longest > 1.5 * most ? 1.25 * most : longest;
  const f = frame(place, 240, "Step time over the run, stacked by what it was spent on", top, duration);
  let below = totals.map(() => 0);
  for (const [part] of PARTS) {
    const above = below.map((value, bin) => value + curves[part][bin]);
    let path = "";
    above.forEach((value, bin) => { path += `${bin ? "L" : "M"}${f.x(bin)} ${f.y(value)}H${f.x(bin + 1)}`; });
    for (let bin = f.bins - 1; bin >= 0; bin--) path += `L${f.x(bin + 1)} ${f.y(below[bin])}H${f.x(bin)}`;
    draw(f.svg, "path", { class: part, d: path + "Z" });
    below = above;
  }
  const cut = totals.filter((value) => value > f.highest).length;
  if (cut > 0) {
    draw(f.svg, "text", { x: f.right, y: f.upper + 10, "text-anchor": "end" },
      (f.right < 560 ? "cut, longest " : "longer steps are cut, the longest took ") + duration(longest));
  }
  hover(f, (bin) => [
    ...PARTS.map(([part, name]) => [name, duration(curves[part][bin]), part]),
    ["Step", duration(totals[bin])],
  ]);
  return f.bins * PARTS.length;
}

// A line that is broken where values are missing.
function drawCurve(place, height, label, values, top, format, name) {
  const known = values.filter((value) => value !== null);
  if (known.length === 0) {
    place.replaceChildren(element("p", { class: "empty" }, "Nothing was measured."));
    return 1;
  }
  const f = frame(place, height, label, top ?? Math.max(...known), format);
  let run = [];
  const finish = () => {
    if (run.length === 1) {
      draw(f.svg, "circle", { class: "dot", cx: run[0][0], cy: run[0][1], r: 3 });
    } else if (run.length > 1) {
      const line = run.map(([x, y]) => `${x} ${y}`).join("L");
      draw(f.svg, "path", { class: "under", d: `M${run[0][0]} ${f.lower}L${line}L${run[run.length - 1][0]} ${f.lower}Z` });
      draw(f.svg, "path", { class: "curve", d: "M" + line });
    }
    run = [];
  };
  values.forEach((value, bin) => {
    if (value === null) finish();
    else run.push([f.x(bin + 0.5), f.y(Math.max(0, value))]);
  });
  finish();
  hover(f, (bin) => [[name, values[bin] === null ? "not a number" : format(values[bin])]]);
  return known.length;
}
const drawLoss = (place) =>
  drawCurve(place, 300, "Loss over the run", data.curves.loss, undefined, digits, "Loss");
const drawOverlap = (place) =>
  drawCurve(place, 150, "Share of communication hidden, over the run", data.curves.overlap, 1, percent, "Hidden");

function drawCommunication(place) {
  const { total: all, hidden, coding, backward } = data.communication;
  const exposed = Math.max(0, all - hidden);
  const bars = [
    { name: "Backward pass", text: duration(backward), segments: [{ value: backward, part: "compute", title: "Backward pass" }] },
    {
      name: "Communication", text: `${duration(hidden)} hidden, ${duration(exposed)} exposed`,
      segments: [
        { value: hidden, part: "rest", title: "Hidden: " + duration(hidden) },
        { value: exposed, part: "exposed", title: "Exposed: " + duration(exposed) },
      ],
    },
  ];
  if (coding > 0) {
    bars.push({
      name: "of it coding", text: `${duration(coding)}, ${percent(coding / all)}`,
      segments: [{ value: coding, part: "coding", title: "Encoding and decoding: " + duration(coding) }],
    });
  }
  return drawBars(place, `Backward pass ${duration(backward)}, communication ${duration(all)}, hidden ${duration(hidden)}, coding ${duration(coding)}`, bars);
}

function drawScaling(place) {
  const { one_worker: one, all_workers: all, workers, efficiency } = data.scaling;
  const bar = (name, value, part, text) => ({ name, text, segments: [{ value, part, title: `${name}: ${text}` }] });
  return drawBars(place, `Scaling efficiency ${percent(efficiency)}`, [
    bar("One worker", one, "rest", count(one)),
    bar(`${workers} workers`, all, "compute", `${count(all)}, ${percent(efficiency)} of ideal`),
    bar(`${workers} workers, ideal`, one * workers, "ideal", count(one * workers)),
  ]);
}

// Rank by step. A canvas, because there are thousands of cells.
let measure = "lateness";
function drawHeatMap(place) {
  const map = data.heat_map;
  const rows = map.rows.length, columns = map.columns.length;
  if (rows === 0) return 1;
  const values = map[measure];
  const all = values.flat().sort((a, b) => a - b);
  // The slowest 1 % of the cells share a colour, or one hiccup would fade all others; a single row is
  // more than that. Compute times start at the least one, for what matters is how they differ.
  const low = measure === "lateness" ? 0 : all[0];
  const high = Math.max(all[Math.ceil((all.length - 1) * 0.99)], low + 1e-9);
  const names = map.rows.map(([first, last]) => range("rank", first, last).replace(" to ", "–"));
  const left = Math.max(...names.map((name) => name.length)) * 7 + 12;
  const cell = Math.max(9, Math.min(28, Math.floor(320 / rows)));
  const { svg, width, height } = canvasIn(place, rows * cell + 46,
    `${measure === "lateness" ? "Lateness" : "Compute time"} of every rank over the run, from ${duration(low)} to ${duration(high)}`);
  const style = getComputedStyle(page);
  const canvas = element("canvas", { "aria-hidden": "true" });
  const inner = width - left - 6;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(inner * scale);
  canvas.height = Math.round(rows * cell * scale);
  Object.assign(canvas.style, { position: "absolute", left: left + "px", top: 0, width: inner + "px", height: rows * cell + "px" });
  const brush = canvas.getContext("2d");
  const colours = [style.getPropertyValue("--heat-low").trim(), style.getPropertyValue("--heat-high").trim()];
  const gap = rows > 32 ? 0 : 1;
  values.forEach((row, r) => {
    const every = Math.ceil(14 / cell);
    if (r % every === 0) {
      draw(svg, "text", { x: left - 8, y: r * cell + cell / 2 + 4, "text-anchor": "end" }, names[r]);
    }
    row.forEach((value, c) => {
      const share = Math.min(1, Math.max(0, (value - low) / (high - low)));
      const x0 = Math.round((c / columns) * canvas.width), x1 = Math.round(((c + 1) / columns) * canvas.width);
      const y0 = Math.round(r * cell * scale), y1 = Math.round(((r + 1) * cell - gap) * scale);
      brush.fillStyle = colours[0];
      brush.fillRect(x0, y0, x1 - x0, y1 - y0);
      brush.globalAlpha = share;
      brush.fillStyle = colours[1];
      brush.fillRect(x0, y0, x1 - x0, y1 - y0);
      brush.globalAlpha = 1;
    });
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const c = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    const r = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    showTooltip(event, `Rank${names[r].slice(4)}, ${range("step", count(map.columns[c][0]), count(map.columns[c][1]))}`, [
      ["Late by", duration(map.lateness[r][c])], ["Compute", duration(map.compute[r][c])],
    ]);
  });
  canvas.addEventListener("pointerleave", hideTooltip);
  place.append(canvas);

  // The steps below, and the scale of the colours.
  const under = rows * cell + 14;
  draw(svg, "text", { x: left, y: under }, "step " + count(map.columns[0][0]));
  draw(svg, "text", { x: width - 6, y: under, "text-anchor": "end" }, count(map.columns[columns - 1][1]));
  const gradient = draw(draw(svg, "defs"), "linearGradient", { id: "heat" });
  draw(gradient, "stop", { offset: 0, style: "stop-color: var(--heat-low)" });
  draw(gradient, "stop", { offset: 1, style: "stop-color: var(--heat-high)" });
  const lowest = duration(low), start = left + lowest.length * 7 + 8;
  draw(svg, "text", { x: left, y: height - 4 }, lowest);
  draw(svg, "rect", { x: start, y: height - 13, width: 110, height: 9, rx: 2, fill: "url(#heat)" });
  draw(svg, "text", { x: start + 118, y: height - 4 }, duration(high));
  return rows * columns;
}

function fillRanks() {
  const longest = Math.max(...data.ranks.map((rank) => total(rank.step)));
  const rows = data.ranks.map((rank) => {
    const bar = element("div", { class: "bar" });
    for (const [part, name] of PARTS) {
      const width = longest > 0 ? (rank.step[part] / longest) * 100 : 0;
      bar.append(element("i", { class: part, style: `width: ${width}%`, title: `${name}: ${duration(rank.step[part])}` }));
    }
    const number = (text) => element("td", { class: "number" }, text);
    return element("tr", {}, number(String(rank.rank)), element("td", {}, rank.host), element("td", { class: "wide" }, bar),
      number(duration(rank.step.compute)), number(duration(rank.lateness)), number(percent(rank.last_share)));
  });
  document.querySelector("#ranks tbody").replaceChildren(...rows);
  if (data.ranks.length < data.ranks_in_all) {
    byId("ranks-note").textContent = `The ${data.ranks.length} latest of ${data.ranks_in_all} ranks.`;
  }
}

// The life of every worker. Above are the epochs with their number of members, below the recoveries.
const STATES = { m: "member", r: "spare", s: "starting", g: "gone" };
function drawWorkers(place) {
  const { end, columns, rows, epochs, recoveries } = data.workers;
  const names = rows.map((row) => range("worker", ...row.workers).replace(" to ", "–"));
  const left = Math.max(...names.map((name) => name.length), 10) * 7 + 12;
  const row = Math.max(9, Math.min(24, Math.floor(420 / rows.length))), gap = rows.length > 32 ? 1 : 3;
  const upper = 22, lower = upper + rows.length * row, strip = recoveries.length > 0 ? 34 : 0;
  const { svg, width, height } = canvasIn(place, lower + strip + 24, "The life of every worker, and every recovery");
  const inner = width - left - 6;
  const x = (seconds) => left + (end > 0 ? seconds / end : 0) * inner;
  let marks = 0;
  rows.forEach(({ cells, begins }, r) => {
    const top = upper + r * row;
    if (r % Math.ceil(14 / row) === 0) {
      draw(svg, "text", { x: left - 8, y: top + row / 2 + 4, "text-anchor": "end" }, names[r]);
    }
    for (let from = 0; from < columns;) {
      let to = from + 1;
      while (to < columns && cells[to] === cells[from]) to++;
      if (STATES[cells[from]]) {
        draw(svg, "rect", {
          class: STATES[cells[from]], x: left + (from / columns) * inner, y: top,
          width: ((to - from) / columns) * inner, height: row - gap,
        });
        marks++;
      }
      from = to;
    }
    for (const column of begins) {
      const at = left + (column / columns) * inner;
      draw(svg, "line", { class: "again", x1: at, x2: at, y1: top, y2: top + row - gap });
    }
  });
  let free = left - 8;
  for (const epoch of epochs) {
    const at = x(epoch.at), text = String(epoch.members);
    draw(svg, "line", { class: "epoch", x1: at, x2: at, y1: upper - 6, y2: lower });
    if (at - text.length * 4 >= free) {
      draw(svg, "text", { x: at, y: upper - 9, "text-anchor": at < left + 8 ? "start" : "middle" }, text);
      free = at + text.length * 4 + 6;
    }
  }
  draw(svg, "text", { x: left - 8, y: upper - 9, "text-anchor": "end" }, "members");
  const longest = Math.max(...recoveries.map((recovery) => recovery.seconds), 1e-9);
  for (const { at, seconds } of recoveries) {
    const size = 2 + (seconds / longest) * (strip - 8);
    draw(svg, "rect", { class: "straggler", x: x(at) - 1.5, y: lower + strip - size, width: 3, height: size });
  }
  if (strip) draw(svg, "text", { x: left - 8, y: lower + strip - 4, "text-anchor": "end" }, "recoveries");
  const step = end > 0 ? roundUp(end / (width < 500 ? 3 : 6)) : 1;
  for (let mark = 0; mark <= end; mark += step) {
    const anchor = mark === 0 ? "start" : width - x(mark) < 30 ? "end" : "middle";
    draw(svg, "text", { x: x(mark), y: height - 5, "text-anchor": anchor }, duration(mark));
  }
  const area = draw(svg, "rect", { x: left, y: upper, width: inner, height: lower - upper + strip, fill: "transparent" });
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const r = Math.floor(((event.clientY - box.top) / box.height) * (lower - upper + strip) / row);
    const column = Math.min(columns - 1, Math.floor(share * columns));
    const lines = [];
    if (rows[r] && STATES[rows[r].cells[column]]) {
      const state = STATES[rows[r].cells[column]];
      const again = rows[r].begins.filter((begin) => begin <= column).length;
      lines.push([names[r][0].toUpperCase() + names[r].slice(1), state, state]);
      if (again) lines.push(["Started again", count(again) + "×"]);
    }
    const epoch = epochs.filter((epoch) => epoch.at <= share * end).pop();
    if (epoch) lines.push([range("Epoch", epoch.first, epoch.last), `${epoch.members} members`]);
    const near = recoveries.filter(({ at }) => Math.abs(at / end - share) < 4 / inner);
    for (const { count: many, seconds } of near) {
      lines.push([many > 1 ? `${many} recoveries, longest` : "Recovery", duration(seconds)]);
    }
    showTooltip(event, "At " + duration(share * end), lines);
  });
  area.addEventListener("pointerleave", hideTooltip);
  return marks;
}

function fillWorkers() {
  byId("workers-card").hidden = !data.workers;
  if (!data.workers) return;
  const { listed, recoveries_in_all: all, note } = data.workers;
  byId("workers-note").textContent = unbroken(note);
  byId("workers-legend").replaceChildren(...Object.values(STATES).map((state) =>
    element("div", {}, element("i", { class: state }), element("span", {}, state))));
  byId("recoveries-part").hidden = listed.length === 0;
  const rows = listed.map((row) => {
    const number = (text) => element("td", { class: "number" }, unbroken(text));
    return element("tr", {}, number(row.at), number(row.epoch), element("td", {}, row.lost), number(row.took),
      number(row.members), number(row.step), element("td", {}, row.cost));
  });
  document.querySelector("#recoveries tbody").replaceChildren(...rows);
  if (listed.length < all) byId("recoveries-note").textContent = `The ${listed.length} longest of ${count(all)} recoveries.`;
}

function fillCodecs() {
  byId("codec-card").hidden = !data.choice;
  if (!data.choice) return;
  const rows = data.choice.rows.map((row) => {
    const number = (text) => element("td", { class: "number" }, unbroken(text));
    const name = row.chosen ? element("b", {}, row.codec + " ← chosen") : row.codec;
    return element("tr", row.chosen ? { class: "chosen" } : {}, element("td", {}, name), number(row.step), number(row.coding),
      number(row.bytes), number(row.measured), element("td", {}, unbroken(row.error)));
  });
  document.querySelector("#codecs tbody").replaceChildren(...rows);
  byId("codec-note").textContent = unbroken(data.choice.basis);
  byId("codec-result").textContent = unbroken(data.choice.result);
  byId("codec-reason").textContent = unbroken(data.choice.reason);
}

function fillText() {
  fillCommon();
  byId("verdict").dataset.bottleneck = data.verdict.bottleneck;
  byId("step-note").textContent = `a typical one of ${count(data.measured)}, mean over all ranks`;
}

function drawAll() {
  const charts = { step: drawStep, legend: drawLegend, steps: drawSteps, loss: drawLoss };
  if (data.communication) Object.assign(charts, { communication: drawCommunication, overlap: drawOverlap });
  if (data.scaling) charts.scaling = drawScaling;
  if (data.ranks.length > 1) charts["heat-map"] = drawHeatMap;
  byId("communication-card").hidden = !data.communication;
  byId("scaling-card").hidden = !data.scaling;
  byId("ranks-card").hidden = data.ranks.length <= 1;
  if (data.workers) byId("workers").dataset.marks = drawWorkers(byId("workers"));
  for (const [id, chart] of Object.entries(charts)) {
    const place = byId(id);
    if (data.curves.first.length === 0) place.replaceChildren(element("p", { class: "empty" }, "No step was recorded."));
    else place.dataset.marks = chart(place);
  }
}

fillText();
fillRanks();
fillCodecs();
fillWorkers();
drawAll();
for (const button of document.querySelectorAll("[data-measure]")) {
  button.addEventListener("click", () => {
    measure = button.dataset.measure;
    for (const other of document.querySelectorAll("[data-measure]")) other.setAttribute("aria-pressed", other === button);
    drawAll();
  });
}
finish(drawAll);
