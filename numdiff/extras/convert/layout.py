"""Conversion of weights between PyTorch's memory layout and numdiff's.

          PyTorch              numdiff
patches   (D, C, p, p)         (D, p, p, C)           the DiT's x_embedder.proj, a convolution of stride p
conv      (C_out, C_in, h, w)  (C_out, h, w, C_in)    channels last: in memory already the operand (N, K) of a
product attention (N, K, 1)            (N, K)                 the UNet's qkv and proj_out are 1×1 convolutions there
depthwise (C, 1, h, w)         (h, w, C)              the UNet's ConvNeXt blocks
linear    (N, K)               (N, K)
norm      (C,)                 (C,)
"""

import numpy as np

DEPTHWISE = "depthwise.weight"
SEQUENCE_CONVOLUTIONS = ("qkv.weight", "proj_out.weight")  # with a last axis of one, in the UNet


def to_numdiff_layout(state_dict):
    """{name: float32 array in numdiff's layout} of {name: array in PyTorch's layout}."""
    return {name: _to_numdiff(name, np.asarray(array)) for name, array in state_dict.items()}


def to_torch_layout(arrays):
    """{name: float32 array in PyTorch's layout} of {name: array in numdiff's layout}."""
    return {name: _to_torch(name, np.asarray(array)) for name, array in arrays.items()}


def _to_numdiff(name, array):
    if array.ndim == 4 and name.endswith(DEPTHWISE):
        array = array[:, 0].transpose(1, 2, 0)
    elif array.ndim == 4:
        array = array.transpose(0, 2, 3, 1)
    elif array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    with np.errstate(over="ignore"):  # of float64: infinities, which the callers check for
        return np.ascontiguousarray(array, np.float32)


def _to_torch(name, array):
    if array.ndim == 4:
        array = array.transpose(0, 3, 1, 2)
    elif array.ndim == 3 and name.endswith(DEPTHWISE):
        array = array.transpose(2, 0, 1)[:, None]
    elif array.ndim == 2 and name.endswith(SEQUENCE_CONVOLUTIONS) and ".attn." not in name:
        array = array[:, :, None]
    return np.ascontiguousarray(array, np.float32)
