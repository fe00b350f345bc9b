"""The products of flash attention's backward, by wgmma: the location of each operand, and its
orientation.

    Sᵀ = k·qᵀ, dPᵀ = v·dyᵀ         `multiply_along`: both sides from shared memory, summed over the head size
    dv += Pᵀ·dy, dk += dSᵀ·q       `add_queries`: the left side from registers, summed over queries
    dq = dS·k                      `multiply_keys`, `multiply_ninth`: both sides read across, summed over all keys
Of HS 72 the last eight columns are a separate part, the ninth (../hopper_tiles.py), with products
of their own.
A place is an address in units of 16 bytes (layout.py).

SOURCE
    ../reference.py; PTX ISA, sections 9.7.15 (wgmma) and 9.7.15.5 (matrices in shared memory).
READ NEXT
    round.py, in which order they run.
"""

from ....device import device_inline, int32, uint32
from ....device.wgmma import make_wgmma, make_wgmma_a_registers, make_wgmma_wait
from ..hopper_tiles import GROUP, NARROW, WIDE, u64
from .layout import KEYS

product_32, product_64 = make_wgmma(32), make_wgmma(64)
rows_8, rows_32, rows_64 = (make_wgmma_a_registers(n, transpose_b=True) for n in (8, 32, 64))
keys_8, keys_16, keys_32 = (make_wgmma(n, True, True) for n in (8, 16, 32))
wait_8, wait_16, wait_32, wait_64 = (make_wgmma_wait(n, pin=False) for n in (8, 16, 32, 64))
wait_32_1, wait_64_1 = (make_wgmma_wait(n, pending=1, pin=False) for n in (32, 64))


@device_inline
def multiply(N, s, a, b, more):
    """s = a · b for 16 of k, or s += a · b with `more`."""
    if N == 32:
        product_32(s, a, b, int32(more))
    else:
        product_64(s, a, b, int32(more))


@device_inline
def descriptor(HS, place):
    """The descriptor of the first part of a tile at a place; its upper half is a constant."""
    return (NARROW if HS == 32 else WIDE) | u64(uint32(place))


@device_inline
def ninth_descriptor_along(place, zeros):
    """The descriptor of a ninth part and the zeros behind it, as `ninth_along`."""
    return GROUP << u64(32) | u64(uint32(place | uint32(zeros - place) << uint32(16)))


@device_inline
def ninth_descriptor_across(place):
    """The descriptor of a ninth part, as `ninth_across`."""
    return GROUP << u64(16) | u64(uint32(place))


@device_inline
def multiply_along(HS, N, s, k, k_ninth, q, q_ninth, zeros):
    """s = k · qᵀ for 64 keys and N queries; places of the first and the ninth parts."""
    multiply(N, s, descriptor(HS, k), descriptor(HS, q), 0)
    multiply(N, s, descriptor(HS, k + uint32(2)), descriptor(HS, q + uint32(2)), 1)
    if HS > 32:
        multiply(N, s, descriptor(HS, k + uint32(4)), descriptor(HS, q + uint32(4)), 1)
        multiply(N, s, descriptor(HS, k + uint32(6)), descriptor(HS, q + uint32(6)), 1)
    if HS == 72:
        multiply(
            N, s, ninth_descriptor_along(k_ninth, zeros), ninth_descriptor_along(q_ninth, zeros), 1
        )


@device_inline
def add_queries(HS, N, accumulators, accumulators_ninth, words, q, q_ninth):
    """accumulators += left · q for 64 keys, over N queries; words: the left side, of a key and its
    queries."""
    for i in range(N // 16):
        left = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
        if HS == 32:
            rows_32(accumulators, left, descriptor(HS, q + uint32(64 * i)), int32(1))
        else:
            rows_64(accumulators, left, descriptor(HS, q + uint32(128 * i)), int32(1))
    if HS == 72:
        for i in range(N // 16):
            left = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            rows_8(
                accumulators_ninth,
                left,
                ninth_descriptor_across(q_ninth + uint32(16 * i)),
                int32(1),
            )


@device_inline
def multiply_keys(HS, dq, ds, k):
    """dq = dS · k over all keys of the tile, for half of the columns of the first part, from the
    place k on."""
    if HS == 32:
        keys_16(dq, descriptor(64, ds), descriptor(HS, k), int32(0))
        for i in range(1, KEYS // 16):
            keys_16(
                dq,
                descriptor(64, ds + uint32(128 * i)),
                descriptor(HS, k + uint32(64 * i)),
                int32(1),
            )
    else:
        keys_32(dq, descriptor(64, ds), descriptor(HS, k), int32(0))
        for i in range(1, KEYS // 16):
            keys_32(
                dq,
                descriptor(64, ds + uint32(128 * i)),
                descriptor(HS, k + uint32(128 * i)),
                int32(1),
            )


@device_inline
def multiply_ninth(dq_ninth, ds, k_ninth):
    """The last eight of 72 columns of dq, likewise."""
    keys_8(dq_ninth, descriptor(64, ds), ninth_descriptor_across(k_ninth), int32(0))
    for i in range(1, KEYS // 16):
        keys_8(
            dq_ninth,
            descriptor(64, ds + uint32(128 * i)),
            ninth_descriptor_across(k_ninth + uint32(16 * i)),
            int32(1),
        )


@device_inline
def wait_for_scores(N, s):
    """Wait for all groups in flight but the last: s may be read."""
    if N == 32:
        wait_32_1(s)
    else:
        wait_64_1(s)


@device_inline
def wait_for_dq(HS, dq):
    if HS == 32:
        wait_16(dq)
    else:
        wait_32(dq)


@device_inline
def wait_for_accumulators(HS, accumulators, accumulators_ninth):
    if HS == 32:
        wait_32(accumulators)
    else:
        wait_64(accumulators)
    if HS == 72:
        wait_8(accumulators_ninth)
