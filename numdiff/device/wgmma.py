"""wgmma: a warpgroup, 128 threads, multiplies matrices straight from shared memory (sm_90a).

    products        make_wgmma(n), make_wgmma_a_registers(n), wgmma_fence, wgmma_commit, wgmma_wait_0, _1,
                    make_wgmma_wait(n)                                               PTX ISA, section 9.7.15
    in one word     make_multiply(n): what tiles of 64 along k add, from descriptors to commit
    registers       setmaxnreg_dec_40, _inc_232, _inc_240; make_setmaxnreg                        9.7.19.5

Matrix descriptors are 64-bit numbers (emulator/wgmma_layouts.py says how they are composed). How
tiles reach shared memory and when they may be overwritten: tma.py, mbarrier.py.

THREE RULES FOR ACCUMULATORS, which are a `cuda.local.array(n // 2, float32)`
    Nothing but these intrinsics may touch it between the first wgmma and the wait. It is never
    filled with zeros: the first wgmma of a tile gets scale_d = 0, and stands before the loop, not
    under an `if`; otherwise ptxas moves registers between the instructions and runs them one at a
    time (its advisory C7515). The last wait takes the accumulators with it (`make_wgmma_wait`), or
    the compilers read them before the wait (C7514). `ptxas -v -arch sm_90a` shows these advisories
    without a GPU.

NO BRANCH IN A GROUP, about which ptxas is silent: where an `if` or a loop that is not unrolled
    stands between the wgmmas of one commit, each piece of straight code ends a separate group, and
    the commit becomes an empty one (in SASS `HGMMA.64x8x16.F16 RZ`). `wgmma_wait_1` then waits for
    all that was started, and nothing overlaps.

The functions that make an intrinsic give the same one for the same arguments. Keep it at the top of
a module: a kernel that closes over an intrinsic finds nothing in Numba's cache on disk.

The body of each is its twin in the emulator (emulator/wgmma.py, emulator/setmaxnreg.py).
"""

import functools

import numpy as np
from llvmlite import ir
from numba.cuda import types

from ..emulator import wgmma
from ..emulator.setmaxnreg import set_registers
from ..emulator.warp_matrix import bfloat16_of_words, e4m3_of_words, float16_of_words
from .bfloat16 import counterpart
from .gpu import cuda
from .inline_ptx import F32, I32, I64, TypingError, f32, i32, instruction, many, u32, u64

MAX_N = 256  # columns of a wgmma
WORDS = True  # the emulator reports the faults of `make_multiply`'s at the line that uses it
# what the twins read in a word
ELEMENTS = {"f16": float16_of_words, "bf16": bfloat16_of_words, "e4m3": e4m3_of_words}


# wgmma --------------------------------------------------------------------------------------------


@instruction("wgmma.fence.sync.aligned;", ordered=True, collective=True)
def wgmma_fence(machine):
    """Before the first wgmma, and before the next one after accumulators (or A's registers) were
    touched."""
    wgmma.fence(machine)


@instruction("wgmma.commit_group.sync.aligned;", ordered=True, collective=True)
def wgmma_commit(machine):
    """Close a group: the wgmma that this warp has issued since the last one."""
    wgmma.commit(machine)


def _make_wait(pending):
    @instruction(f"wgmma.wait_group.sync.aligned {pending};", ordered=True, collective=True)
    def wgmma_wait(machine):
        """Wait until at most `pending` groups are under way; it does not make the accumulators
        readable."""
        wgmma.wait(machine, pending)

    return wgmma_wait


wgmma_wait_0, wgmma_wait_1 = (_make_wait(n) for n in range(2))


def _check_columns(n):
    if not 8 <= n <= MAX_N or n % 8:
        raise ValueError(f"a wgmma has 8, 16, … {MAX_N} columns, not {n}.")


def _accumulators(n):
    """The accumulators of n columns: an annotation."""

    def check(name, array):
        if array != types.Array(f32, 1, "C"):
            raise TypingError(
                f"the accumulators must be a cuda.local.array({n // 2}, float32), not {array}"
            )
        return array

    return check


def _is_zero(value):
    """Whether an LLVM value is known to be the integer 0: a constant, or casts of one."""
    while isinstance(value, ir.CastInstr):
        value = value.operands[0]
    return isinstance(value, ir.Constant) and value.constant in (0, False)


