"""A run that continues: its checkpoint, on every rank, and what options and data must have in
common with it.

A checkpoint holds buffers that another model, objective or order of classes would take without a
word, so each of them is compared, and what differs is refused before anything is written.
"""

import pathlib
import shlex

import numpy as np

from ..data.fingerprint import difference, reordered
from ..data.names import key
from ..diffusion.process import make_diffusion
from ..errors import NumdiffError, UsageError
from ..files import check_held
from ..kernels.optimizer.step_state import learning_rate_forward_reference
from ..settings import counted, say
from . import kinds
from .build import model_options
from .checkpoint import load_checkpoint, set_aside_later
from .kinds.kind import defaults_of
from .model_files import check_model_meta
from .options import load_options
from .run_extension import extensions_of
from .trainer import ranks_of, split_batch


def of_resumed(options, communicator):
    """The options from which a resumed run builds its trainer: its weights are those of the
    checkpoint, unless an extension needs those of `init`, too; and a single rank does not share its
    update."""
    alone = {"shard_update": "auto"} if communicator.size == 1 else {}
    kept = any(each.keeps_init for each in extensions_of(options))
    return options.changed(init=options.init if kept else None, **alone)


def load_checkpoint_on_first(communicator, path):
    """(buffers, meta) of a checkpoint that rank 0 can read, on every rank."""
    loaded = {}

    def load():
        loaded["buffers"], meta = load_checkpoint(path)
        check_model_meta(path, meta, kinds.every())
        return meta

    meta = communicator.first(load)
    return communicator.broadcast_arrays(loaded.get("buffers")), meta


def why_no_step(run_dir, done, asked):
    """The message if a run that has done `done` steps is requested to do no more."""
    of = load_options(run_dir).steps
    if asked >= done:
        return (
            f"{run_dir} has done its {counted(done, 'step')}; give more with --steps to continue."
        )
    if done < of:
        return (
            f"{run_dir} has done {done:,} of its {of:,} steps, and --steps {asked} is not more: leave it out to do "
            f"the rest, or give more than {done}."
        )
    return (
        f"{run_dir} has done its {counted(done, 'step')}, and --steps {asked} is not more: give more than {done} "
        "to continue."
    )


def prepare_resumed(options, run_dir, step):
    """Save the options that a resumed run continues with, and set aside the checkpoints after its
    step."""
    options.save(pathlib.Path(run_dir) / "options.json")
    check_held(run_dir)
    set_aside_later(run_dir, step)
    for extension in extensions_of(options):
        extension.set_aside(run_dir, step)


def check_split(options, communicator):
    """Refuse a number of ranks that cannot share the batch of a run that continues."""
    split_batch(
        options.batch,
        options.microbatch,
        fixed=True,
        **ranks_of(
            communicator, of_resumed(options, communicator).shard_update, options.device == "cuda"
        ),
    )


def schedule_of(options):
    """The settings that determine the learning rate of each step."""
    return {
        name: getattr(options, name)
        for name in ("learning_rate", "warmup_steps", "steps", "lr_schedule")
    }


def say_new_rate(then, options, step, checkpoint):
    """A line where the learning rate jumps at a resume, as --steps moves the end of a cosine; else
    None.

    then: `schedule_of` the run before; options: of the resumed run; step: its number of steps;
    checkpoint: its path
    """
    now = schedule_of(options)
    if step < 1 or then == now:
        return None
    last, following, expected = rate_at(then, step - 1), rate_at(now, step), rate_at(then, step)
    if min(abs(following - expected), abs(following - last)) <= 0.01 * last:
        return None
    text = f"goes from {last:.3g} in step {step:,} to {following:.3g} in step {step + 1:,}"
    if {**then, "steps": 0} != {**now, "steps": 0}:  # this was requested
        return text
    command = (
        f"numdiff train {options.model} --resume {shlex.quote(str(checkpoint))} --steps {now['steps']} "
        f"--lr-schedule constant --lr {last:.4g}"
    )
    return (
        f"{text}, as the cosine now ends at step {now['steps']:,} instead of {then['steps']:,}; to keep "
        f"{last:.4g}, stop this and continue with: {command}"
    )


