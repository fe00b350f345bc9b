"""`--init`: a new run from given weights: one's own run, a file of `numdiff convert`, or what that
command reads.

    start = read_start("DiT-XL-2-256x256.pt", "ema", given)     what the file holds
    settings_of(start, given)                                   the settings that follow from it
    check_settings(start, options, given)                       refuses those that contradict it
    take(start, kind, shapes, sizes, classes)                   which tensors and rows a model takes: a `Taken`
    start_from(model, dataset, path)                            does all of that for a model that is there

The weights of a class stay with its name, so a run on other classes keeps what it knows of those
that are the same.
"""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data.names import key
from ..errors import NumdiffError, UsageError, listed, of_option, printable
from ..settings import COMMON, flag, say
from ..sizes import in_pixels
from . import kinds
from .kinds.kind import defaults_of, imported
from .model_files import ModelFile, folder_of, objective, read_any
from .run_folder import find_checkpoint

CLASSES_LISTED = 12
# options of a model that a new run may change
FREE = ("image_size", "num_classes", "class_dropout", "dropout")
SILENT = (
    "image_size",
    "num_heads",
    "num_heads_upsample",
    "num_head_channels",
    "use_new_attention_order",
    "max_period",
    "rope",
    "sla_topk",
    "sla_linear",
)  # those that some files do not tell
# the last file read, and what it held: its settings are needed before the model, its weights after
# it
_last = {}


@dataclass
class Taken:
    """What a model takes from a file. names: tensors; rows: [(row of the model, row of the file)]
    of the class table `table`; lines: what is taken and what is new, in words."""

    names: list
    table: str | None = None
    rows: list = field(default_factory=list)
    lines: list = field(default_factory=list)


# Reading ------------------------------------------------------------------------------------------


def find_start(where, outdir="runs", kind=None):
    """The path that `--init` means: a file or a folder of diffusers', or the newest checkpoint of a
    run. kind: the record of the model's kind."""

    if pathlib.Path(where).is_file() or folder_of(where) is not None:
        return str(where)
    if kind is not None and kind.reader and pathlib.Path(where).is_dir():
        return str(where)
    try:
        return str(find_checkpoint(where, outdir))
    except NumdiffError as error:
        raise UsageError(
            f"--init: {str(error).rstrip('.')} (or a file of weights that `numdiff convert` reads)."
        ) from None


def read_start(path, weights="ema", options=None, diffusion=None, kind=None) -> ModelFile:
    """What a file of weights holds, its tensors checked for names, shapes and finite numbers.

    options: of the model that is wanted, by the names of its constructor, and diffusion: path and
        rescale_timesteps of the run; they stand in for what the file does not store, such as the
        number of heads; kind: the record of the model's kind, which may read files itself
    """
    try:
        stat = pathlib.Path(path).stat()
    except OSError as error:
        raise UsageError(
            f"--init {printable(path, 200)} cannot be read ({error.strerror}); check the path."
        ) from None
    options = {name: value for name, value in (options or {}).items() if name in SILENT}
    if "num_head_channels" in options:  # it counts unless it is -1, and readers take one of the two
        idle = (
            ("num_head_channels",)
            if options["num_head_channels"] == -1
            else ("num_heads", "num_heads_upsample")
        )
        options = {name: value for name, value in options.items() if name not in idle}
    diffusion = {name: value for name, value in (diffusion or {}).items() if value is not None}
    key = (
        str(path),
        weights,
        stat.st_mtime_ns,
        stat.st_size,
        *sorted(options.items()),
        *sorted(diffusion.items()),
    )
    if key not in _last:
        _last.clear()
        with of_option("--init"):
            _last[key] = (
                imported(kind.reader)(path)
                if kind is not None and kind.reader
                else read_any(
                    path, None if weights == "ema" else weights, diffusion, options, "train"
                )
            )
    return _last[key]


def start_of(options):
    """What the file of a run's options holds."""
    kind = kinds.get(options.model)
    return read_start(
        options.init,
        options.init_weights,
        kind.sizes(options),
        {"path": options.path, "rescale_timesteps": False},
        kind,
    )


