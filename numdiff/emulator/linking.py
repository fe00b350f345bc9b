"""The function that a launch calls: the kernel's, rewritten, with each of its names bound to the
twin here.

rewrite.py turns a kernel's source into code that calls `__load`, `__store`, `__Add` and their kin.
This file makes the functions behind these names, checked and counted according to the machine's
options. It binds the names in a kernel's module and closure to their twins (namespace.py).
"""

import functools
import math
import operator
import sys
import types

import numpy as np

from . import arithmetic, functions, generators, values
from .faults import Unbound, Unsupported
from .identity import IDENTITIES
from .integers import holds, magnitude_of_result
from .loops import TURNS
from .memory import READ_SITE
from .reductions import Spans
from .rewrite import SITES, rewrite
from .signatures import explicit_signatures, with_signatures
from .source import captured
from .weak_table import WeakTable
from .whole_arrays import method

# code of a function -> {(checked, magnitudes, filmed, generators): what `rewrite` made of it}
_REWRITTEN = WeakTable()


class Linking:
    """The part of an `Emulator` that makes functions of kernels."""

    # A kernel's function --------------------------------------------------------------------------

    def function(self, kernel, given=()):
        """The emulated function of a `@cuda.jit` kernel, a device function, or a plain Python
        function.

        given: magnitudes of its arguments, as far as they are known to be signed integers
        (integers.py)
        """
        python = getattr(kernel, "py_func", kernel)
        if self.recorder is not None:
            given = None
        variants = self._functions.dict_of(python)
        if given not in variants:
            made = self._rewritten(python, given)
            called = outside(python, {name for name, _ in made.results})
            if not holds(
                made.assumed,
                {n: self.resolver(n, v) for n, v in outside(python, made.assumed).items()},
                self.resolver.cuda,
                values.TYPES,
            ) or any(
                name not in called or magnitude_of_result(called[name], arguments) != result
                for (name, arguments), result in made.results.items()
            ):
                made = self._rewritten(python, None)
            self._link(python, given, made)
        return variants[given]

    def unchecked(self, function):
        """A function of numbers as the host may call it, outside of any launch."""
        machine = type(self)(self.cc, checks=False)
        machine.generators = False
        machine.helpers["__turn"] = lambda weight: True  # of a loop: there are no other threads
        return machine.function(function)

    def device_function(self, kernel):
        """As `function`; of one with signatures it converts what it is given and what it gives."""
        function, signatures = self.function(kernel), explicit_signatures(kernel)
        if not signatures:
            return function
        return with_signatures(kernel.py_func.__name__, kernel.py_func, function, signatures)

    def _rewritten(self, python, given):
        filmed = self.film is not None
        known, key = (
            _REWRITTEN.dict_of(python.__code__),
            (self.checked, given, filmed, self.generators),
        )
        if key not in known:
            change = generators.yielding if self.generators else None
            known[key] = rewrite(python, SITES, self.checked, given, filmed, change)
        return known[key]

    def _link(self, python, given, made):
        """Make the function from its code, with all that it finds outside of itself."""
        code = made.code
        self.negative_sites |= made.negative
        namespace = {
            **self.helpers,
            **made.constants,
            "__builtins__": __builtins__,
            "__name__": python.__module__,
            "__words__": python.__globals__.get("WORDS") is True,
        }
        function = type(python)(
            code,
            namespace,
            python.__name__,
            None,
            None if not code.co_freevars else self._cells(python, code),
        )
        self._functions.dict_of(python)[given] = function
        function.__defaults__ = python.__defaults__ and tuple(
            values.literal(self.resolver("default", d)) for d in python.__defaults__
        )
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
            if called in found:  # else it has no value here, in a branch that is not taken
                namespace[name] = self.function(found[called], magnitudes)

    def _cells(self, python, code):
        """Closure cells for a function whose source is unknown."""
        closure = captured(python)
        return tuple(
            types.CellType(self.resolver(n, closure[n])) if n in closure else types.CellType()
            for n in code.co_freevars
        )

    # The names that rewritten code calls ----------------------------------------------------------

    def _turn(self, weight):
        """`Scheduler.turn`, which is called only where it has something to do."""
        thread = self.thread
        thread.turns += weight
        return thread.turns < TURNS or self.scheduler.turn(0)

    def _helpers(self):
        """The names that rewritten code calls."""
        spans = Spans(self)
        helpers = {
            "__span1": spans.span1,
            "__span2": spans.span2,
            "__accumulate": np.add.accumulate,
            "__ndarray": np.ndarray,
            "__single": np.dtype(np.float32),
            "__turn": self._turn,
            "__here": self._here,
            "__emulated__": True,
            "__unsupported": unsupported,
            "__literal": values.literal,
            "__constant": constant,
            "__method": method,
            "__range": any_range,
            "__zip": zipped,
            "__unified": arithmetic.unified,
            "__unbound": functools.cache(Unbound) if self.checked else lambda name: math.nan,
            "__float32": values.float32,
            "__Int32": values.Int32,
            "__wait": generators.wait(self),
        }
        operations = {
            f"__{name}": function
            for names in (arithmetic.OPERATIONS, arithmetic.COMPARISONS, IDENTITIES)
            for name, function in names.items()
        }
        if not self.checked:

            def augment(array, index, operation, value):
                array[index] = operation(array[index], value)

            return {**helpers, **operations, **self._fused(operations), "__augment": augment}
        load, store, load2 = self.access.load, self.access.store, self.access.load2

        def returned(value, site):
            for array in values.leaves((value,)):
                memory = getattr(array, "memory", None)
                if getattr(memory, "owner", None) == id(sys._getframe(1)):
                    self.report(
                        "escape",
                        f"returns the local array {array.name}, whose memory ends with this call: "
                        "let the caller make it, and fill it here",
                        site,
                    )
            return value

        def augment(array, index, operation, value, site):
            store(array, index, operation(load(array, index, site << READ_SITE), value, site), site)

        for name in (
            "Add",
            "Sub",
            "Mult",
            "Div",
            "FloorDiv",
            "Mod",
            "Pow",
            "BitAnd",
            "BitOr",
            "BitXor",
            "LShift",
            "RShift",
        ):
            operations[f"__{name}"] = self._checked_operation(arithmetic.OPERATIONS[name], name)
        if self.film is not None:
            helpers.update(self.film.helpers(self))
        return {
            **helpers,
            **operations,
            **self._fused(operations),
            "__augment": augment,
            "__load": load,
            "__load2": load2,
            "__store": store,
            "__returned": returned,
            "__tuple": tuple,
        }

    def _fused(self, operations):
        """a + b * c and a * b + c in one call, as kernels are full of them: what the two operations
        do."""
        add, multiply, float32, signed = (
            operations["__Add"],
            operations["__Mult"],
            values.float32,
            values.SIGNED,
        )
        low, high = -values.HALF64, values.HALF64
        if not self.checked:  # their operations know no sites
            plain_add, plain_multiply = add, multiply
            add, multiply = (
                lambda a, b, site: plain_add(a, b),
                lambda a, b, site: plain_multiply(a, b),
            )

        def add_product(a, b, c, site=None):
            kind, other = b.__class__, c.__class__
            if kind is float32 and other is float32 and a.__class__ is float32:
                return a + b * c
            if kind in signed and other in signed and a.__class__ in signed:
                product = b * c
                if low <= product < high and low <= a + product < high:
                    return a + product
            return add(a, multiply(b, c, site), site)

        def product_add(b, c, a, site=None):
            kind, other = b.__class__, c.__class__
            if kind is float32 and other is float32 and a.__class__ is float32:
                return b * c + a
            if kind in signed and other in signed and a.__class__ in signed:
                product = b * c
                if low <= product < high and low <= product + a < high:
                    return product + a
            return add(multiply(b, c, site), a, site)

        if not self.checked or self.recorder is None:
            return {"__AddMult": add_product, "__MultAdd": product_add}
        return {
            "__AddMult": lambda a, b, c, site: add(a, multiply(b, c, site), site),
            "__MultAdd": lambda b, c, a, site: add(multiply(b, c, site), a, site),
        }

    def _checked_operation(self, function, name):
        machine, recorder, float32, float64, signed = (
            self,
            self.recorder,
            values.float32,
            values.float64,
            values.SIGNED,
        )
        quick = {
            "Add": operator.add,
            "Sub": operator.sub,
            "Mult": operator.mul,
            "BitAnd": operator.and_,
            "BitOr": operator.or_,
            "BitXor": operator.xor,
            "FloorDiv": operator.floordiv,
            "Mod": operator.mod,
            "LShift": operator.lshift,
            "RShift": operator.rshift,
        }.get(name)

        def operation(a, b, site):
            result = function(a, b)
            if result.__class__ is float64 and not machine.float64_is_meant:
                machine.report(
                    "float64",
                    f"{_type_name(a)} {name.lower()} {_type_name(b)} is float64 arithmetic in a "
                    "kernel without float64 arrays: type the literals and casts",
                    site,
                )
            if recorder is not None:
                recorder.operation(result, site)
            return result

        # most operations are on two float32, or on two signed integers, which are Python's unless a
        # product wraps, or on two unsigned ones
        low, high, bits = -values.HALF64, values.HALF64, values.BITS64
        unsigned, UInt64, integers = values.UNSIGNED, values.UInt64, values.INTEGERS

        def quick_operation(a, b, site):
            c, d = a.__class__, b.__class__
            if c is float32 and d is float32:
                return quick(a, b)
            if c in signed and d in signed:
                result = quick(a, b)
                if low <= result < high:
                    return result
            elif c in unsigned and d in unsigned:
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
            if a.__class__ in signed and b.__class__ in signed and b > 0:
                return quick(a, b)
            if b == 0 and a.__class__ in integers and b.__class__ in integers:
                machine.report("division", f"{_type_name(a)} {name.lower()} 0, which gives 0", site)
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
        return {
            "Mult": quick_product,
            "FloorDiv": quick_quotient,
            "Mod": quick_quotient,
            "LShift": quick_shift,
            "RShift": quick_shift,
        }.get(name, quick_operation)


