"""What a folder of diffusers' DiTPipeline says besides weights: its scheduler, and names of classes."""

import pathlib

from .... import schema
from ....errors import NumdiffError, UsageError
from ....files import read_bytes
from ..diffusers import LARGEST_CONFIG, PIPELINE

SCHEDULER, SCHEDULER_CONFIG = "scheduler", "scheduler_config.json"
PREDICTIONS = {"eps": "epsilon", "v": "v_prediction", "x_0": "sample"}  # here: in diffusers


def scheduler_config(diffusion):
    """diffusers' settings of the DDIM scheduler for a model of this objective; a `UsageError` for
    one that `DiTPipeline`, which passes whole timesteps, cannot sample."""
    path, scale = diffusion.get("path", "discrete"), diffusion.get("timestep_scale", 1.0)
    if path != "discrete" or diffusion["prediction"] not in PREDICTIONS or scale != 1:
        what = (
            f"is of the path {path}"
            if path != "discrete"
            else f"predicts {diffusion['prediction']}"
            if scale == 1
            else f"sees timesteps times {scale:g}"
        )
        raise UsageError(
            f"diffusers' DiTPipeline samples models of whole timesteps, and this one {what}: leave --to out, "
            "for the transformer's folder alone."
        )
    steps = diffusion["steps"]
    betas = {"beta_schedule": "squaredcos_cap_v2"}
    if diffusion["schedule"] == "linear":
        betas = {"beta_schedule": "linear", "beta_start": 0.1 / steps, "beta_end": 20 / steps}
    return {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": steps,
        **betas,
        "prediction_type": PREDICTIONS[diffusion["prediction"]],
        "clip_sample": False,
    }


def read_pipeline(folder):
    """{"diffusion": …, "training": {"classes": …}} of a pipeline's scheduler and labels, as
    `read_weights` stores them; without what the files do not say."""
    folder, found = pathlib.Path(folder), {}
    index = _read(folder / PIPELINE)
    config = _read(folder / SCHEDULER / SCHEDULER_CONFIG)
    names = {there: here for here, there in PREDICTIONS.items()}
    steps, kind = config.get("num_train_timesteps"), config.get("beta_schedule", "linear")
    first, last = config.get("beta_start"), config.get("beta_end")
    if type(steps) is int and 0 < steps <= 100_000:
        linear = (
            kind == "linear"
            and all(type(value) in (int, float) for value in (first, last))
            and abs(first * steps - 0.1) < 1e-6
            and abs(last * steps - 20) < 1e-4
        )
        if not linear and kind != "squaredcos_cap_v2":
            raise NumdiffError(
                f"{folder / SCHEDULER} has the schedule {str(kind)[:40]!r} from {first} to {last}, which "
                "numdiff does not have: give the transformer's folder, with --schedule."
            )
        prediction = config.get("prediction_type", "epsilon")
        if prediction not in names:
            raise NumdiffError(
                f"{folder / SCHEDULER} has the prediction_type {str(prediction)[:40]!r}, which numdiff "
                f"does not know: it knows {', '.join(names)}."
            )
        found["diffusion"] = {
            "steps": steps,
            "schedule": "linear" if linear else "cosine",
            "prediction": names[prediction],
        }
    labels = index.get("id2label")
    if isinstance(labels, dict) and all(
        str(i) in labels and isinstance(labels[str(i)], str) for i in range(len(labels))
    ):
        found["training"] = {"classes": [labels[str(i)] for i in range(len(labels))]}
    return found


def _read(path):
    """The record in a file of JSON; {} where there is none, or it is another program's."""
    try:
        value = schema.parse_json(read_bytes(path, LARGEST_CONFIG))
    except (OSError, schema.Mismatch):
        return {}
    return value if isinstance(value, dict) else {}
