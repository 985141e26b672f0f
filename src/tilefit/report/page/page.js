"use strict";

/* Sorting, filtering and selecting. The page says everything without this script; it only makes it handy. */

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function count(value, noun) {
  return `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
}

function drawing(height, label) {
  const svg = document.createElementNS(SVG, "svg");
  const attributes = { class: "tiles", viewBox: `0 0 430 ${height}`, role: "img", "aria-label": label };
  for (const [key, value] of Object.entries(attributes)) svg.setAttribute(key, value);
  return svg;
}

/* What an operation needs at best beside what is predicted. */
function drawLimits(limits) {
  const svg = drawing(150, "time at best, and predicted");
  const longest = Math.max(...limits.map(([, , time]) => time));
  limits.forEach(([kind, name, time, text], i) => {
    shape(svg, "text", { x: 0, y: 16 + 48 * i }, `${name}: ${text}`);
    shape(svg, "rect", { class: "idle", x: 0, y: 22 + 48 * i, width: 420, height: 14 });
    shape(svg, "rect", { class: kind, x: 0, y: 22 + 48 * i, width: Math.max(1, 420 * time / longest), height: 14 });
  });
  return [svg, element("p", { class: "caption" },
    "The longer of the two upper bars is what the GPU needs at best; what the lower one takes more is waste, or the fixed cost of a kernel.")];
}

/* How a product is cut into tiles, and its tiles into waves.

   Tiles are handed out row by row here; libraries order them otherwise, which changes neither their number nor
   how many there are in the last wave. */
function drawTiles(tiles, sms) {
  const [m, n, , batch] = tiles.product;
  const [height, width] = tiles.tile;
  const down = Math.ceil(m / height), across = Math.ceil(n / width);
  const blocks = Math.round(tiles.waves * sms);
  const waves = Math.ceil(blocks / sms);
  const last = blocks - (waves - 1) * sms;
  const split = Math.max(1, Math.round(blocks / (down * across * batch)));
  const W = 342, H = 170, left = 76, top = 20;
  const svg = drawing(300, `C of ${m} by ${n} in tiles of ${height} by ${width}, ${waves} waves`);
  const cellW = W / across, cellH = H / down;
  const perMatrix = down * across;
  // One matrix of a batch is drawn: its last tiles are in the last wave if the batch's are.
  const lastHere = Math.min(perMatrix, Math.ceil(last / split));
  const run = (from, to, kind) => {
    // Tiles from..to in reading order cover up to three rectangles.
    while (from < to) {
      const row = Math.floor(from / across), column = from % across;
      const rows = column === 0 ? Math.max(1, Math.floor((to - from) / across)) : 1;
      const columns = column === 0 && to - from >= across ? across : Math.min(to - from, across - column);
      shape(svg, "rect", {
        class: kind, x: left + column * cellW, y: top + row * cellH, width: columns * cellW, height: rows * cellH,
      });
      from += rows > 1 || columns === across ? rows * across : columns;
    }
  };
  const full = perMatrix - lastHere;
  const perWave = Math.max(1, Math.floor(sms / split));
  if (full / perWave <= 60) {
    for (let at = 0, wave = 0; at < full; at += perWave, wave += 1) {
      run(at, Math.min(full, at + perWave), wave % 2 ? "full odd" : "full");
    }
  } else {
    run(0, full, "full");
  }
  run(full, perMatrix, "last");
  // What a tile computes beyond the edge of C is thrown away.
  const insideW = W * n / (across * width), insideH = H * m / (down * height);
  if (insideW < W) shape(svg, "rect", { class: "beyond", x: left + insideW, y: top, width: W - insideW, height: H });
  if (insideH < H) shape(svg, "rect", { class: "beyond", x: left, y: top + insideH, width: insideW, height: H - insideH });
  if (cellW >= 5) for (let i = 1; i < across; i += 1) shape(svg, "line", { class: "grid", x1: left + i * cellW, x2: left + i * cellW, y1: top, y2: top + H });
  if (cellH >= 5) for (let i = 1; i < down; i += 1) shape(svg, "line", { class: "grid", x1: left, x2: left + W, y1: top + i * cellH, y2: top + i * cellH });
  shape(svg, "rect", { class: "matrix", x: left, y: top, width: insideW, height: insideH });
  shape(svg, "text", { x: left, y: 13 }, `n = ${n.toLocaleString("en")}: ${count(across, "tile")} of ${width}`);
  shape(svg, "text", { x: left - 8, y: top + H / 2 - 8, "text-anchor": "end" }, "m =");
  shape(svg, "text", { x: left - 8, y: top + H / 2 + 8, "text-anchor": "end" }, m.toLocaleString("en"));
  // The waves, a column each; many full ones share the columns there are.
  const base = 284, most = 50, y = 64;
  const columns = Math.min(waves, most), step = W / columns;
  const drawn = waves > most ? ` (the last ${most} drawn)` : "";
  shape(svg, "text", { x: left, y: base - y - 8 }, `${count(blocks, "block")} on ${sms} SMs: ${count(waves, "wave")}${drawn}`);
  shape(svg, "text", { x: left - 8, y: base - y + 10, "text-anchor": "end" }, "all SMs");
  for (let i = 0; i < columns; i += 1) {
    const filled = i === columns - 1 ? last / sms : 1;
    const x = left + i * step, gap = Math.min(2, step / 4);
    shape(svg, "rect", { class: "idle", x, y: base - y, width: step - gap, height: y });
    shape(svg, "rect", { class: i === columns - 1 ? "last" : "full", x, y: base - y * filled, width: step - gap, height: y * filled });
  }
  const wasted = 1 - m * n / (down * height * across * width);
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  const words = [
    `The result is cut into tiles of ${height} × ${width}, one for each thread block`
      + `${split > 1 ? `, and each tile's contraction among ${split} blocks` : ""}`
      + `${batch > 1 ? ` (one of ${batch.toLocaleString("en")} matrices is drawn)` : ""}. `,
    wasted > 0.0005 ? `${percent(wasted)} of what the tiles compute lies beyond the edge (red) and is thrown away. `
      : "The tiles fit it exactly. ",
    last < sms ? `The ${waves > 1 ? "last" : "only"} wave (yellow) keeps ${last} of ${sms} SMs busy.` : "Every wave is full.",
  ];
  return [svg, element("p", { class: "caption" }, words.join(""))];
}

function setUp(report) {
  const source = report.querySelector('script[type="application/json"]');
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const table = report.querySelector("table.operations");
  const body = table.tBodies[0];
  const rows = [...body.rows].sort((a, b) => a.dataset.row - b.dataset.row);
  const dots = [...report.querySelectorAll(".dots circle")];
  const picture = report.querySelector(".picture"), facts = report.querySelector(".facts");
  const more = report.querySelector(".more");
  let selected = -1;

  // --- selecting
  const visible = () => [...body.rows].filter((row) => row !== inline && row.offsetParent !== null);

  function select(index, focus) {
    if (selected >= 0) {
      rows[selected].classList.remove("selected");
      rows[selected].querySelector("button").setAttribute("aria-pressed", "false");
    }
    selected = index;
    const row = rows[index];
    row.classList.add("selected");
    row.querySelector("button").setAttribute("aria-pressed", "true");
    for (const each of rows) each.querySelector("button").tabIndex = each === row ? 0 : -1;
    if (focus) {
      row.querySelector("button").focus({ preventScroll: true });
      row.scrollIntoView({ block: "nearest" });
    }
    for (const plot of report.querySelectorAll("svg.points")) {
      const dot = plot.querySelector(`[data-row="${index}"]`), ring = plot.querySelector(".ring");
      ring.setAttribute("visibility", dot ? "visible" : "hidden");
      if (!dot) continue;
      for (const name of ["cx", "cy"]) ring.setAttribute(name, dot.getAttribute(name));
      ring.setAttribute("r", Number(dot.getAttribute("r")) + 4);
    }
    show(index);
  }

  function show(index) {
    const entry = data.rows[index];
    const list = element("dl", {});
    for (const [name, text] of entry.facts) list.append(element("dt", {}, name), element("dd", {}, text));
    const runs = new Map();
    for (const site of entry.sites) runs.set(site, (runs.get(site) || 0) + 1);
    const sites = element("ul", {});
    for (const [site, times] of runs) {
      const [module, line] = data.sites[site];
      sites.append(element("li", {}, element("code", {}, module || "the whole step"),
        ` ${line}${times > 1 ? ` (${times} times)` : ""}`));
    }
    picture.replaceChildren(
      element("h3", {}, rows[index].querySelector("button").textContent),
      ...(entry.tiles ? drawTiles(entry.tiles, data.sms) : drawLimits(entry.limits)),
    );
    facts.replaceChildren(list, element("h3", {}, "Where"), sites);
    place();
  }

  // On a narrow page there is no room beside the table: what is selected unfolds below its row.
  const wide = matchMedia("(min-width: 1101px), print");
  const inline = element("tr", { class: "inline" }, element("td", { colspan: table.tHead.rows[0].cells.length }));
  const homes = [picture.parentElement, facts.parentElement];

  function place() {
    if (wide.matches) {
      homes[0].append(picture);
      homes[1].append(facts);
      inline.remove();
    } else {
      inline.firstChild.append(picture, facts);
      rows[selected].after(inline);
    }
  }

  wide.addEventListener("change", place);

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row !== inline) select(Number(row.dataset.row), true);
  });
  body.addEventListener("keydown", (event) => {
    const shown = visible();
    const at = shown.indexOf(rows[selected]);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (shown[to]) select(Number(shown[to].dataset.row), true);
  });
  for (const dot of dots) {
    const index = Number(dot.dataset.row);
    dot.addEventListener("click", () => {
      if (rows[index].classList.contains("tail")) showAll();
      select(index, false);
      // Within the table's own box only: the plot stays where it is.
      const box = table.parentElement;
      box.scrollTop = rows[index].offsetTop - box.clientHeight / 2;
    });
  }

  // --- sorting
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = element("button", { type: "button" });
    button.append(...head.childNodes);
    head.append(button);
    const text = head.classList.contains("text");
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const direction = before === (text ? "ascending" : "descending")
        ? (text ? "descending" : "ascending") : (text ? "ascending" : "descending");
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const value = (row) => text ? row.cells[column].textContent : Number(row.cells[column].dataset.value);
      const sign = direction === "ascending" ? 1 : -1;
      const ordered = [...rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return sign * (text ? x.localeCompare(y, "en", { numeric: true }) : x - y);
      });
      body.append(...ordered);
      place();
      tail();
    });
  });
  heads[1].setAttribute("aria-sort", "descending");

  // --- filtering: every word must be found in what an operation is or in where it is; `*` is a part of a path
  const form = report.querySelector(".filters");
  const search = form.querySelector("input");
  const scale = Number(table.dataset.scale), decimals = Number(table.dataset.decimals);
  const places = data.sites.map(([module, line]) => `${module} ${line}`.toLowerCase());
  const whole = data.rows.reduce((sum, row) => sum + row.time, 0);
  const operations = data.rows.reduce((sum, row) => sum + row.sites.length, 0);

  const pattern = (word) => {
    const parts = word.toLowerCase().split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
    return new RegExp(parts.join("[^.\\s]*"));
  };

  function filter() {
    const words = search.value.split(/\s+/).filter(Boolean).map(pattern);
    const found = words.map((word) => places.map((place) => word.test(place)));
    let time = 0, runs = 0, shown = 0;
    rows.forEach((row, index) => {
      const { sites, time: total } = data.rows[index];
      const [phase, bound] = [row.cells[4].textContent, row.cells[5].textContent];
      const what = `${row.querySelector("button").textContent} ${phase} ${bound}`.toLowerCase();
      const open = words.map((word, i) => [word.test(what), found[i]]).filter(([said]) => !said);
      let n = open.length ? sites.filter((site) => open.every(([, at]) => at[site])).length : sites.length;
      if (form.phase.value && form.phase.value !== phase) n = 0;
      if (form.bound.value && form.bound.value !== bound) n = 0;
      const part = total * n / sites.length;
      row.classList.toggle("unmatched", n === 0);
      if (n) {
        fill(row.cells[1], part, (part / scale).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
        fill(row.cells[2], part / whole, `${(100 * part / whole).toFixed(1)} %`);
        fill(row.cells[3], n, String(n));
        shown += 1;
      }
      time += part;
      runs += n;
    });
    for (const dot of dots) {
      dot.classList.toggle("out", rows[dot.dataset.row].classList.contains("unmatched"));
    }
    form.querySelector("output").textContent =
      `${count(runs, "operation")} of ${operations.toLocaleString("en")} in ${count(shown, "row")}, ${(100 * time / whole).toFixed(1)} % of the GPU time`;
    tail();
  }

  function fill(cell, value, text) {
    cell.dataset.value = value;
    cell.textContent = text;
  }

  // --- the rows that are shown until all are asked for
  const limit = rows.filter((row) => !row.classList.contains("tail")).length;

  function tail() {
    let shown = 0;
    for (const row of body.rows) {
      if (row === inline) continue;
      if (!row.classList.contains("unmatched")) shown += 1;
      row.classList.toggle("tail", shown > limit);
    }
    if (more) more.hidden = table.classList.contains("all") || shown <= limit;
  }

  function showAll() {
    table.classList.add("all");
    if (more) more.hidden = true;
  }

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", filter);
  if (more) more.addEventListener("click", showAll);
  filter();
  const first = data.rows.findIndex((row) => row.tiles);
  select(Math.max(0, first), false);
}

/* What some of the findings save together, of the combinations that were priced. */
function setUpChoices(form) {
  const data = JSON.parse(form.dataset.choices);
  const boxes = [...form.querySelectorAll("input[type=checkbox]")];
  const price = form.querySelector("input[type=number]"), output = form.querySelector("output");
  const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const seconds = (time) => {
    const [scale, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([each]) => time >= each) || [1e-9, "ns"];
    return `${number(time / scale)} ${unit}`;
  };

  function tell() {
    const key = boxes.filter((box) => box.checked).map((box) => box.value).join(",");
    const time = key ? data.times[key] : data.time;
    const words = [`${seconds(time)} a step`];
    if (time < data.time) words.push(`${(data.time / time).toFixed(2)} times as fast as ${seconds(data.time)}`);
    if (data.items) {
      words.push(`${number(data.items / time)} ${data.unit} per second`);
      const hour = price.value === "" ? NaN : Number(price.value);
      if (hour >= 0) {
        const cost = (each) => number(hour * data.amount / data.items * each / 3600);
        words.push(`${cost(time)} per ${data.bulk}${time < data.time ? ` instead of ${cost(data.time)}` : ""}`);
      }
    }
    output.textContent = words.join(" · ");
    form.querySelector(".left").setAttribute("width", 1000 * time / data.time);
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", tell);
  form.hidden = false;
  tell();
}

/* Several GPUs: one is shown at a time. */
function setUpTabs() {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  if (!tabs.length) return;
  const choose = (wanted, focus) => {
    for (const tab of tabs) {
      const on = tab === wanted;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !on;
    }
    if (focus) wanted.focus();
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1 }[event.key];
      if (to !== undefined) choose(tabs[(to + tabs.length) % tabs.length], true);
    });
  });
  for (const tab of tabs) document.getElementById(tab.getAttribute("aria-controls")).setAttribute("role", "tabpanel");
  document.querySelector(".tabs").hidden = false;
  choose(tabs[0]);
}

/* On paper, what is folded is shown; but for the pages of the rules, which would bury the findings. */
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("section > details:not([open]), .tree details:not([open])")) {
    fold.open = true;
    fold.dataset.folded = "";
  }
});
addEventListener("afterprint", () => {
  for (const fold of document.querySelectorAll("details[data-folded]")) {
    fold.open = false;
    delete fold.dataset.folded;
  }
});

document.querySelectorAll("div.report").forEach(setUp);
document.querySelectorAll("form.whatif").forEach(setUpChoices);
setUpTabs();
