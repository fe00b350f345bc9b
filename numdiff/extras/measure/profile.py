"""`numdiff profile`: where the time and the memory of a training step go."""

import click

from numdiff_cli.settings import KindGroup, SettingOption, kind_command
from numdiff_cli.values import Choice

SHARED = (
    "preset",
    "device",
    "precision",
    "recompute",
    "batch",
    "microbatch",
    "optimizer",
    "image_size",
    "channels",
)


def output(name, **attributes):
    return click.option(name, cls=SettingOption, heading="Output", **attributes)


OPTIONS = (
    output(
        "--out",
        metavar="FILE.json",
        type=click.Path(dir_okay=False),
        help="Write a timeline for chrome://tracing or ui.perfetto.dev.",
    ),
    output(
        "--png",
        metavar="FILE.png",
        type=click.Path(dir_okay=False),
        help="Draw the kernels that compute under the roof of the card: TFLOP/s over FLOPs a byte.",
    ),
    output(
        "--rows",
        metavar="N",
        type=click.IntRange(1),
        default=30,
        show_default=True,
        help="Rows of each table, the longest times first.",
    ),
    output(
        "--name-parts",
        metavar="N",
        type=click.IntRange(1),
        default=2,
        show_default=True,
        help="How many parts of a layer's name distinguish layers.",
    ),
    click.option(
        "--clock",
        cls=SettingOption,
        heading="Measurement",
        type=Choice(["auto", "graph", "events"]),
        default="auto",
        show_default=True,
        help="How kernels are timed on a GPU: inside the replayed graph (by CUPTI, through PyTorch's "
        "profiler), or one by one between events; auto: the former if PyTorch is installed.",
    ),
)


def profile_command(kind):
    return kind_command(kind, "profile", *SHARED, *kind.model_settings, options=OPTIONS, run=show)


@click.group(cls=KindGroup, make=profile_command)
def profile():
    """Show where the time of a training step goes, by kernel and by layer, and what its memory
    holds."""


def show(model, out, png, rows, name_parts, clock, **given):
    from numdiff.benchmark.profile import profile_step
    from numdiff.training.options import resolve

    from .shared import check_results, echo_model, model_name

    options = resolve({"model": model, **given})
    check_results(png, ("--out", "the trace", out))
    echo_model(options)
    found = profile_step(
        options, clock=clock, started=lambda what: click.echo(f"measuring    {what} …", err=True)
    )
    total = found.total_us
    click.echo(f"device       {found.device}")
    click.echo(
        f"step         {found.step_ms:.3f} ms" + (", captured as a graph" if found.captured else "")
    )
    kernels = "kernels" if found.launches[0].grid else "operations"
    click.echo(
        f"{kernels:12s} {len(found.launches):,}, together {total / 1e3:.3f} ms, "
        f"{0.1 * total / found.step_ms:.1f} % of the step; timed {found.clock}"
    )
    if found.replay_us:
        click.echo(
            f"replay       {found.replay_us / 1e3:.3f} ms from the first kernel's start to the last one's end, "
            f"in one stream, of which {(found.replay_us - total) / 1e3:.3f} ms are between kernels"
        )
    if found.roof.bandwidth:
        click.echo(f"memory       {found.roof.bandwidth / 1e9:,.0f} GB/s, measured by a copy")
    click.echo("\n".join(["", *table(found.by_kernel(), kernels[:-1], rows), *footer(found)]))
    layers = [
        (f"{layer} {direction}", *rest) for (layer, direction), *rest in found.by_layer(name_parts)
    ]
    click.echo("\n".join(["", *table(layers, "layer", rows)]))
    if found.memory:
        click.echo("\n".join(["", *memory_table(*found.memory, rows)]))
    if out:
        found.save(out)
        click.echo(f"\ntimeline     {out}")
    if png:
        from numdiff.benchmark.rooflines import draw_profile

        count = draw_profile(
            png, found, rows, f"Kernels of a step: {model_name(options)}, {found.device}"
        )
        click.echo(f"\nroofline     {png}, {count} {kernels}")


def table(found, title, rows):
    """Lines of a table of `Profile.table`'s rows; the last one sums up what is not shown."""
    width = max([len(title), *(len(row[0]) for row in found[:rows])])
    yield f"{title:{width}}  calls        µs  share     GB/s  TFLOP/s  of roof"
    for name, calls, us, share, moved, flops, roof in found[:rows]:
        rate = f"{moved / us / 1e3:8,.1f}" if us and moved else f"{'–':>8}"
        speed = f"{flops / us / 1e6:8.2f}" if us and flops else f"{'–':>8}"
        of = f"{100 * roof:6.0f} %" if roof else f"{'–':>8}"
        yield f"{name:{width}}  {calls:5d} {us:9,.1f} {100 * share:4.1f} %  {rate} {speed} {of}"
    rest = found[rows:]
    if rest:
        more = f"{len(rest)} more"
        yield (
            f"{more:{width}}  {sum(r[1] for r in rest):5d} {sum(r[2] for r in rest):9,.1f} "
            f"{100 * sum(r[3] for r in rest):4.1f} %"
        )


def footer(found):
    """Lines that compare the sum over all kernels with the step."""
    total, step = found.total_us, 1e3 * found.step_ms
    yield f"{'together':10} {len(found.launches):,} in {total:,.1f} µs; the step, measured by itself: {step:,.1f} µs"


def memory_table(peak, held, rows):
    """Lines about what is in memory at the peak."""
    width = max(len(name) for name, _ in held[:rows])
    yield f"{'memory at the peak':{width}}       MiB  share"
    for name, nbytes in held[:rows]:
        yield f"{name:{width}}  {nbytes / 2**20:9,.1f} {100 * nbytes / peak:4.1f} %"
    if held[rows:]:
        rest = sum(nbytes for _, nbytes in held[rows:])
        yield f"{f'{len(held) - rows} more':{width}}  {rest / 2**20:9,.1f} {100 * rest / peak:4.1f} %"
    yield f"{'together':{width}}  {peak / 2**20:9,.1f}"
