"""Runs a program with all its kernels emulated, and prints what the emulator finds.

    python -m numdiff.emulator script.py arguments …
    python -m numdiff.emulator --cc 8.0 --orders 3 --counts -m package.module arguments …

It exits with the program's own status if that is not 0, else with 1 if there are findings. Advice,
which is about float64 arithmetic and with --counts about memory, does not change the status.
"""

import argparse
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import traceback

from . import options
from .counts import Recorder
from .faults import EmulatorError, KernelFault
from .findings import costs_of, merge, merge_costs, said
from .host import install, uninstall
from .reports import Reports

PACKAGE = __package__


def parser():
    made = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}",
        usage="%(prog)s [options] (script.py | -m module) [arguments …]",
        description="Run a program with all its Numba CUDA kernels emulated, without a GPU, and print what the "
        "emulator finds. The status is 1 if there are findings.",
    )
    options.add_options(made.add_argument)
    # of a run in one of several orders: a file for what it finds
    made.add_argument("--into", help=argparse.SUPPRESS)
    made.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module"
    )
    made.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def main(arguments=None):
    given = parser().parse_args(arguments)
    program = given.module or given.program
    if not program:
        parser().error("name a program: script.py, or -m module.")
    if not given.module and not os.path.exists(program[0]):
        parser().error(f"there is no file {program[0]}.")
    chosen = {
        name: value for name in options.OPTIONS if (value := getattr(given, name)) is not None
    }
    orders = options.orders_of(chosen)
    if len(orders) == 1:
        found = run(program, given.module is not None, chosen, orders[0])
        if given.into:
            with open(given.into, "wb") as file:
                pickle.dump(found, file)
            return 0
        found = {orders[0]: found}
    else:
        found = {
            order: run_in(order, program, given.module is not None, chosen) for order in orders
        }
    return report(found, chosen)


def run(program, is_module, chosen, order):
    """Run the program here: (status, launches, faults, costs)."""
    recorder = Recorder() if chosen.get("counts") else None
    sys.argv[:] = program
    if not is_module:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    gpu = install(on_fault="collect", recorder=recorder, **options.as_arguments(chosen, order))
    status, faults = 0, []
    try:
        if is_module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KernelFault as error:  # of an emulator that the program has made
        faults = error.faults
    except EmulatorError as error:
        status = 1
        print(f"{type(error).__name__}: {error}{_where(error)}", file=sys.stderr)
    except Exception as error:
        status = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    finally:
        uninstall()
    sys.stdout.flush()
    return (
        status,
        gpu.launches,
        [*gpu.faults, *faults],
        costs_of(recorder) if recorder is not None else [],
    )


def _where(error):
    """The program's line that an error of the emulator comes from, as a further line."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"\n    at {said(Reports.line_of(Reports.calling_frame(trace.tb_frame)))}"


def run_in(order, program, is_module, chosen):
    """`run` in another process, in one of several orders; only the first shows what the program
    prints."""
    with tempfile.TemporaryDirectory() as folder:
        into = os.path.join(folder, "found")
        arguments = ["--order", order, "--into", into]
        for name, value in chosen.items():
            if name not in ("order", "orders") and value is not False:
                text = (
                    ".".join(map(str, value))
                    if name == "cc"
                    else ",".join(value)
                    if name == "without"
                    else value
                )
                arguments += [f"--{name}"] if value is True else [f"--{name}", str(text)]
        shown = None if order == options.THREAD_ORDERS[0] else subprocess.DEVNULL
        done = subprocess.run(
            [sys.executable, "-m", PACKAGE, *arguments, *["-m"] * is_module, *program], stdout=shown
        )
        if not os.path.exists(into):  # the program has ended its process
            return done.returncode or 1, 0, [], []
        with open(into, "rb") as file:
            return pickle.load(file)


def report(found, chosen):
    """Print the findings of {order: what `run` gives}; returns the status."""
    findings = merge({order: faults for order, (_, _, faults, _) in found.items()})
    errors = [f for f in findings if f.fault.kind != "float64" or chosen.get("strict")]
    first = next(iter(found.values()))
    costs = merge_costs(first[3])
    for each in (*errors, *(f for f in findings if f not in errors), *costs):
        print(f"\n{each}")
    launches = first[1]
    advice = len(findings) - len(errors) + len(costs)
    advised = f", {count(advice, 'hint')}" if advice else ""
    orders = f", in {len(found)} thread orders" if len(found) > 1 else ""
    print(
        f"\n{count(len(errors), 'finding')}{advised} in {count(launches, 'launch', 'launches')}{orders}."
    )
    status = next((status for status, *_ in found.values() if status), 0)
    return status or int(bool(errors))


def count(n, one, many=None):
    return f"{n:,} {one if n == 1 else many or one + 's'}"


if __name__ == "__main__":
    sys.exit(main())
