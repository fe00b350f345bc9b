"""A kernel's cost, counted while it runs: for each source line, and in all.

    recorder = emulator.count(kernel, grid, block, x, y)          # or Recorder() given to emulator.device(recorder=…)
    print(recorder.table())
    recorder.total("kernel").sectors

WHAT IS COUNTED, for each line of source
    reads, writes       elements and bytes of each memory space; an atomic operation counts as one write
    FLOPs               add, subtract, multiply and divide 1, fused multiply-add 2, by the type of the result. Negation,
                        absolute value, minimum, maximum, comparison and conversion count nothing, nor does what a
                        compiler computes in advance (an expression of constants)
    special functions   square roots, exponentials, logarithms, trigonometry: one each, whatever its instructions
    integer operations  in addition to the FLOPs; a compiler may remove many of them (address arithmetic)
    tensor-core FLOPs   2·M·N·K of each matrix instruction
    global memory       requests, one for each instruction of each warp, and the sectors of 32 bytes that they move
    shared memory       requests, and the wavefronts that they take, more of them with bank conflicts. What TMA and
                        wgmma read and write there is not counted
    distinct bytes      of global memory that a launch reads or writes at all: what must move even with perfect caches

WHICH LANES BELONG TO ONE REQUEST
    Threads run one after another here, so a warp's request is put together afterwards: the k-th
    execution of an instruction by each of its lanes, counted from zero after each barrier of the
    block. A GPU does the same where lanes leave a loop early, but not where they run nested loops a
    different number of times.

A global array's first byte counts as aligned to 256 bytes, as the driver's arrays are. What sectors
and wavefronts a request takes says warp_requests.py; count_table.py makes the table.
"""

import dataclasses
import linecache
import sys
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from .count_table import as_table
from .launch import Emulator
from .memory import GLOBAL, SHARED
from .rewrite import SITES
from .threads import WARP
from .values import FLOATS, float16, float32, float64
from .warp_requests import SECTOR, count_sectors, count_wavefronts

# accesses of one lane after which a stream is evaluated at the next barrier, to keep memory small
LONG = 1 << 14
NAMES = {float16: "float16", float32: "float32", float64: "float64"}
SPECIAL = frozenset(
    """sqrt rsqrt cbrt rcp exp expm1 exp2 exp10 log log1p log2 log10 sin cos tan asin acos atan atan2
    sinh cosh tanh asinh acosh atanh erf erfc gamma lgamma tgamma pow hypot fmod remainder sinpi cospi""".split()
)
ONE_FLOP = frozenset("add sub mul div fdividef fadd fsub fmul fdiv dadd dmul ddiv".split())


@dataclass
class Figures:
    """Counters of one line, or of a sum of lines; 0 for events that never occurred."""

    reads: Counter = field(default_factory=Counter)  # memory space -> elements
    read_bytes: Counter = field(default_factory=Counter)
    writes: Counter = field(default_factory=Counter)
    write_bytes: Counter = field(default_factory=Counter)
    flops: Counter = field(default_factory=Counter)  # "float16", "float32", "float64" -> FLOPs
    special: int = 0
    integer: int = 0
    tensor_flops: int = 0
    requests: int = 0  # to global memory, of warps
    sectors: int = 0
    ideal_sectors: int = 0
    shared_requests: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    distinct_read_bytes: int = 0  # of global memory; in totals only
    distinct_write_bytes: int = 0

    @property
    def total_flops(self):
        """FLOPs of all types outside the tensor cores, without special functions."""
        return sum(self.flops.values())

    @property
    def efficiency(self):
        """Ideal sectors over sectors; 1 where nothing was moved."""
        return self.ideal_sectors / self.sectors if self.sectors else 1.0

    @property
    def per_request(self):
        """Sectors, the transactions of global memory, for each request of a warp; 0 without
        requests."""
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def conflicts(self):
        """Wavefronts of shared memory beyond those that the size of the accesses asks for."""
        return self.wavefronts - self.ideal_wavefronts

    @property
    def global_bytes(self):
        """Bytes of global memory that were requested, read and written."""
        return self.read_bytes[GLOBAL] + self.write_bytes[GLOBAL]

    @property
    def distinct_bytes(self):
        """Bytes of global memory that each launch read, and those that it wrote."""
        return self.distinct_read_bytes + self.distinct_write_bytes

    def add(self, other):
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, f.name, mine + theirs)


