// Warps as rows over steps, with copies, matrix products and mbarriers below, and the arrows of races.

const barriersOf = (launch, block) =>
  launch.barriers
    .filter(b => b.block === block && b.events.length)
    .sort((a, b) => a.name.localeCompare(b.name, "en", {numeric: true}));

class Timeline {
  constructor(launch) {
    this.canvas = $("timeline");
    this.layer = element("canvas"); // all but what moves with the step
    this.labels = 92;
    this.zoom = null;
    this.first = 0;
    this.rowHeight = launch.rows.length > 20 ? 12 : launch.rows.length > 12 ? 15 : launch.rows.length > 6 ? 18 : 22;
    const named = name => {
      const item = element("span"),
        chip = element("i");
      item.append(chip, name);
      return {item, chip};
    };
    const entries = [
      ["line of the source", `linear-gradient(90deg, ${colourOfLine(1)}, ${colourOfLine(2)} 50%, ${colourOfLine(3)})`],
      ["waits", `repeating-linear-gradient(135deg, ${theme.wait} 0 2px, transparent 2px 4px)`],
    ];
    if (launch.meets.length) entries.push(["barrier", theme.ink]);
    if (launch.flights.some(flight => flight.kind !== "wgmma")) entries.push(["copy in flight", theme.copy]);
    if (launch.flights.some(flight => flight.kind === "wgmma")) entries.push(["wgmma in flight", theme.tensor]);
    if (launch.faults.length) entries.push(["fault", theme.fault]);
    $("key").replaceChildren(
      ...entries.map(([name, colour]) => {
        const {item, chip} = named(name);
        chip.style.background = colour;
        return item;
      }),
    );
  }

  bands(launch, block) {
    // what has a row: warps, then mbarriers and engines of the chosen block
    const bands = [];
    let last = -1;
    for (const row of launch.rows) {
      bands.push({kind: "warp", row, gap: row.block !== last && launch.blocks.length > 1 ? 14 : 0});
      last = row.block;
    }
    for (const [kind, name] of [
      ["copy", "copies"],
      ["wgmma", "tensor cores"],
    ]) {
      const flights = launch.flights.filter(
        f => (f.kind === "wgmma") === (kind === "wgmma") && launch.rows[f.row].block === block,
      );
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
    const block = launch.rows[selected.row].block,
      width = $("rows").clientWidth - 2,
      labels = this.labels;
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
    const room = width - labels,
      cell = this.zoom || Math.max(4, Math.min(40, room / launch.length));
    this.cell = cell;
    const shown = Math.floor(room / cell);
    if (step < this.first + 2 || step > this.first + shown - 3)
      // the window follows the step
      this.first = Math.max(0, Math.min(step - Math.floor(shown / 3), launch.length - shown));
    const first = this.first,
      last = Math.min(launch.length, first + shown + 1),
      x = s => labels + (s - first) * cell;
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
      const top = Math.min(...bands.map(b => b.y)),
        bottom = Math.max(...bands.map(b => b.y + b.height));
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
      const name =
        band.kind === "warp" ? "warp " + band.row.warp : band.kind === "mbarrier" ? band.barrier.name : band.name;
      context.fillText(
        name.length > 15 ? name.slice(0, 14) + "…" : name,
        this.labels - 16,
        band.y + band.height / 2 + 0.5,
      );
      if (band.kind === "warp") {
        context.fillStyle = colourOf(band.row.number, 16);
        context.fillRect(this.labels - 12, band.y + 2, 7, band.height - 4);
      }
    }
    context.font = "11px system-ui, sans-serif";
  }

  warp(context, launch, band, first, last, x, cell) {
    const {row, y, height} = band,
      gap = cell > 5 ? 1 : 0;
    for (const wait of row.waits)
      if (wait.until > first && wait.since < last) {
        const from = Math.max(first, wait.since + 1),
          to = Math.min(last, wait.until);
        if (to > from) hatch(context, x(from), y + 3, (to - from) * cell - gap, height - 6, theme.wait);
      }
    for (let k = Math.max(0, atMost(row.steps, first - 1)); k < row.steps.length && row.steps[k] < last; k++) {
      if (row.steps[k] < first) continue;
      const share = Math.max(0.25, bits(row.active[k]) / row.threads),
        full = height - 3;
      context.fillStyle = colourOfLine(row.lines[k]);
      context.fillRect(x(row.steps[k]), y + 1 + full * (1 - share), cell - gap, full * share);
    }
    const faults = launch.faults.filter(
      fault => fault.at && fault.at[1] === row.number && fault.at[0] >= first && fault.at[0] < last,
    );
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
    const {barrier, y, height} = band,
      ends = barrier.events.filter(event => event[3] === "end").map(event => event[0]);
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
      if (at >= first && at < last && (kind === "arrive" || kind === "land"))
        context.fillRect(x(at) + cell / 2 - 1, y + 3, 2, height - 6);
  }

  flights(context, band, first, last, x, cell, colour) {
    context.textAlign = "left";
    context.font = "10px system-ui, sans-serif";
    for (const flight of band.flights) {
      if (flight.end < first || flight.start > last) continue;
      const left = Math.max(x(flight.start), this.labels),
        right = Math.max(left + 3, x(flight.end) - 1),
        {thick} = band,
        y = band.y + 1 + thick * flight.lane;
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

  copy(context, launch, band, first, last, x, cell) {
    this.flights(context, band, first, last, x, cell, theme.copy);
  }

  wgmma(context, launch, band, first, last, x, cell) {
    this.flights(context, band, first, last, x, cell, theme.tensor);
  }

  races(context, launch, x, cell, selected) {
    // an arrow from the earlier access to the later one
    launch.faults.forEach((fault, number) => {
      if (!fault.at || !fault.other) return;
      let [from, to] = [fault.other, fault.at];
      if (from[0] > to[0]) [from, to] = [to, from];
      const place = ([step, row]) => [x(step) + cell / 2, this.all[row].y + this.all[row].height / 2];
      let [[a, b], [c, d]] = [place(from), place(to)];
      if (Math.max(a, c) < this.labels || Math.min(a, c) > 4000) return;
      const bend = b === d ? -Math.max(16, this.rowHeight) : 0,
        [mx, my] = [(a + c) / 2 + (a === c ? 18 : 0), (b + d) / 2 + bend];
      const angle = Math.atan2(d - my, c - mx);
      [c, d] = [c - 6 * Math.cos(angle), d - 6 * Math.sin(angle)];
      for (const [colour, thick] of [
        [theme.paper, 5],
        [theme.fault, number === selected.fault ? 2.6 : 1.6],
      ]) {
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

  point(event) {
    // {step, row} under the pointer
    const box = this.canvas.getBoundingClientRect(),
      y = event.clientY - box.top;
    const step = this.first + Math.floor((event.clientX - box.left - this.labels) / this.cell);
    return {step, row: this.all.find(b => b.kind === "warp" && y >= b.y && y < b.y + b.height)?.row.number};
  }
}
