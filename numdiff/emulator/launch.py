"""The emulated GPU: launches kernels. Its memory is in memory_spaces.py, its reports of faults in reports.py."""
import gc
import inspect
import operator
import warnings

import numpy as np

from . import arithmetic, functions, values
from . import cluster as clusters
from .access import Access
from .arrays import CheckedArray, Record, plain_array
from .asynchronous import Asynchronous
from .faults import KernelFault, LaunchRefused, Unsupported
from .integers import holds, magnitude_of
from .loops import PATIENCE
from .memory import GLOBAL, Busy, Memory
from .memory_spaces import MemorySpaces
from .namespace import Resolver
from .reports import Reports
from .rewrite import SITES, rewrite
from .schedule import Scheduler
from .threads import Dim3

CHECKS = ("bounds", "uninitialised", "race", "divergence", "float64", "asynchronous")
ORDERS = ("forward", "reversed", "shuffled")
# Limits of a launch: CUDA programming guide, "Compute Capabilities", tables of technical specifications.
MAX_THREADS, MAX_BLOCK, MAX_GRID = 1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535)
VARARGS = inspect.CO_VARARGS
_REWRITTEN = {}  # (id of a code object, checked, magnitudes) -> (the code object, what rewrite gave)


class Float64Warning(UserWarning):
    """A kernel whose arrays are float32 or narrower computes in float64, which most GPUs do 32 to 64 times slower."""


def _is_capability(cc):
    return isinstance(cc, (tuple, list)) and len(cc) >= 2 and all(isinstance(n, int) for n in cc[:2])


