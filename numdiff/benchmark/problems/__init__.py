"""A problem or two for each operation of numdiff.kernels: what `numdiff bench kernels --of files`
measures.

The shapes are a model's: of the UNet that `numdiff train unet` makes (batch 32, 64 × 64 pixels), of
a DiT-B/2 (batch 64, 256 tokens of 768), and square products for the ladder of matmul. Problems of
operations with a record stand in the record (kernels/operation/record.py); kernels/figures/ has what was
measured.
"""

import dataclasses
import functools
import inspect
import warnings

from ...device import empty
from ...device.planned import Planned, card_of
from ...device.roof import Roof
from ...errors import NumdiffError, UsageError
from ...kernels.operation import all_operations
from ..costs import cost_of
from ..kernels import Array, TimedCalls, bench_call, call_with, for_each, versions_of
from .problem import TimedProblem, adding_to

__all__ = ["TimedProblem", "bench_files", "plan", "problems", "problems_named", "without_memory"]


@functools.cache
def problems():
    """[Problem] of all files, in the order of their README."""
    found = []
    add = adding_to(found)
    for record in all_operations():
        for problem in record.problems:
            if problem.measured:
                versions = problem.versions and tuple(
                    record.version(name).number for name in problem.versions
                )
                call = record.call if problem.call is None else _named(problem.call, record)
                add(
                    call,
                    versions=versions,
                    precision=problem.precision,
                    note=problem.note,
                    moved=problem.moved,
                    flops=problem.flops,
                    awaited=problem.measured == "not yet",
                    **problem.arguments,
                )
    return found


def _named(function, record):
    """The function of a problem, with the name of the operation that it calls."""

    @functools.wraps(function, assigned=())
    def call(**arguments):
        return function(**arguments)

    call.__name__ = record.call.__name__
    return call


def without_memory(call, backend):
    """A call's arguments on a device that only records launches."""
    made = {}

    def one(value):
        if isinstance(value, Array):
            return made.setdefault(value.place, empty(value.shape, value.dtype, backend))
        return for_each(one, value)

    return {name: one(value) for name, value in call.arguments.items()}


def plan(found, card):
    """([Problem] with what each must move and compute, [Key] of all kernels that they launch), by a
    device that only records what a card of this kind would run. A problem for which such a card has
    no version is left out."""
    backend, priced = Planned(card), []
    for problem in found:
        call, arguments = problem.call, without_memory(problem.call, backend)
        cost = None
        for version in problem.versions or (None, *versions_of(call.function)):
            try:
                result = call_with(call.function, arguments, version)
            except (ValueError, NumdiffError):  # not for these operands
                continue
            bound = inspect.signature(call.function).bind(**arguments)
            bound.apply_defaults()
            cost = cost or cost_of(call.function, bound.arguments, result)
        if cost is not None:
            priced.append(
                problem._replace(
                    call=dataclasses.replace(
                        call, moved=call.moved or cost[0], flops=call.flops or cost[1]
                    )
                )
            )
    return priced, list(backend.kernels)


def bench_files(backend, operations=(), echo=print):
    """Yields the rows of every problem, as `bench_kernels` does, with `problem` (its name) besides.

    backend: a GPU, whose kernels are compiled in parallel beforehand; operations: names, none for
    all
    """
    from ...training.compiling import compile_ahead

    found, keys = plan(problems_named(operations), card_of(backend))
    compile_ahead(keys, backend.cache, echo)
    measured, roof = TimedCalls(backend), Roof(backend)
    for problem in found:
        # the launcher then chooses among the kernels of tf32
        backend.tf32 = problem.precision == "tf32"
        try:
            for row in bench_call(
                problem.call, measured, roof, problem.precision, versions=problem.versions
            ):
                yield {"problem": problem.name, **row}
        except Exception as fault:  # the failure of one problem must not hide the others
            warnings.warn(f"{problem.name} failed: {type(fault).__name__}: {fault}", stacklevel=2)
    backend.tf32 = False


def problems_named(operations):
    """Those of `problems()` of these operations; a `UsageError` for one that has none."""
    found = problems()
    names = sorted({problem.call.name for problem in found})
    for operation in operations:
        if not any(name == operation or name.startswith(operation + "_") for name in names):
            raise UsageError(
                f"no file's problem is of an operation {operation!r}: use some of {', '.join(names)}."
            )
    return [
        problem
        for problem in found
        if not operations
        or any(problem.call.name == o or problem.call.name.startswith(o + "_") for o in operations)
    ]
