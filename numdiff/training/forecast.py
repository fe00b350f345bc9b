"""How long a run will take and what it will need, before it starts.

    plan = Plan(options, sizes, flops, parameters)
    line, measured = plan.forecast()         of a run, or of a dry run
    clock = Clock(plan.key)                  measures steps, pictures and checkpoints for later runs

MEASURED. A run stores the seconds of a step and of each of EVENTS, its peak memory, and the bytes
of a checkpoint, in the cache of this user (caches.py). The key is a hash of the device, the version,
and all settings that change them. The seconds to the end are

    first + steps · step + grids · draw + evaluations · evaluate + checkpoints · save + …

where `first` is what the first steps, the first grid and the first measurement take longer than
others, as they load what the cache has. A model's first run compiles for it, too, which later runs
need not: its `first` is not stored, nor is its memory on a CPU, which holds the compiler.

MEMORY. Of a GPU the arrays there; of a CPU the whole process, as the system reports its peak.
Without a measurement it is the planner's (price.py).

ESTIMATED. Without a measurement a step takes its FLOPs divided by a share of the device's peak: of
the card's data sheet, or of a matrix product that is measured on the CPU. That is right within a
factor of two or three, and the line says that it is an estimate.
"""

import contextlib
import hashlib
import json
import math
import pathlib
import sys
import time

import numpy as np

from .. import __version__, schema
from ..caches import cache_root, own_folder, read_own, write_own
from ..device.roof import peak_flops
from ..files import Refused
from .run_extension import extensions_of

# settings that change neither the seconds of a step, nor of what happens between steps
WITHOUT_EFFECT = {
    "adam_eps", "beta1", "beta2", "checkpoint_every", "cfg_interval", "classes", "clip_norm", "data",
    "ema_decay", "ema_halflife", "ema_warmup", "evaluate_every", "init", "init_weights", "keep",
    "learning_rate", "log_every", "loss_scale", "loss_scale_interval", "loss_scale_rule", "lr_schedule",
    "muon_momentum", "outdir", "preset", "rank_timeout", "sample_every", "seed", "steps", "warmup_steps",
    "weight_decay",
}  # fmt: skip
SHARE_OF_PEAK = {"cpu": 0.4, "cuda": 0.35}
FORWARD = 0.23  # of a step's seconds: a model's evaluation in a sampler, as measured
# between steps: grids, measurements of samples, checkpoints, the best one, averages of extensions
EVENTS = "draw", "evaluate", "save", "best", "store"
PRODUCT = 768  # rows of the matrix product that is measured
SECONDS = schema.number(0, 1e9)
RECORD = schema.record(
    {"step": schema.number(1e-9, 1e9), "first": SECONDS, "save": SECONDS},
    {
        **dict.fromkeys(EVENTS, SECONDS),
        "memory": schema.number(0, 1e15),
        "checkpoint": schema.number(0, 1e15),
    },
)


