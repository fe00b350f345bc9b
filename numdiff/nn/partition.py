"""How several ranks share an update: the part of the flat buffers that each of them keeps and
moves.

Ranks that train together hold the same weights, and each would do the same update with the same
moments. Instead each may do a part of it: it has the moments and averages of its own part alone,
and sends the new weights to the others (ZeRO, stage 1). Nothing is computed otherwise than by one
rank that updates all, so the bits are the same.

    gradients       each rank needs the sum over the ranks in its own part: a reduce-scatter of exchange.py
    gradient norm   sums of squares of fixed pieces, each of one rank's part; gathered, then added in one order
    AdamW, Muon     on the own part; averages, too
    weights         of each part to all ranks: an all-gather. A model that computes in 16 bits reads most weights from
                    their 16-bit copy, so only that copy is sent: half the bytes. Other parameters are read in float32
                    in every precision (biases, norms, embeddings). They are sent in float32, and the receiver rounds
                    the copy from them. The step itself records which are which: `Parameter.read`

So the copy of 16 bits is whole on every rank after a step, and the float32 where steps read it. The
rest of the float32 is each rank's own until it is requested: `gather_masters`, before reports,
pictures, checkpoints and comparisons.

Parts are runs of the flat buffers, of nearly the same size, and end where a piece ends. Muon needs
whole matrices: with it no part begins within one.

SOURCE
    Rajbhandari et al. 2019, "ZeRO: Memory optimizations toward training trillion parameter models",
    arXiv:1910.02054, section 5.1 (stage 1, "P_os").
"""

import bisect
import functools
import itertools

import numpy as np

from ..device import is_device, lasting, upload, zeros
from ..device.array import as_words
from ..errors import UsageError
from ..kernels.elementwise import cast_into
from ..kernels.optimizer.grad_norm import root_of_sum, squares_of_pieces
from ..kernels.peer_pieces import peer_copy_pieces, pieces_of
from .module import ALIGNMENT

PIECE = 16384  # elements whose squares one block adds up, at most
PIECES = 64  # of a small model, at least, so that its parts are of nearly the same size


