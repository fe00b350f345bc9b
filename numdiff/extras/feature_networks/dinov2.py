"""DINOv2 ViT-B/14: from images to the 768 numbers of the class token, for FD-DINOv2.

    224×224 pixels → 16 × 16 patches of 14 × 14, and the class token: 257 tokens of 768 channels
    12 times: x += γ_1 · attention(norm(x)), x += γ_2 · fc2(GELU(fc1(norm(x)))); then norm(x) of the class token

The published positions are of 37 × 37 patches. The public code interpolates them to 16 × 16 by a
bicubic filter (a = -0.75, not antialiased) whose scale is (16 + 0.1) / 37; so does `positions_of`.
The scales γ of the branches are folded into the layers before them, and mean and deviation of the
pixels into the first layer.

SOURCE
    the network: Oquab et al. 2023, arXiv:2304.07193; LayerScale: Touvron et al. 2021, arXiv:2103.17239.
    The distance: Stein et al. 2023, "Exposing flaws of generative model evaluation metrics", arXiv:2306.04675.
"""

import numpy as np

from ... import kernels as K
from ...device import download, upload
from ...kernels.attention import flash_attention_forward
from ...kernels.bias import bias_add_forward
from ...kernels.linear.layer import linear_forward
from ...kernels.window import window_forward
from .folding import with_scaled_pixels
from .kernels.activations import gelu_erf_forward
from .kernels.patches import patches_forward
from .parts import last_of
from .resizing import cubic

NAME = "dinov2-vitb14"
TITLE = "DINOv2 ViT-B/14"
FILE = "Meta's dinov2_vitb14_pretrain.pth"
METHODS = ("clean",)
SIZE, PATCH = 224, 14  # pixels
FEATURES, HIDDEN, HEADS, DEPTH = 768, 3072, 12, 12
SIDE, STORED_SIDE = SIZE // PATCH, 37  # patches
OFFSET = 0.1  # patches, of the public code's scale
CUBIC = -0.75  # a of its bicubic filter
EPS = 1e-6  # of the norms
MEAN = 255 * np.array([0.485, 0.456, 0.406])  # of the pixels of ImageNet
DEVIATION = 255 * np.array([0.229, 0.224, 0.225])
# images at a time: on the CPU; on a GPU, where the hidden layer has 3 MB an image
FEW, MANY = 2, 256
SIZES = {384: "ViT-S/14", 768: "ViT-B/14", 1024: "ViT-L/14", 1536: "ViT-g/14"}


# Weights ------------------------------------------------------------------------------------------


