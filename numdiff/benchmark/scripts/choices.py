"""How good the launchers' choices are: the time of what they choose, over the time of the best
candidate, on problems drawn at random instead of the presets' own.

    python -m numdiff.benchmark.scripts.choices --out choices.json             draw, measure, write
    python -m numdiff.benchmark.scripts.choices --seed 2 --seconds 280         another draw; stop early
    NUMDIFF_CAPABILITY=8.0 python -m numdiff.benchmark.scripts.choices         as on such a card
    python -m numdiff.benchmark.scripts.choices --evaluate choices.json        the choices of today's
                                                                               launchers among the times
                                                                               of a file; needs no GPU
    python -m numdiff.benchmark.scripts.choices --plan "NVIDIA H200"           only count candidates and
                                                                               kernels; needs no GPU

Each problem (choice_draws.py, choice_problems.py) is called with every candidate, a tile, split or version, on a
stand-in for the card. That gives the kernels to compile, which is done in parallel, and a signature
of each candidate: its launches with their grids and integers. Candidates with one signature are one.
The launcher's own choice is the candidate with the signature of a call without any context.

TIMES. A candidate is captured as a graph of several calls over rotating inputs. Events around a
replay give its time; candidates near the best are replayed again, alternating, and the median
counts.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import json
import math
import pathlib
import statistics
import time

import numpy as np

from ...device import DeviceArray, copy_into, empty, get_gpu, upload
from ...device.planned import CARDS, Planned, card_of
from ...emulator.values import leaves
from ...training.compiling import compile_ahead
from ..watch import watching_launches
from .choice_draws import drawn_problems, preset_problems

REPLAY_US = 1500.0  # least time of a replay
MAX_CALLS = 24  # of a graph
# of a call with its launch; one that takes HOPELESS times the least of this or of the others' times
# is measured once
SHORT_US, HOPELESS = 300.0, 3.0
CLOSE = 1.2  # times the best of the first round: slower ones are not replayed again
ROUNDS = 7
CACHE = 150e6  # bytes that the rotating inputs exceed together
MAX_SETS = 6
POOL_BYTES = 3 << 30  # device memory with the inputs' random numbers
CHOSEN = "chosen"


# Candidates on a stand-in -------------------------------------------------------------------------


def place_arrays(problem, device, address=lambda shape, dtype: None):
    """{name: array} of a problem on a device; address: (memory, offset) of an input, or None."""
    made = {}
    for name, (shape, dtype) in problem.arrays.items():
        place = address(shape, dtype)
        made[name] = (
            empty(shape, dtype, device)
            if place is None
            else DeviceArray(device, shape, dtype, *place)
        )
    return made


def signature_of(problem, device, context):
    """What a call launches, as a short text: names, grids, blocks and integers of the launches;
    raises what the call raises."""
    launches = []

    def around(name, grid, block, call):
        numbers = [
            int(a) for a in leaves(call.args) if isinstance(a, (int, np.integer)) and a < 2**31
        ]
        launches.append((name, str(grid), str(block), numbers))
        return call()

    arrays = {n: empty(*of, device) for n, of in (problem.arrays | problem.results).items()}
    with context(), watching_launches(device, around):
        problem.call(arrays)
    return hashlib.sha1(json.dumps(launches).encode()).hexdigest()[:16]


def candidates_of(problem, device):
    """{signature: (label, context)} of a problem on a `Planned` device, and the launcher's own
    choice's signature."""
    found = {}
    for label, context in problem.candidates(device).items():
        with contextlib.suppress(ValueError):  # does not fit
            found.setdefault(signature_of(problem, device, context), (label, context))
    chosen = signature_of(problem, device, contextlib.nullcontext)
    found.setdefault(chosen, (CHOSEN, contextlib.nullcontext))
    return found, chosen


# Measuring ----------------------------------------------------------------------------------------


