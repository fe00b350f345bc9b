"""Read weights of other programs: what the core calls for a file or folder that is not numdiff's
(numdiff/extensions.py, `foreign`)."""

import contextlib

import numpy as np

from ... import schema
from ...diffusion import Diffusion, alpha_bars
from ...diffusion.schedule import SCHEDULES
from ...errors import NumdiffError, UsageError
from ...training import kinds
from ...training.kinds.kind import defaults_of
from ...training.model_files import DIFFUSION, MAX_STEPS, ModelFile, check_names, objective
from .autoencoders import read_autoencoder
from .diffusers import FOLDER, check_whole_folder, find_diffusers
from .files import read_weights
from .kinds import weights_of
from .kinds.dit_weights import read_diffusers_folder
from .kinds.weights import flag
from .layout import to_numdiff_layout

__all__ = ["files_of", "folder_of", "read", "read_autoencoder"]

folder_of = find_diffusers


def files_of(path):
    """The files that a folder of diffusers may hold; none for other paths."""
    folder = folder_of(path)
    return [folder / name for name in FOLDER] if folder else []


def read(source, weights, diffusion, free, reader):
    """The `ModelFile` of a folder of diffusers' DiT, or of what `load_state_dict` reads.

    weights: "ema" or "raw"; diffusion, free: as `convert` takes them; reader: as `Weights` takes
        it: of "train" these only stand in for what the file does not tell
    """
    folder, guess = folder_of(source), reader == "train"
    if folder is None:
        check_whole_folder(source)
        state_dict, stored = read_weights(source, weights)
        check_whole_folder(source, state_dict)
    else:
        state_dict, stored = read_diffusers_folder(folder, weights)
    # the first takes whatever is left
    known = [weights_of(kind, reader) for kind in reversed(kinds.KINDS.values())]
    foreign = next(each for each in known if each.recognises(state_dict))
    training, broken = stored.pop("training", {}), stored.pop("broken", [])
    if guess:
        with _naming(source):
            shown = {*stored, *foreign.shown_by(state_dict)}
        free = {
            name: value
            for name, value in free.items()
            if name in foreign.free and name not in shown
        }
    options = foreign.complete(source, state_dict, stored, free)
    remarks = [("left out", text) for text in broken] + foreign.remarks(options, stored)
    try:
        check_names(training.get("classes"), options)
    except schema.Mismatch as error:
        training = {**training, "classes": None}
        remarks.append(("left out", f"the names of the classes, as {error}"))
    with _naming(source):
        state_dict = foreign.hold(state_dict, options)
    if guess:  # what the user says of a run is said of the file where that is silent
        silent = not {"diffusion", "betas", "alphas_cumprod"} & stored.keys()
        path = diffusion.get("path") if silent else None
        usual = "diffusion" not in stored and (path or foreign.usual_path(options)) == "discrete"
        diffusion = {
            "path": path,
            "rescale_timesteps": diffusion.get("rescale_timesteps") if usual else None,
        }
        diffusion = {name: value for name, value in diffusion.items() if value is not None}
    diffusion = complete_diffusion(source, foreign, stored, diffusion, foreign.usual_path(options))
    if reader == "load" and "diffusion" not in stored:
        remarks.append(
            (
                "diffusion",
                f"the file does not store it, and its model is taken for one that "
                f"{objective(diffusion)}; `numdiff convert` has options for others",
            )
        )
    state_dict, options = foreign.in_our_time(state_dict, options, diffusion, folder is None)
    return ModelFile(
        source,
        foreign.kind.name,
        options,
        to_numdiff_layout(state_dict),
        diffusion,
        training.get("step", 0),
        training.get("classes"),
        None,
        training.get("pictures"),
        remarks,
    )


@contextlib.contextmanager
def _naming(source):
    """Context: errors about a file's contents name the file."""
    try:
        yield
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {source}: {error}.") from None


def complete_diffusion(source, foreign, stored, given, usual_path="discrete"):
    """The options of the `Diffusion` of a foreign model: from the user, then the file, then the
    defaults.

    foreign: the `Weights` of its kind
    stored: as `read_weights` gives it: "diffusion", or "betas" or "alphas_cumprod", float arrays
    (T,)
    given: some of steps, schedule, prediction, rescale_timesteps (bool), path; usual_path: where
    neither says it Raises a `UsageError` if it must be known whether timesteps are rescaled, and is
    not.
    """
    given = dict(given)
    rescaled = given.pop("rescale_timesteps", None)
    try:
        schema.check(
            stored.get("diffusion", {}), schema.of_defaults(defaults_of(Diffusion), DIFFUSION), "it"
        )
    except schema.Mismatch as error:
        raise NumdiffError(
            f"the diffusion of {source} cannot be used ({error}): save the file again."
        ) from None
    found = {**stored.get("diffusion", {}), **schedule_of_tables(source, stored, given)}
    path = given.get("path") or found.get("path") or ("discrete" if found else usual_path)
    if path != "discrete":
        timesteps = {
            "--diffusion-steps": given.get("steps"),
            "--schedule": given.get("schedule"),
            "--rescale-timesteps": None if path == "linear" else rescaled,
        }
        whole = [name for name, value in timesteps.items() if value is not None]
        if whole:
            raise UsageError(
                f"--path {path} has no whole timesteps, which {whole[0]} is about: leave one of them out."
            )
        found = found if found.get("path") == path else {}
    known = {**({} if path != "discrete" else Diffusion().options), **found, **given, "path": path}
    silent = foreign.may_rescale and rescaled is None and "diffusion" not in stored
    if path == "discrete" and silent and known["steps"] != 1000:
        asked = foreign.ask(
            "--rescale-timesteps where it was trained with rescale_timesteps=True, the default of "
            "improved-diffusion, else --no-rescale-timesteps"
        )
        raise UsageError(
            f"{source} does not say whether its model sees its {known['steps']} timesteps as they are: "
            f"{asked}."
        )
    if rescaled is not None:
        known["timestep_scale"] = 1000 / known.get("steps", 1) if rescaled else 1.0
    try:
        if type(known.get("steps", 1)) is not int or known.get("steps", 1) > MAX_STEPS:
            raise UsageError(f"the diffusion has at most {MAX_STEPS:,} steps")
        return Diffusion(**known).options
    except (UsageError, TypeError, ValueError) as error:
        raise UsageError(
            f"the diffusion of {source} cannot be used ({error}): give other options."
        ) from None


def schedule_of_tables(source, stored, given):
    """{"steps", "schedule"} of the tables in a file, {} without any; a `NumdiffError` if the
    schedule is not one of numdiff's."""
    name = next((name for name in ("alphas_cumprod", "betas") if name in stored), None)
    if name is None:
        return {}
    table = np.asarray(stored[name], np.float64)
    if table.ndim != 1 or not 1 <= len(table) <= MAX_STEPS:
        raise NumdiffError(f"cannot use {source}: its table {name} has the shape {table.shape}.")
    bars = table if name == "alphas_cumprod" else np.cumprod(1 - table)
    fits = [
        name
        for name in SCHEDULES
        if np.allclose(alpha_bars(name, len(bars)), bars, rtol=1e-3, atol=1e-5)
    ]
    if not fits:
        raise NumdiffError(
            f"cannot use {source}: its betas are neither those of {' nor those of '.join(SCHEDULES)}, "
            "the schedules that numdiff has."
        )
    found = {"steps": len(bars), "schedule": fits[0]}
    for key, value in found.items():
        if given.get(key, value) != value:
            raise UsageError(
                f"{flag(key)} {given[key]}: the betas of {source} say {value}; leave it out."
            )
    return found
