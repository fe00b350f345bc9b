"""Time's direction in the weights of a DiT: SiT and LightningDiT count t from noise, numdiff from
the image.

On the linear path numdiff's models see t = 0 for the image and 1 for noise, and answer eps - x_0;
those of SiT (Ma et al. 2024, arXiv:2401.08740) and LightningDiT see τ = 1 - t, and answer x_0 -
eps. Both differences can be moved into the weights, exactly but for rounding:

    the answer      the last layer's weight and bias change their signs (where the flow is predicted: an image is one in
                    both)
    the timestep    its embedding is cos(ω·τ) and sin(ω·τ) of 128 frequencies, and
                        cos(ω·(1 - t)) = cos ω · cos(ω·t) + sin ω · sin(ω·t)
                        sin(ω·(1 - t)) = sin ω · cos(ω·t) - cos ω · sin(ω·t)
                    so that the first layer's columns of each frequency are reflected; twice is once
                    back

A model with `learn_sigma` has further channels there, which those programs cut off and never train:
they are left out.
"""

import numpy as np

from ...nn.dit import FREQUENCIES

MAX_PERIOD = 10000.0
TIME, LAST = "t_embedder.mlp.0.weight", "final_layer.linear"


def with_time_reversed(state_dict, prediction="flow", scale=1.0):
    """The DiT that sees 1 - t, and of a flow answers with the other sign, in PyTorch's layout; its
    own inverse.

    scale: what t is multiplied by before the model sees it, the same in both directions
    """
    half = FREQUENCIES // 2
    # as F.timestep_embedding: cosines first
    omega = scale * np.exp(-np.log(MAX_PERIOD) * np.arange(half) / half)
    cosines, sines = np.split(np.asarray(state_dict[TIME], np.float64), 2, axis=1)
    reflected = np.concatenate(
        (
            cosines * np.cos(omega) + sines * np.sin(omega),
            cosines * np.sin(omega) - sines * np.cos(omega),
        ),
        axis=1,
    )
    turned = {**state_dict, TIME: reflected.astype(np.float32)}
    if prediction == "flow":
        turned |= {
            f"{LAST}.{part}": -np.asarray(state_dict[f"{LAST}.{part}"])
            for part in ("weight", "bias")
        }
    return turned


def without_variance(state_dict, options):
    """(state dict, options) of the same model without the second half of its output channels."""
    rows, channels = options["patch_size"] ** 2, options["in_channels"]
    kept = {}
    for part in ("weight", "bias"):
        array = np.asarray(state_dict[f"{LAST}.{part}"])
        numbers = array.reshape(rows, 2 * channels, *array.shape[1:])[:, :channels]
        kept[f"{LAST}.{part}"] = numbers.reshape(rows * channels, *array.shape[1:])
    return {**state_dict, **kept}, {**options, "learn_sigma": False}