def _through_accumulators(count, text, memory=False, fresh=None):
    """Code generator of a statement that reads and writes `count` accumulators ($0 …) and takes the
    other arguments.

    The accumulators are operands in and out, tied to each other, so the compiler knows that their
    values change here.
    fresh: the text where the last argument is known to be 0, and the accumulators are operands out
    only. Without it the compiler gives them some value first, behind the fence, and ptxas runs the
    instructions one at a time (C7514).
    """

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        places = [builder.gep(data, [I32(k)]) for k in range(count)]
        others = []
        for value in args[1:]:
            others.extend(
                [builder.extract_value(value, k) for k in range(len(value.type))]
                if isinstance(value.type, (ir.ArrayType, ir.LiteralStructType))
                else [value]
            )
        letters = {I32: "r", I64: "l"}
        if fresh is not None and _is_zero(others[-1]):
            others = others[:-1]
            inputs, statement_text, tied = [], fresh, []
        else:
            inputs, statement_text, tied = (
                [builder.load(p) for p in places],
                text,
                [str(k) for k in range(count)],
            )
        constraints = (
            ["=f"] * count + tied + [letters[o.type] for o in others] + ["~{memory}"] * memory
        )
        operands = inputs + others
        kind = ir.FunctionType(ir.LiteralStructType([F32] * count), [o.type for o in operands])
        assembly = ir.InlineAsm(kind, statement_text, ",".join(constraints), side_effect=True)
        accumulators = builder.call(assembly, operands, attrs=("convergent",))
        for k, place in enumerate(places):
            builder.store(builder.extract_value(accumulators, k), place)
        return context.get_dummy_value()

    return codegen


def _wgmma_texts(n, a_operands, transposed, kind):
    """PTX of a wgmma with accumulators in and out, and of one with accumulators out only (scale_d =
    0).

    a_operands: how many registers name A; transposed: the flags at the end, which E4M3 does not
    have; kind: of ELEMENTS
    """
    count = n // 2
    k, flags = (32, ()) if kind == "e4m3" else (16, transposed)
    accumulators = ", ".join(f"${k}" for k in range(count))

    def text(first, add):
        names = [f"${first + k}" for k in range(a_operands + 1)]
        a = names[0] if a_operands == 1 else f"{{{', '.join(names[:-1])}}}"
        return (
            f"{{ .reg .pred add; setp.ne.b32 add, {add}, 0; wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32."
            f"{kind}.{kind} {{{accumulators}}}, {a}, {names[-1]}, add, "
            f"{', '.join(str(int(t)) for t in (1, 1, *flags))}; }}"
        )

    return text(2 * count, f"${2 * count + a_operands + 1}"), text(count, "0")


