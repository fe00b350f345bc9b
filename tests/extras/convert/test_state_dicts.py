"""Reading other programs' weights: right where they are whole, one sentence where they are not,
nothing ever run."""

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from numdiff.errors import NumdiffError
from numdiff.extras.convert.files import load_state_dict, read_weights, write_state_dict
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.extras.convert.unet import (
    canonical_names,
    check_state_dict,
    guess_unet_options,
    unet_shapes,
)
from numdiff.nn import UNet
from tests.conftest import exhaustive
from tests.reference import stored

PT_FILES = [stored.FOLDER / f"weights_{kind}.pt" for kind in ("zip", "legacy", "container")]


def full_options(options):
    """All options of a UNet, with its defaults."""
    return (
        UNet(
            image_size=1, model_channels=32, channel_mult=(1,), num_res_blocks=1, device="cpu"
        ).options
        | options
    )


@pytest.fixture(scope="module")
def defaults():
    return full_options({})


def model_state(name, seed=1):
    info = stored.load(f"model_{name}")["info"]
    return stored.state_dict(info["shapes"], seed), info["options"]


# Files that PyTorch wrote -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_what_torch_save_wrote(kind):
    """All types, views, shared storages, expanded and transposed tensors, in both formats."""
    got, want = (
        load_state_dict(stored.FOLDER / f"weights_{kind}.pt"),
        stored.load("weights_expected"),
    )
    assert list(got) == [name for name in want if not name.startswith("container__")]
    for name, array in got.items():
        assert array.dtype == want[name].dtype and array.shape == want[name].shape, name
        assert np.array_equal(array, want[name]), name


@pytest.mark.parametrize("weights, factor", [("raw", 1), ("ema", 2)])
def test_container_and_prefix(weights, factor):
    got, want = (
        load_state_dict(stored.FOLDER / "weights_container.pt", weights),
        stored.load("weights_expected"),
    )
    assert list(got) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, array in got.items():
        assert np.array_equal(array, factor * want["container__" + name]), name


# A writer of `.pt` files for the tests: Python's pickler with the names of PyTorch's classes ------


class ForeignClass:
    """An object whose pickle asks for the global `text` ('module name') and calls it with
    `arguments`."""

    def __init__(self, text, *arguments):
        self.text, self.arguments = text, arguments


class Pickler(pickle._Pickler):  # the one written in Python, whose methods can be replaced
    def persistent_id(self, value):
        return value.identifier if isinstance(value, StorageId) else None

    def save(self, value, save_persistent_id=True):
        if isinstance(value, ForeignClass):
            self.write(b"c" + value.text.replace(" ", "\n").encode() + b"\n")
            if value.arguments != (None,):
                self.save(tuple(value.arguments))
                self.write(b"R")
        else:
            super().save(value, save_persistent_id)


class StorageId:
    def __init__(self, kind, key, count):
        self.identifier = ("storage", ForeignClass(f"torch {kind}", None), key, "cpu", count)


def tensor(kind, key, count, shape, strides=None, offset=0):
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return ForeignClass(
        "torch._utils _rebuild_tensor_v2",
        StorageId(kind, key, count),
        offset,
        shape,
        strides,
        False,
        OrderedDict(),
    )


def pickled(value):
    stream = io.BytesIO()
    Pickler(stream, 2).dump(value)
    return stream.getvalue()


def write_pt(path, pickle_bytes, storages=(), byteorder=b"little", compress=False, **more):
    with zipfile.ZipFile(
        path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    ) as archive:
        archive.writestr("archive/data.pkl", pickle_bytes)
        archive.writestr("archive/byteorder", byteorder)
        for key, data in dict(storages).items():
            archive.writestr(f"archive/data/{key}", data)
        for name, data in more.items():
            archive.writestr(f"archive/{name}", data)
    return path


def write_state_pt(path, state_dict):
    """A whole state dict as `torch.save` would write it."""
    entries = {
        name: tensor("FloatStorage", str(i), a.size, a.shape)
        for i, (name, a) in enumerate(state_dict.items())
    }
    return write_pt(
        path,
        pickled(OrderedDict(entries)),
        {str(i): a.astype("<f4").tobytes() for i, a in enumerate(state_dict.values())},
    )


