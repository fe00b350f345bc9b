"""From images to features: numdiff's own extractor, and how to plug in another.

RandomConv, "random-conv-1". A convolutional network that was never trained: four 3×3 convolutions
of stride 2 with SiLU, to 32, 64, 128 and 256 channels, whose normal weights are counted by Philox
from one seed and scaled so that the activations keep their size. Its features are the mean over the
pixels of each level's channels, 480 numbers an image; its spatial features the first 7 channels of
the third level, averaged to 4×4, 112 numbers.

Random features distinguish distributions of colours, edges and small shapes (Naeem et al. 2020,
arXiv:2002.09797, used them so), need no download, and are the same on every machine up to rounding.
They know nothing about objects. **Distances in them are not FID**: they compare runs on one dataset
with each other, not with published figures.

A plug-in is a callable, named `module:function`: it gets uint8 images (B, H, W, 3) and returns
features (B, D), or a pair of features and spatial features (B, S). With an Inception network's
pool3 features as public evaluators make them, the Fréchet distance is FID.
"""

import contextlib
import importlib
import os
import sys
import traceback

import numpy as np

from .. import extensions
from ..device import download, upload
from ..errors import NumdiffError, UsageError, printable, shown
from ..kernels.conv2d import conv2d_forward
from ..kernels.diffusion.images import images_forward
from ..kernels.elementwise import silu_forward
from ..kernels.random import PURPOSE_INIT, random_normal
from ..kernels.reduce.trees import sample_sum

# of the weights of random-conv-1; another seed would be another extractor, with another name
SEED = 0x6E756D64
CHANNELS = (3, 32, 64, 128, 256)
# 1 / E[silu(z)²] of a standard normal z: a layer's outputs are as large as its inputs
SILU_GAIN = 2.81
SPATIAL_LEVEL, SPATIAL_CHANNELS, SPATIAL_SIZE = 2, 7, 4
SMALLEST = 16  # pixels: below, the last level has no neighbourhood left


class RandomConv:
    """The extractor of the docstring; backend: where it computes (None: NumPy).

    precision: "fp32", the default on every machine, so that figures can be compared; or "tf32" on a
        GPU from sm_80 on, which counts as another extractor, with another name
    """

    name = "random-conv-1"

    def __init__(self, backend=None, precision="fp32"):
        self.backend, self.tf32 = backend, precision == "tf32"
        if self.tf32:
            if getattr(backend, "capability", (0, 0))[:2] < (8, 0):
                raise UsageError(
                    "--precision tf32 needs a GPU of compute capability 8.0 or later; use --precision "
                    "fp32."
                )
            self.name += "-tf32"
        self.weights = [
            upload(random_conv_weight(level), backend) for level in range(len(CHANNELS) - 1)
        ]

    def __call__(self, images):
        """uint8 (B, H, W, 3) -> features float32 (B, 480), spatial features float32 (B, 112)."""
        if (
            getattr(images, "dtype", None) != np.uint8
            or images.ndim != 4
            or images.shape[3] != 3
            or not len(images)
        ):
            given = (
                f"{images.dtype} {images.shape}"
                if isinstance(images, np.ndarray)
                else shown(images)
            )
            raise UsageError(
                f"{self.name} takes images as an array uint8 (B, H, W, 3), and not {given}."
            )
        if min(images.shape[1:3]) < SMALLEST:
            raise UsageError(
                f"{self.name} takes images of at least {SMALLEST}×{SMALLEST} pixels, and these are "
                f"{images.shape[1]}×{images.shape[2]}: give an extractor of your own with --features."
            )
        x, levels = images_forward(upload(images, self.backend), None), []
        for level, weight in enumerate(self.weights):
            with tf32_switched(self.backend, self.tf32):
                x = silu_forward(conv2d_forward(x, weight, None, stride=2))
            levels.append(download(sample_sum(x)) / (x.shape[1] * x.shape[2]))
            if level == SPATIAL_LEVEL:
                spatial = _spatial(download(x))
        return np.concatenate(levels, axis=1), spatial


@contextlib.contextmanager
def tf32_switched(backend, on):
    """Context in which the device's TF32 switch is set."""
    before = getattr(backend, "tf32", None)
    if before is not None:
        backend.tf32 = on
    try:
        yield
    finally:
        if before is not None:
            backend.tf32 = before


