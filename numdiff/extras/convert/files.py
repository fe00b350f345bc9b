"""Weight files: which format a file has, the state dict in it, and writing one."""

import contextlib
import errno
import io
import json
import pathlib
import zipfile

import numpy as np

from ... import schema
from ...errors import NumdiffError, UsageError, printable, quoted
from ...files import IrregularFile, open_regular
from ..importers.archives import ZipReader, read_npy
from . import pickles
from .containers import SPARE, choose, weights_of_model
from .unet import canonical_names
from .unet_cu import is_unet_cu, read_unet_cu

# where an export stores the model options: safetensors' metadata, the comment of an npz
METADATA = "numdiff_options"
DIFFUSION = "numdiff_diffusion"  # and where it stores those of the diffusion
TRAINING = "numdiff_training"  # and what no option says: see `TRAINED`
LONGEST_COMMENT = (1 << 16) - 1  # bytes of a zip's
NO_WEIGHTS = {
    "arr_0": "samples, as `numdiff sample RUN --npz FILE.npz` writes them",
    "mu": "statistics of images",
    "features": "features of images",
}  # by the name of an array, which no layer has
SAFETENSORS_HEADER_BYTES = 32 << 20
SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}
RECORDS = {
    METADATA: "the options of the model",
    DIFFUSION: "the diffusion",
    TRAINING: "the step, the names of the classes and how the run drew its pictures",
}
# keys that are no options of the model
NOT_OPTIONS = ("diffusion", "training", "broken", "betas", "alphas_cumprod")
# the step it was saved after, the classes' names, how the run drew its own pictures
TRAINED = schema.record(
    {},
    {
        "step": schema.integer(0),
        "classes": schema.items(schema.text(1 << 16), 1 << 20),
        "pictures": schema.options,
    },
    schema.anything,
)


def load_state_dict(path, weights="ema"):
    """{name: array} of a weight file, in PyTorch's layout, under guided-diffusion's names, in the
    file's own dtypes.

    path: .pt or .pth of torch.save (zip and legacy format, read without PyTorch and without running
        anything in it), .npz, .safetensors (needs the safetensors package), or unet.cu's .bin;
        recognised by its contents, not by its name
    weights: which to take from a file that holds both, "ema" (averaged) or "raw"
    Raises `NumdiffError` in one sentence for anything that is not a readable file of weights.
    """
    return read_weights(path, weights)[0]


def read_weights(path, weights="ema", whole=False):
    """(state dict as from `load_state_dict`, what else the file says): options of the model, for
    the diffusion its options ("diffusion") or a table ("betas", "alphas_cumprod"), under "training"
    what `TRAINED` has, and under "broken" what of these numdiff has written and is damaged now, in
    words.

    whole: keep all tensors under their own names, also those of other models than the diffusion's
    """
    if weights not in ("ema", "raw"):
        raise UsageError(f"unknown weights {quoted(weights)}: use ema or raw.")
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            raise NumdiffError("it is a folder; give a file")
        with open_regular(path) as raw, io.BufferedReader(raw) as file:
            state_dict, options = _read(path, file, weights)
        if whole:
            return state_dict, options
        state_dict, tables = weights_of_model(state_dict, weights)
        renamed, more = canonical_names(state_dict)
    except FileNotFoundError:
        raise NumdiffError(f"{path} does not exist; check the path.") from None
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {path}: {_one_line(error).rstrip('.')}.") from None
    except OSError as error:
        # a library's own complaint, or a seek to where no byte can be
        if error.errno in (None, errno.EINVAL) and not isinstance(error, IrregularFile):
            raise _damaged(path, error) from error
        raise NumdiffError(f"cannot read {path}: {error.strerror}.") from error
    # what damaged bytes make of zipfile, NumPy, json, safetensors: too many kinds to name
    except Exception as error:
        raise _damaged(path, error) from error
    return renamed, {**more, **options, **tables}


def _damaged(path, error):
    reason = _one_line(error)[:150] or type(error).__name__
    return NumdiffError(
        f"{path} is truncated, damaged or not a file of weights ({reason}); copy or save it again."
    )


def _one_line(error):
    return printable(" ".join(str(error).split()))


