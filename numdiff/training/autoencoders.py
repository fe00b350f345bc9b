"""Autoencoders as files: numdiff's own. An extension reads those of other programs (extensions.py,
`foreign`).

A numdiff file of an autoencoder is a model file (model_files.py) with `"model": "vae"`: the buffer
"parameters", the options of the `Autoencoder`, and the index.
"""

import math
import pathlib

import numpy as np

from .. import extensions, schema
from ..data.fingerprint import hash_of
from ..diffusion.sampling import to_uint8
from ..errors import NumdiffError, UsageError
from ..files import Refused
from ..hdf5 import is_hdf5
from ..nn.autoencoder import Autoencoder
from ..nn.model import parameter_shapes
from .checkpoint import INDEX, load_checkpoint
from .inference import inference_model
from .kinds.kind import defaults_of
from .model_files import OPTIONS, ModelFile
from .precision import set_precision

KIND = "vae"
OF_RUN = "autoencoder.h5"  # what `numdiff train vae` leaves in its run folder
LIMITS = {
    **OPTIONS,
    "channel_mult": schema.items(schema.integer(1, 256), 16, 1),
    "latent_channels": schema.integer(1, 1024),
    "attention_levels": schema.items(schema.integer(0, 16), 16),
    "scaling_factor": schema.number(-1e6, 1e6),
    "shift_factor": schema.number(-1e6, 1e6),
}
RECORD = schema.record({"model_options": schema.options, "index": INDEX}, {}, schema.anything)


def load_autoencoder(path, device="auto", precision="auto", inference=False):
    """The `Autoencoder` in a numdiff file, a folder of diffusers (itself, or a pipeline's), or a
    file of a state dict.

    precision: as of `load`; inference: hold each weight once, without gradients; `weights_hash()`
    then gives their hash. Raises a `NumdiffError` of one sentence for anything else.
    """
    options, arrays = read_autoencoder(path)
    if inference:
        model = inference_model(Autoencoder, options, device, arrays, hashed=True)
    else:
        model = Autoencoder(**options, device=device, seed=None)
        model.load_arrays(arrays)
    model.precision = set_precision(model, precision)
    if inference:
        model.parameters.release()
    return model


class LatentDecoder:
    """Turns the latents that a diffusion model makes into pictures: `decoder(latents)` is uint8 (B,
    f·h, f·w, C).

    Attributes: path, vae (an `Autoencoder`), shape (of a picture), dtype
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, path, latents, device="auto", precision="auto", encoded_by=None):
        """latents: their shape (h, w, channels); encoded_by: as `Dataset.encoded_by` gives it,
        which must be the same.

        precision: of the diffusion model; an autoencoder has no fp8, and computes in fp16 then
        """
        self.path, self.vae = (
            str(path),
            load_autoencoder(path, device, "fp16" if precision == "fp8" else precision, True),
        )
        height, width, channels = latents
        if channels != self.vae.latent_channels:
            raise UsageError(
                f"--vae {path} decodes latents of {self.vae.latent_channels} channels, and the model "
                f"makes {channels}: give the autoencoder by which its data were encoded."
            )
        own = {
            "weights": encoded_by and self.vae.weights_hash(),
            "scaling_factor": self.vae.scaling_factor,
            "shift_factor": self.vae.shift_factor,
        }
        changed = [name for name in own if encoded_by and encoded_by.get(name) != own[name]]
        if changed:
            raise UsageError(
                f"--vae {path} is not the autoencoder by which the data were encoded (its {changed[0]} "
                f"{'differ' if changed[0] == 'weights' else 'differs'}): give that one."
            )
        self.shape = height * self.vae.factor, width * self.vae.factor, self.vae.in_channels

    def __call__(self, latents):
        return to_uint8(self.vae.decode(self.vae.unscale(latents)))


def array_hash(array):
    """A short hash of an array."""
    return hash_of(np.ascontiguousarray(array).view(np.uint8)).hexdigest()[:12]


def read_autoencoder(path):
    """(options of the `Autoencoder`, {name: array in numdiff's layout}) of a file or folder; every
    number is finite."""
    path = pathlib.Path(path)
    if (path / OF_RUN).is_file():  # a run folder
        path = path / OF_RUN
    if not path.exists():
        raise NumdiffError(
            f"there is no autoencoder {path}: check the path, or make one with `numdiff convert`."
        )
    own = path.is_file() and is_hdf5(path)
    read = _read_own if own else extensions.find("foreign", "weights", str(path)).read_autoencoder
    options, arrays = read(path)
    broken = next((name for name, array in arrays.items() if not np.isfinite(array).all()), None)
    if broken:
        raise NumdiffError(
            f"{path} holds values that are not finite, first in {broken}; use another file."
        )
    return options, arrays


def read_start(path):
    """What `read_autoencoder` gives, as a `ModelFile` for `--init`."""
    options, arrays = read_autoencoder(path)
    return ModelFile(str(path), KIND, {**options, "num_classes": None}, arrays, {})


def _read_own(path):
    buffers, meta = load_checkpoint(path)
    if meta.get("model") != KIND:
        raise NumdiffError(
            f"{path} holds a {str(meta.get('model'))[:20]}, and no autoencoder: give the file of one."
        )
    try:
        schema.check(meta, RECORD, "meta")
        own = defaults_of(Autoencoder)
        options = {
            **own,
            **schema.check(meta["model_options"], schema.of_defaults(own, LIMITS), "model_options"),
        }
        shapes = {entry["name"]: tuple(entry["shape"]) for entry in meta["index"]}
        if len(options["channel_mult"]) * options["num_res_blocks"] > len(shapes) or (
            parameter_shapes(Autoencoder, options) != shapes
        ):
            raise schema.Mismatch("its index does not fit its options")
        flat = buffers.get("ema" if "ema" in buffers else "parameters")
        end = max(entry["offset"] + math.prod(entry["shape"]) for entry in meta["index"])
        if flat is None or flat.ndim != 1 or flat.dtype != np.float32 or end > flat.size:
            raise schema.Mismatch("its buffer is not that of its index")
    except (Refused, UsageError) as error:
        raise NumdiffError(
            f"{path} is a numdiff file but holds no whole autoencoder ({str(error).rstrip('.')}); use "
            "another file."
        ) from error
    return options, {
        entry["name"]: flat[entry["offset"] : entry["offset"] + math.prod(entry["shape"])].reshape(
            entry["shape"]
        )
        for entry in meta["index"]
    }
