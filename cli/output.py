"""What the commands print: texts that come from files (names of classes, paths) in visible characters."""
import click


def echo(text="", err=False):
    """Print one line; nothing in it tells the terminal anything."""
    from numdiff.errors import printable
    click.echo(printable(text), err=err)
