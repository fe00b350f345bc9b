"""Write the stored values of the DiT from PyTorch.

    python -m tests.reference.make_dit       (needs PyTorch and NumPy; seconds)

    dit_<name>.npz      one forward and backward pass of each model in `stored_dit.MODELS`
    dit_loss.npz        the hybrid loss and its gradient, for each kind of prediction
    dit_trajectory.npz, dit_lightning_trajectory.npz    ten training steps with the hybrid loss
    dit_state.pt, dit_checkpoint.pt     a bare state dict, and a training checkpoint with {model, ema, opt, args}

The loss is written as the papers write it (Ho et al. 2020, arXiv:2006.11239, sections 2 and 3; Nichol
and Dhariwal 2021, arXiv:2102.09672, section 3), through the posterior's mean and variance, and
autograd finds the gradient.
"""

import argparse
import math

import numpy as np
import torch

from tests.reference import stored, stored_dit, twin
from tests.reference.making import (
    int32,
    last,
    noise,
    print_rounding,
    save,
    save_passes,
    shapes_of,
    spread,
    train,
)


class Process:
    """A linear schedule of T steps and everything derived from it, in float64."""

    def __init__(self, T):
        self.T = T
        self.beta = torch.linspace(0.1 / T, 20 / T, T, dtype=torch.float64)
        self.alpha_bar = torch.cumprod(1 - self.beta, 0)
        self.previous = torch.cat([torch.ones(1, dtype=torch.float64), self.alpha_bar[:-1]])
        self.posterior = self.beta * (1 - self.previous) / (1 - self.alpha_bar)

    def mean_of_posterior(self, x_0, x_t, t):
        """Ho et al., eq. 7."""
        a = self.previous[t].sqrt() * self.beta[t] / (1 - self.alpha_bar[t])
        b = (1 - self.beta[t]).sqrt() * (1 - self.previous[t]) / (1 - self.alpha_bar[t])
        return spread(a) * x_0 + spread(b) * x_t

    def x_0_of(self, prediction, x_t, t, kind):
        ab = spread(self.alpha_bar[t])
        if kind == "eps":
            return (x_t - (1 - ab).sqrt() * prediction) / ab.sqrt()
        return ab.sqrt() * x_t - (1 - ab).sqrt() * prediction if kind == "v" else prediction


def approximate_cdf(z):
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def hybrid_loss(process, output, x_0, x_t, eps, t, kind="eps"):
    """Squared error + T/1000 · the bound's term of t in bits a number, whose means get no gradient."""
    channels = x_0.shape[1]
    prediction, v = output[:, :channels], output[:, channels:]
    ab = spread(process.alpha_bar[t])
    target = {"eps": eps, "x_0": x_0, "v": ab.sqrt() * eps - (1 - ab).sqrt() * x_0}[kind]
    simple = ((prediction - target) ** 2).flatten(1).mean(1)

    smallest = spread(process.posterior.clamp(min=process.posterior[1])[t].log())
    largest = spread(process.beta[t].log())
    share = (v + 1) / 2
    log_variance = share * largest + (1 - share) * smallest
    mean = process.mean_of_posterior(process.x_0_of(prediction.detach(), x_t, t, kind), x_t, t)
    true_mean = process.mean_of_posterior(x_0, x_t, t)
    divergence = 0.5 * (
        log_variance
        - smallest
        - 1
        + (smallest - log_variance).exp()
        + (true_mean - mean) ** 2 * (-log_variance).exp()
    )

    deviation = (0.5 * log_variance).exp()
    above, below = (
        approximate_cdf((x_0 + shift - mean) / deviation) for shift in (1 / 255, -1 / 255)
    )
    probability = torch.where(
        x_0 < -0.999, above, torch.where(x_0 > 0.999, 1 - below, above - below)
    )
    reconstruction = -probability.clamp(min=1e-12).log()

    bound = torch.where(spread(t) == 0, reconstruction, divergence).flatten(1).mean(1) / math.log(2)
    return (simple + process.T / 1000 * bound).mean()


