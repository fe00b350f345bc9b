"""`numdiff evaluate`: its sources, its statistics files, what it prints."""

import json
import zipfile

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff.data.dataset import default_path
from numdiff.errors import NumdiffError, UsageError
from numdiff.evaluation import (
    RandomConv,
    find_extractor,
    frechet_distance,
    kid,
    mean_and_covariance,
    precision_recall,
)
from numdiff.evaluation.features import CHANNELS, extract, random_conv_weight
from numdiff.extras.evaluate.sources import (
    Features,
    Images,
    Statistics,
    open_source,
    save_features,
    save_statistics,
)
from numdiff.training.checkpoint import save_checkpoint
from tests.command import output_of, refusal_of
from tests.conftest import exhaustively, needs, on
from tests.distributed.test_distributed import check_done, job, main_of
from tests.distributed.test_distributed import run as mpi_run
from tests.evaluation import extractors
from tests.forked import forked

MEANS = "tests.evaluation.extractors:means"
RECORD = {
    "sampler": "heun",
    "steps": 18,
    "seed": 5,
    "weights": "ema",
    "model": "runs/0",
    "training_steps": 400,
}


def evaluate(*words):
    return output_of("evaluate", *words, "--device cpu")


def refusal(*words):
    return refusal_of("evaluate", *words, "--device cpu")


def write_h5(path, images, **more):
    with h5py.File(path, "w") as file:
        file["images"] = images
        for name, values in more.items():
            file[name] = values
        if "labels" in more:
            file.attrs["classes"] = ["left", "right"]
    return path


def pictures(count, size=16, seed=0, shift=0):
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 200, (count, 1, 1, 3)) + shift
    return (colours + rng.integers(0, 50, (count, size, size, 3))).clip(0, 255).astype(np.uint8)


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / "samples.npz"
    np.savez(path, arr_0=pictures(40), numdiff=np.array(json.dumps(RECORD)))
    return path


@pytest.fixture
def reference(tmp_path):
    path = tmp_path / "reference.npz"
    np.savez(path, pictures(30, seed=1, shift=20), np.zeros(30, np.int64))
    return path


# Extractors ---------------------------------------------------------------------------------------


def test_random_conv_against_loops(rng):
    """The first level by explicit loops, and the sizes of all."""
    image = rng.integers(0, 256, (1, 16, 16, 3)).astype(np.uint8)
    features, spatial = RandomConv()(image)
    assert features.shape == (1, 480) and spatial.shape == (1, 112) and features.dtype == np.float32
    x = np.pad(image[0] / 127.5 - 1, ((1, 1), (1, 1), (0, 0)))
    weight, total = random_conv_weight(0).astype(np.float64), np.zeros(32)
    for i in range(8):
        for j in range(8):
            z = (weight * x[2 * i : 2 * i + 3, 2 * j : 2 * j + 3]).sum((1, 2, 3))
            total += z / (1 + np.exp(-z))
    np.testing.assert_allclose(features[0, :32], total / 64, atol=1e-5)


