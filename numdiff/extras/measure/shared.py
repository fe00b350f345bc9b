"""The common part of the commands of `numdiff bench` and `profile`: one heading, checks of outputs,
the line on the model."""

import click

from numdiff.sizes import in_pixels
from numdiff.training import kinds
from numdiff_cli.settings import SettingOption

KERNELS = ("device", "precision", "batch", "image_size", "channels")
# of what they write
ENDINGS = {"--json": ".json", "--out": ".json", "--csv": ".csv", "--grid": ".png"}
# of any kind
MODEL = tuple(dict.fromkeys(name for kind in kinds.KINDS.values() for name in kind.model_settings))


MOST = 100_000  # repetitions of a measurement


def measured_by(*options):
    """Options under the heading Measurement; each is (flag, attributes). Whole numbers without a
    limit get MOST."""
    for _, attributes in options:
        kind = attributes.get("type")
        if isinstance(kind, click.IntRange) and kind.max is None:
            attributes["type"] = click.IntRange(kind.min, MOST)
    return [
        click.option(name, cls=SettingOption, heading="Measurement", **attributes)
        for name, attributes in options
    ]


def measurement(*options):
    """Decorator: such options."""

    def decorate(function):
        for option in reversed(measured_by(*options)):
            function = option(function)
        return function

    return decorate


def model_name(options):
    return kinds.get(options.model).label(options)


def echo_model(options):
    what = model_name(options)
    size = in_pixels(options.image_size) + (f"×{options.channels}" if options.channels else "")
    click.echo(f"model        {what}, {size}, batch {options.batch}, {options.precision}")


def check_results(plot, *others):
    """Refuse results that could not be written, before the long work that gives them begins.

    plot: path of --png, or None; others: as `check_outputs` takes them
    """
    from numdiff import plots
    from numdiff.outputs import check_ending, check_outputs

    if plot:
        plots.check_ending(plot)
    check_outputs([("--png", "the picture", plot), *others])
    for option, _, path in others:
        check_ending(option, path, ENDINGS[option])
