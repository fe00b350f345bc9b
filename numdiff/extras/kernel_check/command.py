"""`numdiff kernels`: check the kernels against their references, and inspect them."""

import contextlib
import os

import click

from numdiff_cli.suggest import SuggestingGroup
from numdiff_cli.values import Choice


@click.group(cls=SuggestingGroup)
def kernels():
    """Check the kernels, and inspect them."""


@kernels.command("list")
def list_operations():
    """Print every operation, with the names of its versions."""
    from numdiff.kernels.operation import all_operations

    for record in all_operations():
        click.echo(
            f"{record.name:28} {', '.join(version.name for version in record.versions)}".rstrip()
        )


@kernels.command()
@click.argument("operation", metavar="OPERATION")
@click.argument("version", metavar="[VERSION]", required=False)
@click.option("--ptx", is_flag=True, help="With VERSION: also print the PTX of its kernels.")
def show(operation, version, ptx):
    """Print an operation's description, its versions, and what they take on the cards on which they
    were measured.

    With a VERSION, its name or number: the source of its kernels, the difference to the version
    below it, registers, shared memory and occupancy.
    """
    from numdiff.errors import UsageError

    from .show import description

    if version is None:
        if ptx:
            raise UsageError("--ptx prints the kernels of a version: name one after the operation.")
        click.echo(description(operation))
        return
    from .version import version_text

    click.echo(version_text(operation, version, ptx))


@kernels.command()
@click.argument("operations", metavar="[OPERATION]…", nargs=-1)
@click.option(
    "--device",
    type=Choice(["emulator", "cuda", "ptx", "cpu"]),
    default="emulator",
    show_default=True,
    help="Where they run. The emulator needs no GPU and reports races, indices out of bounds, uninitialised "
    "memory and more; ptx only compiles them, for two GPU generations.",
)
@click.option(
    "--orders",
    metavar="N",
    type=click.IntRange(1, 3),
    help="Thread orders that the emulator tries: forward, shuffled, reversed.  [default: 2]",
)
@click.option(
    "--seed", metavar="N", type=click.IntRange(0), help="Seed of the shuffled order.  [default: 0]"
)
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1),
    help="Processes in which the emulator runs.  [default: one a core]",
)
@click.option(
    "--against",
    type=Choice(["emulator", "cuda"]),
    default=None,
    help="Also compare the bits with those of this device.",
)
@click.option(
    "--version",
    metavar="N|NAME",
    callback=lambda _, __, v: int(v) if v and v.isdecimal() and len(v) < 5 else v,
    help="Only this version of each operation that has it: its number, or its name, such as hopper.",
)
@click.option(
    "--counts",
    is_flag=True,
    help="Print a table of each kernel's source lines: requests of warps, transactions per request, bank "
    "conflicts, FLOPs. (Counted in the emulator, on the first problem that launches the kernel.)",
)
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write a film of the first problem's run: a page that a browser shows (.html).",
)
@click.option(
    "--list", "only_list", is_flag=True, help="Show the names of the operations and exit."
)
def check(operations, device, orders, seed, jobs, against, version, counts, trace_file, only_list):
    """Run every version of the operations (default: all) on small problems.

    A version passes if it agrees with the float64 reference (to within 1e-5 in float32), gives the
    same bits in every run and thread order, and has no fault. The exit code is 1 if any version
    fails.
    """
    from numdiff.device import get_backend
    from numdiff.device.compile_ahead import worker_count
    from numdiff.errors import NumdiffError

    from . import run as checking

    if only_list:
        for name in sorted({case.name for case in checking.CASES}):
            click.echo(name)
        return
    cases = checking.cases_named(operations)
    check_film(trace_file)
    shown = set()
    width = max(len(checking.Outcome(case, v).name) for case in cases for v in case.versions)
    failed = lacking = count = 0
    if jobs is None and device == "emulator":
        jobs = worker_count(sum(len(case.versions) for case in cases))
    found = checking.check(operations, device, orders, seed, version, against, jobs)
    with contextlib.closing(found) as outcomes:
        for outcome in outcomes:
            count += 1
            if count == 1 and device == "cuda":
                click.echo(f"on {get_backend(device).device_name}")
            said = f"error {outcome.error:.1e}" if device != "ptx" else "compiles"
            if against and outcome.passed:
                same, difference = checking.compare_devices(
                    outcome.case, outcome.version, device, against
                )
                fused = checking.fused_kernels(outcome.case, outcome.version)
                said += f", the bits of {against}" if same else f", {difference:.1e} from {against}"
                said += " (fused multiply-adds)" if fused else ""
            if outcome.passed:
                click.echo(f"{outcome.name:{width}}  ok    {said}, {outcome.seconds:.1f} s")
            elif outcome.lacking:
                lacking += 1
                click.echo(f"{outcome.name:{width}}  –     {outcome.fault}")
            else:
                failed += 1
                click.echo(
                    f"{outcome.name:{width}}  FAILED  "
                    + (outcome.fault or (said if outcome.same else "two runs differ in their bits"))
                )
            if counts:
                recorder = checking.counts_of(outcome.case, outcome.version)
                for kernel in [k for k in recorder.kernels if k not in shown]:
                    shown.add(kernel)
                    click.echo(f"\n{recorder.table(kernel, 46, brief=True)}\n")
            if trace_file and count == 1:
                checking.trace_of(outcome.case, outcome.version).save(trace_file)
                click.echo(f"{outcome.name}: {film_written(trace_file)}")
    click.echo(
        f"{count - failed - lacking} of {count} passed on {device}"
        + (f", in {orders or 2} thread orders" if device == "emulator" else "")
        + (f"; {lacking} need another compute capability" if lacking else "")
    )
    if failed:
        raise NumdiffError(
            f"{failed} of {count} kernel versions did not pass; the report is above."
        )


@kernels.command()
@click.argument("operation", metavar="OPERATION")
@click.argument("version", metavar="VERSION")
@click.option(
    "--problem",
    metavar="TEXT",
    help="The problem to run, as `numdiff kernels check` names it in brackets.  "
    "[default: the version's first]",
)
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write a film of the run: a page that a browser shows (.html).",
)
def run(operation, version, problem, trace_file):
    """Run a version of an operation, its name or number, on a small problem in the emulator.

    \b
    numdiff kernels run softmax warp-per-row --trace softmax.html
    """
    from numdiff.errors import NumdiffError

    from . import run as checking

    check_film(trace_file)
    outcome, film = checking.run_version(operation, version, problem, bool(trace_file))
    for launch in film.launches if film else ():
        click.echo(f"{launch.kernel}, grid {launch.grid}, block {launch.block}")
    if trace_file:
        film.save(trace_file)
    wrong = outcome.fault or (None if outcome.passed else "the result is wrong")
    click.echo(
        f"{outcome.name}: "
        + (f"FAILED  {wrong}" if wrong else f"error {outcome.error:.1e}, {outcome.seconds:.1f} s")
    )
    if trace_file:
        click.echo(film_written(trace_file))
    if wrong:
        raise NumdiffError("the version did not pass; the report is above.")


def check_film(path):
    """Check before the work that a film can be written there; path: None for none."""
    from numdiff.errors import UsageError
    from numdiff.outputs import check_outputs

    if path and os.path.splitext(path)[1] != ".html":
        raise UsageError(f"--trace {path}: a film is written as .html.")
    check_outputs([("--trace", "the film", path)])


def film_written(path):
    return f"film in {path} ({os.path.getsize(path) / 1000:,.0f} kB): open it in a browser"
