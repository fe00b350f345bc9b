"""Training in float16 and bfloat16: the wiring of loss scaling, and whether a step has float32's
gradients, nearly."""

import copy
import math
import pickle

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import copy_into, download, fill_zero, get_backend, upload, zeros
from numdiff.device.emulator import EmulatorDevice
from numdiff.diffusion import Diffusion
from numdiff.dtypes import bfloat16
from numdiff.errors import UsageError
from numdiff.nn import AdamW, UNet
from numdiff.nn.optimizer import LossScale
from numdiff.training.precision import compute_in
from numdiff.training.step import TrainingStep
from tests.conftest import exhaustive, exhaustively, needs
from tests.models import LIGHTNING, small_dit, small_unet, without_zeros

GPU = [pytest.param("cuda", marks=needs("gpu"))]
DEVICES = ["emulator", *GPU]


class HalfWeights:
    """As much of FlatParameters as AdamW needs."""

    def __init__(self, values, backend=None):
        self.total, self.trained_ranges = len(values), [(0, len(values))]
        self.data, self.grad = (
            upload(values.astype(np.float32), backend),
            zeros(len(values), np.float32, backend),
        )
        self.half = upload(values.astype(np.float16), backend)

    def refresh(self):
        """Nothing is made of these weights."""


def update(optimizer, gradient):
    copy_into(
        optimizer.parameters.grad, np.float32(gradient) * download(optimizer.loss_scale.scale)
    )
    optimizer.update(zeros(1, np.float32, optimizer.parameters.data))
    return float(download(optimizer.gradient_norm)[0])


def optimizer_of(backend, **options):
    weights = HalfWeights(np.linspace(-1, 1, 8), backend)
    scale = LossScale(weights.data, **options)
    return AdamW(weights, learning_rate=1e-2, clip_norm=1.0, ema_decay=0.9, loss_scale=scale)


@pytest.fixture(params=["cpu", *DEVICES])
def backend(request):
    return get_backend(request.param)


def test_a_scaled_update_is_the_plain_update(backend, rng):
    scaled = optimizer_of(backend, start=4096.0)
    plain = AdamW(
        HalfWeights(np.linspace(-1, 1, 8), backend),
        learning_rate=1e-2,
        clip_norm=1.0,
        ema_decay=0.9,
    )
    for _ in range(3):
        gradient = rng.standard_normal(8).astype(np.float32)
        copy_into(plain.parameters.grad, gradient)
        plain.update(zeros(1, np.float32, plain.parameters.data))
        norm = update(scaled, gradient)
        assert norm == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
        for name in ("m", "v", "ema"):
            np.testing.assert_allclose(
                download(getattr(scaled, name)), download(getattr(plain, name)), rtol=2e-6
            )
        np.testing.assert_array_equal(
            download(scaled.parameters.half), download(scaled.parameters.data).astype(np.float16)
        )


def test_an_overflow_changes_nothing_but_the_scale(backend):
    optimizer = optimizer_of(backend, start=1024.0, interval=2)
    update(optimizer, np.ones(8))
    arrays = ("m", "v", "ema", "updates")
    before = [download(getattr(optimizer, name)) for name in arrays]
    weights = download(optimizer.parameters.data), download(optimizer.parameters.half)
    assert math.isnan(update(optimizer, np.full(8, np.inf)))
    for name, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(download(getattr(optimizer, name)), old)
    np.testing.assert_array_equal(download(optimizer.parameters.data), weights[0])
    np.testing.assert_array_equal(download(optimizer.parameters.half), weights[1])
    assert download(optimizer.step)[0] == 2 and download(optimizer.updates)[0] == 1
    assert download(optimizer.loss_scale.scale)[0] == 512
    np.testing.assert_array_equal(download(optimizer.loss_scale.counts), [0, 1, 1])
    update(optimizer, np.ones(8))
    update(optimizer, np.ones(8))
    assert download(optimizer.loss_scale.scale)[0] == 1024 and download(optimizer.updates)[0] == 3