def _read(path, file, weights):
    head = file.read(512)
    file.seek(0)
    if head[:4] == b"PK\x03\x04":
        with ZipReader(path) as archive:
            if any(member.filename.endswith(".npy") for member in archive.members):
                return _read_npz(archive, 4 * path.stat().st_size + SPARE), _told_all(
                    _parse_comment(archive.comment)
                )
            return choose(pickles.read_zip(archive), path, weights), {}
    if is_unet_cu(head):
        return read_unet_cu(path)
    # whose first bytes are a length
    if head[8:9] == b"{" or path.suffix == ".safetensors" and head[:1] != b"\x80":
        return _read_safetensors(path)
    if head[:1] == b"\x80":
        return choose(pickles.read_legacy(file), path, weights), {}
    if b"ustar" in head:
        raise NumdiffError(
            "it is a tar file, as PyTorch wrote before version 0.2; save it again with a newer PyTorch"
        )
    if not head:
        raise NumdiffError("it is empty; copy or save it again")
    raise NumdiffError(
        "it is not a file of weights that numdiff knows (.pt, .npz, .safetensors, unet.cu's .bin)"
    )


def _read_npz(archive, most):
    """{name: array} of the members, which together have at most `most` bytes."""
    names = {member.filename.removesuffix(".npy") for member in archive.members}
    for name, what in NO_WEIGHTS.items():
        if name in names:
            raise NumdiffError(
                f"it holds {what} ({name}), and no weights; give the model of which they are"
            )
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
        raise NumdiffError(
            "safetensors files need the safetensors package: pip install safetensors"
        ) from None
    return safetensors


def _read_safetensors(path):
    package = _safetensors()
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if length > SAFETENSORS_HEADER_BYTES or length + 8 > len(data):
        raise NumdiffError(f"its header announces {length:,} bytes")
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
    return arrays, _told_all(schema.parse_json(data[8 : 8 + length]).get("__metadata__"))


def _parse_comment(text):
    """The JSON value of a zip's comment; None if another program wrote something else."""
    with contextlib.suppress(schema.Mismatch):
        return schema.parse_json(text)


def _told_all(metadata):
    """Options of the model, of its diffusion under "diffusion", "training" and "broken", from a
    file's metadata."""
    if not isinstance(metadata, dict):
        return {}
    broken = []
    options = {
        key: value
        for key, value in _told(metadata, METADATA, schema.options, broken).items()
        if key not in NOT_OPTIONS
    }
    more = {
        "diffusion": _told(metadata, DIFFUSION, schema.options, broken),
        "training": _told(metadata, TRAINING, TRAINED, broken),
        "broken": broken,
    }
    return {**options, **{name: stored for name, stored in more.items() if stored}}


def _told(metadata, key, wanted, broken):
    """The dict under a key of a file's metadata; {} where it is damaged, which `broken` gets in
    words."""
    try:
        return schema.check(schema.parse_json(str(metadata.get(key, "{}"))), wanted, key)
    except schema.Mismatch as error:
        broken.append(f"{RECORDS[key]}, as their record in the file is damaged ({error})")
        return {}


def write_state_dict(file, state_dict, kind, options=None, diffusion=None, training=None):
    """Write {name: array} to an open binary file as `kind`, "npz" or "safetensors", with the
    options of the model and of its diffusion, and `training` (as `TRAINED` says). Returns what of
    the latter the file has no place for: {}, or in an npz, whose comment is short, the names of
    many classes."""
    stored = {METADATA: options, DIFFUSION: diffusion, TRAINING: training}
    metadata, left = {key: _as_json(value) for key, value in stored.items() if value}, {}
    if (
        kind == "npz"
        and "classes" in (training or {})
        and len(_as_json(metadata).encode()) > LONGEST_COMMENT
    ):
        left = {"classes": training["classes"]}
        metadata[TRAINING] = _as_json(
            {key: value for key, value in training.items() if key not in left}
        )
    if kind == "npz":
        # as np.savez, with a comment, which np.load ignores
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in state_dict.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
            archive.comment = _as_json(metadata).encode() if metadata else b""
    elif kind == "safetensors":
        metadata["format"] = "pt"  # PyTorch's layout; some readers require it
        file.write(
            _safetensors().numpy.save(
                {k: np.ascontiguousarray(v) for k, v in state_dict.items()}, metadata
            )
        )
    else:
        raise ValueError(f"unknown kind {kind!r}: use npz or safetensors")
    return left


def _as_json(value):
    """JSON with unescaped letters, unless one of them is half a surrogate pair, which is no
    Unicode. Within JSON within a zip's comment a Chinese letter then has 3 bytes and not 7."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
