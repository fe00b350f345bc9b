import numpy as np
import pytest

from numdiff.benchmark.step import RandomImages
from numdiff.errors import UsageError
from numdiff.nn import UNet
from numdiff.training import Trainer
from numdiff.training.trainer import NonFiniteError
from tests.conftest import relative_error


def make(images=None, labels=None, device="cpu", seed=3, num_classes=None, **options):
    model = UNet(image_size=8, model_channels=32, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(4,),
                 device=device, seed=seed, num_classes=num_classes)
    dataset = FixedImages(images, labels)
    return Trainer(model, dataset, **{"batch": 8, "learning_rate": 1e-3, "warmup_steps": 2, "ema_halflife": 40,
                                      "seed": seed, **options})


class FixedImages(RandomImages):
    """Few images in memory, as the loader reads them."""

    in_memory, window = True, 4

    def __init__(self, images=None, labels=None):
        super().__init__(24, 8, 3, 10)
        if images is not None:
            self.images, self.shape = images, images.shape
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def read(self, rows, out=None):
        if out is None:
            return self.images[rows]
        out[...] = self.images[rows]
        return out


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    from numdiff.device import why_no_gpu
    if request.param == "cuda" and why_no_gpu():
        pytest.skip("no GPU")
    return request.param


def losses(trainer, steps):
    return [r.loss for reports in trainer.run(steps, report_every=4) for r in reports]


def test_ten_steps_are_five_and_five_resumed_bitwise(device):
    whole = make(device=device)
    expected = losses(whole, 10)
    first = make(device=device)
    start = losses(first, 5)
    state = first.state()
    second = make(device=device)
    second.load_state(state)
    assert start + losses(second, 5) == expected
    for name, value in whole.state().items():
        np.testing.assert_array_equal(value, second.state()[name], err_msg=name)
    for trainer in (whole, first, second):
        trainer.close()


def test_a_captured_step_has_the_bits_of_the_eager_one():
    from numdiff.device import why_no_gpu
    if why_no_gpu():
        pytest.skip("no GPU")
    captured, eager = make(device="cuda"), make(device="cuda")
    eager.step_function.capture = False
    assert losses(captured, 6) == losses(eager, 6)
    with captured.ema_weights() as model:  # other work between two replays
        model.predict(np.zeros((3, 8, 8, 3)), 10)
    other = make(device="cuda", seed=9)
    losses(other, 3)
    assert losses(captured, 4) == losses(eager, 4)
    for name, value in eager.state().items():
        np.testing.assert_array_equal(value, captured.state()[name], err_msg=name)
    for trainer in (captured, eager, other):
        trainer.close()


def test_gpu_and_cpu_engine_give_the_same_ten_losses():
    from numdiff.device import why_no_gpu
    if why_no_gpu():
        pytest.skip("no GPU")
    on_cpu, on_gpu = make(device="cpu"), make(device="cuda")
    np.testing.assert_allclose(losses(on_gpu, 10), losses(on_cpu, 10), rtol=1e-3)
    on_cpu.close()
    on_gpu.close()


def test_microbatches_give_the_same_step(device):
    whole, parts = make(device=device), make(device=device, microbatch=2)
    np.testing.assert_allclose(losses(whole, 3), losses(parts, 3), rtol=2e-5)
    assert relative_error(whole.state()["parameters"], parts.state()["parameters"]) < 1e-4
    whole.close()
    parts.close()


def test_one_batch_is_learnt(device):
    colours = np.random.default_rng(0).integers(0, 256, (8, 1, 1, 3), np.uint8)
    images = np.broadcast_to(colours, (8, 8, 8, 3)).copy()
    trainer = make(images, device=device, learning_rate=3e-3)
    values = losses(trainer, 150)
    assert np.mean(values[-20:]) < 0.15 * np.mean(values[:20])
    trainer.close()


def test_classes_are_used(device):
    """Black and white images of two classes: told the class, the model knows x_0 even from pure noise."""
    labels = np.arange(24, dtype=np.int32) % 2
    images = np.broadcast_to(255 * labels[:, None, None, None], (24, 8, 8, 3)).astype(np.uint8)
    trainer = make(images, labels, device=device, num_classes=2, learning_rate=3e-3, diffusion={"prediction": "x_0"})
    losses(trainer, 120)
    noise = np.random.default_rng(1).standard_normal((2, 8, 8, 3))
    answer = trainer.model.predict(noise, 999, [0, 1]).mean((1, 2, 3))
    assert answer[0] < -0.5 and answer[1] > 0.5
    trainer.close()


def test_ema_follows_the_weights(device):
    trainer = make(device=device)
    losses(trainer, 3)
    weights, ema = trainer.state()["parameters"], trainer.state()["ema"]
    assert 0 < relative_error(ema, weights) < 0.5
    x = np.zeros((1, 8, 8, 3))
    plain = trainer.model.predict(x, 10)
    with trainer.ema_weights() as model:
        averaged = model.predict(x, 10)
    assert not np.array_equal(plain, averaged)
    np.testing.assert_array_equal(trainer.model.predict(x, 10), plain)
    trainer.close()


def test_a_non_finite_loss_stops_with_its_name_and_leaves_the_weights(device):
    trainer = make(device=device)
    losses(trainer, 2)
    before = trainer.state()["parameters"].copy()
    weights = trainer.model.arrays()
    weights["out.2.bias"][:] = np.nan
    trainer.model.load_arrays(weights)
    poisoned = trainer.state()["parameters"].copy()
    with pytest.raises(NonFiniteError, match=r"step 3 gave loss nan.*out\.2 conv2d is the first non-finite"):
        list(trainer.run(20, report_every=10))
    np.testing.assert_array_equal(trainer.state()["parameters"], poisoned)
    assert np.isfinite(before).all()
    trainer.close()


def test_a_dataset_that_does_not_fit_the_model_is_refused():
    with pytest.raises(UsageError, match="images are 4×4×3, and the model takes 8×8×3"):
        make(images=np.zeros((9, 4, 4, 3), np.uint8))
    with pytest.raises(UsageError, match="no labels"):
        make(num_classes=2)
