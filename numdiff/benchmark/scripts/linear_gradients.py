"""Time the gradients of a DiT block's four weights on a GPU: each in launches of its own, and all
in one.

    python -m numdiff.benchmark.scripts.linear_gradients [S/2 B/2 XL/2 …] [--rounds 9]

Second passes count: those that may wait do so until the block's end, as in a backward pass.
Weights' gradients are written, biases' added to. The launch of all is timed with each width of
tiles, with tiles cut and whole; the launcher's choice has a star. estimate: the launchers'. All are
recorded as CUDA graphs of several calls over rotating buffers, which are replayed alternately;
printed are medians.
"""

import argparse
import itertools
import statistics

import numpy as np

from numdiff.benchmark.replays import repeated
from numdiff.benchmark.scripts.half_matmul import POOL, graph, milliseconds
from numdiff.device import download, get_gpu, upload, zeros
from numdiff.kernels import linear_backward
from numdiff.kernels.linear.gradients import linear_gradients_backward
from numdiff.kernels.matmul import choice, group
from numdiff.kernels.matmul.hopper.group_schedule import count_parts, cut
from numdiff.kernels.reduce.second_pass import deferred_reductions

# channels, tokens
MODELS = {"S/2": (384, 16384), "B/2": (768, 16384), "L/2": (1024, 8192), "XL/2": (1152, 8192)}
SETS, CALLS = 2, 8


def sizes_of(D):
    """Of qkv, proj, fc1, fc2."""
    return (3 * D, D), (D, D), (4 * D, D), (D, 4 * D)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["S/2", "B/2", "XL/2"])
    parser.add_argument("--rounds", type=int, default=9)
    given, gpu = parser.parse_args(), get_gpu()
    pool = np.random.default_rng(0).standard_normal(POOL).astype(np.float16)
    for model in given.models:
        measure(gpu, model, given.rounds, pool)


def measure(gpu, model, rounds, pool):
    D, tokens = MODELS[model]
    sizes, choose = sizes_of(D), group.choose
    sets = []
    for _ in range(SETS):
        layers = []
        for k, (N, K) in enumerate(sizes):
            layers.append(
                [
                    upload(np.resize(pool[7 * k + i :], (tokens, n)), gpu)
                    for i, n in enumerate((N, K))
                ]
                + [zeros((N, K), np.float32, gpu), zeros(N, np.float32, gpu)]
            )
        sets.append(layers)
    weights = [zeros(size, np.float16, gpu) for size in sizes]

    def alone(which):
        def run(i):
            with deferred_reductions():
                for k in which:
                    dy, x, dweight, dbias = sets[i % SETS][k]
                    linear_backward(
                        dy, x, weights[k], dweight, dbias, need_dx=False, accumulate=False
                    )

        return run

    def together(i):
        with deferred_reductions():
            linear_gradients_backward(sets[i % SETS], False)

    graphs, texts = [], []
    multiprocessors = gpu.multiprocessors
    for which in (*((k,) for k in range(4)), tuple(range(4))):
        products = [choice.gradient_product(*sizes[k], tokens) for k in which]
        chosen = [choice.choose_half(6, product, True, multiprocessors) for product in products]
        graphs.append(graph(gpu, alone(which), CALLS))
        texts.append(
            (
                f"{', '.join(('qkv', 'proj', 'fc1', 'fc2')[k] for k in which)} alone",
                sum(ns for *_, ns in chosen) / 1e3,
                sum(sizes[k][0] * sizes[k][1] for k in which),
            )
        )
    first = [download(layer[2]) for layer in sets[0]]
    best = choose(sizes, tokens, multiprocessors)[:2]
    for width, splits in itertools.product(group.WIDTHS, (True, False)):
        tiles = sum(rows * columns for rows, columns in group.tiles_of(sizes, width))
        made = cut(tiles, -(-tokens // 64), multiprocessors, group.SHORTEST, splits)
        group.choose = lambda *_, width=width, made=made: (width, made, 0)
        for layer in sets[0]:
            gpu.fill(layer[2], 0xFF)
            gpu.fill(layer[3], 0)
        together(0)
        error = max(
            np.linalg.norm(download(layer[2]) - want) / np.linalg.norm(want)
            for layer, want in zip(sets[0], first, strict=True)
        )
        exact = [
            np.linalg.norm(download(layer[3]) - layer_sum) / np.linalg.norm(layer_sum)
            for layer, layer_sum in zip(
                sets[0],
                [download(layer[0]).astype(np.float32).sum(0) for layer in sets[0]],
                strict=True,
            )
        ]
        graphs.append(graph(gpu, together, CALLS))
        texts.append(
            (
                f"together{'*' * ((width, made) == best)}, {tiles} tiles of 128×{width}, {made.whole} whole, "
                f"{count_parts(made, tiles) if made.whole < tiles else 0} parts; differ by {error:.1e}, "
                f"sums {max(exact):.1e}",
                group.estimate(sizes, tokens, multiprocessors, width, made) / 1e3,
                sum(N * K for N, K in sizes),
            )
        )
    group.choose = choose
    jobs = [repeated(replay, gpu.synchronize, CALLS) for replay in graphs]
    times = [[] for _ in jobs]
    for _ in range(rounds):
        for (run, wait, calls), taken in zip(jobs, times, strict=True):
            taken.append(1e3 * milliseconds(run, wait) / calls)
    print(f"DiT-{model}, {tokens} tokens, on {gpu.device_name}")
    for (text, estimated, outputs), taken in zip(texts, times, strict=True):
        us = statistics.median(taken)
        print(
            f"  {us:7.1f} µs  {2 * outputs * tokens / us / 1e6:5.0f} TFLOP/s  (estimate {estimated:6.1f})  {text}",
            flush=True,
        )


if __name__ == "__main__":
    main()
