"""What the film of the Hopper GEMM's tile costs: time to record and to save, size, time to open, frames a second.

python -m tests.emulator.film_speed [FILM.html …]
"""

import pathlib
import sys
import tempfile
import time

from .browser import Browser

SECONDS = 4  # of playing
# Draws a further step in each frame of the browser; the frames a second, and the longest frame in milliseconds
PLAYED = """new Promise(done => {
  const times = [performance.now()];
  const frame = now => {
    film.go((film.step + 1) % film.launch.length);
    times.push(performance.now());
    if (times.at(-1) - times[0] < 1000 * SECONDS) return requestAnimationFrame(frame);
    const each = times.slice(1).map((time, i) => time - times[i]);
    done([1000 * each.length / (times.at(-1) - times[0]), Math.max(...each)]);
  };
  requestAnimationFrame(frame);
})"""
DRAWN = """(() => {
  const begun = performance.now(), count = Math.min(200, film.launch.length);
  for (let k = 0; k < count; k++) film.go(Math.floor(k * film.launch.length / count));
  return (performance.now() - begun) / count;
})()"""


def record(path):
    """Record and save the film of the warp-specialised GEMM's tile; returns the seconds of both."""
    from numdiff.extras.kernel_check import run as check

    begun = time.perf_counter()
    _, film = check.run_version("matmul_level", "3", "128 × 256 × 384", filmed=True)
    recorded = time.perf_counter()
    film.save(path)
    return recorded - begun, time.perf_counter() - recorded


def measure(browser, path):
    """(seconds to open, frames a second, longest frame in ms, ms of a step's drawing, steps)"""
    opened = browser.open(path)
    rate, longest = browser.evaluate(PLAYED.replace("SECONDS", str(SECONDS)))
    return opened, rate, longest, browser.evaluate(DRAWN), browser.evaluate("film.launch.length")


def main():
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        paths = [pathlib.Path(path) for path in sys.argv[1:]]
        if not paths:
            paths = [pathlib.Path(folder) / "gemm.html"]
            recorded, saved = record(paths[0])
            print(f"recorded in {recorded:.1f} s, saved in {saved:.2f} s")
        for path in paths:
            opened, rate, longest, drawn, steps = measure(browser, path)
            print(
                f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {steps:,} steps, opens in {opened:.2f} s, "
                f"{rate:.0f} frames a second, the longest {longest:.0f} ms; a step is drawn in {drawn:.1f} ms"
            )


if __name__ == "__main__":
    main()
