"""Datasets: HDF5 files of images, and the loader with which training reads them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dataset import Dataset, open_dataset

__all__ = ["Dataset", "open_dataset"]


def __getattr__(name):
    """`open_dataset` and `Dataset`, imported on first use."""
    if name in ("Dataset", "open_dataset"):
        from . import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module 'numdiff.data' has no attribute {name!r}")
