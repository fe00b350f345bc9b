"""Reading other programs' weights: right where they are whole, one sentence where they are not,
nothing ever run."""

import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest

from numdiff.errors import NumdiffError
from numdiff.extras.convert.files import load_state_dict, read_weights
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.extras.convert.unet import (
    canonical_names,
    check_state_dict,
    guess_unet_options,
    unet_shapes,
)
from numdiff.nn import UNet
from tests.conftest import exhaustive
from tests.extras.convert.weights import (
    ForeignClass,
    damaged_copies,
    damaged_states,
    of_shapes,
    pickled,
    same,
    tensor,
    write_pt,
    write_weights,
)
from tests.extras.importers.sources import zip_of
from tests.models import small_unet
from tests.reference import stored

PT_FILES = [stored.FOLDER / f"weights_{kind}.pt" for kind in ("zip", "legacy", "container")]


def full_options(options):
    """All options of a UNet, with its defaults."""
    return small_unet(image_size=1, attention_resolutions=(16,)).options | options


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
    got = load_state_dict(stored.FOLDER / f"weights_{kind}.pt")
    want = stored.load("weights_expected")
    want = {name: want[name] for name in want if not name.startswith("container__")}
    assert same(got, want)
    assert all(array.dtype == want[name].dtype for name, array in got.items())


@pytest.mark.parametrize("weights, factor", [("raw", 1), ("ema", 2)])
def test_container_and_prefix(weights, factor):
    got = load_state_dict(stored.FOLDER / "weights_container.pt", weights)
    want, names = stored.load("weights_expected"), ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert same(got, {name: factor * want[f"container__{name}"] for name in names})


# Hostile and damaged files ------------------------------------------------------------------------

COMMAND = "touch {}"


def hostile_pickles(canary):
    """{what it does: (a pickle that runs a command, the name that a refusal says)}"""
    command = COMMAND.format(canary)
    text = b"X" + struct.pack("<I", len(command)) + command.encode()
    line = b"S'" + command.encode() + b"'\n"
    call = f"__import__('os').system({command!r})"
    asked = {  # by objects of a state dict
        "reduce": ForeignClass("posix system", command),
        "nested": {"model": {"a": ForeignClass("builtins eval", call)}},
        "getattr": ForeignClass("builtins getattr", "x", "__class__"),
        "torch_load": ForeignClass("torch.storage _load_from_bytes", b"x"),
    }
    names = ("posix.system", "builtins.eval", "builtins.getattr", "torch.storage._load_from_bytes")
    return {
        **{k: (pickled({"a": v}), name) for (k, v), name in zip(asked.items(), names, strict=True)},
        "stack_global": (b"\x80\x04\x8c\x02os\x8c\x06system\x93(" + text + b"tR.", "os.system"),
        "import_only": (b"\x80\x02cantigravity\nfly\n.", "antigravity.fly"),
        "inst": (b"(" + line + b"iposix\nsystem\n.", "INST"),
        "obj": (b"(cposix\nsystem\n" + line + b"o.", "posix.system"),
        "newobj": (b"\x80\x02csubprocess\nPopen\n(" + text + b"t\x81.", "subprocess.Popen"),
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
    for case in ("reduce", "stack_global", "inst"):  # Popen of newobj would want a list
        data, _ = hostile_pickles(canary)[case]
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


def one_tensor(*facts, kind="FloatStorage", key="0", **more):
    return pickled({"a": tensor(kind, key, *facts, **more)})


MALFORMED = {  # {what is wrong: (a pickle, bytes of its storage, what is said)}
    "beyond_storage": (one_tensor(4, (5,)), 16, "beyond its storage"),
    "offset": (one_tensor(4, (3,), offset=2), 16, "beyond its storage"),
    "negative_stride": (one_tensor(4, (2,), (-1,), 3), 16, "not whole numbers"),
    "storage_short": (one_tensor(4, (4,)), 8, "shorter than announced"),
    "storage_missing": (one_tensor(4, (4,), key="7"), 16, "truncated, damaged"),
    "storage_type": (one_tensor(4, (4,), kind="QInt8Storage"), 16, "torch.QInt8Storage"),
    "expanded_bomb": (one_tensor(1, (1 << 40,), (0,)), 4, "far larger than the file"),
    "many_dimensions": (one_tensor(1, (1,) * 70), 4, "do not fit"),
    "hash_bomb": (nested_tuples(200), 0, "dict key"),
    "memo_bomb": (b"\x80\x02}r\xff\xff\xff\xff.", 0, "no state dict"),
    "length_bomb": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.", 0, "truncated, damaged"),
    "empty_stack": (b"\x80\x02.", 0, "truncated, damaged"),
    "no_end": (b"\x80\x02}", 0, "truncated, damaged"),
    "module": (b"\x80\x02(X\x06\0\0\0moduleK\x01tQ.", 0, "not a storage"),
    "not_a_dict": (pickled([1, 2]), 0, "no dict of tensors"),
    "optimizer_only": (pickled({"optimizer": {}, "step": 3}), 0, "it holds optimizer, step"),
    "deep": (pickled({"model": {"model": {"model": {"model": {}}}}}), 0, "no dict of tensors"),
}


@pytest.mark.parametrize("case", list(MALFORMED))
def test_malformed_pickle(case):
    data, count, message = MALFORMED[case]
    path = write_pt("weights.pt", data, {"0": bytes(count)})
    with pytest.raises(NumdiffError, match=message) as caught:
        load_state_dict(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"byteorder": b"big"}, "big-endian"),
        ({"constants.pkl": b""}, "TorchScript"),
        ({"compress": True}, "compressed"),
    ],
)
def test_zip_files_that_are_not_weights(more, message):
    write_pt("weights.pt", one_tensor(2, (2,)), {"0": bytes(8)}, **more)
    with pytest.raises(NumdiffError, match=message):
        load_state_dict("weights.pt")


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
    (tmp_path / "weights.pt").write_bytes(zip_of({"readme.txt": b"hello"}))
    with pytest.raises(NumdiffError, match="without PyTorch's data.pkl"):
        load_state_dict("weights.pt")
    with pytest.raises(NumdiffError, match="does not exist"):
        load_state_dict("nothing.pt")
    with pytest.raises(NumdiffError, match="is a folder"):
        load_state_dict(tmp_path)


