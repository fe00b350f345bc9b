"""What the tests run under mpiexec: `python -m tests.distributed.ranks TASK,… FOLDER`, on every
rank."""

import json
import os
import pathlib
import sys
import time
import types

import numpy as np

from numdiff import plots
from numdiff.device import choose_gpu, gpu_count
from numdiff.device.cpu import workers
from numdiff.distributed import communicator as distributed
from numdiff.distributed.communicator import connect
from numdiff.distributed.failures import AgreedError
from numdiff.errors import NumdiffError, UsageError
from numdiff.training.options import resolve
from numdiff.training.run import train
from tests.models import RUN, UNET

OPTIONS = {
    **RUN,
    "log_every": 5,
    "sample_count": 6,
    "checkpoint_every": 5,
    "seed": 5,
    "lr_schedule": "constant",
    "warmup_steps": 2,
}


def join(device):
    """The communicator. Unlike in a run, ranks may share a GPU if there are too few: right, if not
    fast."""
    communicator = connect("auto", "cpu")
    if device == "cuda":
        choose_gpu(communicator.rank % gpu_count())
    return communicator


def steps(folder, device="cpu", transport="auto"):
    """Eight steps of a small UNet; every rank leaves its losses and its state. Then a weight of
    rank 1 changes."""
    from tests.training.test_trainer import losses, make  # here, as most tasks need none of pytest

    communicator = join(device)
    communicator.transport = transport
    with communicator.job():
        trainer = make(device=device, model="small")
        values = losses(trainer, 8)
        trainer.check_ranks()
        path = folder / f"{communicator.rank}-of-{communicator.size}.npz"
        np.savez(
            path,
            losses=values,
            workers=workers(),
            transport=trainer.exchange.name,
            **trainer.state(),
        )
        if communicator.size > 1 and device == "cpu":
            trainer.model.parameters.data[7] += communicator.rank
            expect("the weights of rank 1 differ from those of rank 0", trainer.check_ranks)
        trainer.close()
        trainer.exchange.close()


def sharded(folder, **options):
    """The update shared among the ranks and done by each: the same bits, and each continues from
    the other's state."""
    from tests.training.test_trainer import losses, make

    communicator = join("cpu")
    with communicator.job():
        states, values, parts = [], [], []
        for how in ("no", "yes"):
            trainer = make(shard_update=how, model="small", **options)
            values.append(losses(trainer, 2))
            held = trainer.model.parameters.arrays()  # at a report all ranks have all weights
            trainer.check_ranks()
            states.append(trainer.state())
            np.testing.assert_array_equal(
                trainer.model.parameters.flatten(held), states[-1]["parameters"]
            )
            trainer.load_state(states[0])  # the second trainer continues from the first one's
            parts.append(trainer.optimizer.v.size)
            values.append(losses(trainer, 1))
            states.append(trainer.state())
            with trainer.ema_weights() as model:
                states[-1]["in use"] = model.parameters.arrays(model.parameters._bound)[
                    "out.2.weight"
                ]
            trainer.close()
            trainer.exchange.close()
        assert values[0] == values[2] and values[1] == values[3], values
        for a, b in zip(states[:2], states[2:], strict=True):
            assert a.keys() == b.keys()
            for name in a:
                np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert sum(communicator.gather(parts[1])) == parts[0] == trainer.model.parameters.total
        (folder / f"sharded-{communicator.rank}-of-{communicator.size}").touch()