# Hostile and damaged files ------------------------------------------------------------------------

COMMAND = "touch {}"


def hostile_pickles(canary):
    command = COMMAND.format(canary)
    line = command.encode() + b"\n"
    return {
        "reduce": (pickled({"a": ForeignClass("posix system", command)}), "posix.system"),
        "nested": (
            pickled(
                {
                    "model": {
                        "a": ForeignClass("builtins eval", f"__import__('os').system({command!r})")
                    }
                }
            ),
            "builtins.eval",
        ),
        "stack_global": (
            b"\x80\x04\x8c\x02os\x8c\x06system\x93(X"
            + struct.pack("<I", len(command))
            + command.encode()
            + b"tR.",
            "os.system",
        ),
        "import_only": (b"\x80\x02cantigravity\nfly\n.", "antigravity.fly"),
        "inst": (b"(S'" + command.encode() + b"'\niposix\nsystem\n.", "INST"),
        "obj": (b"(cposix\nsystem\nS'" + command.encode() + b"'\no.", "posix.system"),
        "newobj": (
            b"\x80\x02csubprocess\nPopen\n(X"
            + struct.pack("<I", len(line) - 1)
            + line[:-1]
            + b"t\x81.",
            "subprocess.Popen",
        ),
        "getattr": (
            pickled({"a": ForeignClass("builtins getattr", "x", "__class__")}),
            "builtins.getattr",
        ),
        "torch_load": (
            pickled({"a": ForeignClass("torch.storage _load_from_bytes", b"x")}),
            "torch.storage._load_from_bytes",
        ),
        "extension": (b"\x80\x02\x82\x01.", "EXT1"),
        "dotted": (b"\x80\x04\x8c\x0ctorch._utils\x8c\x09os.system\x93.", "torch._utils.os.system"),
    }


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("case", list(hostile_pickles("")))
def test_hostile_pickle_is_refused_and_not_run(tmp_path, case, kind):
    canary = tmp_path / "canary"
    data, name = hostile_pickles(canary)[case]
    path = tmp_path / "weights.pt"
    if kind == "zip":
        write_pt(path, data)
    else:
        path.write_bytes(data if data[:1] == b"\x80" else b"\x80\x02" + data)
    before = set(sys.modules)
    with pytest.raises(NumdiffError, match=name.replace(".", r"\.")) as caught:
        load_state_dict(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not canary.exists() and not {"antigravity"} & (set(sys.modules) - before)


def test_hostile_pickles_would_have_worked(tmp_path):
    """Python's own unpickler runs them, so the refusals above mean something."""
    canary = tmp_path / "canary"
    for case in ("reduce", "stack_global", "inst", "newobj"):
        data, _ = hostile_pickles(canary)[case]
        if case == "newobj":
            continue  # Popen without a shell wants a list; the refusal is what counts
        subprocess.run(
            [sys.executable, "-c", "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"],
            input=data,
            check=True,
        )
        assert canary.exists(), case
        canary.unlink()


def nested_tuples(depth):
    """A dict key whose hash takes 2^depth steps, in a few bytes."""
    return b"\x80\x02}(" + b")" + b"2\x86" * depth + b"K\x01u."


MALFORMED = {
    "beyond_storage": (
        pickled({"a": tensor("FloatStorage", "0", 4, (5,))}),
        b"\0" * 16,
        "beyond its storage",
    ),
    "offset": (
        pickled({"a": tensor("FloatStorage", "0", 4, (3,), offset=2)}),
        b"\0" * 16,
        "beyond its storage",
    ),
    "negative_stride": (
        pickled({"a": tensor("FloatStorage", "0", 4, (2,), (-1,), 3)}),
        b"\0" * 16,
        "not whole numbers",
    ),
    "storage_short": (
        pickled({"a": tensor("FloatStorage", "0", 4, (4,))}),
        b"\0" * 8,
        "shorter than announced",
    ),
    "storage_missing": (
        pickled({"a": tensor("FloatStorage", "7", 4, (4,))}),
        b"\0" * 16,
        "truncated, damaged",
    ),
    "storage_type": (
        pickled({"a": tensor("QInt8Storage", "0", 4, (4,))}),
        b"\0" * 16,
        "torch.QInt8Storage",
    ),
    "expanded_bomb": (
        pickled({"a": tensor("FloatStorage", "0", 1, (1 << 40,), (0,))}),
        b"\0" * 4,
        "far larger than the file",
    ),
    "many_dimensions": (
        pickled({"a": tensor("FloatStorage", "0", 1, (1,) * 70)}),
        b"\0" * 4,
        "do not fit",
    ),
    "hash_bomb": (nested_tuples(200), b"", "dict key"),
    "memo_bomb": (b"\x80\x02}r\xff\xff\xff\xff.", b"", "no state dict"),
    "length_bomb": (
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        b"",
        "truncated, damaged",
    ),
    "empty_stack": (b"\x80\x02.", b"", "truncated, damaged"),
    "no_end": (b"\x80\x02}", b"", "truncated, damaged"),
    "module": (b"\x80\x02(X\x06\0\0\0moduleK\x01tQ.", b"", "not a storage"),
    "not_a_dict": (pickled([1, 2]), b"", "no dict of tensors"),
    "optimizer_only": (
        pickled({"optimizer": {"lr": 1.0}, "step": 3}),
        b"",
        "it holds optimizer, step",
    ),
    "deep": (
        pickled({"model": {"model": {"model": {"model": {"model": {}}}}}}),
        b"",
        "no dict of tensors",
    ),
}


@pytest.mark.parametrize("case", list(MALFORMED))
def test_malformed_pickle(tmp_path, case):
    data, storage, message = MALFORMED[case]
    path = write_pt(tmp_path / "weights.pt", data, {"0": storage})
    with pytest.raises(NumdiffError, match=message) as caught:
        load_state_dict(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_zip_files_that_are_not_weights(tmp_path):
    good = pickled({"a": tensor("FloatStorage", "0", 2, (2,))})
    path = tmp_path / "weights.pt"

    def refused(message):
        with pytest.raises(NumdiffError, match=message):
            load_state_dict(path)

    write_pt(path, good, {"0": b"\0" * 8}, byteorder=b"big")
    refused("big-endian")
    write_pt(path, good, {"0": b"\0" * 8}, **{"constants.pkl": b""})
    refused("TorchScript")
    write_pt(path, good, {"0": b"\0" * 8}, compress=True)
    refused("compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused("without PyTorch's data.pkl")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (b"hello, this is not a model" * 30, "not a file of weights that numdiff knows"),
        (pickle.dumps({"a": 1}), "not one of torch.save"),
        (b"PK\x03\x04", "truncated, damaged"),
        (b"\x80", "truncated, damaged"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".npz", ".bin"])
def test_files_that_are_something_else(tmp_path, content, message, suffix):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(NumdiffError, match=message):
        load_state_dict(path)


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(NumdiffError, match="does not exist"):
        load_state_dict(tmp_path / "nothing.pt")
    with pytest.raises(NumdiffError, match="is a folder"):
        load_state_dict(tmp_path)


def test_npz_with_objects_is_refused(tmp_path):
    canary = tmp_path / "canary"

    class Hostile:
        def __reduce__(self):
            return os.system, (COMMAND.format(canary),)

    np.savez(tmp_path / "w.npz", a=np.array([Hostile()], object))
    with pytest.raises(NumdiffError):
        load_state_dict(tmp_path / "w.npz")
    assert not canary.exists()
    np.savez(tmp_path / "w.npz", a=np.array(["text"]))
    with pytest.raises(NumdiffError, match="not an array of numbers"):
        load_state_dict(tmp_path / "w.npz")


def damaged_copies(data, rng, count):
    """Copies of a file, each with a few bytes changed, cut off, doubled or taken out."""
    for i in range(count):
        copy = bytearray(data)
        if i % 3 == 0:
            yield copy[: rng.integers(len(copy))]
            continue
        for _ in range(rng.integers(1, 4)):
            if i % 3 == 1:
                copy[rng.integers(len(copy))] = rng.integers(256)
            else:
                start = rng.integers(len(copy) - 1)
                stop = start + rng.integers(1, 9)
                copy[start:stop] = [b"", bytes(copy[start:stop]) * 2, b"\xff" * 8, b"\0" * 3][
                    rng.integers(4)
                ]
        yield copy


@exhaustive
@pytest.mark.parametrize("kind", ["zip", "legacy", "container", "npz", "safetensors"])
def test_random_damage_raises_nothing_but_numdiff_errors(tmp_path, rng, kind):
    if kind in ("npz", "safetensors"):
        stream = io.BytesIO()
        write_state_dict(
            stream,
            {"a.weight": np.ones((3, 4), np.float32), "b": np.arange(5, dtype=np.float32)},
            kind,
            {"image_size": 8},
        )
        data = stream.getvalue()
    else:
        data = (stored.FOLDER / f"weights_{kind}.pt").read_bytes()
    path, refused = tmp_path / f"weights.{kind if kind in ('npz', 'safetensors') else 'pt'}", 0
    for copy in damaged_copies(data, rng, 400):
        path.write_bytes(copy)
        try:
            arrays = load_state_dict(path)
        except NumdiffError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            refused += 1
        else:
            assert all(isinstance(a, np.ndarray) for a in arrays.values())
    assert refused > 150


# Other formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_round_trip(tmp_path, kind):
    state, options = model_state("classes_updown")
    with open(tmp_path / f"w.{kind}", "wb") as file:
        write_state_dict(file, state, kind, options)
    got, settings = read_weights(tmp_path / f"w.{kind}")
    assert set(got) == set(state) and all(np.array_equal(got[name], state[name]) for name in state)
    assert settings == options


def test_safetensors_types(tmp_path):
    """bfloat16 has no NumPy type; an independent writer of the format: length, JSON, data."""
    values = np.array([1.0, -2.5, 3.0e38], np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    header = (
        b'{"b":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},'
        b'"h":{"dtype":"F16","shape":[1,1],"data_offsets":[6,8]}}'
    )
    header += b" " * (-len(header) % 8)
    path = tmp_path / "w.safetensors"
    path.write_bytes(
        struct.pack("<Q", len(header)) + header + bits + np.array([0.5], "<f2").tobytes()
    )
    got = load_state_dict(path)
    assert np.allclose(got["b"], values, rtol=2**-7) and got["b"].dtype == np.float32
    assert got["h"].shape == (1, 1) and got["h"][0, 0] == 0.5


def test_safetensors_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(NumdiffError, match="pip install safetensors"):
        load_state_dict(tmp_path / "w.safetensors")


def unet_cu_bytes(options, state_dict, has_moments=0, has_random=0):
    header = np.full(256, 77, "<i4")  # what the program does not set is whatever was in memory
    header[:10] = [
        12345678,
        32,
        options["in_channels"],
        options["model_channels"],
        options["in_channels"],
        options["image_size"],
        options["image_size"],
        1000,
        has_moments,
        has_random,
    ]
    parameters = (
        np.concatenate([a.reshape(-1) for a in state_dict.values()]).astype("<f4").tobytes()
    )
    return header.tobytes() + parameters * (1 + 2 * has_moments) + b"random" * has_random


@pytest.fixture(scope="module")
def unet_cu():
    options = {
        **stored.SEED_MODEL,
        "image_size": 32,
        "model_channels": 32,
        "attention_resolutions": [8, 4],
    }
    shapes = unet_shapes(full_options(options))
    return options, {name: stored.weight(name, shape, 5) for name, shape in shapes.items()}


@pytest.mark.parametrize("extra", [0, 1], ids=["python", "cuda"])
def test_unet_cu_bin(tmp_path, unet_cu, extra):
    """As its Python writes it (parameters only) and as its CUDA program does (moments and random
    states follow)."""
    options, state = unet_cu
    path = tmp_path / "model.bin"
    path.write_bytes(unet_cu_bytes(options, state, extra, extra))
    got, settings = read_weights(path)
    assert settings["use_new_attention_order"] and settings["max_period"] == 1000
    assert settings["num_head_channels"] == 32
    assert settings["attention_resolutions"] == [8, 4] and settings["image_size"] == 32
    assert list(got) == list(state) and all(
        np.array_equal(got[name], state[name]) for name in state
    )


def test_unet_cu_bin_damaged(tmp_path, unet_cu, rng):
    options, state = unet_cu
    data = unet_cu_bytes(options, state)
    path = tmp_path / "model.bin"
    for cut in (3, 100, 1024, len(data) // 2, len(data) - 4):
        path.write_bytes(data[:cut])
        with pytest.raises(NumdiffError):
            load_state_dict(path)
    path.write_bytes(data + b"\0\0\0\0")
    with pytest.raises(NumdiffError, match="bytes"):
        load_state_dict(path)
    for _ in range(100):
        header = bytearray(data[:1024])
        for _ in range(3):
            header[rng.integers(40)] = rng.integers(256)
        path.write_bytes(header + data[1024:2048])
        with pytest.raises(NumdiffError):
            load_state_dict(path)


# Names, shapes, options ---------------------------------------------------------------------------


class ShapedTensor:
    def __init__(self, shape):
        self.shape = tuple(shape)


@pytest.mark.parametrize("name", [*stored.SHAPES, *stored.MODELS])
def test_options_from_shapes(defaults, name):
    """Names and shapes of the twin, full-size and tiny: guessed, and found again from the guess."""
    if name in stored.SHAPES:
        shapes, options = stored.load_shapes()[name], stored.SHAPES[name]
    else:
        info = stored.load(f"model_{name}")["info"]
        shapes, options = info["shapes"], info["options"]
    shapes = {k: tuple(v) for k, v in shapes.items()}
    guessed = guess_unet_options(
        {k: ShapedTensor(v) for k, v in shapes.items()}, options["image_size"]
    )
    for key, value in options.items():
        if key in guessed and not (key == "conv_resample" and options.get("resblock_updown")):
            assert guessed[key] == value, key
    assert list(unet_shapes({**defaults, **guessed}).items()) == list(shapes.items())


@pytest.mark.parametrize("name", list(stored.MODELS))
def test_shapes_are_those_of_the_model(name):
    model = UNet(**stored.MODELS[name], device="cpu")
    assert {k: v.shape for k, v in to_torch_layout(model.arrays()).items()} == unet_shapes(
        model.options
    )
    assert [e["name"] for e in model.parameters.index] == list(unet_shapes(model.options))


def test_layout():
    conv = np.arange(2 * 3 * 3 * 3).reshape(2, 3, 3, 3).astype(np.float16)
    torch_layout = {
        "a.op.weight": conv,
        "a.1.qkv.weight": np.ones((6, 2, 1)),
        "a.proj_out.weight": np.ones((2, 2, 1)),
        "emb_layers.1.weight": np.ones((4, 2)),
        "norm.bias": np.ones(4),
    }
    ours = to_numdiff_layout(torch_layout)
    assert (
        ours["a.op.weight"][1, 2, 0, 1] == conv[1, 1, 2, 0]
        and ours["a.op.weight"].dtype == np.float32
    )
    assert ours["a.1.qkv.weight"].shape == (6, 2) and ours["emb_layers.1.weight"].shape == (4, 2)
    back = to_torch_layout(ours)
    assert all(
        np.array_equal(back[k], v) and back[k].shape == v.shape for k, v in torch_layout.items()
    )


def test_names_of_unet_cu():
    """The state dict of its train_unet.py, behind torch.compile's prefix."""
    mine = [
        "time_embed.0.weight",
        "input_blocks.1.0.in_layers.0.weight",
        "input_blocks.1.0.in_layers.2.bias",
        "input_blocks.1.0.emb_layers.1.weight",
        "input_blocks.1.0.out_layers.0.bias",
        "middle_block.0.out_layers.3.weight",
        "output_blocks.11.0.skip_connection.weight",
        "middle_block.1.norm.weight",
        "output_blocks.3.1.qkv.weight",
        "input_blocks.7.1.proj_out.bias",
        "out.2.weight",
    ]
    theirs = [
        "time_embed.0.weight",
        "input_blocks.1.0.gn1.weight",
        "input_blocks.1.0.cv3_1.bias",
        "input_blocks.1.0.l_emb.weight",
        "input_blocks.1.0.gn2.bias",
        "middle_block.0.cv3_2.weight",
        "output_blocks.11.0.skip_connection.weight",
        "middle_block.1.gn.weight",
        "output_blocks.3.1.qkv.weight",
        "input_blocks.7.1.proj.bias",
        "out.2.weight",
    ]
    renamed, options = canonical_names({f"_orig_mod.{name}": i for i, name in enumerate(theirs)})
    assert renamed == {name: i for i, name in enumerate(mine)}
    assert options == {
        "num_head_channels": 32,
        "use_new_attention_order": True,
        "max_period": 1000.0,
    }
    assert canonical_names({f"module.{name}": i for i, name in enumerate(mine)}) == (renamed, {})
    with pytest.raises(NumdiffError, match="two of its tensors"):
        canonical_names({"a": 1, "module.a": 2})


def test_what_does_not_fit_is_named(defaults):
    state, options = model_state("plain")
    options = {**defaults, **options}
    assert list(check_state_dict(dict(reversed(state.items())), options)) == list(state)
    two_axes = {k: v[..., 0] if k.endswith("qkv.weight") else v for k, v in state.items()}
    check_state_dict(two_axes, options)
    wrong = {**state, "out.2.weight": np.ones((3, 5, 3, 3))}
    with pytest.raises(
        NumdiffError,
        match=r"out\.2\.weight has the shape \(3, 5, 3, 3\) in the file and \(3, 64, 3, 3\)",
    ):
        check_state_dict(wrong, options)
    less = {k: v for k, v in state.items() if "time_embed" not in k and not k.startswith("out.0.")}
    with pytest.raises(
        NumdiffError, match=r"missing 6 \(time_embed\.0\.weight, .*, …\) and unexpected 1 \(extra\)"
    ):
        check_state_dict({**less, "extra": np.ones(1)}, options)
    with pytest.raises(
        NumdiffError, match=r"missing 6 \(time_embed\.0\.weight, .*, …\); save the whole model"
    ):
        guess_unet_options(less)
    # whatever is missing or has another shape, the answer is an error or a guess, never a crash
    for name in state:
        for damage in (None, np.ones(5), np.ones((0, 1)), np.ones((2, 2, 2, 2))):
            damaged = {
                k: v if k != name else damage
                for k, v in state.items()
                if k != name or damage is not None
            }
            try:
                guessed = guess_unet_options(damaged, 8)
            except NumdiffError:
                continue
            with pytest.raises(NumdiffError):
                check_state_dict(damaged, {**defaults, **guessed})


def test_what_does_not_fit_convnext_blocks_is_named(defaults):
    """Whatever is missing or has another shape, the answer is an error or a guess, never a crash."""
    model = UNet(
        image_size=8,
        model_channels=32,
        channel_mult=(1, 2),
        num_res_blocks=1,
        attention_resolutions=(),
        block="convnext",
        device="cpu",
    )
    state = to_torch_layout(model.arrays())
    for name in state:
        for damage in (None, np.ones(5), np.ones((2, 2, 2, 2))):
            damaged = {
                k: v if k != name else damage
                for k, v in state.items()
                if k != name or damage is not None
            }
            with pytest.raises(NumdiffError):
                check_state_dict(damaged, {**defaults, **guess_unet_options(damaged, 8)})


def test_state_dict_pt_of_a_whole_unet(tmp_path):
    state, _ = model_state("updown_new_order")
    path = write_state_pt(tmp_path / "unet.pt", state)
    got = load_state_dict(path)
    assert list(got) == list(state) and all(np.array_equal(got[k], state[k]) for k in state)