def test_a_scale_far_too_large_recovers(backend):
    optimizer = optimizer_of(backend, start=2.0**22)
    steps = 0
    while download(optimizer.updates)[0] < 1:
        scale = float(download(optimizer.loss_scale.scale)[0])
        with np.errstate(over="ignore"):
            # as it comes out of float16
            gradient = np.float32(np.float16(0.5 * scale)) / np.float32(scale)
        update(optimizer, np.full(8, gradient))
        steps += 1
    assert steps == 7 and download(optimizer.loss_scale.scale)[0] == 2.0**16
    assert np.isfinite(download(optimizer.parameters.data)).all()


def one_step(model, precision, batch):
    """(loss, gradients by name) of one step over `batch` images, up to the update."""
    compute_in(model, precision)
    scale = LossScale(model.parameters.data, 1024.0) if precision == "fp16" else None
    optimizer = AdamW(model.parameters, learning_rate=1e-3, clip_norm=1.0, loss_scale=scale)
    step = TrainingStep(model, Diffusion(backend=model.backend), optimizer, batch, capture=False)
    pixels = np.random.default_rng(0).integers(0, 256, step.images.shape, dtype=np.uint8)
    step.load(pixels, np.arange(0, 2 * batch, 2, dtype=np.int32) if model.num_classes else None)
    loss, _ = step._gradients()
    factor = 1024 if scale else 1
    return download(loss)[0], {name: g / factor for name, g in model.gradients().items()}


# of the loss, and of the gradient as a whole: 2⁻¹¹, 2⁻⁸
UNET = {"image_size": 16, "channel_mult": (1, 2), "attention_resolutions": (8,)}
TOLERANCES = {"fp16": (1e-3, 5e-3), "bf16": (4e-3, 4e-2)}


def compare(build, device, batch=2, precision="fp16"):
    """The model on the device, and what `one_step` gives in 16 bits, which is float32's, nearly."""
    backend = (
        EmulatorDevice(checks=False, float64=False) if device == "emulator" else get_backend(device)
    )
    loss, gradients = one_step(without_zeros(build(device="cpu")), "fp32", batch)
    half_loss, half_gradients = one_step(
        model := without_zeros(build(device=backend)), precision, batch
    )
    of_loss, of_gradient = TOLERANCES[precision]
    assert half_loss == pytest.approx(loss, rel=of_loss) and half_loss != loss
    error = math.sqrt(sum(np.sum((half_gradients[n] - g) ** 2) for n, g in gradients.items()))
    assert error <= of_gradient * math.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    return model, half_loss, half_gradients


LATENTS = {"image_size": 4, "in_channels": 4, "patch_size": 2, "mlp_ratio": 1, "num_classes": 3}


def dit_of_latents(device):
    return small_dit(**LATENTS, hidden_size=32, num_heads=1, device=device)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", *exhaustively("bf16")])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("few_frequencies")
def test_a_dit_in_16_bits(device, precision):
    compare(dit_of_latents, device, precision=precision)


@exhaustive  # kernels check has the kernels
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("few_frequencies")
def test_blocks_that_one_product_conditions(device, monkeypatch):
    """…have its gradients; layer by layer the loss has the same bits, and so have all gradients
    that no sum over the blocks has gone into."""

    def build(device):
        return small_dit(**LATENTS, hidden_size=64, depth=2, device=device)

    model, *one = compare(build, device)
    assert [*map(len, model.conditioning_columns()[:1])] == [2]
    monkeypatch.setattr(K, "linear_stack_supports", lambda *_: False)
    assert [*map(len, model.conditioning_columns()[:1])] == [3]
    each = one_step(without_zeros(build(model.backend)), "fp16", 2)
    assert one[0] == each[0]
    for name, gradient in one[1].items():
        same = "embedder" not in name or name.startswith("x_embedder")
        np.testing.assert_allclose(
            each[1][name],
            gradient,
            rtol=0 if same else 1e-2,
            atol=0 if same else 1e-5,
            err_msg=name,
        )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("device", GPU)
