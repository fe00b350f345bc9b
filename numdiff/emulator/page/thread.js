// The chosen thread: its variables, and one of them in all lanes of its warp.

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
    const row = launch.rows[selected.row],
      {line, mask, now} = launch.at(row, step),
      wait = launch.waiting(row, step);
    const [bx, by] = launch.block,
      t = row.warp * WARP + selected.lane;
    this.title.replaceChildren(
      element("b", "", `Thread (${t % bx}, ${Math.floor(t / bx) % by}, ${Math.floor(t / bx / by)})`),
      ` of block (${launch.blocks[row.block].join(", ")}): warp ${row.warp}, lane ${selected.lane}` +
        (launch.every > 1 ? `; variables of every ${launch.every}th lane are kept` : ""),
    );
    this.buttons.forEach((button, lane) => {
      const exists = lane < row.threads,
        value =
          exists && row.variables.has(selected.variable) ? launch.value(row, selected.variable, lane, step) : null;
      button.className = (now && has(mask, lane) ? "on" : "off") + (lane === selected.lane ? " chosen" : "");
      button.hidden = !exists;
      const text = value ? fit(value.text, 7) : "";
      if (button.lastChild.textContent !== text) button.lastChild.textContent = text;
    });
    this.variables(launch, row, line, step, selected);
  }

  variables(launch, row, line, step, selected) {
    const source = line < 0 ? null : launch.sources[launch.lineOf.get(line).source][0],
      outer = launch.sources[0][0];
    const seen = [];
    for (const name of row.variables.keys()) {
      const [owner, text] = launch.variables[name];
      if (owner !== source && owner !== outer) continue;
      const value = launch.value(row, name, selected.lane, step);
      if (value) seen.push({name, label: owner === outer ? text : `${owner}: ${text}`, ...value});
    }
    seen.sort(
      (a, b) =>
        launch.variables[a.name][1].includes("[") - launch.variables[b.name][1].includes("[") || a.name - b.name,
    );
    const names = seen.map(({name}) => name).join();
    if (this.names !== names || this.of !== launch) {
      [this.names, this.of] = [names, launch];
      this.cells.clear();
      this.table.replaceChildren(
        ...seen.map(({name, label}) => {
          const line = element("p");
          line.dataset.name = name;
          line.title = "show this variable in every lane";
          line.append(element("span", "", label), element("b"));
          this.cells.set(name, line);
          return line;
        }),
      );
    }
    for (const {name, text, step: since} of seen) {
      const line = this.cells.get(name);
      if (line.lastChild.textContent !== text) line.lastChild.textContent = text;
      line.classList.toggle("new", since === step);
      line.classList.toggle("picked", name === selected.variable);
    }
  }
}
