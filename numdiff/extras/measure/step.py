"""`numdiff bench step`: how long a training step takes."""

import click

from numdiff_cli.settings import KindGroup, kind_command

from .shared import echo_model, measured_by
from .versus import VERSUS, ended_promptly, measured, torch_pairs

SHARED = (
    "preset",
    "device",
    "precision",
    "eager",
    "recompute",
    "batch",
    "microbatch",
    "optimizer",
    "image_size",
    "channels",
)
STEP = measured_by(
    (
        "--steps",
        {
            "metavar": "STEPS",
            "type": click.IntRange(1),
            "default": 20,
            "show_default": True,
            "help": "Steps to measure; their median is reported.",
        },
    ),
    (
        "--warmup",
        {
            "metavar": "STEPS",
            "type": click.IntRange(0),
            "default": 5,
            "show_default": True,
            "help": "Steps to run before, not measured.",
        },
    ),
    *VERSUS,
)


def step_command(kind):
    return kind_command(
        kind, "bench step", *SHARED, *kind.model_settings, options=STEP, run=measure
    )


@click.group(cls=KindGroup, make=step_command)
def step():
    """Measure a whole training step of a model: noise, forward, backward, update."""


def measure(model, steps, warmup, versus, modes, torch_precision, **given):
    from numdiff.benchmark.step import bench_step
    from numdiff.training.options import resolve

    if versus and given.get("optimizer") is None:
        given["optimizer"] = "adamw"  # PyTorch's, whatever the preset has
    options = resolve({"model": model, **given})
    pairs = torch_pairs(options, versus, modes, torch_precision)
    echo_model(options)
    with ended_promptly(pairs):
        result = bench_step(
            options,
            steps,
            warmup,
            pairs,
            lambda what: click.echo(f"measuring    {what} …", err=True),
        )
    click.echo(f"device       {result['device']}")
    click.echo(f"parameters   {result['parameters']:,}")
    click.echo(f"arithmetic   {result['flops_per_step'] / 1e12:.4g} TFLOP a step")
    click.echo(
        f"first step   {result['first_step_s']:.1f} s, with loading or compiling the kernels"
    )
    click.echo(
        f"step         {result['ms']:.2f} ms, median of {steps * max(1, measured(result))} (from "
        f"{result['ms_fastest']:.2f} to {result['ms_slowest']:.2f})"
    )
    share = "" if result["mfu"] is None else f", {100 * result['mfu']:.1f} % of the card's peak"
    click.echo(
        f"speed        {result['images_per_second']:,.1f} images/s, {result['tflops']:.3g} TFLOP/s{share}"
    )
    click.echo(f"peak memory  {result['peak_mib']:,.0f} MiB ({result['peak_of']})")
    if result["memory"]:
        from numdiff.benchmark.memory import in_short

        click.echo(f"held         {in_short(result['memory'])}")
    if result["recompute"]:
        click.echo("\n".join(f"recompute    {line}" for line in price(result, result["recompute"])))
    if pairs:
        click.echo("\n".join(["", *comparison(result, options.precision)]))


def price(result, found):
    """The lines on what `--recompute` costs and saves."""
    yield found["foreseen"]
    if "fault" in found:
        yield f"without it: {found['fault']}"
        return
    ms, mib = found["ms"], found["mib"]
    yield (
        f"without it {ms:.2f} ms{f', {mib:,.0f} MiB' if mib else ''}: it costs {result['ms'] - ms:.2f} ms, "
        f"{100 * (result['ms'] / ms - 1):.0f} %"
        + (f", and saves {mib - result['memory'][0] / 2**20:,.0f} MiB" if mib else "")
    )


def comparison(result, precision):
    """Lines of the table that compares the steps."""
    yield f"{'':24s}        ms  TFLOP/s    MFU  peak MiB  against numdiff"
    for name, row in (
        ("numdiff " + precision, result),
        *((f"PyTorch {r['mode']} {r['precision']}", r) for r in result["versus"]),
    ):
        if "fault" in row:
            yield f"{name:24s} failed: {row['fault']}"
            continue
        mfu = f"{100 * row['mfu']:5.1f} %" if row["mfu"] else f"{'–':>7}"
        ratio = f"{row['ratio']:.2f} times as long" if "ratio" in row else ""
        peak = f"{row['peak_mib']:9,.0f}" if row["peak_mib"] else f"{'–':>9}"
        yield f"{name:24s} {row['ms']:9.2f} {row['tflops']:8.3g} {mfu} {peak}  {ratio}"
    yield "PyTorch's step leaves out noise, clipping and the average of the weights, which numdiff's includes."
