"""Damaged and hostile files of every kind that numdiff reads: each is read, or refused in one
sentence.

    python -m tests.data.fuzz                        # 300 files of each kind, about a minute and a half
    python -m tests.data.fuzz --cases 5000 --seed 3 stats npz

A case is a number: the same one makes the same file. A case fails by another exception than a
`NumdiffError`, by a message that is not one printable sentence, by more than 5 s, or by more memory
than `MEMORY`. Each runs in a process whose memory is limited, and which is ended where it hangs.
`test_fuzz.py` runs a few of each.
"""

import argparse
import copy
import io
import json
import os
import pathlib
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib

import h5py
import numpy as np

from numdiff import plots
from numdiff.data.dataset import open_dataset
from numdiff.errors import NumdiffError, printable
from numdiff.extras.convert.models import convert
from numdiff.extras.evaluate.sources import Images, open_source
from numdiff.nn import DiT, UNet
from numdiff.training.checkpoint import (
    LAST_LINE,
    LAST_LINE_BYTES,
    load_checkpoint,
    save_checkpoint,
    why_damaged,
)
from numdiff.training.model_files import load, write_model_file
from numdiff.training.options import TrainOptions, resolve, resolve_resumed
from numdiff.training.report import STATS, read_stats, truncate_stats

SECONDS, HANGS, MEMORY = 5, 20, 1 << 30
JUNK = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    7,
    255,
    4097,
    65536,
    2**31,
    2**53,
    2**63,
    10**400,
    -(2**70),
    0.5,
    -0.5,
    1e-300,
    1e308,
    "",
    "x",
    "unet",
    "dit",
    "\x1b[31m\udc80\0\n",
    "é" * 5000,
    [],
    [[]],
    [1],
    ["x"],
    [None],
    {},
    {"x": 1},
    [2**62] * 3,
    list(range(5000)),
    "NaN",
    "Infinity",
    "-1e999",
)
# what JSON's text may say, unquoted
LITERALS = {'"NaN"': "NaN", '"Infinity"': "Infinity", '"-1e999"': "-1e999"}
UNET = {
    "image_size": 8,
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [4],
}
DIT = {
    "image_size": 8,
    "in_channels": 3,
    "patch_size": 4,
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 3,
}


# Mutations ----------------------------------------------------------------------------------------


def of_bytes(rng, data, head=4096):
    """Some bytes changed, most of them near the beginning, where formats keep their sizes; or cut,
    or doubled."""
    data = bytearray(data)
    kind = rng.random()
    if kind < 0.1:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if kind < 0.15:
        at = rng.randrange(len(data))
        return bytes(data[:at] + data[at : at + rng.randrange(1, 200)] + data[at:])
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(min(head, len(data)) if rng.random() < 0.7 else len(data))
        width = rng.choice((1, 1, 1, 2, 4, 8))
        value = rng.choice(
            (
                bytes(width),
                b"\xff" * width,
                (1 << (8 * width - 1)).to_bytes(width, "little"),
                rng.randbytes(width),
            )
        )
        data[at : at + width] = value
    return bytes(data)


def of_json(rng, value):
    """A copy of a JSON value with one to three changes anywhere in it."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return rng.choice(JUNK)
        holder, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.15:
            del holder[key]
        elif kind < 0.3 and isinstance(holder, dict):
            holder[rng.choice(("x", "device", "backend", "self", "\x1b[2J", "seed", "kind"))] = (
                rng.choice(JUNK)
            )
        elif kind < 0.35:
            holder[key] = [copy.deepcopy(holder[key])] * rng.choice((1, 2, 2000))
        else:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
    return value


def _places(value):
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


def as_text(rng, value):
    """The JSON text of a value, now and then with words that are no JSON, or nested without end."""
    if rng.random() < 0.03:
        return "[" * 200_000 + "]" * 200_000
    text = json.dumps(value)
    for quoted, word in LITERALS.items():
        text = text.replace(quoted, word)
    return text


# Kinds of files: make(rng, folder) -> what to do with it ------------------------------------------


def dataset(rng, folder):
    path, images = (
        folder / "a.h5",
        np.arange(40 * 8 * 8 * 3, dtype=np.uint32).astype(np.uint8).reshape(40, 8, 8, 3),
    )
    version = rng.choice(
        (("earliest", "v108"), ("v108", "latest"), ("v110", "v110"), ("latest", "latest"))
    )
    with h5py.File(path, "w", libver=version) as file:
        chunks, growing = rng.choice(
            (
                (None, None),
                ((16, 8, 8, 3), None),
                ((16, 8, 8, 3), (None, 8, 8, 3)),
                ((9, 4, 8, 3), (None,) * 4),
            )
        )
        packing = rng.choice((None, "gzip", "lzf")) if chunks else None
        file.create_dataset(
            "images",
            data=images,
            chunks=chunks,
            maxshape=growing,
            compression=packing,
            shuffle=bool(chunks) and rng.random() < 0.3,
            fletcher32=bool(chunks) and rng.random() < 0.3,
        )
        file["labels"] = (
            np.arange(40) % 3 if rng.random() < 0.8 else np.array([rng.choice((-1, 2**40, 5))] * 40)
        )
        file.attrs.create("classes", ["a", "b", "\x1b[31mc"], dtype=h5py.string_dtype())
    data = path.read_bytes()
    if rng.random() < 0.3:  # a dimension, an address, a length: any number that stands in it
        number = rng.choice((40, 8, 3, 16, 64 * 3, len(data), 7680))
        changed = rng.choice((0, 1, 2**31, 2**40, 2**63, 10**6, number + 1)).to_bytes(8, "little")
        data = data.replace(number.to_bytes(8, "little"), changed, rng.choice((1, 1, 2, -1)))
    path.write_bytes(of_bytes(rng, data))

    def use():
        with open_dataset(path) as found:
            found.statistics()
            found.read([0, len(found) - 1])
            if found.labels is not None:
                found.class_counts()

    return use


def signed(data):
    """HDF5's bytes with the last line that a checkpoint ends with."""
    return data + LAST_LINE % zlib.crc32(data)


