"""Conversion of public weights, `numdiff evaluate --features`, statistics of other programs, and
what is refused."""

import json

import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.evaluation import find_extractor
from numdiff.extras.feature_networks import files, inception
from numdiff.training.checkpoint import load_checkpoint, save_checkpoint
from numdiff.training.model_files import write_model_file
from tests.command import output_of, refusal_of
from tests.conftest import exhaustive
from tests.extras.convert.weights import write_state_pt
from tests.extras.feature_networks import small
from tests.reference import stored_features


@pytest.fixture(autouse=True)
def _small(monkeypatch, request):
    if "whole" not in request.node.name:
        small.shrink(monkeypatch)


def converted_in(folder):
    path = write_state_pt(folder / "pt.pth", small.state_dict())
    output = output_of("convert", path, folder / "inception.h5")
    path.unlink()
    return folder / "inception.h5", output


@pytest.fixture
def converted(tmp_path):
    return converted_in(tmp_path)[0]


@pytest.fixture
def images(tmp_path):
    paths = []
    for name in ("samples", "reference"):
        paths.append(tmp_path / f"{name}.npz")
        np.savez(paths[-1], arr_0=stored_features.pictures(name, 5, 16))
    return paths


def evaluate(*words):
    return output_of("evaluate", *words, "--device cpu")


def refusal(*words):
    return refusal_of("evaluate", *words, "--device cpu")


def distance(folder, *words):
    """(Fréchet distance, what is printed)"""
    out = folder / "figures.json"
    output = evaluate(*words, "--json", out)
    return json.loads(out.read_text())["figures"]["frechet_distance"], output


def clean_fid(a, b):
    """By its definition, with the eigenvalues of the product."""
    (mu, s), (nu, t) = ((np.mean(x, 0, np.float64), np.cov(x.T.astype(np.float64))) for x in (a, b))
    roots = np.sqrt(np.maximum(np.linalg.eigvals(s @ t).real, 0))
    return ((mu - nu) ** 2).sum() + np.trace(s) + np.trace(t) - 2 * roots.sum()


def test_evaluate(converted, images, tmp_path):
    got, output = distance(tmp_path, *images, "--features", converted)
    assert "features   inception-2015-12-05 clean: 19 numbers an image" in output
    assert "5 images are fewer than the 19 features" in output
    extractor, name = find_extractor(converted)
    features = [extractor(np.load(path)["arr_0"]) for path in images]
    assert name == "inception-2015-12-05 clean" and features[0].shape == (5, 19)
    assert got == pytest.approx(clean_fid(*features), rel=1e-4)


@exhaustive
def test_whole(images, tmp_path):
    """The conversion and the distance of the whole network, which has more features than there are
    images."""
    path, output = converted_in(tmp_path)
    assert "InceptionV3 of 2015-12-05, 21,768,352 parameters" in output
    got, output = distance(tmp_path, *images, "--features", path)
    assert "5 images are fewer than the 2048 features" in output
    features = [find_extractor(path)[0](np.load(name)["arr_0"]) for name in images]
    assert features[0].shape == (5, 2048)
    # of few images the eigenvalues are those of a product of small matrices
    a, b = ((f - f.mean(0, np.float64)) / 2 for f in features)
    roots = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    means = features[0].mean(0, np.float64) - features[1].mean(0, np.float64)
    wanted = (means**2).sum() + (a**2).sum() + (b**2).sum() - 2 * roots
    assert got == pytest.approx(wanted, rel=1e-4)


def test_statistics_of_other_programs(converted, images, tmp_path):
    """clean-fid's are compressed; EDM's have mu and sigma alone. numdiff's are read by np.load."""
    ours = tmp_path / "ours.npz"
    evaluate(images[1], "--features", converted, "--save-stats", ours)
    with np.load(ours, allow_pickle=False) as file:
        mu, sigma = file["mu"], file["sigma"]
    assert mu.shape == (19,) and sigma.shape == (19, 19) and mu.dtype == np.float64
    np.savez_compressed(tmp_path / "clean.npz", mu=mu, sigma=sigma)
    np.savez(tmp_path / "edm.npz", mu=mu, sigma=sigma)
    first, *others = (
        distance(tmp_path, images[0], reference, "--features", converted)[0]
        for reference in (images[1], ours, tmp_path / "clean.npz", tmp_path / "edm.npz")
    )
    assert others == pytest.approx([first] * 3, rel=1e-9)


def test_methods_of_resizing(converted, images):
    assert find_extractor(f"{converted}:tensorflow")[1] == "inception-2015-12-05 tensorflow"
    with pytest.raises(UsageError, match="by clean or tensorflow or pytorch-fid, and not by 'box'"):
        find_extractor(f"{converted}:box")
    statistics = images[0].parent / "stats.npz"
    evaluate(images[1], "--features", f"{converted}:tensorflow", "--save-stats", statistics)
    assert "use one extractor for both" in refusal(images[0], statistics, "--features", converted)