def forget():
    """Let go of the file that was read last."""
    _last.clear()


# Settings -----------------------------------------------------------------------------------------


def read_given_start(given, model, outdir):
    """What the file of a run's `init` holds; given: the settings that the user set."""
    kind = kinds.get(model)
    path = find_start(given["init"], outdir, kind)
    wanted = {
        **kind.implied(given),
        **{
            line.argument("model")[0]: given[name]
            for name, line in kind.table.items()
            if "model" in line.readers and name in given
        },
    }
    diffusion = {name: given.get(name) for name in ("path", "rescale_timesteps")}
    start = read_start(path, given.get("init_weights", "ema"), wanted, diffusion, kind)
    if start.kind != model:
        raise UsageError(
            f"--init {path} holds a {kinds.get(start.kind).title}, and this trains a {kind.title}; use "
            f"`numdiff train {start.kind}`, or other weights."
        )
    if given.get("channels") not in (None, start.options["in_channels"]):
        raise UsageError(
            f"--channels {given['channels']} contradicts --init {path}, whose model takes "
            f"{start.options['in_channels']}; leave it out, or start from other weights."
        )
    return start


def follow(given, start):
    """The settings that the user set, with those that follow from the model in a file."""
    table = kinds.get(start.kind).table
    found = {name: value for name, value in settings_of(start, given).items() if name in table}
    return {**found, **given, "init": str(start.path)}


def settings_of(start, given):
    """{setting: value} that the model in a file has: of its sizes, its classes and its diffusion."""
    kind, options = kinds.get(start.kind), dict(start.options)
    class_cond = given.get("class_cond", options["num_classes"] is not None)
    found = {"class_cond": class_cond}
    for name, line in kind.table.items():
        argument = line.argument("model")[0] if "model" in line.readers else None
        if argument in options and argument != "num_classes":
            value = options[argument]
            found[name] = tuple(value) if isinstance(value, list) else value
    if not class_cond or options["num_classes"] is None:
        found.pop("class_dropout", None)
    kind.start_with(found, given, options)
    path = start.diffusion.get("path", "discrete")
    if given.get("path", path) == path:
        found |= _diffusion_settings(start, given, path)
        if not given.get("learn_sigma", options.get("learn_sigma")):
            found.pop("vlb_weight", None)
    return found


def _diffusion_settings(start, given, path):
    """Those of the diffusion that the model in a file was trained with."""
    found = {"path": path}
    for name, line in COMMON.items():
        argument = line.argument("diffusion")[0] if "diffusion" in line.readers else None
        if argument in start.diffusion and start.diffusion[argument] is not None:
            found[name] = start.diffusion[argument]
    scale = found.pop("rescale_timesteps", 1)
    if scale != 1:
        whole = start.diffusion.get("steps", 1) if path == "discrete" else 1
        if abs(scale * whole / 1000 - 1) > 1e-6:
            raise UsageError(
                f"--init {start.path}: its model sees timesteps times {scale:g}, with which no run can be "
                "trained; start from other weights."
            )
        found["rescale_timesteps"] = True
    excluded = {
        "loss": ("min_snr_gamma",),
        "min_snr_gamma": ("loss",),
        "time_sampling": ("noise_mean", "noise_std"),
    }
    for name, others in excluded.items():
        if name in given:
            found = {other: value for other, value in found.items() if other not in others}
    return found


def check_variance(start, options, name):
    """Raise a `UsageError` if the model in the file learns its variance, and the setting of this
    name has none."""
    if name and start.options["learn_sigma"]:
        raise UsageError(
            f"{_said(name, getattr(options, name))} does not go with --init {start.path}, whose model "
            f"learns its variance, which is of whole timesteps and a plain loss: leave {flag(name)} out, "
            "or start from other weights."
        )


