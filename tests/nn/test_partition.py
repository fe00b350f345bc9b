"""How ranks share an update. tests/distributed has what it gives between processes."""

import itertools
import types

import numpy as np
import pytest

from numdiff.configs import TrainerConfig
from numdiff.device import copy_into, download, get_backend, zeros
from numdiff.device.array import as_words
from numdiff.device.emulator import EmulatorDevice
from numdiff.dtypes import HALVES
from numdiff.errors import UsageError
from numdiff.extras.muon.optimizer import matrices_in
from numdiff.kernels.optimizer.grad_norm import squares_of_pieces
from numdiff.nn import AdamW, Linear, Muon
from numdiff.nn.module import FlatParameters, Module
from numdiff.nn.partition import PIECE, Partition, bounds_of, cut, piece_size
from numdiff.training import trainer
from tests.conftest import exhaustively


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
    # 2048 is nearer to the last one's start than to its end
    assert bounds_of(4096, 2, 64, atoms) == [0, 1664, 4096]


def test_pieces_are_cut_in_the_same_places_whatever_is_trained():
    whole = cut([(0, 1000)], 256, (300, 600))
    assert whole == [(0, 256), (256, 300), (300, 512), (512, 600), (600, 768), (768, 1000)]
    assert cut([(0, 256), (512, 1000)], 256, (300, 600)) == [whole[0], *whole[3:]]


def test_a_model_too_small_to_be_shared():
    parameters = FlatParameters(Linear(4, 4))
    communicator = types.SimpleNamespace(rank=0, size=8)
    with pytest.raises(UsageError, match="too small to be shared by 8 ranks"):
        Partition(parameters, communicator)
    assert Partition(parameters, communicator, False).stop == parameters.total


def test_a_rank_without_a_part_ends_sharing_only_where_it_was_asked_for(monkeypatch):
    made = []

    def partition(parameters, communicator, sharded, atoms):
        made.append(sharded)
        if sharded:
            raise UsageError("too small")

    monkeypatch.setattr(trainer, "Partition", partition)
    run = trainer.Trainer.__new__(trainer.Trainer)
    run.model, run.communicator = types.SimpleNamespace(parameters=None), None
    run.config = TrainerConfig()
    run._make_partition(True)
    assert made == [True, False]
    run.config = TrainerConfig(shard_update="yes")
    with pytest.raises(UsageError, match="too small"):
        run._make_partition(True)


class PartitionedLayers(Module):
    def __init__(self):
        self.first, self.second, self.third = (Linear(8, 8) for _ in range(3))


class Both:
    """The exchange of two ranks of one device, whose steps are made one after the other."""

    weight_parts = None

    def __init__(self, partitions):
        self.partitions = partitions

    def gather_partials(self):
        for one in self.partitions:
            squares_of_pieces(one.parameters.grad, one._pieces, one._own)
        for one in self.partitions:
            for other, (low, high) in zip(
                self.partitions, itertools.pairwise(one.piece_bounds), strict=True
            ):
                copy_into(one.partials[low:high], other.partials[low:high])

    def gather_weights(self):
        """Each rank has its part; the test looks at no other."""

    def gather_mixed(self, mixed):
        """Likewise."""


