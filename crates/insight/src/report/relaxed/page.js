
// Draws the report of a relaxed run.

const PARTS = [
  ["compute", "Computing", (worker) => worker.computing],
  ["straggler", "Blocked", (worker) => worker.blocked],
  ["rest", "Rest", (worker) => Math.max(0, 1 - worker.computing - worker.blocked)],
];

// Charts. Each returns how many marks it drew.

// The loss over time, broken where it was no number.
function drawLoss(place) {
  const known = data.losses.filter(([, loss]) => loss !== null);
  if (known.length === 0) {
    place.replaceChildren(element("p", { class: "empty" }, "No loss was a number."));
    return 1;
  }
  const f = grid(place, 280, "Loss over time", Math.max(...known.map(([, loss]) => loss)), digits);
  const times = data.losses.map(([time]) => time);
  const first = times[0], last = times[times.length - 1];
  const x = (time) => f.left + (last > first ? (time - first) / (last - first) : 0.5) * (f.right - f.left);
  const step = roundUp(Math.max(last - first, 1e-6) / (f.width < 500 ? 3 : 6));
  for (let mark = Math.ceil(first / step) * step; mark <= last; mark += step) {
    const at = x(mark);
    const anchor = at - f.left < 30 ? "start" : f.right - at < 30 ? "end" : "middle";
    draw(f.svg, "text", { x: at, y: f.height - 5, "text-anchor": anchor }, duration(mark));
  }
  let line = [];
  const finishLine = () => {
    if (line.length === 1) {
      draw(f.svg, "circle", { class: "dot", cx: line[0][0], cy: line[0][1], r: 3 });
    } else if (line.length > 1) {
      const path = line.map(([px, py]) => `${px} ${py}`).join("L");
      draw(f.svg, "path", { class: "under", d: `M${line[0][0]} ${f.lower}L${path}L${line[line.length - 1][0]} ${f.lower}Z` });
      draw(f.svg, "path", { class: "curve", d: "M" + path });
    }
    line = [];
  };
  for (const [time, loss] of data.losses) {
    if (loss === null) finishLine();
    else line.push([x(time), f.y(Math.max(0, loss))]);
  }
  finishLine();
  const cursor = draw(f.svg, "line", { class: "cursor", y1: f.upper, y2: f.lower, visibility: "hidden" });
  const area = draw(f.svg, "rect", {
    x: f.left, y: f.upper, width: f.right - f.left, height: f.lower - f.upper, fill: "transparent",
  });
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const time = first + ((event.clientX - box.left) / box.width) * (last - first);
    const [at, loss] = data.losses.reduce((a, b) => (Math.abs(b[0] - time) < Math.abs(a[0] - time) ? b : a));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(at));
    cursor.setAttribute("visibility", "visible");
    showTooltip(event, "After " + duration(at), [["Loss", loss === null ? "not a number" : digits(loss)]]);
  });
  area.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    hideTooltip();
  });
  return known.length;
}

// Pushes by a number of clocks; `limit` is the largest number that was allowed.
function drawHistogram(place, label, columns, limit) {
  const all = columns.reduce((sum, [, pushes]) => sum + pushes, 0);
  const f = grid(place, 220, label, Math.max(...columns.map(([, pushes]) => pushes)), count);
  const room = (f.right - f.left) / columns.length;
  const width = Math.min(room * 0.8, 60);
  const longest = Math.max(...columns.map(([clocks]) => clocks.length));
  const every = Math.ceil((longest * 7 + 10) / room);
  columns.forEach(([clocks, pushes], column) => {
    const middle = f.left + (column + 0.5) * room;
    draw(f.svg, "rect", { class: "compute", x: middle - width / 2, y: f.y(pushes), width, height: f.lower - f.y(pushes), rx: 2 });
    if (column % every === 0) {
      draw(f.svg, "text", { x: middle, y: f.height - 5, "text-anchor": "middle" }, clocks);
    }
    const area = draw(f.svg, "rect", { x: middle - room / 2, y: f.upper, width: room, height: f.lower - f.upper, fill: "transparent" });
    area.addEventListener("pointermove", (event) =>
      showTooltip(event, `${clocks} clock${clocks === "1" ? "" : "s"}`, [["Pushes", count(pushes)], ["Share", percent(pushes / all)]]));
    area.addEventListener("pointerleave", hideTooltip);
  });
  if (limit !== null && columns[limit]?.[0] === String(limit)) {
    const at = f.left + (limit + 1) * room - 1;
    draw(f.svg, "line", { class: "limit", x1: at, x2: at, y1: f.upper, y2: f.lower });
  }
  return columns.length;
}
const drawStaleness = (place) => drawHistogram(place, "Pushes by staleness in clocks", data.staleness, null);
const drawLead = (place) => drawHistogram(place, "Pushes by lead in clocks", data.leads, data.bound);

