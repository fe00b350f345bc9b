"""InceptionV3 of 2015-12-05, the network of FID: from images to its 2,048 "pool3" features.

    299×299 → 149 → 147 → 147 → 73 → 73 → 71 → 35 (Mixed_5b, 5c, 5d) → 17 (Mixed_6a … 6e) → 8 (Mixed_7a, 7b, 7c) → mean

It differs from the network of Szegedy et al. 2016 (arXiv:1512.00567) in three ways, which pytorch-fid
describes: the average pooling of blocks A, C and E leaves out what is padding, Mixed_7c pools by the
maximum, and there are 1,008 classes, whose layer FID does not use.

A convolution is a product of patches (kernels/patches.py) with the weight. Its batch normalisation,
whose statistics are fixed, is folded into weight and bias: y = γ · (x - μ) / √(σ² + 1e-3) + β. So is
the scaling of the pixels, since the first convolution sees no padding. Bias and ReLU are one pass,
which writes the branches of a block side by side.
"""

from typing import NamedTuple

import numpy as np

from ...device import download, empty, upload
from ...kernels.linear.layer import linear_forward
from ...kernels.reduce.trees import sample_sum
from .folding import with_scaled_pixels
from .kernels.activations import bias_relu_forward
from .kernels.patches import patches_forward, sliding_window
from .kernels.pooling import pool_forward
from .parts import last_of

NAME = "inception-2015-12-05"
TITLE = "InceptionV3 of 2015-12-05"
FILE = "pytorch-fid's pt_inception-2015-12-05-6726825d.pth"
SIZE = 299  # pixels
FEATURES = 2048
EPS = 1e-3  # of the batch normalisation
CLASSES = 1008
# images at a time: on the CPU, where the patches of more would leave the caches; on a GPU, where those of
# more would take more than 4 GB
FEW, MANY = 4, 128
# (x - shift) / scale of pixels 0 … 255, by the method that resizes them
PIXELS = {"clean": (128, 128), "tensorflow": (128, 128), "pytorch-fid": (127.5, 127.5)}
METHODS = tuple(PIXELS)


class Convolution(NamedTuple):
    """A convolution with its batch normalisation and ReLU. padding: (rows, columns)"""

    name: str
    C_in: int
    C_out: int
    size: tuple = (1, 1)
    stride: int = 1
    padding: tuple = (0, 0)


class Pooling(NamedTuple):
    """Pooling over 3 × 3 pixels: without padding at stride 2, else padded by one."""

    mean: bool = False
    stride: int = 2


def branch(block, C_in, *layers):
    """[layer] of a branch of a block, from (name, channels, rows, columns, stride) or a `Pooling`;
    several layers in a list, all of the same input, stand at the end."""
    found = []
    for layer in layers:
        if isinstance(layer, Pooling):
            found.append(layer)
            continue
        several = layer if isinstance(layer, list) else [layer]
        made = [_convolution(block, C_in, *each) for each in several]
        found.append(made if isinstance(layer, list) else made[0])
        C_in = made[0].C_out
    return found


