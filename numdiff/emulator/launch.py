"""The emulated GPU: launches kernels.

What a kernel calls is in linking.py, what it is given in arguments.py, its memory in
memory_spaces.py, the reports of its faults in reports.py.
"""

import functools
import gc
import operator
import warnings

import numpy as np

from . import cluster as clusters
from . import values
from .access import Access
from .arguments import Arguments
from .asynchronous import Asynchronous
from .faults import KernelFault, LaunchRefused
from .generators import GeneratorScheduler
from .integers import magnitude_of
from .linking import Linking
from .loops import PATIENCE
from .memory import Busy
from .memory_spaces import MemorySpaces
from .namespace import Resolver
from .reports import Reports
from .rewrite import SITES
from .schedule import Scheduler
from .signatures import convert_arguments, is_hint
from .threads import Dim3, greenlet
from .weak_table import WeakTable

CHECKS = (
    "bounds",
    "negative",
    "uninitialised",
    "race",
    "unchanged",
    "divergence",
    "float64",
    "asynchronous",
)
STRICT = ("equal",)  # checks of what may be meant: two threads write the same value on one line
LEVELS = {
    "relaxed": tuple(name for name in CHECKS if name not in ("negative", "unchanged")),
    "strict": CHECKS + STRICT,
}
ORDERS = ("forward", "reversed", "shuffled")
# Limits of a launch: CUDA programming guide, "Compute Capabilities", tables of technical
# specifications.
MAX_THREADS, MAX_BLOCK, MAX_GRID = 1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535)


class Float64Warning(UserWarning):
    """A kernel whose arrays are float32 or narrower computes in float64, which most GPUs do 32 to
    64 times slower."""


def has_float64(dtype):
    """Whether the elements of an array of this type are float64, or have some in them."""
    if not isinstance(dtype, np.dtype):
        return False
    if dtype.names:
        return any(has_float64(dtype.fields[name][0].base) for name in dtype.names)
    return dtype in (np.float64, np.complex128)


def _is_capability(cc):
    return (
        isinstance(cc, (tuple, list)) and len(cc) >= 2 and all(isinstance(n, int) for n in cc[:2])
    )


