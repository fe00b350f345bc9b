"""How several ranks share an update: the part of the flat buffers that each of them keeps and moves.

Ranks that train together hold the same weights, and each would do the same update with the same moments. Instead each
may do a part of it: it has the moments and averages of its own part alone, and sends the new weights to the others
(ZeRO, stage 1). Nothing is computed otherwise than by one rank that updates all, so the bits are the same.

    gradients       each rank needs the sum over the ranks in its own part: a reduce-scatter of exchange.py
    gradient norm   sums of squares of fixed pieces, each of one rank's part; gathered, then added in one order
    AdamW, Muon     on the own part; averages, too
    weights         of each part to all ranks, in float32: an all-gather. The copy of 16 bits is rounded from them,
                    where they arrive: embeddings, biases and adaLN's layers are read in float32 in every precision

Parts are runs of the flat buffers, of nearly the same size, and end where a piece ends. Muon needs whole matrices: with
it no part begins within one.

SOURCE
    Rajbhandari et al. 2019, "ZeRO: Memory optimizations toward training trillion parameter models", arXiv:1910.02054,
    section 5.1 (stage 1, "P_os").
"""
import bisect

import numpy as np

from ..device import is_device, upload, zeros
from ..errors import UsageError
from ..kernels.elementwise import cast_into
from ..kernels.optimizer.grad_norm import root_of_sum, squares_of_pieces
from .module import ALIGNMENT

PIECE = 16384  # elements whose squares one block adds up, at most
PIECES = 64  # of a small model, at least, so that its parts are of nearly the same size


class Partition:
    """The parts of a model's `FlatParameters`, one a rank, or one part that all of them update.

    communicator: of the ranks (its rank, size and gather_parts); sharded: whether each has a part of its own
    atoms: [(start, stop)] that no part may divide; both multiples of 64
    Attributes bounds: rank r has the elements bounds[r] … bounds[r + 1] - 1; first, stop: those of this rank; partials:
    (P,) the pieces' sums of squares, float32, or float64 without a device; piece_bounds: of them, as bounds; exchange:
    set by whoever makes it (distributed/exchange.py), gathers what ranks have in parts.
    Raises `UsageError` where a rank would have nothing.
    """

    exchange = None

    def __init__(self, parameters, communicator, sharded=True, atoms=()):
        self.parameters, self.communicator, self.sharded = parameters, communicator, sharded
        ranks, rank, total = communicator.size, communicator.rank, parameters.total
        size = piece_size(total)
        self.bounds = bounds_of(total, ranks, size, atoms) if sharded else [0, total]
        if any(a == b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise UsageError(f"--shard-update yes: the model is too small to be shared by {ranks} ranks; leave it out.")
        self.first, self.stop = self.bounds[rank:rank + 2] if sharded else (0, total)
        self._trained = list(parameters.trained_ranges)
        pieces = cut(self._trained, size, {edge for atom in atoms for edge in atom})
        starts = [start for start, _ in pieces]
        self.piece_bounds = [bisect.bisect_left(starts, bound) for bound in self.bounds]
        low, high = self.piece_bounds[rank:rank + 2] if sharded else (0, len(pieces))
        like = parameters.grad
        self._pieces = upload(np.array(pieces[low:high], np.int64).reshape(-1, 2), like)
        self.partials = zeros(len(pieces), np.float32 if is_device(like) else np.float64, like)
        self._own = self.partials[low:high]

    def norm(self):
        """The global norm of all ranks' gradients, as an array (1,)."""
        if self.parameters.trained_ranges != self._trained:
            raise UsageError("ranks have shared the parameters that were trained when the Trainer was made: give it "
                             "freeze= instead of freezing more of them later.")
        squares_of_pieces(self.parameters.grad, self._pieces, self._own)
        if self.sharded:
            self.exchange.gather_partials()
        return root_of_sum(self.partials)

    def gather_weights(self):
        """Bring all ranks' new weights to all of them; the copy of 16 bits follows."""
        if not self.sharded:
            return
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
        return self.communicator.gather_parts(part, self.bounds, everywhere) if self.sharded else part

    def __getstate__(self):
        raise UsageError("an optimizer that shares its update with other ranks can neither be copied nor pickled: take "
                         "the trainer's state() instead.")


def piece_size(total):
    """Elements of a piece, a multiple of 64. The number of ranks is not asked: the norm must not depend on it."""
    return min(PIECE, max(total // PIECES // ALIGNMENT * ALIGNMENT, ALIGNMENT))


def cut(ranges, size, edges=()):
    """[(start, stop)]: ranges cut at the multiples of `size` and at the edges, in order."""
    edges, found = sorted(edges), []
    for start, stop in sorted(ranges):
        inner = edges[bisect.bisect_right(edges, start):bisect.bisect_left(edges, stop)]
        at = sorted({start, *range(start // size * size + size, stop, size), *inner, stop})
        found += zip(at, at[1:], strict=False)
    return found


def bounds_of(total, ranks, size, atoms=()):
    """[ranks + 1] elements at which parts begin and end: the multiples of `size` nearest to equal parts, or the end of
    an atom that lies there."""
    atoms = sorted(atoms)
    starts, bounds = [start for start, _ in atoms], [0]
    for rank in range(1, ranks):
        at = round(rank * total / (ranks * size)) * size
        start, stop = atoms[max(bisect.bisect_right(starts, at) - 1, 0)] if atoms else (0, 0)
        if start < at < stop:
            at = start if at - start <= stop - at else stop
        bounds.append(min(max(at, bounds[-1]), total))
    return [*bounds, total]
