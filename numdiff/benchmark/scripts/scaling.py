"""Images a second of training on one rank and on all of them, compared with an estimate from the
parts of a step.

    mpiexec -n 4 python -m numdiff.benchmark.scripts.scaling        four GPUs, the UNet of unet.cu, 32 images a rank
    mpiexec -n 4 python -m numdiff.benchmark.scripts.scaling --preset tiny --device cpu --per-rank 4
    mpiexec -n 2 python -m numdiff.benchmark.scripts.scaling --model dit --preset small64 --precision fp16
    mpiexec -n 4 python -m numdiff.benchmark.scripts.scaling --model dit --architecture DiT-XL/2 --precision fp16

Rank 0 trains alone while the others wait, on GPUs each rank for itself at the same time; all train
together, each on as many images, as one has more GPUs in order to do more; and they share the
update. Steps are timed in rows, from a common start to the end of the slowest rank; no data is
read. On GPUs the three take turns: in its first second a cool card has a higher clock than later,
by 5 % with a DiT, so what is timed first would seem faster. What all do together is compared with
the sum of what each does by itself.

THE PREDICTION
    A step of N ranks is a step of one, and the sum of the gradients where nothing hides it: all of
    it with `peer` and `nccl`, which follow the backward pass; with `mpi` what is longer than the
    backward, about half of the step.
"""

import argparse
import time

import numpy as np

from numdiff.benchmark.step import RandomImages
from numdiff.device import copy_into, synchronize, zeros
from numdiff.distributed import communicator as distributed
from numdiff.errors import UsageError
from numdiff.training.build import build_model, build_trainer
from numdiff.training.compiling import compile_for, plan_of
from numdiff.training.options import resolve


class ComparableImages(RandomImages):
    """Random images that the ranks can compare."""

    def read(self, rows, out=None):
        return self.images[np.asarray(rows) % len(self.images)]


def timed(communicator, backend, function, row, repeats):
    """Seconds of one call: median, least and most over `repeats` rows of `row` calls, of the
    slowest rank each."""
    times = []
    for _ in range(repeats):
        synchronize(backend)
        communicator.barrier()
        start = time.perf_counter()
        for _ in range(row):
            function()
        synchronize(backend)
        times.append((time.perf_counter() - start) / row)
    slowest = np.max(communicator.gather(times), axis=0)
    return np.median(slowest), slowest.min(), slowest.max()


def compile_all(communicator, options, images):
    """The kernels of these steps, in parallel, before they are launched one by one; returns whether
    there is a GPU."""
    trainer = build_trainer(options, build_model(options, images.shape[-1]), images)
    if trainer.model.backend:
        compile_for(trainer.model, lambda card: plan_of(trainer, card), communicator)
    communicator.barrier()
    trainer.exchange.close()
    return trainer.model.backend is not None


def ready_trainer(options, images):
    """A trainer with a batch loaded, whose step is compiled and, on a GPU, captured."""
    trainer = build_trainer(options, build_model(options, images.shape[-1]), images)
    trainer.step_function.load(images.images)
    for _ in range(5):
        trainer.step_function.run()
    trainer.step_function.synchronize()
    return trainer


def by_itself(options, images):
    """The `ready_trainer` of a rank that does not know of the others."""
    connected, distributed._current = distributed._current, None
    try:
        return ready_trainer(options, images)
    finally:
        distributed._current = connected


def alone(options, images, row, repeats):
    """`timed` of a rank that does not know of the others."""
    trainer = by_itself(options, images)
    return timed(
        trainer.communicator, trainer.model.backend, trainer.step_function.run, row, repeats
    )


class TimedWay:
    """A way to train, and how long its steps take.

    times: of each row for each rank, in seconds of a step
    """

    def __init__(self, name, trainer, ranks):
        self.name, self.trainer, self.ranks, self.times = name, trainer, ranks, []

    def time(self, communicator, row):
        backend, run = self.trainer.model.backend, self.trainer.step_function.run
        synchronize(backend)
        communicator.barrier()
        start = time.perf_counter()
        for _ in range(row):
            run()
        synchronize(backend)
        self.times.append(communicator.gather((time.perf_counter() - start) / row))

    @property
    def rows(self):
        """Seconds of a step by rows: of the slowest rank, or of ranks that do not wait for each
        other that which gives the sum of their rates."""
        return [
            len(times) / sum(1 / t for t in times) if self.ranks == 1 else max(times)
            for times in self.times
        ]

    def summary(self, per_rank):
        median, least, most = np.median(self.rows), min(self.rows), max(self.rows)
        return (
            f"{self.name:12}  {1e3 * median:8.2f} ms a step ({1e3 * least:.2f} to {1e3 * most:.2f})  "
            f"{self.ranks * per_rank / median:10,.1f} images/s"
        )


