"""Weight files: which format a file has, the state dict in it, and writing one."""
import contextlib
import errno
import json
import pathlib

import numpy as np

from ...archives import ZipReader, read_npy
from ...errors import NumdiffError, UsageError
from . import pickles
from .unet import canonical_names
from .unet_cu import is_unet_cu, read_unet_cu

EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict", "ema_params")
RAW_KEYS = ("model", "state_dict", "model_state_dict", "net", "params", "module")
DEPTH = 3  # containers within containers
SPARE = 1 << 24  # bytes that a file may hold beyond 4 for each of its own (repeated rows are stored once)
METADATA = "numdiff_options"  # where a safetensors file of numdiff keeps the model options
SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
               "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}


def load_state_dict(path, weights="ema"):
    """{name: array} of a weight file, in PyTorch's layout, under guided-diffusion's names, in the file's own dtypes.

    path: .pt or .pth of torch.save (zip and legacy format, read without PyTorch and without running anything in it),
        .npz, .safetensors (needs the safetensors package), or unet.cu's .bin; the content decides, not the name
    weights: which to take from a file that holds both, "ema" (averaged) or "raw"
    Raises `NumdiffError` in one sentence for anything that is not a readable file of weights.
    """
    return read_weights(path, weights)[0]


def read_weights(path, weights="ema"):
    """(state dict as `load_state_dict` gives it, the model options that the file itself tells, or {})."""
    if weights not in ("ema", "raw"):
        raise UsageError(f"unknown weights {weights!r}: use ema or raw.")
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            raise NumdiffError("it is a folder; give a file")
        with open(path, "rb") as file:
            state_dict, options = _read(path, file, weights)
        renamed, more = canonical_names(state_dict)
    except FileNotFoundError:
        raise NumdiffError(f"{path} does not exist; check the path.") from None
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {path}: {_printable(error).rstrip('.')}.") from None
    except OSError as error:
        if error.errno in (None, errno.EINVAL):  # a library's own complaint, or a seek to where no byte can be
            raise _damaged(path, error) from error
        raise NumdiffError(f"cannot read {path}: {error.strerror}.") from error
    except Exception as error:  # what damaged bytes make of zipfile, NumPy, json, safetensors: too many kinds to name
        raise _damaged(path, error) from error
    return renamed, {**more, **options}


def _damaged(path, error):
    reason = _printable(error)[:150] or type(error).__name__
    return NumdiffError(f"{path} is truncated, damaged or no file of weights ({reason}); copy or save it again.")


def _printable(error):
    """An error's text in one line, without what a hostile file could tell a terminal to do."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(error).split()))


def _read(path, file, weights):
    head = file.read(512)
    file.seek(0)
    if head[:4] == b"PK\x03\x04":
        with ZipReader(path) as archive:
            if any(member.filename.endswith(".npy") for member in archive.members):
                return _read_npz(archive, 4 * path.stat().st_size + SPARE), {}
            return _choose(pickles.read_zip(archive), path, weights), {}
    if is_unet_cu(head):
        return read_unet_cu(path)
    if head[:1] == b"\x80":
        return _choose(pickles.read_legacy(file), path, weights), {}
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return _read_safetensors(path)
    if b"ustar" in head:
        raise NumdiffError("it is a tar file, as PyTorch wrote before version 0.2; save it again with a newer PyTorch")
    if not head:
        raise NumdiffError("it is empty; copy or save it again")
    raise NumdiffError("it is no file of weights that numdiff knows (.pt, .npz, .safetensors, unet.cu's .bin)")


def _choose(found, path, weights):
    """The tensors of the state dict in what a `.pt` file holds, as arrays."""
    keys = EMA_KEYS + RAW_KEYS if weights == "ema" else RAW_KEYS + EMA_KEYS
    for _ in range(DEPTH + 1):
        if not isinstance(found, dict):
            break
        tensors = {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, pickles.Tensor)}
        if tensors:
            if sum(t.nbytes for t in tensors.values()) > 4 * path.stat().st_size + SPARE:
                raise NumdiffError("its tensors are far larger than the file; save contiguous tensors")
            return {name: tensor.numpy() for name, tensor in tensors.items()}
        inside = next((key for key in keys if isinstance(found.get(key), dict)), None)
        if inside is None:
            names = ", ".join(str(k)[:40] for k in list(found)[:5]) or "nothing"
            raise NumdiffError(f"no state dict was found in it (it holds {names}; looked for {', '.join(keys)})")
        found = found[inside]
    raise NumdiffError("it holds no dict of tensors; save model.state_dict()")


def _read_npz(archive, most):
    """{name: array} of the members, which together have at most `most` bytes."""
    arrays = {}
    for member in archive.members:
        name = member.filename.removesuffix(".npy")
        if name == member.filename:
            raise NumdiffError(f"{name} in it is not an array of numbers")
        with archive.open(member) as stream:
            arrays[name] = read_npy(stream, member.file_size, most)
        most -= arrays[name].nbytes
        if arrays[name].dtype.kind not in "fiub":
            raise NumdiffError(f"{name} in it is not an array of numbers")
    return arrays


def _safetensors():
    try:
        import safetensors.numpy
    except ImportError:
        raise NumdiffError("safetensors files need the safetensors package: pip install safetensors") from None
    return safetensors


def _read_safetensors(path):
    package = _safetensors()
    data = path.read_bytes()
    arrays = {}
    for name, entry in package.deserialize(data):
        if entry["dtype"] not in SAFETENSORS:
            raise NumdiffError(f"{name} has the type {entry['dtype']}, which numdiff does not read")
        array = np.frombuffer(entry["data"], SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        arrays[name] = array
    if not arrays:
        raise NumdiffError("it holds no tensors")
    metadata = json.loads(data[8:8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    options = {}
    with contextlib.suppress(ValueError):  # written by someone else under the same name
        options = json.loads(metadata.get(METADATA, "{}"))
    return arrays, options if isinstance(options, dict) else {}


def write_state_dict(file, state_dict, kind, options=None):
    """Write {name: array} to an open binary file as `kind`: "npz", or "safetensors", which also keeps the options."""
    if kind == "npz":
        np.savez(file, **state_dict)
    elif kind == "safetensors":
        metadata = {"format": "np", **({METADATA: json.dumps(options)} if options else {})}
        file.write(_safetensors().numpy.save({k: np.ascontiguousarray(v) for k, v in state_dict.items()}, metadata))
    else:
        raise ValueError(f"unknown kind {kind!r}: use npz or safetensors")