def test_random_conv_is_fixed():
    """Its weights are part of what its name means: these numbers must never change."""
    np.testing.assert_allclose(random_conv_weight(0)[0, 0, 0], FIXED_WEIGHTS, rtol=1e-5)
    features, spatial = RandomConv()(np.arange(16 * 16 * 3).reshape(1, 16, 16, 3).astype(np.uint8))
    np.testing.assert_allclose(
        features[0, [0, 31, 32, 100, 300, 479]], FIXED_FEATURES, rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(spatial[0, [0, 50, 111]], FIXED_SPATIAL, rtol=1e-3, atol=1e-5)


FIXED_WEIGHTS = [-0.0397684, -0.113369, -0.1462]
FIXED_FEATURES = [0.0459285, 0.0169817, -0.0439681, 0.010975, -0.0766423, 0.0343945]
FIXED_SPATIAL = [-0.137387, 0.187717, 0.0660689]


def test_random_conv_weights_are_normal_and_keep_the_size_of_activations(rng):
    for level in range(4):
        weight = random_conv_weight(level)
        assert weight.shape == (CHANNELS[level + 1], 3, 3, CHANNELS[level])
        scale = np.sqrt((1 if level == 0 else 2.81) / (9 * CHANNELS[level]))
        assert weight.std() == pytest.approx(scale, rel=0.1) and abs(weight.mean()) < 0.15 * scale
    features, _ = RandomConv()(rng.integers(0, 256, (4, 64, 64, 3)).astype(np.uint8))
    parts = np.split(features, np.cumsum(CHANNELS[1:-1]), axis=1)
    assert all(0.02 < np.sqrt((p**2).mean()) < 2 for p in parts)


@on("cuda")
def test_random_conv_on_a_gpu(engine, rng):
    images = rng.integers(0, 256, (2, 18, 16, 3)).astype(np.uint8)
    features, spatial = RandomConv(engine.backend)(images)
    wanted, wanted_spatial = RandomConv()(images)
    assert features.shape == wanted.shape and spatial.shape == wanted_spatial.shape
    np.testing.assert_allclose(features, wanted, atol=1e-4)
    np.testing.assert_allclose(spatial, wanted_spatial, atol=1e-4)


def test_features_do_not_depend_on_the_batch(rng):
    images, extractor = rng.integers(0, 256, (5, 16, 16, 3)).astype(np.uint8), RandomConv()
    together, _ = extractor(images)
    apart, _ = extract(extractor, (images[i : i + 2] for i in range(0, 5, 2)), 5)
    np.testing.assert_allclose(together, apart, atol=1e-6)
    with pytest.raises(UsageError, match="at least 16×16"):
        extractor(images[:, :8])


def test_plug_ins(rng):
    function, name = find_extractor(MEANS)
    assert function is extractors.means and name == MEANS
    assert find_extractor("tests.evaluation.extractors:Holder.means")[0] is extractors.means
    assert (
        isinstance(find_extractor()[0], RandomConv)
        and find_extractor("random-conv")[1] == "random-conv-1"
    )
    images = rng.integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    features, spatial = extract(extractors.pair, [images[:2], images[2:]], 3)
    assert features.shape == (3, 3) and spatial.shape == (3, 4)
    assert extract(extractors.means, [images], 3)[1] is None
    for name, message in (
        ("inception", "module:function"),
        ("no_such:thing", "cannot be imported"),
        (":x", "module:f"),
        ("tests.evaluation.extractors:nothing", "has no nothing"),
        ("tests.evaluation.extractors:NUMBER", "not callable"),
    ):
        with pytest.raises(UsageError, match=message):
            find_extractor(name)
    for function, message in (
        (extractors.wrong_shape, "must return features"),
        (extractors.not_finite, "not finite"),
        (extractors.fails, r"failed on uint8 images .* \(KeyError: 3, line \d+ of "),
    ):
        with pytest.raises(UsageError, match=message):
            extract(function, [images], 3)


# Sources ------------------------------------------------------------------------------------------


def test_a_module_that_fails_is_told_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing_features.py").write_text("1 / 0")
    with pytest.raises(
        UsageError, match="cannot be imported .ZeroDivisionError: division by zero, line 1 of"
    ):
        find_extractor("failing_features:x")


def read_all(source, batch=7):
    return np.concatenate(list(source.batches(batch)))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_images(tmp_path, save):
    images = pictures(20)
    save(tmp_path / "a.npz", images)
    source = open_source(tmp_path / "a.npz")
    assert isinstance(source, Images) and (source.count, source.size) == (20, (16, 16))
    assert np.array_equal(read_all(source), images) and max(len(b) for b in source.batches(7)) == 7
    save(tmp_path / "grey.npz", images[..., :1])
    assert np.array_equal(
        read_all(open_source(tmp_path / "grey.npz")), np.repeat(images[..., :1], 3, -1)
    )


def test_folder_of_pictures(tmp_path):
    images = pictures(5)
    (tmp_path / "f" / "sub").mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "f" / ("sub" if i > 2 else "") / f"{i}.png")
    (tmp_path / "f" / "notes.txt").write_text("not a picture")
    source = open_source(tmp_path / "f")
    assert source.count == 5 and np.array_equal(read_all(source, 2), images)
    Image.fromarray(images[0, :8]).save(tmp_path / "f" / "9.png")
    with pytest.raises(UsageError, match="9.png is 16×8 and .* is 16×16"):
        read_all(open_source(tmp_path / "f"))


def test_dataset(tmp_path):
    images = pictures(6)
    path = write_h5(tmp_path / "a.h5", images, labels=np.arange(6) % 2)
    assert np.array_equal(read_all(open_source(path)), images)
    source = open_source(path, classes=["Right"])
    assert np.array_equal(read_all(source), images[1::2]) and "right" in source.note
    small = open_source(path, size=(8, 8))
    assert read_all(small).shape == (6, 8, 8, 3) and small.note == "averaged to 8×8"
    assert open_source(path.rename(tmp_path / "a.hdf5")).count == 6


