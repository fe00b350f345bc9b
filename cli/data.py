"""`numdiff data`: import images, and describe what a dataset holds. The subcommands are extensions'."""

import click

from .suggest import ExtensibleGroup


@click.group(cls=ExtensibleGroup, place="data")
def data():
    """Import images, and describe datasets."""
