"""Datasets: HDF5 files of images, their importers, and the loader that training reads them with."""


def __getattr__(name):
    """`open_dataset` and `Dataset`, imported on first use."""
    if name in ("Dataset", "open_dataset"):
        from . import dataset
        return getattr(dataset, name)
    raise AttributeError(f"module 'numdiff.data' has no attribute {name!r}")
