"""What an extension does in a training run: `RunExtension` (extensions.py, place `run`)."""

from .. import extensions


class RunExtension:
    """Of a run whose options have the extension's setting; what a subclass leaves out does nothing.

    options: the run's `TrainOptions`
    Attributes floats: float32 numbers that it keeps for each parameter of the model; keeps_init:
    whether a run that continues needs the weights of its `init`, too
    """

    floats = 0
    keeps_init = False

    def __init__(self, options):
        self.options = options

    def resolve(self, given):
        """Fill what follows from its setting, where it was not given: into `options`."""

    def check(self):
        """Raise a `UsageError` for options that cannot work."""

    def describe(self, parameters):
        """What it keeps for a model with this number of parameters; continues the line on averaged
        weights."""
        return ""

    def meta(self):
        """{key: value for JSON} of a checkpoint's description."""
        return {}

    def every(self):
        """Steps between two calls of `store`; 0: none."""
        return 0

    def store(self, run_dir, trainer, averages, meta):
        """Write a file of its own into the run folder, on rank 0. averages: of
        `trainer.averages()`; meta: as of a checkpoint."""

    def begin(self, run_dir, step, say):
        """Before the first step, on rank 0, as the three that follow: of a run that continues from
        `step`, 0 for a new one. say(text): prints a line."""

    def report(self, record):
        """A record of stats.jsonl has been written, a dict."""

    def drawn(self, step, path):
        """A grid of samples has been written, a PNG."""

    def end(self, finished):
        """The run ends. finished: its last step is done."""

    def set_aside(self, run_dir, step):
        """Set aside its files of later steps, as a run continues from `step`."""


def extensions_of(options):
    """[RunExtension] of a run."""
    return [kind(options) for kind in extensions.active("run", options)]