class Emulator(MemorySpaces, Reports):
    """An emulated GPU. Get one from `numdiff.emulator.device(...)`.

    cc: compute capability; checks: True (all), False (none), or names of CHECKS
    order: in which order threads take their turns; seed: of the order "shuffled"
    on_fault: "raise" a `KernelFault` at the end of a launch that had faults, or "collect" them in `faults`
    float64: whether float64 arithmetic is meant. False: it is a fault. None: it is meant where a kernel is given a
        float64 array; elsewhere, if there is no other fault, it is a `Float64Warning`
    patience: seconds without progress after which a waiting loop is called endless
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
        for wrong, text in ((not _is_capability(cc), f"cc {cc!r} must be a compute capability, such as (9, 0)."),
                            (not isinstance(patience, (int, float)) or not patience > 0,
                             f"patience {patience!r} must be seconds, above 0."),
                            (float64 not in (None, True, False), f"float64 {float64!r} must be True, False or None."),
                            (recorder is not None and not hasattr(recorder, "count_functions"),
                             "recorder must be an emulator.Recorder()."),
                            (tracer is not None and not hasattr(tracer, "timed"),
                             "tracer must be an emulator.Tracer().")):
            if wrong:
                raise ValueError(text)
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
        self.lone = False  # whether each block is a cluster of its own
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
        helpers = {"__turn": lambda weight: self.scheduler.turn(weight), "__here": self._here, "__emulated__": True,
                   "__unsupported": unsupported}
        operations = {f"__{name}": function for name, function in arithmetic.OPERATIONS.items()}
        if not self.checked:
            def augment(array, index, operation, value):
                array[index] = operation(array[index], value)
            return {**helpers, **operations, **self._fused(operations), "__augment": augment}
        load, store = self.access.load, self.access.store

        def augment(array, index, operation, value, site):
            store(array, index, operation(load(array, index, site), value, site), site)

        for name in ("Add", "Sub", "Mult", "Div", "FloorDiv", "Mod", "Pow", "BitAnd", "BitOr", "BitXor", "LShift",
                     "RShift"):
            operations[f"__{name}"] = self._checked_operation(arithmetic.OPERATIONS[name], name)
        if self.tracer is not None:
            load, store = self.tracer.timed(self, load), self.tracer.timed(self, store)
            operations = {name: self.tracer.timed(self, operation) for name, operation in operations.items()}
        return {**helpers, **operations, **self._fused(operations), "__augment": augment, "__load": load,
                "__store": store, "__tuple": tuple if self.tracer is None else None}

    def _fused(self, operations):
        """a + b * c and a * b + c in one call, as kernels are full of them: what the two operations do."""
        add, multiply, float32, signed = operations["__Add"], operations["__Mult"], values.float32, values.SIGNED
        low, high = -values.HALF64, values.HALF64
        if not self.checked:  # their operations know no sites
            plain_add, plain_multiply = add, multiply
            add, multiply = lambda a, b, site: plain_add(a, b), lambda a, b, site: plain_multiply(a, b)

        def add_product(a, b, c, site=None):
            kind, other = b.__class__, c.__class__
            if kind is float32 and other is float32 and a.__class__ is float32:
                return a + b * c
            if kind in signed and other in signed and a.__class__ in signed:
                product = b * c
                if low <= product < high:
                    return a + product
            return add(a, multiply(b, c, site), site)

        def product_add(b, c, a, site=None):
            kind, other = b.__class__, c.__class__
            if kind is float32 and other is float32 and a.__class__ is float32:
                return b * c + a
            if kind in signed and other in signed and a.__class__ in signed:
                product = b * c
                if low <= product < high:
                    return product + a
            return add(multiply(b, c, site), a, site)

        if not self.checked or self.recorder is None and self.tracer is None:
            return {"__AddMult": add_product, "__MultAdd": product_add}
        return {"__AddMult": lambda a, b, c, site: add(a, multiply(b, c, site), site),
                "__MultAdd": lambda b, c, a, site: add(multiply(b, c, site), a, site)}

    def _checked_operation(self, function, name):
        machine, recorder, float32, float64, signed = self, self.recorder, values.float32, values.float64, values.SIGNED
        quick = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "BitAnd": operator.and_,
                 "BitOr": operator.or_, "BitXor": operator.xor, "FloorDiv": operator.floordiv, "Mod": operator.mod,
                 "LShift": operator.lshift, "RShift": operator.rshift}.get(name)

        def operation(a, b, site):
            result = function(a, b)
            if result.__class__ is float64 and not machine.float64_is_meant:
                machine.report("float64", f"{_type_name(a)} {name.lower()} {_type_name(b)} is float64 arithmetic in a "
                                          "kernel without float64 arrays: type the literals and casts", site)
            if recorder is not None:
                recorder.operation(result, site)
            return result

        # most operations are on two float32, or on two signed integers, which are Python's unless a product wraps, or
        # on two unsigned ones
        low, high, bits = -values.HALF64, values.HALF64, values.BITS64
        unsigned, UInt64 = values.UNSIGNED, values.UInt64

        def quick_operation(a, b, site):
            c, d = a.__class__, b.__class__
            if c is float32 and d is float32 or c in signed and d in signed:
                return quick(a, b)
            if c in unsigned and d in unsigned:
                return UInt64(quick(a, b) & bits)
            return operation(a, b, site)

        def quick_product(a, b, site):
            c, d = a.__class__, b.__class__
            if c is float32 and d is float32:
                return a * b
            if c in signed and d in signed:
                product = a * b
                if low <= product < high:
                    return product
            elif c in unsigned and d in unsigned:
                return UInt64(a * b & bits)
            return operation(a, b, site)

        def quick_quotient(a, b, site):
            if a.__class__ in signed and b.__class__ in signed and low <= a < high:
                return quick(a, b)
            return operation(a, b, site)

        def quick_shift(a, b, site):
            if 0 <= b < 64:
                if a.__class__ in signed:
                    result = quick(a, int(b))
                    if low <= a < high and low <= result < high:
                        return result
                elif a.__class__ in unsigned:
                    return UInt64(quick(a, int(b)) & bits)
            return operation(a, b, site)

        if quick is None or recorder is not None:
            return operation
        return {"Mult": quick_product, "FloorDiv": quick_quotient, "Mod": quick_quotient, "LShift": quick_shift,
                "RShift": quick_shift}.get(name, quick_operation)

    def function(self, kernel, given=()):
        """The emulated function of a `@cuda.jit` kernel, a device function, or a plain Python function.

        given: magnitudes of its arguments, as far as they are known to be signed integers (integers.py)
        """
        python = getattr(kernel, "py_func", kernel)
        if self.recorder is not None or self.tracer is not None:
            given = None
        key = id(python), given
        if key not in self._functions:
            made = self._rewritten(python, given)
            if not holds(made.assumed, {n: self.resolver(n, v) for n, v in outside(python, made.assumed).items()},
                         self.resolver.cuda, values.TYPES):
                made = self._rewritten(python, None)
            self._link(python, key, made)
        return self._functions[key][1]

    def _rewritten(self, python, given):
        key = id(python.__code__), self.checked, given
        if key not in _REWRITTEN:
            _REWRITTEN[key] = python.__code__, rewrite(python, SITES, self.checked, given)
        return _REWRITTEN[key][1]

    def _link(self, python, key, made):
        """Make the function from its code, with all that it finds outside of itself."""
        code = made.code
        self.negative_sites |= made.negative
        namespace = {**self.helpers, **made.constants, "__builtins__": __builtins__, "__name__": python.__module__,
                     "__words__": python.__globals__.get("WORDS") is True}
        function = type(python)(code, namespace, python.__name__, None,
                                None if not code.co_freevars else self._cells(python, code))
        self._functions[key] = python, function
        function.__defaults__ = python.__defaults__ and tuple(self.resolver("default", d) for d in python.__defaults__)
        function.__kwdefaults__ = python.__kwdefaults__
        found = outside(python, made.names)
        for name in made.names:
            if name in found:
                namespace[name] = self.resolver(name, found[name])
            elif name in functions.BUILTINS:
                namespace[name] = self.resolver.builtins[name]
        for name, (kind, number) in made.casts.items():
            namespace[name] = namespace[kind](number)
        for name, (called, magnitudes) in made.variants.items():
            namespace[name] = self.function(found[called], magnitudes)

    def _cells(self, python, code):
        """Closure cells for a function whose source is unknown."""
        import types
        captured = dict(zip(python.__code__.co_freevars, python.__closure__, strict=True))
        return tuple(types.CellType(self.resolver(n, captured[n].cell_contents)) for n in code.co_freevars)

    # launching --------------------------------------------------------------------------------------------------------

    def launch(self, kernel, grid, block, *args, shared=0, cluster=1):
        """Run a kernel on NumPy arrays (in place), `EmulatedArray`s and numbers.

        grid, block: an int or up to three; shared: bytes of dynamic shared memory. Faults end in a `KernelFault`.
        cluster: its size in blocks, along each dimension of the grid
        """
        python = getattr(kernel, "py_func", kernel)
        self.kernel = python.__name__
        grid, block, cluster = (in_three(size, f"{self.kernel}: {what}") for size, what in (
            (grid, "grid"), (block, "block"), (cluster, "cluster")))
        self._refuse(kernel, grid, block, shared, cluster)
        self._refuse_arguments(kernel, python, args)
        if hasattr(kernel, "converted"):  # one with a signature (host.py)
            args = kernel.converted(args)
        self.dynamic_shared, self.lone = shared, cluster == (1, 1, 1)
        for target, source in ((self.grid_dim, grid), (self.block_dim, block)):
            target.x, target.y, target.z = source
        names = python.__code__.co_varnames
        arguments, back = [], []
        for k, value in enumerate(args):
            arguments.append(self.argument(value, names[k] if k < python.__code__.co_argcount else f"argument {k}",
                                           back))
        function = self.function(kernel, tuple(map(magnitude_of, arguments)))
        self.float64_is_meant = self.float64 if self.float64 is not None else any(
            getattr(a, "dtype", None) == np.float64 and not isinstance(a, np.generic)
            for a in values.leaves(arguments)) or "float64" not in self.checks
        first = len(self.faults)
        self.seen_faults = {}
        self.block = self.thread = None
        self.scheduler = Scheduler(self, lambda: function(*arguments), block)
        if self.tracer is not None:
            self.tracer.launch(self, grid, block)
        if self.recorder is not None:
            self.recorder.launch(self, grid, block)
        errors, collects = np.seterr(all="ignore"), gc.isenabled()
        gc.disable()  # a launch makes millions of objects and few cycles; to look for those takes a tenth of its time
        try:
            self.scheduler.run(((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])),
                               cluster)
        finally:
            self.scheduler.abandon()
            np.seterr(**errors)
            if collects:
                gc.enable()
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
        """Raise where a GPU of this compute capability would refuse the launch."""
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
        if blocks > clusters.MAX_BLOCKS:
            raise LaunchRefused(f"{name}: a cluster of {blocks} blocks; {clusters.MAX_BLOCKS} is the limit on "
                                "every GPU.")
        if any(n % k for n, k in zip(grid, cluster, strict=True)):
            raise LaunchRefused(f"{name}: grid {grid} is not a multiple of the cluster {cluster}.")
        if shared < 0:
            raise LaunchRefused(f"{name}: {shared} bytes of dynamic shared memory.")
        if shared > self.shared_limit:
            raise LaunchRefused(f"{name}: {shared} bytes of dynamic shared memory are more than the "
                                f"{self.shared_limit} that a block has on compute capability "
                                f"{self.cc[0]}.{self.cc[1]}.")

    def _refuse_arguments(self, kernel, python, given):
        """Raise where a kernel cannot be called so: a device function, too few arguments or too many."""
        if getattr(kernel, "targetoptions", {}).get("device"):
            raise LaunchRefused(f"{self.kernel} is a device function: launch a kernel that calls it.")
        code, optional = python.__code__, len(python.__defaults__ or ())
        names = code.co_varnames[:code.co_argcount]
        if not (len(names) - optional <= len(given) and (len(given) <= len(names) or code.co_flags & VARARGS)):
            raise LaunchRefused(f"{self.kernel} takes {len(names)} argument{'s' * (len(names) != 1)} "
                                f"({', '.join(names)}), {len(given)} were given.")

    def argument(self, value, name, back):
        """A launch argument as the kernel holds it; arrays that cannot be used in place are noted in `back`."""
        if type(value).__module__ == "numba.cuda.args":  # cuda.In, cuda.Out, cuda.InOut
            value = value.value
        if type(value) is np.void and value.dtype.names:  # a record; what a kernel writes into it comes back
            data = np.array(value)
            back.append((_Fields(value), data))
            array = self.argument(data, name, back)
            return array[()] if not self.checked else Record(array, array.offset)
        refused = None if hasattr(value, "emulated_memory") else why_refused(value)
        if refused:
            raise LaunchRefused(f"{self.kernel}: argument {name} is {refused}; give it NumPy arrays, numbers, or "
                                "tuples of them.")
        strides = None
        if hasattr(value, "emulated_memory"):
            memory, offset, shape, dtype, *strides = value.emulated_memory()
            strides = strides[0] if strides else None
        elif isinstance(value, np.ndarray):
            if not self.checked:
                return plain_array(value)
            memory, offset, strides = self._host_memory(value, name, back)
            shape, dtype = value.shape, value.dtype
        elif isinstance(value, tuple):
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
        """After a launch: what it did to global memory is ordered before all that follows."""
        for memory in self._memories.values():
            memory.forget()
            memory.busy, memory.released = Busy(), {}
        self._memories, self._hosts, self._arguments = {}, {}, []

    def grid_synchronised(self):
        for memory in self._memories.values():
            memory.forget()

    def block_ends(self, block):
        clusters.block_ends(self, block)
        self.asynchronous.block_ends(block)
        if self.recorder is not None:
            self.recorder.block_ends(block)
        if self.tracer is not None:
            self.tracer.block_ends(block)


def unsupported(text):
    raise Unsupported(text)


class _Fields:
    """A record of the host, into which the fields of an array of one record are copied."""

    def __init__(self, record):
        self._record = record

    def __setitem__(self, index, data):
        for name in data.dtype.names:
            self._record[name] = data[()][name]


def why_refused(value):
    """What a launch argument is that no kernel takes, in words; None for one that kernels take."""
    if isinstance(value, (np.ndarray, np.generic)):
        what = "an array" if isinstance(value, np.ndarray) else "a value"
        if value.dtype.kind in "OSU":
            return f"{what} of type {value.dtype}"
        return None if value.dtype.isnative else f"{what} of type {value.dtype}, whose bytes are in another order"
    if isinstance(value, int) and not -values.HALF64 <= value <= values.BITS64:
        return "an integer of more than 64 bits"
    if value is None or isinstance(value, (int, float, complex, tuple)) or hasattr(value, "copy_to_host") or (
            hasattr(value, "__cuda_array_interface__")):
        return None
    return f"of type {type(value).__name__}"


def outside(python, names):
    """{name: value} of what a function finds under these names in its closure and its module."""
    captured = dict(zip(python.__code__.co_freevars, python.__closure__ or (), strict=True))
    return {name: captured[name].cell_contents if name in captured else python.__globals__[name]
            for name in names if name in captured or name in python.__globals__}


def in_three(size, what="size"):
    """A grid, block or cluster as a tuple of three."""
    try:
        size = tuple(operator.index(n) for n in (size if isinstance(size, (tuple, list)) else (size,)))
    except TypeError:
        raise LaunchRefused(f"{what} {size} must be whole numbers: divide with //; -(-n // d) rounds up.") from None
    return size + (1,) * (3 - len(size))


def _type_name(value):
    return {int: "int64", float: "float64"}.get(value.__class__, value.__class__.__name__.lower())
