"""Flags between GPUs: loads and stores with an order that another GPU's threads observe, and a
clock.

A thread that has filled a buffer signals this to another GPU by a flag. The flag must not become
visible before the data. So it is written by a store with `release` semantics at `system` scope, and
read by a load with `acquire` semantics. Every write before the store is then visible to each thread
that has read the flag (PTX ISA, "Memory Consistency Model", sections on scopes and release and
acquire patterns; `ld.acquire.sys` and `st.release.sys` need sm_70). Addresses are generic, so no
state space is named.
"""

import time

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import twin

WORD, LONG = ir.IntType(32), ir.IntType(64)


def _address(context, builder, array_type, array, index):
    """The address of `array[index]` of a contiguous array, as a 64-bit number."""
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.ptrtoint(builder.gep(data, [index]), LONG)


def _assemble(builder, result, arguments, text, constraints):
    """One instruction that the compiler may neither drop nor move across other memory accesses."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), arguments)


@intrinsic
def load_acquire(typingctx, array, index):
    """array[index] of an int32 array, read after whatever its writer wrote before it."""

    def codegen(context, builder, sig, args):
        address = _address(context, builder, sig.args[0], *args)
        return _assemble(builder, WORD, [address], "ld.acquire.sys.s32 $0, [$1];", "=r,l,~{memory}")

    return types.int32(array, types.int64), codegen


@twin(load_acquire)
def _load_acquire(machine, array, index):
    return machine.resolver.cuda.atomic.max(array, index, np.int32(-(2**31)))


@intrinsic
def store_release(typingctx, array, index, value):
    """array[index] = value of an int32 array; a thread that reads it by `load_acquire` sees all
    writes before this store."""

    def codegen(context, builder, sig, args):
        address = _address(context, builder, sig.args[0], *args[:2])
        _assemble(
            builder,
            ir.VoidType(),
            [address, args[2]],
            "st.release.sys.s32 [$0], $1;",
            "l,r,~{memory}",
        )
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int32), codegen


@twin(store_release)
def _store_release(machine, array, index, value):
    machine.resolver.cuda.atomic.exch(array, index, value)


@intrinsic
def nanoseconds(typingctx):
    """The GPU's clock, as int64 nanoseconds; it moves in steps of up to a microsecond or so."""

    def codegen(context, builder, sig, args):
        return _assemble(builder, LONG, [], "mov.u64 $0, %globaltimer;", "=l,~{memory}")

    return types.int64(), codegen


@twin(nanoseconds)
def _nanoseconds(machine):
    return np.int64(time.perf_counter_ns())