def make_loss():
    arrays, T = {}, 1000
    process = Process(T)
    t = torch.tensor([0, 1, 2, 40, 500, 999, 0, 0])
    shape = (len(t), 3, 4, 4)
    # many pixels at the very edges
    x_0, eps = noise("dit/loss/x_0", shape).clamp(-1, 1), noise("dit/loss/eps", shape)
    ab = spread(process.alpha_bar[t])
    x_t = ab.sqrt() * x_0 + (1 - ab).sqrt() * eps
    for kind in ("eps", "v", "x_0"):
        target = {"eps": eps, "x_0": x_0, "v": ab.sqrt() * eps - (1 - ab).sqrt() * x_0}[kind]
        # as far as a model that knows something is
        far = {"eps": 1.0, "v": 0.02, "x_0": 0.02}[kind]
        output = torch.cat(
            [target + far * noise("dit/loss/p", shape), noise("dit/loss/v", shape)], 1
        ).requires_grad_()
        loss = hybrid_loss(process, output, x_0, x_t, eps, t, kind)
        loss.backward()
        arrays |= {
            f"{kind}_output": last(output),
            f"{kind}_loss": np.array([loss.item()]),
            f"{kind}_gradient": last(output.grad),
        }
    save(
        "dit_loss",
        x_0=last(x_0),
        eps=last(eps),
        t=int32(t),
        info={"T": T},
        **arrays,
    )


def make_trajectory(c, dtype=torch.float64):
    options = c["options"]
    model, process = twin.dit(options, c["weight_seed"], dtype), Process(c["T"])
    size, channels, count = options["image_size"], options["in_channels"], c["steps"] * c["batch"]
    shape = (c["steps"], c["batch"], channels, size, size)
    x_0 = (noise("dit/trajectory/x_0", shape) / 2).clamp(-1, 1)
    eps = noise("dit/trajectory/eps", shape)
    t = torch.from_numpy(stored_dit.timesteps(count, c["T"]).astype(np.int64)).view(shape[:2])
    y = torch.arange(count).view(shape[:2]) % (options["num_classes"] + 1)

    def loss_of(step):
        ab = spread(process.alpha_bar[t[step]])
        x_t = ab.sqrt() * x_0[step] + (1 - ab).sqrt() * eps[step]
        output = model(x_t.to(dtype), t[step], y[step])
        return hybrid_loss(process, output.double(), x_0[step], x_t, eps[step], t[step])

    values = train(model, c, loss_of)
    inputs = {"x_0": last(x_0, 2), "eps": last(eps, 2), "t": int32(t), "y": int32(y)}
    return {**inputs, "info": {"shapes": shapes_of(model), **c}, **values}


def make_checkpoints():
    """As the public DiT's training script writes them, and as its published weights are."""
    options = {**stored_dit.MODELS["latents"], "hidden_size": 12, "depth": 1}
    model = twin.dit(options, 3, torch.float32)
    torch.save(model.state_dict(), stored.FOLDER / "dit_state.pt")
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0
    )
    model(
        torch.zeros(1, 4, 8, 8, dtype=torch.float32), torch.tensor([3]), torch.tensor([0])
    ).square().mean().backward()
    optimizer.step()
    average = twin.dit(options, 4, torch.float32)
    arguments = argparse.Namespace(
        model="DiT-XL/2",
        image_size=64,
        num_classes=5,
        epochs=1400,
        data_path="images",
        lr=1e-4,
        vae="ema",
        results_dir=None,
        deterministic=True,
    )
    torch.save(
        {
            "model": twin.draw(model, seed=3).state_dict(),
            "ema": average.state_dict(),
            "opt": optimizer.state_dict(),
            "args": arguments,
        },
        stored.FOLDER / "dit_checkpoint.pt",
    )


if __name__ == "__main__":
    for name, options in stored_dit.MODELS.items():
        model = twin.dit(options, seed=1)
        table = model.pos_embed[0].numpy().astype(np.float32)
        save_passes(f"dit_{name}", f"dit/{name}", model, options, pos_embed=table)
    make_loss()
    for file, settings in stored_dit.TRAJECTORIES.items():
        exact = make_trajectory(settings)
        print_rounding(make_trajectory(settings, torch.float32), exact)
        save(f"dit_{file}", **exact)
    make_checkpoints()
