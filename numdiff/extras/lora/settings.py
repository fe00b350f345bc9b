"""The settings of a run that trains adapters, and what its files say of them."""

from ... import schema
from ...setting import SAME, setting


class LoraSettings:
    heading = "Optimiser"
    lora: int | None = setting(
        None,
        "Of a DiT with --init: train adapters of this rank in its attention and MLPs, and leave all other weights as "
        "they are (LoRA): less memory, and a file of a few megabytes.",
        unit="RANK",
        low=1,
        high=1 << 12,
        needs=("init", None),
        trainer=SAME,
    )
    lora_alpha: float | None = setting(
        None,
        "With --lora: the adapters are multiplied by ALPHA / RANK.  [default: the rank]",
        unit="ALPHA",
        above=0,
        high=1e6,
        needs=("lora", None),
        trainer=SAME,
    )


RECORD = schema.record(
    {
        "rank": schema.integer(1, 1 << 12),
        "alpha": schema.number(0, 1e6),
        "base": schema.text(1 << 12),
        "weights": schema.optional(schema.text(8)),
        "hash": schema.text(64),
    }
)  # of a file with adapters
