"""`numdiff bench ladder`: a training step with one technique more a row."""

import click

from numdiff.sizes import in_pixels
from numdiff_cli.output import echo
from numdiff_cli.settings import KindGroup, ListOf, kind_command
from numdiff_cli.values import Choice

from .shared import check_results, measured_by, model_name
from .versus import ended_promptly

LADDER_SETTINGS = ("preset", "device", "recompute", "batch", "image_size", "channels", "data")
LADDER = measured_by(
    (
        "--rows",
        {
            "metavar": "N,…",
            "type": ListOf(int),
            "help": "Only these rows of the ladder.  [default: all]",
        },
    ),
    (
        "--steps",
        {
            "metavar": "STEPS",
            "type": click.IntRange(1),
            "default": 20,
            "show_default": True,
            "help": "Steps to measure a row, fewer where they take more than a few seconds; their median is "
            "reported.",
        },
    ),
    (
        "--warmup",
        {
            "metavar": "STEPS",
            "type": click.IntRange(1),
            "default": 3,
            "show_default": True,
            "help": "Steps to run before, not measured.",
        },
    ),
    (
        "--csv",
        {
            "metavar": "FILE.csv",
            "type": click.Path(dir_okay=False),
            "help": "Write the rows, after each row.",
        },
    ),
    (
        "--png",
        {
            "metavar": "FILE.png",
            "type": click.Path(dir_okay=False),
            "help": "Draw images/s as bars, and a point a row under the roof of the card.",
        },
    ),
    (
        "--versus",
        {
            "type": Choice(["torch"]),
            "help": "Also climb PyTorch's ladder: eager, the largest batch, "
            "torch.compile, fused attention, autocast.",
        },
    ),
)


def ladder_command(kind):
    return kind_command(
        kind,
        "bench ladder",
        *LADDER_SETTINGS,
        *kind.model_settings,
        options=LADDER,
        run=measure_ladder,
    )


@click.group(cls=KindGroup, make=ladder_command)
def ladder():
    """Measure a training step with one technique more a row: from naive float32 kernels to float16
    in a graph."""


def measure_ladder(model, rows, steps, warmup, csv, png, versus, **given):
    from numdiff.benchmark import ladder as measuring
    from numdiff.files import write_text
    from numdiff.training.options import resolve

    # PyTorch's, whatever the preset has
    options = resolve({"model": model, "optimizer": "adamw", **given})
    measuring.check_rows(options, rows)
    check_results(png, ("--csv", "the rows", csv))
    if versus:
        from numdiff.benchmark.torch_step import require_torch, require_twin

        require_twin(options)
        require_torch()
    size = in_pixels(options.image_size)
    echo(f"model        {model_name(options)}, {size}, batch {options.batch}")
    click.echo(
        f"\n{'':35} {'batch':>6} {'ms':>9} {'images/s':>9} {'TFLOP/s':>8} {'speed-up':>9} {'MFU':>7} "
        f"{'peak MiB':>9} {'losses':>8}"
    )
    done = []
    for row in measuring.bench_ladder(
        options, rows, steps, warmup, lambda what: echo(f"measuring    {what} …", err=True)
    ):
        done.append(row)
        echo(ladder_line(row))
        if csv:
            write_text(csv, measuring.as_csv(done), "the rows")
    click.echo("\n".join(ladder_end(done, measuring)))
    if png:
        from numdiff.benchmark.rooflines import draw_ladder

        draw_ladder(png, done, f"A training step: {model_name(options)}, {size}")
        echo(f"picture      {png}")
    if csv:
        echo(f"rows         {csv}")
    if versus:
        from numdiff.benchmark.torch_ladder import bench_torch_ladder
        from numdiff.device import get_backend

        flops = next((row["flops"] / row["batch"] for row in done if "ms" in row), 0)
        click.echo(
            "\nPyTorch's step, without noise, clipping and the average of the weights; speed-up over its own "
            "first row"
        )
        with ended_promptly():
            for row in bench_torch_ladder(
                options,
                get_backend(options.device),
                flops,
                steps,
                warmup,
                lambda what: echo(f"measuring    {what} …", err=True),
            ):
                echo(ladder_line(row))


def ladder_line(row):
    """A row of the ladder in one line."""
    name = f"{row.get('number', ''):2}  {row['name']}"
    if "ms" not in row:
        return f"{name:35} " + (
            f"left out: {row['left_out']}" if row.get("left_out") else f"failed: {row['fault']}"
        )
    mfu = "–" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    peak = "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
    losses = "–" if row["deviation"] is None else f"{row['deviation']:.1e}"
    return (
        f"{name:35} {row['batch']:6,} {row['ms']:9,.2f} {row['images_per_second']:9,.1f} {row['tflops']:8.3g} "
        f"{row['speedup']:7.2f} × {mfu:>7} {peak:>9} {losses:>8}"
    )


def ladder_end(rows, measuring):
    """Lines below the ladder: times by component, and what the losses differ by."""
    timed = [row for row in rows if "ms" in row]
    if not timed:
        return
    yield "\nms of a step launched kernel by kernel; idle: what the step takes beyond its kernels"
    yield f"{'':35} " + " ".join(f"{part:>11}" for part in (*measuring.COMPONENTS, "idle"))
    for row in timed:
        parts = [*row["components"].values(), row["idle_ms"]]
        yield f"{row['number']:2}  {row['name']:31} " + " ".join(f"{ms:11,.3f}" for ms in parts)
    yield ""
    for precision, (most, least, longest, bar) in measuring.worst(timed).items():
        verdict = "as expected" if most <= bar else "MORE than expected"
        count = longest if least == longest else f"{least} to {longest}"
        yield (
            f"losses       {precision}: the first {count} differ from the first row's by at most {most:.1e} of "
            f"their value, {verdict} (up to {bar:g})"
        )
