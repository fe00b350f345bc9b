"""Images a second of training on one rank and on all of them, beside what the parts of a step let one expect.

    mpiexec -n 4 python -m tests.distributed.benchmark_scaling        four GPUs, the UNet of unet.cu, 32 images a rank
    mpiexec -n 4 python -m tests.distributed.benchmark_scaling --preset tiny --device cpu --per-rank 4
    mpiexec -n 2 python -m tests.distributed.benchmark_scaling --model dit --preset small64 --precision fp16
    mpiexec -n 4 python -m tests.distributed.benchmark_scaling --model dit --architecture DiT-XL/2 --precision fp16

First rank 0 trains alone while the others wait; then all train, each on as many images, as one has more GPUs in order
to do more; then they share the update. Steps are timed in rows, from a common start to the end of the slowest rank; no
data is read.

THE PREDICTION
    A step of N ranks is a step of one, and the sum of the gradients where nothing hides it: all of it with `peer` and
    `nccl`, which follow the backward pass; with `mpi` what is longer than the backward, about half of the step.
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


class Images(RandomImages):
    """Random images that the ranks can compare."""

    def read(self, rows, out=None):
        return self.images[np.asarray(rows) % len(self.images)]


def timed(communicator, backend, function, row, repeats):
    """Seconds of one call: median, least and most over `repeats` rows of `row` calls, of the slowest rank each."""
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
    """The kernels of these steps, in parallel, before they are launched one by one."""
    trainer = build_trainer(options, build_model(options, images.shape[-1]), images)
    if trainer.model.backend:
        compile_for(trainer.model, lambda card: plan_of(trainer, card), communicator)
    communicator.barrier()
    trainer.exchange.close()


def ready_trainer(options, images):
    """A trainer with a batch loaded, whose step is compiled and, on a GPU, captured."""
    trainer = build_trainer(options, build_model(options, images.shape[-1]), images)
    trainer.step_function.load(images.images)
    for _ in range(5):
        trainer.step_function.run()
    trainer.step_function.synchronize()
    return trainer


def alone(options, images, row, repeats):
    """`timed` of a rank that does not know of the others."""
    connected, distributed._current = distributed._current, None
    try:
        trainer = ready_trainer(options, images)
        return timed(trainer.communicator, trainer.model.backend, trainer.step_function.run, row, repeats)
    finally:
        distributed._current = connected


def together(communicator, options, images, given):
    """(`timed`, (bytes of moments and averages that this rank holds, those of all)) of ranks that share the update."""
    trainer = ready_trainer(options, images)
    times = timed(communicator, trainer.model.backend, trainer.step_function.run, given.row, given.repeats)
    trainer.exchange.check()
    trainer.check_ranks()
    held = [sum(nbytes) for nbytes in zip(*trainer.optimizer.state_bytes().values(), strict=True)]
    communicator.barrier()
    trainer.exchange.close()
    return times, held


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    options = resolve({"model": given.model, "preset": given.preset, "optimizer": given.optimizer,
                       "device": given.device, "class_cond": False, "batch": given.per_rank * size,
                       "transport": given.transport, "precision": given.precision,
                       **({"architecture": given.architecture, "image_size": 32, "channels": 4}
                          if given.architecture else {})})
    single = options.changed(batch=given.per_rank)
    communicator = distributed.connect(options.transport, options.device)
    with communicator.job():
        if communicator.size == 1:
            raise UsageError("start it with mpiexec -n 2 or more.")
        images = Images(given.per_rank, options.image_size, options.channels or 3)
        compile_all(communicator, options, images)
        one = communicator.first(alone, single, images, given.row, given.repeats)
        shared, held = together(communicator, options.changed(shard_update="yes"), images, given)
        trainer = ready_trainer(options.changed(shard_update="no"), images)
        every = timed(communicator, trainer.model.backend, trainer.step_function.run, given.row, given.repeats)
        trainer.exchange.check()
        trainer.check_ranks()
        added = sum_seconds(communicator, trainer)
        hidden = 0.5 * one[0] if trainer.exchange.name == "mpi" else 0.0
        foreseen = one[0] + max(0.0, added - hidden)
        if communicator.rank == 0:
            backend, megabytes = trainer.model.backend, 4e-6 * trainer.model.parameters.total
            print(f"{options.model} {given.architecture or options.preset}, {given.per_rank} images a rank, "
                  f"{backend.device_name if backend else 'CPU (NumPy)'}, gradients ({megabytes:.1f} MB) by "
                  f"{trainer.exchange.name}. {trainer.exchange.why}")
            rows = ("1 rank", 1, one), (f"{size} ranks", size, every), (f"{size}, sharing", size, shared)
            for name, count, (median, least, most) in rows:
                print(f"{name:12}  {1e3 * median:8.2f} ms a step ({1e3 * least:.2f} to "
                      f"{1e3 * most:.2f})  {count * given.per_rank / median:10,.1f} images/s")
            print(f"the sum by itself {1e3 * added:.3f} ms: a step of {1e3 * foreseen:.2f} ms is to be expected, "
                  f"{one[0] / foreseen:.1%} of {size} × one rank; measured {one[0] / every[0]:.1%}")
            print(f"{size}, sharing: rank 0 holds {held[0] / 1e6:,.1f} of {held[1] / 1e6:,.1f} MB of moments and "
                  "averages")
        communicator.barrier()
        trainer.exchange.close()


if __name__ == "__main__":
    main()