class Partition:
    """The parts of a model's `FlatParameters`, one a rank, or one part that all of them update.

    communicator: of the ranks (its rank, size and gather_parts); sharded: whether each has a
    separate part
    atoms: [(start, stop)] that no part may divide; both multiples of 64
    Attributes bounds: rank r has the elements bounds[r] … bounds[r + 1] - 1; first, stop: those of
    this rank; partials: (P,) the pieces' sums of squares, float32, or float64 without a device;
    piece_bounds: of them, as bounds; exchange: set by distributed/exchange.py; gathers the parts of
    all ranks.
    Raises `UsageError` where a rank would have nothing.
    """

    exchange = None

    def __init__(self, parameters, communicator, sharded=True, atoms=()):
        self.parameters, self.communicator, self.sharded = parameters, communicator, sharded
        ranks, rank, total = communicator.size, communicator.rank, parameters.total
        size = piece_size(total)
        self.bounds = bounds_of(total, ranks, size, atoms) if sharded else [0, total]
        if any(a == b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise UsageError(
                f"--shard-update yes: the model is too small to be shared by {ranks} ranks; leave it out."
            )
        self.first, self.stop = self.bounds[rank : rank + 2] if sharded else (0, total)
        self._trained = list(parameters.trained_ranges)
        pieces = cut(self._trained, size, {edge for atom in atoms for edge in atom})
        starts = [start for start, _ in pieces]
        self.piece_bounds = [bisect.bisect_left(starts, bound) for bound in self.bounds]
        low, high = self.piece_bounds[rank : rank + 2] if sharded else (0, len(pieces))
        like = parameters.grad
        self._pieces = upload(np.array(pieces[low:high], np.int64).reshape(-1, 2), like)
        self.partials = zeros(len(pieces), np.float32 if is_device(like) else np.float64, like)
        self._own = self.partials[low:high]
        self._half, self._mixed = parameters.half, {}

    def norm(self):
        """The global norm of all ranks' gradients, as an array (1,)."""
        if self.parameters.trained_ranges != self._trained:
            raise UsageError(
                "ranks have shared the parameters that were trained when the Trainer was made: give it "
                "freeze= instead of freezing more of them later."
            )
        squares_of_pieces(self.parameters.grad, self._pieces, self._own)
        if self.sharded:
            self.exchange.gather_partials()
        return root_of_sum(self.partials)

    def weight_parts(self):
        """[(start, stop)] of this rank's weights, elements of the flat buffers, where an update may
        go through them one after the other, with `exchange.send_weights()` after each; None: all at
        once."""
        parts = self.exchange.weight_parts if self.sharded else None
        return (
            parts
            if self._trained == [(0, self.parameters.total)] and self.mixed() is not None
            else None
        )

    def gather_weights(self):
        """After an update, bring all ranks' new weights to all of them, in the types in which this
        step has read them.
        """
        if not self.sharded:
            return
        if (mixed := self.mixed()) is None:
            self._gather_all()
        else:
            self.exchange.gather_mixed(mixed)

    def mixed(self):
        """The `MixedWeights` of a step that has run backward, or None if all weights are sent in
        float32: there is no copy of 16 bits, or another one than the exchange knows. One that was
        made is kept, as a recorded step launches over its arrays."""
        weights = self.parameters
        if weights.half is None or weights.half is not self._half:
            return None
        read = tuple(parameter.read for parameter in weights.parameters.values())
        if read not in self._mixed:
            self._mixed[read] = MixedWeights(self, read)
        return self._mixed[read]

    def gather_masters(self):
        """Bring the float32 weights, of which steps send a part, to all ranks. Collective."""
        if self.sharded and self.parameters.half is not None:
            self._gather_all()

    def _gather_all(self):
        """All weights in float32; the copy of 16 bits follows."""
        self.exchange.gather_weights()
        weights = self.parameters
        if weights.half is not None:
            for start, stop in ((0, self.first), (self.stop, weights.total)):
                if start < stop:
                    cast_into(weights.data[start:stop], weights.half[start:stop])

    def whole(self, part, everywhere=True):
        """All of a flat buffer, from this rank's part of it: NumPy arrays. Collective.

        everywhere: on every rank; else None on all but rank 0
        """
        return (
            self.communicator.gather_parts(part, self.bounds, everywhere) if self.sharded else part
        )

    def __getstate__(self):
        raise UsageError(
            "an optimizer that shares its update with other ranks can neither be copied nor pickled: take "
            "the trainer's state() instead."
        )


class MixedWeights:
    """What ranks that share an update bring each other after each step: of weights that are read in
    float32 that, of all others the copy of 16 bits, two numbers a word. Frozen ones are the same
    everywhere.

    read: for each parameter whether it is read in float32
    A rank that can read the others' memory takes it from there (`take`). Otherwise it packs its own
    part (`pack`) into the buffer `packed` (n,) float32, whose elements bounds[r] … bounds[r + 1] -
    1 belong to rank r. It takes the other ranks' parts from that buffer (`unpack`).
    """

    def __init__(self, partition, read):
        self.weights, self.rank = partition.parameters, partition.communicator.rank
        single, half = [], []
        for (parameter, first, _, end), wanted in zip(
            self.weights.spans().values(), read, strict=True
        ):
            if not parameter.frozen:
                (single if wanted else half).append((first, end))
        # [(rank, first element, place in `packed`, count)]
        self._single, self._half, self.bounds = [], [], [0]
        for rank, (low, high) in enumerate(itertools.pairwise(partition.bounds)):
            at = self.bounds[-1]
            for found, ranges, of_word in (self._single, single, 1), (self._half, half, 2):
                for start, stop in joined(ranges, low, high):
                    found.append((rank, start // of_word, at, (stop - start) // of_word))
                    at += found[-1][-1]
            self.bounds.append(at)

    def _tables(self, own, row):
        """`pieces_of` the parts of 32 bits, and of those of 16; own: of this rank, or of all
        others."""
        with self._lasting():
            return [
                upload(
                    pieces_of([row(*r) for r in found if (r[0] == self.rank) == own]),
                    self.weights.data,
                )
                for found in (self._single, self._half)
            ]

    def _lasting(self):
        return lasting(getattr(self.weights.data, "backend", None))

    @functools.cached_property
    def _there(self):
        return self._tables(False, lambda rank, first, at, count: (rank, first, first, count))

    @functools.cached_property
    def _packing(self):
        return self._tables(True, lambda rank, first, at, count: (0, first, at, count))

    @functools.cached_property
    def _unpacking(self):
        return self._tables(False, lambda rank, first, at, count: (0, at, first, count))

    @functools.cached_property
    def packed(self):
        with self._lasting():
            return zeros(self.bounds[-1], np.float32, self.weights.data)

    def take(self, weights, halves):
        """From all ranks' flat buffers of float32, and from their copies as words."""
        self._copy(weights, halves, self._there)

    def take_single(self, weights):
        """From all ranks' flat buffers of float32 what is read so, where all of 16 bits is here."""
        peer_copy_pieces(weights, self.weights.data, self._there[0])

    def pack(self):
        for source, table in zip(
            (self.weights.data, as_words(self.weights.half)), self._packing, strict=True
        ):
            peer_copy_pieces([source], self.packed, table)

    def unpack(self):
        self._copy([self.packed], [self.packed], self._unpacking)

    def _copy(self, weights, halves, tables):
        own = self.weights
        peer_copy_pieces(weights, own.data, tables[0], half=own.half)
        peer_copy_pieces(halves, as_words(own.half), tables[1])


def joined(ranges, low, high):
    """The parts of [(start, stop)], in order, within low … high-1; adjacent ranges are joined."""
    found = []
    for start, stop in ((max(start, low), min(stop, high)) for start, stop in ranges):
        if start < stop and found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


def piece_size(total):
    """Elements of a piece, a multiple of 64. The number of ranks is not asked: the norm must not
    depend on it."""
    return min(PIECE, max(total // PIECES // ALIGNMENT * ALIGNMENT, ALIGNMENT))


def cut(ranges, size, edges=()):
    """[(start, stop)]: ranges cut at the multiples of `size` and at the edges, in order."""
    edges, found = sorted(edges), []
    for start, stop in sorted(ranges):
        inner = edges[bisect.bisect_right(edges, start) : bisect.bisect_left(edges, stop)]
        at = sorted({start, *range(start // size * size + size, stop, size), *inner, stop})
        found += zip(at, at[1:], strict=False)
    return found


def bounds_of(total, ranks, size, atoms=()):
    """[ranks + 1] elements at which parts begin and end: the multiples of `size` nearest to equal
    parts. A bound within an atom moves to the end of that atom."""
    atoms = sorted(atoms)
    starts, bounds = [start for start, _ in atoms], [0]
    for rank in range(1, ranks):
        at = round(rank * total / (ranks * size)) * size
        start, stop = atoms[max(bisect.bisect_right(starts, at) - 1, 0)] if atoms else (0, 0)
        if start < at < stop:
            at = start if at - start <= stop - at else stop
        bounds.append(min(max(at, bounds[-1]), total))
    return [*bounds, total]