class Inputs:
    """Random numbers in device memory, of which inputs are views: no input has to be uploaded."""

    def __init__(self, gpu, nbytes=POOL_BYTES):
        rng = np.random.default_rng(0)
        self.pools = {}
        for dtype in (np.float16, np.float32):
            dtype = np.dtype(dtype)
            some = upload(rng.standard_normal((1 << 24) - 1184, np.float32).astype(dtype), gpu)
            size = nbytes // 2 // dtype.itemsize // some.size * some.size
            pool = empty((size,), dtype, gpu)
            for start in range(0, size, some.size):
                copy_into(pool[start : start + some.size], some)
            self.pools[dtype.itemsize] = pool
        self.at = {2: 0, 4: 0}

    def __call__(self, shape, dtype):
        """(memory, offset) of the next numbers, at a multiple of 256 bytes."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        pool = self.pools[np.dtype(dtype).itemsize]
        start = self.at[np.dtype(dtype).itemsize]
        if start + nbytes > pool.nbytes:
            start = 0
        self.at[np.dtype(dtype).itemsize] = start + -(-nbytes // 256) * 256
        return pool.memory, pool.offset + start


class Stopwatch:
    """Times graphs by events."""

    def __init__(self, gpu):
        self.gpu, self.events = gpu, []

    def event(self, i):
        while len(self.events) <= i:
            self.events.append(self.gpu.check(self.gpu._driver.cuEventCreate(0)))
        return self.events[i]

    def microseconds(self, functions):
        """Of one call of each function, all queued at once."""
        driver, gpu = self.gpu._driver, self.gpu
        for i, function in enumerate(functions):
            gpu.check(driver.cuEventRecord(self.event(2 * i), gpu.stream_handle))
            function()
            gpu.check(driver.cuEventRecord(self.event(2 * i + 1), gpu.stream_handle))
        gpu.synchronize()
        pairs = ((self.event(2 * i), self.event(2 * i + 1)) for i in range(len(functions)))
        return [1e3 * float(gpu.check(driver.cuEventElapsedTime(*pair))) for pair in pairs]


def graph_of(problem, context, sets, gpu, arena, stopwatch, limit):
    """(replay, calls, microseconds of one call with its launch) of a candidate; no replay where one
    call takes more than `limit` microseconds."""

    def run(calls):
        for i in range(calls):  # the result is dropped, so that each call has the same addresses
            problem.call(sets[i % len(sets)])

    with context(), gpu.within(arena):
        run(len(sets))  # loads kernels, makes tensor maps
        gpu.synchronize()
        taken = min(stopwatch.microseconds([lambda: run(1)])[0] for _ in range(2))
        if taken > limit:
            return None, 1, taken
        calls = int(np.clip(math.ceil(REPLAY_US / taken), 2, MAX_CALLS))
        if calls >= len(sets):
            calls = calls // len(sets) * len(sets)
        replay = gpu.capture(lambda: run(calls))
    replay()
    return replay, calls, taken


def measure(problem, candidates, gpu, arena, inputs, stopwatch):
    """{signature: microseconds} of all candidates of a problem."""
    count = int(np.clip(-(-CACHE // max(problem.nbytes, 1)), 2, MAX_SETS))
    results = {name: empty(*of, gpu) for name, of in problem.results.items()}
    for array in results.values():
        gpu.fill(array, 0)
    sets = [place_arrays(problem, gpu, inputs) | results for _ in range(count)]
    graphs, found, least = {}, {}, math.inf
    for signature, (_, context) in candidates.items():
        limit = HOPELESS * max(least, SHORT_US)
        replay, calls, taken = graph_of(problem, context, sets, gpu, arena, stopwatch, limit)
        least = min(least, taken)
        if replay is None:
            found[signature] = taken
        else:
            graphs[signature] = replay, calls

    def times(signatures):
        taken = stopwatch.microseconds([graphs[s][0] for s in signatures])
        return {s: us / graphs[s][1] for s, us in zip(signatures, taken, strict=True)}

    found |= times(list(graphs))
    close = [s for s in graphs if found[s] < CLOSE * min(found.values())]
    rounds = [times(close) for _ in range(ROUNDS)]
    return found | {s: statistics.median(each[s] for each in rounds) for s in close}


# Figures ------------------------------------------------------------------------------------------


def ratio_of(row):
    """Time of the choice over that of the best candidate; None if the choice was not measured."""
    times = {signature: us for signature, (_, us) in row["times"].items()}
    chosen = times.get(row["chosen"])
    return None if chosen is None else max(1.0, chosen / min(times.values()))


def describe(rows):
    """Lines: the distribution for each operation and as a whole, and the ten worst."""
    groups = collections.defaultdict(list)
    for row in rows:
        ratio = ratio_of(row)
        if ratio is None or len(row["times"]) < 2:
            continue
        if row["preset"]:
            groups["presets"].append(ratio)
        else:
            groups[row["operation"]].append(ratio)
            groups["all drawn"].append(ratio)
    last = ("all drawn", "presets")
    lines = [f"{'operation':26s} {'problems':>8s} {'median':>7s} {'95 %':>7s} {'worst':>7s}"]
    for name in sorted(groups, key=lambda name: (name in last, name)):
        r = groups[name]
        lines.append(
            f"{name:26s} {len(r):8d} {np.median(r):7.3f} {np.quantile(r, 0.95):7.3f} {max(r):7.3f}"
        )
    unknown = sum(ratio_of(row) is None for row in rows)
    if unknown:
        lines.append(f"{unknown} problems whose choice was not among the candidates are left out")
    worst = sorted((row for row in rows if ratio_of(row) and len(row["times"]) > 1), key=ratio_of)
    for row in worst[:-11:-1]:
        label, us = row["times"][row["chosen"]]
        best, best_us = min(row["times"].values(), key=lambda pair: pair[1])
        lines.append(
            f"  {ratio_of(row):5.2f}  {row['key']}: {label} {us:.1f} µs, best {best} {best_us:.1f}"
        )
    return lines


def save(path, device_name, seed, rows):
    pathlib.Path(path).write_text(
        json.dumps({"card": device_name, "seed": seed, "rows": rows}), encoding="utf-8"
    )


# Commands -----------------------------------------------------------------------------------------


def problems_for(seed, card, presets):
    drawn = drawn_problems(seed, hopper=card.capability >= (9, 0))
    return drawn + (preset_problems(card) if presets else [])


def planned(problems, card, echo):
    """([(problem, candidates, choice)], [Key] of the kernels)."""
    device, found = Planned(card), []
    for problem in problems:
        candidates, chosen = candidates_of(problem, device)
        found.append((problem, candidates, chosen))
    echo(
        f"{len(found)} problems, {sum(len(c) for _, c, _ in found)} candidates, "
        f"{len(device.kernels)} kernels on {card.device_name}"
    )
    return found, list(device.kernels)


def run(seed, out, seconds, presets, echo):
    """Measure on this machine's GPU."""
    start, gpu = time.monotonic(), get_gpu()
    card = card_of(gpu)
    problems = problems_for(seed, card, presets)
    found, keys = planned(problems, card, echo)
    echo(f"planned at {time.monotonic() - start:.0f} s")
    compile_ahead(keys, gpu.cache, echo)
    echo(f"compiled at {time.monotonic() - start:.0f} s")
    arena, inputs, stopwatch = gpu.new_arena(), Inputs(gpu), Stopwatch(gpu)
    rows, failures = [], 0
    # presets and draws mixed, so that an early end has some of both
    order = np.random.default_rng(seed).permutation(len(found))
    for done, i in enumerate(order):
        if time.monotonic() - start > seconds:
            echo(f"out of time: {len(order) - done} problems are left")
            break
        problem, candidates, chosen = found[i]
        try:
            times = measure(problem, candidates, gpu, arena, inputs, stopwatch)
        except Exception as error:
            echo(f"{problem.key}: {type(error).__name__}: {error}")
            failures += 1
            if failures > 5:  # the card does not answer any more
                break
            continue
        row = row_of(problem, candidates, chosen, times)
        rows.append(row)
        if done % 20 == 0:
            echo(f"{time.monotonic() - start:4.0f} s {done:3d} {problem.key} {ratio_of(row):.3f}")
            save(out, card.device_name, seed, rows)
    save(out, card.device_name, seed, rows)
    echo("\n".join(describe(rows)))


