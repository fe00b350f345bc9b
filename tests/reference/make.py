"""Write the stored values of the UNet and of single operations, from PyTorch.

python -m tests.reference.make       (needs PyTorch and NumPy; about a minute)

model_<name>.npz   one forward and backward pass of each model in `stored.MODELS`
trajectory.npz     ten training steps
operations.npz     single operations, forward and backward
shapes.json        parameter names and shapes of full-size models
weights_*.pt       small state dicts as `torch.save` writes them, and weights_expected.npz what is in them
"""

import collections
import json

import numpy as np
import torch
from torch.nn import functional as F

from numdiff.benchmark.torch_unet import TorchUNet, timestep_embedding
from tests.reference import stored, twin
from tests.reference.making import (
    int32,
    last,
    noise,
    numpy32,
    print_rounding,
    save,
    save_passes,
    shapes_of,
    spread,
    train,
)


def make_trajectory(dtype=torch.float64):
    c = stored.TRAJECTORY
    model = twin.unet(c["options"], c["weight_seed"], dtype)
    beta = torch.linspace(0.1 / c["T"], 20 / c["T"], c["T"], dtype=torch.float64)
    alpha_bar = torch.cumprod(1 - beta, 0)
    shape = (c["steps"], c["batch"], 3, c["options"]["image_size"], c["options"]["image_size"])
    x_0, eps = noise("trajectory/x_0", shape) / 2, noise("trajectory/eps", shape)
    t = (stored.uniform("trajectory/t", c["steps"] * c["batch"], 0) + 0.5) * c["T"]
    t = torch.from_numpy(t.astype(np.int64)).view(shape[:2])

    def loss_of(step):
        ab = spread(alpha_bar[t[step]])
        x_t = ab.sqrt() * x_0[step] + (1 - ab).sqrt() * eps[step]
        return F.mse_loss(model(x_t.to(dtype), t[step]), eps[step].to(dtype))

    values = train(model, c, loss_of)
    info = {"shapes": shapes_of(model), **c}
    return {"x_0": last(x_0, 2), "eps": last(eps, 2), "t": int32(t), "info": info, **values}


def make_operations():
    arrays = {}

    def operation(name, function, inputs, channels_last=(), **extra):
        """Store inputs, output and all gradients of sum(output · noise); `channels_last` are the
        image-like keys."""
        inputs = {
            k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()
        }
        y = function(**inputs)
        g = noise(name + "/g", y.shape)
        leaves = {k: v for k, v in inputs.items() if v.is_floating_point()}
        gradients = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), g), strict=True))
        out = {**inputs, "y": y, "dy": g, **{"d" + k: v for k, v in gradients.items()}, **extra}
        for key, value in out.items():
            image = key in channels_last or (key.startswith("d") and key[1:] in channels_last)
            value = last(value) if image else value.detach().numpy()
            arrays[f"{name}/{key}"] = value.astype(
                np.int32 if value.dtype.kind == "i" else np.float32
            )

    images = ("x", "y")
    for kernel, stride, (h, w) in ((1, 1, (5, 6)), (3, 1, (5, 6)), (3, 2, (8, 6)), (3, 2, (7, 5))):
        name = f"conv2d_{kernel}x{kernel}_stride{stride}" + (
            "_odd" if h % 2 and stride == 2 else ""
        )
        operation(
            name,
            lambda x, weight, bias, s=stride, p=kernel // 2: F.conv2d(x, weight, bias, s, p),
            {
                "x": noise(name + "x", (2, 6, h, w)),
                "weight": noise(name + "w", (10, 6, kernel, kernel)),
                "bias": noise(name + "b", (10,)),
            },
            images,
        )
    for silu in (False, True):
        name = "group_norm" + ("_silu" if silu else "")
        after = F.silu if silu else torch.clone
        operation(
            name,
            lambda x, weight, bias, after=after: after(F.group_norm(x, 32, weight, bias, 1e-5)),
            {
                "x": noise(name + "x", (2, 64, 4, 5)) * 3 + 1,
                "weight": noise(name + "w", (64,)),
                "bias": noise(name + "b", (64,)),
            },
            images,
        )
    for order in ("legacy", "new"):
        name = f"attention_{order}"
        operation(
            name,
            lambda x, o=order: twin.attention(x, 3, o),
            {"x": noise(name, (2, 3 * 24, 10)) * 2},
            images,
        )
    operation(
        "layer_norm",
        lambda x, weight, bias: F.layer_norm(x, (48,), weight, bias, 1e-5),
        {
            "x": noise("lnx", (3, 7, 48)) + 2,
            "weight": noise("lnw", (48,)),
            "bias": noise("lnb", (48,)),
        },
    )
    operation(
        "gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), {"x": noise("gelu", (5, 33)) * 3}
    )
    operation("silu", lambda x: F.silu(x), {"x": noise("silu", (5, 33)) * 5})
    operation("softmax", lambda x: F.softmax(0.7 * x, -1), {"x": noise("softmax", (4, 3, 37)) * 6})
    operation(
        "linear",
        lambda x, weight, bias: F.linear(x, weight, bias),
        {"x": noise("lx", (2, 5, 12)), "weight": noise("lw", (7, 12)), "bias": noise("lb", (7,))},
    )
    operation("avg_pool", lambda x: F.avg_pool2d(x, 2), {"x": noise("pool", (2, 5, 6, 8))}, images)
    operation(
        "upsample",
        lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
        {"x": noise("up", (2, 5, 3, 4))},
        images,
    )
    operation(
        "scale_shift",
        lambda x, scale, shift: x * (1 + scale[:, :, None, None]) + shift[:, :, None, None],
        {
            "x": noise("ssx", (2, 8, 3, 5)),
            "scale": noise("sss", (2, 8)),
            "shift": noise("ssh", (2, 8)),
        },
        images,
    )
    operation(
        "embedding",
        lambda labels, weight: F.embedding(labels, weight),
        {"labels": torch.tensor([3, 0, 3, 1]), "weight": noise("embedding", (5, 12))},
    )
    operation(
        "mse",
        lambda x, target: F.mse_loss(x, target)[None],
        {"x": noise("mx", (3, 4, 4, 3)), "target": noise("mt", (3, 4, 4, 3))},
    )
    t = torch.tensor([0, 1, 10, 250, 999])
    for period in (1000, 10000):
        for dim in (32, 33):
            arrays[f"timestep_embedding_{period}_{dim}/y"] = numpy32(
                timestep_embedding(t, dim, period, torch.float64)
            )
    arrays["timestep_embedding/t"] = t.numpy().astype(np.int32)
    save("operations", **{key.replace("/", "__"): value for key, value in arrays.items()})


