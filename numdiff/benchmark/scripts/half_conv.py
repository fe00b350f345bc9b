"""Time the UNet's 3 × 3 convolutions in float16 against cuDNN (channels last) where PyTorch is
installed.

    python -m numdiff.benchmark.scripts.half_conv                       every shape and pass, the chosen version
    python -m numdiff.benchmark.scripts.half_conv --only 64x64 wgrad    rows whose name has all of these words
    python -m numdiff.benchmark.scripts.half_conv --versions 6 5 4      more than one version
    python -m numdiff.benchmark.scripts.half_conv --tiles               each tile of version 6; of a weight gradient
                                                                      also all pixels a stage, blocks
                                                                      a cluster
    python -m numdiff.benchmark.scripts.half_conv --plans 16,2,128 32,4,64,2 --only wgrad 8x8 weight
                                                                      gradients by these channels of
                                                                      x, parts, pixels a stage,
                                                                      blocks a cluster
    python -m numdiff.benchmark.scripts.half_conv --sums                weight gradients with those of bias and timestep
    python -m numdiff.benchmark.scripts.half_conv --old                 the choice and what it replaced: weights one
                                                                      tap a stage; the gradient for
                                                                      any kernel size

Each row is checked against float64 on some outputs before it is timed. Time is the median of nine
replays of a CUDA graph of twenty launches, numdiff's and cuDNN's in turn. `forecast` is the
estimate by which tiles are chosen.
"""

import argparse
import contextlib
import itertools
import time

import numpy as np

from numdiff.device import download, empty, get_gpu, synchronize, upload, zeros
from numdiff.kernels.conv2d import conv2d_backward_reference, conv2d_forward_reference
from numdiff.kernels.conv2d import launcher as C
from numdiff.kernels.conv2d.hopper import convolution as conv2d_hopper
from numdiff.kernels.conv2d.hopper import weight_gradient as conv2d_hopper_gradient
from numdiff.kernels.conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3

BATCH, CALLS, REPLAYS = 32, 20, 9
SHAPES = (
    (64, 64, 64),
    (64, 192, 64),
    (64, 128, 64),
    (32, 64, 128),
    (32, 128, 128),
    (32, 256, 128),
    (32, 320, 128),
    (16, 128, 192),
    (16, 192, 192),
    (16, 384, 192),
    (16, 448, 192),
    (8, 192, 256),
    (8, 256, 256),
    (8, 512, 256),
    (64, 3, 64),
    (64, 64, 3),
)  # size, C_in, C_out
PASSES = "forward", "dgrad", "wgrad"


def replay(gpu, arena, function):
    """A function that runs `function` CALLS times, from a CUDA graph."""
    with gpu.within(arena):
        function()  # compiled, tensor maps made
        function()
        synchronize(gpu)

        def calls():
            for _ in range(CALLS):
                # its result is dropped, so that each call has the same addresses, and the same maps
                function()

        return gpu.capture(calls)