def _convolution(block, C_in, name, C_out, rows=1, columns=1, stride=1):
    padding = (rows // 2, columns // 2) if stride == 1 else (0, 0)
    return Convolution(f"{block}.{name}", C_in, C_out, (rows, columns), stride, padding)


MEAN, LARGEST = Pooling(mean=True, stride=1), Pooling(stride=1)


def block_a(name, C, pool_channels):
    return [
        branch(name, C, ("branch1x1", 64)),
        branch(name, C, ("branch5x5_1", 48), ("branch5x5_2", 64, 5, 5)),
        branch(
            name,
            C,
            ("branch3x3dbl_1", 64),
            ("branch3x3dbl_2", 96, 3, 3),
            ("branch3x3dbl_3", 96, 3, 3),
        ),
        branch(name, C, MEAN, ("branch_pool", pool_channels)),
    ]


def block_b(name, C):
    return [
        branch(name, C, ("branch3x3", 384, 3, 3, 2)),
        branch(
            name,
            C,
            ("branch3x3dbl_1", 64),
            ("branch3x3dbl_2", 96, 3, 3),
            ("branch3x3dbl_3", 96, 3, 3, 2),
        ),
        [Pooling()],
    ]


def block_c(name, C, inner):
    return [
        branch(name, C, ("branch1x1", 192)),
        branch(
            name,
            C,
            ("branch7x7_1", inner),
            ("branch7x7_2", inner, 1, 7),
            ("branch7x7_3", 192, 7, 1),
        ),
        branch(
            name,
            C,
            ("branch7x7dbl_1", inner),
            ("branch7x7dbl_2", inner, 7, 1),
            ("branch7x7dbl_3", inner, 1, 7),
            ("branch7x7dbl_4", inner, 7, 1),
            ("branch7x7dbl_5", 192, 1, 7),
        ),
        branch(name, C, MEAN, ("branch_pool", 192)),
    ]


def block_d(name, C):
    return [
        branch(name, C, ("branch3x3_1", 192), ("branch3x3_2", 320, 3, 3, 2)),
        branch(
            name,
            C,
            ("branch7x7x3_1", 192),
            ("branch7x7x3_2", 192, 1, 7),
            ("branch7x7x3_3", 192, 7, 1),
            ("branch7x7x3_4", 192, 3, 3, 2),
        ),
        [Pooling()],
    ]


def block_e(name, C, pooling):
    return [
        branch(name, C, ("branch1x1", 320)),
        branch(
            name,
            C,
            ("branch3x3_1", 384),
            [("branch3x3_2a", 384, 1, 3), ("branch3x3_2b", 384, 3, 1)],
        ),
        branch(
            name,
            C,
            ("branch3x3dbl_1", 448),
            ("branch3x3dbl_2", 384, 3, 3),
            [("branch3x3dbl_3a", 384, 1, 3), ("branch3x3dbl_3b", 384, 3, 1)],
        ),
        branch(name, C, pooling, ("branch_pool", 192)),
    ]


STEM = [
    Convolution("Conv2d_1a_3x3", 3, 32, (3, 3), 2),
    Convolution("Conv2d_2a_3x3", 32, 32, (3, 3)),
    Convolution("Conv2d_2b_3x3", 32, 64, (3, 3), 1, (1, 1)),
    Pooling(),
    Convolution("Conv2d_3b_1x1", 64, 80),
    Convolution("Conv2d_4a_3x3", 80, 192, (3, 3)),
    Pooling(),
]
BLOCKS = {
    "Mixed_5b": block_a("Mixed_5b", 192, 32),
    "Mixed_5c": block_a("Mixed_5c", 256, 64),
    "Mixed_5d": block_a("Mixed_5d", 288, 64),
    "Mixed_6a": block_b("Mixed_6a", 288),
    "Mixed_6b": block_c("Mixed_6b", 768, 128),
    "Mixed_6c": block_c("Mixed_6c", 768, 160),
    "Mixed_6d": block_c("Mixed_6d", 768, 160),
    "Mixed_6e": block_c("Mixed_6e", 768, 192),
    "Mixed_7a": block_d("Mixed_7a", 768),
    "Mixed_7b": block_e("Mixed_7b", 1280, MEAN),
    "Mixed_7c": block_e("Mixed_7c", 2048, LARGEST),
}


def convolutions():
    """All `Convolution`s, in the order in which they run; 94."""
    steps = [*STEM, *(step for block in BLOCKS.values() for each in block for step in each)]
    flat = (each for step in steps for each in (step if isinstance(step, list) else [step]))
    return [step for step in flat if isinstance(step, Convolution)]


# Weights ------------------------------------------------------------------------------------------


def public_shapes():
    """({name: shape} of the public file, the names that it may lack)."""
    shapes, optional = {"fc.weight": (CLASSES, FEATURES), "fc.bias": (CLASSES,)}, set()
    for c in convolutions():
        shapes[f"{c.name}.conv.weight"] = (c.C_out, c.C_in, *c.size)
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{c.name}.bn.{part}"] = (c.C_out,)
        shapes[f"{c.name}.bn.num_batches_tracked"] = ()
        optional.add(f"{c.name}.bn.num_batches_tracked")
    return shapes, optional


def recognises(names):
    """Whether these are names of an InceptionV3, of any version."""
    return "Conv2d_1a_3x3.conv.weight" in names


def other_version(state_dict):
    """The name of another InceptionV3 that these weights belong to; None for none that is known."""
    classes = state_dict["fc.weight"].shape[0] if "fc.weight" in state_dict else None
    if any(name.startswith("AuxLogits.") for name in state_dict) or classes == 1000:
        return "torchvision's InceptionV3 of 1,000 classes, whose features give no FID"
    if classes != CLASSES:
        return "an InceptionV3 " + (f"of {classes} classes" if classes else "without its classes")
    return None


def arrays_of(state_dict):
    """{name: float32 array}, in float64 folded: of each convolution the weight (C_out, rows,
    columns, C_in) and the bias (C_out,)."""
    arrays = {}
    for c in convolutions():
        weight, gamma, beta, mean, variance = (
            np.asarray(state_dict[f"{c.name}.{part}"], np.float64)
            for part in ("conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
        )
        factor = gamma / np.sqrt(variance + EPS)
        folded = (weight * factor[:, None, None, None]).transpose(0, 2, 3, 1)
        arrays[f"{c.name}.weight"] = np.ascontiguousarray(folded, np.float32)
        arrays[f"{c.name}.bias"] = (beta - mean * factor).astype(np.float32)
    return arrays


def shapes():
    """{name: shape} of what `arrays_of` returns."""
    found = {}
    for c in convolutions():
        found[f"{c.name}.weight"] = (c.C_out, *c.size, c.C_in)
        found[f"{c.name}.bias"] = (c.C_out,)
    return found


# The network --------------------------------------------------------------------------------------


class InceptionV3:
    """The network of the docstring. arrays: as `arrays_of` returns them; method: how the pixels are
    resized, which decides how they are scaled; backend: where it computes (None: NumPy)

    network(x) is float32 (B, 2048) of x (B, 299, 299, 3) float32, values 0 … 255.
    """

    def __init__(self, arrays, method="clean", backend=None):
        self.backend, self._weights = backend, {}
        shift, scale = PIXELS[method]
        for c in convolutions():
            weight, bias = arrays[f"{c.name}.weight"], arrays[f"{c.name}.bias"]
            if c.name == STEM[0].name:
                weight, bias = with_scaled_pixels(weight, bias, shift, scale)
            self._weights[c.name] = (
                upload(np.ascontiguousarray(weight.reshape(c.C_out, -1)), backend),
                upload(np.ascontiguousarray(bias), backend),
            )

    def __call__(self, x):
        return last_of(self.layers, x, FEW, MANY)

    def layers(self, x):
        """Yields (name, array (B, H, W, C)) of each layer of the stem and of each block, and last
        ("pool3", the means (B, 2048) over the 8 × 8 pixels, a NumPy array)."""
        for layer in STEM:
            x = self._apply(layer, x)
            yield getattr(layer, "name", "pooling"), x
        for name, branches in BLOCKS.items():
            x = self._block(branches, x)
            yield name, x
        yield "pool3", download(sample_sum(x)) / np.float32(x.shape[1] * x.shape[2])

    def _apply(self, layer, x, out=None, first=0):
        """A layer's output, or None where it was written to the channels from `first` on of `out`."""
        if isinstance(layer, Pooling):
            y = pool_forward(x, layer.mean, layer.stride, 1 if layer.stride == 1 else 0)
            if out is None:
                return y
            # values are not negative: with a bias of zero, ReLU copies them
            zero = upload(np.zeros(y.shape[3], np.float32), self.backend)
            bias_relu_forward(y, zero, out, first)
            return None
        weight, bias = self._weights[layer.name]
        if layer.size != (1, 1):
            x = patches_forward(x, layer.size, layer.stride, layer.padding)
        y = linear_forward(x, weight)
        wanted = empty(y.shape, np.float32, like=y) if out is None else out
        bias_relu_forward(y, bias, wanted, first)
        return None if out is not None else wanted

    def _block(self, branches, x):
        """The branches' outputs side by side."""
        out, first = None, 0
        widths = [_width(each[-1], x) for each in branches]
        for layers, width in zip(branches, widths, strict=True):
            y = x
            for layer in layers[:-1]:
                y = self._apply(layer, y)
            last = layers[-1] if isinstance(layers[-1], list) else [layers[-1]]
            if out is None:
                out = empty(_output_shape(last[0], y.shape, sum(widths)), np.float32, like=y)
            for k, layer in enumerate(last):
                self._apply(layer, y, out, first + k * (width // len(last)))
            first += width
        return out


NETWORK = InceptionV3


def _width(layer, x):
    """Channels of a branch's last layer or layers."""
    if isinstance(layer, list):
        return sum(_width(each, x) for each in layer)
    return x.shape[3] if isinstance(layer, Pooling) else layer.C_out


def _output_shape(layer, shape, channels):
    pooled = isinstance(layer, Pooling)
    size, pad = ((3, 3), int(layer.stride == 1)) if pooled else (layer.size, None)
    padding = (pad, pad) if pooled else layer.padding
    window = sliding_window(shape, size, layer.stride, padding)
    return shape[0], window.Ho, window.Wo, channels
