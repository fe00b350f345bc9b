"""Unpacks LZF, the filter of h5py that is not HDF5's own: Marc Lehmann's liblzf, compiled here by
Numba.

A block is a row of literals, `000nnnnn` and n + 1 bytes, and of copies of what came before:
`nnnooooo oooooooo` copies n + 2 bytes from o + 1 bytes back; n = 7 has a further byte, which is
added to n, before the second one.
"""

import functools

import numpy as np

from ..files import Refused


def unpack_lzf(data, count):
    """The bytes in a block, at most `count`; a `Refused` where it is damaged."""
    out = np.empty(count, np.uint8)
    found = compiled()(np.frombuffer(data, np.uint8), out)
    if found < 0:
        raise Refused("a chunk packed by lzf is damaged")
    return out[:found].tobytes()


@functools.cache
def compiled():
    import numba  # it takes a while, and few files are packed so

    return numba.njit(unpack, nogil=True)


def unpack(data, out):
    """Unpack uint8 arrays; the bytes written, or -1 where the block leads out of one of them."""
    at, done, end = 0, 0, len(data)
    while at < end:
        control = np.int64(data[at])
        at += 1
        if control < 32:
            count = control + 1
            if at + count > end or done + count > len(out):
                return -1
            for k in range(count):
                out[done + k] = data[at + k]
            at += count
        else:
            count = (control >> 5) + 2
            if count == 9:
                if at == end:
                    return -1
                count += np.int64(data[at])
                at += 1
            if at == end:
                return -1
            back = ((control & 31) << 8) + np.int64(data[at]) + 1
            at += 1
            if back > done or done + count > len(out):
                return -1
            for k in range(count):
                out[done + k] = out[done + k - back]
        done += count
    return done