def test_features_and_statistics_round_trip(tmp_path, rng):
    features = Features(
        "x",
        rng.standard_normal((50, 6)),
        rng.standard_normal((50, 4)),
        {"extractor": "e", **RECORD},
    )
    save_features(tmp_path / "f.npz", features)
    again = open_source(tmp_path / "f.npz")
    assert isinstance(again, Features) and again.record == features.record
    assert np.array_equal(again.features, features.features)
    assert np.array_equal(again.spatial, features.spatial)
    save_statistics(tmp_path / "s.npz", features.statistics())
    statistics = open_source(tmp_path / "s.npz")
    assert isinstance(statistics, Statistics) and statistics.count == 50
    for name, wanted in zip(
        ("mu", "sigma", "mu_s", "sigma_s"),
        (*mean_and_covariance(features.features), *mean_and_covariance(features.spatial)),
        strict=True,
    ):
        assert np.array_equal(getattr(statistics, name), wanted)


def test_the_layouts_of_guided_diffusion_and_edm(tmp_path, rng, monkeypatch):
    """Written as their programs write them, and read from ours as their programs read them."""
    monkeypatch.chdir(tmp_path)
    x, s = rng.standard_normal((40, 5)), rng.standard_normal((40, 3))
    image_statistics = {"mu": x.mean(0), "sigma": np.cov(x, rowvar=False)}
    spatial = {"mu_s": s.mean(0), "sigma_s": np.cov(s, rowvar=False)}
    np.savez("guided.npz", **image_statistics, **spatial, arr_0=pictures(3))
    np.savez("edm.npz", **image_statistics)
    np.savez("features.npz", features=x, spatial=s)
    guided, edm = open_source("guided.npz"), open_source("edm.npz")
    assert isinstance(guided, Statistics) and guided.count is None
    assert np.array_equal(guided.sigma_s, spatial["sigma_s"])
    assert isinstance(edm, Statistics) and edm.mu_s is None
    assert np.array_equal(edm.sigma, image_statistics["sigma"])
    evaluate("features.npz --save-stats ours.npz")
    with np.load("ours.npz", allow_pickle=False) as ours:
        for name, wanted in {**image_statistics, **spatial}.items():
            assert ours[name].dtype == np.float64
            np.testing.assert_allclose(ours[name], wanted, rtol=1e-10, atol=1e-12)
    said = evaluate("guided.npz edm.npz")
    assert "only statistics" in said and "spatial" not in said
    np.savez("arr.npz", x.astype(np.float32))
    np.save("plain.npy", x)
    for name in ("arr.npz", "plain.npy"):
        assert open_source(name).features.shape == x.shape


# The command --------------------------------------------------------------------------------------


def test_the_figures_and_their_columns(samples, reference, tmp_path):
    output = evaluate(samples, reference, "--features", MEANS, "--json", tmp_path / "f.json")
    x, y = extractors.means(pictures(40)), extractors.means(pictures(30, seed=1, shift=20))
    x, y = x.astype(np.float32), y.astype(np.float32)
    wanted = {
        "frechet_distance": frechet_distance(*mean_and_covariance(x), *mean_and_covariance(y)),
        "kid": kid(x, y),
    }
    wanted["precision"], wanted["recall"] = precision_recall(x, y)
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["figures"] == pytest.approx(wanted)
    assert found["count"] == [40, 30] and found["extractor"] == MEANS
    assert found["samples"]["sampler"] == "heun"
    lines = output.splitlines()
    header = next(line for line in lines if line.startswith("figure"))
    assert header.split() == ["figure", "value", "count", "seed", "steps", "sampler", "EMA"]
    for figure in ("Fréchet distance", "KID", "precision", "recall"):
        (line,) = (line for line in lines if line.startswith(figure))
        assert line[len(figure) :].split()[1:8] == ["40", "/", "30", "5", "18", "heun", "yes"]
    assert "FID" not in output and "heun, 18 steps, seed 5, ema weights of runs/0" in output


def test_random_conv_is_never_called_fid(samples, reference):
    output = evaluate(samples, reference)
    for said in ("random-conv-1", "is not FID", "spatial Fréchet", "fewer than the 480 features"):
        assert said in output
    assert output.count("FID") == 1


def lines_of(output, *names):
    return [line for line in output.splitlines() if line.startswith(names)]


