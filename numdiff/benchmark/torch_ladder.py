"""PyTorch's ladder of the same model: eager, the largest batch, torch.compile, fused attention,
autocast.

The techniques and their order are those of the table in which they were first measured here; each
row keeps those before it. PyTorch's plain attention writes its T × T matrix, as our unfused one
does.
"""

import contextlib
from typing import NamedTuple

from ..device.roof import peak_flops
from .ladder import paced
from .step import summary
from .torch_step import TorchStep, wait_of

ROOM = 0.92  # of the free memory: PyTorch's allocator leaves gaps
SMALLER = 0.85  # of a batch that did not fit after all
ATTEMPTS = 6


class TorchRung(NamedTuple):
    name: str
    mode: str = "eager"
    precision: str = "fp32"
    largest: bool = True
    fused: bool = False


ROWS = (
    TorchRung("PyTorch, eager", largest=False),
    TorchRung("the largest batch"),
    TorchRung("torch.compile", "compile"),
    TorchRung("fused attention (SDPA)", "compile", fused=True),
    TorchRung("autocast to float16", "compile", "fp16", fused=True),
)


def attention(fused):
    """Context: PyTorch's fused attention, or the one with a T × T matrix."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)


def largest_batch(options, row):
    """The largest batch that fits, estimated from the peaks of two small ones, in eager mode."""
    import torch

    peaks = []
    for batch in (options.batch, 2 * options.batch):
        step = TorchStep(options.changed(batch=batch), "eager", row.precision)
        step.run()
        step.wait()
        peaks.append(step.peak_bytes)
        step.close()
    each = max(1.0, (peaks[1] - peaks[0]) / options.batch)
    return max(
        options.batch, int(options.batch + (ROOM * torch.cuda.mem_get_info()[0] - peaks[0]) / each)
    )


def measure(options, row, batch, steps, warmup, flops, peak):
    step = TorchStep(options.changed(batch=batch), row.mode, row.precision)
    try:
        times = paced(step, steps, warmup)
        return {
            "batch": batch,
            "precision": row.precision,
            **summary(times, flops * batch, batch, peak),
            "steps": len(times),
            "peak_mib": step.peak_bytes / 2**20 or None,
            "first_s": step.first_s,
        }
    finally:
        step.close()


def bench_torch_ladder(options, backend, flops, steps, warmup, started=None):
    """Yields a dict a row of PyTorch's ladder: name, and left_out, or fault, or what `bench_ladder`
    gives of it, with the speed-up over PyTorch's first row; flops: of a step, an image"""
    import torch

    first, cuda = None, options.device == "cuda"
    for row in ROWS:
        found = {"name": row.name, "deviation": None}
        if row.largest and not cuda and row.name == "the largest batch":
            yield {**found, "left_out": "it needs a GPU, whose memory ends"}
            continue
        if started:
            started("PyTorch, " + row.name.removeprefix("PyTorch, ") + wait_of(row.mode))
        row = row._replace(
            precision="bf16" if row.precision == "fp16" and not cuda else row.precision
        )
        peak = peak_flops(backend, row.precision) if backend is not None else None
        try:
            with attention(row.fused):
                batch = largest_batch(options, row) if row.largest and cuda else options.batch
                for attempt in range(ATTEMPTS):
                    try:
                        found |= measure(options, row, batch, steps, warmup, flops, peak)
                        break
                    except torch.OutOfMemoryError:
                        if attempt == ATTEMPTS - 1:
                            raise
                    batch = int(SMALLER * batch)
        except Exception as fault:  # the failure of one mode must not hide the others
            found["fault"] = " ".join(f"{type(fault).__name__}: {fault}".split())[:120]
        if "ms" in found:
            first = first or found
            found["speedup"] = found["images_per_second"] / first["images_per_second"]
        yield found
