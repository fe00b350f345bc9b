"""Adapters: what is trained, with which gradients, in which memory; their files."""

import pathlib

import numpy as np
import pytest
from click.testing import CliRunner

import numdiff
from numdiff.device.planned import cards_with
from numdiff.diffusion import Diffusion
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.models import convert
from numdiff.extras.lora.parameters import ADAPTED, adapter_names
from numdiff.nn import DiT, Tensor
from numdiff.training import Trainer, kinds
from numdiff.training.checkpoint import load_checkpoint
from numdiff.training.model_files import read_model_file, write_model_file
from numdiff.training.options import resolve
from numdiff.training.price import foreseen_peak
from numdiff.training.run import train
from numdiff.training.sampling import sample_command
from numdiff_cli.main import main
from tests.conftest import exhaustive, needs
from tests.distributed.test_distributed import check_done, job, main_of
from tests.distributed.test_distributed import run as mpi_run
from tests.forked import forked
from tests.training.test_trainer import FixedImages, device, losses  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_curves")

SMALL = {
    "image_size": 8,
    "in_channels": 3,
    "patch_size": 2,
    "hidden_size": 64,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 3,
    "class_dropout": 0.3,
    "learn_sigma": False,
}
LIGHTNING = {"norm": "rms", "rope": True, "mlp": "swiglu", "qk_norm": True, "hidden_size": 56}
# hidden_size 56 has an MLP of 149 channels, which are padded to 152
BLOCKS = pytest.mark.parametrize("block", [{}, LIGHTNING], ids=["DiT", "LightningDiT with padding"])
RUN = {"batch": 8, "learning_rate": 1e-2, "warmup_steps": 0, "seed": 3, "flip": False}


def silent(text):
    pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_base(path, seed=0, **options):
    """A model in which no weight is zero but the padding."""
    model = DiT(**{**SMALL, **options}, device="cpu", seed=seed)
    rng, drawn = np.random.default_rng(seed), model.arrays()
    arrays = {
        name: np.where(
            padding_of(name, drawn), 0, array + 0.05 * rng.standard_normal(array.shape)
        ).astype(np.float32)
        for name, array in drawn.items()
    }
    write_model_file(path, model.options, arrays, Diffusion(steps=100).options, model="dit")
    return path


def padding_of(name, arrays):
    """Where a new model's array has the zeros of a SwiGLU's padding."""
    if "mlp.w" not in name or "w3.bias" in name:
        return np.zeros(arrays[name].shape, bool)
    if "w12.bias" in name:
        return ~arrays[name.replace("bias", "weight")].any(1)
    return arrays[name] == 0


def make(path, device="cpu", lora=4, block=(), **more):  # noqa: F811
    labels = np.arange(24, dtype=np.int32) % 3
    net = DiT(**{**SMALL, **dict(block)}, device=device, seed=3)
    options = {**RUN, "precision": "fp32", **more}
    return Trainer(
        net, FixedImages(None, labels), diffusion={"steps": 100}, init=path, lora=lora, **options
    )


@BLOCKS
def test_it_starts_as_its_base_and_trains_adapters_alone(folder, device, block):  # noqa: F811
    trainer = make(write_base("base.h5", **block), device, block=block)
    base, (_, before, _) = numdiff.load("base.h5", device), read_model_file("base.h5")
    x = np.random.default_rng(0).standard_normal((3, 8, 8, 3)).astype(np.float32)
    given = x, np.array([0, 50, 99]), np.array([0, 1, 2])
    assert np.array_equal(trainer.model.predict(*given), base.predict(*given))
    values = losses(trainer, 30)
    assert np.mean(values[-5:]) < 0.9 * np.mean(values[:5])
    after = trainer.model.arrays()
    for name, array in before.items():
        same = np.array_equal(after[name], array)
        assert same == (not ADAPTED.fullmatch(name) and "embedding_table" not in name), name
        assert not after[name][array == 0].any()
    parameters = trainer.model.parameters
    adapters = 2 * sum(name.endswith("lora_A") for name in parameters.parameters)
    assert adapters == 16 and len(parameters.parameters) == 17
    rows, columns = zip(
        *(a.reshape(len(a), -1).shape for n, a in before.items() if ADAPTED.fullmatch(n)),
        strict=True,
    )
    table = before["y_embedder.embedding_table.weight"].size
    assert parameters.trained == 4 * (sum(rows) + sum(columns)) + table


