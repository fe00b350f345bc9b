"""Write `tests/reference/muon.npz`: four steps of PyTorch's own Muon, computed in float64.

    python -m tests.reference.make_muon       (needs PyTorch from 2.9 on, and NumPy; a second)

torch.optim.Muon orthogonalises in bfloat16, whose digits would hide a mistake: here its
    `bfloat16()` is a double. weight_<i>, gradient_<i> (4, …), after_<i>: start, gradients, and
    where they end; one wide, one tall, one square
    rate, decay, momentum: its settings, with adjust_lr_fn="match_rms_adamw"
"""

import pathlib

import numpy as np
import torch

RATE, DECAY, MOMENTUM = 0.02, 0.1, 0.95

if __name__ == "__main__":
    torch.Tensor.bfloat16 = torch.Tensor.double
    rng = np.random.default_rng(17)
    found = {"rate": RATE, "decay": DECAY, "momentum": MOMENTUM}
    for i, shape in enumerate(((8, 20), (20, 8), (12, 12))):
        start, gradients = rng.standard_normal(shape), rng.standard_normal((4, *shape))
        weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = torch.optim.Muon(
            [weight],
            lr=RATE,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
        for gradient in gradients:
            weight.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
        found |= {
            f"weight_{i}": start,
            f"gradient_{i}": gradients,
            f"after_{i}": weight.detach().numpy(),
        }
    np.savez_compressed(pathlib.Path(__file__).with_name("muon.npz"), **found)
