"""What `ldmatrix` and `mma.sync` compute, for a whole warp at once (PTX ISA, section 9.7.14.5)."""

import struct

import numpy as np

from .arrays import CheckedArray
from .fragments import LANES, fragment_c_m16n8, matrix_8x8, matrix_8x8_transposed
from .group_copies import shared_range
from .memory import POISON
from .threads import FULL_MASK
from .values import UInt32

FLOAT32 = np.dtype(np.float32)
ROW = 16  # bytes of a row of an 8 × 8 matrix of 16-bit elements
NOTHING = bytes([POISON]) * ROW  # a row that could not be read
# what each byte stands for: 1 sign, 4 exponent, 3 mantissa bits, bias 7; S.1111.111 is NaN
E4M3 = np.arange(256)
E4M3 = np.where(
    E4M3 & 127 == 127,
    np.nan,
    np.where(E4M3 & 128, -1, 1)
    * np.where(
        E4M3 & 120,
        np.ldexp(8.0 + (E4M3 & 7), (E4M3 >> 3 & 15) - 10),
        np.ldexp((E4M3 & 7) * 1.0, -9),
    ),
).astype(np.float32)
NAN_WORD = 0x7FFF7FFF  # NaN as float16, twice, and as tf32


def places(fragment, columns):
    """Index array (32, registers, elements): where each lane's elements are in a flat matrix of
    `columns` columns."""
    return np.array(
        [
            [[row * columns + column for row, column in register] for register in fragment(lane)]
            for lane in range(LANES)
        ]
    )


# (32, 2)
HALVES = {False: places(matrix_8x8, 8)[:, 0], True: places(matrix_8x8_transposed, 8)[:, 0]}


def _check_lanes(machine, name, threads, frame):
    """Instructions of a whole warp (`.sync.aligned`) need all of it."""
    if len(threads) == LANES:
        return
    first = next(iter(threads.values()))
    missing = [lane for lane in range(LANES) if lane not in threads]
    exist = len(first.block.warp_threads(first.warp))
    why = "does not exist" if missing[0] >= exist else "has ended"
    machine.report(
        "divergence",
        f"{name} is reached by {len(threads)} of the {LANES} lanes of a warp: "
        f"lane {missing[0]} {why}",
        machine.site_of(frame),
        first,
    )


# ldmatrix -----------------------------------------------------------------------------------------


def load_matrices(machine, address, count, transposed, frame):
    """`count` 8 × 8 matrices of 16-bit elements from shared memory: for every lane, one register of
    each.

    Lane l gives the address of row l % 8 of matrix l // 8, and reads it; addresses of further lanes
    are not used.
    """
    name, frame = f"ldmatrix.x{count}{'.trans' if transposed else ''}", machine.kernel_frame(frame)
    row, written = None, ()
    if machine.thread.lane < 8 * count:
        row = NOTHING
        found = shared_range(machine, address, ROW, frame, "loads")
        if found is not None:
            memory, offset = found
            if machine.checked:
                data = machine.access.read_bytes(memory, offset, ROW, machine.site_of(frame), 2)
                written = machine.access.recent_writers(memory, offset, ROW, 2)
            else:
                data = memory.bytes[offset : offset + ROW]
            row = data.tobytes()

    def combine(rows, threads):
        _check_lanes(machine, name, threads, frame)
        for lane, (_, stores) in rows.items():
            if stores:
                _check_order(machine, name, stores, lane % 8, transposed, threads, frame)
        data = b"".join(
            [rows[lane][0] or NOTHING if lane in rows else NOTHING for lane in range(8 * count)]
        )
        halves = np.frombuffer(data, np.uint16).reshape(count, 64)[:, HALVES[transposed]]
        words = np.ascontiguousarray(halves).view(np.uint32)[..., 0].T.tolist()
        if count == 1:
            return {lane: UInt32(words[lane][0]) for lane in threads}
        return {lane: tuple(map(UInt32, words[lane])) for lane in threads}

    return machine.scheduler.gather(name, FULL_MASK, (row, written), combine, frame)


def _check_order(machine, name, stores, row, transposed, threads, frame):
    """A row is read for the lanes that receive it: its stores must be ordered before each of them,
    too.

    stores: [(memory, offset, entry of `Memory.writer`)]; row: its number in its matrix
    """
    receivers = range(row // 2, LANES, 4) if transposed else range(4 * row, 4 * row + 4)
    for memory, offset, (stamp, site, _, atomic) in stores:
        for lane in receivers:
            thread = threads.get(lane)
            if thread is not None and not machine.access.ordered_for(thread, stamp):
                machine.access.race(
                    memory,
                    offset,
                    stamp,
                    site,
                    machine.site_of(frame),
                    f"{name} gives lane {lane}",
                    "written",
                    atomic,
                    thread,
                )
                return


# mma ----------------------------------------------------------------------------------------------


def float16_of_words(words):
    """uint32 (…) → float32 (…, 2): the two float16 in each."""
    return words.view(np.float16).reshape(*words.shape, 2).astype(np.float32)


def bfloat16_of_words(words):
    """uint32 (…) → float32 (…, 2): the two bfloat16 in each."""
    return np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], axis=-1).view(
        np.float32
    )


