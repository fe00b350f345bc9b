"""What a run will launch is known before it, on every card; and ranks of one host share the
compiling."""

import contextlib
import gc
import threading
import traceback
import weakref

import numpy as np
import pytest

from numdiff.device import empty
from numdiff.device.kernel_cache import KernelCache, Key
from numdiff.device.limits import shared_limit
from numdiff.device.planned import CARDS, Planned, card_of, cards_with
from numdiff.diffusion import Sampling
from numdiff.diffusion.sampling_config import SamplingConfig
from numdiff.distributed.communicator import Alone
from numdiff.errors import UsageError
from numdiff.training import Trainer, compiling
from numdiff.training.build import build_dataset, build_model, build_trainer
from numdiff.training.compiling import PlannedRank, plan_of, plan_sampling
from numdiff.training.options import resolve
from numdiff.training.plan import plan_run
from numdiff.training.previews import Previews
from tests.conftest import exhaustive, quick
from tests.models import small_unet

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")


class LaunchRecorder(Planned):
    """Has the interface of a GPU, with graphs and arenas, and records every launch."""

    plans = False
    inference_arena = None

    def capture(self, function):
        function()
        return lambda: None

    def new_arena(self):
        return None

    @contextlib.contextmanager
    def within(self, arena):
        yield

    def pointer(self, array):
        return 0

    def download(self, array):
        """Minus ones: no step was bad."""
        return np.full(array.shape, -1).astype(array.dtype)


def gpu_options(model, preset, precision="fp16", **more):
    """As `numdiff train` resolves them on an H200; of the block of 2022 where `more` names no part
    of another."""
    plain = {"architecture": "DiT-Tiny"} if (model, preset) == ("dit", "tiny") else {}
    options = resolve({"model": model, "preset": preset, "device": "cpu", **plain, **more})
    return options.changed(precision=precision, device=LaunchRecorder(H200))


@pytest.mark.parametrize(
    "model, preset, more",
    [
        ("unet", "unet64", {}),
        ("dit", "small64", {}),
        ("unet", "tiny", {"microbatch": 1, "sampler": "heun"}),
        (
            "dit",
            "tiny",
            {
                "depth": 2,
                "recompute": True,
                "ema_halflife": 0.0,
                "clip_norm": 0.0,
                "sampler": "ddpm",
            },
        ),
        ("dit", "tiny", {"precision": "tf32", "sampler": "dpm++2m"}),
        ("unet", "tiny", {"precision": "bf16"}),
        (
            "dit",
            "tiny",
            {
                "depth": 2,
                "precision": "bf16",
                "norm": "rms",
                "qk_norm": True,
                "rope": True,
                "mlp": "swiglu",
            },
        ),
        (
            "dit",
            "tiny",
            {
                "depth": 2,
                "norm": "rms",
                "qk_norm": True,
                "rope": True,
                "mlp": "swiglu",
                "mlp_ratio": 3.9,
                "shift": False,
                "path": "linear",
            },
        ),
        ("dit", "tiny", {"depth": 2, "image_size": 64, "attention": "sla"}),
        ("dit", "tiny", {"depth": 2, "precision": "fp8", "recompute": True}),
    ],
    ids=[
        "unet",
        "dit",
        "microbatches",
        "recompute",
        "tf32",
        "bf16",
        "lightning-bf16",
        "lightning",
        "sla",
        "fp8",
    ],
)
@quick(lambda more: "norm" in more or more.get("precision") == "fp8" or not more)
def test_nothing_is_launched_that_was_not_foreseen(model, preset, more):
    """A run as it is, from the first weights over steps launched, recorded and replayed to the
    pictures."""
    options = gpu_options(model, preset, seed=1, **more)
    dataset = build_dataset(options)
    planned = plan_run(options, dataset, H200)
    model = build_model(
        options, dataset.channels, len(dataset.classes) if options.class_cond else None
    )
    model.parameters.zeros.clear()
    trainer = build_trainer(options, model, dataset)
    for _ in trainer.run(3, 1):
        pass
    Previews(trainer, options.changed(sample_steps=4)).draw()
    trainer.close()
    launched = options.device.kernels
    assert len(launched) > 30 and set(launched) <= set(planned)
    assert len(planned) <= len(launched) + 3  # few unused kernels are compiled


