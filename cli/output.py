"""The commands' output. Text that comes from files (names of classes, paths) is shown in visible characters."""
import click


def echo(text="", err=False):
    """Print one line, in which control characters are escaped."""
    from numdiff.errors import printable
    click.echo(printable(text), err=err)
