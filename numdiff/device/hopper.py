"""Hopper's own instructions (sm_90a): the copy engine, mbarriers, matrix instructions of a warpgroup.

A fast kernel on Hopper is a pipeline between two kinds of warpgroups (128 threads each). One thread of the producer
asks the copy engine (TMA) for tiles; the consumers multiply them with `wgmma`, straight from shared memory. Each stage
of the pipeline has two mbarriers, `full` and `empty`:

    producer                                            consumer
    mbarrier_wait(empty, parity)                        mbarrier_wait(full, parity)
    mbarrier_expect_tx(full, bytes)                     wgmma_fence()
    tma_load_2d(tile_a, map_a, full, k, row)            wgmma(acc, descriptor_a, descriptor_b, 1)   … one per 16 of k
    tma_load_2d(tile_b, map_b, full, k, column)         wgmma_commit(); wgmma_wait_1()
                                                        mbarrier_arrive(empty of the stage before)

ADDRESSES in shared memory are 32-bit numbers, `smem_u32(array)` plus bytes. Tensor maps are the arrays of 128 bytes
that `tensor_map` makes on the host (tensor_map.py). Matrix descriptors are 64-bit numbers (emulator/wgmma.py says how
they are made up). Coordinates and sizes of boxes run innermost dimension first. The innermost coordinate must be a
multiple of 16 bytes, and no coordinate of a store negative, or a GPU ends with an illegal instruction.

    mbarriers       mbarrier_init, _inval, _arrive, _arrive_count, _expect_tx (which arrives too), _expect_tx_only,
                    _wait, _try_wait, _test_wait; fence_barrier_init                 PTX ISA, section 9.7.13.15
    copy engine     tma_load_1d … 5d, tma_store_1d … 5d, tma_store_commit, tma_store_wait_0, _1, tma_store_wait_read_0,
                    _1, _3, tma_prefetch; fence_proxy_async, fence_proxy_async_global                      9.7.9.27
    wgmma           make_wgmma(n), make_wgmma_a_registers(n), wgmma_fence, wgmma_commit, wgmma_wait_0 … _3,
                    make_wgmma_wait(n)                                                                     9.7.15
    registers       setmaxnreg_dec_24, _dec_40, _inc_232, _inc_240; make_setmaxnreg                        9.7.19.5
    named barriers  bar_sync, bar_arrive                                                                   9.7.13.1
    clusters        in cluster.py

THREE RULES FOR ACCUMULATORS, which are a `cuda.local.array(n // 2, float32)`
    Nothing but these intrinsics may touch it between the first wgmma and the wait. It is never filled with zeros: the
    first wgmma of a tile gets scale_d = 0, and stands before the loop, not under an `if`; otherwise ptxas moves
    registers between the instructions and runs them one at a time (its advisory C7515). The last wait takes the
    accumulators with it (`make_wgmma_wait`), or the compilers read them before the wait (C7514). What ptxas says of a
    kernel, `ptxas -v -arch sm_90a` tells without a GPU.

NO BRANCH IN A GROUP, which it does not tell: where an `if` or a loop that is not unrolled stands between the wgmmas of
    one commit, each piece of straight code ends a group of its own, and the commit becomes an empty one (in SASS
    `HGMMA.64x8x16.F16 RZ`). `wgmma_wait_1` then waits for all that was started, and nothing overlaps.

The functions that make an intrinsic give the same one for the same arguments. Keep it at the top of a module: a kernel
that closes over an intrinsic finds nothing in Numba's cache on disk.

In the emulator each has its twin, right below it here: what it does is written in emulator/mbarrier.py,
copy_engine.py and wgmma.py.
"""
import functools

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import copy_engine, mbarrier, twin, wgmma
from ..emulator.memory import GLOBAL
from ..emulator.values import UInt32, float16
from .inline_ptx import F32, I32, I64, TypingError, element_pointer, emit, require_contiguous, statement

I1 = ir.IntType(1)
u32, u64, void = types.uint32, types.uint64, types.void
MAX_N = 256  # columns of a wgmma


# Addresses ------------------------------------------------------------------------------------------------------------

@intrinsic
def smem_u32(typingctx, array):
    """The address (uint32, bytes) of a shared array's first element in the shared state space."""
    require_contiguous("smem_u32", array)

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], I32(0))
        address = builder.ptrtoint(pointer, I64)
        return emit(builder, "{ .reg .u64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }", [I32], [address])[0]

    return u32(array), codegen