def key_of(options, sizes, device, ranks=1):
    """The name of a measurement's file."""
    settings = {k: v for k, v in options.to_json().items() if k not in WITHOUT_EFFECT}
    text = json.dumps([settings, sizes, device, ranks, __version__], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def folder():
    return pathlib.Path(cache_root()) / "forecasts"


def read_measured(key):
    """A measurement, or None."""
    try:
        return schema.check(
            schema.parse_json(read_own(folder() / f"{key}.json"), 4096), RECORD, "it"
        )
    except (OSError, Refused):
        return None


class Clock:
    """What a run measures: seconds of its events.

    key: of `key_of`; None: nothing is stored. announce: from a record to a line that the run prints
    once it has measured, or None
    """

    def __init__(self, key=None, announce=None):
        self.key, self.announce, self.checkpoint = key, announce, 0
        self.intervals, self.seconds = [], {name: [] for name in EVENTS}
        self.peak_bytes = peak_memory  # of this process, or of the GPU

    def steps(self, count, seconds):
        """`count` steps took that long."""
        if count:
            self.intervals.append((count, seconds))

    @contextlib.contextmanager
    def timed(self, event):
        """Context: an event of this kind."""
        began = time.perf_counter()
        yield
        self.seconds[event].append(time.perf_counter() - began)

    @property
    def measured(self):
        """The record; None before the second interval, as the first one's steps compile."""
        if len(self.intervals) < 2:
            return None
        count, seconds = (sum(column) for column in zip(*self.intervals[1:], strict=True))
        step, (first_count, first) = seconds / count, self.intervals[0]
        # the first of several compiles or loads what the others use
        means = {
            name: float(np.mean(values[1:] or values))
            for name, values in self.seconds.items()
            if values
        }
        longer = [first - first_count * step]
        longer += [self.seconds[name][0] - mean for name, mean in means.items()]
        return {
            "step": step,
            "first": sum(max(0.0, seconds) for seconds in longer),
            "memory": self.peak_bytes(),
            "checkpoint": self.checkpoint,
            "save": 0.0,
            **means,
        }

    def store(self):
        """Write the measurement, where there is one; a cache that cannot be written has none."""
        record = self.measured
        if record is not None and self.key is not None:
            with contextlib.suppress(OSError):
                path, known = own_folder(folder()) / f"{self.key}.json", read_measured(self.key)
                if known is None:  # what this run compiled is in the cache for the next one
                    record["first"] = 0.0
                    if self.peak_bytes is peak_memory:  # it holds the compiler
                        del record["memory"]
                write_own(path, json.dumps({**(known or {}), **record}).encode())


def peak_memory():
    """Bytes that this process has had at most; 0 where the system does not say.

    Linux counts them for each program in its /proc. `getrusage` begins with the memory of the
    program that started this one.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/status") as status:
            return int(status.read().split("VmHWM:")[1].split()[0]) << 10
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_flops():
    """FLOP/s of a matrix product in float32, the best of a few."""
    a, best = np.ones((PRODUCT, PRODUCT), np.float32), math.inf
    for _ in range(4):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * PRODUCT**3 / best


def events(step, steps, every):
    """How often something happens after `step`: each `every` steps, and at the end."""
    return (
        max(0, steps // every - step // every + bool(steps % every)) if every else int(step < steps)
    )


def estimated(options, flops, backend):
    """The record without a measurement; flops: of a step."""
    if options.device == "cuda":
        rate = peak_flops(backend, options.precision) or 20e12
    else:
        rate = cpu_flops()
    return {
        "step": flops / rate / SHARE_OF_PEAK.get(options.device, 0.4),
        "first": 0.0,
        "save": 0.0,
    }


def seconds_to_the_end(record, options, pictures, step=0):
    """Seconds from `step` on. pictures: whether the run draws grids."""
    image = FORWARD * record["step"] / options.batch  # of a sample's evaluation
    evaluations = getattr(options, "sample_steps", 0) * (
        2 if getattr(options, "sampler", "") == "heun" else 1
    )
    guided = 2 if getattr(options, "cfg_scale", None) not in (None, 1) else 1
    sampled = image * evaluations * guided
    total = record["first"] + (options.steps - step) * record["step"]
    for name, every, images in (
        ("draw", options.sample_every, options.sample_count if pictures else 0),
        ("save", options.checkpoint_every, 0),
        *((("store", each.every(), 0)) for each in extensions_of(options) if each.every()),
    ):
        total += events(step, options.steps, every) * record.get(name, sampled * images)
    if every := getattr(options, "evaluate_every", 0):
        value = record.get("evaluate", sampled * options.evaluate_count) + record.get("best", 0)
        total += events(step, options.steps, every) * value
    return total


def checkpoint_bytes(options, parameters):
    """Bytes of a checkpoint, about: weights, two moments, the average, and what extensions keep."""
    averaged = options.ema_halflife or options.ema_decay
    return 4 * (3 + bool(averaged)) * parameters


def disk_bytes(options, checkpoint):
    """Bytes of a run's checkpoints at most: --keep, one that is being written, the first, the best."""
    saves = events(0, options.steps, options.checkpoint_every) + 1
    return (min(options.keep + 1, saves) + bool(getattr(options, "evaluate_every", 0))) * checkpoint


class Plan:
    """A run that is to be foreseen.

    sizes: the options of the model's constructor; flops: of a step of all ranks; parameters: their
    number; backend: the GPU, or None; memory: bytes that the planner foresees, or None
    """

    def __init__(self, options, sizes, flops, parameters, backend=None, memory=None, ranks=1):
        self.options, self.sizes, self.flops, self.parameters = options, sizes, flops, parameters
        self.backend, self.memory, self.ranks = backend, memory, ranks
        self.pictures = options.sample_count and (
            sizes.get("in_channels", 3) in (1, 3) or getattr(options, "vae", None)
        )
        device = getattr(backend, "device_name", None) or options.device
        self.key = key_of(options, sizes, device, ranks)

    def forecast(self, step=0):
        """(the line of the run from `step` on, whether it is measured)."""
        record = read_measured(self.key)
        if record is not None:
            memory = record.get("memory") or self.memory
            return self.line(record, "measured in a run before", step, memory), True
        record = estimated(self.options, self.flops / self.ranks, self.backend)
        return self.line(record, "estimated from its arithmetic", step, self.memory), False

    def after_first_steps(self, record, step):
        """The line once a run has measured its first steps."""
        record = {**record, "first": 0.0}  # they are done
        memory = max(record["memory"], self.memory or 0)  # more is needed for what has not come yet
        return self.line(record, "measured in the first steps", step, memory)

    def line(self, record, how, step, memory):
        options = self.options
        seconds = seconds_to_the_end(record, options, self.pictures, step)
        size = record.get("checkpoint") or checkpoint_bytes(options, self.parameters)
        return ", ".join(
            [
                f"{say_duration(seconds)} to the end at {1e3 * record['step']:.3g} ms a step ({how})",
                f"{(options.steps - step) * options.batch:,} images seen",
                *([f"{memory / 2**20:,.0f} MiB of memory"] if memory else []),
                f"checkpoints of at most {disk_bytes(options, size) / 1e6:,.0f} MB",
            ]
        )


def say_duration(seconds):
    """A duration: 40 seconds, 12 minutes, 3.4 hours, 2.1 days."""
    for limit, unit, name in ((100, 1, "seconds"), (6000, 60, "minutes"), (172800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / unit:.{0 if unit == 1 else 1}f} {name}"
    return f"{seconds / 86400:.1f} days"
