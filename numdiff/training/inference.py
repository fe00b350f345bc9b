"""Models that are loaded for sampling alone (nn/inference.py): which weights they hold in which
type, and in FP8 the scales of what goes into their layers."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..data.fingerprint import hash_of
from ..device import zeros
from ..diffusion import Sampling, SamplingConfig
from ..diffusion.memory import Measuring
from ..distributed.communicator import Alone
from ..nn.inference import for_inference
from ..nn.module import padded
from ..nn.tensor import Tensor
from ..sizes import image_shape
from .compiling import compile_for, plan_sampling

# of the calibration of FP8: evaluations at as many levels from noise to image, samples of each, and
# the first one's seed
CALIBRATION_STEPS, CALIBRATION_IMAGES, CALIBRATION_SEED = 8, 8, 1 << 31


def inference_model(kind, options, device, arrays, hashed=False):
    """A model of the class `kind`; its precision must be set next, and then `parameters.release()`
    drops the arrays.

    arrays: its values, {name: float32 array}, or a function of its `FlatParameters` that makes them
    hashed: `weights_hash()` waits for their `flat_hash`, which a thread computes meanwhile
    """
    with for_inference():
        model = kind(**options, device=device, seed=None)
    if callable(arrays):
        arrays = arrays(model.parameters)
    if hashed:
        model.weights_hash = in_thread(flat_hash, model.parameters.index, arrays)
    model.parameters.give(arrays, lambda dtype: read_in_single(model, dtype))
    return model


def in_thread(function, *arguments):
    """A function that waits for the result of `function`, which a thread computes meanwhile, and
    returns it."""
    pool = ThreadPoolExecutor(1, "numdiff-once")
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return future.result


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
    if hasattr(twin, "evaluate_both"):  # an autoencoder
        twin.evaluate_both()
    else:
        x = Tensor(zeros((2, *image_shape(model)), np.float32, device))
        y = None if model.num_classes is None else zeros(2, np.int32, device)
        twin(x, zeros(2, np.float32, device), y)
    return {name for name in names if parameters[name].read}


def calibrate(model):
    """Measure the scales of what goes into the layers in FP8, on samples that are made meanwhile.

    model: one that computes so, with its `diffusion`
    """
    y, count = None, CALIBRATION_IMAGES
    if model.num_classes is not None:
        y = np.arange(count) * model.num_classes // count
    config = SamplingConfig(
        count=count,
        batch=count,
        steps=CALIBRATION_STEPS,
        sampler="ddim",
        seed=CALIBRATION_SEED,
        y=y,
        eager=True,  # one step after the other, so that each has the scales of those before it
    )
    compile_for(model, plan_sampling(model, config), Alone())
    for _ in Sampling(model, config).batches(model.parameters.float8.update):
        pass


def flat_hash(index, arrays):
    """What `array_hash` gives for the flat buffer of these arrays, which is not made."""
    digest = hash_of()
    for entry in index:
        values = np.ascontiguousarray(arrays[entry["name"]], np.float32).reshape(-1)
        digest.update(values.view(np.uint8))
        digest.update(bytes(4 * (padded(values.size) - values.size)))
    return digest.hexdigest()[:12]
