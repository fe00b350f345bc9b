"""Transports between GPUs, by threads in the place of ranks: the sums, their order, which is chosen."""

import contextlib
import functools
import itertools
import re
import sys
import threading
import time
import types

import numpy as np
import pytest

from numdiff.distributed import exchange, failures
from numdiff.dtypes import HALVES
from numdiff.errors import NumdiffError, OutOfMemoryError, UsageError
from numdiff.extras.fp8.quantise import PARTIALS, share_largest
from numdiff.extras.muon.optimizer import matrices_in
from numdiff.extras.transports import copies, nccl_exchange, overlap, peer, peer_exchange
from numdiff.kernels.peer_pieces import peer_copy_pieces_reference
from numdiff.nn import AdamW, DiT, Linear, Module, UNet
from numdiff.nn import partition as partition_module
from numdiff.nn.model import Model
from numdiff.nn.module import FlatParameters
from numdiff.nn.optimizer import LossScale
from numdiff.nn.partition import Partition
from numdiff.progress import progress
from tests.distributed.test_distributed import random_model
from tests.distributed.threads import GpuArray, GpuWithStreams, Threads, on_threads
from tests.nn.test_partition import PartitionedLayers


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_peers_add_up_the_same_bits(count, monkeypatch):
    def body(communicator, gradient):
        peers = exchange.make_exchange(communicator, types.SimpleNamespace(grad=gradient))
        assert (
            peers.name == "peer"
            and peers.why == "Not mpi: threads have no MPI."
            and not gradient.any()
        )
        sums = []
        for step in range(20):
            rng = np.random.default_rng([communicator.rank, step])
            gradient[...] = rng.standard_normal(1000)
            loss = np.array([communicator.rank + step], np.float32)
            peers.finish(loss)
            sums.append((np.array(gradient), loss[0]))
        return sums

    results = on_threads(count, monkeypatch, body)
    for step in range(20):
        whole = sum(
            np.random.default_rng([rank, step]).standard_normal(1000) for rank in range(count)
        )
        for sums in results:
            np.testing.assert_array_equal(sums[step][0], results[0][step][0])
            np.testing.assert_allclose(sums[step][0], whole, rtol=1e-4, atol=1e-5)
            assert sums[step][1] == sum(range(count)) + count * step


def shared_by(communicator, gradient, array):
    """(parameters, partition) of 1000 elements, in parts of different sizes for the ranks."""
    bounds = [0, *(100 * rank + 64 for rank in range(1, communicator.size)), 1000]
    pieces = [0, *(2 * rank + 1 for rank in range(1, communicator.size)), 20]
    parameters = types.SimpleNamespace(grad=gradient, data=array(1000), half=None)
    partition = types.SimpleNamespace(
        sharded=True, bounds=bounds, piece_bounds=pieces, partials=array(20)
    )
    return parameters, partition


def gather_own(communicator, through, parameters, partition, add):
    """A step of ranks that share the update; returns (part of the sum, partials, weights, loss)."""
    (first, stop), (low, high) = (
        b[communicator.rank : communicator.rank + 2]
        for b in (partition.bounds, partition.piece_bounds)
    )
    loss = np.array([2.0**communicator.rank], np.float32)
    add(loss)
    own = np.array(parameters.grad[first:stop])
    partition.partials[low:high] = communicator.rank + 1
    through.gather_partials()
    parameters.data[first:stop] = own
    through.gather_weights()
    communicator.gather(None)
    return own, np.array(partition.partials), np.array(parameters.data), loss[0]


def check_gathered(results, sums):
    bounds = np.cumsum([0] + [own.size for own, *_ in results])
    for rank, (own, partials, weights, loss) in enumerate(results):
        np.testing.assert_array_equal(own, sums[bounds[rank] : bounds[rank + 1]])
        np.testing.assert_array_equal(weights, sums)
        np.testing.assert_array_equal(partials, results[0][1])
        assert partials.all() and loss == 2.0 ** len(results) - 1


@pytest.mark.parametrize("count", [2, 3, 8])
def test_peers_that_share_the_update(count, monkeypatch):
    def body(communicator, gradient):
        parameters, partition = shared_by(communicator, gradient, lambda n: np.zeros(n, np.float32))
        peers = exchange.make_exchange(communicator, parameters, partition)
        assert peers.name == "peer" and "Measured" not in peers.why
        gradient[...] = np.random.default_rng(communicator.rank).standard_normal(1000)
        return gather_own(communicator, peers, parameters, partition, peers.finish)

    x = [
        np.random.default_rng(rank).standard_normal(1000).astype(np.float32)
        for rank in range(count)
    ]
    check_gathered(on_threads(count, monkeypatch, body), sum(x[1:], x[0]))


