"""The emulated GPU: launches kernels, keeps their memory, collects their faults."""
import gc
import linecache
import math
import operator
import re
import sys
import warnings

import numpy as np

from . import cluster as clusters
from . import values
from .asynchronous import Asynchronous
from .faults import Fault, KernelFault, LaunchRefused, Place, Unsupported
from .memory import CONSTANT, GLOBAL, LOCAL, SHARED, Access, Busy, CheckedArray, Memory, plain_array
from .namespace import Resolver
from .rewrite import Sites, rewrite
from .schedule import PATIENCE, Dim3, Scheduler

CHECKS = ("bounds", "uninitialised", "race", "divergence", "float64", "asynchronous")
ORDERS = ("forward", "reversed", "shuffled")
# Limits of a launch: CUDA programming guide, "Compute Capabilities", tables of technical specifications.
MAX_THREADS, MAX_BLOCK, MAX_GRID = 1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535)
STATIC_SHARED = 48 << 10  # bytes of shared memory that arrays of fixed size may take
DYNAMIC_SHARED = {(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227,
                  (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99}  # KiB a block, by capability
STATIC_BASE = 1 << 10  # where shared memory begins in its address space; all of it ends below 2**18, as on a GPU
SITES = Sites()  # of all machines: site numbers are compiled into the rewritten functions
_NAMES = {}  # (id of a code object, instruction) -> (the name that its line assigns to, the code object)
_REWRITTEN = {}  # (id of a code object, checked) -> (the code object, what rewrite gave)


class Float64Warning(UserWarning):
    """A kernel whose arrays are float32 or narrower computes in float64, which most GPUs do 32 to 64 times slower."""


class Emulator:
    """A GPU that is not there. Get one from `numdiff.emulator.device(...)`.

    cc: compute capability; checks: True (all), False (none), or names of CHECKS
    order: in which order threads take their turns; seed: of the order "shuffled"
    on_fault: "raise" a `KernelFault` at the end of a launch that had faults, or "collect" them in `faults`
    float64: whether float64 arithmetic is meant. False: it is a fault. None: it is meant where a kernel is given a
        float64 array; elsewhere, if there is no other fault, it is a `Float64Warning`
    patience: seconds without progress after which a loop that waits is called endless
    """

    def __init__(self, cc=(9, 0), checks=True, order="forward", seed=0, on_fault="raise", float64=None,
                 patience=PATIENCE, recorder=None, tracer=None):
        names = CHECKS if checks is True else () if not checks else (checks,) if isinstance(checks, str) else checks
        unknown = set(names) - set(CHECKS)
        if unknown:
            raise ValueError(f"unknown checks {', '.join(sorted(unknown))}: use some of {', '.join(CHECKS)}.")
        if order not in ORDERS:
            raise ValueError(f"unknown order {order!r}: use {', '.join(ORDERS)}.")
        if on_fault not in ("raise", "collect"):
            raise ValueError(f"unknown on_fault {on_fault!r}: use raise or collect.")
        self.cc = tuple(cc)[:2]
        self.checks, self.checked = frozenset(names), bool(names) or recorder is not None or tracer is not None
        self.order, self.seed, self.on_fault, self.float64, self.patience = order, seed, on_fault, float64, patience
        self.faults = []
        self.stop_at = None  # (block, thread) at which breakpoint() stops; None: the first that comes
        self.recorder, self.tracer = recorder, tracer
        self.thread_index, self.block_index, self.block_dim, self.grid_dim = Dim3(), Dim3(), Dim3(), Dim3()
        self.thread = self.block = self.scheduler = None
        self.stores = 0
        self.token = None  # of the current block: see schedule.Block
        self.kernel = ""
        self.negative_sites, self.spin_sites = set(), SITES.spins
        self.access = Access(self)
        self.asynchronous = Asynchronous(self)
        self.tensor_maps = {}
        self._functions, self._constants, self._memories, self._hosts, self._arguments = {}, {}, {}, {}, []
        self.resolver = Resolver(self)
        self.helpers = self._helpers()

    # functions --------------------------------------------------------------------------------------------------------

    def _helpers(self):
        """The names that rewritten code calls."""
        helpers = {"__turn": lambda weight: self.scheduler.turn(weight), "__here": self._here, "__emulated__": True}
        operations = {f"__{name}": function for name, function in values.OPERATIONS.items()}
        if not self.checked:
            def augment(array, index, operation, value):
                array[index] = operation(array[index], value)
            return {**helpers, **operations, "__augment": augment}
        load, store = self.access.load, self.access.store

        def augment(array, index, operation, value, site):
            store(array, index, operation(load(array, index, site), value, site), site)

        for name in ("Add", "Sub", "Mult", "Div", "FloorDiv", "Mod", "Pow", "BitAnd", "BitOr", "BitXor", "LShift",
                     "RShift"):
            operations[f"__{name}"] = self._checked_operation(values.OPERATIONS[name], name)
        if self.tracer is not None:
            load, store = self.tracer.timed(self, load), self.tracer.timed(self, store)
            operations = {name: self.tracer.timed(self, operation) for name, operation in operations.items()}
        return {**helpers, **operations, "__augment": augment, "__load": load, "__store": store}

    def _checked_operation(self, function, name):
        machine, recorder, float32, float64, signed = self, self.recorder, values.float32, values.float64, values.SIGNED
        quick = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "BitAnd": operator.and_,
                 "BitOr": operator.or_, "BitXor": operator.xor}.get(name)

        def operation(a, b, site):
            result = function(a, b)
            if result.__class__ is float64 and not machine.float64_is_meant:
                machine.report("float64", f"{_type_name(a)} {name.lower()} {_type_name(b)} is float64 arithmetic in a "
                                          "kernel without float64 arrays: type the literals and casts", site)
            if recorder is not None:
                recorder.operation(result, site)
            return result

        # most operations are on two float32, or on two signed integers, which are Python's unless a product wraps
        def quick_operation(a, b, site):
            c, d = a.__class__, b.__class__
            if c is float32 and d is float32 or c in signed and d in signed:
                return quick(a, b)
            return operation(a, b, site)

        def quick_product(a, b, site):
            if a.__class__ is float32 and b.__class__ is float32:
                return quick(a, b)
            if a.__class__ in signed and b.__class__ in signed:
                product = a * b
                if -values.HALF64 <= product < values.HALF64:
                    return product
            return operation(a, b, site)

        if quick is None or recorder is not None:
            return operation
        return quick_product if name == "Mult" else quick_operation

    def function(self, kernel):
        """The emulated function of a `@cuda.jit` kernel, a device function, or a plain Python function."""
        python = getattr(kernel, "py_func", kernel)
        if id(python) in self._functions:
            return self._functions[id(python)][1]
        key = (id(python.__code__), self.checked)
        if key not in _REWRITTEN:
            _REWRITTEN[key] = python.__code__, rewrite(python, SITES, self.checked)
        code, names, constants, negative = _REWRITTEN[key][1]
        self.negative_sites |= negative
        namespace = {**self.helpers, **constants, "__builtins__": __builtins__, "__name__": python.__module__}
        closure = None
        function = type(python)(code, namespace, python.__name__, None,
                                closure if not code.co_freevars else self._cells(python, code))
        self._functions[id(python)] = python, function
        function.__defaults__ = python.__defaults__ and tuple(self.resolver("default", d) for d in python.__defaults__)
        function.__kwdefaults__ = python.__kwdefaults__
        captured = dict(zip(python.__code__.co_freevars, python.__closure__ or (), strict=True))
        for name in names:
            if name in captured:
                namespace[name] = self.resolver(name, captured[name].cell_contents)
            elif name in python.__globals__:
                namespace[name] = self.resolver(name, python.__globals__[name])
            elif name in values.BUILTINS:
                namespace[name] = self.resolver.builtins[name]
        return function

    def _cells(self, python, code):
        """Closure cells for a function whose source is unknown."""
        import types
        captured = dict(zip(python.__code__.co_freevars, python.__closure__, strict=True))
        return tuple(types.CellType(self.resolver(n, captured[n].cell_contents)) for n in code.co_freevars)

    # launching --------------------------------------------------------------------------------------------------------

    def launch(self, kernel, grid, block, *args, shared=0, cluster=1):
        """Run a kernel over NumPy arrays (in place), `EmulatedArray`s and numbers.

        grid, block: an int or up to three; shared: bytes of dynamic shared memory. Faults end in a `KernelFault`.
        cluster: blocks that form one, along each dimension of the grid
        """
        grid, block, cluster = in_three(grid), in_three(block), in_three(cluster)
        python = getattr(kernel, "py_func", kernel)
        self.kernel = python.__name__
        self._refuse(kernel, grid, block, shared, cluster)
        self.dynamic_shared = shared
        for target, source in ((self.grid_dim, grid), (self.block_dim, block)):
            target.x, target.y, target.z = source
        function = self.function(kernel)
        names = python.__code__.co_varnames
        arguments, back = [], []
        for k, value in enumerate(args):
            arguments.append(self.argument(value, names[k] if k < python.__code__.co_argcount else f"argument {k}",
                                           back))
        self.float64_is_meant = self.float64 if self.float64 is not None else any(
            getattr(a, "dtype", None) == np.float64 for a in values.leaves(arguments) if hasattr(a, "shape")) or \
            "float64" not in self.checks
        first = len(self.faults)
        self.seen_faults = {}
        self.block = self.thread = None
        self.scheduler = Scheduler(self, lambda: function(*arguments), block)
        if self.tracer is not None:
            self.tracer.launch(self, grid, block)
        if self.recorder is not None:
            self.recorder.launch(self, grid, block)
        errors, collect = np.seterr(all="ignore"), gc.get_threshold()
        gc.set_threshold(100_000, *collect[1:])  # a launch makes many objects and little garbage
        try:
            self.scheduler.run(((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])),
                               cluster)
        finally:
            self.scheduler.abandon()
            np.seterr(**errors)
            gc.set_threshold(*collect)
            if self.recorder is not None:
                self.recorder.launch_ends()
            if self.tracer is not None:
                self.tracer.launch_ends()
            self._forget()
        for array, data in back:
            array[...] = data
        faults = self.faults[first:]
        if faults and self.on_fault == "raise":
            if self.float64 is None and all(f.kind == "float64" for f in faults):  # slow on a GPU, but not wrong
                for fault in faults:
                    warnings.warn(str(fault), Float64Warning, stacklevel=2)
                return
            del self.faults[first:]
            raise KernelFault(self.kernel, faults)

    def _refuse(self, kernel, grid, block, shared, cluster):
        """Raise where a GPU of this compute capability would not take the launch."""
        threads, name = block[0] * block[1] * block[2], self.kernel
        bound = getattr(kernel, "targetoptions", {}).get("launch_bounds")
        bound = bound[0] if isinstance(bound, (tuple, list)) else bound
        for what, size in (("grid", grid), ("block", block), ("cluster", cluster)):
            if len(size) != 3 or min(size) < 1:
                raise LaunchRefused(f"{name}: {what} {size} must have up to three dimensions, each at least 1.")
        if threads > MAX_THREADS:
            raise LaunchRefused(f"{name}: a block of {threads} threads is more than the {MAX_THREADS} that a GPU "
                                "takes.")
        if bound and threads > bound:
            raise LaunchRefused(f"{name}: a block of {threads} threads is more than the kernel's launch_bounds of "
                                f"{bound}.")
        for what, size, limits in (("block", block, MAX_BLOCK), ("grid", grid, MAX_GRID)):
            for axis, n, limit in zip("xyz", size, limits, strict=True):
                if n > limit:
                    raise LaunchRefused(f"{name}: {what} dimension {axis} is {n}, the limit is {limit}.")
        blocks = cluster[0] * cluster[1] * cluster[2]
        if blocks != 1 and self.cc < (9, 0):
            raise LaunchRefused(f"{name}: there are no clusters on compute capability {self.cc[0]}.{self.cc[1]}.")
        if blocks > clusters.MOST:
            raise LaunchRefused(f"{name}: a cluster of {blocks} blocks; {clusters.MOST} is the limit on every GPU.")
        if any(n % k for n, k in zip(grid, cluster, strict=True)):
            raise LaunchRefused(f"{name}: grid {grid} is not a multiple of the cluster {cluster}.")
        if shared < 0:
            raise LaunchRefused(f"{name}: {shared} bytes of dynamic shared memory.")
        if shared > self.shared_limit:
            raise LaunchRefused(f"{name}: {shared} bytes of dynamic shared memory are more than the "
                                f"{self.shared_limit} that a block has on compute capability "
                                f"{self.cc[0]}.{self.cc[1]}.")

    @property
    def shared_limit(self):
        """Bytes of shared memory that a block may have."""
        return DYNAMIC_SHARED.get(self.cc, 227 if self.cc >= (9, 0) else 48) << 10

    def argument(self, value, name, back):
        """A launch argument as the kernel holds it; arrays that cannot be used in place are noted in `back`."""
        if type(value).__module__ == "numba.cuda.args":  # cuda.In, cuda.Out, cuda.InOut
            value = value.value
        strides = None
        if hasattr(value, "emulated_memory"):
            memory, offset, shape, dtype, *strides = value.emulated_memory()
            strides = strides[0] if strides else None
        elif isinstance(value, np.ndarray):
            if not self.checked:
                return plain_array(value)
            memory, offset, strides = self._host_memory(value, name, back)
            shape, dtype = value.shape, value.dtype
        elif isinstance(value, (tuple, list)):
            names = getattr(value, "_fields", [name] * len(value))
            return getattr(type(value), "_make", tuple)([self.argument(v, n, back)
                                                         for v, n in zip(value, names, strict=True)])
        elif hasattr(value, "copy_to_host") or hasattr(value, "__cuda_array_interface__"):
            raise Unsupported(f"argument {name} lies on a real GPU; give the emulator NumPy arrays or its own.")
        else:
            return values.scalar(value)
        if not self.checked:
            return plain_array(np.ndarray(shape, dtype, memory.bytes, offset, strides))
        made = CheckedArray(self, memory, offset, tuple(shape), np.dtype(dtype), strides, name)
        self._memories[id(memory)] = memory
        self._arguments.append(made)
        return made

    def _host_memory(self, array, name, back):
        """(memory, offset, strides) of a NumPy array; two that share their bytes share a memory too."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        whole = owner if owner.flags.c_contiguous else owner.T
        offset = array.ctypes.data - owner.ctypes.data
        if not whole.flags.c_contiguous or any(n % array.itemsize for n in (offset, *array.strides)):
            data = np.ascontiguousarray(array).reshape(array.shape)
            back.append((array, data))
            return Memory(GLOBAL, data.nbytes, name, data.ctypes.data, data.reshape(-1).view(np.uint8), True), 0, None
        memory = self._hosts.get(id(owner))
        if memory is None:
            data = whole.reshape(-1).view(np.uint8)
            memory = self._hosts[id(owner)] = Memory(GLOBAL, data.nbytes, name, owner.ctypes.data, data, valid=True)
        return memory, offset, array.strides

    def _forget(self):
        """After a launch: what happened to global memory is ordered before all that comes."""
        for memory in self._memories.values():
            memory.writer, memory.reader, memory.busy, memory.released = {}, {}, Busy(), {}
        self._memories, self._hosts, self._arguments = {}, {}, []

    def grid_synchronised(self):
        for memory in self._memories.values():
            memory.writer, memory.reader = {}, {}

    def block_starts(self, block):
        block.static = Memory(SHARED, 0, "static", STATIC_BASE)
        room = max(0, min(STATIC_SHARED, self.shared_limit - self.dynamic_shared))  # for static arrays, not yet known
        block.dynamic = Memory(SHARED, self.dynamic_shared, "dynamic", STATIC_BASE + -(-room // 1024) * 1024)
        block.static.met = block.dynamic.met = len(block.cluster.blocks) > 1

    def block_ends(self, block):
        clusters.block_ends(self, block)
        self.asynchronous.block_ends(block)
        if self.recorder is not None:
            self.recorder.block_ends(block)
        if self.tracer is not None:
            self.tracer.block_ends(block)

    # memory -----------------------------------------------------------------------------------------------------------

    def shared_array(self, shape, dtype, alignment, frame):
        """The block's shared array made at this place of the code (one for all its threads, however often).

        It lies at one address in all blocks of a cluster, whichever makes it first.
        """
        block, key = self.thread.block, (frame.f_code, frame.f_lasti)
        made = block.shared.get(key)
        if made is not None:
            return made
        shape = tuple(int(n) for n in shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        name = _assigned_name(frame)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if shape == (0,):
            memory, offset = block.dynamic, 0
            shape = (self.dynamic_shared // dtype.itemsize,)
        else:
            memory = block.static
            align = max(int(alignment or 0), 16 if size >= 16 else dtype.itemsize)
            offset = block.cluster.offsets.get(key)
            if offset is None:
                offset = block.cluster.offsets[key] = -(-(STATIC_BASE + memory.size) // align) * align - STATIC_BASE
                for each in block.cluster.blocks:
                    each.static.grow(offset + size, STATIC_SHARED)
            if memory.size > STATIC_SHARED:
                raise LaunchRefused(f"{self.kernel}: its shared arrays of fixed size take {memory.size} bytes with "
                                    f"{name}, the limit is {STATIC_SHARED}; take them from dynamic shared memory.")
            if memory.size + self.dynamic_shared > self.shared_limit:
                raise LaunchRefused(f"{self.kernel}: {memory.size} bytes of static and {self.dynamic_shared} of "
                                    f"dynamic shared memory are more than the {self.shared_limit} of a block.")
        if self.checked:
            made = CheckedArray(self, memory, offset, shape, dtype, name=name)
        else:
            data = memory.bytes[offset:offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize]
            if memory is block.static:  # an array of its own, found again by its address
                data = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
                block.state.setdefault("static", []).append((STATIC_BASE + offset, data))
                data = data[:size]
            made = plain_array(data.view(dtype).reshape(shape))
        block.shared[key] = made
        return made

    def element_name(self, memory, offset):
        """Which element of which array of the launch a byte is; None if no array has it."""
        if memory.space == GLOBAL:
            arrays = [(array, "") for array in self._arguments]
        else:
            own = self.thread.block
            arrays = [(array, "" if block is own else f" of block {block.index}") for block in own.cluster.blocks
                      for array in block.shared.values()]
        for array, whose in arrays:
            if getattr(array, "memory", None) is memory:
                rest, at = offset - array.offset, [0] * array.ndim
                for axis in sorted(range(array.ndim), key=lambda k, array=array: -array.strides[k]):
                    if array.strides[axis] > 0:
                        at[axis], rest = divmod(rest, array.strides[axis])
                if 0 <= rest < array.itemsize and all(0 <= i < n for i, n in zip(at, array.shape, strict=True)):
                    return f"{array.name}[{', '.join(str(i) for i in at)}]{whose}"
        return None

    def shared_address(self, array):
        """The address of a shared array's first element in the shared state space."""
        if array.__class__ is CheckedArray:
            return array.memory.address + array.offset
        data = getattr(array, "data", array) if not isinstance(array, np.ndarray) else array
        pointer = data.ctypes.data
        block = self.thread.block
        start = block.dynamic.bytes.ctypes.data
        if start <= pointer < start + max(len(block.dynamic.bytes), 1):
            return block.dynamic.address + pointer - start
        for address, part in block.state.get("static", ()):
            if part.ctypes.data <= pointer < part.ctypes.data + len(part):
                return address + pointer - part.ctypes.data
        raise Unsupported("an address was asked of an array that is not in shared memory.")

    def shared_memory(self, address, block=None):
        """(Memory, offset) of an address in the shared state space of a block (the current one); None outside of it."""
        block, address = block or self.thread.block, int(address)
        if block.dynamic.address <= address:
            memory = block.dynamic
        elif self.checked:
            memory = block.static
        else:
            for start, part in block.state.get("static", ()):
                if start <= address < start + len(part):
                    memory = block.state.setdefault(("memory", start), Memory(SHARED, len(part), "", start, part, True))
                    return memory, address - start
            return None
        offset = address - memory.address
        return (memory, offset) if 0 <= offset < max(memory.size, 1) else None

    def local_array(self, shape, dtype, frame):
        """A thread's local array."""
        shape = tuple(int(n) for n in shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        size = math.prod(shape) * dtype.itemsize
        if not self.checked:
            return plain_array(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))
        return CheckedArray(self, Memory(LOCAL, size, _assigned_name(frame)), 0, shape, dtype)

    def constant_array(self, name, array):
        """A NumPy array that a kernel takes from its module, frozen as Numba freezes it."""
        if not isinstance(array, np.ndarray):
            return array
        key = id(array)
        if key not in self._constants:
            data = np.ascontiguousarray(array).copy()
            if self.checked:
                memory = Memory(CONSTANT, data.nbytes, name, 0, data.reshape(-1).view(np.uint8), valid=True)
                made = CheckedArray(self, memory, 0, data.shape, data.dtype, name=name)
            else:
                data.flags.writeable = False
                made = plain_array(data)
            self._constants[key] = array, made
        return self._constants[key][1]

    # reports ----------------------------------------------------------------------------------------------------------

    def site_here(self):
        """The site of the innermost kernel line that is running."""
        frame = sys._getframe(1)
        while frame is not None and "__emulated__" not in frame.f_globals:
            frame = frame.f_back
        return self.site_of(frame)

    @staticmethod
    def site_of(frame):
        return SITES.number("?", "?", 0) if frame is None else SITES.of(frame)

    def place(self, site, thread=None):
        function, file, line = SITES.places[site]
        return Place(function, file, line, thread and thread.block.index, thread and thread.index)

    def report(self, kind, message, site, thread=None, others=()):
        """Note a fault; the same kind at the same line is counted, not repeated."""
        known = self.seen_faults.get((kind, site))
        if known is not None:
            known.count += 1
            return
        fault = Fault(kind, message, self.place(site, thread or self.thread), list(others), 1, self.kernel)
        self.seen_faults[kind, site] = fault
        self.faults.append(fault)

    def thread_failed(self, thread, error):
        """A Python exception came out of a thread."""
        if isinstance(error, (KernelFault, LaunchRefused)):
            raise error
        site, trace = None, error.__traceback__
        while trace is not None:
            if "__emulated__" in trace.tb_frame.f_globals:
                code = trace.tb_frame.f_code
                site = SITES.number(code.co_name, code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        if isinstance(error, Unsupported):
            raise Unsupported(f"{str(error).rstrip('.')}; used at {self.place(site)}.") from None
        kind = {IndexError: "bounds", ZeroDivisionError: "division"}.get(type(error), "error")
        site = SITES.number("?", "?", 0) if site is None else site
        self.report(kind, f"{type(error).__name__}: {error}", site, thread)

    def _here(self):
        """Whether breakpoint() stops in this thread."""
        if self.stop_at is None:
            self.stop_at = self.thread.block.index, self.thread.index
        return self.stop_at == (self.thread.block.index, self.thread.index)

    def absent_lane(self, name, thread, lane):
        block = thread.block
        other = next((t for t in block.warp_threads(thread.warp) if t.lane == lane), None)
        why = "does not exist" if other is None else "has ended" if other.done else "is not in the mask"
        self.report("divergence", f"{name}: lane {thread.lane} takes a value from lane {lane}, which {why}",
                    self.site_of(thread.wait[2] if thread.wait else self._frame_here()), thread)

    @staticmethod
    def _frame_here():
        frame = sys._getframe(1)
        while frame is not None and "__emulated__" not in frame.f_globals:
            frame = frame.f_back
        return frame

    def check_meeting(self, block, name, arrived, count):
        """A barrier is complete: did all the threads come to it, and to the same one?"""
        if "divergence" not in self.checks or count is not None:
            return
        thread, _, first, *_ = arrived[0]
        if block.alive < len(block.threads):
            gone = next(t for t in block.threads if t.done)
            self.report("divergence", f"{name} is reached by {block.alive} of the block's {len(block.threads)} "
                                      f"threads: thread {gone.index} has ended before it", self.site_of(first), thread)
        for other, _, frame, *_ in arrived:
            if frame is not first and not _same_call(frame, first):
                self.report("divergence", f"thread {thread.index} waits at this {name}, thread {other.index} at "
                            "another", self.site_of(first), thread,
                            [("the other is", self.place(self.site_of(frame), other))])
                return

    def check_gathering(self, name, mask, lanes):
        """A warp operation is complete: was it the same one for all?"""
        if "divergence" not in self.checks:
            return
        (_, first, thread, _), *others = lanes.values()
        for _, frame, other, _ in others:
            if not _same_call(frame, first):
                self.report("divergence", f"lane {thread.lane} is at this {name}, lane {other.lane} at another",
                            self.site_of(first), thread, [("the other is", self.place(self.site_of(frame), other))])
                return

    def stuck(self, scheduler):
        """Nobody can go on: report who waits where, and for what."""
        waiting = [t for b in scheduler.blocks for t in b.threads if not t.done and t.wait is not None]
        groups = {}
        for thread in waiting:
            wait = thread.wait
            groups.setdefault((wait[0], self.site_of(wait[2]), str(wait[1])), []).append(thread)

        def say(key, threads):
            kind, site, detail = key
            more = f" and {len(threads) - 1} more" if len(threads) > 1 else ""
            what = {"loop": "turns in a loop", "warp operation": "waits for its warp"}.get(kind, "waits")
            return f"thread {threads[0].index} of block {threads[0].block.index}{more} {what}" \
                   f"{' at ' + self._say_wait(threads[0].wait) if kind != 'loop' else ''}:", self.place(site)

        def deadlock(key):
            thread = groups[key][0]
            self.report("deadlock", f"no thread can go on: {self._say_wait(thread.wait)}", key[1], thread, others)

        others = [say(key, threads) for key, threads in groups.items()]
        at_mbarrier = next((key for key in groups if key[0] == "mbarrier"), None)
        if at_mbarrier is not None:  # for whom others wait, at a barrier of the warp, the block or the cluster
            deadlock(at_mbarrier)
        for block in scheduler.blocks:
            for (warp, name, mask), lanes in block.collectives.items():
                missing = [t for t in block.warp_threads(warp) if mask >> t.lane & 1 and t.lane not in lanes
                           and not t.done]
                _, frame, thread, _ = next(iter(lanes.values()))
                names = ", ".join(str(t.lane) for t in missing)
                self.report("divergence", f"{name} with the mask {mask:#x} waits for lane{'s' * (len(missing) > 1)} "
                                          f"{names}, which never come{'s' * (len(missing) == 1)}", self.site_of(frame),
                            thread, others)
            barriers = dict(block.arrived)
            if block.waiting:
                barriers["syncthreads"] = [(t, None, t.wait[2], None, None) for t in block.waiting]
            for name, arrived in barriers.items():
                thread, _, frame, _, count = arrived[0]
                self.report("divergence", f"{name} is reached by {len(arrived)} of {count or block.alive} threads, the "
                                          "others never come", self.site_of(frame), thread, others)
        if not any(f.kind in ("divergence", "deadlock") for f in self.seen_faults.values()) and waiting:
            deadlock(next((key for key in groups if key[0] != "loop"), next(iter(groups))))

    @staticmethod
    def _say_wait(wait):
        if wait[0] == "loop":
            return "a loop waits for something that never comes"
        if wait[0] == "warp operation":
            return f"{wait[1][0]} with the mask {wait[1][1]:#x}"
        return str(wait[1])


def _same_call(frame, other):
    """Whether two threads are at the same call, reached through the same calls of device functions."""
    while frame.f_lasti == other.f_lasti and frame.f_code is other.f_code:
        frame, other = frame.f_back, other.f_back
        if frame is None or other is None or "__emulated__" not in frame.f_globals:
            return True
    return False


def in_three(size):
    """A grid, block or cluster as a tuple of three."""
    size = tuple(int(n) for n in size) if isinstance(size, (tuple, list)) else (int(size),)
    return size + (1,) * (3 - len(size))


def _type_name(value):
    return {int: "int64", float: "float64"}.get(value.__class__, value.__class__.__name__.lower())


def _assigned_name(frame):
    """The name to which the line of a frame assigns, for messages."""
    key = id(frame.f_code), frame.f_lasti
    if key not in _NAMES:
        found = re.match(r"\s*(\w+)\s*=", linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        _NAMES[key] = found.group(1) if found else "array", frame.f_code
    return _NAMES[key][0]