def test_features_and_statistics_in_place_of_images(samples, reference, tmp_path):
    means = ["--features", MEANS]
    features, statistics = tmp_path / "f.npz", tmp_path / "s.npz"
    evaluate(reference, *means, "--save-features", features, "--save-stats", statistics)
    direct, by_features, by_statistics = (
        evaluate(samples, source, *means) for source in (reference, features, statistics)
    )
    names = ("Fréchet distance", "KID", "precision", "recall")
    assert lines_of(direct, *names) == lines_of(by_features, *names)
    assert len(lines_of(direct, *names)) == 4
    assert lines_of(direct, "Fréchet") == lines_of(by_statistics, "Fréchet")
    assert not lines_of(by_statistics, "KID")


def test_what_is_not_recorded_is_said(reference):
    (line,) = lines_of(evaluate(reference, reference, "--features", MEANS), "KID")
    assert line.split()[2:9] == ["30", "/", "30", "?", "?", "?", "?"]


def test_a_larger_dataset_is_averaged_down(samples, tmp_path):
    large = pictures(30, size=64)
    big = write_h5(tmp_path / "big.h5", large)
    output = evaluate(samples, big, "--features", MEANS)
    assert "30 images of 16×16, averaged to 16×16" in output
    wide = write_h5(tmp_path / "wide.h5", np.tile(large, (1, 1, 2, 1)))
    np.savez(tmp_path / "wide.npz", np.tile(pictures(30), (1, 1, 2, 1)))
    output = evaluate(tmp_path / "wide.npz", wide, "--features", MEANS)
    assert "images of 16×32, averaged to 16×32" in output
    np.savez(tmp_path / "big.npz", large[:5])
    assert "bring both to one size" in refusal(samples, tmp_path / "big.npz")


@pytest.fixture
def kept(tmp_path):
    """Statistics and features of a dataset's class, 30 images of 32×32, as the command writes them."""
    data = write_h5(tmp_path / "set.h5", pictures(60, size=32), labels=np.arange(60) % 2)
    paths = {"--save-stats": tmp_path / "s.npz", "--save-features": tmp_path / "f.npz"}
    evaluate(data, "--classes right --features", MEANS, *sum(paths.items(), ()))
    return paths


@pytest.mark.parametrize(
    "option, kind", [("--save-stats", "statistics"), ("--save-features", "features")]
)
def test_the_size_of_the_images_is_kept_and_another_one_refused(
    samples, tmp_path, kept, option, kind
):
    path, means = kept[option], ("--features", MEANS)
    record = open_source(path).record
    assert record == {"classes": ["right"], "count": 30, "image_size": [32, 32], "extractor": MEANS}
    assert refusal(samples, path, *means) == (
        f"Error: {samples} has images of 16×16 and {path} holds {kind} of images of 32×32: make {kind} of "
        "images of 16×16 (`numdiff data import SOURCE OUT.h5 --size 16`, then `numdiff evaluate OUT.h5 "
        f"{option} FILE.npz`)."
    )
    np.savez(tmp_path / "fits.npz", pictures(40, size=32))
    output = evaluate(tmp_path / "fits.npz", path, *means)
    assert f"{kind} of 30 images of 32×32, classes right" in output
    assert "of what size" not in output
    large = write_h5(tmp_path / "large.h5", pictures(30, size=64))
    assert "30 images of 32×32, averaged to 32×32" in evaluate(path, large, *means)


def test_statistics_that_do_not_say_a_size_go_with_any_and_a_note(samples, tmp_path, kept):
    with np.load(kept["--save-stats"]) as file:
        np.savez(tmp_path / "edm.npz", mu=file["mu"], sigma=file["sigma"])
    output = evaluate(samples, tmp_path / "edm.npz", "--features", MEANS)
    assert output.count("edm.npz does not say of what size its images were") == 1


def test_the_parts_of_a_set_are_near_and_another_set_is_far(tmp_path):
    """The default extractor separates emoji from their negatives more than from other emoji."""
    with h5py.File(default_path()) as file:
        images = file["images"][:400, ::2, ::2]
    images = images[np.random.default_rng(0).permutation(400)]
    features = [RandomConv()(part)[0] for part in (images[:200], images[200:], 255 - images[200:])]
    same, other = (kid(features[0], x) for x in features[1:])
    assert abs(same) < 0.05 * other
    same, other = (precision_recall(features[0], x) for x in features[1:])
    assert min(same) > 0.6 and max(other) < 0.3