def float8(folder, device="cpu", transport="auto"):
    """Losses and scales are those of one rank, whose state these continue from, and which continues
    from theirs.

    It takes its images in parts that are each as many as a rank's: products of other shapes add in
    another order, of which float16 and E4M3 make more than float32 does.
    """
    from tests.extras.fp8.test_fp8 import make
    from tests.training.test_trainer import losses

    communicator = join(device)
    communicator.transport = transport
    with communicator.job():
        part = 8 // communicator.size
        alone, after, whole = (
            make(device, communicator=distributed.Alone(), microbatch=microbatch)
            for microbatch in (part, part, 8)
        )
        starts, state = losses(alone, 3), alone.state()
        np.testing.assert_allclose(losses(whole, 3), starts, rtol=1e-3)
        goes_on, trained, states = losses(alone, 1), [], []
        for how in ("no", "yes"):
            trainer = make(device, shard_update=how)
            np.testing.assert_allclose(losses(trainer, 3), starts, rtol=1e-5)
            trainer.check_ranks()
            states.append(trainer.state())
            same_scales(states[-1], state)
            trainer.load_state(state)
            trained.append(losses(trainer, 1))
            np.testing.assert_allclose(trained[-1], goes_on, rtol=1e-5)
            states.append(trainer.state())
            same_scales(states[-1], alone.state())
            after.load_state(states[-2])
            np.testing.assert_allclose(losses(after, 1), goes_on, rtol=1e-5)
            # what would be without the others' magnitudes; not of captured steps
            if how == "no" and device == "cpu":
                trainer.exchange.mail.float8 = trainer.model.parameters.float8.of_ranks = None
                losses(trainer, 1)
                expect("the magnitudes in fp8 of rank 1 differ", trainer.check_ranks)
            trainer.close()
            trainer.exchange.close()
        assert trained[0] == trained[1]
        for name in state:
            np.testing.assert_array_equal(states[0][name], states[2][name], err_msg=name)
            np.testing.assert_array_equal(states[1][name], states[3][name], err_msg=name)
        (folder / f"float8-{communicator.rank}-of-{communicator.size}").touch()


def peer_float8(folder):
    """The same on GPUs, Hoppers, that read each other's memory."""
    float8(folder, "cuda", "peer")


def mpi_float8(folder):
    """The same on GPUs whose gradients go through the host's memory."""
    float8(folder, "cuda", "mpi")


def same_scales(a, b):
    from tests.conftest import relative_error

    np.testing.assert_array_equal(a["fp8_scale"], b["fp8_scale"])
    assert relative_error(a["fp8_history"], b["fp8_history"]) < 0.01
    assert (a["fp8_scale"] != 1).all()


def sharded_further(folder):
    """The same of Muon, whose matrices belong to one rank each; of frozen parameters; of a copy in
    16 bits."""
    for options in (
        {"optimizer": "muon"},
        {"freeze": ("input_blocks.*",), "clip_norm": 0.01},
        {"freeze": ("input_blocks.*",), "precision": "bf16"},
        {"optimizer": "muon", "precision": "bf16"},
    ):
        sharded(folder, **options)


def sharded_in_16_bits(folder):
    """The same of ranks that send most weights in 16 bits."""
    sharded(folder, precision="bf16", batch=4, microbatch=1)


def peer_steps(folder):
    """The same on GPUs that read each other's memory."""
    steps(folder, "cuda", "peer")


def mpi_steps(folder):
    """The same on GPUs whose gradients go through the host's memory."""
    steps(folder, "cuda", "mpi")


def nccl_steps(folder):
    """The same on GPUs, one a rank, joined by NCCL."""
    steps(folder, "cuda", "nccl")