@twin(smem_u32)
def _smem_u32(machine, array):
    return UInt32(machine.shared_address(array))


# mbarriers ------------------------------------------------------------------------------------------------------------

@intrinsic
def mbarrier_init(typingctx, barrier, count):
    """Make the 8 bytes at a shared address an mbarrier whose phases take `count` arrivals; one thread does it.

    Then `fence_barrier_init()` in the same thread, and `cuda.syncthreads()`, before anybody uses it.
    """
    return void(u32, u32), statement("mbarrier.init.shared::cta.b64 [$0], $1;", ordered=True)


@twin(mbarrier_init)
def _mbarrier_init(machine, barrier, count):
    mbarrier.initialise(machine, barrier, count)


@intrinsic
def mbarrier_inval(typingctx, barrier):
    """The bytes of an mbarrier that nobody uses any more may hold something else."""
    return void(u32), statement("mbarrier.inval.shared::cta.b64 [$0];", ordered=True)


@twin(mbarrier_inval)
def _mbarrier_inval(machine, barrier):
    mbarrier.invalidate(machine, barrier)


@intrinsic
def mbarrier_expect_tx(typingctx, barrier, tx_bytes):
    """Announce that the copy engine will bring `tx_bytes` in this phase, and arrive."""
    return void(u32, u32), statement("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", ordered=True)


@twin(mbarrier_expect_tx)
def _mbarrier_expect_tx(machine, barrier, tx_bytes):
    mbarrier.arrive(machine, barrier, 1, tx_bytes)


@intrinsic
def mbarrier_expect_tx_only(typingctx, barrier, tx_bytes):
    """Announce that the copy engine will bring `tx_bytes` in this phase, without arriving."""
    return void(u32, u32), statement("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", ordered=True)


@twin(mbarrier_expect_tx_only)
def _mbarrier_expect_tx_only(machine, barrier, tx_bytes):
    mbarrier.expect_tx(machine, barrier, tx_bytes)


@intrinsic
def mbarrier_arrive(typingctx, barrier):
    """Arrive: who waits for this phase will see what this thread has done before."""
    return void(u32), statement("mbarrier.arrive.shared::cta.b64 _, [$0];", ordered=True)


@twin(mbarrier_arrive)
def _mbarrier_arrive(machine, barrier):
    mbarrier.arrive(machine, barrier)


@intrinsic
def mbarrier_arrive_count(typingctx, barrier, count):
    """Arrive `count` times at once."""
    return void(u32, u32), statement("mbarrier.arrive.shared::cta.b64 _, [$0], $1;", ordered=True)


@twin(mbarrier_arrive_count)
def _mbarrier_arrive_count(machine, barrier, count):
    mbarrier.arrive(machine, barrier, count)


@intrinsic
def mbarrier_wait(typingctx, barrier, parity):
    """Wait until the phase of this parity is over: at once if it was the last that ended; a fresh barrier is in phase
    0, and a wait for parity 1 gets through it."""
    return void(u32, u32), statement(
        "{ .reg .pred over; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; @!over bra "
        "WAIT_${:uid}; }", ordered=True)


@twin(mbarrier_wait)
def _mbarrier_wait(machine, barrier, parity):
    mbarrier.wait(machine, barrier, parity)


def _asks(instruction):
    """Code generator of a question to a barrier, answered with a boolean."""
    def codegen(context, builder, sig, args):
        text = (f"{{ .reg .pred over; mbarrier.{instruction}.parity.shared::cta.b64 over, [$1], $2; "
                "selp.u32 $0, 1, 0, over; }")
        answer = emit(builder, text, [I32], args, ordered=True)[0]
        return builder.icmp_unsigned("!=", answer, I32(0))
    return codegen


@intrinsic
def mbarrier_try_wait(typingctx, barrier, parity):
    """Whether the phase of this parity is over; the hardware may wait a while before it says no."""
    return types.boolean(u32, u32), _asks("try_wait")


@twin(mbarrier_try_wait)
def _mbarrier_try_wait(machine, barrier, parity):
    return mbarrier.try_wait(machine, barrier, parity)


@intrinsic
def mbarrier_test_wait(typingctx, barrier, parity):
    """Whether the phase of this parity is over, without waiting."""
    return types.boolean(u32, u32), _asks("test_wait")


@twin(mbarrier_test_wait)
def _mbarrier_test_wait(machine, barrier, parity):
    return mbarrier.try_wait(machine, barrier, parity)


