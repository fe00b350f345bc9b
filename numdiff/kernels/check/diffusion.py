"""Cases of noise, levels and samplers."""
import numpy as np

from ..diffusion import levels, q_sample, sampler
from .case import PURPOSE, SEED, Case, normal, one, with_counters, with_timesteps


def diffusion_cases():
    x = {"x_0": (2, 3, 4), "eps": (2, 3, 4)}
    yield Case("q_sample", with_timesteps(2, **x),
               one(lambda a, v: q_sample.q_sample_forward(a.x_0, a.eps, a.t, a.signal, a.noise, version=v)), (1, 2))
    yield Case("velocity", with_timesteps(2, **x),
               one(lambda a, v: q_sample.velocity_forward(a.x_0, a.eps, a.t, a.signal, a.noise, version=v)), (1, 2))
    yield Case("weigh", with_timesteps(2, **x),
               one(lambda a, v: q_sample.weigh_forward(a.x_0, a.t, a.signal, version=v)), (1, 2))
    for label, more in {"uniform": {"path": levels.LINEAR, "prediction": "flow", "shift": 3.0},
                        "logit-normal": {"path": levels.LINEAR, "prediction": "x_0", "loss": "flow", "normal": True},
                        "edm": {"path": levels.EDM, "prediction": "edm", "normal": True, "mean": -1.2, "std": 1.2},
                        "min-snr": {"path": levels.LINEAR, "prediction": "v", "loss": levels.MIN_SNR, "gamma": 5.0},
                        "eps": {"path": levels.EDM, "prediction": "eps", "loss": "edm", "normal": True}}.items():
        yield Case("levels", with_counters(5),
                   lambda a, v, m=more: levels.levels_forward(SEED, PURPOSE, a.step, a.samples, **m), label=label)
    shapes = {"x": (2, 3, 4), "u": (2, 3, 4), "v": (2, 3, 4)}
    for terms in (1, 2, 3):
        yield Case("combine", normal(**shapes), one(lambda a, v, n=terms: sampler.combine(
            *((0.3, a.x), (-1.2, a.u), (0.7, a.v))[:n], version=v)), (1, 2), label=f"{terms} terms")
    for clip in (False, True):
        yield Case("estimate_x_0", normal(x=(2, 3, 4), prediction=(2, 3, 4)),
                   one(lambda a, v, c=clip: sampler.estimate_x_0(a.x, a.prediction, (1.3, -0.8), clip=c, version=v)),
                   (1, 2), label="clipped" if clip else "")
    yield Case("guide", normal(c=(2, 3, 4), u=(2, 3, 4)), one(lambda a, v: sampler.guide(a.c, a.u, 2.5, 3)))
    yield Case("learned_step", normal(x=(2, 3, 4), x_0=(2, 3, 4), prediction=(2, 3, 8), noise=(2, 3, 4)),
               one(lambda a, v: sampler.learned_step(a.x, a.x_0, a.prediction, a.noise, (0.9, 0.2, -3.0, -1.0))))
    for copies in (1, 2):
        yield Case("model_input", normal(x=(2, 3, 4), numbers=(2,)),
                   lambda a, v, n=copies: sampler.model_input(a.x, a.numbers, n, version=v), (1, 2),
                   label=f"× {copies}")

    def masked(rng):
        return {**normal(known=(2, 3, 4), x=(2, 3, 4))(rng), "mask": rng.integers(0, 2, (2, 3, 4)).astype(np.float64)}

    yield Case("blend", masked, one(lambda a, v: sampler.blend(a.mask, a.known, a.x)))