@BLOCKS
@pytest.mark.parametrize(
    "split",
    [{}, {"microbatch": 4}, {"recompute": "blocks"}, {"microbatch": 4, "recompute": "mlp"}],
    ids=str,
)
def test_gradients_are_those_of_the_whole_weights(folder, device, block, split):  # noqa: F811
    """dB = s · dW·Aᵀ and dA = s · Bᵀ·dW, of dW from a trainer of the merged model."""
    write_base("base.h5", **block)
    trainer = make("base.h5", device, block=block, lora_alpha=8.0, **split)
    flat = trainer.state()["parameters"]
    rng = np.random.default_rng(1)
    values = trainer.model.parameters.arrays(trainer.model.parameters.data)
    noise = {n: a + 0.1 * rng.standard_normal(a.shape) * (a != 0) for n, a in values.items()}
    noise |= {n: 0.1 * rng.standard_normal(a.shape) for n, a in values.items() if "lora_B" in n}
    flat = trainer.model.parameters.flatten(noise)
    trainer.model.parameters.load_flat(flat)
    write_model_file(
        "whole.h5", trainer.model.options, trainer.model.arrays(), Diffusion(steps=100).options,
        model="dit",
    )  # fmt: skip
    whole = make("whole.h5", device, lora=None, block=block)
    assert abs(losses(trainer, 1)[0] - losses(whole, 1)[0]) < 1e-5
    wanted, found = whole.model.gradients(), trainer.model.gradients()
    for name, gradient in wanted.items():
        if ADAPTED.fullmatch(name):
            down, up = adapter_names(name)
            gradient = gradient.reshape(len(gradient), -1)
            pairs = (
                (found[up], 2 * gradient @ noise[down].T),
                (found[down], 2 * noise[up].T @ gradient),
            )
        else:
            pairs = ((found[name], gradient),) if name in found else ()
        for mine, theirs in pairs:
            assert np.abs(mine - theirs).max() <= 2e-5 * np.abs(theirs).max(), name


def test_ten_steps_are_five_and_five_resumed_bitwise(folder, device):  # noqa: F811
    write_base("base.h5")
    whole, first, second = (make("base.h5", device) for _ in range(3))
    values = losses(whole, 6)
    assert losses(first, 3) == values[:3]
    second.load_state(first.state())
    assert losses(second, 3) == values[3:]


def test_half_precision_forms_the_merged_weights(folder):
    """In bfloat16 the model computes with what a merged one has, to that type's rounding."""
    pytest.importorskip("ml_dtypes")
    write_base("base.h5")
    trainer = make("base.h5", precision="bf16")
    losses(trainer, 3)
    parameters = trainer.model.parameters
    values = parameters.arrays(parameters.data)
    _, before, _ = read_model_file("base.h5")
    for name, formed in trainer.model.arrays().items():
        if ADAPTED.fullmatch(name):
            down, up = (values[each] for each in adapter_names(name))
            merged = before[name] + up @ down
            assert np.abs(formed - merged).max() <= 2**-7 * np.abs(merged).max()
            assert parameters.base.parameters[name].data is None  # no float32 is left
    x = Tensor(np.zeros((1, 8, 8, 3), np.float32))
    assert np.isfinite(trainer.model(x, np.zeros(1, np.int32), np.zeros(1, np.int32)).data).all()


@exhaustive
@BLOCKS
def test_float16_has_the_gradients_of_float32(folder, block):
    """In the emulator, to the rounding of float16."""
    write_base("base.h5", **block)
    found = []
    for where, precision in (("cpu", "fp32"), ("emulator", "fp16")):
        trainer = make("base.h5", where, block=block, batch=2, lora=8, precision=precision)
        parameters, rng = trainer.model.parameters, np.random.default_rng(1)
        values = parameters.arrays(parameters.data)
        noise = {n: 0.1 * rng.standard_normal(a.shape) for n, a in values.items() if "lora_B" in n}
        parameters.load_flat(parameters.flatten({**values, **noise}))
        losses(trainer, 1)
        scale = 2.0**16 if precision == "fp16" else 1
        found.append({name: array / scale for name, array in trainer.model.gradients().items()})
    for name, gradient in found[0].items():
        assert np.abs(found[1][name] - gradient).max() < 4e-3 * np.abs(gradient).max(), name


@needs("mpi")
@exhaustive
@pytest.mark.slow
def test_two_ranks_train_as_one(folder):
    """Each has half of the batch; the adapters are the same but for rounding."""
    write_base("base.h5")
    given = (
        "--init base.h5 --lora 4 --batch 4 --steps 3 --sample-count 0 --checkpoint-every 3 --device cpu "
        "--size 8 --no-flip --preset tiny"
    ).split()
    made = []
    for ranks in (1, 2):
        check_done(
            mpi_run(
                job(ranks, *main_of(forked()), "train", "dit", *given, "--outdir", f"of{ranks}")
            )
        )
        (run,) = pathlib.Path(f"of{ranks}").iterdir()
        made.append(load_checkpoint(run / "adapter.h5")[0]["parameters"])
    assert np.abs(made[0] - made[1]).max() < 1e-4 * np.abs(made[0]).max()


