"""A run with --lora: what follows from it, and adapter.h5."""

import pathlib

from ...device import download
from ...errors import UsageError
from ...training.checkpoint import save_checkpoint
from ...training.run_extension import RunExtension

FILE = "adapter.h5"
RATE = 5e-4  # of AdamW, where none is given: B starts from zero, so that steps are larger than the whole model's


class LoraRun(RunExtension):
    keeps_init = True

    def resolve(self, given):
        o = self.options
        if "optimizer" not in given:
            o.optimizer = "adamw"
        if "learning_rate" not in given:
            o.learning_rate = RATE
        if "shard_update" not in given:
            o.shard_update = "no"  # moments of adapters are small

    def check(self):
        o = self.options
        for option, wrong, instead in (
            ("--precision fp8", o.precision == "fp8", "use --precision fp16"),
            ("--optimizer muon", o.optimizer != "adamw", "use --optimizer adamw"),
            ("--freeze", bool(o.freeze), "all weights but the adapters are frozen: leave it out"),
            ("--shard-update yes", o.shard_update == "yes", "the adapters are small: leave it out"),
            ("--ema-std", bool(getattr(o, "ema_std", None)), "leave it out"),
        ):
            if wrong:
                raise UsageError(f"{option} does not go with --lora; {instead}.")

    def describe(self, parameters):
        return f"; of the adapters alone, of rank {self.options.lora}"

    def every(self):
        return self.options.checkpoint_every or self.options.steps

    def store(self, run_dir, trainer, averages, meta):
        """Write the averaged adapters, without moments, as adapter.h5."""
        ema = trainer.optimizer.ema
        flat = download(trainer.model.parameters.data if ema is None else ema)
        save_checkpoint(pathlib.Path(run_dir, FILE), {"parameters": flat}, meta)
