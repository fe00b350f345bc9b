"""Memory: what a step keeps, and what a trainer says that would fit, if that is too much."""

import numpy as np
import pytest

from numdiff.device import upload
from numdiff.device.arena import SEGMENT, Arena
from numdiff.device.planned import CARDS, Planned
from numdiff.diffusion.memory import Measuring
from numdiff.errors import OutOfMemoryError, UsageError
from numdiff.nn import DiT, Tape, Tensor
from numdiff.training import Trainer
from numdiff.training.build import build_model, count_parameters, model_options
from numdiff.training.compiling import PlannedRank, plan_trainer
from numdiff.training.options import resolve
from numdiff.training.price import foreseen_peak, foreseen_segments, with_and_without
from tests.diffusion.test_memory import Small


class Emoji:
    """The shape of a dataset."""

    shape, dtype, classes = (2000, 64, 64, 3), np.dtype(np.uint8), ["a", "b"]
    labels = np.zeros(2000, np.int32)


def trainer(device, batch, microbatch=None):
    model = DiT(
        image_size=64,
        in_channels=3,
        patch_size=4,
        hidden_size=384,
        depth=2,
        num_heads=6,
        num_classes=2,
        device=device,
        seed=None,
    )
    return Trainer(
        model,
        Emoji,
        batch=batch,
        microbatch=microbatch,
        precision="fp32",
        communicator=PlannedRank(),
    )


class H100:
    """What a stand-in for a GPU is made of."""

    device_name, capability, multiprocessors, shared_limit = CARDS[-5][:4]


def kept_bytes(channels, depth, batch=8):
    """Bytes that the forward pass of a DiT of 256 tokens leaves for the backward."""
    device = Measuring(H100)
    model = DiT(
        image_size=32,
        hidden_size=channels,
        depth=depth,
        num_heads=channels // 64,
        device=device,
        seed=None,
    )
    model.compute_in_half(np.float16)
    images = upload(np.zeros((batch, 32, 32, 4), np.float32), device)
    labels = upload(np.zeros(batch, np.int32), device)
    taken = []
    device.arena = Arena(lambda nbytes: taken.append(nbytes) or sum(taken) - nbytes)
    with Tape() as tape:
        y = model(Tensor(images), labels, labels)
        held = device.arena.used_bytes - y.data.nbytes
    assert tape.records
    return held


@pytest.mark.parametrize("channels, kept", [(768, 17), (896, 13)])
def test_what_a_block_of_a_dit_keeps(channels, kept):
    """In 16 bits on Hopper, in numbers a token and channel: the norms' results 2, q, k and v 3, the
    branches before their last layers 1 + 4 (before GELU) and after 2, the tokens after the block 1;
    of narrow ones GELU's results 4."""
    numbers = (kept_bytes(channels, 3) - kept_bytes(channels, 1)) / 2 / (8 * 256 * channels * 2)
    assert kept <= numbers < kept + 0.2  # and statistics, the norms' vectors


def test_a_batch_that_does_not_fit_is_told_with_a_microbatch_that_does():
    run = trainer(Small(3 << 30), 1536)
    with pytest.raises(
        OutOfMemoryError,
        match=r"1,536 images at a time do not fit into the [\d,]+ MiB that Small GPU "
        r"has left .*; use --microbatch \d+, which gives the same step in \d+ "
        "parts",
    ) as error:
        run._run_step(run.step_function)
    most = int(str(error.value).split("--microbatch ")[1].split(",")[0])
    assert most > 4 and 1536 % most == 0
    fitting = trainer(Small(3 << 30), 1536, most)
    for _ in range(2):  # launched, and recorded
        fitting._run_step(fitting.step_function)


def test_what_32_bits_do_not_count_is_told_before_anything_is_compiled():
    """Of a number with few divisors, as each that is tried plans a step."""
    run = trainer(Planned(CARDS[-4]), 2 * 4093)
    with pytest.raises(
        UsageError,
        match="8,186 images at a time are more than kernels count in 32 bits; use "
        "--microbatch 4093,",
    ):
        plan_trainer(run, PlannedRank())


def test_the_memory_of_this_machine_is_not_the_gpus(monkeypatch):
    """A run is planned for a card that has more memory than the machine has."""
    monkeypatch.setattr("numdiff.training.build.machine_bytes", lambda: 1 << 20)
    options = resolve(
        {"model": "dit", "preset": "tiny", "architecture": "DiT-Tiny", "device": "cpu"}
    )
    with pytest.raises(UsageError, match="needs at least"):
        build_model(options)
    assert build_model(options.changed(device=Planned(CARDS[-4]))).parameters.count > 4_000_000


@pytest.mark.parametrize("model, precision", [("dit", "fp16"), ("unet", "fp16"), ("dit", "fp8")])
def test_the_peak_is_foreseen(model, precision):
    """What is recomputed takes less, and whole blocks the least; what is kept between steps is in
    all."""
    card = next(card for card in CARDS if card.capability == (9, 0))
    given = {
        "model": model,
        "preset": "small64" if model == "dit" else "unet64",
        "precision": precision,
        "batch": 32,
        **({"depth": 4} if model == "dit" else {"num_res_blocks": 1}),
    }
    parts = (
        ("no", "attention", "mlp", "blocks") if model == "dit" else ("no", "attention", "blocks")
    )
    options = [resolve({**given, "recompute": part}, (9, 0)) for part in parts]
    sizes = model_options(options[0], 3, 9 if model == "dit" else None)
    peaks = [foreseen_peak(o, sizes, card) for o in options]
    assert peaks[0] > max(peaks[1:]) and peaks[-1] < min(peaks[:-1])
    assert with_and_without(options[-1], sizes, card) == [peaks[-1] / 2**20, peaks[0] / 2**20]
    # weights, a copy, gradients, two moments, an average
    assert peaks[-1] > 22 * count_parameters(model, sizes)[1]


def test_the_segments_are_foreseen():
    """All that a GPU's arenas take from the driver: the step's, recorded, and the grids', which an
    autoencoder computes elsewhere and a sampler in the memory of the step."""
    for given, more in (({"model": "unet"}, False), ({"model": "vae"}, True)):
        options = resolve({**given, "preset": "tiny", "device": "cpu", "image_size": 64})
        options = options.changed(device="cuda", precision="fp16")
        sizes = model_options(options, 3, None)
        drawn, launches = foreseen_segments(options, sizes, CARDS[-1])
        alone, _ = foreseen_segments(options.changed(sample_count=0), sizes, CARDS[-1])
        assert drawn % SEGMENT == alone % SEGMENT == 0 and launches > 100
        assert alone >= foreseen_peak(options, sizes, CARDS[-1])
        assert (drawn > alone) == more