def test_a_unet_in_16_bits(device, precision):
    compare(lambda device: small_unet(**UNET, device=device), device, precision=precision)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("device", GPU)
def test_sizes_that_divide_nothing_in_16_bits(device, precision):
    """48 × 48 pixels, 72 channels in groups of four, heads of 72, seven images."""
    compare(
        lambda device: UNet(
            image_size=48,
            model_channels=72,
            channel_mult=(1, 2),
            num_res_blocks=1,
            groups=18,
            attention_resolutions=(24,),
            num_head_channels=72,
            device=device,
        ),
        device,
        batch=7,
        precision=precision,
    )


@pytest.mark.parametrize("device", GPU)
def test_skips_without_copies_give_the_same_bits(device, monkeypatch):
    def step(recomputed=False):
        model = without_zeros(
            UNet(
                image_size=16,
                model_channels=64,
                channel_mult=(1, 2),
                num_res_blocks=1,
                attention_resolutions=(8,),
                device=device,
            )
        )
        if recomputed:
            model.recompute_blocks()
        return one_step(model, "fp16", 2)

    (loss, gradients), again = step(), step(recomputed=True)
    monkeypatch.setattr(K, "pair_supports", lambda pair: False)
    for other_loss, others in (again, step()):
        assert other_loss == loss
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(others[name], gradient, err_msg=name)


def updown_unet(device):
    more = {"use_scale_shift_norm": True, "resblock_updown": True, "dropout": 0.1}
    return small_unet(**UNET, **more, device=device)


def convnext_unet(device):
    sizes = {"channel_mult": (1, 2), "attention_resolutions": (4,)}
    return small_unet(**sizes, block="convnext", device=device)


@pytest.mark.parametrize(
    "build", [dit_of_latents, updown_unet, convnext_unet], ids=["dit", "unet", "convnext"]
)
def test_bfloat16_on_the_cpu(build):
    compare(build, "cpu", precision="bf16")


def test_a_block_of_lightning_dit_in_bfloat16_on_the_cpu():
    sizes = {**LATENTS, "hidden_size": 32, "depth": 2, "num_heads": 1, "mlp_ratio": 4.0}
    compare(
        lambda device: small_dit(**sizes, **LIGHTNING, device=device),
        "cpu",
        precision="bf16",
    )


def test_a_copy_and_a_pickle_compute_in_bfloat16():
    model = without_zeros(dit_of_latents("cpu"))
    compute_in(model, "bf16")
    x, t, y = np.ones((2, 4, 4, 4), np.float32), np.array([3, 5]), np.array([0, 1])
    expected = model.predict(x, t, y)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.parameters.half.dtype == bfloat16
        np.testing.assert_array_equal(other.predict(x, t, y), expected)
    compute_in(model, "fp32")
    assert (model.predict(x, t, y) != expected).any()


def test_float16_needs_a_gpu():
    with pytest.raises(UsageError, match="use --precision fp32"):
        small_unet().compute_in_half()


def test_the_copy_follows_what_the_parameters_read():
    model = small_dit(image_size=4, num_classes=None, device=EmulatorDevice())
    model.parameters.keep_half()
    weight = model.blocks[0].attn.qkv.weight
    other = upload(np.full(model.parameters.total, 0.1, np.float32), model.backend)
    model.parameters.bind(other)
    assert (download(weight.half) == np.float16(0.1)).all()
    model.parameters.bind(model.parameters.data)
    np.testing.assert_array_equal(download(weight.half), download(weight.data).astype(np.float16))
    fill_zero(model.parameters.data)
    model.load_arrays({name: a + 1 for name, a in model.arrays().items()})
    assert (download(weight.half) == 1).all()