def step_of(rank, through, kind="unet"):
    """(TrainingStep, model) of two images of this rank of two, and of each rank others."""
    from numdiff.diffusion import Diffusion
    from numdiff.nn import AdamW
    from numdiff.training.step import TrainingStep

    model = random_model(kind)
    rng = np.random.default_rng(rank)
    step = TrainingStep(
        model,
        Diffusion(),
        AdamW(model.parameters),
        2,
        1,
        exchange=through(model),
        seed=2,
        part=(rank, 2),
    )
    step.load(rng.integers(0, 256, (2, 8, 8, 3), np.uint8), np.array([0, 1], np.int32))
    return step, model


class Streams(GpuWithStreams):
    """Notes which launches go to the second stream, and when they are waited for."""

    def __init__(self):
        super().__init__()
        self.log, self.second = [], ""

    @contextlib.contextmanager
    def forked(self, branch):
        assert branch == "exchange"
        self.second = "side: "
        yield
        self.second = ""

    def join(self, branch):
        assert branch == "exchange"
        self.log.append("join")

    def note(self, text):
        self.log.append(self.second + text)

    def signal(self, places):
        for array, index in places:
            assert array[index] == 0  # the waiting rank has seen the previous one
            array[index] = 1
        self.note(f"signal {len(places)}")

    def await_signals(self, array, indices):
        until = time.monotonic() + 30
        while not all(array[index] for index in indices):
            assert time.monotonic() < until, "a signal has not come"
            time.sleep(1e-3)
        array[indices] = 0
        self.note(f"wait for {len(indices)}")


@pytest.fixture
def gpus(monkeypatch):
    """{a rank's thread: its Streams}, which note each copy."""
    gpus = {}

    def copied(target, source):
        np.copyto(target, source)
        gpus[threading.get_ident()].note("copy")

    monkeypatch.setattr(copies, "copy_into", copied)
    return gpus


