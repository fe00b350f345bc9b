// What the views draw with: colours, canvases, elements.

let theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of [
    "paper",
    "panel",
    "ink",
    "pale",
    "line",
    "accent",
    "here",
    "fault",
    "read",
    "write",
    "copy",
    "tensor",
    "wait",
    "empty",
    "seen",
    "light",
    "lines",
  ])
    theme[name] = style.getPropertyValue("--" + name).trim();
  colours.clear();
}

const colours = new Map();
function colourOf(row, lane) {
  // of a warp; its lanes differ in lightness
  const key = row * WARP + lane;
  if (!colours.has(key))
    colours.set(
      key,
      `hsl(${(205 + row * 137.5) % 360} 62% ${
        parseFloat(theme.light) + (lane - 15.5) * (film.launch.rows.length > 4 ? 0.35 : 0.9)
      }%)`,
    );
  return colours.get(key);
}
const colourOfLine = line => `hsl(${(28 + line * 67) % 360} 42% ${theme.lines})`;

function size(canvas, width, height, keep = false) {
  // in pixels of the page; returns the context of an empty canvas
  const scale = window.devicePixelRatio || 1,
    context = canvas.getContext("2d");
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
