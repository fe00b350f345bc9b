"""Write objectives.npz: losses of today's objectives and ten training steps under some, from
PyTorch in float64.

    python -m tests.reference.make_objectives       (needs PyTorch and NumPy; seconds)

Each is written as its paper writes it, in its own direction of time and through the denoised image,
and autograd finds the gradient; no objective is taken from numdiff, whose one formula for all of
them this has to confirm.
"""

import numpy as np
import torch

from tests.reference import stored_objectives as stored
from tests.reference import twin
from tests.reference.make_dit import Process
from tests.reference.making import save, shapes_of, spread, train


def sit(x_0, eps, t, answer, scale=1.0):
    """Ma et al. 2024 (arXiv:2401.08740), eq. 1 and 4, with time from the image to noise, as there."""
    alpha, sigma = 1 - t, t
    velocity = -1 * x_0 + 1 * eps  # α̇ · x_* + σ̇ · ε
    return alpha * x_0 + sigma * eps, t * scale, lambda x: (answer(x) - velocity) ** 2


def jit(x_0, eps, t, answer):
    """Li and He 2025 (arXiv:2511.13720), algorithm 1: time runs from noise to the image there."""
    time = 1 - t
    z = time * x_0 + (1 - time) * eps
    short = (1 - time).clamp(min=0.05)
    return z, 1 - time, lambda x: ((x_0 - z) / short - (answer(x) - z) / short) ** 2


def edm(x_0, eps, sigma, answer, data=0.5):
    """Karras et al. 2022 (arXiv:2206.00364), table 1 and eq. 7 and 8."""
    noisy = x_0 + sigma * eps
    c_skip = data**2 / (sigma**2 + data**2)
    c_out = sigma * data / (sigma**2 + data**2).sqrt()
    c_in, c_noise = 1 / (sigma**2 + data**2).sqrt(), sigma.log() / 4
    weight = (sigma**2 + data**2) / (sigma * data) ** 2
    return c_in * noisy, c_noise, lambda x: weight * (c_skip * noisy + c_out * answer(x) - x_0) ** 2


def min_snr(kind):
    def objective(x_0, eps, t, answer):
        """Hang et al. 2023 (arXiv:2303.09556), section 3.4: the weights of each prediction."""
        bar = Process(1000).alpha_bar[t.long()]
        snr = bar / (1 - bar)
        clamped = snr.clamp(max=stored.GAMMA)
        weight = {"eps": clamped / snr, "v": clamped / (snr + 1), "x_0": clamped}[kind]
        target = {"eps": eps, "v": bar.sqrt() * eps - (1 - bar).sqrt() * x_0, "x_0": x_0}[kind]
        return (
            bar.sqrt() * x_0 + (1 - bar).sqrt() * eps,
            t,
            lambda x: weight * (answer(x) - target) ** 2,
        )

    return objective


OBJECTIVES = {
    "sit": sit,
    "sit_1000": lambda *given: sit(*given, scale=1000.0),
    "jit": jit,
    "edm": edm,
    "edm_wide": lambda *given: edm(*given, data=1.5),
    "min_snr_eps": min_snr("eps"),
    "min_snr_v": min_snr("v"),
    "min_snr_x_0": min_snr("x_0"),
}


def make_loss(name):
    answer = (
        torch.from_numpy(stored.normal(f"objectives/{name}/answer", stored.SHAPE))
        .double()
        .requires_grad_()
    )
    x_0, eps = (
        torch.from_numpy(stored.normal(f"objectives/{name}/{what}", stored.SHAPE)).double()
        for what in ("image", "noise")
    )
    level = torch.from_numpy(stored.levels(name, len(x_0)))[:, None, None, None]
    x_t, level_input, errors = OBJECTIVES[name](x_0, eps, level, lambda x: answer)
    loss = errors(x_t).mean()
    loss.backward()
    return {
        f"{name}_x_t": x_t.numpy(),
        f"{name}_told": level_input.reshape(-1).numpy(),
        f"{name}_loss": loss.item(),
        f"{name}_gradient": answer.grad.numpy(),
    }


def make_trajectory(name):
    c = stored.TRAJECTORY
    model, count = twin.dit(c["options"], c["weight_seed"]), c["steps"] * c["batch"]
    *images, classes = stored.images(name, count)
    x_0, eps = (torch.from_numpy(part).double().permute(0, 3, 1, 2) for part in images)
    y, level = torch.from_numpy(classes), torch.from_numpy(stored.levels(name, count))

    def loss_of(step):
        part = slice(step * c["batch"], (step + 1) * c["batch"])
        x_t, level_input, errors = OBJECTIVES[name](
            x_0[part],
            eps[part],
            spread(level[part]),
            lambda x: model(x, level_input.reshape(-1), y[part]),
        )
        return errors(x_t).mean()

    values = train(model, c, loss_of)
    return {
        f"{name}_losses": values["loss"],
        f"{name}_norms": values["gradient_norm"],
        f"{name}_parameters": values["parameter_norms"],
    }


if __name__ == "__main__":
    arrays = {}
    for each in stored.OBJECTIVES:
        arrays |= make_loss(each)
    for each in stored.TRAJECTORIES:
        arrays |= make_trajectory(each)
        print(each, *(f"{loss:.4f}" for loss in arrays[f"{each}_losses"]))
    model = twin.dit(stored.TRAJECTORY["options"], seed=1)
    save(
        "objectives",
        info={"shapes": shapes_of(model), **stored.TRAJECTORY},
        **{
            key: np.asarray(value)
            if key.endswith(("loss", "losses", "norms", "parameters", "_told"))
            else value.astype(np.float32)
            for key, value in arrays.items()
        },
    )
