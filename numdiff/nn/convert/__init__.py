"""Weights of other programs: their files, their names, their layout."""
from .layout import to_numdiff_layout, to_torch_layout

__all__ = ["to_numdiff_layout", "to_torch_layout"]
