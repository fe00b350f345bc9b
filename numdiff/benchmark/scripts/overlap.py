"""The gradients' all-reduce during the backward pass (numdiff/extras/transports/overlap.py) and after it:
bits, times.

    mpiexec -n 2 python -m numdiff.benchmark.scripts.overlap         two GPUs, the UNet of unet.cu and the DiT small64
    mpiexec -n 2 python -m numdiff.benchmark.scripts.overlap --blocks 8,16 --groups 4,8 --shard-update yes
    mpiexec -n 4 python -m numdiff.benchmark.scripts.overlap --shard-update yes --by copies --architecture DiT-S/2

Rank 0 first trains alone. Then all train, each on as many images, by `peer`: with the all-reduce
after the backward pass, and during it with a number of blocks of 256 threads, or by copies, in a
number of groups. All step functions are recorded first, and then timed alternately, since a card's
clock changes. A row shows the time of a step, its fraction of N times one rank's rate, and whether
weights and moments have the bits of the first row after as many steps. The aim is 97 %.
"""

import argparse
import hashlib

import numpy as np

from numdiff.benchmark.scripts.scaling import (
    ComparableImages,
    alone,
    compile_all,
    ready_trainer,
    sum_seconds,
    timed,
)
from numdiff.distributed import communicator as distributed
from numdiff.errors import UsageError
from numdiff.extensions import find
from numdiff.nn.dit import DiT
from numdiff.nn.unet import UNet
from numdiff.training.options import resolve

overlap = find("transport", "peer", "--by").overlap
# model, preset, images a rank, architecture
RUNS = (("unet", "unet64", 32, None), ("dit", "small64", 64, None))
TURNS = 6  # in which each way is timed


def numbers(text):
    return [int(part) for part in text.split(",")]


def bits(trainer):
    """A digest of this rank's weights and moments."""
    state = trainer.state()
    return hashlib.blake2b(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()[
        :12
    ]


def measured(communicator, options, images, ways, row):
    """{way: (seconds of a step, digests of all ranks)}, and seconds of the sum by itself."""
    trainers, times = {}, {way: [] for way in ways}
    for way in ways:
        by, overlap.BLOCKS, overlap.GROUPS = way
        DiT.exchange_beside = UNet.exchange_beside = by
        trainers[way] = ready_trainer(options, images)
    overlap.BLOCKS = 0
    for _ in range(TURNS):
        for way, trainer in trainers.items():
            times[way].append(
                timed(communicator, trainer.model.backend, trainer.step_function.run, row, 1)[0]
            )
    found = {}
    for way, trainer in trainers.items():
        trainer.exchange.check()
        trainer.check_ranks()
        found[way] = float(np.median(times[way])), communicator.gather(bits(trainer))
    added = sum_seconds(communicator, trainers[ways[0]])
    communicator.barrier()
    for trainer in trainers.values():
        trainer.exchange.close()
    return found, added


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=numbers, default=[8, 16, 32, 64], help="of the sum, one or several"
    )
    parser.add_argument(
        "--by",
        choices=(overlap.KERNELS, overlap.COPIES),
        default=overlap.KERNELS,
        help="copies: with --shard-update yes",
    )
    parser.add_argument(
        "--architecture", help="of DiTs on 32×32×4, one or several, instead of both models"
    )
    parser.add_argument("--groups", type=numbers, default=[overlap.GROUPS])
    parser.add_argument("--model", choices=[model for model, *_ in RUNS], help="default: both")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--shard-update", choices=("yes", "no"), default="no")
    parser.add_argument("--row", type=int, default=20, help="steps timed together")
    given = parser.parse_args()
    communicator = distributed.connect("peer", "cuda")
    blocks_of = given.blocks if given.by == overlap.KERNELS else [1]  # a copy has none
    ways = [
        (None, 0, 1),
        *((given.by, blocks, groups) for groups in given.groups for blocks in blocks_of),
    ]
    runs = [
        ("dit", None, 64 if "S" in name or "B" in name else 32, name)
        for name in (given.architecture or "").split(",")
        if name
    ]
    with communicator.job():
        if communicator.size == 1:
            raise UsageError("start it with mpiexec -n 2 or more.")
        for model, preset, images_of, architecture in runs or RUNS:
            if given.model not in (None, model):
                continue
            options = resolve(
                {
                    "model": model,
                    "preset": preset,
                    "optimizer": "adamw",
                    "device": "cuda",
                    "class_cond": False,
                    "batch": images_of * communicator.size,
                    "transport": "peer",
                    "precision": given.precision,
                    "shard_update": given.shard_update,
                    **(
                        {"architecture": architecture, "image_size": 32, "channels": 4}
                        if architecture
                        else {}
                    ),
                }
            )
            images = ComparableImages(images_of, options.image_size, options.channels or 3)
            DiT.exchange_beside = UNet.exchange_beside = given.by
            overlap.BLOCKS = given.blocks[0]
            compile_all(communicator, options, images)
            overlap.BLOCKS = 0
            single = options.changed(batch=images_of, shard_update="auto")
            one = communicator.first(alone, single, images, given.row, TURNS)[0]
            found, added = measured(communicator, options, images, ways, given.row)
            if communicator.rank == 0:
                print(
                    f"{model} {architecture or preset}, {given.precision}, {images_of} images a rank: one rank "
                    f"{1e3 * one:.3f} ms a step; the sum by itself {1e3 * added:.3f} ms"
                )
                first = found[ways[0]][1]
                for (by, blocks, groups), (seconds, digests) in found.items():
                    means = by if by == overlap.COPIES else f"{blocks} blocks"
                    how = (
                        f"during, by {means}, {groups} groups" if by else "after the backward pass"
                    )
                    same = "the same bits" if digests == first else "OTHER BITS"
                    print(
                        f"  {how:32} {1e3 * seconds:8.3f} ms  {one / seconds:6.1%}  {same}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