def unsupported(text):
    raise Unsupported(text)


def any_range(*arguments):
    """`range` of numbers of any type: of floats Numba takes the whole part, of unsigned ones it
    makes uint64."""
    if arguments and all(a.__class__ in values.UNSIGNED for a in arguments):
        return map(values.UInt64, range(*arguments))
    return range(
        *[int(a) if a.__class__ in values.INTEGERS else values.TYPES["int64"](a) for a in arguments]
    )


def zipped(*several):
    """`zip`; of arrays as many elements are read as the shortest has."""
    if not all(hasattr(one, "__len__") for one in several):
        return zip(*several, strict=False)
    return (tuple(one[k] for one in several) for k in range(min(map(len, several), default=0)))


def constant(shape, text):
    """The shape of an array; raises where a number in it is none that the compiler knows."""
    if not all(n.__class__ is values.Literal for n in values.leaves((shape,))):
        raise Unsupported(text)
    return shape


def outside(python, names):
    """{name: value} of what a function finds under these names in its closure and its module."""
    closure, free = captured(python), python.__code__.co_freevars
    return {
        name: closure[name] if name in closure else python.__globals__[name]
        for name in names
        if name in closure or name not in free and name in python.__globals__
    }


def _type_name(value):
    return {int: "int64", float: "float64"}.get(value.__class__, value.__class__.__name__.lower())
