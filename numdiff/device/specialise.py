"""One kernel text, many kernels: names that are constants in each of them, with other values.

    BN = Constant()                                                 # columns of a tile: 64, 128, …
    ACCUMULATORS = Constant(lambda BN: BN // 2)                     # follows from others
    wgmma = Constant(lambda BN: make_wgmma(BN))                     # may be an intrinsic

    def gemm(map_a, map_b, …): …                                    # names BN, wgmma, and device functions that do
    KERNELS = {BN: specialise(gemm, launch_bounds=(384, 1), BN=BN) for BN in (64, 128, 256)}

    EPILOGUE = Constant()                                           # a record of device functions, or one such function
    write = Field("EPILOGUE", "write")                              # one of them, which the text calls by this name

A branch on a constant vanishes from the machine code, and a loop over one is unrolled. A local
array may take its size from a constant, and an intrinsic need not be chosen by `if BN == 64: … elif
…`.

The kernel's function is copied, and each device function (down the calls, from any file) that uses
one of the constants. The copies have the values in place of the `Constant`s among their globals.
Device functions that know none are shared. A copy is made once for the same values.

Where there are many and a run needs few, `Variants` makes each when it is first requested:

    KERNELS = Variants((64, 128, 256), lambda bn: specialise(gemm, launch_bounds=(384, 1), BN=bn))

A specialised kernel has a separate name, made of the values or given. The cache of compiled kernels
and the processes that compile ahead find it by module and name, so `specialise` refuses a name that
has other constants.
"""

import inspect
import operator
import types

from .gpu import cuda

_made = {}  # (module, name) -> (function, constants, options, kernel)
# (id of a device function, its constants' names and values) -> (that function, its copy)
_copies = {}
OPTIONS = ("launch_bounds", "fastmath", "opt", "device", "inline", "forceinline")  # of `cuda.jit`


class Constant:
    """Stands at the top of a module for a value that `specialise` sets.

    value: None if it must be given; else a function of other constants, which it names as its
    arguments
    """

    def __init__(self, value=None):
        self.value = value
        # the names of those others
        self.follows = tuple(inspect.signature(value).parameters) if value else ()


class Field(Constant):
    """Stands at the top of a module for a field of a record (a NamedTuple) that is a constant.

    A field is a number, or a device function that the text calls; it may use constants, too.
    """

    def __init__(self, record, name):
        self.value, self.follows = operator.attrgetter(name), (record,)


class _Values(dict):
    """The constants of one kernel by name: those that are given, and what follows from them."""

    def __init__(self, given, constants):
        super().__init__(given)
        self.constants = constants

    def of(self, name, wanted_by):
        if name not in self:
            constant = self.constants.get(name)
            if constant is None or constant.value is None:
                raise TypeError(f"specialise: {wanted_by} needs a value for {name}.")
            self[name] = constant.value(*(self.of(other, name) for other in constant.follows))
        return self[name]


def _known(function):
    """{name: value} of what a function takes from its module and its closure."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = {
        name: function.__globals__[name]
        for name in function.__code__.co_names
        if name in function.__globals__
    }
    return known | {name: cell.cell_contents for name, cell in cells}


known_names = _known


def with_names(function, replaced):
    """A copy of a function, in Python, that has these values for names that it takes from outside."""
    return _copy(function, replaced, function.__name__)


def _is_device_function(value):
    return hasattr(value, "py_func") and value.targetoptions.get("device")


def _reachable(function, found=None):
    """{function: {name: a `Constant` or device function that it knows}} of a function and of all
    below it."""
    found = {} if found is None else found
    if function not in found:
        found[function] = {
            name: value
            for name, value in _known(function).items()
            if isinstance(value, Constant) or _is_device_function(value)
        }
        for value in found[function].values():
            if not isinstance(value, Constant):
                _reachable(value.py_func, found)
    return found


def _copy(function, replaced, name, module=None):
    """The function with other values for some of the names that it takes from outside."""
    scope = {**function.__globals__, **replaced, "__name__": module or function.__module__}
    cells = tuple(
        types.CellType(replaced[free]) if free in replaced else cell
        for free, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
    )
    copy = types.FunctionType(function.__code__, scope, name, function.__defaults__, cells)
    if "__signature__" not in function.__dict__:  # which Numba asks each of its copies for, twice
        function.__signature__ = inspect.signature(function)
    copy.__kwdefaults__, copy.__doc__, copy.__qualname__ = (
        function.__kwdefaults__,
        function.__doc__,
        name,
    )
    copy.__dict__.update(function.__dict__)  # what it requires
    return copy


class _Specialiser:
    """Copies of device functions for one set of values.

    known: what `_reachable` found
    """

    def __init__(self, values, known):
        self.values, self.known, self.used = values, known, {}

    def replaced(self, function):
        """({name: new value} of a function, {name: value} of the constants that it and those below
        it know)."""
        if function not in self.used:
            new, used = {}, {}
            for name, value in self.known[function].items():
                if isinstance(value, Constant):
                    used[name] = value = self.values.of(name, function.__qualname__)
                    new[name] = value
                if _is_device_function(value):
                    copy, below = self.device_function(value)
                    used |= below
                    if copy is not value:
                        new[name] = copy
            self.used[function] = new, used
        return self.used[function]

    def device_function(self, dispatcher):
        """(the dispatcher or its copy, {name: value} of the constants below)."""
        function = dispatcher.py_func
        new, used = self.replaced(function)
        if not used:
            return dispatcher, used
        key = (
            id(dispatcher),
            tuple(sorted((name, _identity(value)) for name, value in used.items())),
        )
        if key not in _copies:
            _copies[key] = (
                dispatcher,
                cuda.jit(_copy(function, new, function.__name__), **_options(dispatcher)),
                used,
            )
        return _copies[key][1], used


class _Others:
    """Copies of device functions in which other(value) stands for a value that they name, where it
    is not None."""

    def __init__(self, other):
        self.other, self.known, self.copies = other, {}, {}

    def replaced(self, function):
        """{name: new value} of a function."""
        if function not in self.known:
            new = {name: self.other(value) for name, value in _known(function).items()}
            new |= {
                name: self.device_function(value)
                for name, value in _known(function).items()
                if new[name] is None and _is_device_function(value)
            }
            self.known[function] = {name: value for name, value in new.items() if value is not None}
        return self.known[function]

    def device_function(self, dispatcher):
        """The dispatcher's copy; None if nothing below is replaced."""
        new = self.replaced(dispatcher.py_func)
        if new and dispatcher not in self.copies:
            copy = _copy(dispatcher.py_func, new, dispatcher.py_func.__name__)
            self.copies[dispatcher] = cuda.jit(copy, **_options(dispatcher))
        return self.copies.get(dispatcher)


