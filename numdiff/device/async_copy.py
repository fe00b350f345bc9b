"""Copies from global to shared memory that run while threads compute: `cp.async`, on sm_80 and
later.

A thread starts copies of 4, 8 or 16 bytes each, closes a group with `cp_async_commit`, and
continues with other work. Later `cp_async_wait(n)` waits until at most its n youngest groups are
still in flight. The data passes through no registers, and the next tiles travel while one is
multiplied: a pipeline of STAGES tiles is

    for s in range(STAGES - 1):                 # fill it
        start the copies of tile s; cp_async_commit()
    for i in range(tiles):
        cp_async_wait(STAGES - 2)               # my copies of tile i have arrived (a literal, or a constant by name)
        cuda.syncthreads()                      # so have those of all other threads; and tile i - 1 is no longer read
        start the copies of tile i + STAGES - 1 into the stage of tile i - 1; cp_async_commit()
        multiply tile i

A wait is for the thread's own copies only: without the barrier after it other threads read what has
not arrived. An empty group is committed in the last iterations too, or the count of groups would be
wrong.

ADDRESSES
    Shared memory is named by 32-bit addresses in bytes, `shared_address(array) + offset`: computed
    once, they make swizzles and stages plain integer arithmetic, and they are what the instructions
    take. Global memory is named by a contiguous array and the index of an element in it, counted
    over all its axes. Both must be multiples of the size of the copy, even of one filled up with
    zeros.

    cp_async_16(address, array, index)                      16 bytes, past the L1 cache (.cg)
    cp_async_16_zfill(address, array, index, count)         of which `count` bytes are read, the others are zeros
    cp_async_8, cp_async_8_zfill, cp_async_4, …_4_zfill     the same for 8 and 4 bytes, through the L1 cache (.ca)
    cp_async_commit()  cp_async_wait(n)  cp_async_wait_all()

IN THE EMULATOR
    A copy arrives as late as the rules allow: at the wait that covers its group, or when its thread
    ends. Until then touching its destination, or writing its source, is a fault of the kind
    "cp.async". When it starts, its destination is checked for other users, as for a write; the
    bytes count as written at the wait.

SOURCE  PTX ISA, section 9.7.9.25.3, `cp.async`, `cp.async.commit_group`, `cp.async.wait_group`, `cp.async.wait_all`.
"""

import sys

from ..emulator.group_copies import commit, start_copy, wait
from ..emulator.values import UInt32
from .inline_ptx import (
    I32,
    SHARED,
    address_in,
    contiguous,
    emit,
    i64,
    instruction,
    literal,
    u32,
)

# Addresses ----------------------------------------------------------------------------------------


@instruction(
    lambda context, builder, sig, args: builder.ptrtoint(
        address_in(SHARED, context, builder, sig.args[0], args[0]), I32
    )
)
def shared_address(machine, array: contiguous) -> u32:
    """The address (uint32, bytes) of a shared array's first element in the shared state space."""
    memory = getattr(array, "memory", None)
    if memory is not None and memory.space != "shared":
        raise TypeError(f"shared_address of {array!r}")
    return UInt32(machine.shared_address(array))


# Copies -------------------------------------------------------------------------------------------


@instruction("cp.async.cg.shared.global [$0], [$1], 16;", ordered=True)
def cp_async_16(machine, address: u32, array: contiguous, index: i64):
    """Start a copy of 16 bytes from `array[index]` to the shared address; both multiples of 16
    bytes."""
    start_copy(machine, address, array, index, 16, 16, sys._getframe(1))


@instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", ordered=True)
def cp_async_16_zfill(machine, address: u32, array: contiguous, index: i64, count: u32):
    """Start a copy of `count` bytes (0 … 16) from `array[index]`, filled up to 16 with zeros.

    With a count of 0 nothing is read: that is the guard of a tile at an edge, and `index` may then
    be outside.
    """
    start_copy(machine, address, array, index, 16, int(count), sys._getframe(1))


@instruction("cp.async.ca.shared.global [$0], [$1], 8;", ordered=True)
def cp_async_8(machine, address: u32, array: contiguous, index: i64):
    """Start a copy of 8 bytes from `array[index]` to the shared address; both multiples of 8 bytes."""
    start_copy(machine, address, array, index, 8, 8, sys._getframe(1))


@instruction("cp.async.ca.shared.global [$0], [$1], 8, $2;", ordered=True)
def cp_async_8_zfill(machine, address: u32, array: contiguous, index: i64, count: u32):
    """Start a copy of `count` bytes (0 … 8) from `array[index]`, filled up to 8 with zeros."""
    start_copy(machine, address, array, index, 8, int(count), sys._getframe(1))


@instruction("cp.async.ca.shared.global [$0], [$1], 4;", ordered=True)
def cp_async_4(machine, address: u32, array: contiguous, index: i64):
    """Start a copy of 4 bytes from `array[index]` to the shared address; both multiples of 4 bytes."""
    start_copy(machine, address, array, index, 4, 4, sys._getframe(1))


@instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", ordered=True)
def cp_async_4_zfill(machine, address: u32, array: contiguous, index: i64, count: u32):
    """Start a copy of `count` bytes (0 … 4) from `array[index]`, filled up to 4 with zeros."""
    start_copy(machine, address, array, index, 4, int(count), sys._getframe(1))


# Groups -------------------------------------------------------------------------------------------


@instruction("cp.async.commit_group;", ordered=True)
def cp_async_commit(machine):
    """Close a group: all copies that this thread has started and not yet put in one."""
    commit(machine)


def _wait(context, builder, sig, args):
    emit(builder, f"cp.async.wait_group {sig.args[0].literal_value};", (), (), ordered=True)
    return context.get_dummy_value()


@instruction(_wait)
def cp_async_wait(machine, pending: literal(0, 255)):
    """Wait until at most the `pending` youngest groups of this thread are in flight; a literal, or
    a constant."""
    wait(machine, int(pending))


@instruction("cp.async.wait_all;", ordered=True)
def cp_async_wait_all(machine):
    """Wait for all copies of this thread, in a group or not."""
    commit(machine)
    wait(machine, 0)