@functools.cache
def make_wgmma(n, transpose_a=False, transpose_b=False, kind="f16"):
    """wgmma(acc, descriptor_a, descriptor_b, scale_d): acc = A·B + scale_d · acc, A (64 × 16) and B
    (16 × n) of float16; with kind="bf16" of bfloat16, which is what `in_bfloat16` takes in its
    place; with kind="e4m3" A (64 × 32) and B (32 × n) of E4M3, both K-major.

    acc: cuda.local.array(n // 2, float32); scale_d: 1, or 0 for the first of a tile
    The matrices are K-major in shared memory (k is the contiguous dimension of both); transpose_a:
    A is M-major,
    transpose_b: B is N-major. n: 8, 16, … 256
    """
    _check_columns(n)
    if kind == "e4m3" and (transpose_a or transpose_b):
        raise ValueError(
            "a wgmma of E4M3 reads both matrices along k; store the other one transposed."
        )
    text, fresh = _wgmma_texts(n, 1, (transpose_a, transpose_b), kind)

    @instruction(_through_accumulators(n // 2, text, fresh=fresh))
    def wgmma_shared(
        machine, acc: _accumulators(n), descriptor_a: u64, descriptor_b: u64, scale_d: i32
    ):
        transposed, elements = (transpose_a, transpose_b), ELEMENTS[kind]
        wgmma.issue(machine, acc, n, descriptor_a, descriptor_b, scale_d, *transposed, elements)

    if kind == "e4m3":
        return wgmma_shared
    return counterpart(wgmma_shared, lambda: make_wgmma(n, transpose_a, transpose_b, "bf16"))


@functools.cache
def make_wgmma_a_registers(n, transpose_b=False, kind="f16"):
    """wgmma(acc, a, descriptor_b, scale_d): as `make_wgmma`, with A in registers.

    a: tuple of four uint32, two float16 each, in the layout of `ldmatrix_x4` of the warp's 16 rows;
    `emulator.wgmma_layouts.a_fragment_place` gives each element's position. They too are in use
    until the wait.
    """
    _check_columns(n)
    text, fresh = _wgmma_texts(n, 4, (transpose_b,), kind)

    @instruction(_through_accumulators(n // 2, text, fresh=fresh))
    def wgmma_registers(
        machine, acc: _accumulators(n), a: many(u32, 4), descriptor_b: u64, scale_d: i32
    ):
        words = tuple(int(w) & 0xFFFFFFFF for w in a)
        transposed, elements = (False, transpose_b), ELEMENTS[kind]
        wgmma.issue(machine, acc, n, words, descriptor_b, scale_d, *transposed, elements)

    return counterpart(wgmma_registers, lambda: make_wgmma_a_registers(n, transpose_b, "bf16"))


@functools.cache
def make_wgmma_wait(n, pending=0, pin=True):
    """wgmma_wait(acc): wait until at most `pending` groups are under way, and let no read of acc
    move above the wait.

    pin: or each accumulator with a zero that ptxas cannot know to be one. ptxas joins two
        conversions of neighbours to float16 into one, moves it above the wait, and then, to stay
        correct, runs all wgmma one at a time (C7514). False saves these n / 2 instructions a
        thread, in a kernel that ptxas compiles without C7514 all the same: one whose accumulators
        are converted by `pack_half2`, or not at all.
    """
    _check_columns(n)
    text = f"wgmma.wait_group.sync.aligned {pending};"
    if pin:
        pinned = " ".join(f"or.b32 ${k}, ${k}, zero;" for k in range(n // 2))
        text = (
            f"{{ .reg .b32 zero; {text} mov.u32 zero, %ctaid.z; shr.u32 zero, zero, 31; {pinned} }}"
        )

    @instruction(_through_accumulators(n // 2, text, memory=True))
    def wgmma_wait_for(machine, acc: _accumulators(n)):
        wgmma.wait(machine, pending)

    return wgmma_wait_for


@functools.cache
def make_multiply(n, stride_a=1024):
    """multiply(acc, a, b, scale_d): acc = A·B + scale_d · acc for 64 of k, A (64 × 64) and B (64 ×
    n) of float16: four wgmma, committed as a group.

    acc, scale_d: as in `make_wgmma`
    a, b: shared addresses of the tiles, each in the 128-byte swizzle that TMA writes: 64 rows of A,
        n of B (both K-major), 64 of k in the 128 bytes of a row
    stride_a: bytes from eight rows of A to the next eight; 1024 where the rows follow each other
    """
    wgmma = make_wgmma(n)
    # bits 62 and 63: the swizzle; from 32 on: the stride / 16; 0 to 13: the address / 16 (PTX ISA,
    # section 9.7.15.5.1)
    descriptor_a, descriptor_b = (
        np.uint64(1 << 62 | stride // 16 << 32 | 1 << 16) for stride in (stride_a, 1024)
    )
    k16, k32, k48 = (np.uint64(2 * k // 16) for k in (16, 32, 48))  # so much further along k

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, a, b, scale_d):
        da, db = (
            descriptor_a | np.uint64((a & 0x3FFFF) >> 4),
            descriptor_b | np.uint64((b & 0x3FFFF) >> 4),
        )
        wgmma_fence()
        wgmma(acc, da, db, scale_d)
        wgmma(acc, da + k16, db + k16, 1)
        wgmma(acc, da + k32, db + k32, 1)
        wgmma(acc, da + k48, db + k48, 1)
        wgmma_commit()

    return multiply


# Registers ----------------------------------------------------------------------------------------


@functools.cache
def make_setmaxnreg(count, more):
    """An intrinsic that changes the registers of each thread of a warpgroup to `count`: more of
    them, or fewer.

    All four warps execute it. The producer releases registers (24 or 40 are enough for it), which
    the consumers take. With three warpgroups and 168 registers each at the start, 40 + 2 · 232 = 3
    · 168. It needs the kernel's `launch_bounds=(threads, 1)`, with the 1: otherwise ptxas gives a
    small kernel as few registers as it needs, and ignores this (its advisory C7508).
    """
    if not 24 <= count <= 256 or count % 8:
        raise ValueError(f"setmaxnreg takes 24, 32, … 256 registers, not {count}.")

    change = "inc" if more else "dec"

    @instruction(f"setmaxnreg.{change}.sync.aligned.u32 {count};", ordered=True, collective=True)
    def setmaxnreg(machine):
        set_registers(machine, count, more)

    return setmaxnreg


setmaxnreg_dec_40 = make_setmaxnreg(40, False)
setmaxnreg_inc_232, setmaxnreg_inc_240 = (make_setmaxnreg(n, True) for n in (232, 240))
