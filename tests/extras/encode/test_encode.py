"""`numdiff data encode`: the latents are the autoencoder's, an interrupted call continues, and
nothing is mixed up."""

import json

import h5py
import numpy as np
import pytest

from numdiff.data.dataset import Dataset
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.extras.encode import latents as encode
from numdiff.extras.encode.latents import encode_dataset
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training.autoencoders import load_autoencoder

COUNT = 70  # two blocks
# hashes that files on disk have, of what a test writes: they must not change
WEIGHTS = "028edfda5f26"
SOURCE = "(70, 8, 8, 1) 5824eb18733d 2366f047292f 99426b349d69"


@pytest.fixture
def files(tmp_path, rng, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Autoencoder(
        image_size=8,
        model_channels=32,
        channel_mult=(1, 1),
        num_res_blocks=1,
        scaling_factor=0.5,
        shift_factor=0.25,
        device="cpu",
    )
    write_autoencoder("vae.h5", model.options, model.arrays())
    with h5py.File("photos.h5", "w") as file:
        file["images"] = rng.integers(0, 256, (COUNT, 8, 12, 3), dtype=np.uint8)
        file["labels"] = rng.integers(0, 2, COUNT).astype(np.uint8)
        file.attrs["classes"] = ["cat", "dog"]
    return model


def run(out="latents.h5", **options):
    encode_dataset(
        "photos.h5", out, "vae.h5", **{"device": "cpu", "echo": lambda text: None, **options}
    )
    with Dataset(out) as dataset:
        return dataset.read(np.arange(len(dataset))), dataset.labels.tolist(), dataset.classes


def test_latents_are_the_scaled_means(files, tmp_path):
    latents, labels, classes = run(dtype="float32")
    with Dataset("photos.h5") as photos:
        images = photos.read(np.arange(COUNT)).astype(np.float32) / 127.5 - 1
        assert labels == photos.labels.tolist() and classes == ["cat", "dog"]
    want = files.scale(files.encode(images)[0])
    assert latents.shape == (COUNT, 4, 6, 4) and np.abs(latents - want).max() < 1e-5
    assert not (tmp_path / "latents.h5.partial").exists()
    with h5py.File("latents.h5") as file:
        about = json.loads(file.attrs["vae"][0])
    assert (about["scaling_factor"], about["shift_factor"], about["channels"]) == (0.5, 0.25, 4)


def test_fingerprints_keep_their_values(files, tmp_path):
    """Latents files name their autoencoder by them, and calls that were interrupted their pictures."""
    weights = {name: np.full_like(a, 0.5) for name, a in files.arrays().items()}
    write_autoencoder("half.h5", files.options, weights)
    model = load_autoencoder("half.h5", "cpu", "fp32", True)
    assert model.weights_hash() == WEIGHTS
    with h5py.File("grey.h5", "w") as file:
        file["images"] = np.arange(70 * 8 * 8, dtype=np.uint8).reshape(70, 8, 8, 1)
        file["labels"] = np.arange(70, dtype=np.uint8) % 2
        file.attrs["classes"] = ["cat", "dog"]
    with Dataset("grey.h5", in_memory=False) as dataset:
        assert encode.dataset_key(dataset) == SOURCE


def test_mirrored_pictures_follow(files):
    latents, labels, _ = run(flip=True)
    plain, plain_labels, _ = run("plain.h5")
    with Dataset("photos.h5") as photos:
        mirrored = photos.read([3])[:, :, ::-1].astype(np.float32) / 127.5 - 1
    # float16, in other batches
    assert labels == plain_labels * 2 and np.abs(latents[:COUNT] - plain).max() < 2e-3
    # float16
    assert np.abs(latents[COUNT + 3] - files.scale(files.encode(mirrored)[0])[0]).max() < 2e-3


def test_samples_depend_on_the_seed_and_the_picture_alone(files):
    one, _, _ = run("a.h5", draw=True, seed=1)
    assert (run("b.h5", draw=True, seed=1)[0] == one).all()
    assert np.abs(run("c.h5", draw=True, seed=1, batch=5)[0] - one).max() < 4e-3
    assert np.abs(run("d.h5", draw=True, seed=2)[0] - one).max() > 0.1


def test_an_interrupted_call_continues(files, monkeypatch):
    whole, _, _ = run("whole.h5")
    real, blocks = encode._write_block, []

    def fail_once(folder, rows, latents):
        blocks.append(rows[0])
        if len(blocks) == 2:
            raise KeyboardInterrupt
        real(folder, rows, latents)

    monkeypatch.setattr(encode, "_write_block", fail_once)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - however this process reports it
        run()
    assert (run()[0] == whole).all()
    assert blocks == [0, 64, 64], "the first block was there"


def test_another_call_is_not_mixed_in(files, monkeypatch):
    monkeypatch.setattr(encode, "_join", lambda *arguments: None)  # leaves the blocks
    with pytest.raises(Exception):  # noqa: B017, PT011 - there is no file to open
        run()
    with pytest.raises(
        UsageError, match="latents of another call .its flip differs.: remove that folder"
    ):
        run(flip=True)


def test_a_damaged_block_is_made_again(files, tmp_path, monkeypatch):
    join = encode._join
    monkeypatch.setattr(encode, "_join", lambda *arguments: None)
    with pytest.raises(Exception):  # noqa: B017, PT011
        run()
    monkeypatch.setattr(encode, "_join", join)
    (tmp_path / "latents.h5.partial" / "00000001.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(NumdiffError, match="it is removed, and the same command makes it again"):
        run()
    assert len(run()[0]) == COUNT


def test_what_does_not_fit_says_so(files, tmp_path, rng):
    def photos(shape, dtype=np.uint8):
        with h5py.File("photos.h5", "w") as file:
            file["images"] = np.zeros(shape, dtype)

    run()
    with pytest.raises(UsageError, match="already exists: choose another name, or add --force"):
        run()
    photos((2, 8, 8, 1))
    with pytest.raises(
        UsageError,
        match="have 1 channels, and the autoencoder vae.h5 takes 3: import .* with --rgb",
    ):
        run("x.h5")
    photos((2, 7, 8, 3))
    with pytest.raises(UsageError, match="7×8, and the autoencoder vae.h5 divides each side by 2"):
        run("x.h5")
    photos((2, 8, 8, 4), np.float32)
    with pytest.raises(
        UsageError, match="holds floats, as latents are: give a dataset of pictures"
    ):
        run("x.h5")
