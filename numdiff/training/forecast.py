"""How long a run will take and what it will need, before it starts.

    plan = Plan(options, sizes, flops, parameters)
    line, measured = plan.forecast()         of a run, or of a dry run
    clock = Clock(plan.key)                  measures steps, pictures and checkpoints for later runs

MEASURED. A run stores the seconds of a step and of each of EVENTS, its peak memory, and the bytes
of a checkpoint, in the cache of this user (caches.py). The key is a hash of the device, the version,
and all settings that change them. The seconds from the command to the last picture are

    start + first + steps · step + grids · draw + evaluations · evaluate + checkpoints · save + …

where `start` is what comes before the first step, and `first` is what the first steps, the first
grid and the first measurement take longer than others, as they load what the cache has. Compiling
a GPU's kernels counts in neither, as later runs need not. On a CPU a model's first run compiles in
its first steps: its `first` is not stored, nor is its memory, which holds the compiler.

THE FIRST STEPS. A run times two steps, two more, and about a second of further steps. Where the
first two launch and record, the others are what all later steps are. A run of which nothing is
known says its forecast after them; `rehearse` does the same for a dry run, and ends there.

MEMORY. Of a GPU all that the process takes there, with the context, the kernels and the graphs; of
a CPU the whole process, as the system reports its peak. Without a measurement it is the planner's
(price.py).

ESTIMATED. Without a measurement a step takes its FLOPs, with those of Muon and of what is
recomputed, divided by a share of the device's peak: of the card's data sheet, or of a matrix product
that is measured on the CPU. On a GPU each of its kernels, which the planner counts, takes LAUNCH
more. The line says that it is an estimate. Grids and checkpoints that have
not been measured are estimated from a step and from their bytes.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import sys
import time

import numpy as np

from .. import __version__, schema
from ..caches import cache_root, own_folder, read_own, write_own
from ..device.roof import peak_flops
from ..files import Refused
from ..progress import progress
from ..sizes import sides
from . import kinds
from .run_extension import extensions_of
from .trainer import optimizer_of

# settings that change neither the seconds of a step, nor of what happens between steps
WITHOUT_EFFECT = {
    "adam_eps", "beta1", "beta2", "checkpoint_every", "cfg_interval", "classes", "clip_norm", "data",
    "ema_decay", "ema_halflife", "ema_warmup", "evaluate_every", "init", "init_weights", "keep",
    "learning_rate", "log_every", "loss_scale", "loss_scale_interval", "loss_scale_rule", "lr_schedule",
    "muon_momentum", "outdir", "preset", "rank_timeout", "sample_every", "seed", "steps", "warmup_steps",
    "weight_decay",
}  # fmt: skip
SHARE_OF_PEAK = {"cpu": 0.4, "cuda": 0.32}
LAUNCH = 2.5e-6  # seconds that each kernel of a graph takes at least, and waits for the one before
FORWARD = 0.23  # of a step's seconds: a model's evaluation in a sampler, as measured
# between steps: grids, measurements of samples, checkpoints, the best one, averages of extensions
EVENTS = "draw", "evaluate", "save", "best", "store"
PRODUCT = 768  # rows of the matrix product that is measured
AT_FIRST = 2  # steps of each of the first two intervals: a GPU launches one and records another
MEASURING = 1.0  # seconds of the third interval
MOST_MEASURED = 1000  # its steps at most
# a step that takes longer by the estimate is not waited for: the estimate is printed before it
SHORT_STEP = 4.0
# what is estimated until it has been measured, in seconds (H200, docs/log/forecast.md): an event
# without its images or bytes; what the first curve, samples and evaluation take longer
PER_EVENT = 0.15
FIRST_CURVE, FIRST_SAMPLES = 0.4, 0.6
FIRST_EVALUATION = 3.0  # its kernels are not compiled ahead
BYTES_A_SECOND = 0.45e9  # of a checkpoint
PIXELS_A_SECOND = 2.2e6  # of a grid, which is compressed
SECONDS = schema.number(0, 1e9)
RECORD = schema.record(
    {"step": schema.number(1e-9, 1e9), "first": SECONDS},
    {
        **dict.fromkeys(EVENTS, SECONDS),
        "start": SECONDS,
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
    once it has measured, or None. began: when the command began, in seconds of `perf_counter`
    """

    def __init__(self, key=None, announce=None, began=None):
        self.key, self.announce, self.checkpoint = key, announce, 0
        self.began, self.start = time.perf_counter() if began is None else began, None
        self.intervals, self.seconds = [], {name: [] for name in EVENTS}
        self.peak_bytes = peak_memory  # of this process, or of the GPU

    def measure(self, key, backend=None):
        """Measurements are for this key, on this GPU, or on the CPU."""
        self.key = key
        if hasattr(backend, "arenas"):
            self.peak_bytes = lambda: backend.process_bytes

    def begin_steps(self):
        """The first step comes now."""
        self.start = max(0.0, self.elapsed - progress.compiled)

    @property
    def elapsed(self):
        """Seconds since the command began."""
        return time.perf_counter() - self.began

    def next_count(self):
        """Steps of the next interval; None once the first steps are measured."""
        if len(self.intervals) < 2:
            return AT_FIRST
        if len(self.intervals) > 2:
            return None
        count, seconds = self.intervals[1]
        return max(1, min(MOST_MEASURED, int(MEASURING * count / max(seconds, 1e-9))))

    def steps(self, count, seconds):
        """`count` steps took that long."""
        if count:
            self.intervals.append((count, seconds))

    @contextlib.contextmanager
    def timed(self, event):
        """Context: an event of this kind. Compiling is left out, as later runs need not."""
        began, compiled = time.perf_counter(), progress.compiled
        yield
        compiling = progress.compiled - compiled
        self.seconds[event].append(time.perf_counter() - began - compiling)

    @property
    def measured(self):
        """The record; None before the second interval, as the first one's steps compile."""
        if len(self.intervals) < 2:
            return None
        step = middle_of(self.intervals[2:] or self.intervals[1:])
        first_count, first = self.intervals[0]
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
            **means,
            **({} if self.start is None else {"start": self.start}),
        }

    def store(self):
        """Write the measurement, where there is one; a cache that cannot be written has none."""
        record = self.measured
        if record is not None and self.key is not None:
            with contextlib.suppress(OSError):
                path, known = own_folder(folder()) / f"{self.key}.json", read_measured(self.key)
                # a CPU's first steps compile, for the next run, too, and the process holds the compiler
                if known is None and self.peak_bytes is peak_memory:
                    record["first"] = 0.0
                    del record["memory"]
                write_own(path, json.dumps({**(known or {}), **record}).encode())


