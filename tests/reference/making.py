"""What the scripts that write the stored values share: they compute in float64, with PyTorch.

Images are stored channels-last, as numdiff has them; weights and their gradients in PyTorch's layout.
"""

import json

import numpy as np
import torch

from tests.reference import stored

torch.set_default_dtype(torch.float64)


def numpy32(tensor):
    return tensor.detach().numpy().astype(np.float32)


def last(tensor, axis=1):
    """The channels of this axis last: (B, C, ...) → (B, ..., C) float32."""
    return np.ascontiguousarray(np.moveaxis(numpy32(tensor), axis, -1))


def int32(tensor):
    return tensor.numpy().astype(np.int32)


def noise(name, shape, seed=0):
    """float32 numbers with variance one, as a float64 tensor."""
    values = stored.uniform(name, int(np.prod(shape)), seed) * np.float32(12**0.5)
    return torch.from_numpy(values.reshape(shape).astype(np.float64))


def spread(values):
    """(B,) → (B, 1, 1, 1)"""
    return values[:, None, None, None]


def save(name, info=None, **arrays):
    if info is not None:
        arrays["info"] = np.array(json.dumps(info))
    np.savez_compressed(stored.FOLDER / f"{name}.npz", **arrays)


def sides(options):
    """(height, width) of a model's images."""
    size = options["image_size"]
    return size if isinstance(size, (list, tuple)) else (size, size)


def shapes_of(model):
    return {name: list(p.shape) for name, p in model.named_parameters()}


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_pass(file, noise_name, options, model, x, output, **arrays):
    """Store the output for x, and the gradients of sum(output · noise): of x, and norms and drawn
    elements of those of parameters."""
    g = noise(f"{noise_name}/g", output.shape)
    (output * g).sum().backward()
    samples = [
        p.grad.reshape(-1).numpy()[stored.positions(name, p.numel())]
        for name, p in trained(model).items()
    ]
    save(
        file,
        info={"options": options, "shapes": shapes_of(model)},
        x=last(x),
        g=last(g),
        output=last(output),
        dx=last(x.grad),
        samples=np.concatenate(samples).astype(np.float32),
        norms=np.array([p.grad.norm().item() for p in trained(model).values()], np.float32),
        **arrays,
    )


def save_passes(prefix, noise_prefix, model, options, **arrays):
    """Store one forward and backward pass of a diffusion model at three timesteps."""
    x = noise(f"{noise_prefix}/x", (3, options.get("in_channels", 3), *sides(options)))
    t, classes = torch.tensor([0, 37, 999]), options.get("num_classes")
    y = None
    if classes is not None:  # the null class among them
        y = torch.tensor([2, classes if options.get("class_dropout") else 0, 2])
        arrays["y"] = int32(y)
    output = model(x.requires_grad_(), t, y)
    save_pass(prefix, noise_prefix, options, model, x, output, t=int32(t), **arrays)


def train(model, c, loss_of):
    """The stored values of a training with AdamW, clipping and averaged weights.

    c: its settings, such as `stored.TRAJECTORY`; loss_of: a function of the step
    """
    weights = trained(model)
    ema = {name: p.detach().clone() for name, p in weights.items()}
    start = {name: p.double().clone() for name, p in ema.items()}
    betas = c["beta1"], c["beta2"]
    optimizer = torch.optim.AdamW(
        weights.values(), c["learning_rate"], betas, c["eps"], c["weight_decay"]
    )
    losses, gradient_norms = [], []
    for step in range(c["steps"]):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), c["clip_norm"])
        gradient_norms.append(norm.item())
        optimizer.step()
        decay = min(c["ema_decay"], (1 + step) / (10 + step))
        for name, p in weights.items():
            ema[name] += (1 - decay) * (p.detach() - ema[name])
        losses.append(loss.item())

    def norms(tensors):
        return np.array([each.norm().item() for each in tensors])

    return {
        "loss": np.array(losses),
        "gradient_norm": np.array(gradient_norms),
        "parameter_norms": norms(weights.values()),
        "ema_norms": norms(ema.values()),
        # how far the parameters came: a wrong learning rate shows here, and hides in a norm
        "moved_norms": norms(p.double() - start[name] for name, p in weights.items()),
    }


def print_rounding(single, exact):
    """How far a training in float32 is from the one that is stored."""
    for key in ("loss", "gradient_norm", "parameter_norms", "ema_norms", "moved_norms"):
        off = np.max(np.abs(single[key] / exact[key] - 1))
        print(f"{key}: float32 differs from float64 by at most {off:.1e}")
