"""FP8 of a model that only makes samples: the weights are held as bytes alone, and the scales of what
goes into their layers are measured once.

MATHEMATICS
    y = Q(x)·Q(w)ᵀ + bias as linear.py has it; the scale of w is that of weights.py. The scale of x is what quantise.py
    finds after CALIBRATION_STEPS evaluations of CALIBRATION_IMAGES samples, from noise to images
    (training/inference.py). From then on it is constant, so that an image has the same bits in any
    batch. What is MARGIN times as large as all that the calibration has seen becomes the largest
    number of E4M3.
DETERMINISM
    the calibration has seeds of its own: the scales depend on the model alone.
SOURCE
    Micikevicius et al. 2022, arXiv:2209.05433, section 3.2, on calibration for inference.
READ NEXT
    ../../nn/inference.py
"""

import math

import numpy as np

from ...device import empty, upload, zeros
from ...device.rounded8 import PARTIALS
from .linear import Layer8
from .quantise import HISTORY, Scale8, scale_update
from .weights import matrices8, quantise_weights


class InferenceFloat8:
    """FP8 of the weights {name: Parameter}, which `hold` fills one by one.

    promoted: whether products are added up in float32 every 128 of k
    Attributes weights float32 (n,): the weights' scales; scale float32 (n,), history float32 (n,
    HISTORY), amax uint32 (n, PARTIALS): of what goes into each
    """

    def __init__(self, parameters, backend, promoted=True):
        sizes = [math.prod(parameter.shape) for parameter in parameters.values()]
        self.numbers, n = {name: i for i, name in enumerate(parameters)}, len(parameters)
        self.weights = zeros(n, np.float32, backend)
        self.scale = upload(np.ones(n, np.float32), backend)
        self.history = zeros((n, HISTORY), np.float32, backend)
        self.amax = zeros((n, PARTIALS), np.uint32, backend)
        flat, self.parameters = self.amax.reshape(-1), parameters
        self.rows, start = empty(sum(sizes), np.uint8, backend), 0
        for i, (parameter, size) in enumerate(zip(parameters.values(), sizes, strict=True)):
            parameter.float8 = Layer8(
                self.rows[start : start + size].reshape(*parameter.shape),
                None,
                self.weights[i : i + 1],
                Scale8(self.scale[i : i + 1], flat[i * PARTIALS : (i + 1) * PARTIALS]),
                None,
                promoted,
                evaluates=True,
            )
            start += size

    def hold(self, name, values):
        """Fill the bytes of a weight. values: float16 (N · K,), on the device."""
        layer, (outputs, inputs) = self.parameters[name].float8, self.parameters[name].shape
        turned = empty(outputs * inputs, np.uint8, like=values)  # which no backward reads
        matrices = matrices8([(0, outputs, inputs)], values)
        quantise_weights(values, matrices, layer.weight.reshape(-1), turned, layer.scale)

    def update(self):
        """After an evaluation of the calibration: the scales of the next."""
        scale_update(self.amax, self.history, self.scale)
