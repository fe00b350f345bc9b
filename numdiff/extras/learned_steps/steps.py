"""A file of learned steps, which `numdiff schedule` writes: read, checked, and followed as a
sampler."""

import hashlib

from ... import schema
from ...diffusion.plan import combine
from ...errors import UsageError
from ...files import Refused, read_bytes

MAX_STEPS = 64
FILE_BYTES = 4 << 20  # of a schedule
LARGEST = 1e9  # of a weight

SCHEDULE = schema.record(
    {
        "kind": schema.choice("learned steps"),
        "model": schema.text(64),
        "model_options": schema.options,
        "diffusion": schema.options,
        "clip": schema.boolean,
        "cfg_scale": schema.optional(schema.number()),
        "cfg_channels": schema.optional(schema.integer(1, 1 << 20)),
        "guide_scale": schema.optional(schema.number()),
        "cfg_interval": schema.optional(schema.items(schema.number(), 2, 2)),
        "sigmas": schema.items(schema.number(1e-9, 1e9), MAX_STEPS, 1),
        "weights": schema.items(
            schema.items(schema.number(-LARGEST, LARGEST), MAX_STEPS + 1, 2), MAX_STEPS, 1
        ),
    },
    {
        "errors": schema.items(schema.number(0), MAX_STEPS),
        "steps": schema.integer(1),
        "count": schema.integer(1),
        "seed": schema.integer(0),
        "run": schema.optional(schema.options),
    },
    schema.anything,
)


def described(sampling):
    """The settings that must be the same in learning and in sampling, as values for JSON."""
    model = sampling.model
    return {
        "model": getattr(model, "kind", "function"),
        "model_options": {
            k: list(v) if isinstance(v, tuple) else v for k, v in model.options.items()
        },
        "diffusion": sampling.diffusion.options,
        "clip": sampling.clip,
        # 1 is no guidance
        "cfg_scale": None if sampling.cfg_scale in (None, 1) else float(sampling.cfg_scale),
        "cfg_channels": sampling.cfg_channels,
        "guide_scale": sampling.guide_scale if sampling.guide else None,
        "cfg_interval": None if sampling.cfg_interval is None else list(sampling.cfg_interval),
        "run": run_of(model),
    }


def run_of(model):
    """The identity of the run that trained a model, independent of the step, as values for JSON:
    the seed of its first weights and its noise, and digests of its images and initial weights. None
    if the file does not store it."""
    meta = getattr(model, "meta", None) or {}
    if meta.get("seed") is None or not meta.get("data"):
        return None
    init = (meta.get("init") or {}).get("lines")
    return {
        "seed": meta["seed"],
        "data": meta["data"]["rows"],
        "init": init and hashlib.blake2b("\n".join(init).encode(), digest_size=8).hexdigest(),
    }


def check_schedule(schedule, sampling=None, name="this"):
    """Refuse what is no schedule, and one that was learned from another model or with other
    settings.

    name: what messages call it
    """
    try:
        schema.check(schedule, SCHEDULE, "the schedule")
    except schema.Mismatch as error:
        raise UsageError(
            f"{name} is no schedule of numdiff schedule: {error}; make one from the model."
        ) from None
    sigmas, weights = schedule["sigmas"], schedule["weights"]
    if [len(row) for row in weights] != list(range(2, len(sigmas) + 2)) or sorted(
        sigmas, reverse=True
    ) != sigmas:
        raise UsageError(
            f"{name} is no schedule of numdiff schedule: its levels must fall, and its i-th row of "
            "weights have i + 1 numbers; make one from the model."
        )
    now = described(sampling) if sampling else {}
    for name, value in now.items():
        learned = schedule.get(name)
        if learned != value and not (name == "run" and None in (learned, value)):
            if isinstance(value, dict):
                name, learned, value = next(
                    (f"{name}.{key}", learned.get(key), value.get(key))
                    for key in {**learned, **value}
                    if learned.get(key) != value.get(key)
                )
            learned, value = ("none" if given is None else given for given in (learned, value))
            raise UsageError(
                f"the schedule was learned with {name} {learned}, and here it is {value}: use it as it "
                "was learned, or make one with numdiff schedule."
            )


def read_schedule(path):
    """The schedule in a file, checked but for the model; a `UsageError` for any other file."""
    try:
        schedule = schema.parse_json(read_bytes(path, FILE_BYTES))
    except Refused as error:
        raise UsageError(
            f"--schedule {path} is no schedule of numdiff schedule: {error}; make one from the "
            "model."
        ) from None
    except OSError as error:
        raise UsageError(
            f"--schedule {path} cannot be read ({error.strerror}): give a file that numdiff schedule "
            "wrote."
        ) from None
    check_schedule(schedule, name=f"--schedule {path}")
    return schedule


def learned(denoise, x, sigmas, noise=None, weights=()):
    """Learned steps: x_(i+1) = w_i · x_T + Σ_(j ≤ i) w_ij · x_0(j) with weights fitted to DDIM's
    many steps.

    Duan et al. 2023 (OLSS, arXiv:2305.14677), eq. 9. weights: of step i, i + 2 numbers (fit.py)
    """
    parts = [x]
    for now, row in zip(sigmas, weights, strict=False):
        parts.append(denoise(x, now))
        x = combine(*zip(row[:3], parts[:3], strict=False))
        for k in range(3, len(parts), 2):
            x = combine((1.0, x), *zip(row[k : k + 2], parts[k : k + 2], strict=False))
    return x