def in_turns(communicator, options, images, given):
    """[`TimedWay`]: by itself, together, sharing the update."""
    single = options.changed(batch=given.per_rank)
    ways = [TimedWay("1 rank", by_itself(single, images), 1)]
    for name, shared in (
        (f"{communicator.size} ranks", "no"),
        (f"{communicator.size}, sharing", "yes"),
    ):
        trainer = ready_trainer(options.changed(shard_update=shared), images)
        ways.append(TimedWay(name, trainer, communicator.size))
    for _ in range(given.repeats):
        for way in ways:
            way.time(communicator, given.row)
    return ways


def one_after_the_other(communicator, options, images, given):
    """The same for ranks that share cores: rank 0 alone."""
    ways = [TimedWay("1 rank", None, 1)]
    ways[0].times = [
        [t]
        for t in communicator.first(
            alone, options.changed(batch=given.per_rank), images, given.row, given.repeats
        )
    ]
    for name, shared in (
        (f"{communicator.size} ranks", "no"),
        (f"{communicator.size}, sharing", "yes"),
    ):
        ways.append(
            TimedWay(
                name, ready_trainer(options.changed(shard_update=shared), images), communicator.size
            )
        )
        for _ in range(given.repeats):
            ways[-1].time(communicator, given.row)
    return ways


def sum_seconds(communicator, trainer):
    """How long the sum of the gradients takes by itself."""
    backend, gradient = trainer.model.backend, trainer.model.parameters.grad
    loss = zeros(1, np.float32, backend)
    copy_into(gradient, np.zeros(gradient.shape, np.float32))
    once = lambda: trainer.exchange.finish(loss)  # noqa: E731
    once()
    if trainer.exchange.name != "mpi" and backend:
        with backend.within(backend.new_arena()):
            once = backend.capture(once)
    return timed(communicator, backend, once, 10, 5)[0]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="unet")
    parser.add_argument("--preset")
    parser.add_argument("--architecture", help="of a DiT instead, on 32×32×4, as DiT-S/2")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--per-rank", type=int, default=32)
    parser.add_argument("--row", type=int, default=10, help="steps timed together")
    parser.add_argument("--repeats", type=int, default=8, help="rows")
    given = parser.parse_args()
    started = distributed.launched()
    size = started[1] if started else 1
    options = resolve(
        {
            "model": given.model,
            "preset": given.preset,
            "optimizer": given.optimizer,
            "device": given.device,
            "class_cond": False,
            "batch": given.per_rank * size,
            "transport": given.transport,
            "precision": given.precision,
            **(
                {"architecture": given.architecture, "image_size": 32, "channels": 4}
                if given.architecture
                else {}
            ),
        }
    )
    communicator = distributed.connect(options.transport, options.device)
    with communicator.job():
        if communicator.size == 1:
            raise UsageError("start it with mpiexec -n 2 or more.")
        images = ComparableImages(given.per_rank, options.image_size, options.channels or 3)
        timed_so = in_turns if compile_all(communicator, options, images) else one_after_the_other
        one, every, shared = timed_so(communicator, options, images, given)
        for way in every, shared:
            way.trainer.exchange.check()
            way.trainer.check_ranks()
        held = [
            sum(nbytes)
            for nbytes in zip(*shared.trainer.optimizer.state_bytes().values(), strict=True)
        ]
        trainer = every.trainer
        added = sum_seconds(communicator, trainer)
        alone_seconds, together_seconds, shared_seconds = (
            np.median(way.rows) for way in (one, every, shared)
        )
        hidden = 0.5 * alone_seconds if trainer.exchange.name == "mpi" else 0.0
        foreseen = alone_seconds + max(0.0, added - hidden)
        if communicator.rank == 0:
            backend, megabytes = trainer.model.backend, 4e-6 * trainer.model.parameters.total
            print(
                f"{options.model} {given.architecture or options.preset}, {given.per_rank} images a rank, "
                f"{backend.device_name if backend else 'CPU (NumPy)'}, gradients ({megabytes:.1f} MB) by "
                f"{trainer.exchange.name}. {trainer.exchange.why}"
            )
            for way in one, every, shared:
                print(way.summary(given.per_rank))
            print(
                f"the sum by itself {1e3 * added:.3f} ms: a step of {1e3 * foreseen:.2f} ms is to be expected, "
                f"{alone_seconds / foreseen:.1%} of {size} × one rank; measured "
                f"{alone_seconds / together_seconds:.1%}, sharing {alone_seconds / shared_seconds:.1%}"
            )
            print(
                f"{size}, sharing: rank 0 holds {held[0] / 1e6:,.1f} of {held[1] / 1e6:,.1f} MB of moments and "
                "averages"
            )
        communicator.barrier()
        for way in every, shared:
            way.trainer.exchange.close()


if __name__ == "__main__":
    main()
