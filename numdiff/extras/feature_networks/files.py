"""Weights of feature networks: the public files converted, and the extractor that reads the result.

A converted file is a model file (training/model_files.py): the buffer "parameters", its index, and
as "model" the name of the network.
"""

import contextlib
import io
import math
import pathlib

import numpy as np

from ... import schema
from ...errors import NumdiffError, UsageError, listed
from ...evaluation.features import tf32_switched
from ...files import Refused, open_regular
from ...outputs import check_output
from ...training.checkpoint import INDEX, load_checkpoint
from ...training.model_files import write_model_file
from ..convert import pickles
from ..convert.files import read_weights
from ..importers.archives import ZipReader
from . import dinov2, inception
from .resizing import resize

# modules with NAME, FILE, TITLE, recognises, other_version, public_shapes, arrays_of, shapes,
# METHODS and NETWORK
NETWORKS = {module.NAME: module for module in (inception, dinov2)}
ENDING = ".h5"
RECORD = schema.record({"model": schema.text(), "index": INDEX}, {}, schema.anything)


# Conversion ---------------------------------------------------------------------------------------


def holds(source):
    """Whether a path is a file of `torch.save` with the names of one of the networks, of any
    version; reads no weights."""
    return _network_of(_names_in(source)) is not None


def _names_in(path):
    # what damaged bytes raise is too many kinds to name; the reader of the weights reports them
    with contextlib.suppress(Exception):
        with open_regular(path) as raw, io.BufferedReader(raw) as file:
            head = file.peek(4)[:4]
            if head == b"PK\x03\x04":
                with ZipReader(path) as archive:
                    return _names_of(pickles.read_zip(archive))
            if head[:1] == b"\x80":
                return _names_of(pickles.read_legacy(file))
    return set()


def _names_of(found):
    return {name for name in found if isinstance(name, str)} if isinstance(found, dict) else set()


def _network_of(names):
    return next((module for module in NETWORKS.values() if module.recognises(names)), None)


def convert(source, target, given=()):
    """Convert the public weights in `source` to the file `target`; yields lines that describe it.

    given: options of `numdiff convert`, which mean nothing here and are refused. Raises a
    `NumdiffError` for weights of another version, which it names.
    """
    if given:
        option = "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{option} means nothing for the weights of a feature network: leave it out."
        )
    if pathlib.Path(target).suffix != ENDING:
        raise UsageError(
            f"OUT is {str(target)!r}, and the weights of a feature network are written to a file that "
            f"ends in {ENDING}."
        )
    check_output("the weights", target, source)
    state_dict = read_weights(source, whole=True)[0]
    network = _network_of(state_dict)
    _check_version(source, network, state_dict)
    arrays = network.arrays_of(state_dict)
    write_model_file(target, {}, arrays, model=network.NAME, source=pathlib.Path(source).name)
    count = sum(array.size for array in arrays.values())
    yield f"{target}: {network.TITLE}, {count:,} parameters"
    yield f"features    {network.FEATURES:,} numbers an image; `numdiff evaluate … --features {target}`"


def _check_version(source, network, state_dict):
    """Raise a `NumdiffError` that names the version of these weights, or what is wrong with them."""
    remedy = f"give {network.FILE}"
    other = network.other_version(state_dict)
    if other:
        raise NumdiffError(f"{source} holds {other}: {remedy}.")
    shapes, optional = network.public_shapes()
    missing = [name for name in shapes if name not in state_dict and name not in optional]
    unexpected = [name for name in state_dict if name not in shapes]
    wrong = [n for n in shapes if n in state_dict and tuple(state_dict[n].shape) != shapes[n]]
    counts = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
    found = [listed(word, names) for word, names in counts if names]
    if found:
        raise NumdiffError(
            f"{source} holds another version of {network.TITLE}: {' and '.join(found)}; {remedy}."
        )
    for name in shapes:
        if name in optional:
            continue
        if state_dict[name].dtype.kind != "f" or not np.isfinite(state_dict[name]).all():
            raise NumdiffError(f"{source} holds values that are not finite in {name}: {remedy}.")


# The extractor ------------------------------------------------------------------------------------


class FeatureNetwork:
    """An extractor of features, as `numdiff.evaluation` takes it: of uint8 images (B, H, W, 3) the
    features float32 (B, D).

    network: a class with arrays; method: how it resizes (resizing.py); precision: as of RandomConv
    """

    def __init__(self, module, arrays, method, backend=None, precision="fp32"):
        self.name = f"{module.NAME} {method}"
        self.backend, self.method, self.tf32 = backend, method, precision == "tf32"
        if self.tf32:
            if getattr(backend, "capability", (0, 0))[:2] < (8, 0):
                raise UsageError(
                    "--precision tf32 needs a GPU of compute capability 8.0 or later; use --precision "
                    "fp32."
                )
            self.name += " tf32"
        self.size, self.network = module.SIZE, module.NETWORK(arrays, method, backend)

    def __call__(self, images):
        with tf32_switched(self.backend, self.tf32):
            return self.network(resize(images, self.size, self.method, self.backend))


def load_extractor(name, backend=None, precision="auto"):
    """The `FeatureNetwork` of a converted file.

    name: its path, and optionally a colon and how images are resized: "inception.h5:tensorflow"
    """
    path, _, method = str(name).partition(ENDING)
    path, method = path + ENDING, method.removeprefix(":") or None
    module, arrays = read_network(path)
    method = method or module.METHODS[0]
    if method not in module.METHODS:
        raise UsageError(
            f"--features {name}: images are resized for this network by {' or '.join(module.METHODS)}, "
            f"and not by {method[:40]!r}."
        )
    return FeatureNetwork(module, arrays, method, backend, precision)


def read_network(path):
    """(module of the network, {name: array}) of a converted file; a `NumdiffError` for any other."""
    if not pathlib.Path(path).exists():
        raise UsageError(
            f"there is no file {path}: make it of public weights with `numdiff convert`, or check the "
            "path."
        )
    buffers, meta = load_checkpoint(path)
    module = NETWORKS.get(meta.get("model"))
    if module is None:
        raise NumdiffError(
            f"{path} holds a {str(meta.get('model'))[:20]}, which computes no features: give a file "
            f"that `numdiff convert` made of {' or '.join(m.FILE for m in NETWORKS.values())}."
        )
    try:
        schema.check(meta, RECORD, "meta")
        index = {entry["name"]: entry for entry in meta["index"]}
        if {name: tuple(entry["shape"]) for name, entry in index.items()} != module.shapes():
            raise schema.Mismatch("its index is not that of the network")
        flat = buffers.get("parameters")
        end = max(entry["offset"] + math.prod(entry["shape"]) for entry in index.values())
        if flat is None or flat.ndim != 1 or flat.dtype != np.float32 or end > flat.size:
            raise schema.Mismatch("its buffer is not that of its index")
        if not np.isfinite(flat).all():
            raise schema.Mismatch("it holds values that are not finite")
    except Refused as error:
        raise NumdiffError(
            f"{path} holds no whole {module.TITLE} ({str(error).rstrip('.')}): convert it again."
        ) from None
    return module, {
        name: flat[entry["offset"] :][: math.prod(entry["shape"])].reshape(entry["shape"])
        for name, entry in index.items()
    }
