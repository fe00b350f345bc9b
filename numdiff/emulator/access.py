"""Each access of a kernel: where it goes, whether it may, and whether it races with those of other
threads (races.py).

Single elements come through `load` and `store`, which are written for speed; ranges of bytes, of
vector instructions and copies, through `check_read` and `before_write`.
"""

import math

import numpy as np

from .arrays import CheckedArray, IntegerArray, StructureElement, checked_array
from .faults import Unbound
from .memory import CONSTANT, MANY_READS, POISON, READ_SITE, Memory
from .races import Races, same_value
from .values import INTEGER_TYPES, Literal


class Access(Races):
    """The checked accesses of a machine: `load`, `store` and their kin for ranges of bytes."""

    def __init__(self, machine):
        self.machine = machine
        checks = machine.checks
        self.bounds, self.initialised, self.races = (
            "bounds" in checks,
            "uninitialised" in checks,
            "race" in checks,
        )
        self.negative, self.equal, self.unchanged = (
            "negative" in checks,
            "equal" in checks,
            "unchanged" in checks,
        )
        self.load, self.store = self._make_load(), self._make_store()
        self.load2 = self._make_load2()

    # where ----------------------------------------------------------------------------------------

    def locate(self, a, index, site, doing):
        """Byte offset of an element; None after a fault; a `CheckedArray` where the index names
        part of the array."""
        if index.__class__ is str:
            return a.field(index)
        index = index if index.__class__ is tuple else (index,)
        if len(index) < a.ndim or any(
            i is None or i is Ellipsis or i.__class__ is slice for i in index
        ):
            for i in index:
                if (
                    isinstance(i, int)
                    and i < 0
                    and self.negative
                    and site not in self.machine.negative_sites
                ):
                    self.machine.report(
                        "bounds",
                        f"{doing} {a.name or a.memory.space + ' array'}[{i}]: index {int(i)} "
                        "is negative (Numba would count it from the end)",
                        site,
                    )
                    return None
            try:
                return a.part(index)
            except IndexError as error:
                self.machine.report("bounds", f"{doing} {a!r}: {error}", site)
                return None
        if len(index) > a.ndim:
            raise TypeError(f"{len(index)} indices for {a!r}")
        offset = a.offset
        for axis, i in enumerate(index):
            n = a.shape[axis]
            if i.__class__ not in _INDEX:
                if isinstance(i, (np.floating, float)):
                    raise TypeError(f"index {i!r} of {a!r} is a float")
                i = int(i)
            if not 0 <= i < n:
                if -n <= i < 0 and (site in self.machine.negative_sites or not self.negative):
                    i += n
                else:
                    if -n <= i < 0 and self.negative:
                        why = "negative (Numba would count it from the end)"
                    else:
                        why = (
                            f"outside of axis {axis}, whose length is {n}"
                            if a.ndim > 1 or not n
                            else f"outside of 0 … {n - 1}"
                        )
                        if not n and a.memory is getattr(self.machine.block, "dynamic", None):
                            why += " (it has what the launch gives as dynamic shared memory)"
                    where = ", ".join(str(int(k)) for k in index)
                    self.machine.report(
                        "bounds",
                        f"{doing} {a.name or a.memory.space + ' array'}[{where}]: "
                        f"index {int(i)} is {why}",
                        site,
                    )
                    return None
            offset += i * a.strides[axis]
        return StructureElement(a, offset) if a.dtype.names else offset

    # element by element ---------------------------------------------------------------------------

    def _make_load(self):
        machine, locate, races, initialised = (
            self.machine,
            self.locate,
            self.races,
            self.initialised,
        )
        noted, Checked, race, unwritten = (
            machine.noted_access,
            CheckedArray,
            self._read_race,
            self._unwritten,
        )
        note, enter, calm = self._note_read, self._enter, self._calm
        quick = races and initialised and noted is None

        def load(a, index, place):
            """place: the number of the site, READ_SITE bits further left"""
            if a.__class__ is not Checked:
                return a[index]
            memory, offset = a.memory, None
            if index.__class__ is tuple:
                if len(index) == 2:
                    i, j = index
                    try:
                        # arrays of one dimension have no columns
                        if 0 <= j < a.columns and 0 <= i < a.rows:
                            offset = a.offset + i * a.row + j * a.column
                    except TypeError:  # a slice: `locate` gives that part of the array
                        pass
            elif index.__class__ in _INDEX and 0 <= index < a._length:
                offset = a.offset + index * a.row
                if quick:
                    valid = memory.valid
                    if memory.plain:
                        stamp = machine.thread.stamp
                        if (
                            memory.calm is stamp
                            or memory.tried is not stamp
                            and calm(memory, stamp)
                        ):
                            if valid is None or valid[offset]:
                                memory.reads.append(place + offset)
                                value = a.flat[offset >> a.shift]
                                return value if a.kind is None else a.kind(value)
                    # of this thread alone, or constant
                    elif not (memory.grain or memory.busy) and (valid is None or valid[offset]):
                        value = a.flat[offset >> a.shift]
                        return value if a.kind is None else a.kind(value)
            site = place >> READ_SITE
            if offset.__class__ is not int:
                offset = locate(a, index, site, "reads")
                if offset.__class__ is not int:
                    return self.outside(a, index) if offset is None else offset
            if races and memory.plain:
                stamp, token, met = machine.thread.stamp, machine.token, memory.met
                writer = memory.writer.get(offset) if met or memory.written_in is token else None
                if writer is None:
                    if initialised and memory.valid is not None and not memory.valid[offset]:
                        unwritten(a, index, site)
                elif writer[0] is not stamp and (met or writer[2] is token):
                    race(memory, offset, writer, site)
                if memory.reads_of is token:  # of no memory where blocks meet
                    memory.reads.append((offset, 1, 1, stamp, site, token))
                elif met and machine.lone and memory.mixed is not token:  # `_note_read`
                    memory.reads.append((offset, 1, 1, stamp, site, token))
                    if len(memory.reads) > MANY_READS:
                        self.settle(memory)
                elif memory.mixed is not token and not met:
                    note(memory, (offset, 1, 1, stamp, site, token))
                else:
                    enter(memory, offset, stamp, site, token)
            elif memory.grain:
                self.check_read(
                    memory, offset, a.itemsize, site, min(memory.grain, a.itemsize), a.itemsize
                )
                value = a.flat[offset >> a.shift]
                return value if a.kind is None else a.kind(value)
            elif initialised and memory.valid is not None and not memory.valid[offset]:
                unwritten(a, index, site)
            if memory.busy:
                machine.asynchronous.touched(memory, offset, a.itemsize, site, False)
            if noted is not None:
                noted(memory, offset, a.itemsize, site, False)
            value = a.flat[offset >> a.shift]
            return value if a.kind is None else a.kind(value)

        return load

    def _make_load2(self):
        """`load` of two indices, as most reads of shared tiles are."""
        machine, load, Checked, calm = self.machine, self.load, CheckedArray, self._calm
        quick = self.races and self.initialised and machine.noted_access is None

        def load2(a, i, j, place):
            if quick and a.__class__ is Checked:
                memory, stamp = a.memory, machine.thread.stamp
                if memory.calm is stamp or memory.tried is not stamp and calm(memory, stamp):
                    try:
                        # arrays of one dimension have no columns
                        if 0 <= j < a.columns and 0 <= i < a.rows:
                            offset = a.offset + i * a.row + j * a.column
                            valid = memory.valid
                            if valid is None or valid[offset]:
                                memory.reads.append(place + offset)
                                value = a.flat[offset >> a.shift]
                                return value if a.kind is None else a.kind(value)
                    except TypeError:  # no number
                        pass
            return load(a, (i, j), place)

        return load2

    def _calm(self, memory, stamp):
        """Whether the current thread's reads of a memory race with no write and only make the list
        of reads longer: `stamp` was then put there, and `place + offset` says the rest of each.

        Nothing has been written there since the block's barrier, or, where blocks meet, in this
        launch, and no copy is in flight. Whatever changes that sets the memory's `calm` to None.
        """
        token = self.machine.token
        memory.tried = stamp  # whether it fails
        if memory.busy or not memory.plain:
            return False
        if memory.met:  # each block must be a cluster: other reads are entered at once
            if memory.writer or not self.machine.lone:
                return False
            if len(memory.reads) > MANY_READS:
                self.settle(memory)
        elif memory.written_in is token or memory.mixed is token:
            return False
        elif memory.reads_of is not token:
            memory.reads, memory.reads_of = [], token
        memory.reads.append((stamp, token))
        memory.calm, memory.tried = stamp, None
        return True

    def _make_store(self):
        machine, locate, check_write = self.machine, self.locate, self.check_write
        noted, Checked, races = machine.noted_access, CheckedArray, self.races

        def store(a, index, value, site):
            if a.__class__ is not Checked:
                a[index] = value
                return
            offset = None
            if index.__class__ is tuple:
                if len(index) == 2 == a.ndim:
                    i, j = index
                    try:
                        if 0 <= i < a.rows and 0 <= j < a.columns:
                            offset = a.offset + i * a.row + j * a.column
                    except TypeError:  # a slice
                        pass
            elif index.__class__ in _INDEX and 0 <= index < a._length:
                offset = a.offset + index * a.row
            if offset.__class__ is not int:
                offset = locate(a, index, site, "writes")
                if offset is None:
                    return
                if offset.__class__ is StructureElement:
                    offset.assign(value)
                    return
                if offset.__class__ is not int:  # a slice: element by element
                    for at in np.ndindex(offset.shape):
                        store(
                            offset,
                            at,
                            value[at] if hasattr(value, "shape") and value.shape else value,
                            site,
                        )
                    return
            memory, size = a.memory, a.itemsize
            if memory.space is CONSTANT:
                machine.report("bounds", f"writes into the constant array {a.name}", site)
                return
            if value.__class__ is not a.exact:
                if value.__class__ is Unbound and memory.valid is not None:
                    self._store_unbound(a, offset, site)
                    return
                value = a.cast(value)
            machine.stores += 1
            if races and memory.plain:
                check_write(memory, offset, size, site, value, a)
            elif races and memory.grain and memory.shadowed:
                grain, same = min(memory.grain, size), same_value(a, offset, value)
                for at in range(offset, offset + size, grain):
                    check_write(memory, at, grain, site, same=same)
            valid = memory.valid
            if valid is not None and not (valid[offset] and valid[offset + size - 1]):
                valid[offset : offset + size] = _ONES[size]
            if memory.busy:
                machine.asynchronous.touched(memory, offset, size, site, True)
            if noted is not None:
                noted(memory, offset, size, site, True)
            a.flat[offset >> a.shift] = value

        return store

    def _store_unbound(self, a, offset, site):
        """Store a variable that has no value: the element counts as never written."""
        memory, size = a.memory, a.itemsize
        self.before_write(memory, offset, size, site, size)
        memory.valid[offset : offset + size] = bytes(size)
        memory.bytes[offset : offset + size] = POISON
        memory.calm = None

    # ranges of bytes, for vector instructions and copies ------------------------------------------

    def range_of(self, a, index, count, site, doing, align=None):
        """(memory, offset, bytes) of `count` elements from `index` of a contiguous array; None
        after a fault."""
        if a.__class__ is IntegerArray:
            a = a.data
        if a.__class__ is np.ndarray:  # nothing is checked
            return a, int(index), count
        index = int(index)
        last = index + count - 1
        if index < 0 or last >= a.size:
            where = f"{index}" if count == 1 else f"{index} … {last}"
            self.machine.report("bounds", f"{doing} {a.name}[{where}] of {a.size} elements", site)
            return None
        offset, size = a.offset + index * a.itemsize, count * a.itemsize
        align = align or size
        if (a.memory.address + offset) % align:
            self.machine.report(
                "alignment",
                f"{doing} {size} bytes of {a.name} from element {index}, whose address is "
                f"not a multiple of {align}",
                site,
            )
        return a.memory, offset, size

    def load_vector(self, a, index, count):
        """A tuple of `count` neighbours, moved by one instruction; the address must be a multiple
        of its size."""
        if a.__class__ is not CheckedArray:
            return tuple(a.reshape(-1)[index : index + count])
        site = self.machine.site_here()
        where = self.range_of(a, index, count, site, "reads")
        if where is None:
            return (self.outside(a),) * count
        memory, offset, size = where
        self.check_read(memory, offset, size, site, a.itemsize)
        return tuple(a.flat[offset >> a.shift : (offset + size) >> a.shift])

    def store_vector(self, a, index, values):
        """Write neighbours with one instruction; the address must be a multiple of its size."""
        if a.__class__ is not CheckedArray:
            a.reshape(-1)[index : index + len(values)] = values
            return
        site = self.machine.site_here()
        where = self.range_of(a, index, len(values), site, "writes")
        if where is not None:
            memory, offset, size = where
            data = np.array(values, a.dtype)
            self.before_write(memory, offset, size, site, a.itemsize)
            a.flat[offset >> a.shift : (offset + size) >> a.shift] = data

    def read_bytes(self, memory, offset, size, site, step=4):
        """The bytes, after the checks of a load by the current thread of elements of `step` bytes."""
        self.check_read(memory, offset, size, site, step)
        return memory.bytes[offset : offset + size]

    def check_read(self, memory, offset, size, site, step=4, counted=None):
        """The checks of `read_bytes`. counted: the size of an element as counts have it"""
        machine, valid = self.machine, memory.valid
        unwritten = self.initialised and valid is not None and 0 in valid[offset : offset + size]
        if self.races and memory.shadowed:
            stamp, token, met = machine.thread.stamp, machine.token, memory.met
            if unwritten or (memory.writer if met else memory.written_in is token):
                written = memory.writer.get
                for at in range(offset, offset + size, step):
                    writer = written(at)
                    if writer is None:
                        if unwritten and not valid[at]:
                            self._uninitialised(memory, at, site)
                            break
                    elif (
                        writer[0] is not stamp
                        and (writer[2] is token or met)
                        and not self._ordered(writer[0])
                    ):
                        self.race(
                            memory, at, writer[0], writer[1], site, "reads", "written", writer[3]
                        )
                        break
            if memory.reads_of is token:
                memory.reads.append((offset, size, step, stamp, site, token))
            elif memory.mixed is token:
                logs = memory.reader
                for at in range(offset, offset + size, step):
                    log = logs.get(at)
                    if log is None or log[0] is not token:
                        logs[at] = [token, stamp, site]
                    elif log[-2] is not stamp:
                        log += stamp, site
            else:
                self._note_read(memory, (offset, size, step, stamp, site, token))
        elif unwritten:
            at = next((at for at in range(offset, offset + size, step) if not valid[at]), None)
            if at is not None:
                self._uninitialised(memory, at, site)
        if memory.busy:
            machine.asynchronous.touched(memory, offset, size, site, False)
        if machine.noted_access is not None:
            machine.noted_access(memory, offset, size, site, False, counted or step)

    def write_bytes(self, memory, offset, data, site, step=4):
        """Write uint8 data, with the checks of a store by the current thread of elements of `step`
        bytes."""
        self.before_write(memory, offset, len(data), site, step)
        memory.bytes[offset : offset + len(data)] = data

    def before_write(self, memory, offset, size, site, step=4):
        """The checks of `write_bytes`."""
        if self.races and memory.shadowed:
            self.check_writes(memory, offset, size, site, step)
        self.machine.stores += 1
        if memory.valid is not None:
            memory.valid[offset : offset + size] = b"\1" * size
        if memory.busy:
            self.machine.asynchronous.touched(memory, offset, size, site, True)
        if self.machine.noted_access is not None:
            self.machine.noted_access(memory, offset, size, site, True, step)

    # faults ---------------------------------------------------------------------------------------

    def say(self, memory, offset):
        """A byte of a memory in words."""
        return (
            self.machine.element_name(memory, offset)
            or f"{memory.space} address {memory.address + offset:#x}"
        )

    def _uninitialised(self, memory, offset, site):
        self.machine.report(
            "uninitialised",
            f"reads {memory.space} memory that was never written: {self.say(memory, offset)}",
            site,
        )

    def outside(self, a, index=None):
        """The result of a read outside of an array after its fault: an element, or, where the index
        names a part, an array of them that is not checked again. Floats are NaN; integers are 0,
        which leads to no further fault as an index.
        """
        shape = () if index is None else a.part(index, inside=False).shape
        memory = Memory(a.memory.space, math.prod(shape) * a.itemsize, a.name, valid=True)
        memory.bytes.fill(0 if a.dtype.kind in "iu" else POISON)
        memory.shadowed = memory.plain = False
        part = checked_array(self.machine, memory, 0, shape, a.dtype)
        if shape:
            return part
        return part.flat[0] if a.kind is None else a.kind(part.flat[0])

    def _unwritten(self, a, index, site):
        index = index if isinstance(index, tuple) else (index,)
        where = ", ".join(str(int(i)) for i in index)
        self.machine.report(
            "uninitialised",
            f"reads {a.memory.space} {a.name or 'array'}[{where}], which was never written",
            site,
        )


_INDEX = frozenset((int, Literal, *(t.kind for t in INTEGER_TYPES.values())))
_ONES = {n: b"\1" * n for n in (1, 2, 4, 8, 16)}
