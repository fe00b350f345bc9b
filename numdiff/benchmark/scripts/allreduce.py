"""How long the ranks take to add up a gradient, by each transport; and whether all end with the
same, right bits.

    mpiexec -n 4 python -m numdiff.benchmark.scripts.allreduce                 four GPUs of one host, the UNet's 82 MB
    mpiexec -n 2 python -m numdiff.benchmark.scripts.allreduce --one-gpu       two ranks on one GPU: right, not fast
    mpiexec -n 2 python -m numdiff.benchmark.scripts.allreduce --device cpu

Times are of the slowest rank: the median of single all-reduces, each started together and waited
for, and the mean of twenty in a row, which is the cost that one adds to a step. `peer` and `nccl`
are captured and replayed, as in a step. The column `expected` is for `peer` its bytes at the speed
of one link, for the others earlier times on H200s.
"""

import argparse
import time
import types

import numpy as np

from numdiff.device import copy_into, download, get_backend, synchronize, why_no_gpu, zeros
from numdiff.distributed import communicator as distributed
from numdiff.distributed.buckets import BUCKET
from numdiff.distributed.exchange import make_exchange
from numdiff.errors import NumdiffError

UNET = 20_494_336  # elements of the flat gradient of the UNet of preset unet64, with its gaps
ROW = 20  # sums in a row
LINK = 298e9  # bytes a second at which a kernel read the memory of one other H200
# ms for the UNet on H200s
MEASURED = {("nccl", 2): 0.30, ("nccl", 4): 0.39, ("mpi", 2): 45.7, ("mpi", 4): 60.9}


class Flat:
    """As much of FlatParameters as an exchange needs."""

    def __init__(self, elements, backend):
        self.grad, self.total = zeros(elements, np.float32, backend), elements
        offsets = range(0, elements, min(BUCKET, elements))
        self.index = [{"name": str(offset), "offset": offset} for offset in offsets]
        self.parameters = {
            str(offset): types.SimpleNamespace(name=str(offset)) for offset in offsets
        }


def bytes_read(elements, ranks):
    """That a rank must read from the others for a sum (Patarasuk and Yuan 2009)."""
    return 2 * 4 * elements * (ranks - 1) // ranks


def expected_ms(name, elements, ranks):
    """What was measured before on H200s that NVLink joins, or follows from it: milliseconds, or
    None."""
    if name == "peer":
        return bytes_read(elements, ranks) / LINK * 1e3
    return MEASURED.get((name, ranks)) if elements == UNET else None


def values(elements, rank):
    return np.random.default_rng(rank).standard_normal(elements, dtype=np.float32)


def right(communicator, exchange, flat, loss):
    """Add up random numbers; the error against the float64 sum, once all ranks are found to have
    the same bits."""
    copy_into(flat.grad, values(flat.total, communicator.rank))
    copy_into(loss, np.array([communicator.rank + 1], np.float32))
    exchange.finish(loss)
    got, total = download(flat.grad), download(loss)
    exchange.check()
    communicator.check_same(got, f"the sums by {exchange.name}")
    whole = sum(values(flat.total, rank).astype(np.float64) for rank in range(communicator.size))
    if total[0] != communicator.size * (communicator.size + 1) / 2:
        raise NumdiffError(f"{exchange.name}: the sum of the losses is wrong.")
    return np.abs(got - whole).max()


def seconds(communicator, backend, function, repeats):
    """Median of the slowest rank's times."""
    times = []
    for _ in range(repeats + 3):
        synchronize(backend)
        communicator.comm.Barrier()
        start = time.perf_counter()
        function()
        synchronize(backend)
        times.append(time.perf_counter() - start)
    return float(np.median(np.max(communicator.comm.allgather(times[3:]), axis=0)))


def measure(communicator, backend, flat, name):
    communicator.transport = name
    exchange = make_exchange(communicator, flat)
    loss = zeros(1, np.float32, backend)
    error = max(communicator.gather(right(communicator, exchange, flat, loss)))
    copy_into(flat.grad, np.zeros(flat.total, np.float32))  # sums of sums would overflow
    once = lambda: exchange.finish(loss)  # noqa: E731
    if exchange.name != "mpi" and hasattr(backend, "capture"):
        with backend.within(backend.new_arena()):
            once = backend.capture(once)
    single = seconds(communicator, backend, once, 30)
    row = seconds(communicator, backend, lambda: [once() for _ in range(ROW)], 5) / ROW
    exchange.check()
    if communicator.rank == 0:
        rate = bytes_read(flat.total, communicator.size) / row / 1e9
        foreseen = backend and expected_ms(exchange.name, flat.total, communicator.size)
        print(
            f"{exchange.name:9}  {f'{foreseen:8.2f}' if foreseen else '       –'}  {1e3 * row:8.3f}  "
            f"{1e3 * single:8.3f}  {rate:7.1f}  {error:.1e}",
            flush=True,
        )
    communicator.barrier()
    exchange.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=UNET)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu" if why_no_gpu() else "cuda"
    )
    parser.add_argument("--transports", help="separated by commas; default: all that can work")
    parser.add_argument("--one-gpu", action="store_true", help="let all ranks share the first GPU")
    options = parser.parse_args()
    communicator = distributed.connect("mpi", "cpu" if options.one_gpu else options.device)
    if communicator.size == 1:
        raise SystemExit("start it with mpiexec -n 2 or more")
    with communicator.job():
        backend = get_backend(options.device)
        flat = Flat(-(-options.elements // 64) * 64, backend)
        if communicator.rank == 0:
            print(
                f"{communicator.describe()}, {backend.device_name if backend else 'CPU'}, float32, "
                f"{4 * flat.total / 1e6:.1f} MB; the same bits on all ranks, unless a line says otherwise\n"
                "transport  expected  ms in row  ms alone  GB/s in  largest error",
                flush=True,
            )
        # NCCL wants a GPU a rank
        wanted = options.transports or ("peer,mpi" if options.one_gpu else "peer,mpi,nccl")
        for name in wanted.split(",") if backend else ("mpi",):
            try:
                measure(communicator, backend, flat, name)
            except NumdiffError as error:  # which all ranks have
                if communicator.rank == 0:
                    print(f"{name:9}  {error}", flush=True)


if __name__ == "__main__":
    main()