def torch_pass(torch, x, weight, dy, name):
    """A function that replays cuDNN's pass CALLS times, and the stream's wait."""
    tx, tw, tdy = (torch.from_numpy(a).cuda().permute(0, 3, 1, 2) for a in (x, weight, dy))
    tx, tw, tdy = (t.contiguous(memory_format=torch.channels_last) for t in (tx, tw, tdy))
    pad = weight.shape[1] // 2

    def once():
        if name == "forward":
            return torch.nn.functional.conv2d(tx, tw, padding=pad)
        return torch.ops.aten.convolution_backward(
            tdy,
            tx,
            tw,
            None,
            [1, 1],
            [pad, pad],
            [1, 1],
            False,
            [0, 0],
            1,
            [name == "dgrad", name == "wgrad", False],
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            once()
    return graph.replay


def measured(jobs):
    """Median microseconds of a call of each job (replay, wait), taken alternately."""
    times = [[] for _ in jobs]
    for turn in range(REPLAYS + 2):
        for k, (run, wait) in enumerate(jobs):
            start = time.perf_counter()
            run()
            wait()
            if turn >= 2:
                times[k].append((time.perf_counter() - start) / CALLS * 1e6)
    return [sorted(t)[REPLAYS // 2] for t in times]


def expected(x, weight, dy, name):
    """What a pass must give, in float64: the first image's outputs, or the first channels of
    dweight."""
    x, weight, dy = x.astype(np.float64), weight.astype(np.float64), dy.astype(np.float64)
    if name == "wgrad":
        want = np.zeros_like(weight[:4])
        conv2d_backward_reference(
            np.ascontiguousarray(dy[..., : len(want)]), x, weight[:4], want, need_dx=False
        )
        return want
    if name == "forward":
        return conv2d_forward_reference(x[:1], weight)
    return conv2d_forward_reference(dy[:1], weight[:, ::-1, ::-1].transpose(3, 1, 2, 0))


def forecast(size, c, n, name, version):
    if version not in (None, 5, 6) or c % 8 or n % 8:
        return None
    if name == "wgrad":
        return (
            conv2d_hopper_gradient_3x3.choose_plan(BATCH, size, size, c, n, version != 5, 132)[0]
            / 1e3
        )
    if name == "dgrad":
        c, n = n, c
    return conv2d_hopper.choose_plan(BATCH, size, size, c, n, 3, version != 5, 132)[0] / 1e3


def plans_of(size, c, n):
    """Variants of a weight gradient: the number of parts that is chosen for each other choice."""
    variants = []
    for width, pixels, blocks in itertools.product(
        conv2d_hopper_gradient_3x3.WIDTHS, conv2d_hopper_gradient_3x3.PIXELS, (1, 2, 4, 8)
    ):
        with contextlib.suppress(ValueError):  # there are fewer
            plan = conv2d_hopper_gradient_3x3.choose_plan(
                BATCH, size, size, c, n, True, 132, (width, None, pixels, blocks)
            )[1]
            only = width, plan.parts, pixels, blocks
            variants.append((",".join(map(str, only)), 6, {"only": only}))
    return variants


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--versions", nargs="*", type=int, default=[None])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument(
        "--plans", nargs="*", default=[], type=lambda text: tuple(int(n) for n in text.split(","))
    )
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--sums", action="store_true")
    options = parser.parse_args()
    gpu, rng = get_gpu(), np.random.default_rng(0)
    arena = gpu.new_arena()  # of all graphs: what one leaves there, no other reads
    try:
        import torch

        torch.backends.cudnn.benchmark = True
    except ImportError:
        torch = None
    print(gpu.device_name, f"batch {BATCH}", "" if torch else "(no PyTorch here)")
    print(
        f"{'shape and pass':32} {'µs':>7} {'TFLOP/s':>8} {'cuDNN µs':>9} {'of cuDNN':>9} {'forecast':>9} error"
    )
    for size, c, n in SHAPES:
        if not any(
            all(word in f"{size}x{size} {c}->{n} {name}" for word in options.only)
            for name in PASSES
        ):
            continue
        x, dy = (
            rng.standard_normal((BATCH, size, size, k), dtype=np.float32).astype(np.float16)
            for k in (c, n)
        )
        weight = (rng.standard_normal((n, 3, 3, c), dtype=np.float32) / (3 * c**0.5)).astype(
            np.float16
        )
        dx, dw, ddy = (upload(a, gpu) for a in (x, weight, dy))
        for name in PASSES:
            title = f"{size}x{size} {c}->{n} {name}"
            if not all(word in title for word in options.only) or name == "dgrad" and c == 3:
                continue
            dweight = zeros(weight.shape, np.float32, gpu)
            variants = [(f"v{v}" if v else "", v, None) for v in options.versions]
            wide = c % 8 == n % 8 == 0
            if options.tiles and wide and name == "wgrad":
                variants = plans_of(size, c, n)
            elif options.tiles and wide:
                variants = [
                    (f"{128 * sub}x{bn}, {k}", 6, {"only": (bn, sub), "taps_per_stage": k})
                    for bn, sub in conv2d_hopper.VARIANTS
                    for k in (1, 3)
                ]
            if options.plans and wide and name == "wgrad":
                variants += [
                    (",".join(map(str, plan)), 6, {"only": plan}) for plan in options.plans
                ]
            # with the gradients of the bias and of a timestep's vector
            if options.sums and wide and name == "wgrad":
                variants += [
                    (
                        "sums",
                        6,
                        {
                            "dbias": zeros((n,), np.float32, gpu),
                            "dchannel": zeros((BATCH, n), np.float32, gpu),
                        },
                    )
                ]
            if options.old and wide:
                variants += [
                    ("old", 6, {"general": True} if name == "wgrad" else {"taps_per_stage": 1})
                ]
            jobs, rows, want = [], [], expected(x, weight, dy, name)
            for label, version, forced in variants:

                def once(
                    version=version,
                    forced=forced,
                    name=name,
                    dweight=dweight,
                    x=x,
                    dx=dx,
                    dw=dw,
                    ddy=ddy,
                ):
                    if forced and name == "wgrad":
                        run = (
                            conv2d_hopper_gradient.hopper_weight_gradient
                            if "general" in forced
                            else conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3
                        )
                        run(ddy, dx, dweight, **forced)
                        return dweight
                    if forced:
                        out = empty(
                            (*x.shape[:3], dw.shape[0] if name == "forward" else dw.shape[3]),
                            np.float16,
                            gpu,
                        )
                        return conv2d_hopper.hopper_convolution(
                            dx if name == "forward" else ddy,
                            dw,
                            None,
                            out,
                            gradient=name == "dgrad",
                            **forced,
                        )
                    if name == "forward":
                        return C.conv2d_forward(dx, dw, version=version)
                    if name == "dgrad":
                        return C._half_input_gradient(ddy, dw, dx, 1, version)
                    C._half_gradients(ddy, dx, dw, dweight, None, 1, version)
                    return dweight

                try:
                    got = download(once())[: len(want)].astype(np.float64)
                    error = np.linalg.norm(got - want) / np.linalg.norm(want)
                    jobs.append((replay(gpu, arena, once), lambda: synchronize(gpu)))
                    rows.append((label, version, error))
                except Exception as fault:  # one broken kernel must not hide the others
                    print(f"{title + ' ' + label:32} {type(fault).__name__}: {str(fault)[:90]}")
            if torch:
                jobs.append((torch_pass(torch, x, weight, dy, name), torch.cuda.synchronize))
            times = measured(jobs)
            theirs = times.pop() if torch else None
            flops = 2 * BATCH * size * size * 9 * c * n
            for us, (label, version, error) in zip(times, rows, strict=True):
                estimate = (
                    forecast(size, c, n, name, version) if label in ("", "v5", "v6") else None
                )
                print(
                    f"{title + ' ' + label:32} {us:7.1f} {flops / us / 1e6:8.0f} "
                    + (
                        f"{theirs:9.1f} {100 * theirs / us:8.0f}%"
                        if theirs
                        else f"{'–':>9} {'–':>9}"
                    )
                    + (f" {estimate:9.1f}" if estimate else f" {'–':>9}")
                    + f" {error:8.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