@pytest.mark.parametrize("kind", ["unet", "dit"])
@pytest.mark.parametrize("shared, how", [(False, "kernels"), (True, "kernels"), (True, "copies")])
def test_an_overlapped_all_reduce_has_the_bits_of_one_after_the_pass(
    kind, shared, how, gpus, monkeypatch
):
    """For every layer that there is; both ranks pass the same barriers in the same order, none but
    the last group's after the join."""
    alone = []
    for rank in range(2):
        step, model = step_of(rank, lambda model: None, kind)
        loss, _ = step._gradients()
        alone.append((model.parameters.grad.copy(), loss[0]))
    monkeypatch.setattr(overlap, "BLOCKS", 4)
    monkeypatch.setattr(Model, "exchange_beside", how)
    for model_class in UNet, DiT:
        monkeypatch.setattr(model_class, "exchange_beside", how)

    def noted(function):
        def launcher(buffers, own, table, *, blocks=None):
            own.backend.note(f"{function.__name__} {blocks}")
            function(buffers, own, table)

        return launcher

    for function in overlap.peer_reduce_pieces, overlap.peer_copy_pieces:
        monkeypatch.setattr(overlap, function.__name__, noted(function))
    monkeypatch.setattr(copies, "peer_reduce_pieces", overlap.peer_reduce_pieces)

    def body(communicator, gradient):
        communicator.transport, gpu = "peer", Streams()
        gpus[threading.get_ident()] = gpu

        def through(model):
            parameters = model.parameters
            parameters.grad = parameters.grad.view(GpuArray)
            parameters.grad.backend = gpu
            partition = Partition(parameters, communicator) if shared else None
            if shared:
                partition.partials = partition.partials.astype(np.float32)
            found = exchange.make_exchange(communicator, parameters, partition)
            barrier = found.barrier
            found.barrier = lambda: (gpu.note("barrier"), barrier())
            return found

        step, model = step_of(communicator.rank, through, kind)
        results = []
        for _ in range(2):
            gpu.log.clear()
            loss, _ = step._gradients(exchange=step.exchange)
            gpu.log.append("backward has ended")
            step.exchange.finish(loss)
            own = (
                slice(*step.exchange.partition.bounds[communicator.rank :][:2])
                if shared
                else slice(None)
            )
            results.append((own, np.array(model.parameters.grad)[own], loss[0]))
            communicator.gather(None)
        return results, gpu.log

    (first, log), (second, other) = on_threads(2, monkeypatch, body)
    for own, gradient, loss in (*first, *second):
        np.testing.assert_array_equal(gradient, (alone[0][0] + alone[1][0])[own])
        assert loss == alone[0][1] + alone[1][1]
    if how == "copies":
        for calls in log, other:
            at = calls.index("backward has ended")
            assert (
                calls[at + 1 : at + 4] == ["join", "signal 1", "wait for 1"]
                and calls[-1] == "peer_reduce_pieces None"
            )
            assert set(calls[at + 4 : -1]) <= {"copy"}
            side = [text.removeprefix("side: ") for text in calls[:at] if text.startswith("side: ")]
            assert len(side) == at and {"signal 1", "wait for 1", "copy"} == set(side) - {
                "signal 0"
            }
        return
    assert log == other
    group = [
        "barrier",
        "peer_reduce_pieces 4",
        *([] if shared else ["barrier", "peer_copy_pieces 4"]),
    ]
    last = [text.replace("4", "None") for text in group]
    at = log.index("backward has ended")
    assert log[at + 1 :] == ["join", *last, *([] if shared else ["barrier"])]
    side = [f"side: {text}" for text in group]
    assert len(log[:at]) >= 4 * len(group) and log[:at] == side * (at // len(group))


@pytest.mark.parametrize("count", [2, 3])
def test_weights_leave_part_by_part_while_the_others_are_updated(count, gpus, monkeypatch):
    """The copies of 16 bits by copies, what is read in float32 by a kernel: after each of two
    updates every rank has what one that updates all has."""
    rng = np.random.default_rng(7)
    gradients = [rng.standard_normal(12 * 64 * 64).astype(np.float32) for _ in range(2)]
    monkeypatch.setattr(overlap, "BLOCKS", 4)
    note = lambda buffers, own, table, half=None: (  # noqa: E731
        gpus[threading.get_ident()].note(f"pieces {len(table)}"),
        peer_copy_pieces_reference(buffers, own, table, half),
    )
    monkeypatch.setattr(partition_module, "peer_copy_pieces", note)

    def model():
        parameters = FlatParameters(Wide(), seed=3)
        parameters.keep_half()
        for name, parameter in parameters.parameters.items():
            parameter.read = name.endswith("bias")
        return parameters

    def steps(parameters, optimizer, low, high):
        for gradient in gradients:
            parameters.grad[low:high] = gradient[low:high]
            optimizer.update(np.zeros(1, np.float32))
            yield (
                np.array(parameters.half),
                *(np.array(p.data) for p in parameters.parameters.values() if p.read),
            )

    settings = {"learning_rate": 0.1, "clip_norm": 1.0, "loss_scale": LossScale(None)}
    whole = model()
    gradients = [gradient[: whole.total] for gradient in gradients]
    alone = types.SimpleNamespace(rank=0, size=count)
    want = [
        *steps(
            whole,
            AdamW(whole, partition=Partition(whole, alone, sharded=False), **settings),
            0,
            whole.total,
        )
    ]

    def body(communicator, _):
        communicator.transport, gpu = "peer", Streams()
        gpus[threading.get_ident()] = gpu
        parameters = model()
        parameters.grad = parameters.grad.view(GpuArray)
        parameters.grad.backend, parameters.exchange_beside = gpu, "copies"
        partition = Partition(parameters, communicator)
        partition.partials = partition.partials.astype(np.float32)
        low, high = partition.piece_bounds[communicator.rank : communicator.rank + 2]
        partition._own = partition.partials[low:high]
        partition.exchange = exchange.make_exchange(communicator, parameters, partition)
        optimizer = AdamW(
            parameters, partition=partition, **{**settings, "loss_scale": LossScale(None)}
        )
        found = []
        for step in steps(parameters, optimizer, partition.first, partition.stop):
            found.append(step)
            communicator.gather(None)
        return found, gpu.log

    for found, log in on_threads(count, monkeypatch, body):
        for got, expected in zip(found, want, strict=True):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a, b)
        sent = [
            f"side: {text}"
            for text in (f"signal {count - 1}", f"wait for {count - 1}", *["copy"] * (count - 1))
        ]
        assert log[-(len(sent) * copies.PARTS + 2) : -2] == sent * copies.PARTS
        assert log[-2] == "join" and log[-1].startswith("pieces ")


def test_where_a_rank_has_no_memory_for_copies_the_sum_follows(monkeypatch):
    def body(communicator, _):
        communicator.transport = "peer"
        parameters = FlatParameters(Wide(), seed=3)
        parameters.grad = parameters.grad.view(GpuArray)
        parameters.grad.backend, parameters.exchange_beside = Streams(), "copies"
        partition = Partition(parameters, communicator)
        partition.partials = partition.partials.astype(np.float32)
        # with its trial of sums
        found = exchange.make_exchange(communicator, parameters, partition)
        return found.overlap, found.name, parameters.overlapped

    def nothing_left(self, own, allocate=copies.GradientCopies._allocate):
        if self.rank:
            raise OutOfMemoryError("the GPU is full.")
        return allocate(self, own)

    monkeypatch.setattr(copies.GradientCopies, "_allocate", nothing_left)
    assert on_threads(2, monkeypatch, body) == [(None, "peer", False)] * 2


