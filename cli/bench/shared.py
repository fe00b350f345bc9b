"""What the commands of `numdiff bench`, and `profile`, share: one heading, checks of outputs, the line on the model."""
import os

import click

from numdiff.training import kinds

from ..settings import Setting

KERNELS = ("device", "precision", "batch", "image_size", "channels")
MEASURED = tuple(name for kind in kinds.KINDS.values() for name in kind.measured)


def measured_by(*options):
    """Options under the heading Measurement; each is (flag, attributes)."""
    return [click.option(name, cls=Setting, heading="Measurement", **attributes) for name, attributes in options]


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
    size = f"{options.image_size}×{options.image_size}" + (f"×{options.channels}" if options.channels else "")
    click.echo(f"model        {what}, {size}, batch {options.batch}, {options.precision}")


def check_apart(*outputs):
    """Refuse two of the (option, path) that name one file."""
    from numdiff.errors import UsageError
    seen = {}
    for name, path in outputs:
        if path and seen.setdefault(os.path.realpath(path), name) != name:
            raise UsageError(f"{seen[os.path.realpath(path)]} and {name} name one file: give them different names.")


def check_picture(path):
    """Refuse a picture that could not be written before the long work that it shows begins."""
    if path:
        from numdiff.files import check_output
        from numdiff.plots import check_ending
        check_output("the picture", check_ending(path))
