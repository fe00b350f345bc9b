"""Training: the loop, its options, checkpoints, reports."""

from typing import TYPE_CHECKING

from ..configs import TrainerConfig

if TYPE_CHECKING:
    from .run import train
    from .trainer import Trainer

__all__ = ["Trainer", "TrainerConfig", "train"]


def __getattr__(name):
    """`Trainer` and `train`, imported on first use: they need everything below them."""
    if name == "Trainer":
        from .trainer import Trainer

        return Trainer
    if name == "train":
        from .run import train

        return train
    raise AttributeError(f"module 'numdiff.training' has no attribute {name!r}")
