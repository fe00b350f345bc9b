"""The twelve layers of the im2win paper: microseconds and bytes of im2col, im2win, implicit GEMM
and cuDNN, in float32.

    python -m numdiff.extras.im2win.benchmark                    every layer, forward, batch 128 as in the paper
    python -m numdiff.extras.im2win.benchmark --batch 32 --only conv9   fewer images, one layer
    python -m numdiff.extras.im2win.benchmark --no-check --passes forward dgrad wgrad   the gradients, too

The table is Markdown. Without a GPU it has the bytes alone, which follow from the sizes: of x, and
of what im2col and im2win write in addition (implicit GEMM writes nothing). The layers are those of
the paper's code, with one difference: they are padded by kernel // 2, as all convolutions here, and
not at all there. Time is the median of five replays of a CUDA graph of three launches, the
versions' and cuDNN's in turn; each is first held against float64, which takes NumPy
minutes: --no-check leaves it out; the tests hold small shapes. cuDNN is allowed no tf32, on
channels-last tensors, its fastest algorithm. "too large" where an array has 2³¹ elements or more:
im2col of conv4.

SOURCE
    Lu, Chu, Guo and Liu 2023, arXiv:2306.14316; github.com/seth-lu/Im2win, benchmarks/benchmarks.h
"""

import argparse
import contextlib
import math

import numpy as np

from numdiff.benchmark.scripts import half_conv as timing
from numdiff.device import download, empty, get_gpu, synchronize, upload, why_no_gpu, zeros
from numdiff.device.planned import Planned, card_of
from numdiff.errors import TooManyElementsError
from numdiff.extras.im2win.windows import im2win_bytes
from numdiff.kernels.conv2d import (
    conv2d_backward_reference,
    conv2d_forward_cost,
    conv2d_forward_reference,
    launcher,
)
from numdiff.kernels.conv2d.im2col import im2col_forward_cost, output_size
from numdiff.training.compiling import compile_ahead

# name: rows and columns of x, C_in, C_out, kernel, stride
LAYERS = {
    "conv1": (227, 3, 96, 11, 4),
    "conv2": (231, 3, 96, 11, 4),
    "conv3": (227, 3, 64, 7, 2),
    "conv4": (224, 32, 64, 7, 2),
    "conv5": (24, 96, 256, 5, 1),
    "conv6": (12, 256, 512, 3, 1),
    "conv7": (224, 3, 64, 3, 1),
    "conv8": (112, 64, 128, 3, 1),
    "conv9": (56, 64, 64, 3, 1),
    "conv10": (28, 128, 128, 3, 1),
    "conv11": (14, 256, 256, 3, 1),
    "conv12": (7, 512, 512, 3, 1),
}
VERSIONS = {"im2col": 2, "im2win": 7, "implicit": 3}
PASSES = "forward", "dgrad", "wgrad"
CALLS, REPLAYS = 3, 5


def sizes(batch, layer):
    """(bytes of x, of im2col's matrix, of im2win's) of a layer."""
    side, c, _, kernel, stride = LAYERS[layer]
    x = 4 * batch * side * side * c
    col = im2col_forward_cost(batch, side, side, c, kernel, stride)[0] - x
    return x, col, im2win_bytes(batch, side, side, c, kernel, stride)