function drawLevels(place) {
  return drawBars(place, "Predicted gradients per second by level", data.levels.map((level) => {
    const text = `${digits(level.pushes_per_s)}, ${digits(level.ratio)}× those of bsp`;
    const chosen = level.level === data.advised;
    return {
      name: chosen ? level.level + " ← suits" : level.level, text,
      segments: [{ value: level.pushes_per_s, part: chosen ? "compute" : "rest", title: `${level.level}: ${text}` }],
    };
  }));
}

function fillWorkers() {
  byId("legend").replaceChildren(...PARTS.map(([part, name]) =>
    element("div", {}, element("i", { class: part }), element("span", {}, name))));
  const number = (text) => element("td", { class: "number" }, unbroken(text));
  const rows = data.workers.map((worker) => {
    const bar = element("div", { class: "bar" });
    for (const [part, name, share] of PARTS) {
      bar.append(element("i", { class: part, style: `width: ${share(worker) * 100}%`, title: `${name}: ${percent(share(worker))}` }));
    }
    const pushes = worker.dropped ? `${worker.pushes} (${count(worker.dropped)} dropped)` : worker.pushes;
    return element("tr", {}, number(String(worker.worker)), element("td", { class: "wide" }, bar), number(pushes),
      number(worker.rate), number(worker.compute), number(percent(worker.blocked)), number(worker.staleness),
      number(String(worker.lead)), number(String(worker.lives)));
  });
  document.querySelector("#workers tbody").replaceChildren(...rows);
  if (data.workers.length < data.workers_in_all) {
    byId("workers-note").textContent = `The ${data.workers.length} slowest of ${data.workers_in_all} workers.`;
  }
}

function fillMoves() {
  byId("moves-card").hidden = data.moves.length === 0;
  const number = (text) => element("td", { class: "number" }, unbroken(text));
  const rows = data.moves.map((move) =>
    element("tr", {}, number(duration(move.time)), number(String(move.from)), number(String(move.to)),
      element("td", { class: "text" }, unbroken(move.reason))));
  document.querySelector("#moves tbody").replaceChildren(...rows);
  byId("moves-note").textContent =
    data.moves.length < data.moves_in_all ? `the last ${data.moves.length} of ${count(data.moves_in_all)}` : "with the reason of each";
}

function drawAll() {
  const charts = { loss: drawLoss, lead: drawLead };
  // Where there are no common weights it is not known.
  const knowsStaleness = data.staleness.length > 0 || data.workers.length === 0;
  if (knowsStaleness) charts.staleness = drawStaleness;
  byId("staleness-card").hidden = !knowsStaleness;
  if (data.levels.length > 0) charts.levels = drawLevels;
  byId("levels-card").hidden = data.levels.length === 0;
  for (const [id, chart] of Object.entries(charts)) {
    const place = byId(id);
    if (data.workers.length === 0) place.replaceChildren(element("p", { class: "empty" }, "No gradient was recorded in this folder."));
    else place.dataset.marks = chart(place);
  }
}

fillCommon();
byId("verdict").dataset.tone = data.verdict.tone;
byId("lead-note").textContent =
  data.bound === null ? "clocks ahead of the slowest, without a bound" : `clocks ahead of the slowest, at most ${data.bound} allowed`;
fillWorkers();
fillMoves();
drawAll();
finish(drawAll);
