"""`numdiff bench`: how fast this machine trains."""
import click

from .settings import GroupedCommand, Setting, settings

SHARED = ("preset", "device", "precision", "batch", "microbatch", "image_size")


@click.group()
def bench():
    """Measure how long a training step takes."""


@bench.group()
def step():
    """A whole training step of a model: noise, forward, backward, update."""


def step_command(model, *more):
    """Decorator: a subcommand of `bench step` with the settings that matter, those in `more` besides."""
    def decorate(function):
        function = click.option("--warmup", metavar="STEPS", type=click.IntRange(0), default=5, show_default=True,
                                cls=Setting, heading="Measurement", help="Steps before, which do not count.")(function)
        function = click.option("--steps", metavar="STEPS", type=click.IntRange(1), default=20, show_default=True,
                                cls=Setting, heading="Measurement",
                                help="Steps to measure; their median is reported.")(function)
        return step.command(cls=GroupedCommand)(settings(*SHARED, *more, model=model)(function))
    return decorate


@step_command("unet")
def unet(steps, warmup, **given):
    """The UNet of a preset, on random images."""
    measure("unet", steps, warmup, given)


@step_command("dit", "architecture", "channels")
def dit(steps, warmup, **given):
    """The DiT of a preset or of --model, on random images."""
    measure("dit", steps, warmup, given)


def measure(model, steps, warmup, given):
    from numdiff.training.benchmark import bench_step
    from numdiff.training.options import resolve

    options = resolve({"model": model, **given})
    what = f"unet, preset {options.preset}" if model == "unet" else options.architecture
    size = f"{options.image_size}×{options.image_size}"
    click.echo(f"model        {what}, {size}, batch {options.batch}, {options.precision}")
    result = bench_step(options, steps, warmup)
    click.echo(f"device       {result['device']}")
    click.echo(f"parameters   {result['parameters']:,}")
    click.echo(f"arithmetic   {result['flops_per_step'] / 1e12:.4g} TFLOP a step")
    click.echo(f"first step   {result['first_step_s']:.1f} s, with loading or compiling the kernels")
    click.echo(f"step         {result['ms']:.2f} ms, median of {steps} (from {result['ms_fastest']:.2f} to "
               f"{result['ms_slowest']:.2f})")
    click.echo(f"speed        {result['images_per_second']:,.1f} images/s, {result['tflops']:.3g} TFLOP/s")
    click.echo(f"peak memory  {result['peak_mib']:,.0f} MiB ({result['peak_of']})")
