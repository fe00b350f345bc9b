"""Making images with a model: one seed an image, so that an image does not depend on the batch it was made in."""
import numpy as np

from ..device import download, upload
from ..errors import UsageError
from ..kernels.random import PURPOSE_SAMPLER, random_normal
from ..kernels.sampler import predict_x_0 as predict_x_0_kernel
from ..nn import Tensor
from .process import Diffusion
from .samplers import get_sampler
from .schedule import spaced_timesteps

LAST_SEED = 2**32 - 1  # a sample's counter is 32 bits wide


def sample(model, count=16, steps=50, sampler="ddim", eta=None, seed=0, y=None, batch=16, clip=True, progress=None):
    """Images from a trained model.

    model: a UNet with `model.diffusion` set (the options of its Diffusion), as `numdiff.load` gives it
    count: images; image i is made from the seed `seed` + i alone, whatever the batch
    steps: sampling steps, 1 to the diffusion's own number; sampler: "ddim" or "ddpm"; eta: DDIM's noise, 0 to 1
    y: class indices (count,) for a model with classes; None draws them round robin
    batch: images at a time; clip: keep each estimate of x_0 within [-1, 1]
    progress: called after each model evaluation
    Returns uint8 (count, H, W, C). Raises `UsageError` for options that do not fit the model.
    """
    function = get_sampler(sampler)
    diffusion = Diffusion(**model.diffusion, backend=model.backend)
    timesteps = spaced_timesteps(diffusion.steps, steps)
    if count < 1 or batch < 1:
        raise UsageError("count and batch must be at least 1.")
    eta = (0.0 if sampler == "ddim" else 1.0) if eta is None else eta
    if sampler != "ddim" and eta != 1:
        raise UsageError(f"eta belongs to ddim, and {sampler} always adds all its noise: leave eta out, or use ddim.")
    if not 0 <= seed <= LAST_SEED - (count - 1):
        raise UsageError(f"the {count} images would need the seeds {seed} to {seed + count - 1}, which must be between "
                         f"0 and {LAST_SEED}.")
    if not 0 <= eta <= 1:
        raise UsageError(f"eta must be between 0 (deterministic) and 1, not {eta}.")
    labels = class_labels(model, y, count)
    images = []
    for start in range(0, count, batch):
        rows = slice(start, min(start + batch, count))
        seeds = (seed + np.arange(rows.start, rows.stop)).astype(np.uint32)
        images.append(_sample_batch(model, diffusion, function, timesteps, eta, seeds,
                                    None if labels is None else labels[rows], clip, progress))
    return np.concatenate(images)


def class_labels(model, y, count):
    """int32 (count,) for a model with classes, else None; a `UsageError` for an index it does not have."""
    if model.num_classes is None:
        if y is not None:
            raise UsageError("this model was trained without classes: leave the class out.")
        return None
    labels = np.resize(np.arange(model.num_classes), count) if y is None else np.atleast_1d(y)
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape not in ((1,), (count,)):
        raise UsageError(f"y must be one class index, or one for each of the {count} images.")
    labels = np.resize(labels, count).astype(np.int32)
    if labels.min() < 0 or labels.max() >= model.num_classes:
        raise UsageError(f"class {labels.max() if labels.max() >= model.num_classes else labels.min()} does not exist: "
                         f"the model has classes 0 to {model.num_classes - 1}.")
    return labels


def _sample_batch(model, diffusion, function, timesteps, eta, seeds, labels, clip, progress):
    backend = model.backend
    shape = (len(seeds), model.image_size, model.image_size, model.in_channels)
    samples = upload(seeds, backend)
    labels = None if labels is None else upload(labels, backend)

    def noise(i):  # counter 0 is the starting noise
        counter = upload(np.array([i + 1], np.uint32), backend)
        return random_normal(shape, 0, PURPOSE_SAMPLER, counter, samples, like=backend)

    def predict_x_0(x_t, t):
        t = upload(np.full(len(seeds), t, np.int32), backend)
        output = model(Tensor(x_t), t, labels).data
        if progress:
            progress()
        return predict_x_0_kernel(x_t, output, t, *diffusion.tables, kind=diffusion.prediction, clip=clip)

    x = function(predict_x_0, noise(-1), timesteps, diffusion.alpha_bar, noise, eta)
    return np.clip(np.rint(download(x) * 127.5 + 127.5), 0, 255).astype(np.uint8)