def check_settings(start, options, given):
    """Raise a `UsageError` if a setting that was given contradicts the model in the file."""
    kind = kinds.get(start.kind)
    sizes = kind.sizes(options, start.options["in_channels"], start.options["num_classes"])
    own, theirs = (
        kind.structure({**defaults_of(kind.model_class), **sizes}),
        kind.structure(start.options),
    )
    names = {
        line.argument("model")[0]: name
        for name, line in kind.table.items()
        if "model" in line.readers
    }
    for argument, value in theirs.items():
        if argument in FREE or kind.may_become(argument, value, own.get(argument)):
            continue
        if argument not in names:
            raise UsageError(
                f"--init {start.path}: its model has {argument} {_value(value)}, which no setting of a "
                "run gives; start from other weights."
            )
        name = names[argument]
        if name not in given:  # what implies it was
            name = next((other for other in kind.implying if other in given), name)
        raise UsageError(
            f"{_said(name, given.get(name, own.get(argument)))} contradicts --init {start.path}, whose "
            f"model has {flag(names.get(argument, argument))[2:]} {_value(value)}; leave it out, or start "
            "from other weights."
        )


def _said(name, value):
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{flag(name)[2:]}"
    return f"{flag(name)} {_value(value)}"


def _value(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    return say(tuple(value) if isinstance(value, list) else value)


# Taking -------------------------------------------------------------------------------------------


def take(start, shapes, sizes, classes: Sequence[str] = (), diffusion=None) -> Taken:
    """What a model with parameters of these `shapes` ({name: shape}) and options takes from a file.

    classes: names of the classes of the data, in order; diffusion: options of the run's, which may
    differ Raises a `NumdiffError` if tensors are missing, are left over, or have another shape.
    """
    kind = kinds.get(start.kind)
    table = kind.class_table
    renewed = [
        name
        for name in shapes
        if name not in start.arrays and kind.is_recomputed(name, start.options)
    ]
    missing = [
        name
        for name in shapes
        if name not in start.arrays and name != table and name not in renewed
    ]
    left = [name for name in start.arrays if name not in shapes and name != table]
    other = [
        name
        for name in shapes
        if name in start.arrays
        and name != table
        and tuple(start.arrays[name].shape) != tuple(shapes[name])
    ]
    if missing or left or other:
        found = [
            listed(words, names)
            for words, names in (
                ("it lacks", missing),
                ("it has beyond them", left),
                ("of another shape are", other),
            )
            if names
        ]
        raise NumdiffError(
            f"--init {start.path} does not have the tensors of this model: {' and '.join(found)}; check "
            "the model options."
        )
    taken = Taken([name for name in shapes if name != table and name not in renewed])
    whole, new = len(taken.names), []
    if table in shapes:
        taken.table = table
        taken.rows, new = match_rows(start, sizes, shapes[table][0], classes)
        whole += len(taken.rows) == shapes[table][0]
    source = {"ema": " (averaged weights)", "raw": " (weights as trained)"}.get(start.weights, "")
    step = f", after step {start.step:,}" if start.step else ""
    taken.lines.append(f"{whole} of {len(shapes)} tensors from {start.path}{source}{step}")
    if new:
        kept = len(taken.rows)
        taken.lines.append(
            f"new: {table}, rows of {_listed(new)}; kept: {kept} of {shapes[table][0]} rows"
        )
    if renewed:
        taken.lines.append(
            f"new: {len(renewed)} tensors ({', '.join(renewed[:2])}{', …' if len(renewed) > 2 else ''})"
        )
    if table in start.arrays and table not in shapes:
        taken.lines.append(f"left out: {table}, as this run has no classes")
    taken.lines.extend(f"{heading}: {text}" for heading, text in start.remarks)
    now, before = (in_pixels(each["image_size"]) for each in (sizes, start.options))
    if now != before:
        said = kind.resized(start.options, sizes)
        taken.lines.append(f"for images of {now}, which were {before}{said and f': {said}'}")
    if start.diffusion:
        before, now = (
            objective(options) for options in (start.diffusion, diffusion or start.diffusion)
        )
        if before != now:
            taken.lines.append(
                f"its model {before}, and this run's {now}: it must learn that again"
            )
    return taken


def match_rows(start, sizes, count, classes):
    """([(row of the model, row of the file)], names of the classes whose rows are new) of the table
    of classes.

    Rows stay with the name of their class; where neither side names its classes, with their number
    if there are as many. The null class is the last row of both.
    """
    old = start.options["num_classes"]
    if old is None:
        return [], _names(classes, sizes["num_classes"], count)
    has_names = _are_names(start.classes), _are_names(classes)
    rows = []
    if all(has_names):
        theirs = {key(name): row for row, name in reversed(list(enumerate(start.classes[:old])))}
        rows = [(row, theirs[key(name)]) for row, name in enumerate(classes) if key(name) in theirs]
    elif not any(has_names) and old == sizes["num_classes"]:
        rows = [(row, row) for row in range(old)]
    if count > sizes["num_classes"] and start.options["class_dropout"] > 0:
        rows.append((sizes["num_classes"], old))
    kept = {row for row, _ in rows}
    names = _names(classes, sizes["num_classes"], count)
    return rows, [name for row, name in enumerate(names) if row not in kept]


def _are_names(classes):
    """Whether classes have names, rather than their numbers for such."""
    return bool(classes) and list(classes) != [str(i) for i in range(len(classes))]


def _names(classes, num_classes, count):
    """The name of each row."""
    names = [*classes, *(str(i) for i in range(len(classes), num_classes))][:num_classes]
    return [*names, *["the null class"] * (count - num_classes)]


def _listed(names):
    rest = len(names) - CLASSES_LISTED
    classes = len(names) - ("the null class" in names)
    return (
        f"{classes} class{'es' * (classes != 1)}: {', '.join(printable(n, 60) for n in names[:CLASSES_LISTED])}"
        f"{f' and {rest} more' if rest > 0 else ''}"
    )


def check_dataset(start, dataset):
    """Raise a `UsageError` for images that the model in a file does not take."""
    channels = start.options["in_channels"]
    if dataset.shape[3] != channels:
        raise UsageError(
            f"the images of {dataset.path!r} have {dataset.shape[3]} channels, and the model of --init "
            f"{start.path} takes {channels}; give other --data, or start from other weights."
        )


def start_from(model, dataset, path, weights="ema", diffusion=None) -> dict[str, Any]:
    """Overwrite a model's weights with those of a file; what the file does not have keeps its
    values.

    diffusion: options of the run's, if they may differ from the file's
    Returns what a checkpoint keeps of it: {"file", "weights", "step", "lines"}.
    """
    path_of_run = (diffusion or model.diffusion).get("path", "discrete")
    kind = kinds.get(model.kind)
    start = read_start(
        path, weights, model.options, {"path": path_of_run, "rescale_timesteps": False}, kind
    )
    forget()
    if start.kind != model.kind:
        raise UsageError(
            f"--init {path} holds a {kinds.get(start.kind).title}, and the model is a {kind.title}."
        )
    own, theirs = kind.structure(model.options), kind.structure(start.options)
    for name, value in theirs.items():
        if name not in FREE and not kind.may_become(name, value, own.get(name)):
            raise UsageError(
                f"--init {path}: its model has {name} {_value(value)}, and this one "
                f"{_value(own.get(name))}; build the model with that."
            )
    shapes = {name: parameter.shape for name, parameter in model.parameters.parameters.items()}
    taken = take(start, shapes, model.options, list(getattr(dataset, "classes", ())), diffusion)
    arrays = model.arrays()
    for name in taken.names:
        arrays[name] = np.asarray(start.arrays[name], np.float32)
    if taken.rows:
        own_rows, their_rows = map(list, zip(*taken.rows, strict=True))
        arrays[taken.table][own_rows] = np.asarray(start.arrays[taken.table], np.float32)[
            their_rows
        ]
    model.load_arrays(arrays)
    return {
        "file": str(start.path),
        "weights": start.weights,
        "step": start.step,
        "lines": taken.lines,
    }
