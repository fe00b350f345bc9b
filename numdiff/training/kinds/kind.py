"""What the rest of numdiff knows about a kind of model: `ModelKind`, one record for each kind.

A record is light: it names its classes as "module:name", and they are imported only when they are
needed, so that help needs no NumPy. What a record leaves out has a default that fits a model
without peculiarities:

    class ToySettings:                                       # in the form of numdiff/settings.py
        width: int = setting(32, "Channels inside.", unit="N", low=1, high=1024, model=SAME)

    kinds.register(ModelKind("toy", "Toy", "mine.toy:Toy", settings=ToySettings, presets={"tiny":
                             {"steps": 100}}, default_preset={"cpu": "tiny", "cuda": "tiny"}))

`Toy` is a `numdiff.nn.model.Model` whose constructor takes image_size, in_channels, num_classes,
class_dropout, learn_sigma, its own settings, device and seed. From then on there are `numdiff train
toy`, `compile toy`, `bench step toy`, `bench sample toy` and `profile toy`, and its checkpoints are
resumed and sampled.
"""

import functools
import importlib
import inspect
import math
from dataclasses import dataclass, field

from ...settings import COMMON, arguments, settings_in, with_extensions


def imported(where):
    """The object at "module:name"."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def defaults_of(model):
    """{option: default} of the constructor of a model or `Diffusion`, without device and seed."""
    return {
        name: list(p.default) if isinstance(p.default, tuple) else p.default
        for name, p in inspect.signature(model).parameters.items()
        if name not in ("config", "device", "seed", "backend")
    }


@dataclass(frozen=True, eq=False)
class ModelKind:
    """One kind of model.

    name: on the command line and in files; title: in texts; model: where its class is
    settings: the class with its own settings, whose heading in help is the title
    presets: {name: {setting: value}}; default_preset: {"cpu", "cuda": name}
    rates: {preset: {optimizer: learning rate}} where that optimizer is given instead of the
    preset's
    emoji: {preset: {setting: value}} filled in, too, where the dataset is the default one
    check: where a function is that refuses options with which no model can be laid out
    twin: where its counterpart in PyTorch is, for `--versus torch`; twin_channels_last: whether
    that stores its images channels-last
    float8: whether it trains in --precision fp8
    parts: what of its blocks `--recompute` may name alone, of the model's `part_kinds`
    class_dropout: the default of --class-dropout
    class_table: the parameter with a row a class, and a last one for no class
    implying: settings that stand for several options of the model
    previews: where the class is that draws a run's pictures, with the methods of `Previews`
    reader: where a function is that reads a file or folder of weights of `--init` as a `ModelFile`;
    None: initial.py does
    help: {"train", "compile", "bench step", "bench sample", "bench quality", "profile": text},
        where the default text does not suit
    """

    name: str
    title: str
    model: str
    settings: type
    presets: dict
    default_preset: dict
    rates: dict = field(default_factory=dict)
    emoji: dict = field(default_factory=dict)
    check: str | None = None
    twin: str | None = None
    twin_channels_last: bool = False
    float8: bool = False
    parts: tuple = ()
    class_dropout: float = 0.0
    class_table: str | None = None
    implying: tuple = ()
    previews: str = "numdiff.training.previews:Previews"
    reader: str | None = None
    help: dict = field(default_factory=dict)

    # What it consists of --------------------------------------------------------------------------

    @functools.cached_property
    def own(self):
        """{name: Setting} that this kind alone has."""
        lines = settings_in(self.settings)
        lines = {
            name: type(line)(**{**vars(line), "group": self.title}) for name, line in lines.items()
        }
        return with_extensions(lines, f"{self.name}_settings")

    @functools.cached_property
    def table(self):
        """{name: Setting} of all settings of its runs, in the order in which they are shown: its
        own after the data."""
        after = [name for name, line in COMMON.items() if line.group in ("Run", "Data")]
        return {**{name: COMMON[name] for name in after}, **self.own, **COMMON}

    @property
    def model_settings(self):
        """Names of the settings that shape its model, but for the image's size and channels; of
        `bench` and `profile`.
        """
        return (*self.own, "class_cond", "class_dropout", "learn_sigma")

    @property
    def model_class(self):
        return imported(self.model)

    def say(self, command):
        """The text of `numdiff COMMAND` for this kind."""
        usual = {
            "train": f"Train a {self.title}.",
            "profile": f"The training step of a {self.title}.",
            "compile": f"The kernels of `numdiff train {self.name}` with the same options: training step and "
            "pictures.",
            "bench step": f"The {self.title} of a preset, on random images.",
            "bench ladder": f"The {self.title} of a preset, on random images.",
            "bench sample": f"The {self.title} of a preset, with random weights.",
            "bench quality": f"Train a {self.title} as `numdiff train {self.name}` does, on all classes, and "
            "measure its samples on the way.",
        }
        return {**usual, **self.help}[command]

    def held_out(self, dataset, options):
        """The dataset to train on; its `held_out`, where it has that, is what it leaves out of the
        one that the options name."""
        return dataset

    # Options of a run -----------------------------------------------------------------------------

    def resolve(self, options, given):
        """Fill what follows from other settings, where it was not given: into a `TrainOptions`."""

    def check_options(self, options):
        """Raise a `UsageError` if the kind's settings of a run do not fit each other."""

    def learns_sigma(self, options):
        """The default of --learn-sigma."""
        return False

    def upgrade(self, values):
        """Bring the values of an options.json that an older numdiff wrote up to date, in place."""

    def label(self, options):
        """The model of a run in a few words."""
        return f"{self.name}, preset {options.preset}"

    def objective(self, options):
        """The `objective` of a run's `Trainer`; None: that of its diffusion."""

    def describe_objective(self, options):
        """The line on what a run minimises; None: that on its diffusion."""

    # The model, from its constructor's options (`sizes`), without building it ---------------------

    def sizes(self, options, channels=3, num_classes=None):
        """The constructor's options, without device and seed, of the model that a run's options
        describe.

        num_classes: of the dataset; the run's own number, if it has one, takes precedence.
        """
        own = getattr(options, "num_classes", None) if "num_classes" in self.own else None
        return {
            **arguments("model", options, self.table),
            "in_channels": channels,
            "num_classes": num_classes if own is None else own,
        }

    def start_with(self, found, given, sizes):
        """Bring the settings `found` of a run that starts from a model of these sizes in accord
        with those given, in place."""

    def implied(self, given):
        """Options of the model that follow from settings which stand for several, of those given."""
        return {}

    def structure(self, sizes):
        """The options of a model that its weights are for, in a form in which equal ones are equal."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sizes.items()
        }

    def may_become(self, name, theirs, own):
        """Whether a model whose option `name` is `own` can start from the weights of one that had
        `theirs`."""
        return theirs == own

    def resized(self, theirs, own):
        """The changes other than weights in a model that starts from one for another image size, in
        words."""
        return ""

    def is_recomputed(self, name, theirs):
        """Whether a parameter keeps its initial value in a model that starts from one with the
        options `theirs`."""
        return False

    def check_sizes(self, sizes):
        """Raise a `UsageError` for sizes with which no model can be laid out."""
        if self.check:
            imported(self.check)(sizes)

    def laid_out(self, sizes):
        """A model with shapes but no memory."""
        from ...nn.model import laid_out

        return laid_out(self.model_class, sizes)

    def count_parameters(self, sizes):
        """(all parameters, those that are trained)."""
        return 2 * (sum(math.prod(p.shape) for _, p in self.laid_out(sizes).named_parameters()),)

    def products(self, sizes):
        """The products of one image's way through the model: `Model.products`."""
        return self.laid_out(sizes).products()

    def activations(self, sizes):
        """Numbers that one image leaves for the backward pass, counting only what is certain."""
        return 0

    def blocks(self, sizes):
        """A lower bound on the number of blocks, each with a parameter, against which a file is
        checked."""
        return 0

    def check_file(self, sizes, weights):
        """Raise a `Mismatch` for sizes in a file that would take memory out of proportion to its
        weights' bytes."""

    def describe(self, options, sizes):
        """One line about the model of a run."""
        count, trained = self.count_parameters(sizes)
        fixed = "" if trained == count else f" ({trained:,} trained)"
        return f"{self.label(options)}: {count:,} parameters{fixed}"
