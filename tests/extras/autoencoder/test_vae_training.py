"""`numdiff train vae`: the trainer with another objective; its run, and what follows from it."""

import json
import math
import pathlib

import h5py
import numpy as np
import pytest

from numdiff.data import open_dataset
from numdiff.device.planned import cards_with
from numdiff.diffusion.reconstruction import Reconstruction
from numdiff.errors import UsageError
from numdiff.extras.autoencoder.reconstructions import Reconstructions, psnr
from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.nn import Tape, Tensor, UNet
from numdiff.nn import functional as F
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training import Trainer
from numdiff.training.autoencoders import load_autoencoder
from numdiff.training.build import build_dataset, build_model, build_trainer
from numdiff.training.checkpoint import load_checkpoint
from numdiff.training.options import TrainOptions, resolve
from numdiff.training.plan import Described, PlannedRank, plan_run
from tests.command import last_line, output_of, run
from tests.conftest import exhaustive, needs, numerical_gradient, relative_error
from tests.distributed.test_distributed import check_done, job, main_of
from tests.distributed.test_distributed import run as mpi_run
from tests.forked import forked
from tests.training.test_trainer import FixedImages, device, losses  # noqa: F401

SMALL = {
    "image_size": 8,
    "model_channels": 8,
    "channel_mult": (1, 2),
    "num_res_blocks": 1,
    "groups": 4,
    "mid_attention": False,
}
OPTIONS = (
    "--size 16 --model-channels 8 --channel-mult 1,2 --groups 4 --batch 4 --steps 4 --sample-every 2 "
    "--sample-count 3 --log-every 2 --checkpoint-every 2 --device cpu"
)