@pytest.mark.parametrize("case", ["muon", "frozen", "fp32", "microbatches"])
def test_updates_after_copies_have_the_bits_of_those_after_kernels(case, gpus, monkeypatch):
    """Where weights leave all at once (Muon, frozen parameters), where there is no copy of 16 bits,
    and where several microbatches come before the one whose gradients leave; of three steps, as
    signals serve again."""
    from numdiff.diffusion import Diffusion
    from numdiff.nn import Muon
    from numdiff.training.step import TrainingStep

    monkeypatch.setattr(DiT, "exchange_beside", "copies")
    for module in overlap, partition_module:
        monkeypatch.setattr(
            module,
            "peer_copy_pieces",
            lambda buffers, own, table, half=None, blocks=None: peer_copy_pieces_reference(
                buffers, own, table, half
            ),
        )

    def body(blocks, communicator, _):
        communicator.transport, gpu = "peer", Streams()
        gpus[threading.get_ident()] = gpu
        model = random_model("dit")
        parameters = model.parameters
        if case == "frozen":
            parameters.freeze(["blocks.0.*"])
        if case != "fp32":
            model.compute_in_half("bfloat16")
        matrices = model.matrices() if case == "muon" else None
        atoms = (
            [(first, end) for *_, first, end in matrices_in(parameters, matrices)]
            if matrices
            else ()
        )
        parameters.grad = parameters.grad.view(GpuArray)
        for entry, parameter in parameters._entries():
            parameter.grad = parameters._view(np.asarray(parameters.grad), entry)
        parameters.grad.backend = gpu
        partition = Partition(parameters, communicator, atoms=atoms)
        partition.partials = partition.partials.astype(np.float32)
        partition._own = partition.partials[slice(*partition.piece_bounds[communicator.rank :][:2])]
        partition.exchange = found = exchange.make_exchange(communicator, parameters, partition)
        assert parameters.overlapped == (blocks > 0) and (found.weight_parts is not None) == (
            blocks > 0
        )
        settings = {"learning_rate": 0.01, "clip_norm": 1.0, "partition": partition}
        optimizer = (
            Muon(parameters, matrices, **settings) if matrices else AdamW(parameters, **settings)
        )
        step = TrainingStep(
            model,
            Diffusion(),
            optimizer,
            2,
            1 if case == "microbatches" else 2,
            exchange=found,
            seed=2,
            part=(communicator.rank, 2),
        )
        rng, results = np.random.default_rng(communicator.rank), []
        for _ in range(3):
            step.load(rng.integers(0, 256, (2, 8, 8, 3), np.uint8), np.array([0, 1], np.int32))
            step.run()
            own = slice(partition.first, partition.stop)
            results.append(
                [
                    np.array(array)
                    for array in (
                        parameters.data[own],
                        *([] if parameters.half is None else [parameters.half]),
                        optimizer.m,
                        step.telemetry(0, 3),
                    )
                ]
            )
            communicator.gather(None)
        assert not any(array.any() for array in getattr(found.overlap, "signals", ()))
        communicator.gather(None)
        found.close()
        assert not parameters.overlapped
        return results, gpu.log.count("side: copy")

    after, during = ([], [])
    for blocks, found in (0, after), (4, during):
        monkeypatch.setattr(overlap, "BLOCKS", blocks)
        found += on_threads(2, monkeypatch, functools.partial(body, blocks))
    for (want, none), (got, side_copies) in zip(after, during, strict=True):
        assert none == 0 < side_copies
        for a, b in zip(itertools.chain(*want), itertools.chain(*got), strict=True):
            np.testing.assert_array_equal(a, b)


class Wide(Module):
    def __init__(self):
        self.first, self.second, self.third = (Linear(64, 64) for _ in range(3))