@intrinsic
def fence_barrier_init(typingctx):
    """After `mbarrier_init`: the copy engine and other blocks of a cluster see the initialised barriers."""
    return void(), statement("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", ordered=True)


@twin(fence_barrier_init)
def _fence_barrier_init(machine):
    machine.asynchronous.fence(machine.thread)


# The asynchronous proxy -----------------------------------------------------------------------------------------------

@intrinsic
def fence_proxy_async(typingctx):
    """What this thread has stored in shared memory is seen by the `wgmma` and TMA stores that come after (a
    barrier)."""
    return void(), statement("fence.proxy.async.shared::cta;", ordered=True)


@twin(fence_proxy_async)
def _fence_proxy_async(machine):
    machine.asynchronous.fence(machine.thread)


@intrinsic
def fence_proxy_async_global(typingctx):
    """What this thread has stored in global memory is seen by the TMA loads that come after (a barrier)."""
    return void(), statement("fence.proxy.async.global;", ordered=True)


@twin(fence_proxy_async_global)
def _fence_proxy_async_global(machine):
    machine.asynchronous.fence(machine.thread, GLOBAL)


# The copy engine ------------------------------------------------------------------------------------------------------

def _tensor_copy(rank, load):
    """Code generator of a copy between a shared address and a box of a tensor of `rank` dimensions."""
    registers = [f"${k}" for k in range(3 if load else 2, (3 if load else 2) + rank)]
    box = f"[$1, {{{', '.join(registers)}}}]"
    if load:
        text = (f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], {box}, "
                "[$2];")
    else:
        text = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group {box}, [$0];"

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[1], args[1], I32(0))
        operands = [args[0], builder.ptrtoint(pointer, I64), *args[2:]]
        emit(builder, text, [], operands, ordered=True)
        return context.get_dummy_value()

    return codegen


def _loads(rank, descriptor):
    """Signature and code of a load."""
    require_contiguous("a TMA load", descriptor)
    return void(u32, descriptor, u32, *[u32] * rank), _tensor_copy(rank, True)


def _stores(rank, descriptor):
    """Signature and code of a store."""
    require_contiguous("a TMA store", descriptor)
    return void(u32, descriptor, *[u32] * rank), _tensor_copy(rank, False)


@intrinsic
def tma_load_1d(typingctx, smem, descriptor, barrier, x):
    """Start a copy of the box at element x of a tensor to the tile at a shared address; `barrier` counts its bytes.

    Coordinates may be negative or beyond the end: what lies outside of the tensor comes as zeros, and counts. x must be
    a multiple of 16 bytes.
    """
    return _loads(1, descriptor)


@twin(tma_load_1d)
def _tma_load_1d(machine, smem, descriptor, barrier, *at):
    copy_engine.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_2d(typingctx, smem, descriptor, barrier, x, y):
    """As `tma_load_1d`, of a matrix: x is the column, y the row."""
    return _loads(2, descriptor)


@twin(tma_load_2d)
def _tma_load_2d(machine, smem, descriptor, barrier, *at):
    copy_engine.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_3d(typingctx, smem, descriptor, barrier, x, y, z):
    """As `tma_load_1d`, of a tensor of three dimensions."""
    return _loads(3, descriptor)


@twin(tma_load_3d)
def _tma_load_3d(machine, smem, descriptor, barrier, *at):
    copy_engine.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_4d(typingctx, smem, descriptor, barrier, c, w, h, n):
    """As `tma_load_1d`, of a tensor of four dimensions, such as images (n, h, w, c)."""
    return _loads(4, descriptor)


@twin(tma_load_4d)
def _tma_load_4d(machine, smem, descriptor, barrier, *at):
    copy_engine.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_5d(typingctx, smem, descriptor, barrier, a, b, c, d, e):
    """As `tma_load_1d`, of a tensor of five dimensions."""
    return _loads(5, descriptor)


@twin(tma_load_5d)
def _tma_load_5d(machine, smem, descriptor, barrier, *at):
    copy_engine.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_store_1d(typingctx, smem, descriptor, x):
    """Start a copy of the tile at a shared address to the box at element x of a tensor; part of this thread's open
    group.

    x must be a multiple of 16 bytes, and not negative. Whoever stored into the tile must have given
    `fence_proxy_async()` since; what lies outside of the tensor is not written.
    """
    return _stores(1, descriptor)


