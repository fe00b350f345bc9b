"""The cases of an operation's record: its problems, but for those of a model's size."""

import contextlib
import functools

import numpy as np

from ...device import DeviceArray, empty
from ...device.planned import CARDS, Planned
from ...kernels.operation import first_on_device
from .case import Case

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")


def cases_of(record):
    """[Case] of an `Operation`."""
    return [
        Case(
            record.name,
            problem.make,
            functools.partial(_run, record, problem),
            _versions(record, problem),
            problem.allowed,
            problem.label,
            _fast(record, problem),
            problem.bfloat16,
            problem.once,
            problem.only_compiled,
        )
        for problem in record.problems
        if not problem.measured
    ]


def _fast(record, problem):
    return (
        problem.fast
        if isinstance(problem.fast, bool)
        else [record.version(name).number for name in problem.fast]
    )


def _versions(record, problem):
    """Numbers of the versions that run a problem: those that fit on an H200."""
    if not record.versions:
        return (None,)
    if problem.versions is not None:
        return tuple(record.version(name).number for name in problem.versions) or (None,)
    backend, made = Planned(H200), problem.make(np.random.default_rng(0))
    values = _values(
        record, problem, {name: empty(a.shape, a.dtype, backend) for name, a in made.items()}
    )
    return tuple(
        version.number for version in record.fitting(first_on_device(values.values()), values)
    )


def _values(record, problem, arrays):
    """{parameter: value} of the problem's call with these arrays."""
    return record.values(
        (),
        {name: value for name, value in problem.bound(arrays).items() if name in record.parameters},
    )


def _run(record, problem, inputs, version):
    """A tuple of the results of a problem, from inputs on some device."""
    with problem.within() if problem.within else contextlib.nullcontext():
        return _results(record, problem, inputs, version)


def _results(record, problem, inputs, version):
    if problem.run is not None:
        return problem.run(inputs, version)
    if problem.call is None:
        call, values = record.call, _values(record, problem, vars(inputs))
    else:
        bound = problem.bound(vars(inputs))
        call, values = problem.call, {name: bound[name] for name in problem.arguments}
    results = call(**values, version=version) if record.versions else call(**values)
    found = arrays_in([results, *(values[name] for name in record.writes if name in values)])
    return tuple({id(array): array for array in found}.values())


def arrays_in(value):
    """The arrays in a result: itself, or what lists and tuples hold."""
    if isinstance(value, (list, tuple)):
        return [array for each in value for array in arrays_in(each)]
    return [value] if isinstance(value, (np.ndarray, DeviceArray)) else []
