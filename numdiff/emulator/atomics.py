"""Atomic operations on an array's element: each returns the old value (PTX ISA, section 9.7.13,
`atom`).

Atomics at one place are ordered among themselves, and publish what their threads had done before
    their last fence: to threads of the same block, what came before a barrier, a
    threadfence_block() or a threadfence(); to other blocks, what came before a threadfence(). A
    plain access after an atomic is not ordered by it.
"""

import numpy as np

from .arrays import CheckedArray, IntegerArray, PackedArray
from .faults import Unsupported
from .values import float32

INTEGERS, WITHOUT_SIGN = ("int32", "uint32", "int64", "uint64"), ("uint32", "uint64")
SMALLEST = np.finfo(float32).tiny  # the smallest number that is not subnormal
# the types for which Numba has them (tests/emulator/test_atomics.py)
NUMBERS = (*INTEGERS, "float32", "float64")


class Atomic:
    def __init__(self, machine):
        self._machine = machine

    def _apply(self, array, index, function):
        machine = self._machine
        machine.block.fenced = True
        if array.__class__ is PackedArray:
            machine.report(
                "alignment",
                f"atomically changes {array.name} of {array.dtype}, whose address need not be "
                f"a multiple of {array.itemsize}",
                machine.site_here(),
            )
        if array.__class__ is not CheckedArray:
            if isinstance(index, tuple):
                index = tuple(int(i) for i in index)
            old = array[index]
            new = function(old)
            if new is not None:
                array[index] = new
                self._note(old, new)
            return old
        access, site = machine.access, machine.site_here()
        offset = access.locate(array, index, site, "atomically changes")
        if offset.__class__ is not int:
            return access.outside(array)
        memory, thread = array.memory, machine.thread
        if access.initialised and memory.valid is not None and not memory.valid[offset]:
            access._unwritten(array, index, site)
        if access.races and memory.shadowed:
            self._order(memory, offset, thread)
            access.check_write(memory, offset, array.itemsize, site, atomic=True)
            thread.tick(thread.seen)
        if memory.busy:
            machine.asynchronous.touched(memory, offset, array.itemsize, site, True)
        i = offset // array.itemsize
        old = array.flat[i] if array.kind is None else array.kind(array.flat[i])
        new = function(old)
        if new is not None:
            array.flat[i] = array.cast(new)
            self._note(old, new)
        if memory.valid is not None:
            memory.valid[offset : offset + array.itemsize] = b"\1" * array.itemsize
        if machine.noted_access is not None:
            machine.noted_access(memory, offset, array.itemsize, site, True)
        return old

    def _note(self, old, new):
        """A change may let others continue; an atomic that changes nothing, like a lock that is
        taken, is no progress."""
        if old != new:
            self._machine.stores += 1
            self._machine.scheduler.progress += 1

    def _order(self, memory, offset, thread):
        """This thread has now seen what earlier atomics here published, and publishes what it has
        seen."""
        block, released = thread.block, memory.released.setdefault(offset, {})
        own = released.get(block)
        if len(released) > (own is not None):
            self._machine.access.acquire({other: r[1] for other, r in released.items()})
        if own is not None:
            thread.seen = list(map(max, thread.seen, own[0]))
        seen, fence = thread.seen, thread.state.get("fence")
        near = thread.state.get("fence of the block")
        if near is not None:
            seen = list(map(max, seen, near))
        if own is not None and own[1] is not None:
            fence = own[1] if fence is None else list(map(max, fence, own[1]))
        released[block] = seen, fence
        if fence is not None:
            for other, before in block.state.get("acquired", {}).items():
                if other not in released or released[other][1] is None:
                    released[other] = released.get(other, (before,))[0], before
                else:
                    released[other] = released[other][0], list(map(max, released[other][1], before))

    def _cast(self, array, value):
        """A value as Numba gives it to an atomic: in the array's type."""
        if array.__class__ in (CheckedArray, IntegerArray, PackedArray):
            return array.cast(value)
        return array.dtype.type(value)

    @staticmethod
    def _check(name, array, dtypes):
        if array.dtype.name not in dtypes:
            raise Unsupported(
                f"there is no cuda.atomic.{name} of {array.dtype.name}: its types are "
                f"{', '.join(dtypes)}"
            )

    def add(self, array, index, value):
        self._check("add", array, NUMBERS)
        value = self._cast(array, value)
        if value.__class__ is float32:
            return self._apply(array, index, lambda old: self._flushed(array, old, value))
        return self._apply(array, index, lambda old: _number(old) + value)

    def sub(self, array, index, value):
        self._check("sub", array, NUMBERS)
        value = self._cast(array, value)
        return self._apply(array, index, lambda old: _number(old) - value)

    def and_(self, array, index, value):
        self._check("and_", array, INTEGERS)
        value = int(self._cast(array, value))
        return self._apply(array, index, lambda old: int(old) & value)

    def or_(self, array, index, value):
        self._check("or_", array, INTEGERS)
        value = int(self._cast(array, value))
        return self._apply(array, index, lambda old: int(old) | value)

    def xor(self, array, index, value):
        self._check("xor", array, INTEGERS)
        value = int(self._cast(array, value))
        return self._apply(array, index, lambda old: int(old) ^ value)

    def inc(self, array, index, value):
        self._check("inc", array, WITHOUT_SIGN)
        value = int(self._cast(array, value))
        return self._apply(array, index, lambda old: 0 if int(old) >= value else int(old) + 1)

    def dec(self, array, index, value):
        self._check("dec", array, WITHOUT_SIGN)
        value = int(self._cast(array, value))
        return self._apply(
            array, index, lambda old: value if int(old) == 0 or int(old) > value else int(old) - 1
        )

    def exch(self, array, index, value):
        self._check("exch", array, INTEGERS)
        value = self._cast(array, value)
        return self._apply(array, index, lambda old: value)

    # Numba's loops around a compare-and-swap: a NaN in memory stays, but nanmax and nanmin replace
    # it; a NaN that is given changes nothing.

    def max(self, array, index, value):
        self._check("max", array, NUMBERS)
        value = self._cast(array, value)
        return self._apply(array, index, lambda old: value if old < value else old)

    def min(self, array, index, value):
        self._check("min", array, NUMBERS)
        value = self._cast(array, value)
        return self._apply(array, index, lambda old: value if old > value else old)

    def nanmax(self, array, index, value):
        self._check("nanmax", array, NUMBERS)
        value = self._cast(array, value)
        return self._apply(
            array, index, lambda old: old if value != value or old >= value else value
        )

    def nanmin(self, array, index, value):
        self._check("nanmin", array, NUMBERS)
        value = self._cast(array, value)
        return self._apply(
            array, index, lambda old: old if value != value or old <= value else value
        )

    def _flushed(self, array, old, value):
        """The sum of two float32; in global memory `atom.add.f32` makes zeros of subnormal operands
        and results."""
        total = old + value
        if not any(0 < abs(v) < SMALLEST for v in (old, value, total)) or self._machine.is_shared(
            array
        ):
            return total
        return _without_subnormals(_without_subnormals(old) + _without_subnormals(value))

    def cas(self, array, index, old, value):
        self._check("cas", array, INTEGERS)
        old, value = self._cast(array, old), self._cast(array, value)
        return self._apply(array, index, lambda current: value if current == old else None)

    def compare_and_swap(self, array, old, value):
        self._check("compare_and_swap", array, INTEGERS)
        old, value = self._cast(array, old), self._cast(array, value)
        return self._apply(array, 0, lambda current: value if current == old else None)

    def __getattr__(self, name):
        raise Unsupported(f"the emulator does not know cuda.atomic.{name}")


def _number(value):
    return value if isinstance(value, np.floating) else int(value)


def _without_subnormals(value):
    return np.copysign(float32(0), value) if abs(value) < SMALLEST else value
