"use strict";
// The data of a film: decompressed, and indexed so that any step can be drawn by itself.

const $ = id => document.getElementById(id);
const [NONE, INTEGERS, INTEGER, FLOATS, FLOAT, TRUTHS, WORDS] = [0, 1, 2, 3, 4, 5, 6]; // kinds of values
const [LET, READ, WRITE, LANDING] = [1, 2, 3, 4]; // kinds of groups
const WARP = 32;

async function unpack(text) {
  const raw = atob(text),
    bytes = new Uint8Array(raw.length);
  for (let k = 0; k < raw.length; k++) bytes[k] = raw.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Reader {
  // of the integers and floats, which come in the order in which they are read
  constructor(bytes) {
    const view = new DataView(bytes.buffer);
    const [header, integers, floats] = [0, 4, 8].map(at => view.getUint32(at, true));
    this.header = JSON.parse(new TextDecoder().decode(bytes.subarray(12, 12 + header)));
    this.bytes = bytes;
    this.at = 12 + header;
    const planes = bytes.subarray(this.at + integers),
      joined = new Uint8Array(4 * floats);
    for (let k = 0; k < floats; k++) for (let b = 0; b < 4; b++) joined[4 * k + b] = planes[b * floats + k];
    this.floats = new Float32Array(joined.buffer);
    this.float = 0;
  }

  integer() {
    let byte = this.bytes[this.at++],
      value = byte & 127,
      scale = 128;
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

  values(count) {
    // {kind, numbers}; one number stands for all
    const kind = this.integer(),
      one = kind === INTEGER || kind === FLOAT;
    if (kind === WORDS)
      // of 64 bits
      return {
        kind,
        numbers: Array.from({length: count}, () => (BigInt(this.integer()) << 32n) | BigInt(this.integer())),
      };
    const numbers = new Float64Array(kind === NONE ? 0 : one ? 1 : count);
    for (let k = 0, n = 0; k < numbers.length; k++)
      numbers[k] =
        kind === FLOATS || kind === FLOAT
          ? this.floats[this.float++]
          : kind === TRUTHS
            ? this.integer()
            : (n += this.integer());
    return {kind, numbers};
  }
}

const bits = mask => {
  let n = 0;
  for (mask >>>= 0; mask; mask &= mask - 1) n++;
  return n;
};
const rank = (mask, lane) => bits(mask & (lane ? 0xffffffff >>> (WARP - lane) : 0)); // lanes of a mask before this one
const has = (mask, lane) => (mask >>> lane) & 1;

function atMost(sorted, value, count = sorted.length) {
  // index of the last element that is not larger, or -1
  let low = 0,
    high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function show(values, k) {
  // a number as text
  if (!values || values.kind === NONE) return "";
  const n = values.numbers[values.numbers.length === 1 ? 0 : k];
  if (values.kind === WORDS) return "0x" + n.toString(16);
  if (values.kind === TRUTHS) return n ? "True" : "False";
  if (values.kind <= INTEGER) return String(n);
  if (Number.isNaN(n)) return "nan";
  if (!Number.isFinite(n)) return n < 0 ? "-inf" : "inf";
  const text = Math.abs(n) >= 1e5 || (n && Math.abs(n) < 1e-3) ? n.toExponential(2) : String(+n.toPrecision(5));
  return /[.e]/.test(text) ? text : text + ".0";
}

class Launch {
  constructor(header, reader) {
    Object.assign(this, header);
    this.masks = header.masks.map(mask => mask >>> 0);
    this.rows = header.rows.map(([block, warp, threads], k) => ({
      block,
      warp,
      threads,
      number: k,
      variables: new Map(),
    }));
    this.rows.forEach((row, k) => this.readSteps(row, header.counts[k], reader));
    this.accesses = [];
    this.arrays.forEach((array, number) => Object.assign(array, {number, written: null}));
    this.readGroups(header.groups, reader);
    for (const array of this.arrays) array.initial = reader.values(array.cells);
    for (const array of this.arrays) this.indexWrites(array);
    this.accessSteps = Int32Array.from(this.accesses, access => access.step);
    this.flights = header.flights.map(([number, kind, text, row, line, start, end, reads, writes, detail]) => ({
      number,
      kind,
      text,
      row,
      line,
      start,
      end,
      reads,
      writes,
      detail,
    }));
    this.waits = header.waits.map(([row, since, until, text, line, mask]) => ({
      row,
      since,
      until,
      text,
      line,
      mask: this.masks[mask],
    }));
    for (const row of this.rows) row.waits = this.waits.filter(wait => wait.row === row.number);
    this.barriers = header.barriers.map(([block, name, count], k) => ({
      block,
      name,
      count,
      events: header.phases.filter(event => event[1] === k),
    }));
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
        const row = this.rows[reader.integer()],
          name = reader.integer(),
          mask = this.masks[reader.integer()];
        if (!row.variables.has(name)) row.variables.set(name, {steps: [], masks: [], values: []});
        const variable = row.variables.get(name);
        variable.steps.push(step);
        variable.masks.push(mask);
        variable.values.push(reader.values(bits(mask)));
      } else if (kind === LANDING) {
        const flight = reader.integer(),
          array = reader.integer(),
          count = reader.integer();
        const places = reader.differences(count);
        this.accesses.push({step, kind, flight, row: -1, array, places, per: 1, values: reader.values(count)});
      } else {
        const access = {
          step,
          kind,
          row: reader.integer(),
          array: reader.integer(),
          line: reader.integer(),
          mask: this.masks[reader.integer()],
          size: reader.integer(),
          per: reader.integer(),
        };
        const count = bits(access.mask);
        access.places = reader.differences(count);
        if (kind === WRITE) access.values = reader.values(count * access.per);
        this.accesses.push(access);
      }
    }
  }

  indexWrites(array) {
    // of each cell its writes by step: starts[cell] … starts[cell + 1] in `events` (access, place)
    const writes = this.accesses.filter(access => access.kind >= WRITE && access.array === array.number);
    const starts = new Int32Array(array.cells + 1);
    const each = visit =>
      writes.forEach(access => {
        for (let k = 0; k < access.places.length; k++)
          for (let p = 0; p < access.per; p++) {
            const cell = access.places[k] + p;
            if (cell >= 0 && cell < array.cells) visit(cell, access, k * access.per + p);
          }
      });
    each(cell => starts[cell + 1]++);
    for (let cell = 0; cell < array.cells; cell++) starts[cell + 1] += starts[cell];
    const fill = starts.slice(),
      steps = new Int32Array(starts[array.cells]);
    const by = new Array(steps.length),
      order = new Int32Array(steps.length);
    each((cell, access, k) => {
      const at = fill[cell]++;
      [steps[at], by[at], order[at]] = [access.step, access, k];
    });
    array.written = {starts, steps, by, order};
    array.read = new Int32Array(array.cells).fill(1 << 30); // of each cell the step of its first read
    for (const access of this.accesses)
      if (access.kind === READ && access.array === array.number)
        for (const place of access.places)
          for (let p = 0; p < access.per; p++)
            if (access.step < array.read[place + p]) array.read[place + p] = access.step;
  }

  lastWrite(array, cell, step) {
    // the number of the last one, or -1
    const {starts, steps} = array.written;
    let low = starts[cell],
      high = starts[cell + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle + 1;
      else high = middle;
    }
    return low > starts[cell] ? low - 1 : -1;
  }

  write(array, number) {
    // {access, k} or null
    return number < 0 ? null : {access: array.written.by[number], k: array.written.order[number]};
  }

  at(row, step) {
    // {index, line, mask, now}: the last line of a warp at or before a step
    const index = atMost(row.steps, step);
    if (index < 0) return {index, line: -1, mask: 0, now: false};
    return {index, line: row.lines[index], mask: row.active[index], now: row.steps[index] === step};
  }

  waiting(row, step) {
    return row.waits.find(wait => wait.since < step && step < wait.until);
  }

  value(row, name, lane, step) {
    // {text, step} of a variable of a lane, or null
    const variable = row.variables.get(name);
    for (let k = atMost(variable.steps, step); k >= 0; k--)
      if (has(variable.masks[k], lane))
        return {text: show(variable.values[k], rank(variable.masks[k], lane)), step: variable.steps[k]};
    return null;
  }

  during(step) {
    // the accesses of one step
    const found = [];
    for (let k = atMost(this.accessSteps, step); k >= 0 && this.accessSteps[k] === step; k--)
      found.unshift(this.accesses[k]);
    return found;
  }
}
