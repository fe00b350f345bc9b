"""Watching a step while it runs: its operations, its launches, and the layer that each belongs to.

It costs nothing while inactive: a context replaces the functions by wrappers and restores them at
its end.
"""

import contextlib
import functools
import inspect
import sys

from ..extensions import kernel_packages
from ..kernels.operation import kernel_modules
from ..nn import recording, tensor
from .costs import is_operation

BETWEEN = "(between layers)"  # sums of gradients, and all else that belongs to no layer
MODEL = "(model)"  # what the model's own forward does between its parts


def operations():
    """The functions of modules with kernels whose cost is known."""
    return {
        f
        for m in kernel_modules()
        for name, f in list(vars(m).items())
        if is_operation(name, f) and f.__module__.startswith(kernel_packages())
    }


@contextlib.contextmanager
def watching_operations(around):
    """Context: every call of an operation goes through `around(function, arguments, call)`.

    arguments: {name: value} with defaults; call: does the work, and returns the result, which
    `around` must return
    """
    wrappers = {id(f): _wrapper(f, around) for f in operations()}
    changed = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("numdiff.") or name.startswith("numdiff.benchmark"):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in wrappers:
                changed.append((module, attribute, value))
    try:
        for module, attribute, value in changed:
            setattr(module, attribute, wrappers[id(value)])
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)


def _wrapper(function, around):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return around(function, bound.arguments, lambda: function(*args, **kwargs))

    return wrapped


@contextlib.contextmanager
def watching_launches(backend, around):
    """Context: every launch, fill and copy of a device goes through `around(name, grid, block,
    call)`.

    call: a `functools.partial`, whose `args` are the launch's. One may be within another: its calls
    go through both.
    """
    if backend is None:
        yield
        return
    launch, fill, copy = backend.launch, backend.fill, backend.copy
    outer = {
        name: vars(backend)[name] for name in ("launch", "fill", "copy") if name in vars(backend)
    }

    def watched_launch(kernel, grid, block, args, *more):
        call = functools.partial(launch, kernel, grid, block, args, *more)
        return around(kernel.py_func.__name__, grid, block, call)

    try:
        backend.launch = watched_launch
        backend.fill = lambda array, byte: around(
            "memset", 1, 1, functools.partial(fill, array, byte)
        )
        backend.copy = lambda source, target: around(
            "memcpy", 1, 1, functools.partial(copy, source, target)
        )
        yield
    finally:
        del backend.launch, backend.fill, backend.copy  # uncovers the class's own methods
        vars(backend).update(outer)


class Layers:
    """The current layer and its direction (forward or backward); call `now()` within `with
    layers:`.

    The tape knows the layer on the way forward; each record that it makes reports it again on the
    way backward.
    """

    def __init__(self):
        self.backward = False

    def now(self):
        """(layer, "forward" or "backward" or "step"): "step" is what is outside of the model."""
        if not recording.scope:
            return BETWEEN, "backward" if self.backward else "step"
        return recording.scope[-1] or MODEL, "backward" if self.backward else "forward"

    def __enter__(self):
        layers, self._record, self._play = self, tensor.Record, tensor.Tape.backward

        class WatchRecord(self._record):
            __slots__ = ()

            def __init__(self, name, output, inputs, backward, *more, **options):
                layer = recording.scope[-1] if recording.scope else None

                def within(*gradients):
                    if layer is None:
                        return backward(*gradients)
                    recording.scope.append(layer)
                    try:
                        return backward(*gradients)
                    finally:
                        recording.scope.pop()

                super().__init__(name, output, inputs, within, *more, **options)

        def play(tape, *args, **kwargs):
            # a recomputed block plays a tape within a tape
            before, layers.backward = layers.backward, True
            try:
                return layers._play(tape, *args, **kwargs)
            finally:
                layers.backward = before

        tensor.Record, tensor.Tape.backward = WatchRecord, play
        return self

    def __exit__(self, *exception):
        tensor.Record, tensor.Tape.backward = self._record, self._play