def random_conv_weight(level):
    """float32 (C_out, 3, 3, C_in) of a level: counter (element, output channel, level), key (SEED,
    PURPOSE_INIT)."""
    C_in, C_out = CHANNELS[level], CHANNELS[level + 1]
    step = np.array([level], np.uint32)
    weight = random_normal(
        (C_out, 3, 3, C_in), SEED, PURPOSE_INIT, step, np.arange(C_out, dtype=np.uint32)
    )
    return weight * np.float32(np.sqrt((1 if level == 0 else SILU_GAIN) / (9 * C_in)))


def _spatial(x):
    """Channels-first as in guided-diffusion's spatial features: (B, 7 · 4 · 4), means over a grid
    of 4×4 cells."""
    B, H, W, _ = x.shape
    rows, columns = (np.linspace(0, n, SPATIAL_SIZE + 1).astype(int) for n in (H, W))
    cells = np.empty((B, SPATIAL_CHANNELS, SPATIAL_SIZE, SPATIAL_SIZE), np.float32)
    for i in range(SPATIAL_SIZE):
        for j in range(SPATIAL_SIZE):
            cell = x[
                :,
                rows[i] : max(rows[i + 1], rows[i] + 1),
                columns[j] : max(columns[j + 1], columns[j] + 1),
            ]
            cells[:, :, i, j] = cell[..., :SPATIAL_CHANNELS].mean((1, 2))
    return cells.reshape(B, -1)


def find_extractor(name=None, backend=None, precision="auto"):
    """(callable, its name): None or "random-conv" for `RandomConv`, a file of an extension's
    network, else what `module:function` names.

    precision: of numdiff's own; "auto" is fp32
    """
    if name in (None, "random-conv", RandomConv.name):
        extractor = RandomConv(backend, "fp32" if precision == "auto" else precision)
        return extractor, extractor.name
    ending = os.path.splitext(str(name).partition(":")[0])[1]
    if ending in extensions.entries("features"):
        load = extensions.find("features", ending, f"--features {name}")
        extractor = load(name, backend, precision)
        return extractor, extractor.name
    if precision != "auto":
        raise UsageError(
            f"--precision {precision} belongs to random-conv, and --features {name} chooses its own: "
            "leave it out."
        )
    module, colon, function = str(name).partition(":")
    if not (module and colon and function):
        raise UsageError(
            f"--features {name} must be random-conv, a file .h5 of a feature network, or a function of "
            "your own as module:function."
        )
    # `numdiff` is installed elsewhere, and the user's module is in the current folder
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--features {name}: the module {module} cannot be imported ({error})."
        ) from error
    except Exception as error:  # what a user's own module does
        raise UsageError(
            f"--features {name}: the module {module} cannot be imported ({_told(error)})."
        ) from error
    try:
        for part in function.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise UsageError(f"--features {name}: the module {module} has no {function}.") from None
    if not callable(found):
        raise UsageError(f"--features {name} is not callable: name a function.")
    return found, str(name)


def _answer(extractor, images):
    """The extractor's result; a `UsageError` that names the place if a user's own function fails."""
    if isinstance(extractor, RandomConv):
        return extractor(images)
    try:
        return extractor(images)
    except NumdiffError:
        raise
    except Exception as error:
        raise UsageError(
            f"the extractor failed on {images.dtype} images of shape {images.shape} ({_told(error)}): fix "
            "it, or name another function."
        ) from error


def _told(error):
    """An exception in a line: its kind, its text and the line of code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return printable(
        f"{type(error).__name__}: {error}, line {place.lineno} of {place.filename}", 600
    )


def extract(extractor, batches, count, progress=None):
    """(features (N, D), spatial features (N, S) or None), float32, of uint8 batches of `count`
    images in all."""
    arrays, row = None, 0
    for images in batches:
        answer = _answer(extractor, images)
        answer = answer if isinstance(answer, tuple) else (answer,)
        answer = [np.asarray(part) for part in answer]
        if len(answer) > 2 or any(part.ndim != 2 or len(part) != len(images) for part in answer):
            raise UsageError(
                f"the extractor returned shapes {[part.shape for part in answer]} for {len(images)} "
                "images: it must return features (B, D), or a pair of them and spatial features (B, S)."
            )
        if not all(np.isfinite(part).all() for part in answer):
            raise UsageError("the extractor returned features that are not finite.")
        if arrays is None:
            arrays = [np.empty((count, part.shape[1]), np.float32) for part in answer]
        for array, part in zip(arrays, answer, strict=True):
            array[row : row + len(images)] = part
        row += len(images)
        if progress:
            progress(len(images))
    return arrays[0], arrays[1] if len(arrays) > 1 else None