def middle_of(intervals):
    """Seconds of a step: the median over the steps of intervals [(steps, seconds)], so that one
    that another program disturbed counts as little as its steps."""
    half = sum(count for count, _ in intervals) / 2
    for seconds, count in sorted((seconds / count, count) for count, seconds in intervals):
        half -= count
        if half <= 0:
            return seconds


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


def process_age():
    """Seconds since this process was started; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        with open("/proc/self/stat") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


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


def estimated(options, flops, backend, launches=0):
    """The record without a measurement; flops, launches: of a step."""
    if options.device == "cuda":
        rate = peak_flops(backend, options.precision) or 20e12
    else:
        rate = cpu_flops()
    products = flops / rate / SHARE_OF_PEAK.get(options.device, 0.4)
    return {"step": products + launches * LAUNCH, "first": 0.0}


def seconds_to_the_end(record, options, pictures, step=0, checkpoint=0):
    """Seconds from `step` on. pictures: whether the run draws grids; checkpoint: bytes of one."""
    evaluations = 0  # of a sample; an autoencoder's grids have none
    if "sampler" in kinds.get(options.model).table:
        evaluations = options.sample_steps * (2 if options.sampler == "heun" else 1)
    guided = 2 if getattr(options, "cfg_scale", None) not in (None, 1) else 1
    sampled = FORWARD * record["step"] / options.batch * evaluations * guided  # an image
    pixels = math.prod(sides(options.image_size)) * (64 if getattr(options, "vae", None) else 1)
    drawn = options.sample_count * (sampled + pixels / PIXELS_A_SECOND) if pictures else 0.0
    written = PER_EVENT + checkpoint / BYTES_A_SECOND
    total = record["first"] + (options.steps - step) * record["step"]
    if "draw" not in record:
        total += FIRST_CURVE + (FIRST_SAMPLES if drawn and evaluations else 0.0)
    for name, every, otherwise in (
        ("draw", options.sample_every, PER_EVENT + drawn),
        ("save", options.checkpoint_every, written),
        *(("store", each.every(), written) for each in extensions_of(options) if each.every()),
    ):
        total += events(step, options.steps, every) * record.get(name, otherwise)
    if every := getattr(options, "evaluate_every", 0):
        if "evaluate" not in record:
            total += FIRST_EVALUATION
        otherwise = PER_EVENT + sampled * options.evaluate_count
        is_saved = options.checkpoint_every and every % options.checkpoint_every == 0
        value = record.get("evaluate", otherwise) + record.get("best", 0 if is_saved else written)
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


class ForecastPlan:
    """A run that is to be foreseen.

    sizes: the options of the model's constructor; flops: of a step of all ranks; parameters: their
    number; backend: the GPU, or None; foresee: a function that returns (bytes or None, launches of a
    step), by the planner, called where no run has measured them
    """

    def __init__(
        self, options, sizes, flops, parameters, backend=None, foresee=lambda: (None, 0), ranks=1
    ):
        self.options, self.sizes, self.flops, self.parameters = options, sizes, flops, parameters
        self.backend, self.ranks, self._foresee = backend, ranks, foresee
        self.pictures = options.sample_count and (
            sizes.get("in_channels", 3) in (1, 3) or getattr(options, "vae", None)
        )
        device = getattr(backend, "device_name", None) or options.device
        self.key = key_of(options, sizes, device, ranks)

    @functools.cached_property
    def foreseen(self):
        return self._foresee()

    @property
    def memory(self):
        """Bytes that the planner foresees, or None."""
        return self.foreseen[0]

    def foresee_again(self):
        """Forget what the planner foresaw: loops have been compiled since."""
        self.__dict__.pop("foreseen", None)

    def forecast(self, step=0, elapsed=None):
        """(the line of the run from `step` on, whether it is measured). elapsed: seconds since the
        command began; None: of a dry run, before the command."""
        record = read_measured(self.key)
        if record is not None:
            memory = record.get("memory") or self.memory
            return self.line(record, "measured in a run before", step, memory, elapsed), True
        record = self.estimate
        return self.line(record, "estimated from its arithmetic", step, self.memory, elapsed), False

    @functools.cached_property
    def estimate(self):
        """The record without a measurement."""
        options, flops, launches = self.options, self.flops, 0
        if self.backend is not None:
            model = kinds.get(options.model).laid_out(self.sizes)
            launches = self.foreseen[1]
            if options.recompute != "no":
                recomputed = model.recomputed_flops(options.recompute, options.precision == "fp8")
                flops += options.batch * recomputed
            if found := optimizer_of(options.optimizer):
                flops += self.ranks * found.flops(model)
        return estimated(options, flops / self.ranks, self.backend, launches)

    def is_measured_soon(self, step=0):
        """Whether a run that begins after `step` measures its first steps within seconds."""
        return self.estimate["step"] < SHORT_STEP and self.options.steps - step > 3 * AT_FIRST

    def after_first_steps(self, record, step, elapsed=None):
        """The line once the first steps are measured; elapsed: as of `forecast`."""
        memory = max(record["memory"], self.memory or 0)  # more is needed for what has not come yet
        if elapsed is not None:
            record = {**record, "first": 0.0}  # they are done
        return self.line(record, "measured in the first steps", step, memory, elapsed)

    def line(self, record, how, step, memory, elapsed=None):
        options = self.options
        size = record.get("checkpoint") or checkpoint_bytes(options, self.parameters)
        seconds = seconds_to_the_end(record, options, self.pictures, step, size)
        before = record.get("start", process_age()) if elapsed is None else elapsed
        rest = "" if elapsed is None else f", {say_duration(seconds)} from here"
        return ", ".join(
            [
                f"{say_duration(before + seconds)} from the command to the last picture{rest}, at "
                f"{1e3 * record['step']:.3g} ms a step ({how})",
                f"{(options.steps - step) * options.batch:,} images seen",
                *([f"{memory / 2**20:,.0f} MiB of memory"] if memory else []),
                f"checkpoints of at most {disk_bytes(options, size) / 1e6:,.0f} MB",
            ]
        )


def say_duration(seconds):
    """A duration: 4.2 seconds, 40 seconds, 12 minutes, 3.4 hours, 2.1 days."""
    for limit, unit, name in ((100, 1, "seconds"), (6000, 60, "minutes"), (172800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / unit:.{0 if 19.95 <= seconds < 100 else 1}f} {name}"
    return f"{seconds / 86400:.1f} days"