def _model(rng, folder, cache={}):  # noqa: B006 - made once
    kind = rng.choice(("unet", "dit"))
    if kind not in cache:
        model = UNet(**UNET, device="cpu") if kind == "unet" else DiT(**DIT, device="cpu")
        write_model_file(
            folder / "base.h5",
            model.options,
            model.arrays(),
            {"steps": 10},
            5,
            kind,
            classes=["a", "b"],
        )
        cache[kind] = (*load_checkpoint(folder / "base.h5"), (folder / "base.h5").read_bytes())
    return cache[kind]


def checkpoint(rng, folder):
    path, (buffers, meta, data) = folder / "checkpoint-00000001.h5", _model(rng, folder)
    if rng.random() < 0.2:
        path.write_bytes(signed(of_bytes(rng, data[:-LAST_LINE_BYTES])))
    else:
        if rng.random() < 0.2:
            flat = buffers["parameters"]
            buffers = rng.choice(
                (
                    {},
                    {"parameters": flat[:-64]},
                    {"parameters": flat.astype(np.float64)},
                    {"parameters": flat[:, None]},
                    {"ema": flat},
                    {"parameters": np.zeros(())},
                    {"parameters": flat, "ema": flat[:10]},
                    {"parameters": flat.astype("S4")},
                )
            )
        save_checkpoint(path, buffers, {})
        with h5py.File(path, "r+") as file:
            del file["meta"]
            said = of_json(rng, meta)
            if rng.random() < 0.5:  # options alone: the most that a meta says
                said = {
                    **meta,
                    **{
                        key: of_json(rng, meta[key])
                        for key in ("model_options", "diffusion")
                        if rng.random() < 0.7
                    },
                }
            file["meta"] = np.bytes_(as_text(rng, said).encode("utf-8", "replace"))
        path.write_bytes(signed(path.read_bytes()))

    def use():
        why_damaged(path)
        load(path, "cpu", rng.choice(("ema", "raw")))
        convert(path, folder / rng.choice(("b.npz", "b.safetensors", "b.h5")))

    return use


def options(rng, folder):
    base = resolve({"model": rng.choice(("unet", "dit")), "device": "cpu"}).to_json()
    text = as_text(rng, of_json(rng, base)).encode("utf-8", "replace")
    (folder / "options.json").write_bytes(text if rng.random() < 0.9 else of_bytes(rng, text))
    return lambda: resolve_resumed(TrainOptions.load(folder / "options.json"), {"device": "cpu"})


def stats(rng, folder):
    lines = []
    for step in (10, 20, 30, 40):
        line = {"step": step, "loss": 0.5, "gradient_norm": 1.0, "losses": [0.5 / step] * 10}
        text = as_text(rng, of_json(rng, line) if rng.random() < 0.6 else line)
        lines.append(
            text.encode("utf-8", "replace")
            + rng.choice((b"\n", b"\n", b"\n", b"", b"\r\n", b"\0\n"))
        )
    data = b"".join(lines)
    (folder / STATS).write_bytes(data if rng.random() < 0.7 else of_bytes(rng, data))

    def use():
        found = read_stats(folder)
        truncate_stats(folder / STATS, 25)
        assert len(read_stats(folder)[0]) <= len(found[0])
        if rng.random() < 0.2:  # it takes a while
            plots.loss_curve(folder / "loss.png", *found)

    return use


def _odd_array(rng, array):
    numbers = np.zeros(3) if array.dtype.kind == "U" else array
    return rng.choice(
        (
            np.array("x"),
            np.zeros(0),
            np.zeros((5, 0)),
            array[None],
            numbers.astype("c16"),
            np.full((4, 4), 1e308),
            np.full(5, np.nan),
        )
    )


def _odd_npy(rng, data):
    """An .npy whose header is damaged in one of the ways that a parser of Python's notation minds."""
    old, new = rng.choice(
        (
            (b"(", b"(" * 5000),
            (b"'shape': (", b"'shape': (10000000000, "),
            (b"<f", b"|O"),
            (b"5", b"5" * rng.randrange(1, 40)),
            (b"'", b""),
            (b"False", b"True "),
            (b"v", b"\xff"),
            (b"shape", b"shap\0"),
            (b"", b""),
        )
    )
    return data.replace(old, new, 1) if old else of_bytes(rng, data, 128)