@exhaustive
def test_memory_of_xl_2():
    """A step of 64 images with recomputation: less than half of the full training's memory."""
    card = cards_with((9, 0))[0]
    given = {
        "model": "dit", "architecture": "DiT-XL/2", "image_size": 32, "channels": 4,
        "num_classes": 1000, "class_cond": True, "batch": 64, "recompute": "blocks",
        "flip": False, "optimizer": "adamw", "device": "cpu",
    }  # fmt: skip
    options = resolve(given).changed(device="cuda", precision="fp16")
    sizes = kinds.get("dit").sizes(options, 4, 1000)
    full = foreseen_peak(options, sizes, card) / 2**20
    adapted = foreseen_peak(options.changed(lora=16, lora_alpha=None), sizes, card) / 2**20
    assert 14_000 < full < 17_000 and adapted < 0.45 * full


# Files --------------------------------------------------------------------------------------------

OPTIONS = {
    "model": "dit", "lora": 4, "device": "cpu", "batch": 4, "steps": 4, "sample_count": 2,
    "sample_steps": 1, "sample_every": 0, "checkpoint_every": 2, "log_every": 1, "flip": False,
    "classes": ("Food & Drink", "Flags", "Objects"), "preset": "tiny",
}  # fmt: skip


def run_of(base="base.h5", **more):
    return pathlib.Path(train(resolve({**OPTIONS, "init": base, **more}), echo=silent))


def test_a_run_its_adapter_and_the_merged_model_are_one(folder):
    """Sampled from the run, from base and adapter, and from files of the merged model."""
    run = run_of(write_base("base.h5"))
    assert (run / "adapter.h5").stat().st_size < 0.5 * pathlib.Path("base.h5").stat().st_size
    buffers, meta = load_checkpoint(run / "adapter.h5")
    assert list(buffers) == ["parameters"] and meta["lora"]["base"] == "base.h5"
    CliRunner().invoke(main, ["lora", "base.h5", str(run / "adapter.h5"), "merged.h5"])
    convert(run / "adapter.h5", "merged.safetensors")
    given = {
        "count": 3, "steps": 2, "sampler": "ddim", "cfg_scale": 1.0, "class_name": ["0", "1", "2"],
        "device": "cpu", "echo": silent, "npz": "samples.npz",
    }  # fmt: skip
    pictures = sample_command(str(run), **given)
    assert np.array_equal(sample_command("base.h5", lora=run / "adapter.h5", **given), pictures)
    for merged in ("merged.h5", "merged.safetensors"):
        other = sample_command(merged, **given)
        assert np.abs(other.astype(int) - pictures).max() <= 1
    assert not np.array_equal(sample_command("base.h5", **given), pictures)


def test_a_run_continues_with_the_same_bits(folder):
    write_base("base.h5")
    run = run_of()
    wanted, _ = load_checkpoint(run / "checkpoint-00000004.h5")
    options = resolve({**OPTIONS, "init": "base.h5"})
    train(options, resume=str(run / "checkpoint-00000002.h5"), echo=silent)
    again, _ = load_checkpoint(run / "checkpoint-00000004.h5")
    assert all(np.array_equal(again[name], wanted[name]) for name in wanted)


def test_another_base_is_refused(folder):
    run = run_of(write_base("base.h5"))
    write_base("other.h5", seed=1)
    for base, adapter, sentence in (
        ("other.h5", run / "adapter.h5", "adapters of other weights than those of other.h5"),
        ("base.h5", "base.h5", "base.h5 holds no adapters: give adapter.h5"),
        ("base.h5", "none.h5", "there is no file of adapters none.h5"),
    ):
        with pytest.raises(NumdiffError, match=sentence):
            numdiff.load(base, "cpu", lora=adapter)
    pathlib.Path("base.h5").rename("moved.h5")
    with pytest.raises(NumdiffError, match="adapters of the model base.h5, which is not there"):
        numdiff.load(run, "cpu")
    assert numdiff.load("moved.h5", "cpu", lora=run / "adapter.h5").num_classes == 3
    pathlib.Path("other.h5").rename("base.h5")
    options = resolve({**OPTIONS, "init": "base.h5", "steps": 6})
    with pytest.raises(NumdiffError, match="the adapters were trained on other weights than"):
        train(options, resume=str(run), echo=silent)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"lora": 65}, "--lora 65 is more than blocks.0.attn.qkv.weight of 192×64 has"),
        ({"optimizer": "muon"}, "--optimizer muon does not go with --lora"),
        ({"freeze": ("*.bias",)}, "--freeze does not go with --lora"),
        ({"shard_update": "yes"}, "--shard-update yes does not go with --lora"),
        ({"ema_std": (0.1,)}, "--ema-std does not go with --lora"),
        ({"init": None}, "--lora 4 needs --init"),
        ({"lora": None, "lora_alpha": 2.0}, "--lora-alpha 2 needs --lora"),
        ({"model": "unet", "init": None}, "--lora 4 needs --init"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(folder, given, sentence):
    write_base("base.h5")
    with pytest.raises(UsageError, match=sentence):
        train(resolve({**OPTIONS, "init": "base.h5", **given}), echo=silent)
    assert not pathlib.Path("runs").exists()
