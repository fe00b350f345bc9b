"""`numdiff convert` on files of a DiT that are damaged or were made to do harm: one sentence each,
and nothing left behind."""

import functools
import io
import json
import struct
import zipfile

import numpy as np
import pytest

from numdiff.extras.convert.files import load_state_dict, write_state_dict
from tests.command import refusal_of, run
from tests.extras.convert.weights import ForeignClass, pickled, tensor
from tests.extras.importers.sources import zip_of
from tests.reference import stored

WHOLE = (stored.FOLDER / "dit_state.pt").read_bytes()
stored_zip = functools.partial(zip_of, method=zipfile.ZIP_STORED)
NAME, SIZE = "blocks.0.mlp.fc1.bias", 48


def state():
    return load_state_dict(stored.FOLDER / "dit_state.pt")


def saved(kind, **changed):
    """The bytes of the state dict as npz or safetensors, with some of its arrays changed."""
    stream = io.BytesIO()
    write_state_dict(stream, {**state(), **changed}, kind)
    return stream.getvalue()


def truncated(rng):
    for cut in (0, 1, 4, 30, *rng.integers(1, len(WHOLE), 16)):
        yield WHOLE[:cut]


def flipped(rng):
    """One bit, anywhere; then a few in the pickle, in the zip's directory and in its last record."""
    directory = WHOLE.index(b"PK\x01\x02")
    for start, stop, count, flips in (
        (0, len(WHOLE), 20, 1),
        (0, 3000, 40, 3),
        (directory, len(WHOLE) - 22, 15, 3),
        (len(WHOLE) - 22, len(WHOLE), 15, 3),
    ):
        for _ in range(count):
            copy = bytearray(WHOLE)
            for place in rng.integers(start, stop, flips):
                copy[place] ^= 1 << rng.integers(8)
            yield bytes(copy)


def slipping(rng):
    """Entries that a careless program would write outside of its folder, or read from there."""
    weights = pickled({"a": tensor("FloatStorage", "../../../escaped", 2, (2,))})
    for prefix in ("../", "/tmp/", "../../../../../../", "a/../../", "C:\\", "archive/../"):
        yield stored_zip(
            {f"{prefix}escaped": b"x", "archive/data.pkl": weights, "archive/data/0": bytes(8)}
        )
        yield stored_zip({f"{prefix}data.pkl": weights, f"{prefix}data/0": bytes(8)})


def wrong_types(rng):
    for dtype in (np.int64, np.int32, np.uint8, np.bool_):
        yield saved("npz", **{NAME: np.ones(SIZE, dtype)})
    for array in (np.ones(SIZE, np.complex64), np.full(SIZE, "weights"), np.array([None] * SIZE)):
        buffer = io.BytesIO()
        np.savez(buffer, **{**state(), NAME: array})  # numdiff itself writes no objects
        yield buffer.getvalue()
    for kind in ("QInt8Storage", "ComplexFloatStorage", "LongStorage", "BoolStorage"):
        yield stored_zip(
            {"a/data.pkl": pickled({NAME: tensor(kind, "0", 8, (8,))}), "a/data/0": bytes(64)}
        )


def huge(rng):
    """Sizes that no memory holds, which nothing may try to get."""
    for count in (1 << 33, 1 << 40, 1 << 62, (1 << 63) - 1):
        for facts in ((count, (count,)), (1, (count,), (0,))):
            data = pickled({NAME: tensor("FloatStorage", "0", *facts)})
            yield stored_zip({"a/data.pkl": data, "a/data/0": bytes(8)})
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count},)}}".encode()
        array = b"\x93NUMPY\x01\x00v\x00" + text.ljust(117) + b"\n" + bytes(64)
        yield stored_zip({f"{NAME}.npy": array})
        header = json.dumps(
            {NAME: {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
        ).encode()
        yield struct.pack("<Q", len(header)) + header + bytes(64)
        yield struct.pack("<Q", count) + b"{" + bytes(64)


def hostile(rng):
    """Names that weights do not need, in several places."""
    weights = {NAME: tensor("FloatStorage", "0", 2, (2,))}
    for text in (
        "os system",
        "builtins exec",
        "builtins __import__",
        "subprocess Popen",
        "torch.jit load",
        "numpy.core.multiarray _reconstruct",
        "pathlib PosixPath",
        "__main__ Model",
    ):
        called = ForeignClass(text, "touch escaped")
        for content in ({"ema": {NAME: called}}, {"ema": weights, "args": called}):
            yield stored_zip({"a/data.pkl": pickled(content), "a/data/0": bytes(8)})


def of_other_shapes(rng):
    for name, array in state().items():
        if name != "pos_embed":
            yield saved(
                "npz", **{name: np.ones((*array.shape[:-1], array.shape[-1] + 1), np.float32)}
            )


@pytest.mark.parametrize(
    "kind", [truncated, flipped, slipping, wrong_types, huge, hostile, of_other_shapes]
)
def test_one_sentence_each(tmp_path, monkeypatch, rng, kind):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    refused = total = 0
    for total, data in enumerate(kind(rng), 1):
        (folder / "w.pt").write_bytes(data)
        result = run("convert w.pt out.h5 --num-heads 3")
        found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
        # among the numbers, where a bit is only another number
        if result.exit_code == 0 and kind is flipped:
            assert found == ["a/b/out.h5", "a/b/w.pt"]
            (folder / "out.h5").unlink()
            continue
        refused += 1
        assert result.exit_code in (1, 2) and found == ["a/b/w.pt"], total
        (line,) = result.output.splitlines()
        assert line.startswith("Error: ") and len(line) < 600 and line.isprintable(), (total, line)
        if kind is hostile:
            assert "which is not on the list of what weights need, and was not run" in line
        if kind is wrong_types and total <= 4:
            assert "in the file, but weights are float16" in line
    assert total >= 10 and refused >= (total if kind is not flipped else total // 2)


def test_a_shape_is_named_on_both_sides(tmp_path):
    (tmp_path / "w.npz").write_bytes(saved("npz", **{NAME: np.ones(200, np.float32)}))
    sentence = f"{NAME} has the shape (200,) in the file and ({SIZE},) in the model"
    assert sentence in refusal_of("convert w.npz m.h5 --num-heads 3")
