"""How a run draws its own pictures, or would if it drew some: its checkpoints tell
(training/previews.py), and what samples from it does the same where nothing else is given."""

from .. import schema
from ..errors import UsageError
from ..settings import MAX_SAMPLE_STEPS
from .denoiser import check_interval
from .process import Diffusion
from .samplers import NOISY, SAMPLERS, WITH_ETA

DEFAULT_SAMPLER, DEFAULT_STEPS = "ddim", 50
STORED = schema.record(
    {"sampler": schema.choice(*SAMPLERS), "steps": schema.integer(1, MAX_SAMPLE_STEPS)},
    {
        "cfg_scale": schema.optional(schema.number(-1000, 1000)),
        "cfg_interval": schema.optional(schema.items(schema.number(0), 2, least=2)),
    },
    schema.anything,
)


def read(model):
    """(sampler, steps, cfg_scale, cfg_interval) of the run that a model comes from. None if its
    file does not store them, or stores values that this numdiff or the model does not support: its
    weights are still usable."""
    stored = (getattr(model, "meta", None) or {}).get("pictures")
    try:
        schema.check(stored, STORED, "pictures")
        scale, interval = stored.get("cfg_scale"), stored.get("cfg_interval")
        interval = interval and check_interval(interval)
    except (schema.Mismatch, UsageError):
        return None
    if scale in (None, 1) or getattr(model, "null_class", None) is None:
        scale = interval = None
    return stored["sampler"], stored["steps"], scale, interval


def why_another(own, sampler, steps, eta, given):
    """The argument because of which a run's `own` sampler is not taken, "steps" (a respacing),
    "eta", "slerp" or "invert"; None where it can be. sampler: the one that is requested, or None; given: the
    names of further arguments."""
    if isinstance(steps, str) and not steps.isdigit():
        return "steps"
    if eta is not None and own not in WITH_ETA:
        return "eta"
    noise = own in NOISY or (WITH_ETA.get(own) if eta is None else eta)
    needs = next((name for name in ("slerp", "invert") if name in given), None)
    return needs if noise and sampler is None else None


def in_place_of(model, sampler, steps, eta, more):
    """(the run's own sampler, the argument because of which DDIM takes its place) where that
    happens unasked; or None. Arguments as of `as_in_training`."""
    stored = read(model)
    if sampler is not None or stored is None or {"schedule", "known"} & more.keys():
        return None
    why = why_another(
        stored[0], sampler, steps, eta, {name for name, value in more.items() if value is not None}
    )
    return why and stored[0] != DEFAULT_SAMPLER and (stored[0], why) or None


def as_in_training(model, sampler, steps, eta, more):
    """(sampler, steps) for what is None: those by which the run drew its own pictures. Its guidance
    by classes is added to `more` where nothing is said of that; if it is limited to an interval,
    only with its own sampler and steps.

    Another sampler, a respacing, an `eta` that the run's sampler does not take, or `slerp` or
    `invert` where that adds noise mean DDIM's 50 steps, or all timesteps of the model where they
    are fewer. So do a model without a run, and inpainting, which has its own sampler. A schedule
    has steps and guidance of its own. An inversion is without guidance unless it is given: guidance
    multiplies the solver's error.
    """
    if more.get("schedule") is not None:
        return sampler or DEFAULT_SAMPLER, DEFAULT_STEPS if steps is None else steps
    own, number, scale, interval = read(model) or (None, None, None, None)
    given = {name for name, value in more.items() if value is not None or name == "cfg_scale"}
    kept = (
        own is not None
        and sampler in (None, own)
        and "known" not in given
        and not why_another(own, sampler, steps, eta, given)
    )
    whole = kept and steps in (None, number)
    if scale is not None and not given & {"cfg_scale", "guide", "invert"}:
        if interval is None or "cfg_interval" in given:
            more["cfg_scale"] = scale
        elif whole:
            more.update(cfg_scale=scale, cfg_interval=interval)
    if kept:
        return own, number if steps is None else steps
    if steps is None:
        steps = min(
            DEFAULT_STEPS,
            Diffusion(**getattr(model, "diffusion", {})).options.get("steps", DEFAULT_STEPS),
        )
    return sampler or DEFAULT_SAMPLER, steps
