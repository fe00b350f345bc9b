"""The cases of an operation's record: its problems, but for those of a model's size."""
import functools

import numpy as np

from ...device import DeviceArray, empty
from ...device.planned import CARDS, Planned
from .case import Case

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")


def cases_of(record):
    """[Case] of an `Operation`."""
    return [Case(record.name, problem.make, functools.partial(_run, record, problem), _versions(record, problem),
                 problem.allowed, problem.label, problem.fast) for problem in record.problems if not problem.measured]


def _versions(record, problem):
    """Numbers of the versions that run a problem: those that fit on an H200."""
    if problem.versions is not None:
        return tuple(record.version(name).number for name in problem.versions)
    backend, made = Planned(H200), problem.make(np.random.default_rng(0))
    values = record.values((), problem.arguments | {
        name: empty(array.shape, array.dtype, backend) for name, array in made.items()})
    array = next(value for value in values.values() if isinstance(value, DeviceArray))
    return tuple(version.number for version in record.fitting(array, values))


def _run(record, problem, inputs, version):
    """A tuple of the results of a problem, from inputs on some device."""
    if problem.run is not None:
        return problem.run(inputs, version)
    values = record.values((), problem.arguments | vars(inputs))
    results = record.call(**values, version=version)
    results = results if isinstance(results, tuple) else (results,)
    results += tuple(values[name] for name in record.writes)
    return tuple({id(array): array for array in results if array is not None}.values())