def torch_pass(torch, x, weight, dy, stride, name):
    """A function that replays cuDNN's pass CALLS times. x, weight, dy: its own, channels last"""
    tx, tw, tdy = (a.permute(0, 3, 1, 2) for a in (x, weight, dy))
    pad = [weight.shape[1] // 2] * 2

    def once():
        if name == "forward":
            return torch.nn.functional.conv2d(tx, tw, stride=stride, padding=pad)
        return torch.ops.aten.convolution_backward(
            tdy,
            tx,
            tw,
            None,
            [stride, stride],
            pad,
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


def expected(x, weight, dy, stride, name):
    """What a pass must give, in float64: the first image's, or the first channels of dweight."""
    if name == "forward":
        return conv2d_forward_reference(
            x[:1].astype(np.float64), weight.astype(np.float64), None, stride
        )
    some = slice(None, 1) if name == "dgrad" else slice(None)
    w = weight if name == "dgrad" else weight[:4]
    dweight = np.zeros(w.shape)
    dx = conv2d_backward_reference(
        dy[some, ..., : len(w)].astype(np.float64),
        x[some].astype(np.float64),
        w.astype(np.float64),
        dweight,
        None,
        stride,
        name == "dgrad",
    )
    return dx if name == "dgrad" else dweight


def run(name, version, arrays, dweight, stride):
    x, weight, dy = arrays
    if name == "forward":
        return launcher.conv2d_forward(x, weight, stride=stride, version=version)
    if name == "dgrad":
        return launcher.conv2d_input_gradient(dy, weight, x, stride, version=version)
    launcher.conv2d_weight_gradient(dy, x, dweight, stride=stride, version=version)
    return dweight


def draw(rng, *shape):
    """Normal numbers, which repeat after a million: a gigabyte of new ones would take longer than
    what is measured."""
    return np.resize(rng.standard_normal(min(1 << 20, math.prod(shape)), dtype=np.float32), shape)


def arrays_of(batch, layer):
    """x, weight, dy of a layer."""
    side, c, n, kernel, stride = LAYERS[layer]
    rng, out = np.random.default_rng(0), output_size(side, stride)
    return (
        draw(rng, batch, side, side, c),
        draw(rng, n, kernel, kernel, c) / np.float32(kernel * c**0.5),
        draw(rng, batch, out, out, n),
    )


def plan(gpu, options):
    """[Key] of all kernels that will be launched, to be compiled side by side."""
    device = Planned(card_of(gpu))
    for layer in options.only:
        side, c, n, kernel, stride = LAYERS[layer]
        out = output_size(side, stride)
        x, weight, dy, dweight = (
            empty(shape, np.float32, device)
            for shape in (
                (options.batch, side, side, c),
                (n, kernel, kernel, c),
                (options.batch, out, out, n),
                (n, kernel, kernel, c),
            )
        )
        for name in options.passes:
            for version in VERSIONS.values():
                with contextlib.suppress(TooManyElementsError):
                    run(name, version, (x, weight, dy), dweight, stride)
    return list(device.kernels)


def measure(gpu, arena, torch, given, stride, passes, check):
    """Yields (pass, {version's name, or cuDNN: µs, or a word where there are none}) of a layer.

    arena: of all graphs: what one leaves there, no other reads; given: `arrays_of`
    """
    timing.CALLS, timing.REPLAYS = CALLS, REPLAYS  # its graphs are of these
    arrays = [upload(a, gpu) for a in given]
    theirs = [torch.from_numpy(a).cuda() for a in given] if torch else ()
    for name in passes:
        want = expected(*given, stride, name) if check else None
        words, jobs, labels = {}, [], []
        for label, version in VERSIONS.items():
            dweight = zeros(given[1].shape, np.float32, gpu)

            def once(version=version, name=name, dweight=dweight):
                return run(name, version, arrays, dweight, stride)

            try:
                if check:
                    error = np.linalg.norm(download(once())[: len(want)] - want) / np.linalg.norm(
                        want
                    )
                    if not error < 1e-5:
                        words[label] = f"error {error:.0e}"
                        continue
                jobs.append((timing.replay(gpu, arena, once), lambda: synchronize(gpu)))
                labels.append(label)
            except TooManyElementsError:
                words[label] = "too large"
        if torch:
            jobs.append((torch_pass(torch, *theirs, stride, name), torch.cuda.synchronize))
            labels.append("cuDNN")
        yield name, words | dict(zip(labels, timing.measured(jobs), strict=True))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--passes", nargs="*", default=["forward"], choices=PASSES)
    parser.add_argument(
        "--no-check", action="store_true", help="do not hold the results against float64"
    )
    options = parser.parse_args(arguments)
    torch, gpu = None, None
    if not why_no_gpu():
        gpu = get_gpu()
        arena = gpu.new_arena()
        compile_ahead(plan(gpu, options), gpu.cache)
        try:
            import torch

            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.allow_tf32 = False
        except ImportError:
            torch = None
    print(gpu.device_name if gpu else "no GPU: bytes alone", f"· batch {options.batch} · float32\n")
    columns = ["layer", "x", "weight", "stride", "GFLOP", "MB: x", "im2col", "im2win", "/ im2col"]
    if gpu:
        columns += ["pass", *(f"{label} µs" for label in (*VERSIONS, "cuDNN"))]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for layer in options.only:
        side, c, n, kernel, stride = LAYERS[layer]
        x, col, win = sizes(options.batch, layer)
        flops = conv2d_forward_cost(options.batch, side, side, c, n, kernel, stride)[1]
        head = [
            layer,
            f"{side}×{side}×{c}",
            f"{n}×{kernel}×{kernel}×{c}",
            stride,
            f"{flops / 1e9:,.0f}",
            *(f"{nbytes / 1e6:,.0f}" for nbytes in (x, col, win)),
            f"{win / col:.2f}",
        ]
        rows = (
            [("", None)]
            if gpu is None
            else measure(
                gpu,
                arena,
                torch,
                arrays_of(options.batch, layer),
                stride,
                options.passes,
                not options.no_check,
            )
        )
        for name, found in rows:
            cells = (
                []
                if found is None
                else [name, *(found.get(label, "–") for label in (*VERSIONS, "cuDNN"))]
            )
            print(
                f"| {' | '.join(f'{c:,.0f}' if isinstance(c, float) else str(c) for c in [*head, *cells])} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