@twin(tma_store_1d)
def _tma_store_1d(machine, smem, descriptor, *at):
    copy_engine.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_2d(typingctx, smem, descriptor, x, y):
    """As `tma_store_1d`, into a matrix: x is the column, y the row."""
    return _stores(2, descriptor)


@twin(tma_store_2d)
def _tma_store_2d(machine, smem, descriptor, *at):
    copy_engine.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_3d(typingctx, smem, descriptor, x, y, z):
    """As `tma_store_1d`, into a tensor of three dimensions."""
    return _stores(3, descriptor)


@twin(tma_store_3d)
def _tma_store_3d(machine, smem, descriptor, *at):
    copy_engine.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_4d(typingctx, smem, descriptor, c, w, h, n):
    """As `tma_store_1d`, into a tensor of four dimensions."""
    return _stores(4, descriptor)


@twin(tma_store_4d)
def _tma_store_4d(machine, smem, descriptor, *at):
    copy_engine.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_5d(typingctx, smem, descriptor, a, b, c, d, e):
    """As `tma_store_1d`, into a tensor of five dimensions."""
    return _stores(5, descriptor)


@twin(tma_store_5d)
def _tma_store_5d(machine, smem, descriptor, *at):
    copy_engine.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_commit(typingctx):
    """Close a group: the stores that this thread has started since the last one."""
    return void(), statement("cp.async.bulk.commit_group;", ordered=True)


@twin(tma_store_commit)
def _tma_store_commit(machine):
    copy_engine.commit(machine)


@functools.cache
def make_tma_store_wait(pending, read=False):
    """An intrinsic that waits until at most `pending` groups of the thread's stores are under way.

    read: only until their tiles have been read and may be overwritten; the data may not have arrived yet
    """
    text = f"cp.async.bulk.wait_group{'.read' * read} {pending};"

    @intrinsic
    def tma_store_wait(typingctx):
        return void(), statement(text, ordered=True)

    @twin(tma_store_wait)
    def _tma_store_wait(machine):
        copy_engine.wait(machine, pending, read)

    return tma_store_wait


tma_store_wait_0, tma_store_wait_1 = (make_tma_store_wait(n) for n in (0, 1))
tma_store_wait_read_0, tma_store_wait_read_1, tma_store_wait_read_3 = (make_tma_store_wait(n, True) for n in (0, 1, 3))


@intrinsic
def tma_prefetch(typingctx, descriptor):
    """Fetch a tensor map into the copy engine's cache, before the first copy needs it."""
    require_contiguous("tma_prefetch", descriptor)

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], I32(0))
        emit(builder, "prefetch.tensormap [$0];", [], [builder.ptrtoint(pointer, I64)], ordered=True)
        return context.get_dummy_value()

    return void(descriptor), codegen


@twin(tma_prefetch)
def _tma_prefetch(machine, descriptor):
    copy_engine.map_from(machine, descriptor)


# wgmma ----------------------------------------------------------------------------------------------------------------

@intrinsic
def wgmma_fence(typingctx):
    """Before the first wgmma, and before the next one after accumulators (or A's registers) were touched."""
    return void(), statement("wgmma.fence.sync.aligned;", ordered=True, collective=True)


@twin(wgmma_fence)
def _wgmma_fence(machine):
    wgmma.fence(machine)


@intrinsic
def wgmma_commit(typingctx):
    """Close a group: the wgmma that this warp has given since the last one."""
    return void(), statement("wgmma.commit_group.sync.aligned;", ordered=True, collective=True)


@twin(wgmma_commit)
def _wgmma_commit(machine):
    wgmma.commit(machine)


def _make_wait(pending):
    @intrinsic
    def wgmma_wait(typingctx):
        """Wait until at most so many groups are under way; it does not make the accumulators readable."""
        return void(), statement(f"wgmma.wait_group.sync.aligned {pending};", ordered=True, collective=True)

    @twin(wgmma_wait)
    def _wgmma_wait(machine):
        wgmma.wait(machine, pending)

    return wgmma_wait


wgmma_wait_0, wgmma_wait_1, wgmma_wait_2, wgmma_wait_3 = (_make_wait(n) for n in range(4))


def _check_columns(n):
    if not 8 <= n <= MAX_N or n % 8:
        raise ValueError(f"a wgmma has 8, 16, … {MAX_N} columns, not {n}.")


def _require_accumulators(array, count):
    if not isinstance(array, types.Array) or array.dtype != types.float32 or array.ndim != 1 or array.layout != "C":
        raise TypingError(f"the accumulators must be a cuda.local.array({count}, float32), not {array}")