def test_groups_leave_out_what_is_complete_late():
    """A parameter in the middle of the buffer whose gradient comes last holds up none of its
    neighbours."""
    parameters = FlatParameters(PartitionedLayers())
    first, late, last = (
        parameters.parameters[f"{name}.weight"] for name in ("first", "second", "third")
    )
    biases = [parameters.parameters[f"{name}.bias"] for name in ("first", "second", "third")]
    groups = overlap.groups_of(
        parameters, [[last, biases[2]], [first, biases[0], biases[1]], [late]], 0, 2, None, 16
    )
    assert [group.ready for group in groups] == [0, 1, 2]
    assert [set(map(id, group.parameters)) for group in groups] == [
        {id(last), id(biases[2])},
        {id(first), id(biases[0]), id(biases[1])},
        {id(late)},
    ]
    rows = [
        sorted(
            (first, count)
            for _, first, _, count in np.concatenate([group.own, group.others]).tolist()
        )
        for group in groups
    ]
    assert rows == [[(256, 128)], [(0, 128), (192, 64)], [(128, 64)]]
    assert groups[0].complete
    last.stale = True  # its operation was left out
    assert not groups[0].complete
    parts = overlap.groups_of(parameters, [[last, first, late, *biases]], 1, 2, [0, 192, 384], 16)
    assert parts[0].own.tolist() == [[1, 192, 192, 192]] and parts[0].others.tolist() == [
        [0, 0, 0, 192]
    ]


class Nccl:
    """As much of nccl.core as is used, for threads; no array is reduced before all have come."""

    SUM, result = "sum", 0

    class UniqueId(bytes):
        @staticmethod
        def from_bytes(data):
            return Nccl.UniqueId(data)

    def __init__(self, count):
        self.arrays, self.barrier, self.Communicator = (
            [None] * count,
            threading.Barrier(count, timeout=30),
            self,
        )

    def get_unique_id(self):
        return self.UniqueId(b"one")

    def init(self, count, rank, unique):
        assert unique == b"one" and isinstance(unique, self.UniqueId) and count == len(self.arrays)

        def allreduce(send, receive, operation, stream):
            assert operation == "sum" and stream == "the stream"
            made._validate_buffer_device(send, "sendbuf")
            self.arrays[rank] = send.copy()
            self.barrier.wait()
            receive[...] = sum(self.arrays)
            self.barrier.wait()

        def broadcast(send, receive, root, stream):
            assert send is receive and stream == "the stream" and self.grouped
            self.arrays[rank] = send
            self.barrier.wait()
            receive[...] = self.arrays[root]
            self.barrier.wait()

        def validate(buffer, name):
            assert rank == 0, "buffer is on device 0"  # what cuda.bindings says of all

        made = types.SimpleNamespace(
            allreduce=allreduce,
            broadcast=broadcast,
            destroy=lambda: None,
            _validate_buffer_device=validate,
            get_async_error=lambda: self.result,
            get_last_error=lambda: "NET: closed\nby peer",
        )
        return made

    @staticmethod
    def get_error_string(result):
        return f"error {result}"

    @contextlib.contextmanager
    def group(self):
        self.grouped = True
        yield


def nccl_stands_in(monkeypatch, count):
    """An `Nccl` of this many ranks in the place of nccl4py."""
    stand_in = Nccl(count)
    monkeypatch.setattr(nccl_exchange, "import_nccl", lambda: stand_in)
    monkeypatch.setattr(nccl_exchange, "NcclView", lambda array: array)
    monkeypatch.setattr(GpuWithStreams, "stream_handle", "the stream", raising=False)
    return stand_in


def test_nccl_is_called_as_it_wants(monkeypatch):
    nccl_stands_in(monkeypatch, 3)

    def body(communicator, gradient):
        communicator.transport = "nccl"
        through = exchange.make_exchange(communicator, types.SimpleNamespace(grad=gradient))
        gradient[...] = communicator.rank + 1
        loss = np.array([2.0**communicator.rank], np.float32)
        through.finish(loss)
        through.close()
        return through.name, np.array(gradient), loss[0]

    for name, gradient, loss in on_threads(3, monkeypatch, body):
        assert name == "nccl" and (gradient == 6).all() and loss == 7


def test_nccl_serves_a_shared_update(monkeypatch):
    nccl_stands_in(monkeypatch, 3)

    def body(communicator, gradient):
        communicator.transport = "nccl"
        parameters, partition = shared_by(communicator, gradient, lambda n: np.zeros(n, np.float32))
        through = exchange.make_exchange(communicator, parameters, partition)
        gradient[...] = np.arange(1000) + communicator.rank
        return gather_own(communicator, through, parameters, partition, through.finish)

    check_gathered(on_threads(3, monkeypatch, body), 3 * np.arange(1000, dtype=np.float32) + 3)


