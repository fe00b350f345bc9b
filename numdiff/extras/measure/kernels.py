"""`numdiff bench kernels`: each version of each operation, at the shapes of a model or of a file."""

import click

from numdiff.training import kinds
from numdiff_cli.settings import GroupedCommand, settings
from numdiff_cli.values import Choice

from .shared import KERNELS, MODEL, check_results, echo_model, measurement, model_name


@click.command(cls=GroupedCommand)
@click.argument("operations", metavar="[OPERATION]…", nargs=-1)
@measurement(
    (
        "--of",
        {
            "type": Choice([*kinds.names(), "files"]),
            "default": kinds.names()[0],
            "show_default": True,
            "help": "Whose shapes: those of a training step of this model; files: a problem or two for each "
            "operation, whose figures `numdiff kernels show` prints.",
        },
    ),
    (
        "--chosen",
        {"is_flag": True, "help": "Only the version that the launcher chooses, instead of each."},
    ),
    (
        "--shapes",
        {
            "metavar": "N",
            "type": click.IntRange(1),
            "help": "How many shapes of each operation to measure, "
            "the largest first.  [default: 3; all if operations are named]",
        },
    ),
    (
        "--versus",
        {
            "type": Choice(["torch"]),
            "help": "Also measure cuBLAS and cuDNN, through PyTorch.  [default: "
            "if it is installed]",
        },
    ),
    (
        "--json",
        {
            "metavar": "FILE.json",
            "type": click.Path(dir_okay=False),
            "help": "Write the rows, after each "
            "problem; with --of files `python -m numdiff.kernels.figures` reads it.",
        },
    ),
    (
        "--png",
        {
            "metavar": "FILE.png",
            "type": click.Path(dir_okay=False),
            "help": "Draw the rows that compute under "
            "the roof of the card: TFLOP/s over FLOPs a byte.",
        },
    ),
)
@settings(*KERNELS, *MODEL)
def kernels(operations, of, chosen, shapes, versus, json, png, **given):
    """Measure each version of the operations (default: all) at the shapes of a model.

    A star marks the version that the launcher chooses. Rates count the bytes and FLOPs that the
    operation needs at least. The roof is the measured speed of the memory or the peak of the
    arithmetic, whichever limits the operation.
    """
    from numdiff.benchmark.kernels import bench_kernels, results_of
    from numdiff.files import write_json
    from numdiff.training.options import resolve

    check_results(png, ("--json", "the rows", json))
    if of == "files":
        measured = files_rows(operations, chosen, shapes, versus, given)
        title = "Kernels, a problem or two for each file"
    else:
        options = resolve({"model": of, **given})
        echo_model(options)
        measured = bench_kernels(options, operations, chosen, shapes, versus == "torch")
        title = f"Kernels of a step: {model_name(options)}, {options.precision}"
    last, rows = None, []
    for row in measured:
        rows.append(row)
        if len(rows) == 1 and row["card"]:
            click.echo(f"device       {row['card']}")
        if json:
            write_json(json, results_of(rows), "the rows")
        if row["operation"] != last:
            last = row["operation"]
            click.echo(
                f"\n{last:63} {'calls':>5} {'µs':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of roof':>10} "
                f"{'PyTorch µs':>10}"
            )
        roof = "–" if row["roof"] is None else f"{100 * row['roof']:.0f} % {row['bound'][:3]}"
        theirs = "–" if row["torch_us"] is None else f"{row['torch_us']:.1f}"
        speed = f"{row['tflops']:8.2f}" if row["tflops"] else f"{'–':>8}"
        click.echo(
            f"  {row['shape']:40} {row['version']:3} {row['name'] or '':16} {row['calls']:>5} {row['us']:9.1f} "
            f"{row['gb_s']:7,.1f} {speed} {roof:>10} {theirs:>10}"
        )
    if json:
        click.echo(f"\nrows         {json}, {len(rows)}")
    if png:
        from numdiff.benchmark.rooflines import draw_kernels

        count = draw_kernels(png, rows, title)
        click.echo(f"\nroofline     {png}, {count} of {len(rows)} rows")


def files_rows(operations, chosen, shapes, versus, given):
    """The rows of `--of files`; its problems stand in a file, so most options have nothing to say."""
    from numdiff.benchmark.problems import bench_files
    from numdiff.benchmark.torch_step import require_torch
    from numdiff.device import get_backend
    from numdiff.errors import NumdiffError, UsageError
    from numdiff.training.options import resolve

    for name, value in {"chosen": chosen or None, "shapes": shapes, **given}.items():
        if value is not None and name != "device":
            raise UsageError(
                f"--of files has problems of its own: leave out --{name.replace('_', '-')}."
            )
    if resolve({"device": given.get("device")}).device != "cuda":
        raise NumdiffError(
            "the problems of --of files are measured on a GPU, and --device is not cuda; run it on the "
            "card."
        )
    if versus:
        require_torch()
    return bench_files(get_backend("cuda"), operations, click.echo)
