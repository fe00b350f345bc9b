"""Evaluations of a model that a GPU replays: for each shape, the first is launched and the second
recorded (replay.py)."""

import weakref
from collections import OrderedDict

import numpy as np

from ..device import Replayed, copy_into, download, empty
from .tensor import Tensor

KEPT = 8  # shapes of a model that stay recorded, the most recent ones

# model -> {shape and more: Evaluation}; no part of the model nor its copies
_recorded = weakref.WeakKeyDictionary()


class Evaluation:
    """A model's output for inputs of one shape, in arrays at fixed addresses."""

    def __init__(self, model, inputs):
        backend, x_t = model.backend, inputs[0]
        self.model = weakref.ref(model)
        self.inputs = [None if a is None else empty(a.shape, a.dtype, backend) for a in inputs]
        self.output = empty((*x_t.shape[:-1], model.out_channels), np.float32, backend)
        self._replayed = Replayed(self._launch, backend)

    def _launch(self):
        x_t, *others = self.inputs
        copy_into(self.output, self.model()(Tensor(x_t), *others).data)

    def __call__(self, inputs):
        for target, source in zip(self.inputs, inputs, strict=True):
            if source is not None:
                copy_into(target, source)
        self._replayed()
        return download(self.output)


def evaluate(model, x_t, t, y):
    """The model's output on a GPU, as NumPy, for NumPy arrays x_t (B, H, W, C), t (B,) and y (B,)
    or None."""
    inputs = x_t, t, y
    with model.backend.turn:
        known = _recorded.setdefault(model, OrderedDict())
        key = x_t.shape, t.dtype, y is None, model.place()
        if key not in known:
            known[key] = Evaluation(model, inputs)
        known.move_to_end(key)
        while len(known) > KEPT:
            known.popitem(last=False)
        return known[key](inputs)