def update_in_parts(device, kind, ranks):
    """An update or two by each of the ranks, or by one that has all: the weights, the averages, the
    copy in 16 bits."""
    backend = get_backend(device) and EmulatorDevice(checks=False, float64=False)
    parts, flats = [], []
    for rank in range(ranks):
        parameters = FlatParameters(PartitionedLayers(), backend)
        if backend:
            parameters.keep_half()
        atoms = (
            [(start, stop) for *_, start, stop in matrices_in(parameters, MATRICES)]
            if kind is Muon
            else ()
        )
        communicator = types.SimpleNamespace(rank=rank, size=2 if ranks == 1 else ranks)
        parts.append(Partition(parameters, communicator, ranks > 1, atoms))
        flats.append(parameters)
    optimizers = []
    for parameters, partition in zip(flats, parts, strict=True):
        partition.exchange = Both(parts)
        optimizers.append(
            kind(
                parameters,
                *([MATRICES] if kind is Muon else []),
                partition=partition,
                clip_norm=0.5,
                learning_rate=1e-2,
                weight_decay=0.1,
                ema_decay=0.9,
                ema_std=(0.1,),
            )
        )
    for step in range(1 if backend else 2):
        gradient = np.random.default_rng(step).standard_normal(flats[0].total).astype(np.float32)
        for parameters in flats:
            copy_into(parameters.grad, gradient)
        for optimizer in optimizers:
            optimizer.update(zeros(1, np.float32, backend))
    found = {}
    for optimizer in optimizers:
        own = {
            "weights": optimizer._own(optimizer.parameters.data),
            "ema": optimizer.ema,
            "v": optimizer.v,
            "power": optimizer.averages()["ema_std_0.1"],
            "half": optimizer._own(optimizer.parameters.half),
        }
        for name, array in own.items():
            if array is not None:
                found.setdefault(name, []).append(download(array))
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


MATRICES = {"first.weight": 1, "third.weight": 1}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_weights_come_in_the_type_in_which_they_are_read(device, packed):
    """To three ranks, taken from the others' memory or packed: the copy of 16 bits whole, the
    float32 where it is read.
    """
    backend, kind, parts = get_backend(device), HALVES["bfloat16"], []
    # after each rank's update
    weights = np.random.default_rng(0).standard_normal((3, 6 * 64)).astype(np.float32)
    bias, frozen, last = slice(64, 128), slice(128, 192), slice(256, 320)
    weights[:, frozen] = weights[0, frozen]
    for rank in range(3):
        parameters = FlatParameters(PartitionedLayers(), backend)
        parameters.freeze(["second.weight"])
        copy_into(parameters.data, weights[rank])
        parameters.keep_half(kind)
        parts.append(Partition(parameters, types.SimpleNamespace(rank=rank, size=3)))
        parameters.begin_gradients()
        for name in ("first.bias", "third.weight"):
            assert parameters.parameters[name].data is not None  # it is read
    mixed, flat = [part.mixed() for part in parts], [part.parameters for part in parts]
    # which are kept
    assert parts[0].bounds == [0, 128, 256, 384] and mixed == [part.mixed() for part in parts]
    assert np.diff(mixed[0].bounds).tolist() == [32 + 64, 32, 64 + 32]  # words
    if packed:
        for one in mixed:
            one.pack()
        for one in mixed:
            for other, (low, high) in zip(mixed, itertools.pairwise(one.bounds), strict=True):
                copy_into(one.packed[low:high], other.packed[low:high])
            one.unpack()
    else:
        for one in mixed:
            one.take([f.data for f in flat], [as_words(f.half) for f in flat])
    updated = np.concatenate([weights[0, :128], weights[1, 128:256], weights[2, 256:]])
    for rank, parameters in enumerate(flat):
        own, want = slice(128 * rank, 128 * rank + 128), weights[rank].copy()
        for there in bias, last, own:
            want[there] = updated[there]
        np.testing.assert_array_equal(download(parameters.data), want)
        np.testing.assert_array_equal(download(parameters.half), updated.astype(kind))


@pytest.mark.parametrize(
    "kind, device",
    [(AdamW, "cpu"), (AdamW, "emulator"), (Muon, "cpu"), *exhaustively((Muon, "emulator"))],
)
def test_parts_have_the_bits_of_the_whole(kind, device):
    whole, parts = update_in_parts(device, kind, 1), update_in_parts(device, kind, 2)
    assert whole.keys() == parts.keys() and ("half" in whole) == (device == "emulator")
    for name, array in whole.items():
        np.testing.assert_array_equal(array, parts[name], err_msg=name)