def in_float8(gradient):
    """Parameters, as far as an exchange asks them, of a model in FP8 with three tensors."""
    amax = np.zeros((3, PARTIALS), np.uint32)
    float8 = types.SimpleNamespace(
        amax=amax,
        scale=np.ones(3, np.float32),
        share_largest=functools.partial(share_largest, amax),
    )
    return types.SimpleNamespace(grad=gradient, float8=float8)


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_the_largest_magnitudes_travel_with_the_loss(transport, monkeypatch):
    nccl_stands_in(monkeypatch, 3)
    # step, tensor, rank
    largest = np.abs(np.random.default_rng(0).standard_normal((4, 3, 3))).astype(np.float32)
    largest[1, 0, 0], largest[2, 1, 2] = np.inf, np.nan

    def body(communicator, gradient):
        communicator.transport, found = transport, []
        parameters = in_float8(gradient)
        amax, through = parameters.float8.amax, exchange.make_exchange(communicator, parameters)
        for step in range(4):
            assert not amax.any()
            amax[:, 5 * communicator.rank] = largest[step, :, communicator.rank].view(np.uint32)
            loss = np.array([2.0**communicator.rank + step], np.float32)
            through.finish(loss)
            found.append((np.array(through.largest), loss[0]))
            through.largest[...] = 0  # as the update leaves it
        return found

    for found in on_threads(3, monkeypatch, body):
        for step, (got, loss) in enumerate(found):
            np.testing.assert_array_equal(got.view(np.float32), largest[step])
            assert loss == 7 + 3 * step


@pytest.mark.parametrize("name", ["peer", "nccl"])
def test_weights_travel_in_16_bits(name, monkeypatch):
    """What a step has read in float32 arrives so, all else in the copy alone, until the masters are
    gathered."""
    nccl_stands_in(monkeypatch, 3)
    updated = np.random.default_rng(0).standard_normal(256).astype(np.float32)

    def body(communicator, gradient):
        communicator.transport = name
        # a weight of 192 numbers, a bias with its gap in the last 64
        parameters = FlatParameters(Linear(8, 24))
        parameters.keep_half(HALVES["bfloat16"])
        parameters.grad = parameters.grad.view(GpuArray)
        parameters.grad.backend = gradient.backend
        partition = Partition(parameters, communicator)
        partition.partials = partition.partials.astype(np.float32)  # as on a GPU
        partition.exchange = exchange.make_exchange(communicator, parameters, partition)
        parameters.begin_gradients()
        assert parameters.parameters["bias"].data.shape == (24,)  # it is read
        before, own = parameters.data.copy(), slice(partition.first, partition.stop)
        parameters.data[own] = updated[own]
        parameters.half[own] = updated[own].astype(parameters.half.dtype)
        partition.gather_weights()
        communicator.gather(None)
        before[own], before[192:] = updated[own], updated[192:]
        np.testing.assert_array_equal(parameters.data, before)
        np.testing.assert_array_equal(parameters.half, updated.astype(parameters.half.dtype))
        partition.gather_masters()
        communicator.gather(None)
        np.testing.assert_array_equal(parameters.data, updated)
        return partition.exchange.name

    assert on_threads(3, monkeypatch, body) == [name] * 3


def on_two_hosts(communicator, boards):
    """The communicator of four threads as that of two hosts of two ranks."""
    host, number = divmod(communicator.rank, 2)
    communicator.hosts = communicator.local_size = 2
    inside, across = (number, 2, *boards["on host", host]), (host, 2, *boards["with", number])
    communicator.split = lambda: (Threads(*inside), Threads(*across))
    return number


