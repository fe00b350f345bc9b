// Memory as cells in the colour of their last writer.

class Memory {
  constructor(launch) {
    const pane = $("memory");
    pane.replaceChildren();
    this.parts = [];
    const used = new Set(launch.accesses.map(access => access.array));
    for (const array of launch.arrays)
      if (used.has(array.number))
        for (const [name, type, first, count, columns] of array.parts) {
          const box = element("div", "array"),
            title = element("h2"),
            canvas = element("canvas");
          title.append(
            element("b", "", name),
            `  ${type}, ${array.space}` + (array.single ? "" : `; a cell is ${array.size} bytes`),
          );
          box.append(title, canvas);
          pane.append(box);
          const part = {array, first, count, columns, box, canvas};
          canvas.onmousemove = event => this.tip(launch, part, event);
          this.parts.push(part);
        }
    if (!this.parts.length) pane.append(element("p", "", "The kernel uses no arrays."));
  }

  draw(launch, step, selected) {
    const block = launch.rows[selected.row].block,
      width = Math.max(120, $("memory").clientWidth - 26);
    const many = launch.rows.filter(row => row.block === block).length > 8; // then those of the chosen warp alone
    const accesses = launch
      .during(step)
      .filter(access => access.row === selected.row || (!many && launch.rows[access.row]?.block === block));
    const flying = launch.flights.filter(f => f.start <= step && step < f.end);
    for (const part of this.parts) {
      part.box.hidden = part.array.block >= 0 && part.array.block !== block;
      if (!part.box.hidden) this.part(launch, part, step, selected, width, accesses, flying);
    }
  }

  part(launch, part, step, selected, width, accesses, flying) {
    const {array, first, count, columns} = part,
      rows = Math.ceil(count / columns);
    const wide = Math.max(2, Math.min(46, Math.floor(width / columns))),
      tall = Math.max(2, Math.min(wide > 30 ? 19 : wide, Math.floor((array.single && array.written.steps.length ? 460 : 220) / rows), 19));
    const key = [launch.kernel, wide, tall, theme.paper].join(),
      keep = part.key === key,
      gap = wide > 4 && tall > 4 ? 1 : 0;
    const context = size(part.canvas, Math.min(columns, count) * wide + 2, rows * tall + 2, keep);
    if (!keep) Object.assign(part, {key, wide, tall, shown: new Int32Array(count).fill(-9), marked: new Set()});
    const {shown, marked} = part; // what each cell shows; those with a mark of the step before
    const place = cell => [1 + ((cell - first) % columns) * wide, 1 + Math.floor((cell - first) / columns) * tall];
    const inside = cell => cell >= first && cell < first + count;
    const labelled = array.single && wide >= 20 && tall >= 12;
    context.textAlign = "center";
    context.font = `${wide < 32 ? 9 : 10}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
    for (let cell = first; cell < first + count; cell++) {
      const event = launch.lastWrite(array, cell, step),
        state = event < 0 && array.read[cell] <= step ? -2 : event;
      if (shown[cell - first] === state && !marked.has(cell)) continue;
      shown[cell - first] = state;
      const [x, y] = place(cell),
        write = launch.write(array, event);
      context.clearRect(x, y, wide, tall);
      context.fillStyle = !write
        ? array.read[cell] <= step
          ? theme.seen
          : theme.empty
        : write.access.kind === LANDING
          ? `hsl(${150 + ((write.access.flight * 13) % 40)} 55% ${30 + ((write.access.flight * 7) % 20)}%)`
          : colourOf(write.access.row, laneOf(write.access, write.k));
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
      for (const [number, from, cells] of flight.writes)
        if (number === array.number)
          this.spans(from, cells, part, (x, y, w) => {
            hatch(context, x, y, w, tall - gap, theme.copy);
          });
      for (const [number, from, cells] of flight.reads)
        if (number === array.number)
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
        for (let p = 0; p < access.per; p++)
          if (inside(from + p))
            ring(from + p, access.kind === READ ? theme.read : theme.write, Math.min(mine ? 2.5 : 1, wide / 3));
      });
      if (mine && has(access.mask, selected.lane)) {
        const from = access.places[rank(access.mask, selected.lane)];
        if (inside(from)) ring(from, theme.ink, Math.min(3, wide / 2.5));
      }
    }
  }

  spans(from, cells, part, visit) {
    // the rows of cells that a range takes
    let at = Math.max(from, part.first);
    const end = Math.min(from + cells, part.first + part.count);
    for (let cell = at; cell < end; cell++) part.marked.add(cell);
    while (at < end) {
      const column = (at - part.first) % part.columns,
        run = Math.min(end - at, part.columns - column);
      visit(1 + column * part.wide, 1 + Math.floor((at - part.first) / part.columns) * part.tall, run * part.wide);
      at += run;
    }
  }

  tip(launch, part, event) {
    const {array, first, count, columns, wide, tall} = part;
    const column = Math.floor((event.offsetX - 1) / wide),
      cell = Math.floor((event.offsetY - 1) / tall) * columns + column;
    if (column < 0 || column >= columns || cell < 0 || cell >= count) return;
    const write = launch.write(array, launch.lastWrite(array, first + cell, film.step)),
      [name] = array.parts.find(p => p[2] === first);
    const where =
      columns === 32
        ? cell * (array.size / array.itemsize)
        : `${Math.floor(cell / columns)}, ${column * (array.size / array.itemsize)}`;
    const who = !write
      ? "not written in this film"
      : write.access.kind === LANDING
        ? `written by ${launch.flights.find(f => f.number === write.access.flight)?.text} at step ${write.access.step}`
        : `= ${show(write.access.values, write.k) || "…"}, written by ${said(launch, write.access.row)}, lane ` +
          `${laneOf(write.access, write.k)}, at step ${write.access.step}`;
    part.canvas.title = `${name}[${where}] ${who}`;
  }
}

function fit(text, letters) {
  // a number in a small cell
  if (text.length <= letters) return text;
  for (let digits = 3; digits >= 0 && !text.includes("e") && text.includes("."); digits--) {
    const short = (+text).toFixed(digits).replace(/^(-?)0\./, "$1.");
    if (short.length <= letters && +short) return short;
  }
  const short = (+text).toExponential(0).replace("+", "");
  return short.length <= letters ? short : "…";
}

function laneOf(access, k) {
  // the lane that made the k-th write of an access
  let left = Math.floor(k / access.per);
  for (let lane = 0; lane < WARP; lane++) if (has(access.mask, lane) && left-- === 0) return lane;
  return 0;
}

const said = (launch, row) =>
  (launch.blocks.length > 1 ? `block (${launch.blocks[launch.rows[row].block].join(", ")}), ` : "") +
  `warp ${launch.rows[row].warp}`;