class PlannedMemory:
    """Of an array."""


class Watched(LaunchRecorder):
    """Knows what was allocated in an arena for steps, and is still there."""

    arenas = ("of all that lasts",)
    current = None

    def __init__(self, card):
        super().__init__(card)
        self.of_steps, self.turn = [], threading.RLock()

    def new_arena(self):
        return "of a step"

    @contextlib.contextmanager
    def within(self, arena):
        before, self.current = self.current, arena
        yield
        self.current = before

    def allocate(self, nbytes):
        memory = PlannedMemory()
        if self.current not in (None, *self.arenas):
            self.of_steps.append(
                (weakref.ref(memory), "".join(traceback.format_stack(limit=6)[:-2]))
            )
        return memory


@pytest.mark.parametrize("model, precision", [("unet", "fp16"), ("dit", "fp8")])
def test_lasting_arrays_are_not_where_a_step_computes(model, precision):
    """A replay writes to all memory that was free when it was recorded, even if some of it has been
    allocated since."""
    smaller = (
        {"depth": 2} if model == "dit" else {"channel_mult": (1, 2), "attention_resolutions": (16,)}
    )
    options = gpu_options(
        model, "tiny", precision, batch=2, sample_count=19, sample_steps=2, **smaller
    )
    options = options.changed(device=Watched(H200))
    dataset = build_dataset(options)
    made = build_model(
        options, dataset.channels, len(dataset.classes) if options.class_cond else None
    )
    trainer = build_trainer(options, made, dataset)
    for _ in trainer.run(3, 1):
        pass
    recorded = len(options.device.of_steps)
    previews = Previews(trainer, options)
    for _ in range(2):  # of 16 and 3 images, where a step has 2
        previews.draw()
    gc.collect()
    since = options.device.of_steps[recorded:]
    assert len(since) > 100 and not [where for memory, where in since if memory() is not None]
    trainer.close()


def test_a_trainer_plans_its_own_step():
    """…from what it was made with; what it holds is left alone."""
    options = gpu_options("unet", "tiny")
    dataset = build_dataset(options)
    sizes = {"image_size": 32, "channel_mult": (1, 2), "attention_resolutions": (16,)}
    model = small_unet(**sizes, device=options.device)
    trainer = Trainer(model, dataset, batch=8, precision="fp16", ema_halflife=100, clip_norm=1.0)
    options.device.kernels.clear()
    keys = plan_of(trainer, H200)
    assert not options.device.kernels
    next(iter(trainer.run(2, 1)))
    trainer.close()
    assert set(options.device.kernels) <= set(keys)
    halved = {word for key in keys for word in key.types if word.startswith("float16")}
    assert halved and trainer.model.backend is options.device


def test_samples_are_planned():
    sizes = {"image_size": 16, "channel_mult": (1, 2), "attention_resolutions": (16, 8)}
    model = small_unet(**sizes, num_classes=3, device=LaunchRecorder(H200))
    model.compute_in_half()
    model.backend.kernels.clear()
    keys = plan_sampling(model, SamplingConfig(count=5, steps=4, sampler="heun", batch=3))(H200)
    assert not model.backend.kernels
    for _ in Sampling(model, count=5, steps=4, sampler="heun", batch=3).batches():
        pass
    assert set(model.backend.kernels) <= set(keys) and any(
        "float16" in " ".join(key.types) for key in keys
    )


def test_cards_differ():
    """Launchers choose by capability, size and table of a card."""
    options = gpu_options("unet", "tiny")
    dataset = build_dataset(options)
    modules = {
        card.capability: {key.module for key in plan_run(options, dataset, card)}
        for card in (H200, cards_with((8, 0))[0])
    }
    assert "numdiff.kernels.conv2d.hopper.convolution" in modules[9, 0] - modules[8, 0]
    assert "numdiff.kernels.conv2d.mma_halo" in modules[8, 0]
    with pytest.raises(
        UsageError, match=r"--capability 6.1: no such card is known; use one of 7.5, 8.0, .*has it"
    ):
        cards_with((6, 1))


