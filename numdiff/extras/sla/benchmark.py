"""Sparse-linear attention on a GPU compared with flash attention and PyTorch's, in one run,
float16.

    python -m numdiff.extras.sla.benchmark                                        T 4,096 and 16,384, top-k 5 and 20 %
    python -m numdiff.extras.sla.benchmark --lengths 16384 --shares 0.05 --kernels   and each kernel by itself

In addition to the launcher's choice: "mma" is version 2, whose forward makes S of the blocks of a
list as they pass by; "in order" leaves long lists of dkv where they are. --skew makes keys of a
block larger or smaller than those of others, as a trained model's are, and so some lists longer.
Forward, and forward with backward, captured once and replayed; the ways take turns, as in
flash_attention.py, whose clock this is. "x" is flash attention's time over that of
sparse-linear attention. "error" is the larger of y's and dqkv's against float64 in the 2-norm, on
one head of 1,024 tokens. Without a GPU it prints the forecast that docs/log/kernels.md explains.
"""

import argparse
import contextlib
import functools
import itertools
from unittest import mock

import numpy as np

from numdiff.benchmark.scripts.flash_attention import WARMUP, ReplayClock, capture, torch_replay
from numdiff.benchmark.watch import watching_launches
from numdiff.device import download, empty, get_gpu, upload, why_no_gpu
from numdiff.device.planned import card_of, collect
from numdiff.extras.sla import kernels as sla
from numdiff.extras.sla.kernels import launcher
from numdiff.kernels import attention
from numdiff.training.compiling import compile_ahead

PASSES = {"forward": (True, False), "both": (True, True)}
DRAM, L2 = 3.9e6, 5.5e6  # bytes a µs of an H200
# FLOPs a µs of wgmma, as flash attention was measured, and of mma.sync with a softmax
FLASH, MMA = 400e6, 240e6
LAUNCH = 1.5  # µs


def forecast(T, HS, heads, share):
    """{pass: (µs of flash attention, µs of sparse-linear attention)} of one image: the sum of each
    kernel's slowest."""
    N = sla.blocks_of(T)
    pairs, tile, square = N * sla.count_of(share, N), 128 * HS, 2 * HS * HS
    product = 2 * 64 * 64 * HS  # FLOPs of one of a pair of blocks
    linear = N * 2 * 64 * HS * HS
    forward = [
        (N * (3 * tile + square), 0, 0),
        (0, N * square, 0),
        (0, N * N / 8 * 4 * HS, 0),
        (N * (2 * tile + square), pairs * (2 * tile + square), 2 * pairs * product + 2 * linear),
    ]
    backward = [
        (N * (5 * tile + 2 * square), 0, 5 * linear),
        (N * 4 * tile, pairs * 2 * tile, 3 * pairs * product),
        # lists, totals, sums of dW and db
        (0, N * N * 8, 0),
        (0, N * square, 0),
        (0, 0, 0),
        (0, 0, 0),
        (N * 5 * tile, pairs * (2 * tile + square), 4 * pairs * product + 2 * linear),
    ]

    def microseconds(kernels):
        return sum(
            heads * max(dram / DRAM, l2 / L2, flops / MMA) + LAUNCH for dram, l2, flops in kernels
        )

    flash = heads * 4 * T * T * HS / FLASH, heads * 14 * T * T * HS / FLASH
    return {
        "forward": (flash[0], microseconds(forward)),
        "both": (flash[1], microseconds(forward + backward)),
    }