def over_hosts(folder):
    """Sums of two hosts' sums, by MPI between them, whose order is that of the hosts. What `peer`
    does within a host is done by MPI here, as there is no GPU."""
    from numdiff.distributed import mpi_exchange
    from numdiff.extras.transports import hosts_exchange
    from numdiff.extras.transports.reduce import slice_of

    communicator = connect("auto", "cpu")
    size = communicator.size // 2
    communicator.hosts, communicator.local_size, communicator.local_rank = (
        2,
        size,
        communicator.rank % size,
    )
    communicator._local = communicator.comm.Split(communicator.rank // size, communicator.rank)

    class Inside:
        status = 5

        def __init__(self, inside, parameters):
            self.ranks, self.gradient = inside, parameters.grad

        def add(self, loss):
            rows = self.ranks.gather((self.gradient, loss[0]))
            own = slice(*slice_of(self.gradient.size, self.ranks.rank, self.ranks.size))
            self.gradient[own] = sum((row[own] for row, _ in rows[1:]), rows[0][0][own])
            loss[0] = sum(one for _, one in rows)

        def gather(self):
            for rank, row in enumerate(self.ranks.gather(self.gradient)):
                own = slice(*slice_of(row.size, rank, self.ranks.size))
                self.gradient[own] = row[own]

        def check(self, status):
            pass

        def close(self):
            pass

    # which is for GPUs
    hosts_exchange.PeerExchange, hosts_exchange.try_sums = Inside, lambda *_: None
    hosts_exchange.BUCKET, plan = 10_000, mpi_exchange.BucketPlan
    mpi_exchange.BucketPlan = lambda parameters: plan(parameters, 10_000)
    with communicator.job():
        n = 3 * 10_000 + 100
        gradient, loss = np.zeros(n, np.float32), np.zeros(1, np.float32)
        through = hosts_exchange.HostsExchange(
            communicator, types.SimpleNamespace(grad=gradient), mpi_exchange.MpiExchange
        )
        assert through.name == "peer+mpi" and through.status == 5
        assert through.inside.numbers == [communicator.rank // size * size + k for k in range(size)]
        rows = np.random.default_rng(0).standard_normal((communicator.size, n)).astype(np.float32)
        for _ in range(2):
            gradient[:], loss[0] = rows[communicator.rank], communicator.rank
            through.finish(loss)
            sums = [sum(part[1:], part[0]) for part in (rows[:size], rows[size:])]
            np.testing.assert_array_equal(gradient, sums[0] + sums[1])
            assert loss[0] == sum(range(communicator.size))
        through.check()
        through.close()
        (folder / f"over-hosts-{communicator.rank}").touch()


def methods(folder):
    """Every method of the communicator; an assertion that fails ends the job."""
    communicator = connect("auto", "cpu")
    rank, size = communicator.rank, communicator.size
    with communicator.job():
        assert connect("auto", "cpu") is communicator and communicator.hosts == 1
        assert communicator.gather(rank * 2) == [0, 2, 4, 6][:size]
        assert communicator.largest(10 - rank) == 10
        assert communicator.first(lambda: f"from {rank}") == "from 0"
        assert communicator.everywhere(lambda: -rank) == [0, -1, -2, -3][:size]
        array = np.full(5, rank, np.float32)
        communicator.broadcast(array)
        assert not array.any()
        arrays = communicator.broadcast_arrays(
            {"a": np.arange(3), "b": np.array(2.5)} if rank == 0 else None
        )
        assert arrays["a"].tolist() == [0, 1, 2] and arrays["b"] == 2.5
        communicator.check_same(array, "the numbers")
        for wrong, text in (
            (lambda: communicator.first(fail, "on rank 0", 0, rank), "on rank 0"),
            (lambda: communicator.everywhere(fail, "on rank 1", 1, rank), "on rank 1"),
            (
                lambda: communicator.check_same(np.array([rank == 1]), "the flags"),
                "the flags of rank 1 differ",
            ),
            (
                lambda: communicator.check_options({"--batch": 8 + rank}),
                "disagree on --batch: rank 0 has 8",
            ),
        ):
            expect(text, wrong)
        communicator.barrier()
        (folder / f"methods-{rank}").touch()


def expect(text, action):
    """That `action` raises the error with this text, on all ranks."""
    try:
        action()
    except AgreedError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


def fail(text, where, rank):
    if rank == where:
        raise UsageError(text)


def runs(folder):
    """Ten steps at once; five; and five more, on this many ranks or on as many as another call has."""
    communicator = connect("auto", "cpu")
    if not (folder / "part").exists():
        train(resolve({**OPTIONS, "outdir": str(folder / "whole"), "steps": 10}), echo=print)
        train(resolve({**OPTIONS, "outdir": str(folder / "part"), "steps": 5}), echo=print)
    source = folder / "part" / "00000-unet-tiny" / "checkpoint-00000005.h5"
    target = folder / f"resumed-{communicator.size}"
    communicator.first(copy_run, source, target)
    train(resolve({**OPTIONS, "outdir": str(target), "steps": 10}), resume=str(target), echo=print)


def float8_run(folder):
    """A run in FP8, which the command leaves to GPUs, up to the step that a file says; continues
    from what is there."""
    communicator = connect("auto", "cpu")
    steps, runs = int((folder / "steps").read_text()), folder / "runs"
    resume = "auto" if communicator.first(runs.exists) else None
    options = {**OPTIONS, "outdir": str(runs), "steps": steps, "log_every": 1}
    unet = {"model", *UNET} - {"image_size"}
    options = {
        "model": "dit",
        "depth": 1,
        "hidden_size": 64,
        "heads": 2,
        "batch": 8,
        "learning_rate": 3e-3,
        **{name: value for name, value in options.items() if name not in unet},
    }
    train(resolve(options).changed(precision="fp8"), resume=resume, echo=print)


def copy_run(source, target):
    target.mkdir()
    (target / source.name).write_bytes(source.read_bytes())
    (target / "options.json").write_bytes((source.parent / "options.json").read_bytes())


def endless(folder, **given):
    """A run that only a signal ends; every rank leaves its process number."""
    communicator = join(given.get("device"))
    (folder / f"pid-{communicator.rank}").write_text(str(os.getpid()))
    train(
        resolve(
            {
                **OPTIONS,
                "outdir": str(folder / "runs"),
                "steps": 100000,
                "checkpoint_every": 2,
                "log_every": 1,
                **given,
            }
        )
    )


def watched(folder):
    """A run whose ranks wait three seconds for one that is stopped."""
    endless(folder, rank_timeout=3)


def hung(folder):
    """Rank 1 reads from a file system that answers no more."""
    from numdiff.data.dataset import Dataset

    whole, calls = Dataset.read, []

    def read(self, rows, out=None):
        calls.append(1)
        if connect().rank == 1 and len(calls) > 10:
            time.sleep(1000)
        return whole(self, rows, out)

    Dataset.read = read
    endless(folder, rank_timeout=6)


def never(folder):
    """Rank 1 ends before it has started MPI."""
    if os.environ["PMI_RANK"] == "1":
        sys.exit(0)
    distributed.start_limit = lambda timeout: 3.0
    endless(folder)


def drawing(folder):
    """A run that draws for ever after its second step."""
    endless(folder, sample_every=2, sample_steps=1000, sample_count=3)


def peer_endless(folder):
    """The same on GPUs."""
    endless(folder, device="cuda", transport="peer")


def differ(folder):
    """A number of rank 1 changes, as in a machine with faulty memory."""
    from numdiff.training.trainer import Trainer

    check_ranks = Trainer.check_ranks

    def faulty(self):
        self.model.parameters.data[7] += self.communicator.rank
        check_ranks(self)

    Trainer.check_ranks = faulty
    train(resolve({**OPTIONS, "outdir": str(folder), "steps": 20}))


def crowded(folder):
    """Ranks on a host that has one GPU, which this stands for."""
    distributed.gpu_count, distributed.choose_gpu = lambda: 1, lambda index: None
    distributed.get_gpu = lambda: types.SimpleNamespace(uuid="GPU-1")
    connect("auto", "cuda")


def absent(folder):
    """Ranks without mpi4py."""
    sys.modules["mpi4py"] = None
    train(resolve({**OPTIONS, "outdir": str(folder / "runs"), "steps": 2}))


def fault(folder):
    """Rank 1 fails in its fourth step with an unexpected error."""
    from numdiff.training.step import TrainingStep

    whole, calls = TrainingStep._forward_backward, []

    def fails(self, *arguments):
        if isinstance(self.samples, np.ndarray):  # not in the step that is planned beforehand
            calls.append(self.samples[0])
        if calls[3:] and calls[3]:
            raise ZeroDivisionError("a fault of one rank")
        return whole(self, *arguments)

    TrainingStep._forward_backward = fails
    distributed.GRACE = 0.5  # instead of five seconds, in which the others may meet the same error
    endless(folder)


def unreachable(folder, ranks=(1,)):
    """MPI refuses the fourth step's sums on these ranks."""
    from numdiff.distributed.mpi_exchange import MpiExchange

    begin, steps = MpiExchange.begin, []

    def fails(self, records):
        steps.append(1)
        if self.rank in ranks and len(steps) == 4:
            self.comm = self.MPI.COMM_NULL
        begin(self, records)

    MpiExchange.begin = fails
    distributed.GRACE = 1.0
    endless(folder)


def unreachable_all(folder):
    unreachable(folder, (0, 1))


def overflow(folder):
    """A learning rate that ends all in NaN, on every rank in the same step."""
    train(
        resolve(
            {
                **OPTIONS,
                "outdir": str(folder),
                "steps": 20,
                "learning_rate": 1e30,
                "warmup_steps": 0,
                "clip_norm": 0,
                "log_every": 1,
            }
        )
    )


def disk(folder):
    """Rank 0 cannot write a checkpoint."""
    from numdiff.training import loop

    def full(path, *_):
        raise NumdiffError(f"cannot write the checkpoint {path}: the disk is full.")

    loop.save_checkpoint = full
    train(resolve({**OPTIONS, "outdir": str(folder), "steps": 20}))


if __name__ == "__main__":
    # each rank 0 would import matplotlib
    plots.loss_curve, plots.import_ahead = lambda *_: None, lambda: None
    tasks, where = sys.argv[1].split(","), pathlib.Path(sys.argv[2])
    try:
        for task in tasks:
            globals()[task](where)
    except NumdiffError as known:
        print(json.dumps({"error": str(known)}), file=sys.stderr)
        sys.exit(known.exit_code)