def test_a_card_is_read_off_the_gpu():
    class Gpu:
        device_name, capability, multiprocessors, shared_limit = (
            "NVIDIA H200",
            (9, 0),
            132,
            227 << 10,
        )
        cache = KernelCache((9, 0))

    assert card_of(Gpu) == H200 and card_of(Gpu).compiled_for == (9, 0)
    Gpu.device_name, Gpu.capability, Gpu.shared_limit = "NVIDIA H200 as 8.6", (8, 6), 99 << 10
    assert card_of(Gpu) == ("NVIDIA H200 as 8.6", (8, 6), 132, 99 << 10, (9, 0))
    assert shared_limit(empty((1,), np.float32, Planned(card_of(Gpu)))) == 99 << 10


def test_peers_kernels_are_planned():
    options = gpu_options("dit", "tiny").changed(shard_update="no")
    dataset = build_dataset(options)
    one, two, mpi = (
        {key.name for key in plan_run(options, dataset, H200, PlannedRank(*rank))}
        for rank in ((1,), (2,), (2, 1, "mpi"))
    )
    peers, norm = (
        {name for name in two - one if name.startswith("peer")},
        {"squares_of_pieces_kernel"},
    )
    assert peers and two - one == peers | norm and mpi - one == norm  # of parts, in any case


def test_the_shared_scales_of_float8_are_planned():
    options = gpu_options("dit", "tiny", "fp8")
    dataset = build_dataset(options)
    one, *others = (
        {key.name for key in plan_run(options, dataset, H200, PlannedRank(*rank))}
        for rank in ((1,), (2,), (2, 2, "nccl"))
    )
    assert all("share_largest_kernel_v1" in names - one for names in others)


@exhaustive
def test_a_shared_update_is_planned():
    """With its previews, whose average ranks gather."""
    options = gpu_options("dit", "tiny", optimizer="adamw")
    dataset = build_dataset(options)
    each, shared = (
        {
            key.name
            for key in plan_run(options.changed(shard_update=how), dataset, H200, PlannedRank(4))
        }
        for how in ("no", "yes")
    )
    # of the partial sums, of the weights in 16 bits, and of the gradients that copies have brought
    assert (
        shared - each
        == {
            "peer_all_gather_kernel_v1",
            "peer_copy_pieces_kernel_v1",
            "peer_reduce_pieces_kernel_v1_4",
        }
        and not each - shared
    )


class Rank(Alone):
    """One of two ranks on a host, which reports its results to the other."""

    size = local_size = 2
    host_cores = [0, 1]

    def __init__(self, rank, exchanged):
        self.rank = self.local_rank = rank
        self.exchanged, self.calls = exchanged, 0

    def on_host(self, value):
        self.calls += 1
        if self.rank == 0:
            self.exchanged.append(value)
        return [self.exchanged[self.calls - 1], value]


def test_ranks_of_a_host_share_the_compiling(tmp_path, monkeypatch):
    """The first compiles for all, on the cores of all; the others find what it made, wherever that
    was put."""
    started, keys = [], [Key("numdiff.kernels.reduce", f"kernel{n}", ()) for n in range(3)]

    class Compiles:
        def __init__(self, keys, cache, on=None):
            started.append((list(keys), on))
            self.wanted, self.workers = [], 0
            cache.more.append(tmp_path / "more")

        def close(self):
            pass

    monkeypatch.setattr(compiling, "CompileAhead", Compiles)
    exchanged, caches = [], []
    for rank in range(2):
        gpu = type(
            "Gpu",
            (),
            {
                "cache": KernelCache((9, 0), tmp_path / str(rank)),
                "device_name": "NVIDIA H200",
                "capability": (9, 0),
                "multiprocessors": 132,
                "shared_limit": 227 << 10,
            },
        )
        monkeypatch.setattr(compiling, "get_gpu", lambda gpu=gpu: gpu)
        with compiling.compiling(lambda card: keys, Rank(rank, exchanged)):
            pass
        caches.append(gpu.cache)
    assert started == [(keys, [0, 1])]
    assert [cache.more for cache in caches] == [[tmp_path / "more"]] * 2