def row_of(problem, candidates, chosen, times):
    """A problem's row of the file."""
    return {
        "key": problem.key,
        "operation": problem.operation,
        "shape": problem.shape,
        "preset": problem.preset,
        "chosen": chosen,
        "times": {s: (candidates[s][0], round(us, 3)) for s, us in times.items()},
    }


def evaluate(path, echo, part=None):
    """Print the figures of a file, and those of today's launchers on its times. part: 0 or 1, for
    one half of the problems."""
    table = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    rows = table["rows"]
    if part is not None:
        rows = [row for i, row in enumerate(sorted(rows, key=lambda r: r["key"])) if i % 2 == part]
    echo("as measured\n" + "\n".join(describe(rows)))
    card = stand_in(table["card"])
    by_key = {p.key: p for p in problems_for(table["seed"], card, True)}
    device = Planned(card)
    today = []
    for row in rows:
        if row["key"] in by_key:
            chosen = signature_of(by_key[row["key"]], device, contextlib.nullcontext)
            today.append(row | {"chosen": chosen})
    echo("today's launchers\n" + "\n".join(describe(today)))
    return today


def stand_in(name):
    """The `Card` of a device name, such as "NVIDIA H200" or "NVIDIA H200 as 8.0"."""
    plain, _, capability = name.partition(" as ")
    card = next(card for card in CARDS if card.device_name == plain)
    if not capability:
        return card
    acting = tuple(map(int, capability.split(".")))
    shared = next(other.shared_limit for other in CARDS if other.capability == acting)
    return card._replace(
        device_name=name, capability=acting, shared_limit=shared, own=card.capability
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="choices.json")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--no-presets", action="store_true")
    parser.add_argument("--plan", metavar="CARD")
    parser.add_argument("--evaluate", metavar="FILE")
    parser.add_argument("--half", type=int, choices=(0, 1))
    given = parser.parse_args()
    echo = functools.partial(print, flush=True)
    if given.evaluate:
        evaluate(given.evaluate, echo, given.half)
    elif given.plan:
        card = stand_in(given.plan)
        found, keys = planned(problems_for(given.seed, card, not given.no_presets), card, echo)
        for name, count in sorted(collections.Counter(key.name for key in keys).items()):
            echo(f"  {name} {count}")
    else:
        run(given.seed, given.out, given.seconds, not given.no_presets, echo)


if __name__ == "__main__":
    main()