class Emulator(Linking, Arguments, MemorySpaces, Reports):
    """An emulated GPU. Get one from `numdiff.emulator.device(...)`.

    cc: compute capability
    checks: True (CHECKS), False (none), or names of CHECKS and STRICT; "relaxed": a negative index
        counts from the end, as compiled, and a write that leaves a value as it is (`unchanged`)
        races with none; "strict": CHECKS and STRICT
    order: in which order threads take their turns; seed: of the order "shuffled"
    on_fault: "raise" a `KernelFault` at the end of a launch that had faults, or "collect" them in
    `faults`
    float64: whether float64 arithmetic is meant. False: it is a fault. None: it is meant where a
        kernel is given a float64 array; elsewhere, if there is no other fault, it is a
        `Float64Warning`
    patience: seconds without progress after which a waiting loop is called endless
    """

    generators = greenlet is None  # whether threads are generators, not greenlets

    def __init__(
        self,
        cc=(9, 0),
        checks=True,
        order="forward",
        seed=0,
        on_fault="raise",
        float64=None,
        patience=PATIENCE,
        recorder=None,
        film=None,
    ):
        names = (
            CHECKS
            if checks is True
            else ()
            if not checks
            else LEVELS.get(checks, (checks,))
            if isinstance(checks, str)
            else checks
        )
        unknown = set(names) - set(LEVELS["strict"])
        if unknown:
            raise ValueError(
                f"unknown checks {', '.join(sorted(unknown))}: "
                f"use some of {', '.join(CHECKS + STRICT)}, or "
                "relaxed or strict."
            )
        if order not in ORDERS:
            raise ValueError(f"unknown order {order!r}: use {', '.join(ORDERS)}.")
        if on_fault not in ("raise", "collect"):
            raise ValueError(f"unknown on_fault {on_fault!r}: use raise or collect.")
        for wrong, text in (
            (not _is_capability(cc), f"cc {cc!r} must be a compute capability, such as (9, 0)."),
            (
                not isinstance(patience, (int, float)) or not patience > 0,
                f"patience {patience!r} must be seconds, above 0.",
            ),
            (
                float64 not in (None, True, False),
                f"float64 {float64!r} must be True, False or None.",
            ),
            (
                recorder is not None and not hasattr(recorder, "count_functions"),
                "recorder must be an emulator.Recorder().",
            ),
            (
                film is not None and not hasattr(film, "block_starts"),
                f"trace {film!r} must be True or an emulator.Film().",
            ),
        ):
            if wrong:
                raise ValueError(text)
        self.cc = tuple(cc)[:2]
        self.checks, self.checked = (
            frozenset(names),
            bool(names) or recorder is not None or film is not None,
        )
        self.order, self.seed, self.on_fault, self.float64, self.patience = (
            order,
            seed,
            on_fault,
            float64,
            patience,
        )
        self.faults = []
        # (block, thread) at which breakpoint() stops; None: the first that comes
        self.stop_at = None
        self.recorder, self.film = recorder, film
        self.noted_access = _each(
            [getattr(note, "access", None) for note in (recorder, film) if note is not None]
        )
        self.thread_index, self.block_index, self.block_dim, self.grid_dim = (
            Dim3(),
            Dim3(),
            Dim3(),
            Dim3(),
        )
        self.thread = self.block = self.scheduler = None
        self.stores = self.launches = 0
        self.token = None  # of the current block: see schedule.Block
        self.lone = False  # whether each block is a separate cluster
        self.kernel, self.entry = "", None  # the kernel's name, its code
        self.negative_sites, self.spin_sites = set(), SITES.spins
        self.access = Access(self)
        self.asynchronous = Asynchronous(self)
        self._functions = WeakTable()  # a function -> {magnitudes: the emulated one}
        # an array that kernels find outside of themselves -> as a kernel has it: the host's are
        # constants
        self._constants, self._captured = WeakTable(), WeakTable()
        self._memories, self._hosts, self._arguments = {}, {}, []
        self.resolver = Resolver(self)
        self.helpers = self._helpers()

    # launching ------------------------------------------------------------------------------------

    def launch(self, kernel, grid, block, *args, shared=0, cluster=1):
        """Run a kernel on NumPy arrays (in place), `EmulatedArray`s and numbers.

        grid, block: an int or up to three; shared: bytes of dynamic shared memory. Faults end in a
        `KernelFault`.
        cluster: its size in blocks, along each dimension of the grid
        """
        python = getattr(kernel, "py_func", kernel)
        self.kernel = python.__name__
        grid, block, cluster = (
            in_three(size, f"{self.kernel}: {what}")
            for size, what in ((grid, "grid"), (block, "block"), (cluster, "cluster"))
        )
        self._refuse(kernel, grid, block, shared, cluster)
        self._refuse_arguments(kernel, python, args)
        args, hinted = convert_arguments(kernel, args), args
        self.dynamic_shared, self.lone = shared, cluster == (1, 1, 1)
        for target, source in ((self.grid_dim, grid), (self.block_dim, block)):
            target.x, target.y, target.z = source
        names = python.__code__.co_varnames
        arguments, back = [], []
        for k, (value, hint) in enumerate(zip(args, hinted, strict=True)):
            value = hint if is_hint(hint) else value
            arguments.append(
                self.argument(
                    value, names[k] if k < python.__code__.co_argcount else f"argument {k}", back
                )
            )
        function = self.function(kernel, tuple(map(magnitude_of, arguments)))
        self.entry = function.__code__
        for made in self._captured.values():
            self._memories[id(made.memory)] = made.memory
        self.float64_is_meant = (
            self.float64
            if self.float64 is not None
            else any(
                not isinstance(a, np.generic) and has_float64(getattr(a, "dtype", None))
                for a in values.leaves(arguments)
            )
            or "float64" not in self.checks
        )
        first, self.launches = len(self.faults), self.launches + 1
        self.seen_faults = {}
        self.block = self.thread = None
        scheduler = GeneratorScheduler if self.generators else Scheduler
        self.scheduler = scheduler(self, calling(function, arguments), block)
        if self.film is not None:
            self.film.launch(self, grid, block)
        if self.recorder is not None:
            self.recorder.launch(self, grid, block)
        errors, collects = np.seterr(all="ignore"), gc.isenabled()
        # a launch makes millions of objects and few cycles; to look for those takes a tenth of its
        # time
        gc.disable()
        try:
            self.scheduler.run(grid, cluster)
        finally:
            self.scheduler.abandon()
            np.seterr(**errors)
            if collects:
                gc.enable()
            if self.recorder is not None:
                self.recorder.launch_ends()
            if self.film is not None:
                self.film.launch_ends()
            self._forget()
        for array, data in back:
            array[...] = data
        faults = self.faults[first:]
        if faults:
            frame = self.calling_frame()
            for fault in faults:
                fault.launched = self.line_of(frame)
        if faults and self.on_fault == "raise":
            # slow on a GPU, but not wrong
            if self.float64 is None and all(f.kind == "float64" for f in faults):
                for fault in faults:
                    warnings.warn_explicit(
                        str(fault),
                        Float64Warning,
                        frame.f_code.co_filename,
                        frame.f_lineno,
                        registry=frame.f_globals.setdefault("__warningregistry__", {}),
                    )
                return
            del self.faults[first:]
            raise KernelFault(self.kernel, faults)

    def _refuse(self, kernel, grid, block, shared, cluster):
        """Raise where a GPU of this compute capability would refuse the launch."""
        threads, name = block[0] * block[1] * block[2], self.kernel
        bound = getattr(kernel, "targetoptions", {}).get("launch_bounds")
        bound = bound[0] if isinstance(bound, (tuple, list)) else bound
        for what, size in (("grid", grid), ("block", block), ("cluster", cluster)):
            if len(size) != 3 or min(size) < 1:
                raise LaunchRefused(
                    f"{name}: {what} {size} must have up to three dimensions, each at least 1."
                )
        if threads > MAX_THREADS:
            raise LaunchRefused(
                f"{name}: a block of {threads} threads is more than the {MAX_THREADS} that a GPU "
                "takes."
            )
        if bound and threads > bound:
            raise LaunchRefused(
                f"{name}: a block of {threads} threads is more than the kernel's launch_bounds of "
                f"{bound}."
            )
        for what, size, limits in (("block", block, MAX_BLOCK), ("grid", grid, MAX_GRID)):
            for axis, n, limit in zip("xyz", size, limits, strict=True):
                if n > limit:
                    raise LaunchRefused(
                        f"{name}: {what} dimension {axis} is {n}, the limit is {limit}."
                    )
        blocks = cluster[0] * cluster[1] * cluster[2]
        if blocks != 1 and self.cc < (9, 0):
            raise LaunchRefused(
                f"{name}: there are no clusters on compute capability {self.cc[0]}.{self.cc[1]}."
            )
        if blocks > clusters.MAX_BLOCKS:
            raise LaunchRefused(
                f"{name}: a cluster of {blocks} blocks; {clusters.MAX_BLOCKS} is the limit on "
                "every GPU."
            )
        if any(n % k for n, k in zip(grid, cluster, strict=True)):
            raise LaunchRefused(f"{name}: grid {grid} is not a multiple of the cluster {cluster}.")
        if shared < 0:
            raise LaunchRefused(f"{name}: {shared} bytes of dynamic shared memory.")
        if shared > self.shared_limit:
            raise LaunchRefused(
                f"{name}: {shared} bytes of dynamic shared memory are more than the "
                f"{self.shared_limit} that a block has on compute capability "
                f"{self.cc[0]}.{self.cc[1]}."
            )

    def _forget(self):
        """After a launch: what it did to global memory is ordered before all that follows."""
        for memory in self._memories.values():
            memory.forget()
            memory.busy, memory.released = Busy(), {}
        self._memories, self._hosts, self._arguments = {}, {}, []
        self.scheduler = self.block = self.thread = None  # which have the arguments

    def grid_synchronised(self):
        for memory in self._memories.values():
            memory.forget()

    def block_ends(self, block):
        clusters.block_ends(self, block)
        self.asynchronous.block_ends(block)
        if self.recorder is not None:
            self.recorder.block_ends(block)


def _each(functions):
    """One function that calls all of these; None for none."""
    if len(functions) < 2:
        return functions[0] if functions else None

    def call(*arguments):
        for function in functions:
            function(*arguments)

    return call


def calling(function, arguments):
    """A function that calls another one with these arguments, each by a name of its own: `*arguments`
    would put a further frame on the interpreter's stack, which is copied whenever threads switch."""
    names = [f"argument_{k}" for k in range(len(arguments))]
    namespace = {"function": function, **dict(zip(names, arguments, strict=True))}
    return eval(_calling_text(len(names)), namespace)


@functools.cache
def _calling_text(count):
    names = ", ".join(f"argument_{k}" for k in range(count))
    return compile(f"lambda: function({names})", "<launch>", "eval")


def in_three(size, what="size"):
    """A grid, block or cluster as a tuple of three."""
    try:
        size = tuple(
            operator.index(n) for n in (size if isinstance(size, (tuple, list)) else (size,))
        )
    except TypeError:
        raise LaunchRefused(
            f"{what} {size} must be whole numbers: divide with //; -(-n // d) rounds up."
        ) from None
    return size + (1,) * (3 - len(size))