def test_npz_with_objects_is_refused(tmp_path):
    canary = tmp_path / "canary"

    class Hostile:
        def __reduce__(self):
            return os.system, (COMMAND.format(canary),)

    np.savez("w.npz", a=np.array([Hostile()], object))
    with pytest.raises(NumdiffError):
        load_state_dict("w.npz")
    assert not canary.exists()
    np.savez("w.npz", a=np.array(["text"]))
    with pytest.raises(NumdiffError, match="not an array of numbers"):
        load_state_dict("w.npz")


@exhaustive
@pytest.mark.parametrize(
    "kind",
    ["weights_zip", "weights_legacy", "weights_container", "dit_state", "npz", "safetensors"],
)
def test_random_damage_raises_nothing_but_numdiff_errors(tmp_path, rng, kind):
    if kind in ("npz", "safetensors"):
        state = {"a.weight": np.ones((3, 4), np.float32), "b": np.arange(5, dtype=np.float32)}
        path = write_weights(tmp_path / f"weights.{kind}", state, kind, {"image_size": 8})
        data = path.read_bytes()
    else:
        path = tmp_path / "weights.pt"
        data = (stored.FOLDER / f"{kind}.pt").read_bytes()
    refused = 0
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
def test_round_trip(kind):
    state, options = model_state("classes_updown")
    got, settings = read_weights(write_weights(f"w.{kind}", state, kind, options))
    assert same(got, state, in_order=False) and settings == options


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
    data = header + bits + np.array([0.5], "<f2").tobytes()
    path.write_bytes(struct.pack("<Q", len(header)) + data)
    got = load_state_dict(path)
    assert np.allclose(got["b"], values, rtol=2**-7) and got["b"].dtype == np.float32
    assert got["h"].shape == (1, 1) and got["h"][0, 0] == 0.5


def test_safetensors_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(NumdiffError, match="pip install safetensors"):
        load_state_dict("w.safetensors")