GIVEN = {
    "model": "vae", "device": "cpu", "image_size": 16, "model_channels": 8, "channel_mult": (1, 2),
    "groups": 4, "batch": 4, "steps": 4, "sample_count": 2, "mid_attention": False,
    "num_res_blocks": 1,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_curves")


def make(device="cpu", objective=None, seed=3, **options):  # noqa: F811
    """A trainer of a small autoencoder on 24 pictures, each of four colours."""
    images = np.random.default_rng(5).integers(0, 256, (24, 2, 2, 3), dtype=np.uint8)
    images = images.repeat(4, axis=1).repeat(4, axis=2)
    return Trainer(
        Autoencoder(**SMALL, device=device, seed=seed),
        FixedImages(images, None),
        objective=objective or Reconstruction(),
        **{"batch": 8, "learning_rate": 2e-3, "warmup_steps": 2, "precision": "fp32", **options},
    )


def test_ten_steps_are_five_and_five_resumed_bitwise(device):  # noqa: F811
    whole, first, second = (make(device, ema_decay=0.9) for _ in range(3))
    values = losses(whole, 10)
    assert losses(first, 5) == values[:5]
    second.load_state(first.state())
    assert losses(second, 5) == values[5:]
    for name, array in whole.state().items():
        assert np.array_equal(array, second.state()[name]), name


def test_microbatches_give_the_same_step():
    """But for rounding: the noise of a picture's latents does not depend on the split."""
    one, four = make(batch=8), make(batch=8, microbatch=2)
    assert losses(four, 3) == pytest.approx(losses(one, 3), rel=1e-5)


@pytest.mark.parametrize("loss", ["l1", "l2"])
def test_it_learns(loss):
    values = losses(make(objective=Reconstruction(loss), learning_rate=5e-3), 80)
    assert np.mean(values[-5:]) < 0.8 * np.mean(values[:5])


def test_the_loss_is_the_papers(rng):
    """Against its definition, in float64; the KL term is weighed as if it were of each value."""
    model, objective = Autoencoder(**SMALL, device="cpu"), Reconstruction("l2", 0.3)
    x = rng.standard_normal((2, 8, 8, 3)).astype(np.float32)
    noise = rng.standard_normal((2, 4, 4, 4)).astype(np.float32)
    loss = objective.loss_of(model, (x, noise), None, None, 1.0)
    mean, logvar = np.split(model.moments(Tensor(x)).data.astype(np.float64), 2, axis=3)
    made = model.reconstruct(Tensor((mean + np.exp(logvar / 2) * noise).astype(np.float32))).data
    kl = 0.5 * (mean**2 + np.exp(logvar) - 1 - logvar).sum()
    assert loss.data[0] == pytest.approx(((made - x) ** 2).mean() + 0.3 * kl / x.size, rel=1e-5)


def test_gradients_of_both_terms_reach_the_moments(rng):
    moments, noise = rng.standard_normal((1, 2, 2, 4)), rng.standard_normal((1, 2, 2, 2))
    target = rng.standard_normal((1, 2, 2, 2))

    def forward(m):
        return F.add(F.l1(F.posterior_sample(m, noise), target), F.posterior_kl(m, 0.1))

    x = Tensor(moments, requires_grad=True)
    with Tape() as tape:
        loss = forward(x)
    tape.backward(loss)
    numerical = numerical_gradient(lambda m: forward(Tensor(m)).data, moments, 1.0)
    assert relative_error(x.grad, numerical) < 1e-6


def test_what_does_not_fit_is_refused():
    images = np.zeros((8, 8, 8, 3), np.uint8)
    model = Autoencoder(**SMALL, device="cpu")
    with pytest.raises(UsageError, match="an Autoencoder is not trained as a diffusion model"):
        Trainer(model, FixedImages(images, None), batch=4)
    unet = UNet(image_size=8, model_channels=32, channel_mult=(1,), num_res_blocks=1, device="cpu")
    with pytest.raises(UsageError, match="a Reconstruction trains an Autoencoder, and not"):
        Trainer(unet, FixedImages(images, None), objective=Reconstruction(), batch=4)
    latents = FixedImages(images, None)
    latents.dtype, latents.path = np.dtype(np.float32), "latents.h5"
    with pytest.raises(UsageError, match="'latents.h5' are float32, as latents are: give the pic"):
        Trainer(model, latents, objective=Reconstruction(), batch=4)
    with pytest.raises(UsageError, match="unknown loss 'l3': use l1, l2"):
        Reconstruction("l3")
    with pytest.raises(UsageError, match="kl_weight -1 must be a number from 0"):
        Reconstruction(kl_weight=-1)
    with pytest.raises(UsageError, match="--prediction belongs to the model unet; leave it out"):
        resolve({"model": "vae", "prediction": "v"})
    with pytest.raises(UsageError, match="image_size 30 cannot be halved 2 times"):
        resolve({"model": "vae", "image_size": 30, "device": "cpu"})


def test_psnr():
    pictures = np.full((2, 4, 4, 3), 100, np.uint8)
    others = pictures.copy()
    others[0] += 10
    first, equal = psnr(pictures, others)
    assert first == pytest.approx(20 * math.log10(25.5)) and equal > 60


@exhaustive
@pytest.mark.parametrize("ranks, precision", [(1, "fp16"), (2, "bf16")])
def test_its_kernels_are_planned(ranks, precision):
    """Those of a step and of the reconstructions, as `numdiff compile vae` compiles them for a GPU."""
    given = {"model": "vae", "image_size": 16, "precision": precision, "recompute": "blocks"}
    options = resolve(given, (9, 0))
    assert options.preset == "vae256"
    card = cards_with((9, 0))[0]
    names = {key.name for key in plan_run(options, Described(16, 3), card, PlannedRank(ranks))}
    for wanted in ("l1_forward", "posterior_sample_backward", "posterior_kl_forward", "adamw"):
        assert any(wanted in name for name in names), wanted


@exhaustive
def test_a_run_and_what_follows_from_it(tmp_path, monkeypatch):
    """The run's files, its resume, and its autoencoder in the commands that take one."""
    monkeypatch.chdir(tmp_path)
    trained = run("train vae", OPTIONS)
    assert trained.exit_code == 0, trained.output
    folder = tmp_path / "runs" / "00000-vae-tiny"
    records = [
        json.loads(line) for line in (folder / "reconstructions.jsonl").read_text().splitlines()
    ]
    assert [(r["step"], r["images"]) for r in records] == [(2, 95), (4, 95)]
    assert all(r["held_out"] for r in records)
    said = f"{records[-1]['psnr']:.2f} dB of 95 held-out pictures"
    assert f"psnr      {said} after step 4" in trained.output
    assert trained.output.rstrip().endswith(f"samples-00000004.png, PSNR {said}")
    stats = [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]
    assert [(r["step"], r["psnr"]) for r in stats] == [(r["step"], r["psnr"]) for r in records]
    assert (folder / "samples-00000004.png").exists()
    # the averaged weights, with latents of standard deviation 1
    model, (buffers, meta) = (
        load_autoencoder(folder, "cpu"),
        load_checkpoint(folder / "checkpoint-00000004.h5"),
    )
    arrays = np.concatenate([array.ravel() for array in model.arrays().values()])
    assert np.isin(arrays, buffers["ema"]).all() and model.scaling_factor != 1
    assert meta["objective"] == {"loss": "l1", "kl_weight": 1e-6} and "diffusion" not in meta
    # from the middle, to the same bits
    (folder / "checkpoint-00000004.h5").unlink()
    resumed = run("train vae --resume --steps 4")
    assert resumed.exit_code == 0, resumed.output
    again = load_checkpoint(folder / "checkpoint-00000004.h5")[0]
    assert all(np.array_equal(again[name], buffers[name]) for name in buffers)
    output_of("convert", folder, "vae.h5")
    output_of("data import", folder, "pictures.h5 --size 24")
    output_of("data encode pictures.h5 latents.h5 --device cpu --vae", folder)
    assert (
        load_autoencoder("vae.h5", "cpu").decode(np.zeros((1, 4, 4, 4)))
        == (model.decode(np.zeros((1, 4, 4, 4))))
    ).all()
    refused = run("sample", folder)
    assert (
        refused.exit_code == 1 and "holds an autoencoder, and no diffusion model" in refused.output
    )


def write_pictures(path, count, seed=0):
    colours = np.random.default_rng(seed).integers(0, 256, (count, 1, 1, 3), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file["images"] = np.broadcast_to(colours, (count, 16, 16, 3))
    return path


def test_held_out_pictures_are_not_trained_on(tmp_path, monkeypatch):
    """The PSNR is of the held-out ones alone, which are the same for a seed."""
    monkeypatch.chdir(tmp_path)
    options = resolve({**GIVEN, "data": write_pictures("p.h5", 10), "held_out": 0.3})
    with build_dataset(options) as dataset, open_dataset("p.h5") as whole:
        held, kept = dataset.held_out.kept, dataset.kept
        assert len(held) == 3 and sorted([*held, *kept]) == list(range(10))
        assert np.array_equal(dataset.read(np.arange(7)), whole.read(kept))
        with build_dataset(options) as again:
            assert np.array_equal(again.kept, kept)
        with build_dataset(options.changed(seed=1)) as other:
            assert not np.array_equal(other.kept, kept)
        trainer = build_trainer(options, build_model(options), dataset)
        read = []
        monkeypatch.setattr(
            dataset.whole, "read", lambda rows, out=None: read.extend(rows) or whole.read(rows, out)
        )
        assert len(losses(trainer, 4)) == 4 and read and not set(read) & set(held)
        previews = Reconstructions(trainer, options)
        read.clear()
        figures = previews.figures()
        assert read == list(held)
        (pictures, made, *_), _ = previews.draw()
        assert read == list(held) and figures == {"psnr": psnr(pictures, made).mean()}
    options = options.changed(held_out=0.0)
    with build_dataset(options) as dataset:
        assert len(dataset) == 10 and not hasattr(dataset, "held_out")


def test_a_run_of_before_trains_on_all_pictures():
    values = resolve(GIVEN).to_json()
    del values["held_out"]
    assert TrainOptions.from_json(values).held_out == 0


def test_it_starts_from_given_weights(tmp_path, monkeypatch):
    """Sizes follow from the file; another size, and what is no autoencoder, are refused."""
    monkeypatch.chdir(tmp_path)
    write_pictures("p.h5", 6)
    sizes = {**SMALL, "image_size": 16, "latent_channels": 3, "scaling_factor": 0.5}
    base = Autoencoder(**sizes, device="cpu", seed=7)
    write_autoencoder("base.h5", base.options, base.arrays())
    pathlib.Path("folder").mkdir()  # as of a run
    write_autoencoder("folder/autoencoder.h5", base.options, base.arrays())
    given = {name: value for name, value in GIVEN.items() if name not in SMALL}
    for source in ("base.h5", "folder"):
        options = resolve({**given, "data": "p.h5", "init": source, "image_size": 16})
        assert options.latent_channels == 3 and options.channel_mult == (1, 2)
        with build_dataset(options) as dataset:
            trainer = build_trainer(options, build_model(options), dataset)
            assert f"tensors from {source}" in trainer.origin["lines"][0]
            for name, array in trainer.model.arrays().items():
                assert np.array_equal(array, base.arrays()[name]), name
    result = run("train vae --init base.h5 --data p.h5 --dry-run --size 16")
    assert result.exit_code == 0 and "tensors from base.h5" in result.output
    for arguments, sentence in (
        ("--latent-channels 4", "--latent-channels 4 contradicts --init base.h5"),
        ("--init none.h5", "none.h5 does not exist"),
        ("--init p.h5", "p.h5"),
        ("--lora 4", "No such option"),
    ):
        result = run("train vae --init base.h5 --data p.h5 --size 16", arguments)
        assert result.exit_code in (1, 2) and sentence in last_line(result), result.output


@needs("mpi")
@exhaustive
@pytest.mark.slow
def test_two_ranks_write_the_average_of_both(tmp_path):
    """Each holds a part of it, where they share the update; the pictures are shared, too."""
    found = []
    for share in ("yes", "no"):
        arguments = [*OPTIONS.split(), "--outdir", str(tmp_path / share), "--shard-update", share]
        check_done(mpi_run(job(2, *main_of(forked()), "train", "vae", *arguments)))
        folder = tmp_path / share / "00000-vae-tiny"
        average = load_checkpoint(folder / "checkpoint-00000004.h5")[0]["ema"]
        model = load_autoencoder(folder, "cpu")
        arrays = np.concatenate([array.ravel() for array in model.arrays().values()])
        assert np.isin(arrays, average).all()
        found.append((arrays, (folder / "reconstructions.jsonl").read_text()))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
