"use strict";
// The page of a film (see reel.py for the data). A film is a function of the step: each view draws any step by itself.

const $ = id => document.getElementById(id);
const [NONE, INTEGERS, INTEGER, FLOATS, FLOAT, TRUTHS, WORDS] = [0, 1, 2, 3, 4, 5, 6]; // kinds of values
const [LET, READ, WRITE, LANDING] = [1, 2, 3, 4]; // kinds of groups
const WARP = 32;

// Data --------------------------------------------------------------------------------------------------------------

async function unpack(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let k = 0; k < raw.length; k++) bytes[k] = raw.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Reader { // of the integers and floats, which come in the order in which they are read
  constructor(bytes) {
    const view = new DataView(bytes.buffer);
    const [header, integers, floats] = [0, 4, 8].map(at => view.getUint32(at, true));
    this.header = JSON.parse(new TextDecoder().decode(bytes.subarray(12, 12 + header)));
    this.bytes = bytes;
    this.at = 12 + header;
    const planes = bytes.subarray(this.at + integers), joined = new Uint8Array(4 * floats);
    for (let k = 0; k < floats; k++) for (let b = 0; b < 4; b++) joined[4 * k + b] = planes[b * floats + k];
    this.floats = new Float32Array(joined.buffer);
    this.float = 0;
  }

  integer() {
    let byte = this.bytes[this.at++], value = byte & 127, scale = 128;
    while (byte > 127) {
      byte = this.bytes[this.at++];
      value += (byte & 127) * scale;
      scale *= 128;
    }
    return value % 2 ? -(value + 1) / 2 : value / 2;
  }

  differences(count) {
    const found = new Int32Array(count);
    for (let k = 0, n = 0; k < count; k++) found[k] = n += this.integer();
    return found;
  }

  values(count) { // {kind, numbers}; one number stands for all
    const kind = this.integer(), one = kind === INTEGER || kind === FLOAT;
    if (kind === WORDS) // of 64 bits
      return {kind, numbers: Array.from({length: count}, () => BigInt(this.integer()) << 32n | BigInt(this.integer()))};
    const numbers = new Float64Array(kind === NONE ? 0 : one ? 1 : count);
    for (let k = 0, n = 0; k < numbers.length; k++)
      numbers[k] = kind === FLOATS || kind === FLOAT ? this.floats[this.float++] :
        kind === TRUTHS ? this.integer() : n += this.integer();
    return {kind, numbers};
  }
}

const bits = mask => { let n = 0; for (mask >>>= 0; mask; mask &= mask - 1) n++; return n; };
const rank = (mask, lane) => bits(mask & (lane ? 0xffffffff >>> (WARP - lane) : 0)); // lanes of a mask before this one
const has = (mask, lane) => mask >>> lane & 1;

function atMost(sorted, value, count = sorted.length) { // index of the last element that is not larger, or -1
  let low = 0, high = count;
  while (low < high) {
    const middle = low + high >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function show(values, k) { // a number as text
  if (!values || values.kind === NONE) return "";
  const n = values.numbers[values.numbers.length === 1 ? 0 : k];
  if (values.kind === WORDS) return "0x" + n.toString(16);
  if (values.kind === TRUTHS) return n ? "True" : "False";
  if (values.kind <= INTEGER) return String(n);
  if (Number.isNaN(n)) return "nan";
  if (!Number.isFinite(n)) return n < 0 ? "-inf" : "inf";
  const text = Math.abs(n) >= 1e5 || n && Math.abs(n) < 1e-3 ? n.toExponential(2) : String(+n.toPrecision(5));
  return /[.e]/.test(text) ? text : text + ".0";
}

class Launch {
  constructor(header, reader) {
    Object.assign(this, header);
    this.masks = header.masks.map(mask => mask >>> 0);
    this.rows = header.rows.map(([block, warp, threads], k) => ({block, warp, threads, number: k, variables: new Map()}));
    this.rows.forEach((row, k) => this.readSteps(row, header.counts[k], reader));
    this.accesses = [];
    this.arrays.forEach((array, number) => Object.assign(array, {number, written: null}));
    this.readGroups(header.groups, reader);
    for (const array of this.arrays) array.initial = reader.values(array.cells);
    for (const array of this.arrays) this.indexWrites(array);
    this.accessSteps = Int32Array.from(this.accesses, access => access.step);
    this.flights = header.flights.map(([number, kind, text, row, line, start, end, reads, writes, detail]) => (
      {number, kind, text, row, line, start, end, reads, writes, detail}));
    this.waits = header.waits.map(([row, since, until, text, line, mask]) => (
      {row, since, until, text, line, mask: this.masks[mask]}));
    for (const row of this.rows) row.waits = this.waits.filter(wait => wait.row === row.number);
    this.barriers = header.barriers.map(([block, name, count], k) => ({block, name, count, events: header.phases.filter(
      event => event[1] === k)}));
    this.lineOf = new Map(header.lines.map(([source, line], k) => [k, {source, line}]));
  }

  readSteps(row, count, reader) {
    [row.steps, row.lines, row.active] = [new Int32Array(count), new Int32Array(count), new Uint32Array(count)];
    for (let k = 0, step = 0, line = 0; k < count; k++) {
      row.steps[k] = step += reader.integer();
      row.lines[k] = line += reader.integer();
      row.active[k] = this.masks[reader.integer()];
    }
    row.end = count ? row.steps[count - 1] : 0;
  }

  readGroups(count, reader) {
    for (let k = 0, step = 0; k < count; k++) {
      step += reader.integer();
      const kind = reader.integer();
      if (kind === LET) {
        const row = this.rows[reader.integer()], name = reader.integer(), mask = this.masks[reader.integer()];
        if (!row.variables.has(name)) row.variables.set(name, {steps: [], masks: [], values: []});
        const variable = row.variables.get(name);
        variable.steps.push(step);
        variable.masks.push(mask);
        variable.values.push(reader.values(bits(mask)));
      } else if (kind === LANDING) {
        const flight = reader.integer(), array = reader.integer(), count = reader.integer();
        const places = reader.differences(count);
        this.accesses.push({step, kind, flight, row: -1, array, places, per: 1, values: reader.values(count)});
      } else {
        const access = {step, kind, row: reader.integer(), array: reader.integer(), line: reader.integer(),
          mask: this.masks[reader.integer()], size: reader.integer(), per: reader.integer()};
        const count = bits(access.mask);
        access.places = reader.differences(count);
        if (kind === WRITE) access.values = reader.values(count * access.per);
        this.accesses.push(access);
      }
    }
  }

  indexWrites(array) { // of each cell its writes by step: starts[cell] … starts[cell + 1] in `events` (access, place)
    const writes = this.accesses.filter(access => access.kind >= WRITE && access.array === array.number);
    const starts = new Int32Array(array.cells + 1);
    const each = visit => writes.forEach(access => {
      for (let k = 0; k < access.places.length; k++) for (let p = 0; p < access.per; p++) {
        const cell = access.places[k] + p;
        if (cell >= 0 && cell < array.cells) visit(cell, access, k * access.per + p);
      }
    });
    each(cell => starts[cell + 1]++);
    for (let cell = 0; cell < array.cells; cell++) starts[cell + 1] += starts[cell];
    const fill = starts.slice(), steps = new Int32Array(starts[array.cells]);
    const by = new Array(steps.length), order = new Int32Array(steps.length);
    each((cell, access, k) => {
      const at = fill[cell]++;
      [steps[at], by[at], order[at]] = [access.step, access, k];
    });
    array.written = {starts, steps, by, order};
    array.read = new Int32Array(array.cells).fill(1 << 30); // of each cell the step of its first read
    for (const access of this.accesses) if (access.kind === READ && access.array === array.number)
      for (const place of access.places) for (let p = 0; p < access.per; p++)
        if (access.step < array.read[place + p]) array.read[place + p] = access.step;
  }

  lastWrite(array, cell, step) { // the number of the last one, or -1
    const {starts, steps} = array.written;
    let low = starts[cell], high = starts[cell + 1];
    while (low < high) {
      const middle = low + high >> 1;
      if (steps[middle] <= step) low = middle + 1; else high = middle;
    }
    return low > starts[cell] ? low - 1 : -1;
  }

  write(array, number) { // {access, k} or null
    return number < 0 ? null : {access: array.written.by[number], k: array.written.order[number]};
  }

  at(row, step) { // {index, line, mask, now}: the last line of a warp at or before a step
    const index = atMost(row.steps, step);
    if (index < 0) return {index, line: -1, mask: 0, now: false};
    return {index, line: row.lines[index], mask: row.active[index], now: row.steps[index] === step};
  }

  waiting(row, step) { return row.waits.find(wait => wait.since < step && step < wait.until); }

  value(row, name, lane, step) { // {text, step} of a variable of a lane, or null
    const variable = row.variables.get(name);
    for (let k = atMost(variable.steps, step); k >= 0; k--)
      if (has(variable.masks[k], lane))
        return {text: show(variable.values[k], rank(variable.masks[k], lane)), step: variable.steps[k]};
    return null;
  }

  during(step) { // the accesses of one step
    const found = [];
    for (let k = atMost(this.accessSteps, step); k >= 0 && this.accessSteps[k] === step; k--) found.unshift(this.accesses[k]);
    return found;
  }
}

// Drawing -----------------------------------------------------------------------------------------------------------

let theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "panel", "ink", "pale", "line", "accent", "here", "fault", "read", "write", "copy", "tensor",
    "wait", "empty", "seen", "light", "lines"]) theme[name] = style.getPropertyValue("--" + name).trim();
  colours.clear();
}

