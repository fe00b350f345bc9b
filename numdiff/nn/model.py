"""What a UNet and a DiT have in common: a backend, flat parameters, prediction from NumPy, values by name."""
import numpy as np

from ..device import get_backend, upload
from ..errors import UsageError
from .module import FlatParameters, Module
from .recompute import recompute
from .tensor import Tensor


class Model(Module):
    """A network that takes noisy images and timesteps. A subclass lays out its modules and then calls `_finish`.

    Attributes: kind ("unet" or "dit"), options (what to build it from again), image_size, in_channels, out_channels,
    learn_sigma, num_classes (None: without classes), null_class (the index that stands for no class, or None),
    backend, parameters, diffusion (options of the Diffusion it was trained with; empty: the defaults).
    """

    kind = ""
    null_class = None
    block_kinds = ()  # classes of the modules that `recompute_blocks` is about

    def _finish(self, device, seed, fixed=0):
        self.backend = get_backend(device) if isinstance(device, str) else device
        self.parameters = FlatParameters(self, self.backend, seed, fixed)
        self.diffusion = {}
        self.dtype = np.float32  # of the activations

    def compute_in_half(self):
        """From now on compute in float16, with a copy of the weights; statistics, embeddings and sums stay float32."""
        if self.backend is None:
            raise UsageError("--precision fp16 computes on a GPU; on the CPU use --precision fp32.")
        self.dtype = np.float16
        self.parameters.keep_half()

    def recompute_blocks(self):
        """From now on keep only the inputs of the blocks for the backward pass, which computes their insides again."""
        stack = [self]
        while stack:
            module = stack.pop()
            if isinstance(module, self.block_kinds):
                recompute(module)
            else:
                stack += [child for _, child in module.children() if isinstance(child, Module)]

    def place(self):
        """What a recorded evaluation depends on besides its inputs: where the weights lie, and the arithmetic."""
        return self.parameters.place(), np.dtype(self.dtype).name, self.backend.tf32

    def predict(self, x_t, t, y=None):
        """The model's output for NumPy inputs, as NumPy, whatever the device.

        x_t: float32 (B, H, W, C); t: integers (B,), or one for all
        y: class indices (B,), or one for all, if the model has classes
        """
        x_t = np.ascontiguousarray(x_t, np.float32)
        expected = (self.image_size, self.image_size, self.in_channels)
        if x_t.ndim != 4 or x_t.shape[1:] != expected:
            raise UsageError(f"x_t has shape {x_t.shape}; this model takes (B, {', '.join(map(str, expected))}).")

        def per_image(values, name):
            values = np.asarray(values, np.int32)
            if values.shape not in ((), (1,), (len(x_t),)):
                raise UsageError(f"{name} has shape {values.shape}; give one value, or one for each of the {len(x_t)} "
                                 "images.")
            return upload(np.broadcast_to(values, (len(x_t),)), self.backend)

        if y is not None and self.num_classes is not None:
            self.check_classes(y)
        y = None if y is None else per_image(y, "y")
        return self(Tensor(upload(x_t, self.backend)), per_image(t, "t"), y).numpy()

    def check_classes(self, y):
        """Raise a `UsageError` for class indices that the model does not have; its null class is one that it has."""
        last = self.num_classes - 1 if self.null_class is None else self.null_class
        if not np.isin(y, np.arange(last + 1)).all():
            null = "" if self.null_class is None else f", and {self.null_class} for none of them"
            raise UsageError(f"y holds a class that does not exist: the model has classes 0 to {self.num_classes - 1}"
                             f"{null}.")

    def require_classes(self, y):
        """Raise a `UsageError` where classes are given and the model has none, or the reverse."""
        if (y is None) != (self.num_classes is None):
            raise UsageError("this model has classes: give y, one class index for each image" if y is None
                             else "this model has no classes: leave y out, or build it with num_classes")

    def arrays(self):
        """{name: NumPy array} of the weights, in numdiff's layout."""
        return self.parameters.arrays()

    def gradients(self):
        """{name: NumPy array} of the gradients, in numdiff's layout."""
        return self.parameters.arrays(self.parameters.grad)

    def load_arrays(self, arrays):
        """Overwrite all weights from {name: array}; a `NumdiffError` names what does not fit."""
        self.parameters.load_flat(self.parameters.flatten(arrays))


def constructor_options(values):
    """The options among a constructor's `locals()`, as JSON can say them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()
            if k not in ("self", "device", "seed", "__class__")}
