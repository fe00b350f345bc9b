"""Models that are loaded for sampling alone (nn/inference.py): which weights they hold in which
type."""

import numpy as np

from ..data.fingerprint import hash_of
from ..device import zeros
from ..diffusion.memory import Measuring
from ..nn.inference import for_inference
from ..nn.module import padded
from ..nn.tensor import Tensor
from ..sizes import image_shape


def inference_model(kind, options, device, arrays):
    """A model of the class `kind`; its precision must be set next, and then `parameters.release()`
    drops the arrays.

    arrays: its values, {name: float32 array}, or a function of its `FlatParameters` that makes them
    """
    with for_inference():
        model = kind(**options, device=device, seed=None)
    if callable(arrays):
        arrays = arrays(model.parameters)
    model.parameters.give(arrays, lambda dtype: read_in_single(model, dtype))
    return model


def read_in_single(model, dtype):
    """Names of the parameters whose float32 values an evaluation in this dtype of 16 bits reads."""
    names = list(model.parameters.parameters)
    if model.backend is None:  # NumPy, whose memory is not what a model is limited by
        return set(names)
    device = Measuring(model.backend)
    twin = type(model)(**model.options, device=device, seed=None)
    twin.compute_in_half(dtype)
    parameters = twin.parameters.parameters
    for parameter in parameters.values():
        parameter.read = False
    x = Tensor(zeros((2, *image_shape(model)), np.float32, device))
    y = None if model.num_classes is None else zeros(2, np.int32, device)
    twin(x, zeros(2, np.float32, device), y)
    return {name for name in names if parameters[name].read}


def flat_hash(index, arrays):
    """What `array_hash` gives for the flat buffer of these arrays, which is not made."""
    digest = hash_of()
    for entry in index:
        values = np.ascontiguousarray(arrays[entry["name"]], np.float32).reshape(-1)
        digest.update(values.view(np.uint8))
        digest.update(bytes(4 * (padded(values.size) - values.size)))
    return digest.hexdigest()[:12]
