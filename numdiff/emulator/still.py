"""A picture of a film: warps as rows over steps, with their barriers, waits, copies and matrix
products."""

from .drawing import GRID, INK, PALE, Picture
from .rewrite import SITES

# pixels: labels, margins, height of a row, space between blocks
LEFT, RIGHT, TOP, ROW, GAP = 150, 20, 50, 20, 26
# of source lines
LINES = ("#d9a98c", "#a9cf9b", "#8fcabb", "#97b7dd", "#b7a4dd", "#dba0c4", "#d8c58e", "#a3d3da")
WAITS, COPY, WGMMA, BARRIER, FAULT = "#c3c9d1", "#5bb07c", "#a47fd6", "#1b1f24", "#c9252d"


def still(replay, blocks=1, width=1000):
    """A `Picture` of the first `blocks` blocks of a launch; a colour is a line of the source."""
    shown = list(dict.fromkeys(block for block, _ in replay.rows))[:blocks]
    rows = [k for k, (block, _) in enumerate(replay.rows) if block in shown]
    flights = {
        block: [f for f in replay.shot.flights if f.thread.block is block and f.start is not None]
        for block in shown
    }
    heights = {
        block: sum(_stack(kind)[1] for kind in _kinds(flights[block]).values()) for block in shown
    }
    high = TOP + sum(
        (sum(replay.rows[k][0] is block for k in rows) + heights[block]) * ROW + GAP
        for block in shown
    )
    picture, scale = Picture(width, high + 34), (width - LEFT - RIGHT) / max(1, replay.length)
    shot = replay.shot
    left_out = f", {len(shown)} of {shot.count} blocks" if len(shown) < shot.count else ""
    picture.text(
        14,
        20,
        f"{shot.kernel}   grid {shot.grid}, block {shot.block}{left_out}",
        14,
        "start",
        bold=True,
    )
    y, places = TOP, {}
    for block in shown:
        picture.text(14, y - 10, f"block {block.index}", 11, "start", colour=PALE)
        for row in [k for k in rows if replay.rows[k][0] is block]:
            places[row] = y
            _warp(picture, replay, row, y, scale)
            y += ROW
        for name, kind in _kinds(flights[block]).items():
            picture.text(LEFT - 10, y + ROW / 2, name, 11, "end")
            lanes, count = _stack(kind)
            for flight, lane in zip(kind, lanes, strict=True):
                at, long = (
                    LEFT + flight.start * scale,
                    max((flight.end - flight.start) * scale - 1, 2),
                )
                picture.rectangle(
                    at,
                    y + lane * ROW + 4,
                    long,
                    ROW - 8,
                    WGMMA if flight.kind == "wgmma" else COPY,
                    tip=f"{flight.text}, steps {flight.start} to {flight.end}, {_say(flight.site)}",
                )
                if long > 7 * len(flight.text):
                    picture.text(at + 4, y + lane * ROW + ROW / 2, flight.text, 10, "start")
            y += count * ROW
        y += GAP
    for step, name, met in replay.meets:
        ys = [places[row] for row in met if row in places]
        if ys:
            picture.line(
                LEFT + step * scale,
                min(ys) + 1,
                LEFT + step * scale,
                max(ys) + ROW - 1,
                BARRIER,
                2,
                f"{name}, step {step}",
            )
    _axis(picture, replay, y - GAP + 8, scale, bool(replay.shot.flights))
    return picture


def _kinds(flights):
    """{name of a row: flights}, sorted by start."""
    kinds = {}
    for flight in sorted(flights, key=lambda f: (f.kind == "wgmma", f.start)):
        kinds.setdefault("tensor cores" if flight.kind == "wgmma" else "copies", []).append(flight)
    return kinds


def _stack(flights):
    """([line of each flight], how many lines): those that overlap are stacked."""
    free, lanes = [], []
    for flight in flights:
        lane = next((k for k, until in enumerate(free) if until <= flight.start), len(free))
        free[lane : lane + 1] = [max(flight.end, flight.start + 1)]
        lanes.append(lane)
    return lanes, len(free)


def _warp(picture, replay, row, y, scale):
    block, warp = replay.rows[row]
    picture.text(LEFT - 10, y + ROW / 2, f"warp {warp}", 11, "end")
    for number, since, until, text, site, _ in replay.waits:
        if number == row and until > since + 1:
            picture.rectangle(
                LEFT + (since + 1) * scale,
                y + 5,
                (until - since - 1) * scale,
                ROW - 10,
                None,
                WAITS,
                hatch=WAITS,
                tip=f"waits for {text}, {_say(site)}",
            )
    threads, steps = len(block.warp_threads(warp)), replay.steps[row]
    for step, site, mask in steps:
        high = (ROW - 4) * max(0.25, bin(mask).count("1") / threads)
        picture.rectangle(
            LEFT + step * scale,
            y + ROW - 2 - high,
            max(scale - (scale > 4), 0.5),
            high,
            LINES[(SITES.places[site][2]) % len(LINES)],
            tip=f"step {step}: {_say(site)}",
        )
    for step, number, _ in replay.faults.values():
        if number == row:
            picture.circle(LEFT + (step + 0.5) * scale, y + ROW / 2, 4, FAULT)


def _say(site):
    function, _, line = SITES.places[site]
    return f"line {line} in {function}"


def _axis(picture, replay, y, scale, flights):
    every = 1
    while every * scale < 50:
        every = every * 5 // 2 if str(every)[0] == "2" else every * 2
    picture.line(LEFT, y - 6, LEFT + replay.length * scale, y - 6, GRID)
    for step in range(0, replay.length, every):
        picture.text(LEFT + (step + 0.5) * scale, y + 2, step, 10, colour=PALE)
    x = LEFT
    for name, colour in [
        ("steps; a colour is a line", None),
        ("waits", WAITS),
        ("barrier", BARRIER),
    ] + [("copy in flight", COPY), ("wgmma in flight", WGMMA)] * flights:
        if colour:
            picture.rectangle(x, y + 13, 12, 10, colour)
        picture.text(x + 18 * bool(colour), y + 18, name, 10, "start", colour=INK)
        x += 40 + 6 * len(name)