def public_shapes():
    """({name: shape} of the public file, the names that it may lack)."""
    C = FEATURES
    shapes = {
        "cls_token": (1, 1, C),
        "pos_embed": (1, 1 + STORED_SIDE**2, C),
        "mask_token": (1, C),
        "patch_embed.proj.weight": (C, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (C,),
        "norm.weight": (C,),
        "norm.bias": (C,),
    }
    layers = {
        "attn.qkv": (3 * C, C),
        "attn.proj": (C, C),
        "mlp.fc1": (HIDDEN, C),
        "mlp.fc2": (C, HIDDEN),
    }
    for k in range(DEPTH):
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{k}.{name}.{part}": (C,) for part in ("weight", "bias")}
        for name, shape in layers.items():
            shapes[f"blocks.{k}.{name}.weight"] = shape
            shapes[f"blocks.{k}.{name}.bias"] = shape[:1]
        shapes |= {f"blocks.{k}.{name}.gamma": (C,) for name in ("ls1", "ls2")}
    return shapes, {"mask_token"}


def recognises(names):
    """Whether these are names of a vision transformer like DINOv2's, of any version."""
    return {"cls_token", "pos_embed", "patch_embed.proj.weight"} <= set(names)


def other_version(state_dict):
    """The name of another network that these weights belong to; None for none that is known."""
    if "register_tokens" in state_dict:
        return "DINOv2 with registers, whose features are others"
    if "blocks.0.ls1.gamma" not in state_dict:
        return "a vision transformer without LayerScale, which is not DINOv2"
    width = state_dict["cls_token"].shape[-1]
    if width != FEATURES:
        return f"DINOv2 {SIZES.get(width, f'of {width} channels')}"
    return None


def positions_of(pos_embed):
    """float64 (1 + 16·16, C): of the class token, and of the patches, interpolated."""
    place = (np.arange(SIDE) + 0.5) * STORED_SIDE / (SIDE + OFFSET) - 0.5
    left = np.floor(place).astype(int)
    matrix, rows = np.zeros((SIDE, STORED_SIDE)), np.arange(SIDE)
    for k in (-1, 0, 1, 2):  # beyond the border its pixels are repeated
        np.add.at(
            matrix,
            (rows, np.clip(left + k, 0, STORED_SIDE - 1)),
            cubic(place - left - k, CUBIC),
        )
    pos_embed = np.asarray(pos_embed[0], np.float64)
    grid = pos_embed[1:].reshape(STORED_SIDE, STORED_SIDE, -1)
    grid = np.einsum("ih,jw,hwc->ijc", matrix, matrix, grid, optimize=True)
    return np.concatenate([pos_embed[:1], grid.reshape(SIDE * SIDE, -1)])


def arrays_of(state_dict):
    """{name: float32 array}, folded in float64: each layer's weight (N, K) and bias, each norm's,
    and `tokens` (257, C), which is added to the products of the patches."""
    state = {n: np.asarray(a, np.float64) for n, a in state_dict.items() if n != "mask_token"}
    first = state["patch_embed.proj.weight"].transpose(0, 2, 3, 1), state["patch_embed.proj.bias"]
    weight, bias = with_scaled_pixels(*first, MEAN, DEVIATION)
    tokens = positions_of(state["pos_embed"])
    tokens[0] += state["cls_token"][0, 0]
    tokens[1:] += bias
    arrays = {"patches.weight": weight.reshape(len(weight), -1), "tokens": tokens}
    for k in range(DEPTH):
        block = f"blocks.{k}."
        for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
            gamma = state.get(
                block + {"attn.proj": "ls1", "mlp.fc2": "ls2"}.get(name, "") + ".gamma"
            )
            for part in ("weight", "bias"):
                array = state[f"{block}{name}.{part}"]
                if gamma is not None:
                    array = gamma.reshape(-1, *(1,) * (array.ndim - 1)) * array
                arrays[f"{block}{name}.{part}"] = array
    arrays |= {f"norm.{part}": state[f"norm.{part}"] for part in ("weight", "bias")}
    return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


def shapes():
    """{name: shape} of what `arrays_of` returns."""
    public, _ = public_shapes()
    found = {
        "patches.weight": (FEATURES, PATCH * PATCH * 3),
        "tokens": (1 + SIDE * SIDE, FEATURES),
    }
    others = ("cls_token", "pos_embed", "mask_token", "patch_embed.")
    for name, shape in public.items():
        if not name.startswith(others) and not name.endswith("gamma"):
            found[name] = shape
    return found


# The network --------------------------------------------------------------------------------------


class VisionTransformer:
    """The network of the docstring. arrays: as `arrays_of` returns them; method: how the pixels are
    resized; backend: where it computes (None: NumPy)

    network(x) is float32 (B, 768) of x (B, 224, 224, 3) float32, values 0 … 255.
    """

    def __init__(self, arrays, method="clean", backend=None):
        self._arrays = {name: upload(array, backend) for name, array in arrays.items()}
        self._tokens = self._arrays["tokens"].reshape(-1)

    def __call__(self, x):
        return last_of(self.layers, x, FEW, MANY)

    def layers(self, x):
        """Yields (name, array (B, 257, C)) of the tokens and of each block, and last ("class
        token", its features (B, C), a NumPy array)."""
        B, T = len(x), 1 + SIDE * SIDE
        # a patch of zeros in front: what is added to it is the class token
        x = patches_forward(x, (PATCH, PATCH), PATCH).reshape(B, SIDE * SIDE, 1, -1)
        x = self._linear("patches", window_forward(x, -1, 0, T, 1))
        x = bias_add_forward(x.reshape(B, T * FEATURES), self._tokens).reshape(B, T, FEATURES)
        yield "tokens", x
        for k in range(DEPTH):
            x = self._block(f"blocks.{k}.", x)
            yield f"blocks.{k}", x
        first = window_forward(x.reshape(B, T, 1, FEATURES), 0, 0, 1, 1)
        yield "class token", download(self._norm("norm", first)).reshape(B, FEATURES)

    def _block(self, name, x):
        qkv = self._linear(name + "attn.qkv", self._norm(name + "norm1", x))
        y, _ = flash_attention_forward(qkv, HEADS, order="new")
        x = self._linear(name + "attn.proj", y, residual=x)
        hidden = gelu_erf_forward(self._linear(name + "mlp.fc1", self._norm(name + "norm2", x)))
        return self._linear(name + "mlp.fc2", hidden, residual=x)

    def _norm(self, name, x):
        weight, bias = (self._arrays[f"{name}.{part}"] for part in ("weight", "bias"))
        return K.layernorm_forward(x, weight, bias, EPS)[0]

    def _linear(self, name, x, residual=None):
        weight, bias = (self._arrays.get(f"{name}.{part}") for part in ("weight", "bias"))
        return linear_forward(x, weight, bias, residual=residual)


NETWORK = VisionTransformer