def test_one_picture(converted, images, tmp_path):
    np.savez(tmp_path / "one.npz", arr_0=stored_features.pictures("one", 1, 16))
    sentence = refusal(tmp_path / "one.npz", images[0], "--features", converted)
    assert sentence.endswith("holds one image, and the figures need at least two.")


# What is refused ----------------------------------------------------------------------------------


def tiny(**changed):
    """The public names of the whole network, each with one number: what is wrong with names is
    found before shapes."""
    shapes, _ = inception.public_shapes()
    found = {name: np.zeros((1,) * len(shape), np.float32) for name, shape in shapes.items()}
    found["fc.weight"] = np.zeros((inception.CLASSES, 1), np.float32)
    return {**found, **changed}


@pytest.mark.parametrize(
    "state, message",
    [
        (
            tiny(**{"fc.weight": np.zeros((1000, 1), np.float32)}),
            "holds torchvision's InceptionV3 of 1,000 classes, whose features give no FID",
        ),
        (tiny(**{"AuxLogits.fc.bias": np.zeros(1, np.float32)}), "torchvision's InceptionV3"),
        (tiny(extra=np.zeros(1, np.float32)), r"unexpected 1 \(extra\)"),
        (tiny(), r"of another shape [\d,]+ \("),
        (
            {k: v for k, v in tiny().items() if "Mixed_7c" not in k},
            r"another version of InceptionV3 of 2015-12-05: missing 45 \(Mixed_7c.branch1x1.conv.weight",
        ),
        ({k: v for k, v in tiny().items() if k[:2] != "fc"}, "an InceptionV3 without its classes"),
    ],
)
def test_other_versions_of_the_whole_network_are_named(tmp_path, state, message):
    path = write_state_pt(tmp_path / "other.pth", state)
    with pytest.raises(NumdiffError, match=message) as raised:
        list(files.convert(path, tmp_path / "out.h5"))
    assert str(raised.value).endswith("give pytorch-fid's pt_inception-2015-12-05-6726825d.pth.")
    assert not (tmp_path / "out.h5").exists()


def test_conversion_refuses(tmp_path):
    path, out = write_state_pt(tmp_path / "pt.pth", tiny()), tmp_path / "out.h5"
    for words, sentence in (
        ((tmp_path / "out.npz",), "are written to a file that ends in .h5"),
        ((out, "--image-size 64"), "--image-size means nothing for the weights"),
    ):
        assert sentence in refusal_of("convert", path, *words)
    path.write_bytes(path.read_bytes()[:1000])
    assert "truncated, damaged or not a file of weights" in refusal_of("convert", path, out)


def test_weights_that_are_not_finite(tmp_path, monkeypatch):
    shapes = {"Conv2d_1a_3x3.conv.weight": (1, 2), "fc.weight": (inception.CLASSES, 1)}
    monkeypatch.setattr(inception, "public_shapes", lambda: (shapes, set()))
    state = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    path = write_state_pt(tmp_path / "pt.pth", state)
    with pytest.raises(NumdiffError, match="values that are not finite in Conv2d_1a"):
        list(files.convert(path, tmp_path / "out.h5"))


def test_files_that_are_no_feature_network(converted, tmp_path, images):
    write_model_file(tmp_path / "other.h5", {}, {"a": np.zeros(3, np.float32)}, model="unet")
    buffers, meta = load_checkpoint(converted)
    short = {"parameters": buffers["parameters"][:1000]}
    save_checkpoint(tmp_path / "short.h5", short, meta)
    save_checkpoint(tmp_path / "lacks.h5", buffers, {**meta, "index": meta["index"][:9]})
    damaged = bytearray(converted.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.h5").write_bytes(damaged)
    for name, sentence in (
        ("none", "there is no file .*none.h5: make it of public weights"),
        ("other", "holds a unet, which computes no features"),
        ("short", "no whole InceptionV3 .*its buffer is not.*convert it again"),
        ("lacks", "no whole InceptionV3 .*its index is not.*convert it again"),
        ("damaged", "damaged.h5"),
    ):
        with pytest.raises(NumdiffError, match=sentence):
            find_extractor(tmp_path / f"{name}.h5")
    sentence = refusal(images[0], converted, "--features", converted)
    assert "is a model, and images are compared" in sentence


def test_damaged_statistics(converted, images, tmp_path):
    path = tmp_path / "stats.npz"
    for mu, sigma, sentence in (
        (19, (19, 18), "a mean (D,) belongs to a covariance (D, D)"),
        (64, (64, 64), "has 19 features per image and"),
    ):
        np.savez(path, mu=np.zeros(mu), sigma=np.eye(*sigma))
        assert sentence in refusal(images[0], path, "--features", converted)
    path.write_bytes(path.read_bytes()[:2000])
    assert "stats.npz cannot be read" in refusal(images[0], path, "--features", converted)


def test_tf32_needs_a_gpu(converted):
    with pytest.raises(UsageError, match="--precision tf32 needs a GPU"):
        find_extractor(converted, None, "tf32")