def make_weight_files():
    """Small state dicts with all that a reader must cope with, saved as `torch.save` saves them."""
    base = torch.arange(24, dtype=torch.float32) / 8
    content = collections.OrderedDict()
    content["float32"] = base.view(2, 3, 4)
    content["shared"] = base[6:12]  # another view of the same storage
    content["transposed"] = base.view(4, 6).t()
    content["strided"] = base.view(4, 6)[::2, 1::2]
    content["expanded"] = torch.tensor([1.5, -2.0]).expand(3, 2)  # stride zero
    content["channels_last"] = torch.randn(
        2, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float32
    ).contiguous(memory_format=torch.channels_last)
    content["scalar"] = torch.tensor(3.25, dtype=torch.float64)
    content["empty"] = torch.zeros(0, 3, dtype=torch.float32)
    content["float16"] = torch.tensor([0.5, -65504.0, 6e-8], dtype=torch.float16)
    content["bfloat16"] = torch.tensor([1.0, -3.0e38, 1e-38, 3.140625], dtype=torch.bfloat16)
    content["float64"] = torch.tensor([[1e300, -1e-300]], dtype=torch.float64)
    content["int64"] = torch.tensor([-(2**62), 5])
    content["int32"] = torch.tensor([7, -8], dtype=torch.int32)
    content["int16"] = torch.tensor([700, -8], dtype=torch.int16)
    content["int8"] = torch.tensor([7, -8], dtype=torch.int8)
    content["uint8"] = torch.tensor([7, 255], dtype=torch.uint8)
    content["bool"] = torch.tensor([True, False, True])
    content["parameter"] = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float32))
    folder = stored.FOLDER
    torch.save(content, folder / "weights_zip.pt")
    torch.save(content, folder / "weights_legacy.pt", _use_new_zipfile_serialization=False)
    # a state dict as a module writes it (an OrderedDict with an attribute), inside a container,
    # behind `module.`
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(3, 2)).float()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(stored.weight(name, tuple(parameter.shape), 3)))
    parallel = collections.OrderedDict(("module." + k, v) for k, v in module.state_dict().items())
    parallel._metadata = module.state_dict()._metadata
    ema = {k: v * 2 for k, v in parallel.items()}
    torch.save(
        {
            "step": 12,
            "model": parallel,
            "ema": ema,
            "config": {"lr": 1e-4, "name": "test", "betas": (0.9, 0.999)},
        },
        folder / "weights_container.pt",
    )
    expected = {
        k: v.detach().float().contiguous().numpy()
        if v.dtype == torch.bfloat16
        else v.detach().contiguous().numpy()
        for k, v in content.items()
    }
    expected.update({"container__" + k[len("module.") :]: v.numpy() for k, v in parallel.items()})
    np.savez_compressed(folder / "weights_expected.npz", **expected)


def make_shapes():
    shapes = {}
    for name, options in stored.SHAPES.items():
        with torch.device("meta"):
            shapes[name] = shapes_of(TorchUNet(**options))
    text = (
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in shapes.items()) + "\n}\n"
    )
    (stored.FOLDER / "shapes.json").write_text(text)


if __name__ == "__main__":
    for name, options in stored.MODELS.items():
        save_passes(f"model_{name}", name, twin.unet(options, seed=1), options)
    exact = make_trajectory()
    print_rounding(make_trajectory(torch.float32), exact)
    save("trajectory", **exact)
    make_operations()
    make_weight_files()
    make_shapes()
