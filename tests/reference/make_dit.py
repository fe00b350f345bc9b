"""Write the stored values of the DiT, in float64, from its PyTorch twin. See make.py for the
conventions.

    python tests/reference/make_dit.py       (needs PyTorch and NumPy; seconds)

    dit_<name>.npz      one forward and backward pass of each model in `stored_dit.MODELS`
    dit_loss.npz        the hybrid loss and its gradient, for each kind of prediction
    dit_trajectory.npz, dit_lightning_trajectory.npz    ten training steps with the hybrid loss
    dit_state.pt, dit_checkpoint.pt     a bare state dict, and a training checkpoint with {model, ema, opt, args}
"""

import argparse

import numpy as np
import stored
import stored_dit
import torch
import twin_dit
from make import last, noise, save, sides

torch.set_default_dtype(torch.float64)


def make_model(name, options):
    model = twin_dit.draw(twin_dit.TwinDiT(**options).double(), seed=1)
    x = noise(f"dit/{name}/x", (3, options["in_channels"], *sides(options))).requires_grad_()
    t = torch.tensor([0, 37, 999])
    classes = options["num_classes"]
    y = (
        None
        if classes is None
        else torch.tensor([2, classes if options["class_dropout"] else 0, 2])
    )
    output = model(x, t, y)
    g = noise(f"dit/{name}/g", output.shape)
    (output * g).sum().backward()
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    samples = [
        p.grad.reshape(-1).numpy()[stored.positions(k, p.numel())] for k, p in trained.items()
    ]
    arrays = {} if y is None else {"y": y.numpy().astype(np.int32)}
    save(
        f"dit_{name}",
        info={
            "options": options,
            "shapes": {k: list(p.shape) for k, p in model.named_parameters()},
        },
        x=last(x),
        t=t.numpy().astype(np.int32),
        g=last(g),
        output=last(output),
        dx=last(x.grad),
        samples=np.concatenate(samples).astype(np.float32),
        norms=np.array([p.grad.norm().item() for p in trained.values()], np.float32),
        pos_embed=model.pos_embed[0].numpy().astype(np.float32),
        **arrays,
    )


def make_loss():
    arrays, T = {}, 1000
    process = twin_dit.Process(T)
    t = torch.tensor([0, 1, 2, 40, 500, 999, 0, 0])
    shape = (len(t), 3, 4, 4)
    # many pixels at the very edges
    x_0, eps = noise("dit/loss/x_0", shape).clamp(-1, 1), noise("dit/loss/eps", shape)
    ab = twin_dit.spread(process.alpha_bar[t])
    x_t = ab.sqrt() * x_0 + (1 - ab).sqrt() * eps
    for kind in ("eps", "v", "x_0"):
        target = {"eps": eps, "x_0": x_0, "v": ab.sqrt() * eps - (1 - ab).sqrt() * x_0}[kind]
        # as far as a model that knows something is
        far = {"eps": 1.0, "v": 0.02, "x_0": 0.02}[kind]
        output = torch.cat(
            [target + far * noise("dit/loss/p", shape), noise("dit/loss/v", shape)], 1
        ).requires_grad_()
        loss = twin_dit.hybrid_loss(process, output, x_0, x_t, eps, t, kind)
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
        t=t.numpy().astype(np.int32),
        info={"T": T},
        **arrays,
    )


def make_trajectory(c, dtype=torch.float64):
    options = c["options"]
    model = twin_dit.draw(twin_dit.TwinDiT(**options).to(dtype), c["weight_seed"])
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    ema = {k: p.detach().clone() for k, p in trained.items()}
    start = {k: p.double().clone() for k, p in ema.items()}
    optimizer = torch.optim.AdamW(
        trained.values(), c["learning_rate"], (c["beta1"], c["beta2"]), c["eps"], c["weight_decay"]
    )
    process = twin_dit.Process(c["T"])
    size, channels = options["image_size"], options["in_channels"]
    shape = (c["steps"], c["batch"], channels, size, size)
    x_0, eps = (
        (noise("dit/trajectory/x_0", shape) / 2).clamp(-1, 1),
        noise("dit/trajectory/eps", shape),
    )
    t = torch.from_numpy(
        stored_dit.timesteps(c["steps"] * c["batch"], c["T"]).astype(np.int64)
    ).view(shape[:2])
    y = torch.arange(c["steps"] * c["batch"]).view(shape[:2]) % (options["num_classes"] + 1)
    losses, gradient_norms = [], []
    for step in range(c["steps"]):
        ab = twin_dit.spread(process.alpha_bar[t[step]])
        x_t = ab.sqrt() * x_0[step] + (1 - ab).sqrt() * eps[step]
        output = model(x_t.to(dtype), t[step], y[step])
        loss = twin_dit.hybrid_loss(process, output.double(), x_0[step], x_t, eps[step], t[step])
        optimizer.zero_grad()
        loss.backward()
        gradient_norms.append(
            torch.nn.utils.clip_grad_norm_(trained.values(), c["clip_norm"]).item()
        )
        optimizer.step()
        decay = min(c["ema_decay"], (1 + step) / (10 + step))
        for k, p in trained.items():
            ema[k] += (1 - decay) * (p.detach() - ema[k])
        losses.append(loss.item())

    def images(tensor):
        return last(tensor.flatten(0, 1)).reshape(*shape[:2], size, size, channels)

    return {
        "x_0": images(x_0),
        "eps": images(eps),
        "t": t.numpy().astype(np.int32),
        "y": y.numpy().astype(np.int32),
        "loss": np.array(losses),
        "gradient_norm": np.array(gradient_norms),
        "parameter_norms": np.array([p.norm().item() for p in trained.values()]),
        "ema_norms": np.array([p.norm().item() for p in ema.values()]),
        "moved_norms": np.array(
            [(p.double() - start[k]).norm().item() for k, p in trained.items()]
        ),
        "info": {"shapes": {k: list(p.shape) for k, p in model.named_parameters()}, **c},
    }


def make_checkpoints():
    """As the public DiT's training script writes them, and as its published weights are."""
    options = {**stored_dit.MODELS["latents"], "hidden_size": 12, "depth": 1}
    model = twin_dit.draw(twin_dit.TwinDiT(**options).float(), seed=3)
    torch.save(model.state_dict(), stored.FOLDER / "dit_state.pt")
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0
    )
    model(
        torch.zeros(1, 4, 8, 8, dtype=torch.float32), torch.tensor([3]), torch.tensor([0])
    ).square().mean().backward()
    optimizer.step()
    average = twin_dit.draw(twin_dit.TwinDiT(**options).float(), seed=4)
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
            "model": twin_dit.draw(model, seed=3).state_dict(),
            "ema": average.state_dict(),
            "opt": optimizer.state_dict(),
            "args": arguments,
        },
        stored.FOLDER / "dit_checkpoint.pt",
    )


if __name__ == "__main__":
    for model_name, model_options in stored_dit.MODELS.items():
        make_model(model_name, model_options)
    make_loss()
    for file, settings in stored_dit.TRAJECTORIES.items():
        exact, single = make_trajectory(settings), make_trajectory(settings, torch.float32)
        for key in ("loss", "gradient_norm", "parameter_norms", "ema_norms", "moved_norms"):
            print(
                f"{key}: float32 differs from float64 by at most {np.max(np.abs(single[key] / exact[key] - 1)):.1e}"
            )
        save(f"dit_{file}", **exact)
    make_checkpoints()
    print(f"{sum(f.stat().st_size for f in stored.FOLDER.glob('dit_*')):,} bytes stored")
