"""A run with --ema-std: what its checkpoints say of the averages, and when these are stored."""

import pathlib

from ...device import download
from ...files import remove, set_aside
from ...option_names import as_options
from ...training.checkpoint import save_checkpoint
from ...training.run_extension import RunExtension
from .combine import list_snapshots
from .power_ema import exponents_of


class PostHocEma(RunExtension):
    @property
    def floats(self):
        return len(self.options.ema_std)

    def check(self):
        with as_options():
            exponents_of(self.options.ema_std)  # refuses a width that is there twice

    def describe(self, parameters):
        """What is kept and stored of --ema-std."""
        stds, every = self.options.ema_std, self.every()
        size = 4 * parameters * len(stds)
        often = "every step" if every == 1 else f"every {every:,} steps"
        widths = f"width{'s' * (len(stds) > 1)} {', '.join(f'{std:g}' for std in stds)}"
        return (
            f"; also of the {widths}, stored {often} in {size / 1e6:,.3g} MB, "
            f"{-(-self.options.steps // every) * size / 1e9:,.3g} GB in all"
        )

    def meta(self):
        return {"ema_std": list(self.options.ema_std)}

    def every(self):
        return -(-self.options.steps // self.options.ema_snapshots)

    def store(self, run_dir, trainer, averages, meta):
        """Where a run has been made longer, and its snapshots too many, those that are not on the
        new, wider grid go.
        """
        path = pathlib.Path(run_dir, f"averages-{trainer.step:08d}.h5")
        save_checkpoint(
            path, averages, {**meta, "updates": int(download(trainer.optimizer.updates)[0])}
        )
        snapshots, every = list_snapshots(run_dir), self.every()
        if len(snapshots) > self.options.ema_snapshots + 1:
            for step, path in snapshots[:-1]:
                if step % every:
                    remove(path)

    def set_aside(self, run_dir, step):
        for later, path in list_snapshots(run_dir):
            if later > step:
                set_aside(path)
