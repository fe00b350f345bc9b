"""Files of adapters, and models in which they are merged: W + s · B·A in float32."""

import pathlib

import numpy as np

from ...errors import NumdiffError, UsageError
from ...hdf5 import is_hdf5
from ...nn.model import parameter_shapes
from ...outputs import check_ending, check_output
from ...training import kinds
from ...training.checkpoint import load_meta
from ...training.model_files import read_model, read_model_file, write_model_file
from .parameters import ADAPTED, adapter_names, adapter_shapes, attach, hash_of_base

__all__ = ["applied", "attach", "merge_command", "merged", "shapes"]


def shapes(wanted, meta):
    """{name: shape} of the adapters in a file with this description, of a model with parameters of
    the shapes `wanted`."""
    return adapter_shapes(wanted, meta["model"], meta["lora"]["rank"])


def merged(path, adapters, meta, base=None):
    """{name: array} of the model that the adapters in a file make of their base, float32.

    path: of the file; adapters: {name: array} in it; base: of the base, where it is another path
    than meta["lora"]["base"]
    """
    record = meta["lora"]
    where = base or record["base"]
    if not pathlib.Path(where).exists():
        raise NumdiffError(
            f"{path} holds adapters of the model {where}, which is not there: put it back, or merge them "
            f"by `numdiff lora BASE {path} OUT.h5`."
        )
    _, arrays, theirs = read_model(where, record["weights"])
    table = kinds.get(meta["model"]).class_table
    if theirs["model"] != meta["model"] or hash_of_base(arrays, table) != record["hash"]:
        raise NumdiffError(
            f"{path} holds adapters of other weights than those of {where}: give the model that they were "
            f"trained on, which was {record['base']}."
        )
    made, scale = {}, np.float32(record["alpha"] / record["rank"])
    for name in parameter_shapes(kinds.get(meta["model"]).model_class, meta["model_options"]):
        if name in adapters:  # the class table
            made[name] = adapters[name]
        elif ADAPTED.fullmatch(name):
            down, up = (adapters[each] for each in adapter_names(name))
            made[name] = arrays[name] + scale * (up @ down).reshape(arrays[name].shape)
        else:
            made[name] = arrays[name]
    return made


def applied(path, base, weights=None):
    """What `read_model_file` returns, of the adapters in a file on the weights of `base`."""
    path = pathlib.Path(path)
    if not path.exists():
        raise UsageError(f"there is no file of adapters {path}: check the path.")
    if not path.is_file() or not is_hdf5(path) or "lora" not in load_meta(path):
        raise UsageError(f"{path} holds no adapters: give adapter.h5 of a run with --lora.")
    return read_model_file(path, weights, base=base)


def merge_command(base, adapter, out, echo=print):
    """Write the model that adapters make of `base` as a model file."""
    check_ending("OUT", out, ".h5")
    check_output("the model file", out, base, adapter)
    options, arrays, meta = applied(adapter, base)
    kept = {name: meta[name] for name in ("classes", "pictures") if meta.get(name)}
    write_model_file(
        out,
        options,
        arrays,
        meta.get("diffusion"),
        meta.get("step", 0),
        meta["model"],
        source=pathlib.Path(adapter).name,
        **kept,
    )
    echo(
        f"{out}: {base} with the adapters of {adapter}, of rank {meta['lora']['rank']}, after step "
        f"{meta.get('step', 0):,}"
    )