def rate_at(schedule, step):
    """The learning rate of a step, the first of which is 0."""
    rate = np.zeros(1)
    learning_rate_forward_reference(
        np.array([step]),
        rate,
        schedule["learning_rate"],
        schedule["warmup_steps"],
        schedule["steps"],
        schedule["lr_schedule"] == "cosine",
    )
    return float(rate[0])


def split_of(trainer):
    """{"ranks", "microbatch"}: how the images of a step are split, which determines how sums are
    rounded."""
    return {"ranks": trainer.communicator.size, "microbatch": trainer.step_function.microbatch}


def say_new_split(then, now):
    """A line where a run continues with another split of its batch, else None; as `split_of` gives
    them, or None."""
    if not then or then == now:
        return None
    was, is_now = (
        f"{counted(split['ranks'], 'rank')} in parts of {counted(split['microbatch'], 'image')}"
        for split in (then, now)
    )
    return (
        f"{is_now} now, {was} before: sums are rounded in another order, so that losses differ in their last "
        "digits from those of a run that kept its split (3e-4 of the loss was measured)"
    )


def check_same_options(meta, options, dataset, path):
    """Refuse to continue from a checkpoint of a model whose options are not the run's."""
    kind = kinds.get(options.model).model_class
    own = model_options(
        options, dataset.channels, len(dataset.classes) if options.class_cond else None
    )
    own = {k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}
    if meta["model"] != options.model or {**defaults_of(kind), **meta["model_options"]} != {
        **defaults_of(kind),
        **own,
    }:
        raise NumdiffError(
            f"{path} is a checkpoint of another model; resume with the run's own model options and "
            "data."
        )


def check_same_model(meta, model, path):
    """Refuse a checkpoint of another model."""
    if not model.parameters.fits(meta):
        raise NumdiffError(
            f"{path} is a checkpoint of another model; resume with the run's own model options."
        )


def check_same_training(meta, trainer, path):
    """Refuse to continue from a checkpoint of another objective or seed than the run's options say:
    the weights would take it without a word."""
    now, then = {"seed": trainer.seed}, {"seed": meta.get("seed")}
    if meta.get("diffusion") is not None:
        now |= trainer.diffusion.options
        then |= make_diffusion(meta["diffusion"]).options
    if meta.get("objective") is not None:
        now |= trainer.objective.options
        then |= meta["objective"]
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name) and (name != "seed" or then[name] is not None):
            was, is_now = (
                f"{name} {say(values[name])}" if name in values else f"no {name}"
                for values in (then, now)
            )
            raise NumdiffError(
                f"{path} was trained with {was}, and the options to continue with say {is_now}: restore "
                "the run's options.json, or start a new run from these weights with --init."
            )


def check_resumed_data(meta, trainer, path, new_data):
    """Refuse data that the run of a checkpoint was not trained on, unless `new_data` allows it;
    returns a remark about the data, or None. The classes must be in the run's order in any case."""
    now, then = trainer.fingerprint, meta.get("data")
    classes, file = meta.get("classes") or [], trainer.dataset.path
    if trainer.model.num_classes is not None or sorted(map(key, classes)) == sorted(
        map(key, now["classes"])
    ):
        if why := reordered(classes, now["classes"], "the run", file):
            raise UsageError(
                f"{why}: continue with data whose classes are the run's, in the same order."
            )
    if then is None:
        return (
            f"not compared: an older numdiff wrote {path}, and did not note what it was trained on"
        )
    why = difference(then, now, "what the run was trained on", file)
    if why and not new_data:
        raise UsageError(
            f"{file} is not the data that the run was trained on ({why}): give that as --data, or "
            "--new-data to continue with this one."
        )
    return why and f"new: {why}"