@pytest.mark.parametrize("transport", ["auto", "peer"])
def test_several_hosts_add_up_within_and_then_between(transport, monkeypatch):
    """The slices of each host's sums, by NCCL; chosen among what these ranks can use, as it is the
    fastest."""
    groups = [(kind, k) for kind in ("on host", "with") for k in range(2)]
    boards = {group: ([None] * 2, threading.Barrier(2, timeout=30)) for group in groups}
    between, tried, this = [Nccl(2), Nccl(2)], [], threading.local()
    kinds = {"nccl": nccl_exchange.NcclExchange}

    def flat_nccl(communicator, *rest):
        if communicator.size == 4:
            tried.append("nccl")
            raise NumdiffError("it is slow.")
        return kinds["nccl"](communicator, *rest)

    monkeypatch.setattr(nccl_exchange, "NcclExchange", flat_nccl)
    monkeypatch.setattr(nccl_exchange, "import_nccl", lambda: this.nccl)
    monkeypatch.setattr(nccl_exchange.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(nccl_exchange, "NcclView", lambda array: array)
    monkeypatch.setattr(GpuWithStreams, "stream_handle", "the stream", raising=False)

    def body(communicator, gradient):
        this.nccl = between[on_two_hosts(communicator, boards)]
        communicator.transport = transport
        through = exchange.make_exchange(communicator, types.SimpleNamespace(grad=gradient))
        found, rows = [], np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
        for _ in range(2):
            gradient[...], loss = (
                rows[communicator.rank],
                np.array([2.0**communicator.rank], np.float32),
            )
            through.finish(loss)
            np.testing.assert_array_equal(gradient, (rows[0] + rows[1]) + (rows[2] + rows[3]))
            found.append(loss[0])
        return through.name, through.why, through.inside.numbers, found

    for rank, (name, why, numbers, found) in enumerate(on_threads(4, monkeypatch, body)):
        assert (
            name == "peer+nccl"
            and numbers == [rank // 2 * 2, rank // 2 * 2 + 1]
            and found == [15, 15]
        )
        assert "Not peer+mpi: threads have no MPI." in why and ("Not nccl: it is slow." in why) == (
            transport == "auto"
        )
    assert tried == ["nccl"] * 4 * (transport == "auto")


@pytest.mark.parametrize(
    "counts, shares, said",
    [
        (
            (2, 2, 1),
            False,
            "takes 2 to 8 ranks on each of several hosts, as many on all; use nccl or mpi",
        ),
        (
            (2, 2, 2),
            True,
            "shares neither the update nor the scales of fp8 over several hosts; use nccl or mpi",
        ),
    ],
)
def test_ranks_on_several_hosts_that_peer_does_not_suit(counts, shares, said, monkeypatch):
    def body(communicator, gradient):
        communicator.transport, communicator.hosts, communicator.local_size = (
            "peer",
            2,
            counts[communicator.rank],
        )
        try:
            exchange.make_exchange(
                communicator,
                types.SimpleNamespace(grad=gradient),
                types.SimpleNamespace(sharded=shares),
            )
        except UsageError as error:
            return str(error)

    assert all(said in text for text in on_threads(3, monkeypatch, body))


def test_auto_passes_over_what_one_rank_cannot_do_and_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setattr(
        exchange, "MpiExchange", lambda communicator, parameters, partition: exchange.NoExchange()
    )

    def body(communicator, gradient):
        communicator.hosts = hosts
        chosen = exchange.make_exchange(communicator, types.SimpleNamespace(grad=gradient))
        return chosen.why, gradient.backend.closed

    hosts = 1
    for why, closed in on_threads(3, monkeypatch, body, refuse=(1,)):
        # and nccl4py was not imported
        assert re.match(r"Not peer: .*CUDA_ERROR_NOT_SUPPORTED\.$", why)
        assert closed == 1
    hosts = 2
    for why, closed in on_threads(3, monkeypatch, body):
        assert re.match(r"Not nccl: .*not installed", why)
        assert closed == 0


PEER_SUFFICES = peer.PeerExchange.suffices


class Timed(exchange.NoExchange):
    """A transport with a simulated clock: its all-reduce takes `seconds`."""

    clock = threading.local()

    def __init__(self, name, seconds):
        self.name, self.seconds, self.closed, self.calls = name, seconds, False, []
        self.gradient = np.zeros(1000, np.float32)

    def suffices(self, seconds):
        return self.name == "peer" and PEER_SUFFICES(self, seconds)

    def finish(self, loss):
        self.calls.append("finish")
        self.clock.now = getattr(self.clock, "now", 0) + self.seconds

    def gather_weights(self):
        self.calls.append("weights")

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    "seconds, expected, reason",
    [
        (
            {"peer": 2e-4, "nccl": 3e-4, "mpi": 0.0456},
            "peer",
            "Measured: peer 0.2 ms, nccl 0.3 ms, mpi 45.6 ms.",
        ),
        ({"peer": 5e-5, "nccl": 3e-4, "mpi": 0.0456}, "peer", "Measured: peer 0.05 ms."),
        # as fast
        (
            {"peer": 3.2e-4, "nccl": 3e-4, "mpi": 0.05},
            "peer",
            "Measured: peer 0.32 ms, nccl 0.3 ms, mpi 50 ms.",
        ),
        (
            {"peer": 5e-4, "nccl": 3e-4, "mpi": 0.05},
            "nccl",
            "Measured: peer 0.5 ms, nccl 0.3 ms, mpi 50 ms.",
        ),
        ({"nccl": 5e-3, "mpi": 2e-3}, "mpi", "Measured: nccl 5 ms, mpi 2 ms. Not peer: it failed."),
    ],
)
def test_the_fastest_transport_is_taken(monkeypatch, seconds, expected, reason):
    """Of those that pass their trial, by the slowest rank's time; the others are closed."""
    monkeypatch.setattr(nccl_exchange.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(exchange.time, "perf_counter", lambda: getattr(Timed.clock, "now", 0))

    def kind(name):
        def make(communicator, parameters, partition):
            if name not in seconds:
                raise NumdiffError("it failed.")
            slow = seconds[name] * (1 - 0.5 * (communicator.rank == 1))
            made.setdefault(communicator.rank, []).append(Timed(name, slow))
            return made[communicator.rank][-1]

        return make

    def body(communicator, gradient):
        return exchange.make_exchange(
            communicator, types.SimpleNamespace(grad=gradient), types.SimpleNamespace(sharded=True)
        )

    made = {}
    for name, module in (("peer", peer), ("nccl", nccl_exchange), ("mpi", exchange)):
        monkeypatch.setattr(module, f"{name.title()}Exchange", kind(name))
    for rank, chosen in enumerate(on_threads(2, monkeypatch, body)):
        assert chosen.name == expected and chosen.why == reason
        # NCCL is not started where peer is as fast as NVLink
        assert len(made[rank]) == reason.count(" ms")
        assert [e.closed for e in made[rank]] == [e is not chosen for e in made[rank]]
        assert all(e.calls[:2] == ["finish", "weights"] for e in made[rank])


def test_a_wrong_sum_in_the_trial_is_found(monkeypatch):
    monkeypatch.setattr(peer_exchange, "peer_all_gather", lambda buffers, rank, bounds: None)

    def body(communicator, gradient):
        try:
            peer.PeerExchange(communicator, types.SimpleNamespace(grad=gradient))
        except NumdiffError as error:
            return str(error)

    assert all("sums by peer were wrong" in text for text in on_threads(2, monkeypatch, body))


def test_a_magnitude_that_does_not_arrive_is_found_in_the_trial(monkeypatch):
    def body(communicator, gradient):
        parameters = in_float8(gradient)
        parameters.float8.share_largest = lambda table, rank: table.fill(0)
        try:
            peer.PeerExchange(communicator, parameters)
        except NumdiffError as error:
            return str(error)

    assert all(
        "the trial 6 of 1000 sums by peer were" in text for text in on_threads(2, monkeypatch, body)
    )


def test_nccl_asked_for_and_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(UsageError, match="nccl4py is not installed; pip install"):
        nccl_exchange.import_nccl()


def test_nccl_is_asked_for_errors_of_what_it_had_accepted(monkeypatch):
    monkeypatch.setattr(progress, "resume", None)
    stand_in = nccl_stands_in(monkeypatch, 2)

    def body(ranks, gradient):
        ranks.transport = "nccl"
        through = exchange.make_exchange(ranks, types.SimpleNamespace(grad=gradient))
        said = []
        for stand_in.result in (0, 7, 2):  # success, in progress, an error
            said += [fault() for fault in ranks.polled]
            ranks.gather(None)
        with pytest.raises(nccl_exchange.NcclFault):
            through.check()
        (fault,) = ranks.polled
        through.close()
        return said, ranks.polled, fault()

    for said, polled, after in on_threads(2, monkeypatch, body):
        assert said[:2] == [None, None] and polled == [] and after is None
        assert (
            failures.sentence(said[2])
            == "NCCL failed (error 2: NET: closed), so the job ends; start it again."
        )


def test_what_fails_its_trial_is_not_asked_any_longer(monkeypatch):
    nccl_stands_in(monkeypatch, 2).result = 2

    def body(ranks, gradient):
        ranks.transport = "nccl"
        with pytest.raises(NumdiffError, match="error 2: NET: closed"):
            exchange.make_exchange(ranks, types.SimpleNamespace(grad=gradient))
        return ranks.polled

    assert on_threads(2, monkeypatch, body) == [[], []]


def test_a_gpu_that_waited_in_vain_is_named_at_the_next_report(monkeypatch):
    def body(ranks, gradient):
        peer = peer_exchange.PeerExchange(ranks, types.SimpleNamespace(grad=gradient))
        peer.check()
        peer.status[0] = 2  # what the barrier's kernel leaves where rank 1 has not come
        try:
            peer.check()
        except NumdiffError as error:
            return str(error)

    for rank, text in enumerate(on_threads(2, monkeypatch, body)):
        assert text == (
            f"the GPU of rank {rank} waited 600 s for that of rank 1 in vain; if it repeats, use "
            "--transport mpi."
        )


@pytest.mark.parametrize(
    "answer, wanted",
    [
        ({}, None),
        ({"get_async_error": lambda: None}, None),
        ({"get_async_error": lambda: 7}, None),
        (
            {"get_async_error": lambda: 6, "get_last_error": lambda: "NET: closed\nby peer"},
            "6: NET: closed",
        ),
    ],
)
def test_what_nccl_is_asked(answer, wanted):
    """A version of nccl4py that knows no such question, or answers it otherwise, ends no run."""
    ask = nccl_exchange.Faults(
        types.SimpleNamespace(get_error_string=str), types.SimpleNamespace(**answer)
    )
    found = [ask(), ask()]
    assert [error if error is None else str(error) for error in found] == [wanted, wanted]