class Launch:
    """The figures of one launch: `lines[site]`, and which bytes of which memory it touched."""

    def __init__(self, kernel, grid, block):
        self.kernel, self.grid, self.block = kernel, grid, block
        self.lines = defaultdict(Figures)
        self.touched = {}  # global Memory -> (bytes read, bytes written), two masks
        self.distinct = (0, 0)


class Recorder:
    """Counts what the launches of an emulator do; one recorder may see several launches and
    emulators."""

    def __init__(self):
        self.launches = []
        self.machine = None
        self._operations, self._special, self._warps, self._token, self._blocks = (
            {},
            {},
            None,
            None,
            [],
        )

    # hooks of the emulator ------------------------------------------------------------------------

    @staticmethod
    def count_functions(resolver):
        """Replace a machine's `math`, `numpy`, `libdevice` and the functions of `cuda` with counted
        ones."""
        machine, cuda = resolver.machine, resolver.cuda.__dict__
        resolver.math = CountedFunctions(machine, resolver.math)
        resolver.numpy = CountedFunctions(machine, resolver.numpy)
        resolver.libdevice = cuda["libdevice"] = CountedFunctions(machine, resolver.libdevice)
        cuda["fp16"] = CountedFunctions(machine, cuda["fp16"], half=True)
        cuda["fma"], cuda["cbrt"] = (
            counted(machine, cuda["fma"], "fma"),
            counted(machine, cuda["cbrt"], "special"),
        )

    def launch(self, machine, grid, block):
        """A launch begins."""
        self.machine = machine
        self.launches.append(Launch(machine.kernel, grid, block))
        self._operations, self._special = defaultdict(int), defaultdict(int)
        self._warps = self._token = None
        self._blocks = []

    def access(self, memory, offset, size, site, writes, step=0):
        """The current thread reads or writes `size` bytes, elements of `step` bytes (0: one
        element)."""
        machine = self.machine
        if machine.token is not self._token:
            self._resume()
        frame = sys._getframe(2)
        while frame is not None and "__emulated__" not in frame.f_globals:
            frame = frame.f_back
        key = (
            site,
            -1 if frame is None else frame.f_lasti,
            memory if memory.shadowed else memory.space,
            size,
            step,
            writes,
        )
        thread = machine.thread
        warp = self._warps[thread.warp]
        lanes = warp.get(key)
        if lanes is None:
            lanes = warp[key] = [array("q") for _ in range(WARP)]
        lanes[thread.lane].append(offset)

    def operation(self, result, site):
        """An arithmetic operation: one FLOP, or one integer operation, by the type of its result."""
        self._operations[site, result.__class__] += 1

    def fma(self, result, site):
        """A fused multiply-add: two FLOPs."""
        self._operations[site, result.__class__] += 2

    def special(self, result, site):
        """A special function."""
        self._special[site] += 1

    def tensor(self, flops, site):
        """FLOPs of a matrix instruction; call it once for all threads that execute it together."""
        self.launches[-1].lines[site].tensor_flops += flops

    def request(self, memory, offsets, size, site, writes=False, step=0):
        """A warp's instruction whose lanes access `size` bytes at these offsets (for `ldmatrix` and
        its kin)."""
        lanes = np.full((WARP, 1), -1, np.int64)
        lanes[: len(offsets), 0] = offsets
        self._evaluate(
            self.launches[-1].lines[site], memory, lanes, len(offsets), size, step, writes
        )

    def bulk(self, memory, runs, site, writes):
        """TMA moves bytes of global memory: runs of neighbours, as (offset, bytes) pairs."""
        figures = self.launches[-1].lines[site]
        total = sum(size for _, size in runs)
        (figures.write_bytes if writes else figures.read_bytes)[GLOBAL] += total
        figures.requests += 1
        figures.sectors += sum(
            (offset + size - 1) // SECTOR - offset // SECTOR + 1 for offset, size in runs if size
        )
        figures.ideal_sectors += -(-total // SECTOR)
        mask = self._mask(memory, writes)
        for offset, size in runs:
            mask[offset : offset + size] = True

    def block_ends(self, block):
        """A block has ended: its accesses are put together into requests."""
        for warp in block.state.pop("accesses", ()):
            for key, lanes in warp.items():
                self._take(key, lanes)
        if block in self._blocks:
            self._blocks.remove(block)
        self._token = None

    def launch_ends(self):
        """A launch has ended, or was abandoned."""
        launch = self.launches[-1]
        for block in list(self._blocks):
            self.block_ends(block)
        for (site, kind), count in self._operations.items():
            if kind in FLOATS:
                launch.lines[site].flops[NAMES[kind]] += count
            elif issubclass(kind, (int, np.bool_)):
                launch.lines[site].integer += count
        for site, count in self._special.items():
            launch.lines[site].special += count
        launch.distinct = tuple(
            sum(int(np.count_nonzero(masks[k])) for masks in launch.touched.values())
            for k in (0, 1)
        )
        launch.touched = {}

    # from accesses to requests --------------------------------------------------------------------

    def _resume(self):
        """Another block runs, or this one comes from a barrier; all accesses before a barrier are
        complete."""
        machine = self.machine
        block, self._token = machine.block, machine.token
        state = block.state
        if "accesses" not in state:
            state["accesses"] = [{} for _ in range(-(-len(block.threads) // WARP))]
            self._blocks.append(block)
        elif state["counted"] is not block.token:
            for warp in state["accesses"]:
                self._align(warp)
        state["counted"] = block.token
        self._warps = state["accesses"]

    def _align(self, warp):
        """Mark lanes that did not take part in an instruction's last requests as absent from them."""
        done = []
        for key, lanes in warp.items():
            lengths = [len(lane) for lane in lanes]
            longest = max(lengths)
            if longest > LONG:
                done.append(key)
            elif min(lengths) < longest:
                for lane, length in zip(lanes, lengths, strict=True):
                    if length < longest:
                        lane.extend([-1] * (longest - length))
        for key in done:
            self._take(key, warp.pop(key))

    def _take(self, key, lanes):
        """Evaluate a stream: row = lane, column = request."""
        site, _, memory, size, step, writes = key
        longest = max(len(lane) for lane in lanes)
        offsets = np.full((WARP, longest), -1, np.int64)
        for row, lane in zip(offsets, lanes, strict=True):
            row[: len(lane)] = lane
        self._evaluate(
            self.launches[-1].lines[site],
            memory,
            offsets,
            int((offsets >= 0).sum()),
            size,
            step,
            writes,
        )

    def _evaluate(self, figures, memory, offsets, accesses, size, step, writes):
        space = getattr(memory, "space", memory)
        (figures.writes if writes else figures.reads)[space] += accesses * (
            size // step if step else 1
        )
        (figures.write_bytes if writes else figures.read_bytes)[space] += accesses * size
        if space == GLOBAL:
            sectors, ideal = count_sectors(offsets, size)
            figures.requests += offsets.shape[1]
            figures.sectors += int(sectors.sum())
            figures.ideal_sectors += int(ideal.sum())
            mask = self._mask(memory, writes)
            starts = np.unique(offsets)
            starts = starts[starts >= 0]
            for byte in range(size):
                mask[starts + byte] = True
        elif space == SHARED:
            waves, ideal = count_wavefronts(
                np.where(offsets < 0, -1, offsets + memory.address), size
            )
            figures.shared_requests += offsets.shape[1]
            figures.wavefronts += int(waves.sum())
            figures.ideal_wavefronts += int(ideal.sum())

    def _mask(self, memory, writes):
        touched = self.launches[-1].touched
        if memory not in touched:
            touched[memory] = np.zeros(len(memory.bytes), bool), np.zeros(len(memory.bytes), bool)
        return touched[memory][int(writes)]

    # results --------------------------------------------------------------------------------------

    @property
    def kernels(self):
        """Names of the kernels that were launched, in the order of their first launch."""
        return list(dict.fromkeys(launch.kernel for launch in self.launches))

    def lines(self, kernel=None):
        """{(file, line): Figures}, summed over the launches of one kernel, or of all."""
        found = {}
        for launch in self._of(kernel):
            for site, figures in launch.lines.items():
                found.setdefault(SITES.places[site][1:], Figures()).add(figures)
        return dict(sorted(found.items()))

    def line(self, text, kernel=None):
        """The figures of the lines whose source contains `text`, summed; LookupError if there is
        none."""
        found = [
            figures
            for place, figures in self.lines(kernel).items()
            if text in linecache.getline(*place)
        ]
        if not found:
            raise LookupError(f"no line with {text!r} was counted.")
        return _sum(found)

    def total(self, kernel=None):
        """The figures of all lines, with the distinct bytes of each launch."""
        total = _sum(self.lines(kernel).values())
        for launch in self._of(kernel):
            total.distinct_read_bytes += launch.distinct[0]
            total.distinct_write_bytes += launch.distinct[1]
        return total

    def _of(self, kernel):
        found = [launch for launch in self.launches if kernel is None or launch.kernel == kernel]
        if not found:
            raise LookupError(
                f"no launch of {kernel or 'any kernel'} was counted"
                + (f", only of {', '.join(self.kernels)}." if self.launches else ".")
            )
        return found

    def table(self, kernel=None, width=60, brief=False):
        """A text table for each kernel: file and line, source cut to `width` characters, and what
        is not zero.

        brief: only requests, transactions per request, bank conflicts and FLOPs, of the lines that
        have any
        """
        return "\n\n".join(
            as_table(name, self._of(name), self.lines(name), self.total(name), width, brief)
            for name in ([kernel] if kernel else self.kernels)
        )


def _sum(many):
    total = Figures()
    for figures in many:
        total.add(figures)
    return total


# Functions ----------------------------------------------------------------------------------------


def _weight(name, half):
    """The cost class of a function of this name: "special", "fma", "flop" or None."""
    name = name.removeprefix("h") if half else name.removeprefix("fast_").removesuffix("_rn")
    for base in (name, name.removesuffix("f"), name.removesuffix("f").removesuffix("_rn")):
        if base in SPECIAL:
            return "special"
        if base in ONE_FLOP:
            return "flop"
        if base == "fma":
            return "fma"
    return None


class CountedFunctions:
    """A namespace whose functions are counted when they are called."""

    def __init__(self, machine, namespace, half=False):
        self._machine, self._namespace, self._half = machine, namespace, half

    def __getattr__(self, name):
        value = getattr(self._namespace, name)
        weight = _weight(name, self._half) if callable(value) else None
        if weight is not None:
            value = counted(self._machine, value, weight)
        self.__dict__[name] = value
        return value


def counted(machine, function, weight):
    """`function`, counted as "special", "fma" or "flop"."""
    recorder = machine.recorder
    count = {"special": recorder.special, "fma": recorder.fma, "flop": recorder.operation}[weight]

    def call(*arguments):
        result = function(*arguments)
        count(result, machine.site_here())
        return result

    return call


def count(kernel, grid, block, *args, shared=0, cluster=1, **options):
    """Run a kernel once and return the `Recorder` that counted it; options are those of
    `emulator.device`."""
    recorder = Recorder()
    Emulator(recorder=recorder, **options).launch(
        kernel, grid, block, *args, shared=shared, cluster=cluster
    )
    return recorder
