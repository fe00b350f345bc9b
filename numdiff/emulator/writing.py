"""How the emulator writes pictures and traces. A program with rules of its own for files replaces
`WRITERS`."""

import pathlib


def write_text(path, text, what):
    """what: what it is, in words, for messages"""
    pathlib.Path(path).write_text(text, encoding="utf-8")


def open_binary(path, what):
    """A context that gives a file to write bytes into."""
    return open(path, "wb")


WRITERS = {"text": write_text, "binary": open_binary}
