"""Training: the loop, its options, checkpoints, reports."""


def __getattr__(name):
    """`Trainer` and `train`, imported on first use: they need everything below them."""
    if name in ("Trainer", "train"):
        from . import trainer
        return getattr(trainer, name)
    raise AttributeError(f"module 'numdiff.training' has no attribute {name!r}")