def npz(rng, folder):
    path, packing = folder / "a.npz", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    features = np.arange(60, dtype=np.float32).reshape(12, 5) % 7
    record = {
        "count": 12,
        "seed": 1,
        "steps": 5,
        "sampler": "ddim",
        "weights": "ema",
        "extractor": "mine",
    }
    said = np.array(as_text(rng, of_json(rng, record) if rng.random() < 0.5 else record)[:100_000])
    arrays = rng.choice(
        (
            {"arr_0": np.zeros((6, 16, 16, 3), np.uint8)},
            {"features": features, "spatial": features},
            {"mu": np.zeros(5), "sigma": np.eye(5), "mu_s": np.zeros(5), "sigma_s": np.eye(5)},
            {"arr_0": features},
        )
    )
    with zipfile.ZipFile(path, "w", packing) as file:
        for name, array in {**arrays, "numdiff": said}.items():
            stream = io.BytesIO()
            array = array if rng.random() < 0.9 else _odd_array(rng, array)
            np.lib.format.write_array(stream, array, allow_pickle=False)
            data = stream.getvalue()
            file.writestr(name + ".npy", data if rng.random() < 0.6 else _odd_npy(rng, data))
    if rng.random() < 0.3:
        path.write_bytes(of_bytes(rng, path.read_bytes()))

    def use():
        found = open_source(path)
        if isinstance(found, Images):
            for _ in found.batches(4):
                pass
        else:
            found.statistics()

    return use


def safetensors(rng, folder, cache={}):  # noqa: B006 - made once
    import safetensors.numpy

    path, kind = folder / "a.safetensors", rng.choice(("unet", "dit"))
    if kind not in cache:
        while kind not in cache:
            _, meta, data = _model(rng, folder)
            (folder / "b.h5").write_bytes(data)
            convert(folder / "b.h5", path)
            cache[meta["model"]] = path.read_bytes()
    data = cache[kind]
    if rng.random() < 0.5:
        path.write_bytes(of_bytes(rng, data, 2000))
    else:
        arrays = safetensors.numpy.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        for key in metadata:
            if key.startswith("numdiff"):
                said = as_text(rng, of_json(rng, json.loads(metadata[key])))
                metadata[key] = said.encode("utf-8", "replace").decode()
        path.write_bytes(safetensors.numpy.save(arrays, metadata))

    def use():
        result = convert(path, folder / "c.h5")
        load(folder / "c.h5", "cpu")
        return result

    return use


KINDS = {
    function.__name__: function
    for function in (dataset, checkpoint, options, stats, npz, safetensors)
}


# Running ------------------------------------------------------------------------------------------


def run_case(kind, number, folder):
    """None, or how the case failed."""
    rng = random.Random(f"{kind} {number}")
    use = KINDS[kind](rng, folder)
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use()
    except NumdiffError as error:
        text = str(error)
        if not (text == printable(text) and text.endswith((".", ")")) and len(text) < 3000):
            return f"is not one sentence: {text[:500]!r}"
    except MemoryError:
        return "takes more memory than it may"
    except Exception:
        return traceback.format_exc()
    seconds = time.monotonic() - started
    return f"takes {seconds:.1f} s" if seconds > SECONDS else None


def run_apart(kind, numbers):
    """[(number, how it failed)] of cases in separate processes, many a process."""
    failed, numbers = [], list(numbers)
    while numbers:
        done = _run_some(kind, numbers, failed)
        numbers = numbers[done:]
    return failed


def _run_some(kind, numbers, failed):
    """Run cases until one ends the process; returns how many were run."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with tempfile.TemporaryDirectory() as folder:
            for number in numbers:
                signal.alarm(HANGS)  # its default ends the process
                os.write(
                    writing,
                    json.dumps(run_case(kind, number, pathlib.Path(folder))).encode()[:60_000]
                    + b"\n",
                )
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answers:
        results = [json.loads(line) for line in answers]
    _, status = os.waitpid(child, 0)
    failed += [(number, fault) for number, fault in zip(numbers, results, strict=False) if fault]
    if len(results) < len(numbers):
        ended = (
            os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        )
        failed.append(
            (
                numbers[len(results)],
                "hangs" if ended == signal.SIGALRM else f"ends the process: {ended}",
            )
        )
    return len(results) + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help=", ".join(KINDS)
    )
    parser.add_argument("--cases", type=int, default=300, help="of each kind")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first case, in units of a million"
    )
    arguments = parser.parse_args()
    for kind in arguments.kinds or KINDS:
        start = arguments.seed * 10**6
        failed = run_apart(kind, range(start, start + arguments.cases))
        print(f"{kind:<12} {arguments.cases:,} cases, {len(failed)} failed", flush=True)
        for number, fault in failed[:10]:
            print(f"    {number}: {fault}", flush=True)


if __name__ == "__main__":
    main()
