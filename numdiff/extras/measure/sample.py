"""`numdiff bench sample`: how fast images are made."""

import click

from numdiff.option_names import as_options
from numdiff.settings import SAMPLERS
from numdiff_cli.settings import KindGroup, kind_command
from numdiff_cli.values import Choice

from .shared import echo_model, measured_by
from .versus import VERSUS, ended_promptly, measured, torch_pairs

SAMPLED = ("preset", "device", "precision", "eager", "image_size", "channels")
SAMPLE = measured_by(
    (
        "--sampler",
        {
            "type": Choice(SAMPLERS),
            "metavar": "NAME",
            "default": "ddim",
            "show_default": True,
            "help": f"How samples are made: {', '.join(SAMPLERS)}.",
        },
    ),
    (
        "--sample-steps",
        {
            "metavar": "STEPS",
            "type": click.IntRange(1),
            "default": 50,
            "show_default": True,
            "help": "Steps of the sampler; each evaluates the model once (heun: twice).",
        },
    ),
    (
        "--batch",
        {
            "metavar": "IMAGES",
            "type": click.IntRange(1),
            "default": 32,
            "show_default": True,
            "help": "Images at a time.",
        },
    ),
    (
        "--cfg-scale",
        {
            "metavar": "SCALE",
            "type": float,
            "help": "Classifier-free guidance; each evaluation then takes "
            "both halves in one batch of twice the images.  [default: none]",
        },
    ),
    (
        "--batches",
        {
            "metavar": "N",
            "type": click.IntRange(1),
            "default": 5,
            "show_default": True,
            "help": "Batches to measure; their median is reported.",
        },
    ),
    (
        "--warmup",
        {
            "metavar": "N",
            "type": click.IntRange(0),
            "default": 1,
            "show_default": True,
            "help": "Batches to run before, in addition to the first two; not measured.",
        },
    ),
    *VERSUS,
)


def sample_command(kind):
    return kind_command(
        kind, "bench sample", *SAMPLED, *kind.model_settings, options=SAMPLE, run=measure_samples
    )


@click.group(cls=KindGroup, make=sample_command)
def sample():
    """Measure sampling from a model: the evaluations of `numdiff sample`, with random weights."""


def measure_samples(
    model,
    sampler,
    sample_steps,
    cfg_scale,
    batches,
    warmup,
    versus,
    modes,
    torch_precision,
    **given,
):
    from numdiff.benchmark.sample import bench_sample
    from numdiff.training.options import resolve

    options = resolve({"model": model, "optimizer": "adamw", **given})  # no step is taken
    pairs = torch_pairs(options, versus, modes, torch_precision)
    echo_model(options)
    with as_options(), ended_promptly(pairs):
        result = bench_sample(
            options,
            batches,
            warmup,
            pairs,
            lambda what: click.echo(f"measuring    {what} …", err=True),
            sampler=sampler,
            steps=sample_steps,
            cfg_scale=cfg_scale,
        )
    guided = (
        f" of {result['images_asked']} images (guidance {cfg_scale:g})"
        if result["images_asked"] > options.batch
        else ""
    )
    click.echo(f"device       {result['device']}")
    click.echo(f"parameters   {result['parameters']:,}")
    click.echo(
        f"sampler      {sampler}, {sample_steps} steps: {result['evaluations']} evaluations{guided} a batch, "
        f"each {result['flops_per_evaluation'] / 1e12:.4g} TFLOP"
    )
    click.echo(
        f"first batch  {result['first_batch_s']:.1f} s, with building the model and loading or compiling the "
        f"kernels; the second {result['second_batch_s']:.2f} s"
    )
    click.echo(
        f"batch        {result['ms']:,.1f} ms, median of {batches * max(1, measured(result))} (from "
        f"{result['ms_fastest']:,.1f} to {result['ms_slowest']:,.1f})"
    )
    click.echo(f"evaluation   {result['ms_per_evaluation']:.3f} ms")
    share = "" if result["mfu"] is None else f", {100 * result['mfu']:.1f} % of the card's peak"
    click.echo(
        f"speed        {result['images_per_second']:,.4g} images/s, {result['tflops']:.3g} TFLOP/s{share}"
    )
    click.echo(f"peak memory  {result['peak_mib']:,.0f} MiB ({result['peak_of']})")
    if pairs:
        click.echo("\n".join(["", *sample_comparison(result, options.precision)]))


def sample_comparison(result, precision):
    """Lines of the table that compares the sampling of both programs."""
    yield f"{'':24s} images/s  ms a batch  ms an evaluation  first s  peak MiB  numdiff takes"
    for name, row in (
        ("numdiff " + precision, {**result, "first_s": result["first_batch_s"]}),
        *((f"PyTorch {r['mode']} {r['precision']}", r) for r in result["versus"]),
    ):
        if "fault" in row:
            yield f"{name:24s} failed: {row['fault']}"
            continue
        ratio = f"{1 / row['ratio']:.2f} of its time" if "ratio" in row else ""
        peak = f"{row['peak_mib']:9,.0f}" if row["peak_mib"] else f"{'–':>9}"
        yield (
            f"{name:24s} {row['images_per_second']:8,.1f} {row['ms']:11,.1f} {row['ms_per_evaluation']:17,.3f} "
            f"{row['first_s']:8.1f} {peak}  {ratio}"
        ).rstrip()