def e4m3_of_words(words):
    """uint32 (…) → float32 (…, 4): the four E4M3 in each."""
    return E4M3[words.view(np.uint8).reshape(*words.shape, 4)]


def tf32_of_words(words):
    """uint32 (…) → float32 (…, 1) without the 13 bits that tf32 does not have."""
    return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]


def multiply_add(a, b, c):
    """c + a · b, float32 (M, K), (K, N), (M, N): products added to c one by one in the order of k."""
    terms = np.empty((len(b) + 1, *c.shape), np.float32)
    terms[0] = c
    np.multiply(a.T[:, :, None], b[:, None, :], out=terms[1:])
    return np.add.reduce(terms, axis=0)  # over the first axis NumPy adds slice after slice


class MatrixProduct:
    """An mma of one shape, D = A · B + C with 16 × k, k × 8 and 16 × 8: its fragments, and its
    twin.

    on_turing: the product of half the k, two of which stand for this one before sm_80
    fragment_a, fragment_b: of fragments.py; elements: what the words of A and B are,
    `float16_of_words` or another
    """

    M, N = 16, 8

    def __init__(self, name, k, fragment_a, fragment_b, elements, on_turing=None):
        self.name, self.k, self.elements, self.on_turing = name, k, elements, on_turing
        self.a_places, self.b_places = places(fragment_a, k), places(fragment_b, self.N)
        self.c_places = places(fragment_c_m16n8, self.N)[:, :, 0]
        self.absent = (
            (NAN_WORD,) * self.a_places.shape[1],
            (NAN_WORD,) * self.b_places.shape[1],
            (np.nan,) * 4,
        )  # registers of a lane that is not there

    def tile(self, words, where, rows, columns):
        """The matrix (rows, columns) whose fragments are these words (32, registers)."""
        flat = np.empty(rows * columns, np.float32)
        flat[where] = self.elements(words)
        return flat.reshape(rows, columns)

    def product(self, a, b, c):
        """uint32 (32, registers) of A and B, float32 (32, 4) of C → float32 (32, 4) of D."""
        sums = np.empty(self.M * self.N, np.float32)
        sums[self.c_places] = c
        result = multiply_add(
            self.tile(a, self.a_places, self.M, self.k),
            self.tile(b, self.b_places, self.k, self.N),
            sums.reshape(self.M, self.N),
        )
        return result.reshape(-1)[self.c_places]

    def products(self, cc, a, b, c):
        """`product`, on Turing in two steps of half the k: device/turing.py."""
        if self.on_turing is None or cc >= (8, 0):
            return self.product(a, b, c)
        first = self.on_turing.product(a[:, :2], b[:, :1], c)
        return self.on_turing.product(a[:, 2:], b[:, 1:], first)

    def __call__(self, machine, a, b, c, frame, then=None):
        """The twin, called by each lane with its registers: float32 (4,), the lane's accumulators;
        `then` as in `Scheduler.pause`."""
        frame = machine.kernel_frame(frame)

        def combine(lanes, threads):
            _check_lanes(machine, self.name, threads, frame)
            a, b, c = zip(*[lanes.get(lane, self.absent) for lane in range(LANES)], strict=True)
            result = self.products(
                machine.cc, _registers(a), _registers(b), np.array(c, np.float32)
            )
            if machine.recorder is not None:
                machine.recorder.tensor(2 * self.M * self.N * self.k, machine.site_of(frame))
            if machine.film is not None:
                words = _registers(a), _registers(b)
                machine.film.product(self.name, (*words, np.array(c, np.float32), result), frame)
            return {lane: result[lane] for lane in threads}

        b = (b,) if isinstance(b, int) else b
        return machine.scheduler.gather(self.name, FULL_MASK, (a, b, c), combine, frame, then)

    def into(self, machine, sums, first, a, b, frame):
        """The twin that adds to four neighbours of an array."""
        if sums.__class__ is not CheckedArray:
            if not 0 <= first <= sums.size - 4:
                raise IndexError(f"{self.name}: sums from {int(first)} of {sums.size}")
            four = sums.reshape(-1)[first : first + 4]
            self(machine, a, b, four, frame, lambda result: four.__setitem__(slice(None), result))
            return
        access, site = machine.access, machine.site_of(frame)
        found = access.range_of(sums, first, 4, site, "sums in", align=4)
        if found is None:
            self(machine, a, b, (np.nan,) * 4, frame)
            return
        memory, offset, size = found
        access.check_read(memory, offset, size, site)
        four, start = sums.flat if sums.dtype is FLOAT32 else memory.view(FLOAT32), offset // 4

        def store(result):
            access.before_write(memory, offset, size, site)
            four[start : start + size // 4] = result

        self(machine, a, b, four[start : start + size // 4], frame, store)


def _registers(words):
    """Words of all lanes, as uint32 (32, registers)."""
    try:
        flat = [word for register in words for word in register]
        return np.frombuffer(struct.pack(f"{len(flat)}I", *flat), np.uint32).reshape(LANES, -1)
    except struct.error:  # not all are uint32
        return np.array(words, np.int64).astype(np.uint32)
