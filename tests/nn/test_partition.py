"""How ranks share an update. tests/distributed has what it gives."""
import itertools
import types

import pytest

from numdiff.errors import UsageError
from numdiff.nn import Linear
from numdiff.nn.module import FlatParameters
from numdiff.nn.partition import PIECE, Partition, bounds_of, cut, piece_size


@pytest.mark.parametrize("total", [4096, 20_494_336, 2**31 - 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parts_are_nearly_equal_and_end_where_pieces_end(total, ranks):
    size = piece_size(total)
    bounds = bounds_of(total, ranks, size)
    assert bounds[0] == 0 and bounds[-1] == total and size % 64 == 0 and size <= PIECE
    assert all(bound % size == 0 for bound in bounds[:-1])
    assert all(abs(b - a - total / ranks) <= size for a, b in itertools.pairwise(bounds))


def test_no_part_begins_within_an_atom():
    atoms = [(64, 1024), (1024, 1600), (1664, 4032)]
    for ranks in (2, 3, 4):
        bounds = bounds_of(4096, ranks, 64, atoms)
        assert not any(start < bound < stop for bound in bounds for start, stop in atoms)
    assert bounds_of(4096, 2, 64, atoms) == [0, 1664, 4096]  # 2048 lies nearer to the last one's start than to its end


def test_pieces_are_cut_in_the_same_places_whatever_is_trained():
    whole = cut([(0, 1000)], 256, (300, 600))
    assert whole == [(0, 256), (256, 300), (300, 512), (512, 600), (600, 768), (768, 1000)]
    assert cut([(0, 256), (512, 1000)], 256, (300, 600)) == [whole[0], *whole[3:]]


def test_a_model_too_small_to_be_shared():
    class Small(Linear):
        pass

    parameters = FlatParameters(Small(4, 4))
    communicator = types.SimpleNamespace(rank=0, size=8)
    with pytest.raises(UsageError, match="too small to be shared by 8 ranks"):
        Partition(parameters, communicator)
    assert Partition(parameters, communicator, False).stop == parameters.total
