// The source: the current line, the warps at each line, and the two lines of a race.

const PYTHON = new Set(
  (
    "False None True and as assert break class continue def del elif else except finally for from if " +
    "import in is lambda nonlocal not or pass raise return try while with yield"
  ).split(" "),
);

function paint(parent, text) {
  // Python, coloured: strings and comments, then words
  for (const [token] of text.matchAll(/#.*|"""(?:.*?)(?:"""|$)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\w+|\W/g)) {
    const kind =
      token[0] === "#"
        ? "c"
        : token[0] === '"' || (token[0] === "'" && token.length > 1)
          ? "s"
          : PYTHON.has(token)
            ? "k"
            : "";
    if (kind) parent.append(element("span", kind, token));
    else parent.append(token);
  }
}

class Source {
  constructor(launch) {
    const pane = $("source");
    pane.replaceChildren();
    pane.classList.toggle(
      "racing",
      launch.faults.some(fault => fault.kind === "race"),
    );
    pane.classList.toggle("many", launch.rows.length > 12);
    this.lines = new Map(); // number of a line -> its element
    const numbers = new Map(launch.lines.map(([source, line], k) => [source + ":" + line, k]));
    this.blocks = launch.sources.map(([name, file, first, text], source) => {
      const block = element("div", "function"),
        title = element("h2");
      title.append(element("b", "", name), `  ${file}`);
      block.append(title);
      text.forEach((line, k) => {
        const row = element("div", "code"),
          mark = element("i"),
          code = element("span"),
          here = element("em");
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

  arrows(launch) {
    // from one line of a race to the other
    for (const fault of launch.faults) this.lines.get(fault.line)?.row.classList.add("wrong");
    this.paths = launch.faults.map((fault, number) => {
      const other = fault.others.find(([what, line]) => this.lines.has(line) && line !== fault.line);
      const [from, to] = [other && this.lines.get(other[1]), this.lines.get(fault.line)];
      if (!from || !to || fault.kind !== "race" || from.row.parentNode !== to.row.parentNode) return null;
      const block = to.row.parentNode,
        svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.classList.add("arrows");
      const [y, z] = [from, to].map(({row}) => row.offsetTop + 9),
        width = 6 + 4 * (number % 4);
      svg.innerHTML =
        `<path d="M4 ${y} C${4 + width * 1.4} ${y} ${4 + width * 1.4} ${z} 8 ${z}"/>` +
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
      if (line < 0 || (step > row.end && !launch.waiting(row, step))) continue;
      if (!here.has(line)) here.set(line, []);
      here.get(line).push(row.number * 2 + (now ? 1 : 0));
    }
    for (const [number, line] of this.lines) {
      const rows = here.get(number) || [],
        marks = rows.join();
      if (line.marks === marks) continue;
      line.marks = marks;
      line.here.replaceChildren(
        ...rows.map(k => {
          const mark = element("b");
          mark.style.background = colourOf(k >> 1, 16);
          if (!(k & 1)) mark.style.opacity = 0.45;
          mark.title = "warp " + launch.rows[k >> 1].warp;
          return mark;
        }),
      );
      line.row.classList.toggle("also", rows.length > 0);
    }
    const mine = this.lines.get(launch.at(launch.rows[selected.row], step).line)?.row;
    if (this.mine !== mine) {
      this.mine?.classList.remove("here");
      mine?.classList.add("here");
      this.mine = mine;
      if (mine) {
        const pane = $("source"),
          top = mine.getBoundingClientRect().top - pane.getBoundingClientRect().top;
        if (top < 50 || top > pane.clientHeight - 60) pane.scrollTop += top - pane.clientHeight / 2;
      }
    }
    this.paths.forEach((path, number) => path?.classList.toggle("chosen", number === selected.fault));
  }
}
