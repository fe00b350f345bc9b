"""One ConvNeXt block, forward and with its backward pass: on a GPU, on the CPU, and compared with
PyTorch's.

    forward     x (B, H, W, C) and what the timestep adds (B, C) to the block's output, nothing kept for a backward
    with backward   the same, recorded, and the gradients of x, of the addend and of all weights

On a GPU both are recorded as graphs of several calls, PyTorch's too, in each of its modes: times
are the GPU's, not those of launching from Python. PyTorch's weights are float16 or bfloat16 where
numdiff computes in such.
"""

import time

import numpy as np

from ...benchmark.replays import MAX_CALLS, REPLAY_S, repeated, timed
from ...device import get_backend, synchronize, upload
from ...device.planned import card_of, collect
from ...nn import Model, Tensor
from ...nn.tensor import Tape
from ...training.compiling import aside, compile_ahead
from .block import ConvNeXtBlock

MODES = "eager", "compile"


class OneBlock(Model):
    """A `ConvNeXtBlock` by itself."""

    kind = "convnext block"

    def __init__(self, channels, backend=None, seed=0):
        self.block = ConvNeXtBlock(channels, channels, channels, 0.0, 0)
        self._finish(backend, seed)

    def forward(self, x, added):
        return self.block(x, {self.block: added})


class OurBlock:
    """The block on a device, on random numbers: `forward()`, `both()`, `wait()`."""

    def __init__(self, backend, precision, batch, size, channels):
        self.model = OneBlock(channels, backend)
        self.model.tf32 = precision == "tf32"
        half = {"fp16": np.float16, "bf16": "bfloat16"}.get(precision)
        if half is not None:
            self.model.compute_in_half(half)
        generator, shape = np.random.default_rng(0), (batch, size, size, channels)
        x, dy = (
            upload(generator.standard_normal(shape, np.float32).astype(self.model.dtype), backend)
            for _ in range(2)
        )
        self.x, self.dy, self.backend = x, dy, backend
        self.added = upload(generator.standard_normal((batch, channels), np.float32), backend)

    def forward(self):
        return self.model(Tensor(self.x), Tensor(self.added))

    def both(self):
        self.model.parameters.begin_gradients()
        x, added = Tensor(self.x, requires_grad=True), Tensor(self.added, requires_grad=True)
        with Tape() as tape:
            y = self.model(x, added)
        tape.backward(y, self.dy)
        return x.grad, added.grad

    def wait(self):
        synchronize(self.backend)


def _ours(backend, precision, shape, repeats):
    """(seconds forward, seconds with backward) of numdiff."""
    block, found = OurBlock(backend, precision, *shape), []
    for once in (block.forward, block.both):
        if not hasattr(backend, "capture"):
            found.append(timed(once, block.wait, 1, repeats))
            continue
        arena = backend.new_arena()
        with backend.within(arena):
            once()  # compiles and loads
            block.wait()
            start = time.perf_counter()
            once()
            block.wait()
            calls = int(np.clip(4 * REPLAY_S / (time.perf_counter() - start), 4, MAX_CALLS))

            def many(once=once, calls=calls):
                for _ in range(calls):
                    once()

            found.append(timed(*repeated(backend.capture(many), block.wait, calls), repeats))
    return tuple(found)


def plan_block(precision, shape, card):
    """[Key] of the kernels of a block on a card, to be compiled side by side."""

    def work(device):
        block = OurBlock(device, precision, *shape)
        block.forward()
        block.both()

    return collect(work, card)


def bench_block(
    device="auto",
    precision="fp16",
    batch=32,
    size=32,
    channels=128,
    modes=(),
    repeats=20,
    report=lambda what: None,
    cpu=True,
):
    """Times of one block, of images (batch, size, size, channels), as they are measured: dicts of
    where, forward, both (seconds), and against (how many times numdiff's on that device) or a
    fault.

    device: "cpu", or a GPU, whose rows come first; cpu: whether the CPU is measured after it
    precision: the GPU's; the CPU computes in float32
    modes: PyTorch's, of MODES; report: receives the name of each measurement
    """
    backend, shape = get_backend(device), (batch, size, channels)
    if hasattr(backend, "cache"):
        compile_ahead(plan_block(precision, shape, card_of(backend)), backend.cache, aside)
    for where in (None,) if backend is None else (backend, None) if cpu else (backend,):
        name, precision_, repeats_ = (
            ("CPU", "fp32", min(repeats, 3)) if where is None else ("GPU", precision, repeats)
        )
        report(f"numdiff, {name}")
        ours = _ours(where, precision_, shape, repeats_)
        yield {"where": f"numdiff, {name}, {precision_}", "forward": ours[0], "both": ours[1]}
        for mode in modes:
            report(f"PyTorch {mode}, {name}")
            row = {"where": f"PyTorch {mode}, {name}, {precision_}"}
            try:
                from .torch_block import torch_times

                forward, both = torch_times(mode, precision_, where is not None, shape, repeats_)
                row |= {
                    "forward": forward,
                    "both": both,
                    "against": (forward / ours[0], both / ours[1]),
                }
            except Exception as fault:  # a failure in PyTorch must not hide numdiff's figures
                row["fault"] = f"{type(fault).__name__}: {fault}".splitlines()[0]
            yield row
