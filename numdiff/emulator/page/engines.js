// mbarriers, the boxes of TMA copies, and the fragments of matrix products.

class Engines {
  constructor(launch) {
    const pane = $("engines");
    pane.replaceChildren();
    const add = (title, drawn = true) => {
      const box = element("div", "engine"),
        head = element("h2"),
        body = element("div"),
        canvas = element("canvas");
      head.append(element("b", "", title));
      box.append(head, body);
      if (drawn) box.append(canvas);
      pane.append(box);
      return {box, head, body, canvas};
    };
    this.tensors = new Map();
    if (launch.barriers.length) this.barriers = add("mbarriers", false);
    for (const flight of launch.flights)
      if (flight.detail.dims) {
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
    const row = launch.rows[selected.row],
      width = $("engines").clientWidth - 26;
    if (this.barriers) this.drawBarriers(launch, step, row.block);
    for (const view of this.tensors.values()) this.drawTensor(launch, view, step, row.block, width);
    if (this.wgmma) this.drawAccumulators(launch, step, row, selected, width);
    if (this.mma) this.drawFragments(launch, step, row, selected, width);
  }

  drawBarriers(launch, step, block) {
    this.barriers.body.replaceChildren(
      ...barriersOf(launch, block).map(({name, count, events}) => {
        const line = element("div", "barrier"),
          phase = events.filter(e => e[3] === "end" && e[0] <= step).length;
        let come = 0,
          bytes = 0;
        for (const [at, , of, kind, number] of events)
          if (at <= step && of === phase) {
            come += kind === "arrive" ? number : 0;
            bytes += kind === "expect" ? number : kind === "land" ? -number : 0;
          }
        const dots =
          count <= 16
            ? "●".repeat(Math.min(come, count)) + "○".repeat(Math.max(0, count - come))
            : `${come} of ${count} arrivals`;
        line.append(element("b", "mono", name), element("span", "", `phase ${phase}`), element("span", "dots", dots));
        if (bytes > 0) line.append(element("span", "", `${plural(bytes, "byte")} to come`));
        return line;
      }),
    );
  }

  drawTensor(launch, {canvas, flights, detail}, step, block, width) {
    const [ax, ay] = detail.dims.length > 2 ? [1, 2] : [0, 1],
      dims = detail.dims,
      high = dims[ay] ?? 1;
    const mine = flights.filter(f => launch.rows[f.row].block === block && f.start <= step);
    const scale = Math.min(width / (dims[ax] * 1.02), 150 / high, 12),
      boxes = mine.map(f => [f.detail.at[ax], f.detail.at[ay] ?? 0]);
    const left = Math.max(0, -Math.min(0, ...boxes.map(b => b[0]))),
      top = Math.max(0, -Math.min(0, ...boxes.map(b => b[1])));
    const context = size(canvas, width, Math.max(26, high * scale) + top * scale + 6),
      [x, y] = [left * scale + 1, top * scale + 2];
    const [w, h] = [detail.box[ax] * scale, Math.max(6, (detail.box[ay] ?? 1) * scale)];
    context.fillStyle = theme.empty;
    context.fillRect(x, y, dims[ax] * scale, Math.max(20, high * scale));
    mine.forEach((flight, k) => {
      const [u, v] = [x + boxes[k][0] * scale, y + boxes[k][1] * scale],
        flies = step < flight.end;
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
    const mine = launch.flights.filter(f => f.kind === "wgmma" && launch.rows[f.row].block === row.block);
    const flying = mine.filter(f => f.start <= step && step < f.end);
    const ofWarp = f => f.detail.group === row.warp >> 2;
    const {n, group} = (flying.find(ofWarp) || mine.find(ofWarp) || mine[0] || launch.flights.find(f => f.detail.n)).detail;
    const names = flying.slice(0, 4).map(f => `${f.text} of warpgroup ${f.detail.group}`);
    this.wgmma.body.textContent = flying.length
      ? `${plural(flying.length, "wgmma")} in flight: ${names.join(", ")}${flying.length > 4 ? " …" : ""}`
      : "no wgmma in flight";
    const thread = group === row.warp >> 2 ? (row.warp & 3) * WARP + selected.lane : -1;
    const busy = flying.some(f => f.detail.group === group);
    const cell = Math.max(1.5, Math.min(9, width / n)),
      tall = Math.min(cell, 4);
    const key = [n, group, thread, busy, cell, theme.paper].join();
    if (this.key === key) return; // what is drawn depends on nothing else
    this.key = key;
    this.wgmma.head.replaceChildren(
      element("b", "", "wgmma: the accumulators"),
      `  64 × ${n} of warpgroup ${group}, by warp` + (thread < 0 ? "" : `; black: thread ${thread} of the group`),
    );
    const context = size(this.wgmma.canvas, n * cell + 1, 64 * tall + 1);
    for (let r = 0; r < 64; r++)
      for (let c = 0; c < n; c++) {
        const [owner] = launch.accumulators[8 * r + (c % 8)];
        context.fillStyle = owner === thread ? theme.ink : colourOf(group * 4 + (owner >> 5), owner & 31);
        context.globalAlpha = owner === thread ? 1 : busy ? 0.75 : 0.35;
        context.fillRect(c * cell, r * tall, Math.max(1, cell - (cell > 4 ? 0.6 : 0)), Math.max(1, tall - 0.4));
      }
    context.globalAlpha = 1;
  }

  drawFragments(launch, step, row, selected, width) {
    const {at, layouts} = launch.products,
      mine = at.filter(p => p[1] === row.number && p[0] <= step),
      last = mine[mine.length - 1] || at[0];
    const [name, layout] = layouts[last[2]];
    const now = mine.length && last[0] === step;
    const when = now ? "now" : mine.length ? "last at step " + last[0] : "not yet";
    this.mma.body.textContent = `${name}, ${when}; framed: the elements of lane ${selected.lane}, with their registers`;
    if (!layout.length) return;
    const [[[, k], a], [, b], [, d]] = layout,
      cell = Math.max(9, Math.min(17, Math.floor((width - 16) / (k + 8))));
    const context = size(this.mma.canvas, (k + 8) * cell + 16, (k + 16) * cell + 16);
    context.font = `${Math.min(10, cell - 4)}px ui-monospace, monospace`;
    context.textAlign = "center";
    const draw = (owners, columns, left, top) =>
      owners.forEach(([lane, register], i) => {
        const [x, y] = [left + (i % columns) * cell, top + Math.floor(i / columns) * cell];
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
    context.textAlign = "left";
    context.font = "bold 12px system-ui, sans-serif";
    context.fillText("A", 2, k * cell + 7);
    context.fillText("B", k * cell, cell);
    context.fillText("D", k * cell + 14, k * cell + 8);
    context.textAlign = "center";
    context.font = `${Math.min(10, cell - 4)}px ui-monospace, monospace`;
    draw(b, 8, k * cell + 14, 2);
    draw(a, k, 2, k * cell + 14);
    draw(d, 8, k * cell + 14, k * cell + 14);
  }
}