# Bad input ----------------------------------------------------------------------------------------


def test_bad_input_is_one_sentence(samples, reference, tmp_path, monkeypatch):
    good = np.random.default_rng(0).standard_normal((20, 3))
    files = {
        "latents": {"arr_0": np.zeros((3, 8, 8, 4), np.float32)},
        "nothing": {"other": np.zeros(3)},
        "half": {"mu": np.zeros(3)},
        "odd": {"mu": np.zeros(3), "sigma": np.zeros((3, 4))},
        "nan": {"features": np.full((3, 3), np.nan)},
        "ints": {"features": np.zeros((3, 3), int)},
        "wide": {"features": np.zeros((5, 7))},
        "one": {"features": good[:1]},
        "good": {"features": good},
        "infinite": {"mu": np.full(3, np.inf), "sigma": np.eye(3)},
        "objects": {"arr_0": np.array([{}, {}], object)},
        "mine": {"features": good, "numdiff": np.array('{"extractor": "mine"}')},
        "list": {"features": good, "numdiff": np.array("[1]")},
        "text": {"features": good, "numdiff": np.array("{")},
        "pair": {"features": good, "spatial": good[:5]},
        "stats": {"mu": np.zeros(3), "sigma": np.eye(3)},
        "empty": {"arr_0": np.zeros((0, 8, 8, 3), np.uint8)},
    }
    for name, arrays in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    (tmp_path / "text.bin").write_text("nothing")
    (tmp_path / "broken.npz").write_bytes(samples.read_bytes()[:3000])
    (tmp_path / "not.npz").write_text("no zip")
    (tmp_path / "none").mkdir()
    with zipfile.ZipFile(samples) as source, zipfile.ZipFile(tmp_path / "short.npz", "w") as target:
        target.writestr("arr_0.npy", source.read("arr_0.npy")[:5000])
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ("nowhere.npz good.npz", "does not exist"),
        ("text.bin good.npz", "is not an npz, npy"),
        ("none good.npz", "holds no pictures"),
        ("broken.npz good.npz", "broken.npz cannot be read"),
        ("not.npz good.npz", "not.npz cannot be read"),
        ("short.npz reference.npz", "short.npz is truncated"),
        ("latents.npz good.npz", "decode the latents"),
        ("nothing.npz good.npz", "looks for arr_0"),
        ("empty.npz good.npz", "images are uint8"),
        ("half.npz good.npz", "looks for arr_0"),
        ("odd.npz good.npz", "a mean (D,)"),
        ("nan.npz good.npz", "not finite"),
        ("infinite.npz good.npz", "not finite"),
        ("ints.npz good.npz", "features are floats"),
        ("wide.npz good.npz", "has 7 features per image and good.npz has 3"),
        ("one.npz good.npz", "at least two"),
        ("objects.npz good.npz", "objects.npz"),
        ("list.npz good.npz", "damaged"),
        ("text.npz good.npz", "cannot be read"),
        ("pair.npz good.npz", "20 features and 5 spatial"),
        (f"samples.npz mine.npz --features {MEANS}", "of mine on the other"),
        ("samples.npz good.npz", "has 480 features per image and good.npz has 3"),
        (f"good.npz good.npz --features {MEANS}", "neither side has images"),
        ("samples.npz", "nothing to compare with"),
        ("samples.npz reference.npz --classes a", "is not a dataset"),
        (f"samples.npz --save-stats a.npy --features {MEANS}", "must end in .npz"),
        ("odd.h5 good.npz", "odd.h5"),
        ("samples.npz reference.npz --features nothing", "module:function"),
        ("good.npz good.npz --json no/f.json", "does not exist"),
        (
            "samples.npz --save-stats samples.npz",
            "it is samples.npz, which is read; give another name",
        ),
        (
            "good.npz mine.npz --save-features ./mine.npz",
            "it is mine.npz, which is read; give another name",
        ),
        ("good.npz mine.npz --json good.npz", "--json good.npz must end in .json"),
        ("good.npz mine.npz --json pictures/1.png", "--json pictures/1.png must end in .json"),
        (
            f"samples.npz --save-stats s.txt --features {MEANS}",
            "--save-stats s.txt must end in .npz",
        ),
        (
            f"samples.npz --save-features f.npy --features {MEANS}",
            "--save-features f.npy must end in .npz",
        ),
        (
            f"samples.npz --save-stats z.npz --save-features ./z.npz --features {MEANS}",
            "--save-stats and --save-features name one file: give them different names",
        ),
        ("good.npz --json f.json --save-stats a.npz", "--json needs a REFERENCE"),
        ("good.npz --classes a --save-stats a.npz", "is not a dataset"),
        (
            "stats.npz samples.npz --save-features f.npz --features nothing",
            "leave --save-features out",
        ),
    ):
        assert message in refusal(words), words
    output = evaluate("good.npz good.npz --nearest 20")
    assert "note: precision and recall need more images" in output
    with pytest.raises(NumdiffError, match="at least two"):
        open_source("one.npz").statistics()