def with_others(kernel, other, name):
    """A copy of the `@cuda.jit` kernel, with a separate name, in which other(value) stands for a
    value that it names, down the calls, where it is not None."""
    function = kernel.py_func
    return cuda.jit(_copy(function, _Others(other).replaced(function), name), **_options(kernel))


def _identity(value):
    """The identity by which a constant is compared: a number by type and value, anything else as an
    object."""
    return (
        repr((type(value).__name__, value))
        if isinstance(value, (bool, int, float, str)) or hasattr(value, "dtype")
        else f"object {id(value)}"
    )


def _options(kernel):
    return {
        name: value
        for name in OPTIONS
        if (value := getattr(kernel, "targetoptions", {}).get(name)) is not None
    }


def _reloaded(old, new):
    """Whether a function replaces another one because its module was imported again."""
    return old is not new and old.__qualname__ == new.__qualname__


def specialise(kernel, /, *, name=None, module=None, launch_bounds=None, **constants):
    """The `@cuda.jit` kernel that `kernel` becomes with these values for its `Constant`s.

    kernel: a function, or a `@cuda.jit` kernel, whose options are kept
    name: of the new one (default: the old name and the values); module: whose it is (default: the
    function's)
    TypeError: a constant has no value, or none of this name is known; ValueError: the name has
    other constants
    """
    function = getattr(kernel, "py_func", kernel)
    reachable = _reachable(function)
    for value in constants.values():
        for part in value if isinstance(value, tuple) else (value,):
            if _is_device_function(part):
                _reachable(part.py_func, reachable)
    known = {
        given: value
        for names in reachable.values()
        for given, value in names.items()
        if isinstance(value, Constant)
    }
    needed = dict(known)
    # constants that others follow from need not occur in the text itself
    for constant in known.values():
        needed |= dict.fromkeys(constant.follows)
    if unknown := constants.keys() - needed.keys():
        raise TypeError(
            f"specialise: {function.__qualname__} has no constant {', '.join(sorted(unknown))}."
        )
    values = _Values(constants, known)
    new, used = _Specialiser(values, reachable).replaced(function)
    name = name or "_".join([function.__name__, *(str(value) for value in constants.values())])
    module = module or function.__module__
    options = _options(kernel) | ({} if launch_bounds is None else {"launch_bounds": launch_bounds})
    same = function, {given: _identity(value) for given, value in used.items()}, options
    if (module, name) in _made and not _reloaded(_made[module, name][0], function):
        *before, made, _ = _made[module, name]
        if tuple(before) != same:
            raise ValueError(
                f"specialise: {module}.{name} exists with other constants; give it another name."
            )
        return made
    made = cuda.jit(_copy(function, new, name, module), **options)
    # keep the values alive, so that no other object gets their id
    _made[module, name] = *same, made, used
    return made


class Variants(dict):
    """{key: kernel}, each of which `make(key)` makes when it is first requested: it takes a
    millisecond."""

    def __init__(self, keys, make):
        super().__init__(dict.fromkeys(keys))
        self.make = make

    def __getitem__(self, key):
        kernel = super().__getitem__(key)
        if kernel is None:
            kernel = self[key] = self.make(key)
        return kernel

    def get(self, key, default=None):
        return self[key] if key in self else default

    def items(self):
        return ((key, self[key]) for key in self)

    def values(self):
        return (self[key] for key in self)