def _is_zero(value):
    """Whether an LLVM value is known to be the integer 0: a constant, or casts of one."""
    while isinstance(value, ir.CastInstr):
        value = value.operands[0]
    return isinstance(value, ir.Constant) and value.constant in (0, False)


def _through_accumulators(count, text, memory=False, fresh=None):
    """Code generator of a statement that reads and writes `count` accumulators ($0 …) and takes the other arguments.

    The accumulators are operands in and out, tied to each other, so the compiler knows that their values change here.
    fresh: the text where the last argument is known to be 0, and the accumulators are operands out only. Without it the
    compiler gives them some value first, behind the fence, and ptxas runs the instructions one at a time (C7514).
    """

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
        places = [builder.gep(data, [I32(k)]) for k in range(count)]
        others = []
        for value in args[1:]:
            others.extend([builder.extract_value(value, k) for k in range(len(value.type))]
                          if isinstance(value.type, (ir.ArrayType, ir.LiteralStructType)) else [value])
        letters = {I32: "r", I64: "l"}
        if fresh is not None and _is_zero(others[-1]):
            others = others[:-1]
            inputs, statement_text, tied = [], fresh, []
        else:
            inputs, statement_text, tied = [builder.load(p) for p in places], text, [str(k) for k in range(count)]
        constraints = ["=f"] * count + tied + [letters[o.type] for o in others] + ["~{memory}"] * memory
        operands = inputs + others
        kind = ir.FunctionType(ir.LiteralStructType([F32] * count), [o.type for o in operands])
        assembly = ir.InlineAsm(kind, statement_text, ",".join(constraints), side_effect=True)
        sums = builder.call(assembly, operands, attrs=("convergent",))
        for k, place in enumerate(places):
            builder.store(builder.extract_value(sums, k), place)
        return context.get_dummy_value()

    return codegen


def _wgmma_texts(n, a_operands, transposed):
    """PTX of a wgmma with accumulators in and out, and of one with accumulators out only (scale_d = 0).

    a_operands: how many registers name A; transposed: the flags at the end
    """
    count = n // 2
    sums = ", ".join(f"${k}" for k in range(count))

    def text(first, add):
        names = [f"${first + k}" for k in range(a_operands + 1)]
        a = names[0] if a_operands == 1 else f"{{{', '.join(names[:-1])}}}"
        return (f"{{ .reg .pred add; setp.ne.b32 add, {add}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 "
                f"{{{sums}}}, {a}, {names[-1]}, add, 1, 1, {', '.join(str(int(t)) for t in transposed)}; }}")

    return text(2 * count, f"${2 * count + a_operands + 1}"), text(count, "0")


@functools.cache
def make_wgmma(n, transpose_a=False, transpose_b=False):
    """wgmma(acc, descriptor_a, descriptor_b, scale_d): acc = A·B + scale_d · acc, A (64 × 16) and B (16 × n) of
    float16.

    acc: cuda.local.array(n // 2, float32); scale_d: 1, or 0 for the first of a tile
    The matrices lie K-major in shared memory (k is the contiguous dimension of both); transpose_a: A is M-major,
    transpose_b: B is N-major. n: 8, 16, … 256
    """
    _check_columns(n)
    count = n // 2
    text, fresh = _wgmma_texts(n, 1, (transpose_a, transpose_b))

    @intrinsic
    def wgmma_shared(typingctx, acc, descriptor_a, descriptor_b, scale_d):
        _require_accumulators(acc, count)
        return void(acc, u64, u64, types.int32), _through_accumulators(count, text, fresh=fresh)

    @twin(wgmma_shared)
    def _wgmma_shared(machine, acc, descriptor_a, descriptor_b, scale_d):
        wgmma.issue(machine, acc, n, descriptor_a, descriptor_b, scale_d, transpose_a, transpose_b)

    return wgmma_shared