@pytest.mark.parametrize("name", ["m.h5", "w.safetensors", "w.PT", "a run"])
def test_a_model_is_no_images(tmp_path, name):
    path = tmp_path / name
    if name == "m.h5":
        save_checkpoint(path, {"parameters": np.zeros(3, np.float32)}, {})
    elif name == "a run":
        path.mkdir()
        (path / "options.json").write_text("{}")
    else:
        path.touch()
    with pytest.raises(
        UsageError,
        match=r"is a model, and images are compared: make some with `numdiff sample \S+( "
        r"run')? --npz samples\.npz`, and give that file\.",
    ):
        open_source(path)


@pytest.mark.parametrize("nested", [True, False], ids=["edm2", "flat"])
def test_statistics_in_a_pickle_are_not_opened_and_the_recipe_works(tmp_path, rng, nested):
    """It may run code, so numdiff does not; the line at the end of the message does, if a user trusts
    the file."""
    import pickle

    mu, sigma = rng.standard_normal(3), np.eye(3)
    statistics = {"mu": mu, "sigma": sigma}
    path = tmp_path / "it's img512.pkl"
    path.write_bytes(pickle.dumps({"fid": statistics, "fd_dinov2": {}} if nested else statistics))
    said, _, recipe = refusal(path, path).partition("in Python with: ")
    assert "is a pickle, which may run code, so it is not opened" in said
    exec(recipe, {})
    found = open_source(path.with_suffix(".npz"))
    assert isinstance(found, Statistics)
    assert np.array_equal(found.mu, mu) and np.array_equal(found.sigma, sigma)


def test_precision_is_random_convs_and_part_of_its_name(engine, rng):
    for given in ((None, None), ("random-conv", None, "fp32")):
        assert find_extractor(*given)[1] == RandomConv.name
    with pytest.raises(UsageError, match="--precision tf32 needs a GPU"):
        find_extractor(None, None, "tf32")
    with pytest.raises(UsageError, match="--precision tf32 belongs to random-conv"):
        find_extractor("math:sqrt", None, "tf32")
    if engine.name in ("ptx", "cuda"):
        extractor, name = find_extractor(None, engine.backend, "tf32")
        assert name == "random-conv-1-tf32" and not engine.backend.tf32
        images = rng.integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
        features = extractor(images)[0]
        if engine.computes:
            exact = RandomConv(engine.backend)(images)[0]
            assert 0 < np.abs(features - exact).max() < 1e-2 * np.abs(exact).max()


@needs("mpi")
@pytest.mark.parametrize("ranks", [2, *exhaustively((3,))])
def test_ranks_share_the_features(tmp_path, samples, ranks):
    """Figures and features of several ranks are those of one, of an npz, a folder and a dataset;
    of three ranks one has no image of the smallest side. An error is said once."""
    folder, data = tmp_path / "folder", tmp_path / "data.h5"
    folder.mkdir()
    for number, picture in enumerate(pictures(19, seed=2)):
        Image.fromarray(picture).save(folder / f"{number:02}.png")
    write_h5(data, pictures(7, seed=3))
    for sides in (samples, folder), (samples, data):
        given = [*sides, "--features", MEANS, "--batch", "5", "--nearest", "2"]
        evaluate(*given, "--json", tmp_path / "1.json")
        given = [*given, "--device", "cpu", "--json", tmp_path / "n.json"]
        text = check_done(mpi_run(job(ranks, *main_of(forked()), "evaluate", *map(str, given))))
        assert text.count("KID") == 1
        one, several = (json.loads((tmp_path / f"{n}.json").read_text()) for n in "1n")
        assert one["figures"] == several["figures"] and one["count"] == several["count"]
    if ranks > 2:
        result = mpi_run(job(ranks, *main_of(forked()), "evaluate", "nothing.npz", str(data)))
        assert result.returncode != 0 and result.stderr.count("nothing.npz does not exist") == 1
