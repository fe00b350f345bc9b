"""Channel concatenation (first draft: reference)."""
import numpy as np


def concat_forward(a, b):
    return np.concatenate([a, b], axis=-1)


def concat_backward(dy, channels_a):
    return dy[..., :channels_a].copy(), dy[..., channels_a:].copy()
