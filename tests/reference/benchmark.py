"""Time the training step of the PyTorch twin, to hold numdiff's own against it. Needs PyTorch.

    python tests/reference/benchmark.py [--steps N] [--warmup N] [--batch N] [--threads N]
    [--channels-last]

One step is what `numdiff train unet --preset tiny --optimizer adamw` does in one: forward, MSE,
backward, clipping by global norm, AdamW and the average of the weights, in float32 on random
images. Compare with

    numdiff bench step unet --preset tiny --optimizer adamw --device cpu
"""

import argparse
import statistics
import time

import torch
import twin

try:
    from numdiff.training.options import PRESETS

    TINY = PRESETS["unet"]["tiny"]
except ImportError:  # PyTorch is often installed without numdiff; these are the same numbers
    TINY = {
        "image_size": 32,
        "model_channels": 32,
        "channel_mult": (1, 2, 4),
        "num_res_blocks": 1,
        "attention_resolutions": (8,),
        "num_head_channels": 32,
        "batch": 16,
        "learning_rate": 1e-3,
    }
MODEL = (
    "image_size",
    "model_channels",
    "channel_mult",
    "num_res_blocks",
    "attention_resolutions",
    "num_head_channels",
)
EMA_DECAY = 0.99  # the time does not depend on it


def training_step(model, optimizer, average, x_t, t, target):
    """One step; `average` is a list of tensors like the parameters."""
    loss = ((model(x_t, t) - target) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 1 - EMA_DECAY)


def main():
    parser = argparse.ArgumentParser(
        description="Time a training step of the PyTorch twin of the preset tiny."
    )
    parser.add_argument("--steps", type=int, default=20, help="steps to time (20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (5)")
    parser.add_argument(
        "--batch", type=int, default=TINY["batch"], help="images a step (the preset's)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (PyTorch's own choice)")
    parser.add_argument(
        "--channels-last", action="store_true", help="the memory format that numdiff has"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    torch.manual_seed(0)
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    model = twin.Twin(**{name: TINY[name] for name in MODEL}).to(memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TINY["learning_rate"], weight_decay=0.0)
    average = [p.detach().clone() for p in model.parameters()]
    size = TINY["image_size"]
    x_t = torch.randn(arguments.batch, 3, size, size).to(memory_format=layout)
    target = torch.randn_like(x_t)
    t = torch.randint(0, 1000, (arguments.batch,))

    times = []
    for _ in range(arguments.warmup + arguments.steps):
        start = time.perf_counter()
        training_step(model, optimizer, average, x_t, t, target)
        times.append(time.perf_counter() - start)
    times = times[arguments.warmup :]
    print(
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, batch {arguments.batch}: median "
        f"{statistics.median(times) * 1e3:.1f} ms of {len(times)} steps ({min(times) * 1e3:.1f} to "
        f"{max(times) * 1e3:.1f})"
    )
    print(
        "compare with: numdiff bench step unet --preset tiny --optimizer adamw --device cpu"
        + ("" if arguments.batch == TINY["batch"] else f" --batch {arguments.batch}")
    )


if __name__ == "__main__":
    main()
