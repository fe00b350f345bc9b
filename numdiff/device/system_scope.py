"""Flags between GPUs: loads and stores with an order that another GPU's threads observe, and a
clock.

A thread that has filled a buffer signals this to another GPU by a flag. The flag must not become
visible before the data. So it is written by a store with `release` semantics at `system` scope, and
read by a load with `acquire` semantics. Every write before the store is then visible to each thread
that has read the flag (PTX ISA, "Memory Consistency Model", sections on scopes and release and
acquire patterns; `ld.acquire.sys` and `st.release.sys` need sm_70).
"""

import time

import numpy as np

from .inline_ptx import contiguous, i32, i64, instruction


@instruction("ld.acquire.sys.global.s32 $0, [$1];", ordered=True)
def load_acquire(machine, array: contiguous, index: i64) -> i32:
    """array[index] of an int32 array, read after whatever its writer wrote before it."""
    return machine.resolver.cuda.atomic.max(array, index, np.int32(-(2**31)))


@instruction("st.release.sys.global.s32 [$0], $1;", ordered=True)
def store_release(machine, array: contiguous, index: i64, value: i32):
    """array[index] = value of an int32 array; a thread that reads it by `load_acquire` sees all
    writes before this store."""
    machine.resolver.cuda.atomic.exch(array, index, value)


@instruction("mov.u64 $0, %globaltimer;", ordered=True)
def nanoseconds(machine) -> i64:
    """The GPU's clock, as int64 nanoseconds; it moves in steps of up to a microsecond or so."""
    return np.int64(time.perf_counter_ns())