const colours = new Map();
function colourOf(row, lane) { // of a warp; its lanes differ in lightness
  const key = row * WARP + lane;
  if (!colours.has(key)) colours.set(key, `hsl(${(205 + row * 137.5) % 360} 62% ${
    parseFloat(theme.light) + (lane - 15.5) * (film.launch.rows.length > 4 ? 0.35 : 0.9)}%)`);
  return colours.get(key);
}
const colourOfLine = line => `hsl(${(28 + line * 67) % 360} 42% ${theme.lines})`;

function size(canvas, width, height, keep = false) { // in pixels of the page; returns the context of an empty canvas
  const scale = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    keep = false;
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  if (!keep) context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

function hatch(context, x, y, width, height, colour, step = 5) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let k = Math.floor((x - height) / step) * step; k < x + width; k += step) {
    context.moveTo(k, y + height);
    context.lineTo(k + height, y);
  }
  context.stroke();
  context.restore();
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// Source ------------------------------------------------------------------------------------------------------------

const PYTHON = new Set(("False None True and as assert break class continue def del elif else except finally for from if " +
  "import in is lambda nonlocal not or pass raise return try while with yield").split(" "));

function paint(parent, text) { // Python, coloured: strings and comments, then words
  for (const [token] of text.matchAll(/#.*|"""(?:.*?)(?:"""|$)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\w+|\W/g)) {
    const kind = token[0] === "#" ? "c" : token[0] === '"' || token[0] === "'" && token.length > 1 ? "s" : PYTHON.has(token) ? "k" : "";
    if (kind) parent.append(element("span", kind, token)); else parent.append(token);
  }
}

class Source {
  constructor(launch) {
    const pane = $("source");
    pane.replaceChildren();
    pane.classList.toggle("racing", launch.faults.some(fault => fault.kind === "race"));
    pane.classList.toggle("many", launch.rows.length > 12);
    this.lines = new Map(); // number of a line -> its element
    const numbers = new Map(launch.lines.map(([source, line], k) => [source + ":" + line, k]));
    this.blocks = launch.sources.map(([name, file, first, text], source) => {
      const block = element("div", "function"), title = element("h2");
      title.append(element("b", "", name), `  ${file}`);
      block.append(title);
      text.forEach((line, k) => {
        const row = element("div", "code"), mark = element("i"), code = element("span"), here = element("em");
        row.append(mark, element("u", "", first + k), code, here);
        paint(code, line);
        if (line.length > 50) row.title = line.trim();
        const number = numbers.get(source + ":" + k);
        if (number !== undefined) {
          mark.style.background = colourOfLine(number);
          row.dataset.line = number;
          this.lines.set(number, {row, here, marks: ""});
        }
        block.append(row);
      });
      pane.append(block);
      return block;
    });
    this.current = [];
    this.arrows(launch);
  }

  arrows(launch) { // from one line of a race to the other
    for (const fault of launch.faults) this.lines.get(fault.line)?.row.classList.add("wrong");
    this.paths = launch.faults.map((fault, number) => {
      const other = fault.others.find(([what, line]) => this.lines.has(line) && line !== fault.line);
      const [from, to] = [other && this.lines.get(other[1]), this.lines.get(fault.line)];
      if (!from || !to || fault.kind !== "race" || from.row.parentNode !== to.row.parentNode) return null;
      const block = to.row.parentNode, svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.classList.add("arrows");
      const [y, z] = [from, to].map(({row}) => row.offsetTop + 9), width = 6 + 4 * (number % 4);
      svg.innerHTML = `<path d="M4 ${y} C${4 + width * 1.4} ${y} ${4 + width * 1.4} ${z} 8 ${z}"/>` +
        `<polygon points="2,${z} 10,${z - 4.5} 10,${z + 4.5}"/>`;
      svg.setAttribute("height", block.offsetHeight);
      block.append(svg);
      return svg.firstChild;
    });
  }

  draw(launch, step, selected) {
    const here = new Map();
    for (const row of launch.rows) {
      const {line, now} = launch.at(row, step);
      if (line < 0 || step > row.end && !launch.waiting(row, step)) continue;
      if (!here.has(line)) here.set(line, []);
      here.get(line).push(row.number * 2 + (now ? 1 : 0));
    }
    for (const [number, line] of this.lines) {
      const rows = here.get(number) || [], marks = rows.join();
      if (line.marks === marks) continue;
      line.marks = marks;
      line.here.replaceChildren(...rows.map(k => {
        const mark = element("b");
        mark.style.background = colourOf(k >> 1, 16);
        if (!(k & 1)) mark.style.opacity = 0.45;
        mark.title = "warp " + launch.rows[k >> 1].warp;
        return mark;
      }));
      line.row.classList.toggle("also", rows.length > 0);
    }
    const mine = this.lines.get(launch.at(launch.rows[selected.row], step).line)?.row;
    if (this.mine !== mine) {
      this.mine?.classList.remove("here");
      mine?.classList.add("here");
      this.mine = mine;
      if (mine) {
        const pane = $("source"), top = mine.getBoundingClientRect().top - pane.getBoundingClientRect().top;
        if (top < 50 || top > pane.clientHeight - 60) pane.scrollTop += top - pane.clientHeight / 2;
      }
    }
    this.paths.forEach((path, number) => path?.classList.toggle("chosen", number === selected.fault));
  }
}

// Warps over steps --------------------------------------------------------------------------------------------------

const barriersOf = (launch, block) => launch.barriers.filter(b => b.block === block && b.events.length).sort(
  (a, b) => a.name.localeCompare(b.name, "en", {numeric: true}));

class Timeline {
  constructor(launch) {
    this.canvas = $("timeline");
    this.layer = element("canvas"); // all but what moves with the step
    this.labels = 92;
    this.zoom = null;
    this.first = 0;
    this.rowHeight = launch.rows.length > 20 ? 12 : launch.rows.length > 12 ? 15 : launch.rows.length > 6 ? 18 : 22;
    const named = name => {
      const item = element("span"), chip = element("i");
      item.append(chip, name);
      return {item, chip};
    };
    const entries = [["line of the source", `linear-gradient(90deg, ${colourOfLine(1)}, ${colourOfLine(2)} 50%, ${colourOfLine(3)})`],
      ["waits", `repeating-linear-gradient(135deg, ${theme.wait} 0 2px, transparent 2px 4px)`]];
    if (launch.meets.length) entries.push(["barrier", theme.ink]);
    if (launch.flights.some(flight => flight.kind !== "wgmma")) entries.push(["copy in flight", theme.copy]);
    if (launch.flights.some(flight => flight.kind === "wgmma")) entries.push(["wgmma in flight", theme.tensor]);
    if (launch.faults.length) entries.push(["fault", theme.fault]);
    $("key").replaceChildren(...entries.map(([name, colour]) => {
      const {item, chip} = named(name);
      chip.style.background = colour;
      return item;
    }));
  }

  bands(launch, block) { // what has a row: warps, then mbarriers and engines of the chosen block
    const bands = [];
    let last = -1;
    for (const row of launch.rows) {
      bands.push({kind: "warp", row, gap: row.block !== last && launch.blocks.length > 1 ? 14 : 0});
      last = row.block;
    }
    for (const [kind, name] of [["copy", "copies"], ["wgmma", "tensor cores"]]) {
      const flights = launch.flights.filter(f => (f.kind === "wgmma") === (kind === "wgmma") && launch.rows[f.row].block === block);
      if (!flights.length) continue;
      const free = [];
      for (const flight of flights) {
        let lane = free.findIndex(until => until <= flight.start);
        if (lane < 0) lane = Math.min(free.length, 7);
        free[lane] = Math.max(flight.end, flight.start + 1);
        flight.lane = lane;
      }
      bands.push({kind, name, flights, lanes: free.length, gap: 6});
    }
    barriersOf(launch, block).forEach((barrier, k) => bands.push({kind: "mbarrier", barrier, gap: k ? 0 : 6}));
    return bands;
  }

  draw(launch, step, selected) {
    const block = launch.rows[selected.row].block, width = $("rows").clientWidth - 2, labels = this.labels;
    if (this.block !== block || this.of !== launch) {
      [this.block, this.of, this.key] = [block, launch, ""];
      this.all = this.bands(launch, block);
      let y = 16;
      for (const band of this.all) {
        band.thick = band.lanes > 3 ? 7 : 13;
        band.height = band.kind === "warp" ? this.rowHeight : band.thick * (band.lanes || 1) + 2;
        band.y = y += band.gap;
        y += band.height;
      }
      this.height = y + 4;
    }
    const room = width - labels, cell = this.zoom || Math.max(4, Math.min(40, room / launch.length));
    this.cell = cell;
    const shown = Math.floor(room / cell);
    if (step < this.first + 2 || step > this.first + shown - 3) // the window follows the step
      this.first = Math.max(0, Math.min(step - Math.floor(shown / 3), launch.length - shown));
    const first = this.first, last = Math.min(launch.length, first + shown + 1), x = s => labels + (s - first) * cell;
    const key = [first, cell, width, selected.row, selected.fault].join();
    if (this.key !== key) {
      this.key = key;
      this.still(size(this.layer, width, this.height), launch, first, last, x, cell, selected);
    }
    const context = size(this.canvas, width, this.height);
    context.fillStyle = theme.here;
    context.fillRect(x(step), 14, cell, this.height - 16);
    context.drawImage(this.layer, 0, 0, width, this.height);
    context.strokeStyle = theme.accent;
    context.lineWidth = 1.5;
    context.strokeRect(x(step) - 0.5, 13.5, cell + 1, this.height - 15);
  }

  still(context, launch, first, last, x, cell, selected) {
    const labels = this.labels;
    this.axis(context, first, last, x, cell);
    for (const band of this.all) this[band.kind](context, launch, band, first, last, x, cell);
    context.fillStyle = theme.ink;
    for (const [at, , rows] of launch.meets) {
      if (at < first || at > last) continue;
      const bands = rows.map(row => this.all[row]);
      const top = Math.min(...bands.map(b => b.y)), bottom = Math.max(...bands.map(b => b.y + b.height));
      context.fillRect(x(at) - 1.5, top, 2, bottom - top);
    }
    this.races(context, launch, x, cell, selected);
    context.clearRect(0, 0, labels - 1, this.height);
    this.names(context, launch, selected);
  }

  axis(context, first, last, x, cell) {
    context.fillStyle = theme.pale;
    context.textAlign = "center";
    let every = 1;
    while (every * cell < 44) every *= every.toString()[0] === "2" ? 2.5 : 2;
    for (let s = Math.ceil(first / every) * every; s < last; s += every) context.fillText(s, x(s) + cell / 2, 6);
  }

  names(context, launch, selected) {
    context.textAlign = "right";
    let last = -1;
    for (const band of this.all) {
      const mine = band.row?.number === selected.row;
      if (band.kind === "warp" && launch.blocks.length > 1 && band.row.block !== last) {
        last = band.row.block;
        context.textAlign = "left";
        context.fillStyle = theme.pale;
        context.font = "10px system-ui, sans-serif";
        context.fillText(`block (${launch.blocks[last].join(", ")})`, 2, band.y - 7);
        context.textAlign = "right";
      }
      context.font = (mine ? "bold " : "") + (band.kind === "mbarrier" ? "10px" : "11px") + " system-ui, sans-serif";
      context.fillStyle = mine ? theme.accent : theme.ink;
      const name = band.kind === "warp" ? "warp " + band.row.warp : band.kind === "mbarrier" ? band.barrier.name : band.name;
      context.fillText(name.length > 15 ? name.slice(0, 14) + "…" : name, this.labels - 16, band.y + band.height / 2 + 0.5);
      if (band.kind === "warp") {
        context.fillStyle = colourOf(band.row.number, 16);
        context.fillRect(this.labels - 12, band.y + 2, 7, band.height - 4);
      }
    }
    context.font = "11px system-ui, sans-serif";
  }

  warp(context, launch, band, first, last, x, cell) {
    const {row, y, height} = band, gap = cell > 5 ? 1 : 0;
    for (const wait of row.waits)
      if (wait.until > first && wait.since < last) {
        const from = Math.max(first, wait.since + 1), to = Math.min(last, wait.until);
        if (to > from) hatch(context, x(from), y + 3, (to - from) * cell - gap, height - 6, theme.wait);
      }
    for (let k = Math.max(0, atMost(row.steps, first - 1)); k < row.steps.length && row.steps[k] < last; k++) {
      if (row.steps[k] < first) continue;
      const share = Math.max(0.25, bits(row.active[k]) / row.threads), full = height - 3;
      context.fillStyle = colourOfLine(row.lines[k]);
      context.fillRect(x(row.steps[k]), y + 1 + full * (1 - share), cell - gap, full * share);
    }
    const faults = launch.faults.filter(fault => fault.at && fault.at[1] === row.number && fault.at[0] >= first && fault.at[0] < last);
    for (const fault of faults) {
      context.fillStyle = theme.fault;
      context.beginPath();
      context.arc(x(fault.at[0]) + cell / 2, y + height / 2, Math.min(5, Math.max(3, cell / 3)), 0, 7);
      context.fill();
      context.strokeStyle = theme.paper;
      context.lineWidth = 1.5;
      context.stroke();
    }
  }

  mbarrier(context, launch, band, first, last, x, cell) {
    const {barrier, y, height} = band, ends = barrier.events.filter(event => event[3] === "end").map(event => event[0]);
    let from = barrier.events[0][0];
    [...ends, launch.length].forEach((end, phase) => {
      const [left, right] = [Math.max(x(from), this.labels), Math.min(x(end + 1), x(last))];
      if (right > left) {
        context.fillStyle = theme.copy;
        context.globalAlpha = phase % 2 ? 0.42 : 0.2;
        context.fillRect(left, y + 2, right - left - 1, height - 4);
        context.globalAlpha = 1;
        context.fillStyle = theme.ink;
        context.textAlign = "left";
        if (right - left > 52) context.fillText(`phase ${phase}`, left + 4, y + height / 2 + 0.5);
        else if (right - left > 14) context.fillText(phase, left + 4, y + height / 2 + 0.5);
      }
      from = end + 1;
    });
    context.fillStyle = theme.ink;
    for (const [at, , , kind] of barrier.events)
      if (at >= first && at < last && (kind === "arrive" || kind === "land")) context.fillRect(x(at) + cell / 2 - 1, y + 3, 2, height - 6);
  }

  flights(context, band, first, last, x, cell, colour) {
    context.textAlign = "left";
    context.font = "10px system-ui, sans-serif";
    for (const flight of band.flights) {
      if (flight.end < first || flight.start > last) continue;
      const left = Math.max(x(flight.start), this.labels), right = Math.max(left + 3, x(flight.end) - 1), {thick} = band, y = band.y + 1 + thick * flight.lane;
      context.fillStyle = colour;
      context.globalAlpha = 0.35;
      context.fillRect(left, y, right - left, thick - 2);
      context.globalAlpha = 1;
      context.fillRect(left, y, 2.5, thick - 2);
      context.fillStyle = theme.ink;
      const letters = Math.floor((right - left - 8) / 5.6);
      if (letters > 3 && thick > 9) context.fillText(flight.text.slice(0, letters), left + 6, y + 6);
    }
    context.font = "11px system-ui, sans-serif";
  }

  copy(context, launch, band, first, last, x, cell) { this.flights(context, band, first, last, x, cell, theme.copy); }

  wgmma(context, launch, band, first, last, x, cell) { this.flights(context, band, first, last, x, cell, theme.tensor); }

  races(context, launch, x, cell, selected) { // an arrow from the earlier access to the later one
    launch.faults.forEach((fault, number) => {
      if (!fault.at || !fault.other) return;
      let [from, to] = [fault.other, fault.at];
      if (from[0] > to[0]) [from, to] = [to, from];
      const place = ([step, row]) => [x(step) + cell / 2, this.all[row].y + this.all[row].height / 2];
      let [[a, b], [c, d]] = [place(from), place(to)];
      if (Math.max(a, c) < this.labels || Math.min(a, c) > 4000) return;
      const bend = b === d ? -Math.max(16, this.rowHeight) : 0, [mx, my] = [(a + c) / 2 + (a === c ? 18 : 0), (b + d) / 2 + bend];
      const angle = Math.atan2(d - my, c - mx);
      [c, d] = [c - 6 * Math.cos(angle), d - 6 * Math.sin(angle)];
      for (const [colour, thick] of [[theme.paper, 5], [theme.fault, number === selected.fault ? 2.6 : 1.6]]) {
        context.globalAlpha = number === selected.fault ? 1 : 0.6;
        context.strokeStyle = context.fillStyle = colour;
        context.lineWidth = thick;
        context.beginPath();
        context.moveTo(a, b);
        context.quadraticCurveTo(mx, my, c, d);
        context.stroke();
        context.beginPath();
        context.moveTo(c + 7 * Math.cos(angle), d + 7 * Math.sin(angle));
        context.lineTo(c + 6 * Math.cos(angle + 2.2), d + 6 * Math.sin(angle + 2.2));
        context.lineTo(c + 6 * Math.cos(angle - 2.2), d + 6 * Math.sin(angle - 2.2));
        context.fill();
      }
      context.globalAlpha = 1;
      context.beginPath();
      context.arc(a, b, 3.5, 0, 7);
      context.fill();
    });
  }

  point(event) { // {step, row} under the pointer
    const box = this.canvas.getBoundingClientRect(), y = event.clientY - box.top;
    const step = this.first + Math.floor((event.clientX - box.left - this.labels) / this.cell);
    return {step, row: this.all.find(b => b.kind === "warp" && y >= b.y && y < b.y + b.height)?.row.number};
  }
}

// Thread ------------------------------------------------------------------------------------------------------------

class Thread {
  constructor() {
    const pane = $("thread");
    pane.replaceChildren();
    this.title = element("h2");
    this.grid = element("div");
    this.grid.id = "lanes";
    this.table = element("div");
    this.table.id = "variables";
    pane.append(this.title, this.grid, this.table);
    this.buttons = Array.from({length: WARP}, (_, lane) => {
      const button = element("button");
      button.append(element("small", "", lane), element("span"));
      button.onclick = () => film.select({lane});
      this.grid.append(button);
      return button;
    });
    this.table.onclick = event => {
      const row = event.target.closest("p");
      if (row) film.select({variable: +row.dataset.name});
    };
    this.cells = new Map();
  }

  draw(launch, step, selected) {
    const row = launch.rows[selected.row], {line, mask, now} = launch.at(row, step), wait = launch.waiting(row, step);
    const [bx, by] = launch.block, t = row.warp * WARP + selected.lane;
    this.title.replaceChildren(element("b", "", `Thread (${t % bx}, ${Math.floor(t / bx) % by}, ${Math.floor(t / bx / by)})`),
      ` of block (${launch.blocks[row.block].join(", ")}): warp ${row.warp}, lane ${selected.lane}` +
      (launch.every > 1 ? `; variables of every ${launch.every}th lane are kept` : ""));
    this.buttons.forEach((button, lane) => {
      const exists = lane < row.threads, value = exists && row.variables.has(selected.variable) ? launch.value(row, selected.variable, lane, step) : null;
      button.className = (now && has(mask, lane) ? "on" : "off") + (lane === selected.lane ? " chosen" : "");
      button.hidden = !exists;
      const text = value ? fit(value.text, 7) : "";
      if (button.lastChild.textContent !== text) button.lastChild.textContent = text;
    });
    this.variables(launch, row, line, step, selected);
  }

  variables(launch, row, line, step, selected) {
    const source = line < 0 ? null : launch.sources[launch.lineOf.get(line).source][0], outer = launch.sources[0][0];
    const seen = [];
    for (const name of row.variables.keys()) {
      const [owner, text] = launch.variables[name];
      if (owner !== source && owner !== outer) continue;
      const value = launch.value(row, name, selected.lane, step);
      if (value) seen.push({name, label: owner === outer ? text : `${owner}: ${text}`, ...value});
    }
    seen.sort((a, b) => launch.variables[a.name][1].includes("[") - launch.variables[b.name][1].includes("[") || a.name - b.name);
    const names = seen.map(({name}) => name).join();
    if (this.names !== names || this.of !== launch) {
      [this.names, this.of] = [names, launch];
      this.cells.clear();
      this.table.replaceChildren(...seen.map(({name, label}) => {
        const line = element("p");
        line.dataset.name = name;
        line.title = "show this variable in every lane";
        line.append(element("span", "", label), element("b"));
        this.cells.set(name, line);
        return line;
      }));
    }
    for (const {name, text, step: since} of seen) {
      const line = this.cells.get(name);
      if (line.lastChild.textContent !== text) line.lastChild.textContent = text;
      line.classList.toggle("new", since === step);
      line.classList.toggle("picked", name === selected.variable);
    }
  }
}

// Memory ------------------------------------------------------------------------------------------------------------

class Memory {
  constructor(launch) {
    const pane = $("memory");
    pane.replaceChildren();
    this.parts = [];
    const used = new Set(launch.accesses.map(access => access.array));
    for (const array of launch.arrays) if (used.has(array.number)) for (const [name, type, first, count, columns] of array.parts) {
      const box = element("div", "array"), title = element("h2"), canvas = element("canvas");
      title.append(element("b", "", name), `  ${type}, ${array.space}` + (
        array.single ? "" : `; a cell is ${array.size} bytes`));
      box.append(title, canvas);
      pane.append(box);
      const part = {array, first, count, columns, box, canvas};
      canvas.onmousemove = event => this.tip(launch, part, event);
      this.parts.push(part);
    }
    if (!this.parts.length) pane.append(element("p", "", "The kernel uses no arrays."));
  }

  draw(launch, step, selected) {
    const block = launch.rows[selected.row].block, width = Math.max(120, $("memory").clientWidth - 26);
    const many = launch.rows.filter(row => row.block === block).length > 8; // then those of the chosen warp alone
    const accesses = launch.during(step).filter(access => access.row === selected.row || !many && launch.rows[access.row]?.block === block);
    const flying = launch.flights.filter(f => f.start <= step && step < f.end);
    for (const part of this.parts) {
      part.box.hidden = part.array.block >= 0 && part.array.block !== block;
      if (!part.box.hidden) this.part(launch, part, step, selected, width, accesses, flying);
    }
  }

  part(launch, part, step, selected, width, accesses, flying) {
    const {array, first, count, columns} = part, rows = Math.ceil(count / columns);
    const wide = Math.max(2, Math.min(46, Math.floor(width / columns))), tall = Math.max(2, Math.min(wide > 30 ? 19 : wide, Math.floor((array.single ? 460 : 240) / rows), 19));
    const key = [launch.kernel, wide, tall, theme.paper].join(), keep = part.key === key, gap = wide > 4 && tall > 4 ? 1 : 0;
    const context = size(part.canvas, Math.min(columns, count) * wide + 2, rows * tall + 2, keep);
    if (!keep) Object.assign(part, {key, wide, tall, shown: new Int32Array(count).fill(-9), marked: new Set()});
    const {shown, marked} = part; // what each cell shows; those with a mark of the step before
    const place = cell => [1 + (cell - first) % columns * wide, 1 + Math.floor((cell - first) / columns) * tall];
    const inside = cell => cell >= first && cell < first + count;
    const labelled = array.single && wide >= 20 && tall >= 12;
    context.textAlign = "center";
    context.font = `${wide < 32 ? 9 : 10}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
    for (let cell = first; cell < first + count; cell++) {
      const event = launch.lastWrite(array, cell, step), state = event < 0 && array.read[cell] <= step ? -2 : event;
      if (shown[cell - first] === state && !marked.has(cell)) continue;
      shown[cell - first] = state;
      const [x, y] = place(cell), write = launch.write(array, event);
      context.clearRect(x, y, wide, tall);
      context.fillStyle = !write ? array.read[cell] <= step ? theme.seen : theme.empty :
        write.access.kind === LANDING ? `hsl(${150 + write.access.flight * 13 % 40} 55% ${30 + write.access.flight * 7 % 20}%)` : colourOf(write.access.row, laneOf(write.access, write.k));
      context.fillRect(x, y, wide - gap, tall - gap);
      if (labelled) {
        const text = write ? show(write.access.values, write.k) : show(array.initial, cell);
        context.fillStyle = write ? "#fff" : theme.ink;
        context.fillText(fit(text, Math.floor((wide - 2) / (wide < 32 ? 5.5 : 6.1))), x + wide / 2, y + tall / 2 + 0.5);
      }
    }
    marked.clear();
    const ring = (cell, colour, thick) => {
      const [x, y] = place(cell);
      marked.add(cell);
      context.strokeStyle = colour;
      context.lineWidth = thick;
      context.strokeRect(x + thick / 2 - 0.5, y + thick / 2 - 0.5, wide - thick, tall - thick);
    };
    for (const flight of flying) {
      for (const [number, from, cells] of flight.writes) if (number === array.number)
        this.spans(from, cells, part, (x, y, w) => {
          hatch(context, x, y, w, tall - gap, theme.copy);
        });
      for (const [number, from, cells] of flight.reads) if (number === array.number)
        this.spans(from, cells, part, (x, y, w) => {
          context.fillStyle = flight.kind === "wgmma" ? theme.tensor : theme.copy;
          context.globalAlpha = 0.75;
          context.fillRect(x, y, w - gap, Math.max(2, tall * 0.34));
          context.globalAlpha = 1;
        });
    }
    for (const access of accesses) {
      if (access.array !== array.number) continue;
      const mine = access.row === selected.row;
      access.places.forEach((from, k) => {
        for (let p = 0; p < access.per; p++) if (inside(from + p))
          ring(from + p, access.kind === READ ? theme.read : theme.write, Math.min(mine ? 2.5 : 1, wide / 3));
      });
      if (mine && has(access.mask, selected.lane)) {
        const from = access.places[rank(access.mask, selected.lane)];
        if (inside(from)) ring(from, theme.ink, Math.min(3, wide / 2.5));
      }
    }
  }

  spans(from, cells, part, visit) { // the rows of cells that a range takes
    let at = Math.max(from, part.first);
    const end = Math.min(from + cells, part.first + part.count);
    for (let cell = at; cell < end; cell++) part.marked.add(cell);
    while (at < end) {
      const column = (at - part.first) % part.columns, run = Math.min(end - at, part.columns - column);
      visit(1 + column * part.wide, 1 + Math.floor((at - part.first) / part.columns) * part.tall, run * part.wide);
      at += run;
    }
  }

  tip(launch, part, event) {
    const {array, first, count, columns, wide, tall} = part;
    const column = Math.floor((event.offsetX - 1) / wide), cell = Math.floor((event.offsetY - 1) / tall) * columns + column;
    if (column < 0 || column >= columns || cell < 0 || cell >= count) return;
    const write = launch.write(array, launch.lastWrite(array, first + cell, film.step)), [name] = array.parts.find(p => p[2] === first);
    const where = columns === 32 ? cell * (array.size / array.itemsize) : `${Math.floor(cell / columns)}, ${column * (array.size / array.itemsize)}`;
    const who = !write ? "not written in this film" : write.access.kind === LANDING ?
      `written by ${launch.flights.find(f => f.number === write.access.flight)?.text} at step ${write.access.step}` :
      `= ${show(write.access.values, write.k) || "…"}, written by ${said(launch, write.access.row)}, lane ${laneOf(write.access, write.k)}, at step ${write.access.step}`;
    part.canvas.title = `${name}[${where}] ${who}`;
  }
}

function fit(text, letters) { // a number in a small cell
  if (text.length <= letters) return text;
  for (let digits = 3; digits >= 0 && !text.includes("e") && text.includes("."); digits--) {
    const short = (+text).toFixed(digits).replace(/^(-?)0\./, "$1.");
    if (short.length <= letters && +short) return short;
  }
  const short = (+text).toExponential(0).replace("+", "");
  return short.length <= letters ? short : "…";
}

function laneOf(access, k) { // the lane that made the k-th write of an access
  let left = Math.floor(k / access.per);
  for (let lane = 0; lane < WARP; lane++) if (has(access.mask, lane) && left-- === 0) return lane;
  return 0;
}

const said = (launch, row) => (launch.blocks.length > 1 ? `block (${launch.blocks[launch.rows[row].block].join(", ")}), ` : "") + `warp ${launch.rows[row].warp}`;

// Engines: mbarriers, copies, matrix products ------------------------------------------------------------------------

class Engines {
  constructor(launch) {
    const pane = $("engines");
    pane.replaceChildren();
    const add = (title, drawn = true) => {
      const box = element("div", "engine"), head = element("h2"), body = element("div"), canvas = element("canvas");
      head.append(element("b", "", title));
      box.append(head, body);
      if (drawn) box.append(canvas);
      pane.append(box);
      return {box, head, body, canvas};
    };
    this.tensors = new Map();
    if (launch.barriers.length) this.barriers = add("mbarriers", false);
    for (const flight of launch.flights) if (flight.detail.dims) {
      const key = flight.detail.tensor + flight.kind + flight.detail.box;
      if (!this.tensors.has(key)) {
        const view = add(`${flight.kind === "load" ? "TMA loads of" : "TMA stores to"} ${flight.detail.tensor}`);
        view.head.append(`  ${flight.detail.dims.join(" × ")} in boxes of ${flight.detail.box.join(" × ")}`);
        this.tensors.set(key, {...view, flights: [], detail: flight.detail});
      }
      this.tensors.get(key).flights.push(flight);
    }
    if (launch.flights.some(f => f.kind === "wgmma")) this.wgmma = add("wgmma: the accumulators");
    if (launch.products.at.length) this.mma = add("mma: the fragments");
    pane.hidden = !pane.children.length;
  }

  draw(launch, step, selected) {
    if ($("engines").hidden) return;
    const row = launch.rows[selected.row], width = $("engines").clientWidth - 26;
    if (this.barriers) this.drawBarriers(launch, step, row.block);
    for (const view of this.tensors.values()) this.drawTensor(launch, view, step, row.block, width);
    if (this.wgmma) this.drawAccumulators(launch, step, row, selected, width);
    if (this.mma) this.drawFragments(launch, step, row, selected, width);
  }

  drawBarriers(launch, step, block) {
    this.barriers.body.replaceChildren(...barriersOf(launch, block).map(({name, count, events}) => {
      const line = element("div", "barrier"), phase = events.filter(e => e[3] === "end" && e[0] <= step).length;
      let come = 0, bytes = 0;
      for (const [at, , of, kind, number] of events) if (at <= step && of === phase) {
        come += kind === "arrive" ? number : 0;
        bytes += kind === "expect" ? number : kind === "land" ? -number : 0;
      }
      const dots = count <= 16 ? "●".repeat(Math.min(come, count)) + "○".repeat(Math.max(0, count - come)) : `${come} of ${count} arrivals`;
      line.append(element("b", "mono", name), element("span", "", `phase ${phase}`), element("span", "dots", dots));
      if (bytes > 0) line.append(element("span", "", `${plural(bytes, "byte")} to come`));
      return line;
    }));
  }

  drawTensor(launch, {canvas, flights, detail}, step, block, width) {
    const [ax, ay] = detail.dims.length > 2 ? [1, 2] : [0, 1], dims = detail.dims, high = dims[ay] ?? 1;
    const mine = flights.filter(f => launch.rows[f.row].block === block && f.start <= step);
    const scale = Math.min(width / (dims[ax] * 1.02), 150 / high, 12), boxes = mine.map(f => [f.detail.at[ax], f.detail.at[ay] ?? 0]);
    const left = Math.max(0, -Math.min(0, ...boxes.map(b => b[0]))), top = Math.max(0, -Math.min(0, ...boxes.map(b => b[1])));
    const context = size(canvas, width, Math.max(26, high * scale) + top * scale + 6), [x, y] = [left * scale + 1, top * scale + 2];
    const [w, h] = [detail.box[ax] * scale, Math.max(6, (detail.box[ay] ?? 1) * scale)];
    context.fillStyle = theme.empty;
    context.fillRect(x, y, dims[ax] * scale, Math.max(20, high * scale));
    mine.forEach((flight, k) => {
      const [u, v] = [x + boxes[k][0] * scale, y + boxes[k][1] * scale], flies = step < flight.end;
      context.fillStyle = theme.copy;
      context.globalAlpha = flies ? 0.3 : 0.75;
      context.fillRect(u, v, w - 1, h - 1);
      context.globalAlpha = 1;
      if (flies) {
        hatch(context, u, v, w - 1, h - 1, theme.copy);
        context.strokeStyle = theme.ink;
        context.lineWidth = 2;
        context.strokeRect(u + 1, v + 1, w - 3, h - 3);
      }
    });
  }

  drawAccumulators(launch, step, row, selected, width) {
    const group = row.warp >> 2, mine = launch.flights.filter(f => f.kind === "wgmma" && launch.rows[f.row].block === row.block);
    const flying = mine.filter(f => f.start <= step && step < f.end), shown = flying.find(f => f.detail.group === group) || mine.find(f => f.detail.group === group) || mine[0];
    const n = shown.detail.n, cell = Math.max(1.5, Math.min(9, width / n)), context = size(this.wgmma.canvas, n * cell + 1, 64 * Math.min(cell, 4) + 1), tall = Math.min(cell, 4);
    this.wgmma.body.textContent = flying.length ? `${plural(flying.length, "wgmma")} in flight: ${flying.map(f => f.text + " of warpgroup " + f.detail.group).slice(0, 4).join(", ")}${flying.length > 4 ? " …" : ""}` :
      "no wgmma in flight";
    const t = (row.warp & 3) * WARP + selected.lane;
    for (let r = 0; r < 64; r++) for (let c = 0; c < n; c++) {
      const [thread] = launch.accumulators[8 * r + c % 8], own = thread === t && shown.detail.group === group;
      context.fillStyle = own ? theme.ink : colourOf(group * 4 + (thread >> 5), thread & 31);
      context.globalAlpha = own ? 1 : flying.some(f => f.detail.group === group) ? 0.75 : 0.35;
      context.fillRect(c * cell, r * tall, Math.max(1, cell - (cell > 4 ? 0.6 : 0)), Math.max(1, tall - 0.4));
    }
    context.globalAlpha = 1;
    this.wgmma.head.replaceChildren(element("b", "", "wgmma: the accumulators"), `  64 × ${n} of warpgroup ${group}, by warp; black: thread ${t} of the group`);
  }

  drawFragments(launch, step, row, selected, width) {
    const {at, layouts} = launch.products, mine = at.filter(p => p[1] === row.number && p[0] <= step), last = mine[mine.length - 1] || at[0];
    const [name, layout] = layouts[last[2]];
    const now = mine.length && last[0] === step;
    this.mma.body.textContent = `${name}, ${now ? "now" : mine.length ? "last at step " + last[0] : "not yet"}; framed: the elements of lane ${selected.lane}, with their registers`;
    if (!layout.length) return;
    const [[[, k], a], [, b], [, d]] = layout, cell = Math.max(9, Math.min(17, Math.floor((width - 16) / (k + 8))));
    const context = size(this.mma.canvas, (k + 8) * cell + 16, (k + 16) * cell + 16);
    context.font = `${Math.min(10, cell - 4)}px ui-monospace, monospace`;
    context.textAlign = "center";
    const draw = (owners, columns, left, top) => owners.forEach(([lane, register], i) => {
      const [x, y] = [left + i % columns * cell, top + Math.floor(i / columns) * cell];
      context.fillStyle = colourOf(register, 16);
      context.globalAlpha = lane === selected.lane ? 1 : now ? 0.4 : 0.22;
      context.fillRect(x, y, cell - 1, cell - 1);
      context.globalAlpha = 1;
      if (lane !== selected.lane) return;
      context.strokeStyle = theme.ink;
      context.lineWidth = 2;
      context.strokeRect(x, y, cell - 1, cell - 1);
      context.fillStyle = "#fff";
      context.fillText(register, x + cell / 2 - 0.5, y + cell / 2);
    });
    context.fillStyle = theme.pale;
    context.textAlign = "right";
    context.font = "bold 12px system-ui, sans-serif";
    context.fillText("A", k * cell, k * cell + 4);
    context.fillText("B", k * cell + 8, cell);
    context.fillText("D", k * cell + 13, k * cell + 7);
    context.textAlign = "center";
    context.font = `${Math.min(10, cell - 4)}px ui-monospace, monospace`;
    draw(b, 8, k * cell + 14, 2);
    draw(a, k, 2, k * cell + 14);
    draw(d, 8, k * cell + 14, k * cell + 14);
  }
}

// The words above ---------------------------------------------------------------------------------------------------

function wavefronts(array, access) { // how often shared memory is visited: distinct words of the busiest bank
  if (access.size > 4 || !array.single) return 1;
  const banks = new Map();
  for (const place of access.places) {
    const word = array.address + place * array.size >> 2, bank = word & 31;
    if (!banks.has(bank)) banks.set(bank, new Set());
    banks.get(bank).add(word);
  }
  return Math.max(...[...banks.values()].map(words => words.size));
}

function sectors(array, access) { // of 32 bytes of global memory
  const found = new Set();
  for (const place of access.places)
    for (let byte = 0; byte < access.size; byte += 32) found.add(array.address + place * array.size + byte >> 5);
  return found.size;
}

function lanesIn(mask, threads) {
  const count = bits(mask);
  if (count === threads) return count === 1 ? "its only lane" : `all ${count} lanes`;
  const first = 31 - Math.clz32(mask & -mask), last = 31 - Math.clz32(mask);
  return count === 1 ? `lane ${first}` : last - first + 1 === count ? `lanes ${first} to ${last}` : `${count} lanes`;
}

function caption(launch, step, selected) {
  const row = launch.rows[selected.row], {line, mask, now} = launch.at(row, step), wait = launch.waiting(row, step);
  const target = $("caption"), place = line < 0 ? null : launch.lineOf.get(line), parts = [];
  const bold = element("b", "", said(launch, selected.row)[0].toUpperCase() + said(launch, selected.row).slice(1));
  if (now) {
    const [name, file, first, text] = launch.sources[place.source];
    parts.push(bold, `: ${lanesIn(mask, row.threads)} at line ${first + place.line}. `, element("code", "", text[place.line]?.trim() ?? ""));
    for (const access of launch.during(step)) if (access.row === row.number && parts.length < 14) {
      const array = launch.arrays[access.array], part = array.parts.findLast(p => p[2] <= access.places[0]) || array.parts[0];
      parts.push(`  ·  ${access.kind === READ ? "reads" : "writes"} ${plural(access.places.length * access.per, array.single ? "element" : "cell")} of ${part?.[0] ?? "memory"}`);
      if (array.space === "shared" && wavefronts(array, access) > 1)
        parts.push(" ", element("span", "bad", `${wavefronts(array, access)}-way bank conflict`));
      if (array.space === "global" && array.single) parts.push(`, ${plural(sectors(array, access), "sector")}`);
    }
  } else if (wait) {
    const [, , first] = launch.sources[launch.lineOf.get(wait.line ?? line)?.source ?? 0];
    parts.push(bold, `: ${lanesIn(wait.mask, row.threads)} wait${bits(wait.mask) === 1 ? "s" : ""} for ${wait.text}` +
      (place ? `, line ${first + place.line}, until step ${wait.until}` : ""));
  } else parts.push(bold, step > row.end && row.steps.length ? " has ended." : " has not begun.");
  const fault = launch.faults[selected.fault];
  if (fault) {
    const other = fault.others[0], said = element("span", "bad", `  ⚠ ${fault.kind}: ${fault.message}`);
    parts.push(element("br"), said);
    if (other && place) {
      const at = launch.lineOf.get(other[1]), from = launch.sources[at.source][2] + at.line;
      parts.push(` (line ${launch.sources[launch.lineOf.get(fault.line).source][2] + launch.lineOf.get(fault.line).line}, thread (${fault.thread?.join(", ")}); ${other[0]} line ${from}${other[2] ? `, thread (${other[2].join(", ")})` : ""})`);
    }
  }
  target.replaceChildren(...parts);
}

// The film ----------------------------------------------------------------------------------------------------------

const film = {
  launches: [], launch: null, step: 0, playing: 0, frames: 0,
  selected: {row: 0, lane: 0, variable: -1, fault: -1},

  async open() {
    readTheme();
    const reader = new Reader(await unpack($("data").textContent));
    this.launches = reader.header.launches.map(header => new Launch(header, reader));
    $("launch").replaceChildren(...this.launches.map((launch, k) => new Option(`${k + 1}: ${launch.kernel}`, k)));
    $("launch").hidden = this.launches.length === 1;
    this.leftOut = reader.header.leftOut;
    this.choose(Math.max(0, this.launches.findIndex(launch => launch.faults.length)));
    const place = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of place) if (name === "step") this.go(+value); else if (name in this.selected) this.select({[name]: +value});
    Object.assign(document.body.dataset, {ready: "yes", milliseconds: Math.round(performance.now())});
  },

  choose(number) {
    const launch = this.launch = this.launches[number], faults = launch.faults.length;
    colours.clear();
    $("launch").value = number;
    $("title").textContent = launch.kernel;
    $("about").textContent = `grid (${launch.grid.join(", ")}), block (${launch.block.join(", ")})` +
      (launch.blocks.length < launch.count ? `, ${launch.blocks.length} of ${launch.count.toLocaleString("en")} blocks` : "") +
      (launch.arguments.length ? ` — ${launch.arguments.join(", ")}` : "") + (launch.cut ? " — the end is left out: the film is too long" : "") +
      (this.leftOut ? ` — ${plural(this.leftOut, "further launch")} left out` : "");
    $("fault").hidden = !faults;
    $("caption").classList.toggle("calm", !faults);
    $("fault").textContent = `⚠ ${plural(faults, "fault")}: show (F)`;
    $("slider").max = launch.length - 1;
    this.selected = {row: 0, lane: 0, variable: -1, fault: -1};
    this.views = [new Source(launch), new Timeline(launch), new Thread(), new Memory(launch), new Engines(launch)];
    this.go(0);
  },

  go(step) {
    this.step = Math.max(0, Math.min(this.launch.length - 1, Math.round(step) || 0));
    this.draw();
  },

  select(change) {
    if (change.variable === this.selected.variable) change.variable = -1;
    Object.assign(this.selected, change);
    this.selected.row = Math.max(0, Math.min(this.launch.rows.length - 1, this.selected.row));
    const lanes = this.launch.rows[this.selected.row].threads, {every} = this.launch;
    this.selected.lane = Math.floor(Math.max(0, Math.min(lanes - 1, this.selected.lane)) / every) * every;
    this.draw();
  },

  fault() { // the next one, at the step of its later access
    const number = (this.selected.fault + 1) % this.launch.faults.length, {at, other} = this.launch.faults[number];
    const [step, row, lane] = at && other && other[0] > at[0] ? other : at || [this.step, this.selected.row, this.selected.lane];
    this.step = Math.min(step, this.launch.length - 1);
    this.select({fault: number, row, lane});
  },

  draw() {
    const {launch, step, selected} = this;
    caption(launch, step, selected);
    for (const view of [...this.views].reverse()) view.draw(launch, step, selected); // the source scrolls, in its final size
    $("slider").value = step;
    $("step").textContent = `step ${step.toLocaleString("en")} of ${(launch.length - 1).toLocaleString("en")}`;
    Object.assign(document.body.dataset, {step, row: selected.row, lane: selected.lane, frames: ++this.frames});
  },

  play() {
    this.playing = this.playing ? 0 : performance.now();
    $("play").textContent = this.playing ? "❚❚ Pause" : "▶ Play";
    if (!this.playing) return;
    if (this.step === this.launch.length - 1) this.go(0);
    const begun = this.playing, from = this.step;
    const frame = now => {
      if (this.playing !== begun) return;
      const step = from + Math.floor(Math.max(0, now - begun) / 1000 * +$("speed").value);
      if (step !== this.step) this.go(step);
      if (step >= this.launch.length - 1) this.play(); else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  },
};

const KEYS = {
  ArrowLeft: ["←  →", "one step back, on; with Shift ten", event => film.go(film.step - (event.shiftKey ? 10 : 1))],
  ArrowRight: [null, null, event => film.go(film.step + (event.shiftKey ? 10 : 1))],
  Home: ["Home  End", "first, last step", () => film.go(0)],
  End: [null, null, () => film.go(film.launch.length - 1)],
  " ": ["space", "play, pause", () => film.play()],
  ArrowUp: ["↑  ↓", "the warp above, below", () => film.select({row: film.selected.row - 1})],
  ArrowDown: [null, null, () => film.select({row: film.selected.row + 1})],
  "[": ["[  ]", "the lane before, after", () => film.select({lane: film.selected.lane - film.launch.every})],
  "]": [null, null, () => film.select({lane: film.selected.lane + film.launch.every})],
  f: ["F", "the next fault", () => film.launch.faults.length && film.fault()],
  "+": ["+  −", "wider, narrower steps", () => film.zoom(1.5)],
  "-": [null, null, () => film.zoom(1 / 1.5)],
  "?": ["?", "these keys", () => $("keys").showModal()],
};

film.zoom = function (factor) {
  const timeline = this.views[1];
  timeline.zoom = Math.max(1, Math.min(60, timeline.cell * factor));
  timeline.first = -1e9;
  this.draw();
};

function listen() {
  const table = element("table");
  for (const [keys, text] of Object.values(KEYS)) if (keys) {
    const row = element("tr"), cell = element("td");
    for (const key of keys.split("  ")) cell.append(element("kbd", "", key), " ");
    row.append(cell, element("td", "", text));
    table.append(row);
  }
  $("keys").append(table, element("p", "", "Click a warp and a step, a lane, a variable. A step is one line of a warp; the bar is lower " +
    "where fewer lanes take part. Values are those of the emulator's run, in which threads take turns: where threads race, they may differ from the order shown."));
  $("keys").onclick = () => $("keys").close();
  document.addEventListener("keydown", event => {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key, action = KEYS[key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    if (key === " " && event.target.tagName === "BUTTON") event.target.blur();
    event.preventDefault();
    action[2](event);
  });
  const steps = {first: () => film.go(0), back: () => film.go(film.step - 1), play: () => film.play(),
    next: () => film.go(film.step + 1), last: () => film.go(film.launch.length - 1)};
  for (const button of document.querySelectorAll("[data-go]")) button.onclick = steps[button.dataset.go];
  $("slider").oninput = () => film.go(+$("slider").value);
  $("launch").onchange = () => film.choose(+$("launch").value);
  $("speed").onchange = () => film.playing && (film.play(), film.play());
  $("fault").onclick = () => film.fault();
  $("help").onclick = () => $("keys").showModal();
  const canvas = $("timeline");
  const point = event => {
    const {step, row} = film.views[1].point(event);
    film.step = Math.max(0, Math.min(film.launch.length - 1, step));
    film.select(row === undefined ? {} : {row});
  };
  canvas.onpointerdown = event => { canvas.setPointerCapture(event.pointerId); point(event); };
  canvas.onpointermove = event => event.buttons && point(event);
  new ResizeObserver(() => film.draw()).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").onchange = () => { readTheme(); film.choose(film.launches.indexOf(film.launch)); };
}

film.open().then(listen).catch(error => {
  $("caption").textContent = `The film cannot be shown: ${error.message}. A browser of 2023 or later is needed.`;
});
