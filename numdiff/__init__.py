"""numdiff trains diffusion models with GPU kernels that are all written in Python.

    import numdiff
    model = numdiff.load("runs/00000-unet-tiny", device="auto")   # the newest checkpoint's EMA weights
    images = numdiff.sample(model, count=16, steps=50)            # uint8 (16, H, W, 3)
    eps = model.predict(x_t, t)                                   # NumPy in, NumPy out, whatever the device

`numdiff.nn` has tensors, the tape, layers, the UNet and the DiT, to write one's own model;
`numdiff.training.Trainer` trains it; `numdiff.evaluation` compares samples with images.
"""

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "data",
    "device",
    "diffusion",
    "emulator",
    "evaluation",
    "kernels",
    "load",
    "nn",
    "sample",
    "training",
]


def __getattr__(name):
    """Import on first use: `import numdiff` alone is quick and needs no GPU."""
    import importlib

    if name in (
        "data",
        "device",
        "diffusion",
        "emulator",
        "evaluation",
        "kernels",
        "nn",
        "training",
    ):
        return importlib.import_module(f".{name}", __name__)
    if name == "load":
        from .training.model_files import load

        return load
    if name == "sample":
        from .diffusion import sample

        return sample
    raise AttributeError(f"module 'numdiff' has no attribute {name!r}")
