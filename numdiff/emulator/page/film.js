// The film: the chosen step, warp and lane; controls and keys.

const film = {
  launches: [],
  launch: null,
  step: 0,
  playing: 0,
  frames: 0,
  selected: {row: 0, lane: 0, variable: -1, fault: -1},

  async open() {
    readTheme();
    const reader = new Reader(await unpack($("data").textContent));
    this.launches = reader.header.launches.map(header => new Launch(header, reader));
    $("launch").replaceChildren(...this.launches.map((launch, k) => new Option(`${k + 1}: ${launch.kernel}`, k)));
    $("launch").hidden = this.launches.length === 1;
    this.leftOut = reader.header.leftOut;
    this.choose(
      Math.max(
        0,
        this.launches.findIndex(launch => launch.faults.length),
      ),
    );
    const place = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of place)
      if (name === "step") this.go(+value);
      else if (name in this.selected) this.select({[name]: +value});
    Object.assign(document.body.dataset, {ready: "yes", milliseconds: Math.round(performance.now())});
  },

  choose(number) {
    const launch = (this.launch = this.launches[number]),
      faults = launch.faults.length;
    colours.clear();
    $("launch").value = number;
    $("title").textContent = launch.kernel;
    $("about").textContent =
      `grid (${launch.grid.join(", ")}), block (${launch.block.join(", ")})` +
      (launch.blocks.length < launch.count
        ? `, ${launch.blocks.length} of ${launch.count.toLocaleString("en")} blocks`
        : "") +
      (launch.arguments.length ? ` — ${launch.arguments.join(", ")}` : "") +
      (launch.cut ? " — the end is left out: the film is too long" : "") +
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
    const lanes = this.launch.rows[this.selected.row].threads,
      {every} = this.launch;
    this.selected.lane = Math.floor(Math.max(0, Math.min(lanes - 1, this.selected.lane)) / every) * every;
    this.draw();
  },

  fault() {
    // the next one, at the step of its later access
    const number = (this.selected.fault + 1) % this.launch.faults.length,
      {at, other} = this.launch.faults[number];
    const [step, row, lane] =
      at && other && other[0] > at[0] ? other : at || [this.step, this.selected.row, this.selected.lane];
    this.step = Math.min(step, this.launch.length - 1);
    this.select({fault: number, row, lane});
  },

  draw() {
    const {launch, step, selected} = this;
    caption(launch, step, selected);
    // the source comes last: it scrolls, and must have its final size
    for (const view of [...this.views].reverse()) view.draw(launch, step, selected);
    $("slider").value = step;
    $("step").textContent = `step ${step.toLocaleString("en")} of ${(launch.length - 1).toLocaleString("en")}`;
    Object.assign(document.body.dataset, {step, row: selected.row, lane: selected.lane, frames: ++this.frames});
  },

  play() {
    this.playing = this.playing ? 0 : performance.now();
    $("play").textContent = this.playing ? "❚❚ Pause" : "▶ Play";
    if (!this.playing) return;
    if (this.step === this.launch.length - 1) this.go(0);
    const begun = this.playing,
      from = this.step;
    const frame = now => {
      if (this.playing !== begun) return;
      const step = from + Math.floor((Math.max(0, now - begun) / 1000) * +$("speed").value);
      if (step !== this.step) this.go(step);
      if (step >= this.launch.length - 1) this.play();
      else requestAnimationFrame(frame);
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
  for (const [keys, text] of Object.values(KEYS))
    if (keys) {
      const row = element("tr"),
        cell = element("td");
      for (const key of keys.split("  ")) cell.append(element("kbd", "", key), " ");
      row.append(cell, element("td", "", text));
      table.append(row);
    }
  $("keys").append(
    table,
    element(
      "p",
      "",
      "Click a warp and a step, a lane, a variable. A step is one line of a warp; the bar is lower " +
        "where fewer lanes take part. Values are those of the emulator's run, in which threads take turns: where " +
        "threads race, they may differ from the order shown.",
    ),
  );
  $("keys").onclick = () => $("keys").close();
  document.addEventListener("keydown", event => {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key,
      action = KEYS[key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    if (key === " " && event.target.tagName === "BUTTON") event.target.blur();
    event.preventDefault();
    action[2](event);
  });
  const steps = {
    first: () => film.go(0),
    back: () => film.go(film.step - 1),
    play: () => film.play(),
    next: () => film.go(film.step + 1),
    last: () => film.go(film.launch.length - 1),
  };
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
  canvas.onpointerdown = event => {
    canvas.setPointerCapture(event.pointerId);
    point(event);
  };
  canvas.onpointermove = event => event.buttons && point(event);
  new ResizeObserver(() => film.draw()).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").onchange = () => {
    readTheme();
    film.choose(film.launches.indexOf(film.launch));
  };
}

film
  .open()
  .then(listen)
  .catch(error => {
    $("caption").textContent = `The film cannot be shown: ${error.message}. A browser of 2023 or later is needed.`;
  });
