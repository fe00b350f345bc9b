"""InceptionV3 against pytorch-fid's, layer by layer; resizing against pillow and PyTorch; Fréchet
distances against pytorch-fid and clean-fid."""

import numpy as np
import pytest
from PIL import Image

from numdiff.device import download, upload
from numdiff.evaluation import frechet_distance, mean_and_covariance
from numdiff.extras.feature_networks import inception
from numdiff.extras.feature_networks.inception import InceptionV3
from numdiff.extras.feature_networks.resizing import resize
from tests.extras.feature_networks import small
from tests.reference import stored, stored_features

STORED = stored.load("features_inception")


@pytest.fixture(scope="module")
def arrays():
    return inception.arrays_of(small.state_dict())


def test_each_layer_is_that_of_pytorch_fid(arrays):
    """Of small images, of which padding and borders are a larger part."""
    x = stored_features.pictures("inception").astype(np.float32)
    layers = list(InceptionV3(arrays).layers(x))
    assert len(layers) == 19
    for place, (name, y) in enumerate(layers):
        y = y.reshape(len(x), -1) if name == "pool3" else y
        some = y.reshape(-1)[stored.positions(f"{place:02d}", y.size)]
        norm = STORED[f"{place:02d}/norm"]
        assert np.linalg.norm(y) == pytest.approx(norm, rel=1e-5), name
        wanted = STORED[f"{place:02d}/some"]
        assert np.linalg.norm(some - wanted) <= 1e-5 * np.linalg.norm(wanted), name
    assert layers[-1][1] == pytest.approx(STORED["pool3"], rel=1e-5, abs=3e-5)


def test_pixels_are_scaled_as_the_method_has_them(arrays):
    """By pytorch-fid (x - 127.5) / 127.5, elsewhere (x - 128) / 128."""
    x = stored_features.pictures("scaled", 1, 75).astype(np.float32)
    first = {method: next(InceptionV3(arrays, method).layers(x))[1] for method in inception.METHODS}
    assert np.array_equal(first["clean"], first["tensorflow"])
    moved = next(InceptionV3(arrays).layers((x - 127.5) / 127.5 * 128 + 128))[1]
    assert np.abs(first["pytorch-fid"] - moved).max() < 1e-4 < np.abs(first["clean"] - moved).max()


def test_images_are_shared_among_the_cores(arrays):
    """…and features do not depend on it."""
    x = stored_features.pictures("several", 3, 75).astype(np.float32)
    network = InceptionV3(arrays)
    together, alone = network(x), np.concatenate([network(image[None]) for image in x])
    assert together.shape == (3, 2048) and together == pytest.approx(alone, rel=1e-4, abs=1e-5)


def test_a_small_network_on_each_engine(engine, monkeypatch, rng):
    """Each kind of layer and branch, in the emulator and on a GPU, against NumPy in float64."""
    small.shrink(monkeypatch)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32) / 4
        for name, shape in inception.shapes().items()
    }
    x = rng.integers(0, 256, (1, 19, 17, 3)).astype(np.float32)
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    wanted = list(InceptionV3(exact).layers(x.astype(np.float64)))[-1][1]
    for _ in range(engine.repeats):
        network = InceptionV3(arrays, backend=engine.backend)
        got = list(network.layers(upload(x, engine.backend)))[-1][1]
        assert wanted.shape == (1, small.FEATURES)
        engine.check(got, wanted, 1e-5)


# Resizing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 48), (7, 300), (299, 299), (512, 20), (1, 1)])
def test_clean_resizing_is_pillows(shape):
    images = stored_features.drawn("pillow", (1, *shape, 3))
    images = ((images / 12**0.5 + 0.5) * 255.99).astype(np.uint8)
    images[:, : shape[0] // 2] = images[:, : shape[0] // 2] // 128 * 255  # overshoots, and is cut
    channels = [
        Image.fromarray(images[0, ..., c].astype(np.float32)).resize((299, 299), Image.BICUBIC)
        for c in range(3)
    ]
    wanted = np.stack([np.asarray(channel).clip(0, 255) for channel in channels], -1)
    got = resize(images, 299, "clean")
    assert got.dtype == np.float32 and np.abs(got[0] - wanted).max() < 1e-4


@pytest.mark.parametrize("method", ["pytorch-fid", "tensorflow"])
def test_bilinear_resizing(method):
    found = stored.load("features_resized")
    got = resize(stored_features.pictures("resized", 1, 56)[:, :40], 299, method)
    some = got.reshape(-1)[stored.positions(method, got.size)]
    assert np.abs(some - found[f"{method}/some"]).max() < 1e-4
    assert np.linalg.norm(got) == pytest.approx(found[f"{method}/norm"], rel=1e-6)


def test_resizing_on_each_engine(engine):
    images = stored_features.pictures("engine", 2, 9)[:, :6]
    for method in inception.METHODS:
        wanted = resize(images, 8, method)
        got = resize(images, 8, method, engine.backend)
        assert got.shape == (2, 8, 8, 3)
        if engine.computes:
            assert np.abs(download(got) - wanted).max() < 1e-4


# Distances ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", stored_features.DISTANCES)
def test_the_distance_is_that_of_public_programs(name):
    found = stored.load("features_distances")
    a, b = stored_features.samples(name, *stored_features.DISTANCES[name])
    got = frechet_distance(*mean_and_covariance(a), *mean_and_covariance(b))
    assert got == pytest.approx(float(found[f"{name}/pytorch-fid"]), rel=1e-4)
    assert got == pytest.approx(float(found[f"{name}/clean-fid"]), rel=1e-4)