def inputs(gpu, B, T, heads, HS, skew=0.0):
    """(qkv, dy, weight, bias), of a layer that has learned something.

    skew: deviation of the logarithm of how large the mean of a block's keys is
    """
    rng, C = np.random.default_rng(0), heads * HS
    qkv, dy = (
        rng.standard_normal((B, T, width), dtype=np.float32).astype(np.float16)
        for width in (3 * C, C)
    )
    # means of 64 normal keys are an eighth of a number: so they are 1 here, and others' noise
    # remains
    if skew:
        means = rng.standard_normal((B, -(-T // 64), 1, heads, HS)) * np.exp(
            skew * rng.standard_normal((B, -(-T // 64), 1, heads, 1))
        )
        keys = qkv.reshape(B, T, 3, heads, HS)[:, :, 1]
        keys += means.repeat(64, 2).reshape(B, -1, heads, HS)[:, :T].astype(np.float16)
    weight = (rng.standard_normal((HS, HS)) / HS**0.5).astype(np.float16)
    return [upload(a, gpu) for a in (qkv, dy, weight, rng.standard_normal(HS).astype(np.float32))]


def work(given, heads, share, passes, sums, version=None):
    """A function of one way: flash attention for share None; version: None is the launcher's
    choice, and of its lists "in order"."""
    qkv, dy, weight, bias = given

    def run():
        if share is None:
            kept = attention.flash_attention_forward(qkv, heads, "new")
            return (
                attention.flash_attention_backward(dy, qkv, *kept, heads, "new")
                if passes[1]
                else kept
            )
        y, kept = sla.sla_forward(
            qkv,
            weight,
            bias,
            heads,
            share,
            "new",
            keeps=passes[1],
            version=None if version == "in order" else version,
        )
        in_order = (
            mock.patch.object(launcher, "long_list", lambda count: 0)
            if version == "in order"
            else contextlib.nullcontext()
        )
        with in_order:
            return (
                sla.sla_backward(dy, qkv, y, kept, weight, bias, *sums, heads, "new")
                if passes[1]
                else y
            )

    return run


def compile_all(gpu, shapes, shares):
    """Both ways' kernels, side by side."""

    def launch_all(device):
        for B, T, heads, HS in shapes:
            given = [
                empty(shape, dtype, device)
                for shape, dtype in (
                    ((B, T, 3 * heads * HS), np.float16),
                    ((B, T, heads * HS), np.float16),
                    ((HS, HS), np.float16),
                    ((HS,), np.float32),
                )
            ]
            sums = [empty(shape, np.float32, device) for shape in ((HS, HS), (HS,))]
            for share in (None, *shares):
                for passes, version in itertools.product(
                    PASSES.values(), (None, "mma") if share else (None,)
                ):
                    work(given, heads, share, passes, sums, version)()

    compile_ahead(collect(launch_all, card_of(gpu)), gpu.cache)


def error(gpu, HS, share, T=1024):
    """The larger relative error of y and dqkv of one head."""
    given = inputs(gpu, 1, T, 1, HS)
    qkv, dy, weight, bias = (download(a).astype(np.float64) for a in given)
    y, kept = sla.sla_forward(given[0], *given[2:], 1, share, "new")
    dqkv = sla.sla_backward(given[1], given[0], y, kept, *given[2:], None, None, 1, "new")
    want, wanted = sla.sla_forward(qkv, weight, bias, 1, share, "new")
    gradient = sla.sla_backward(dy, qkv, want, wanted, weight, bias, None, None, 1, "new")
    return max(
        np.linalg.norm(download(a).astype(np.float64) - b) / np.linalg.norm(b)
        for a, b in ((y, want), (dqkv, gradient))
    )


def kernel_times(gpu, arena, clock, shape, share, version, skew):
    """[(kernel, µs)] of forward and, but for "mma", backward, each after the second-level cache was
    overwritten."""
    given, found = inputs(gpu, *shape, skew), []
    sums = [upload(np.zeros(n, np.float32), gpu) for n in ((shape[3], shape[3]), shape[3])]
    run = work(given, shape[2], share, (True, version != "mma"), sums, version)

    def around(name, grid, block, call):
        if name in ("memset", "memcpy"):  # the clock's own among them
            return call()
        return found.append((name, 1e3 * clock.milliseconds(call)))

    with gpu.within(arena):
        run()  # compiles the kernels
        with watching_launches(gpu, around):
            run()
    return found


def measure(gpu, arena, clock, shape, share, passes, repeats, skew):
    """{way: median µs}"""
    given = inputs(gpu, *shape, skew)
    sums = [upload(np.zeros(n, np.float32), gpu) for n in ((shape[3], shape[3]), shape[3])]
    replays = {
        name: functools.partial(
            clock.milliseconds,
            capture(gpu, arena, work(given, shape[2], of, passes, sums, version))[0],
        )
        for name, of, version in (
            ("flash", None, None),
            ("sla", share, None),
            ("mma", share, "mma"),
            ("in order", share, "in order"),
        )
    }
    in_torch = torch_replay(*shape, *passes)
    if in_torch:
        replays["torch"] = in_torch
    times = np.array([[replay() for replay in replays.values()] for _ in range(WARMUP + repeats)])[
        WARMUP:
    ]
    return dict(zip(replays, 1e3 * np.median(times, axis=0), strict=True))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], metavar="T")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    gpu = None if why_no_gpu() else get_gpu()
    print(
        f"{gpu.device_name if gpu else 'no GPU: forecast for an H200'}; µs; batch {options.batch}, {options.heads} "
        f"heads of {options.head_size}"
    )
    print(
        "     T  share pass     |   flash     sla      x     mma inorder   torch | forecast: flash     sla      x "
        "| error"
    )
    shapes = [(options.batch, T, options.heads, options.head_size) for T in options.lengths]
    if gpu:
        compile_all(gpu, [*shapes, (1, 1024, 1, options.head_size)], options.shares)
    arena, clock = (gpu.new_arena(), ReplayClock(gpu)) if gpu else (None, None)
    for shape in shapes:
        T = shape[1]
        for share in options.shares:
            expected = forecast(T, options.head_size, options.batch * options.heads, share)
            for label, passes in PASSES.items():
                line = f"{T:6} {share:6.2f} {label:8} | "
                if gpu:
                    us = measure(
                        gpu, arena, clock, shape, share, passes, options.repeats, options.skew
                    )
                    line += (
                        f"{us['flash']:7.0f} {us['sla']:7.0f} {us['flash'] / us['sla']:6.2f} "
                        f"{us['mma']:7.0f} {us['in order']:7.0f} {us.get('torch', np.nan):7.0f} | "
                    )
                flash, sparse = expected[label]
                line += f"{flash:15.0f} {sparse:7.0f} {flash / sparse:6.2f}"
                print(
                    line + (f" | {error(gpu, options.head_size, share):.1e}" if gpu else ""),
                    flush=True,
                )
                if gpu and options.kernels and passes[1]:
                    for version in (None, "mma", "in order"):
                        for name, us in kernel_times(
                            gpu, arena, clock, shape, share, version, options.skew
                        ):
                            print(
                                f"{us:40.1f} {name}{f', {version}' if version else ''}", flush=True
                            )


if __name__ == "__main__":
    main()
