"""The settings of a run that keeps averages for afterwards."""

from ... import schema
from ...setting import SAME, setting


class AverageSettings:
    heading = "Optimiser"
    ema_std: tuple[float, ...] | None = setting(
        None,
        "Also keep averages with power-function profiles of these widths, as shares of the training so far, and store "
        "them now and then: such as 0.05,0.10, of which `numdiff ema` makes one of any width afterwards.",
        unit="STD,…",
        low=0.005,
        high=0.28,
        trainer=SAME,
        adamw=SAME,
    )


class SnapshotSettings:
    heading = "Output"
    ema_snapshots: int = setting(
        16,
        "How often the averages of --ema-std are stored, evenly over --steps.",
        unit="N",
        low=1,
        high=1000,
        resume=True,
        needs=("ema_std", None),
    )


WIDTHS = schema.items(schema.number(0.005, 0.28), 64)  # of a checkpoint's averages
UPDATES = schema.integer(0)  # that went into them