@functools.cache
def make_wgmma_a_registers(n, transpose_b=False):
    """wgmma(acc, a, descriptor_b, scale_d): as `make_wgmma`, with A in registers.

    a: tuple of four uint32, two float16 each; `emulator.wgmma.a_fragment_place` says which element lies where (as in
    `ldmatrix_x4` of the warp's 16 rows). They too are in use until the wait.
    """
    _check_columns(n)
    count = n // 2
    text, fresh = _wgmma_texts(n, 4, (transpose_b,))

    @intrinsic
    def wgmma_registers(typingctx, acc, a, descriptor_b, scale_d):
        _require_accumulators(acc, count)
        return void(acc, types.UniTuple(u32, 4), u64, types.int32), _through_accumulators(count, text, fresh=fresh)

    @twin(wgmma_registers)
    def _wgmma_registers(machine, acc, a, descriptor_b, scale_d):
        wgmma.issue(machine, acc, n, tuple(int(w) & 0xFFFFFFFF for w in a), descriptor_b, scale_d, False, transpose_b)

    return wgmma_registers


@functools.cache
def make_wgmma_wait(n, pending=0, pin=True):
    """wgmma_wait(acc): wait until at most `pending` groups are under way, and let no read of acc move above the wait.

    pin: or each accumulator with a zero that ptxas cannot know to be one. ptxas joins two conversions of neighbours to
        float16 into one, moves it above the wait, and then, to stay correct, runs all wgmma one at a time (C7514).
        False saves these n / 2 instructions a thread, in a kernel that ptxas compiles without C7514 nevertheless: one
        whose accumulators are converted by `pack_half2`, or not at all.
    """
    _check_columns(n)
    text = f"wgmma.wait_group.sync.aligned {pending};"
    if pin:
        pinned = " ".join(f"or.b32 ${k}, ${k}, zero;" for k in range(n // 2))
        text = f"{{ .reg .b32 zero; {text} mov.u32 zero, %ctaid.z; shr.u32 zero, zero, 31; {pinned} }}"

    @intrinsic
    def wgmma_wait_for(typingctx, acc):
        _require_accumulators(acc, n // 2)
        return void(acc), _through_accumulators(n // 2, text, memory=True)

    @twin(wgmma_wait_for)
    def _wgmma_wait_for(machine, acc):
        wgmma.wait(machine, pending)

    return wgmma_wait_for


@intrinsic
def pack_half2(typingctx, low, high):
    """Two float32, rounded to float16, in one word (uint32): low in its low half."""
    return u32(types.float32, types.float32), statement("cvt.rn.f16x2.f32 $0, $2, $1;", [I32])


@twin(pack_half2)
def _pack_half2(machine, low, high):
    return UInt32(int(float16(low).view("u2")) | int(float16(high).view("u2")) << 16)


# Registers ------------------------------------------------------------------------------------------------------------

@functools.cache
def make_setmaxnreg(count, more):
    """An intrinsic that changes the registers of each thread of a warpgroup to `count`: more of them, or fewer.

    All four warps execute it. The producer gives registers back (24 or 40 are enough for it), the consumers take them:
    with three warpgroups and 168 registers each at the start, 40 + 2 · 232 = 3 · 168. It needs the kernel's
    `launch_bounds=(threads, 1)`, with the 1: otherwise ptxas gives a small kernel as few registers as it needs, and
    ignores this (its advisory C7508).
    """
    if not 24 <= count <= 256 or count % 8:
        raise ValueError(f"setmaxnreg takes 24, 32, … 256 registers, not {count}.")

    @intrinsic
    def setmaxnreg(typingctx):
        return void(), statement(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};", ordered=True,
                                 collective=True)

    @twin(setmaxnreg)
    def _setmaxnreg(machine):
        wgmma.set_registers(machine, count, more)

    return setmaxnreg


setmaxnreg_dec_24, setmaxnreg_dec_40 = (make_setmaxnreg(n, False) for n in (24, 40))
setmaxnreg_inc_232, setmaxnreg_inc_240 = (make_setmaxnreg(n, True) for n in (232, 240))


# Named barriers -------------------------------------------------------------------------------------------------------

@intrinsic
def bar_sync(typingctx, number, threads):
    """Wait at one of the block's barriers 1 … 15 (0 is `cuda.syncthreads`) until `threads` threads, whole warps,
    have come."""
    return void(u32, u32), statement("bar.sync $0, $1;", ordered=True, collective=True)


@twin(bar_sync)
def _bar_sync(machine, number, threads):
    mbarrier.named(machine, number, threads, True)


@intrinsic
def bar_arrive(typingctx, number, threads):
    """Come to one of the block's barriers without waiting; `threads` counts those who wait and those who do not."""
    return void(u32, u32), statement("bar.arrive $0, $1;", ordered=True, collective=True)


@twin(bar_arrive)
def _bar_arrive(machine, number, threads):
    mbarrier.named(machine, number, threads, False)
