"""Time GroupNorm with SiLU on the UNet's shapes: one kernel (version 3) against three (version 2).

    python -m numdiff.benchmark.scripts.groupnorm                      every shape, forward and backward
    python -m numdiff.benchmark.scripts.groupnorm --only 64x64 back    rows whose name has all of these words
    python -m numdiff.benchmark.scripts.groupnorm --tiles              also version 3 with every cut by parts that fits
    python -m numdiff.benchmark.scripts.groupnorm --tiles --every      also with every other tile
    python -m numdiff.benchmark.scripts.groupnorm --float32            in float32
    python -m numdiff.benchmark.scripts.groupnorm --residual           the backward adds what has arrived already
    python -m numdiff.benchmark.scripts.groupnorm --two                as --residual, two such gradients

A version 3 is named by its tile, its threads with pixels, the share of the pixels that it keeps,
and its shared memory; "1 x 16" is a kernel of 16 bits with one block and 16 channels a warp
(kernels/groupnorm/warp_sums.py), more than one block a cluster of kernels/groupnorm/clusters.py.
Time is the median of nine replays of a CUDA graph of twenty calls. `roof` is reading and writing
once at 3 TB/s, `forecast` the estimate by which tiles are chosen. Shapes whose arrays fit into the
L2 cache may beat the roof.
"""

import argparse
import math
from itertools import product

import numpy as np

from numdiff.benchmark.scripts.half_conv import BATCH, measured, replay
from numdiff.device import download, get_gpu, synchronize, upload, zeros
from numdiff.device.limits import HOPPER_SHARED
from numdiff.kernels import groupnorm as GN
from numdiff.kernels.elementwise import add_forward
from numdiff.kernels.groupnorm import one_pass_launch
from numdiff.kernels.groupnorm import plan as planning

SHAPES = (
    (64, 64),
    (64, 128),
    (64, 192),
    (32, 64),
    (32, 128),
    (32, 192),
    (32, 256),
    (32, 320),
    (16, 128),
    (16, 192),
    (16, 320),
    (16, 384),
    (16, 448),
    (8, 192),
    (8, 256),
    (8, 448),
    (8, 512),
)  # size, channels
GROUPS = 32


def all_plans(x, backward):
    """The best plan of every tile that fits."""
    B, P, C, width = len(x), x.size // (len(x) * x.shape[-1]), x.shape[-1], x.shape[-1] // GROUPS
    unit = math.lcm(width, planning.VECTOR)
    for tile in (n for n in range(unit, C + 1, unit) if C % n == 0):
        for threads in (*planning.FEW_THREADS, planning.THREADS):
            plan = planning.make_plan(
                B,
                P,
                C,
                width,
                x.dtype.itemsize,
                backward,
                tile,
                threads,
                HOPPER_SHARED,
                planning.MULTIPROCESSORS,
            )
            if plan is not None:
                yield plan
    seen = set()
    for part, cluster, team in product(
        planning.CHANNELS if x.dtype.itemsize == 2 else (), (1, *planning.BLOCKS), planning.TEAMS
    ):
        plan = planning.make_plan_half(
            B, P, C, width, backward, part, team, HOPPER_SHARED, planning.MULTIPROCESSORS, cluster
        )
        if plan is not None and plan not in seen:
            seen.add(plan)
            yield plan


