"""DINOv2 ViT-B/14 against its PyTorch twin, block by block; what is refused."""

import numpy as np
import pytest

from numdiff.device import upload
from numdiff.errors import NumdiffError
from numdiff.evaluation import find_extractor
from numdiff.extras.feature_networks import dinov2, files
from numdiff.extras.feature_networks.dinov2 import VisionTransformer
from tests.command import output_of
from tests.conftest import exhaustive, exhaustively, quick
from tests.extras.convert.weights import write_state_pt
from tests.extras.feature_networks.test_files import evaluate
from tests.reference import stored, stored_features

STORED = stored.load("features_dinov2")


def shrink(monkeypatch):
    """From now on the network is small, of images of 28 × 28 pixels."""
    for name, value in {
        "SIZE": 28,
        "SIDE": 2,
        "STORED_SIDE": 3,
        "FEATURES": 64,
        "HIDDEN": 96,
        "HEADS": 2,
        "DEPTH": 2,
    }.items():
        monkeypatch.setattr(dinov2, name, value)


def small_state():
    shapes, _ = dinov2.public_shapes()
    return {name: stored_features.weight(name, shape) for name, shape in shapes.items()}


def test_names_and_shapes_of_the_public_file():
    shapes, optional = dinov2.public_shapes()
    assert shapes == stored_features.dinov2_shapes() and optional == {"mask_token"}
    assert sum(np.prod(shape) for shape in shapes.values()) == 86_580_480  # as published


@pytest.mark.parametrize("depth", [1, *exhaustively(12)])
def test_each_block_is_the_twins(monkeypatch, depth):
    monkeypatch.setattr(dinov2, "DEPTH", depth)
    arrays = dinov2.arrays_of(small_state())
    assert {name: array.shape for name, array in arrays.items()} == dinov2.shapes()
    x = stored_features.pictures("dinov2", 1, 224).astype(np.float32)
    found = list(VisionTransformer(arrays).layers(x))
    assert len(found) == depth + 2
    for place, (name, y) in enumerate(found[:-1]):
        some = y.reshape(-1)[stored.positions(f"{place:02d}", y.size)]
        wanted = STORED[f"{place:02d}/some"]
        assert np.linalg.norm(y) == pytest.approx(STORED[f"{place:02d}/norm"], rel=1e-5), name
        assert np.linalg.norm(some - wanted) <= 1e-5 * np.linalg.norm(wanted), name
    token = STORED[f"{depth:02d}/token"]
    assert np.linalg.norm(found[-1][1] - token) <= 2e-5 * np.linalg.norm(token)


@quick(lambda engine: engine != "emulator")
def test_a_small_network_on_each_engine(engine, monkeypatch):
    shrink(monkeypatch)
    monkeypatch.setattr(dinov2, "DEPTH", 1)
    arrays = dinov2.arrays_of(small_state())
    x = stored_features.pictures("small", 1, 28).astype(np.float32)
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    wanted = VisionTransformer(exact)(x.astype(np.float64))
    assert wanted.shape == (1, 64) and wanted.dtype == np.float64
    for _ in range(engine.repeats):
        got = VisionTransformer(arrays, backend=engine.backend)(upload(x, engine.backend))
        engine.check(got, wanted, 2e-5)


def test_convert_and_evaluate(monkeypatch, tmp_path):
    shrink(monkeypatch)
    state = small_state()
    del state["mask_token"]  # not needed
    path = write_state_pt(tmp_path / "pt.pth", state)
    network = tmp_path / "dinov2.h5"
    assert "DINOv2 ViT-B/14, " in output_of("convert", path, network)
    paths = [tmp_path / "samples.npz", tmp_path / "reference.npz"]
    for each in paths:
        np.savez(each, arr_0=stored_features.pictures(each.stem, 5, 20))
    output = evaluate(*paths, "--features", network)
    assert "dinov2-vitb14 clean: 64 numbers an image" in output
    direct = VisionTransformer(dinov2.arrays_of(small_state()))
    images = stored_features.pictures("images", 3, 28)
    features = find_extractor(network)[0](images)
    assert features == pytest.approx(direct(images.astype(np.float32)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"cls_token": (1, 1, 384)},
            "holds DINOv2 ViT-S/14: give Meta's dinov2_vitb14_pretrain.pth",
        ),
        ({"cls_token": (1, 1, 1024)}, "holds DINOv2 ViT-L/14:"),
        ({"register_tokens": (1, 4, 768)}, "holds DINOv2 with registers"),
        ({"blocks.0.ls1.gamma": None}, "a vision transformer without LayerScale"),
        ({"blocks.12.ls1.gamma": (768,)}, r"another version of DINOv2 ViT-B/14: unexpected 1 \("),
        ({"pos_embed": (1, 257, 768)}, r"of another shape [\d,]+ \(.*pos_embed"),
    ],
)
def test_other_versions_are_named(tmp_path, changes, message):
    shapes = {"cls_token": (1, 1, 768), "pos_embed": (1, 1, 768)}
    every = {name: shapes.get(name, (1,)) for name in stored_features.dinov2_shapes()} | changes
    state = {name: np.zeros(s, np.float32) for name, s in every.items() if s is not None}
    path = write_state_pt(tmp_path / "other.pth", state)
    with pytest.raises(NumdiffError, match=message):
        list(files.convert(path, tmp_path / "out.h5"))


@exhaustive
def test_the_whole_file(tmp_path):
    """…of 350 MB, converted and read again."""
    path = write_state_pt(tmp_path / "pt.pth", small_state())
    output_of("convert", path, tmp_path / "dinov2.h5")
    path.unlink()
    _, arrays = files.read_network(tmp_path / "dinov2.h5")
    wanted = dinov2.arrays_of(small_state())
    assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted)
