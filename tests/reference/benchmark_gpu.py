"""Time the PyTorch twin of unet.cu's model on a GPU: a training step, batch 32, 64×64, strict
float32. Needs PyTorch.

    python tests/reference/benchmark_gpu.py

Forward, MSE, backward and fused AdamW; medians of 20 steps after 8. Compare, in the same minutes on
the same card, with

    numdiff bench step unet --preset unet64 --device cuda
"""

import statistics
import time

import torch
import twin

MODES = {
    "eager": None,
    "torch.compile": "default",
    "torch.compile, reduce-overhead": "reduce-overhead",
}


def time_step(mode, warmup=8, steps=20):
    """Milliseconds of each step, and the peak memory in MiB."""
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = twin.Twin(**twin.SEED_OPTIONS).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    function = model if mode is None else torch.compile(model, mode=mode)
    x_t = torch.randn(32, 3, 64, 64, device="cuda")
    target, t = torch.randn_like(x_t), torch.randint(0, 1000, (32,), device="cuda")
    times = []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        ((function(x_t, t) - target) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[warmup:], torch.cuda.max_memory_allocated() >> 20


def main():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, strict float32")
    for name, mode in MODES.items():
        times, peak = time_step(mode)
        print(f"{name:32s} {statistics.median(times):7.2f} ms, peak {peak:,} MiB", flush=True)


if __name__ == "__main__":
    main()
