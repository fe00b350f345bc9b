"""`numdiff profile`: where the time of a training step goes."""
import click

from .settings import GroupedCommand, Setting, settings

SHARED = ("preset", "device", "precision", "batch", "microbatch", "image_size", "channels")


@click.group()
def profile():
    """Show where the time of a training step goes, by kernel and by layer."""


def profile_command(model, *more):
    """Decorator: a subcommand of `profile` with the settings that matter, those in `more` besides."""
    def decorate(function):
        for option, attributes in reversed((
                ("--out", {"metavar": "FILE.json", "type": click.Path(dir_okay=False),
                           "help": "Write a timeline for chrome://tracing or ui.perfetto.dev."}),
                ("--rows", {"metavar": "N", "type": click.IntRange(1), "default": 30, "show_default": True,
                            "help": "Rows of each table, the longest times first."}),
                ("--depth", {"metavar": "N", "type": click.IntRange(1), "default": 2, "show_default": True,
                             "help": "Parts of a layer's name by which layers are told apart."}))):
            function = click.option(option, cls=Setting, heading="Output", **attributes)(function)
        return profile.command(cls=GroupedCommand)(settings(*SHARED, *more, model=model)(function))
    return decorate


@profile_command("unet")
def unet(out, rows, depth, **given):
    """The training step of a UNet."""
    show("unet", out, rows, depth, given)


@profile_command("dit", "architecture", "num_classes")
def dit(out, rows, depth, **given):
    """The training step of a DiT."""
    show("dit", out, rows, depth, given)


def show(model, out, rows, depth, given):
    from numdiff.benchmark.profile import profile_step
    from numdiff.training.options import resolve

    from .bench import echo_model

    options = resolve({"model": model, **given})
    echo_model(options)
    found = profile_step(options)
    total = found.total_us
    click.echo(f"device       {found.device}")
    click.echo(f"step         {found.step_ms:.3f} ms" + (", captured as a graph" if found.captured else ""))
    kernels = "kernels" if found.launches[0].grid else "operations"
    click.echo(f"{kernels:12s} {len(found.launches):,}, together {total / 1e3:.3f} ms: each by itself"
               + (", so that their sum exceeds the captured step" if found.captured else ""))
    if found.roof.bandwidth:
        click.echo(f"memory       {found.roof.bandwidth / 1e9:,.0f} GB/s, measured by a copy")
    click.echo("\n".join(["", *table(found.by_kernel(), kernels[:-1], rows)]))
    layers = [(f"{layer} {direction}", *rest) for (layer, direction), *rest in found.by_layer(depth)]
    click.echo("\n".join(["", *table(layers, "layer", rows)]))
    if out:
        found.save(out)
        click.echo(f"\ntimeline     {out}")


def table(found, title, rows):
    """Lines of a table of `Profile.table`'s rows; what is not shown is summed up in the last."""
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
        yield (f"{more:{width}}  {sum(r[1] for r in rest):5d} {sum(r[2] for r in rest):9,.1f} "
               f"{100 * sum(r[3] for r in rest):4.1f} %")
