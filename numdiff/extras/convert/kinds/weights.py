"""Weights of other programs, as a kind of model reads and writes them: see unet_weights.py,
dit_weights.py.

A kind without such a record has numdiff's own model files, and the plain exports (.npz,
.safetensors) of its parameters under their own names; no foreign file is recognised as its own.
"""

import math

from ....errors import UsageError
from ....settings import say
from ....sizes import Sides, in_pixels
from ....training.model_files import MAX_IMAGE_SIZE


class Weights:
    """How files of a kind that are not numdiff's are read and written.

    free: {option: function(value) -> whether it is allowed} of options that the weights' shapes do
    not determine
    may_rescale: whether programs that train such models rescale timesteps without saying so in the
    file
    """

    free = {}
    may_rescale = False

    def __init__(self, kind, reader="convert"):
        """reader: the command that reads the file, and has options for what the file does not
        store: `numdiff convert`, a run that is to start from it ("train"), or "load", which takes
        the model unchanged and has no options."""
        self.kind, self.reader = kind, reader

    def option(self, name):
        """The option of the command line that gives what a file does not tell."""
        if self.reader == "train":
            for setting, line in self.kind.table.items():
                if "model" in line.readers and line.argument("model")[0] == name:
                    name = setting
                    break
        return flag(name)

    def ask(self, options):
        """The remedy where a file does not tell what these options, in words, give."""
        return (
            f"run `numdiff convert` with {options}" if self.reader == "load" else f"give {options}"
        )

    def recognises(self, state_dict):
        """Whether a foreign state dict is of this kind."""
        return False

    def shown_by(self, state_dict):
        """Names of those options in `free` that this state dict shows after all."""
        return ()

    def complete(self, source, state_dict, stored, free):
        """All options of the model: from the shapes, else from the user (`free`), the file
        (`stored`), the defaults; a `NumdiffError` or a `UsageError` if they cannot be known."""
        raise NotImplementedError

    def remarks(self, sizes, stored):
        """[(heading, text)]: oddities of a model of these sizes that the file's own settings
        (`stored`) do not confirm."""
        return []

    def hold(self, state_dict, sizes):
        """The state dict's tensors that the model has; a `NumdiffError` names what does not fit."""
        raise NotImplementedError

    def usual_path(self, sizes):
        """The path on which the programs that this file may come from train such a model."""
        return "discrete"

    def in_our_time(self, state_dict, sizes, diffusion, reversed=True):
        """(state dict, sizes) with time counted as numdiff counts it, where those programs do
        otherwise. reversed: not for a folder of diffusers, whose flows count it from the image,
        too."""
        return state_dict, sizes

    def in_their_time(self, state_dict, diffusion):
        """The reverse, for a file that those programs are to read."""
        return state_dict

    def exported(self, state_dict, sizes):
        """What a state dict of the public names holds, from numdiff's arrays in PyTorch's layout."""
        return state_dict

    def notes(self, sizes, diffusion):
        """[(heading, text)] of what users of the state dict in other programs must know."""
        return []

    def with_convolutions(self, state_dict, sizes):
        """(state dict, sizes) of the model that changes the size by convolutions; a `UsageError` if
        the kind has no such model."""
        raise UsageError(f"--conv-resample means nothing for a {self.kind.title}: leave it out.")

    def write_folder(self, folder, sizes, state_dict, diffusion, training=None):
        """Write diffusers' folder, with `training` as `write_state_dict` takes it; returns notes. A
        `UsageError` for a model that diffusers' DiT cannot be."""
        raise UsageError(
            f"OUT is {str(folder)!r}, a folder in diffusers' layout, which is for a DiT, and this is a "
            f"{self.kind.title}: let it end in .safetensors or .npz."
        )

    def lines(self, target, result, sizes):
        """What `numdiff convert` says of the model, line by line."""
        yield (
            f"{target}: a {self.kind.title} of {result.parameters:,} parameters for "
            f"{in_pixels(sizes['image_size'])} images"
        )
        yield f"classes     {sizes['num_classes'] or 'none'}"

    def believed(self, stored, free):
        """The options in `stored` (claims of a file) that are plausible; refuses `free` ones that
        the kind does not have."""
        for key, value in free.items():
            if key not in self.free:
                raise UsageError(
                    f"{self.option(key)} means nothing for a {self.kind.title}: leave it out."
                )
            if not self.free[key](value):
                raise UsageError(f"{self.option(key)} {say(value)} is out of range.")
        return {k: v for k, v in stored.items() if k in self.free and self.free[k](v)}

    def classes(self, source, rows, dropout, given):
        """{"num_classes", "class_dropout"} of a model whose class table has `rows` rows (None: it
        has no classes); with dropout the last row is for no class. given: the number of classes
        from the user, or None."""
        if rows is None:
            if given is not None:
                raise UsageError(f"--num-classes {given}: {source} has no classes; leave it out.")
            return {"num_classes": None}
        if given in (rows, rows - 1):  # the user knows whether there is a null class
            dropout = 0.0 if given == rows else dropout or NULL_CLASS_DROPOUT
        classes = rows - (dropout > 0)
        if given not in (None, classes) or classes < 1:
            raise UsageError(
                f"--num-classes {classes if given is None else given}: the class table of {source} has "
                f"{rows} rows, so the model has {rows - 1} classes and a null class, or {rows} and none: "
                f"{self.ask('one of these numbers')}."
            )
        return {"num_classes": classes, "class_dropout": dropout}


# of a foreign model with a null class, which does not say how often it was drawn
NULL_CLASS_DROPOUT = 0.1


def whole(low, high):
    return lambda v: type(v) is int and low <= v <= high


def number(low, high, low_too=True):
    return lambda v: type(v) in (int, float) and (low <= v if low_too else low < v) and v < high


def size(low, high):
    """A side, or height and width, each in this range."""
    side = whole(low, high)
    return lambda v: (
        side(v) or type(v) in (list, tuple, Sides) and len(v) == 2 and all(map(side, v))
    )


IMAGE_SIZE, COUNT, CLASSES, SHARE = (
    size(1, MAX_IMAGE_SIZE),
    whole(1, 1 << 16),
    whole(1, 1 << 24),
    number(0, 1),
)


def yes_or_no(v):
    return type(v) is bool


def count_or_none(v):
    return v == -1 and type(v) is int or COUNT(v)


PERIOD = number(0, math.inf, low_too=False)


def flag(option):
    """The command-line option that sets `option`."""
    names = {"use_new_attention_order": "attention_order", "steps": "diffusion_steps"}
    return "--" + names.get(option, option).replace("_", "-")