def unet_cu_bytes(options, state_dict, has_moments=0, has_random=0):
    header = np.full(256, 77, "<i4")  # what the program does not set is whatever was in memory
    channels, size = options["in_channels"], options["image_size"]
    header[:4] = 12345678, 32, channels, options["model_channels"]
    header[4:10] = channels, size, size, 1000, has_moments, has_random
    parameters = np.concatenate([a.reshape(-1) for a in state_dict.values()]).astype("<f4")
    body = parameters.tobytes() * (1 + 2 * has_moments)
    return header.tobytes() + body + b"random" * has_random


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
    assert same(got, state)


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


@pytest.mark.parametrize("name", [*stored.SHAPES, *stored.MODELS])
def test_options_from_shapes(defaults, name):
    """Names and shapes of the twin, full-size and tiny: guessed, and found again from the guess."""
    if name in stored.SHAPES:
        shapes, options = stored.load_shapes()[name], stored.SHAPES[name]
    else:
        info = stored.load(f"model_{name}")["info"]
        shapes, options = info["shapes"], info["options"]
    guessed = guess_unet_options(of_shapes(shapes), options["image_size"])
    for key, value in options.items():
        if key in guessed and not (key == "conv_resample" and options.get("resblock_updown")):
            assert guessed[key] == value, key
    found = unet_shapes({**defaults, **guessed})
    assert list(found.items()) == [(name, tuple(shape)) for name, shape in shapes.items()]


@pytest.mark.parametrize("name", list(stored.MODELS))
def test_shapes_are_those_of_the_model(name):
    model = UNet(**stored.MODELS[name], device="cpu")
    shapes = {k: v.shape for k, v in to_torch_layout(model.arrays()).items()}
    assert list(shapes.items()) == list(unet_shapes(model.options).items())
    assert [entry["name"] for entry in model.parameters.index] == list(shapes)


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
    turned = ours["a.op.weight"]
    assert turned[1, 2, 0, 1] == conv[1, 1, 2, 0] and turned.dtype == np.float32
    assert ours["a.1.qkv.weight"].shape == (6, 2) and ours["emb_layers.1.weight"].shape == (4, 2)
    assert same(to_torch_layout(ours), torch_layout)


def test_names_of_unet_cu():
    """The state dict of its train_unet.py, behind torch.compile's prefix."""
    names = {  # theirs: ours
        "time_embed.0.weight": "time_embed.0.weight",
        "input_blocks.1.0.gn1.weight": "input_blocks.1.0.in_layers.0.weight",
        "input_blocks.1.0.cv3_1.bias": "input_blocks.1.0.in_layers.2.bias",
        "input_blocks.1.0.l_emb.weight": "input_blocks.1.0.emb_layers.1.weight",
        "input_blocks.1.0.gn2.bias": "input_blocks.1.0.out_layers.0.bias",
        "middle_block.0.cv3_2.weight": "middle_block.0.out_layers.3.weight",
        "output_blocks.11.0.skip_connection.weight": "output_blocks.11.0.skip_connection.weight",
        "middle_block.1.gn.weight": "middle_block.1.norm.weight",
        "output_blocks.3.1.qkv.weight": "output_blocks.3.1.qkv.weight",
        "input_blocks.7.1.proj.bias": "input_blocks.7.1.proj_out.bias",
        "out.2.weight": "out.2.weight",
    }
    renamed, options = canonical_names({f"_orig_mod.{name}": name for name in names})
    assert renamed == {mine: name for name, mine in names.items()}
    assert options == {
        "num_head_channels": 32,
        "use_new_attention_order": True,
        "max_period": 1000.0,
    }
    ours = {f"module.{mine}": name for name, mine in names.items()}
    assert canonical_names(ours) == (renamed, {})
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


@pytest.mark.parametrize("block", ["resnet", "convnext"])
def test_what_is_missing_or_has_another_shape(defaults, block):
    """The answer is an error or a guess, never a crash."""
    if block == "resnet":
        state, _ = model_state("plain")
    else:
        state = to_torch_layout(small_unet(channel_mult=(1, 2), block=block).arrays())
    for _, _, damaged in damaged_states(state):
        try:
            guessed = guess_unet_options(damaged, 8)
        except NumdiffError:
            continue
        with pytest.raises(NumdiffError):
            check_state_dict(damaged, {**defaults, **guessed})
