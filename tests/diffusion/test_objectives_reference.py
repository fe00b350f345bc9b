"""Flow matching, JiT's loss, EDM and min-SNR-γ against an independent PyTorch implementation
(tests/reference)."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.diffusion import Diffusion
from numdiff.diffusion.process import Levels
from numdiff.kernels.diffusion import levels as L
from numdiff.nn import Tape, Tensor
from tests.conftest import large, on, relative_error, unchecked
from tests.nn.test_dit_reference import build
from tests.nn.test_unet_reference import BACKWARD, FORWARD, TRAJECTORY, train_as_stored
from tests.reference import stored
from tests.reference import stored_objectives as objectives


def levels_at(diffusion, levels, engine):
    """What `Diffusion.draw` gives where these levels are drawn: timesteps, or the numbers of each
    image's level."""
    if not diffusion.continuous:
        return engine(levels.astype(np.int32))
    u = np.log(levels if diffusion.path_name == "edm" else levels / (1 - levels))
    numbers = L.numbers_reference(u, diffusion._aim)
    return Levels(engine(np.arange(len(u), dtype=np.int32)), *map(engine, numbers))


@unchecked
@pytest.mark.parametrize("name", list(objectives.OBJECTIVES))
@on("cpu", "emulator", "cuda")
def test_losses(engine, name):
    reference = stored.load("objectives")
    diffusion = Diffusion(**objectives.OBJECTIVES[name], backend=engine.backend)
    x_0, eps = (
        engine(objectives.normal(f"objectives/{name}/{what}", objectives.SHAPE))
        for what in ("image", "noise")
    )
    t = levels_at(diffusion, objectives.levels(name, len(x_0)), engine)
    answer = Tensor(
        engine(objectives.normal(f"objectives/{name}/answer", objectives.SHAPE)), requires_grad=True
    )
    engine.check(diffusion.q_sample(x_0, eps, t), reference[f"{name}_x_t"], FORWARD)
    np.testing.assert_allclose(
        download(diffusion.model_timesteps(t)), reference[f"{name}_told"], rtol=1e-5
    )
    with Tape() as tape:
        loss = diffusion.loss(answer, diffusion.target(x_0, eps, t), x_0, t)
    tape.backward(loss)
    assert float(loss.numpy()[0]) == pytest.approx(float(reference[f"{name}_loss"]), rel=FORWARD)
    engine.check(answer.grad, reference[f"{name}_gradient"], BACKWARD)


@large
@on("cpu", "launch", "cuda")
@pytest.mark.parametrize("name", objectives.TRAJECTORIES)
def test_ten_training_steps(engine, name):
    """AdamW with decay and clipping on a DiT with classes, each image at a level of its own."""
    reference = stored.load("objectives")
    c = reference["info"]
    model = build(c, engine, c["weight_seed"])
    diffusion = Diffusion(**objectives.OBJECTIVES[name], backend=model.backend)
    model.diffusion = diffusion.options
    count = c["steps"] * c["batch"]
    images, levels = objectives.images(name, count), objectives.levels(name, count)

    def loss_of(step):
        part = slice(step * c["batch"], (step + 1) * c["batch"])
        x_0, eps, y = (engine(each[part]) for each in images)
        t = levels_at(diffusion, levels[part], engine)
        x_t = Tensor(diffusion.q_sample(x_0, eps, t))
        prediction = model(x_t, diffusion.model_timesteps(t), y)
        return diffusion.loss(prediction, diffusion.target(x_0, eps, t), x_0, t)

    train_as_stored(engine, model, reference, loss_of, f"{name}_losses", f"{name}_norms")
    if engine.computes:
        norms = np.array(
            [np.linalg.norm(each.astype(np.float64)) for each in model.arrays().values()]
        )
        assert relative_error(norms, reference[f"{name}_parameters"]) <= TRAJECTORY