def relative_error(got, want):
    got = download(got).astype(np.float64)
    return float(np.linalg.norm(got[: len(want)] - want) / np.linalg.norm(want))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--two", action="store_true")
    options = parser.parse_args()
    residuals = 2 if options.two else int(options.residual)
    gpu, rng = get_gpu(), np.random.default_rng(0)
    arena = gpu.new_arena()
    dtype = np.float32 if options.float32 else np.float16
    print(gpu.device_name, f"batch {BATCH}, {np.dtype(dtype)}, SiLU")
    print(
        f"{'shape and pass':22} {'version':>36} {'µs':>7} {'TB/s':>6} {'roof':>6} {'forecast':>9} {'error':>8}"
    )
    for size, C in SHAPES:
        x = dy = None
        for backward in (False, True):
            title = f"{size}x{size} {C} {'backward' if backward else 'forward'}"
            if not all(word in title for word in options.only):
                continue
            if x is None:
                x, dy = (
                    rng.standard_normal((BATCH, size, size, C), dtype=np.float32).astype(dtype)
                    for _ in range(2)
                )
                weight, bias = 1 + 0.1 * rng.standard_normal((2, C)).astype(np.float32)
                first = [a[:1].astype(np.float64) for a in (dy, x)] + [
                    weight.astype(np.float64),
                    bias.astype(float),
                ]
                y, *statistics = GN.groupnorm_forward_reference(*first[1:], GROUPS, silu=True)
                unused = np.zeros((2, C))
                dx = GN.groupnorm_backward_reference(
                    *first,
                    *statistics,
                    *unused,
                    GROUPS,
                    True,
                    residuals * first[0] if residuals else None,
                )
                dx_, dy_, weight_, bias_ = (upload(a, gpu) for a in (x, dy, weight, bias))
                _, mean, rstd = GN.groupnorm_forward(
                    dx_, weight_, bias_, GROUPS, silu=True, version=2
                )
                gradients = [zeros((C,), np.float32, gpu) for _ in range(2)]

            def call(
                version,
                plan=None,
                backward=backward,
                x=dx_,
                dy=dy_,
                weight=weight_,
                bias=bias_,
                mean=mean,
                rstd=rstd,
                gradients=gradients,
            ):
                residual, second = dy if residuals else None, dy if residuals > 1 else None
                if (
                    backward
                    and plan
                    and second is not None
                    and not one_pass_launch.takes_two(x, plan)
                ):
                    residual, second = add_forward(residual, second), None
                if backward:
                    return (
                        one_pass_launch.one_pass_backward(
                            dy,
                            x,
                            weight,
                            bias,
                            (mean, rstd),
                            gradients,
                            GROUPS,
                            True,
                            plan,
                            residual,
                            second,
                        )
                        if plan
                        else GN.groupnorm_backward(
                            dy,
                            x,
                            weight,
                            bias,
                            mean,
                            rstd,
                            *gradients,
                            GROUPS,
                            True,
                            residual if second is None else (residual, second),
                            version=version,
                        )
                    )
                return (
                    one_pass_launch.one_pass_forward(x, weight, bias, GROUPS, 1e-5, True, plan)
                    if plan
                    else GN.groupnorm_forward(x, weight, bias, GROUPS, silu=True, version=version)
                )[0]

            chosen = planning.plan_for(dx_, C // GROUPS, backward)
            estimate = planning.version_2_estimate(
                BATCH, size * size, C, x.dtype.itemsize, backward
            )
            jobs = [("2", estimate, lambda: call(2)), (None, chosen, lambda: call(3))]
            if options.tiles:
                jobs += [
                    (None, plan, lambda plan=plan: call(3, plan))
                    for plan in all_plans(dx_, backward)
                    if plan.part or options.every
                ]
            nbytes = (3 + residuals if backward else 2) * x.nbytes
            errors = [relative_error(function(), dx if backward else y) for *_, function in jobs]
            times = measured(
                [(replay(gpu, arena, function), lambda: synchronize(gpu)) for *_, function in jobs]
            )
            for (name, plan, _), us, error in zip(jobs, times, errors, strict=True):
                if name is None:
                    threads = plan.tile // planning.VECTOR * plan.rows
                    kept = 100 * plan.held * plan.blocks // size**2
                    rung = f"3, {plan.blocks} x {plan.part}" if plan.part else "3"
                    name, ns = (
                        f"{rung}: {plan.tile} x {threads}, {kept} %, {plan.shared >> 10} KiB",
                        plan.ns,
                    )
                else:
                    ns = plan
                print(
                    f"{title:22} {name:>36} {us:7.1f} {nbytes / us / 1e6:6.2f} {nbytes / 3e6:6.1f} {ns / 1e3:9.1f} "
                    f"{error:8.1e}"
                )


if __name__ == "__main__":
    main()
