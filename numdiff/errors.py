"""Errors that a user can cause and fix. Their message is one sentence that names the fault and the
remedy.

The command line prints them without a traceback: `UsageError` ends with exit code 2, any other
`NumdiffError` with 1.

Messages quote names from files (of classes, members, settings), and such a name may contain
terminal control sequences. `printable` writes it in visible characters, in every message and in all
that commands print.
"""

import contextlib
import difflib
import unicodedata

# not visible themselves, but parts of emoji and of words in several scripts
JOINERS = "\u200c\u200d"
LISTED = 5  # names in a message


class NumdiffError(Exception):
    """Something went wrong that the user can fix; the message says how."""

    exit_code = 1  # of the command line

    def __init__(self, message=""):
        super().__init__(printable(" ".join(_written(message, str).split("\n"))))


class UsageError(NumdiffError):
    """An option or a setting is wrong."""

    exit_code = 2


class OutOfMemoryError(NumdiffError):
    """The device has no memory left for an array."""


class TooManyElementsError(NumdiffError, ValueError):
    """An array has more elements than a kernel's 32-bit indices can address, or a grid more blocks
    than allowed."""


def why_no_process(error):
    """The sentence for an error of the system that allows no further thread or process; None for
    any other."""
    if (
        isinstance(error, BlockingIOError)
        or isinstance(error, RuntimeError)
        and "start new thread" in str(error)
    ):
        return (
            "this system allows this user no further threads or processes: raise the limit (ulimit -u), or end "
            "other programs."
        )
    return None


@contextlib.contextmanager
def of_option(option):
    """Context, or decorator, in which a `NumdiffError` that does not name the option gets its name
    in front."""
    try:
        yield
    except NumdiffError as error:
        raise error if option in str(error) else type(error)(f"{option}: {error}") from None


def printable(text, length=None):
    """`text` with control, format and undecodable characters as Python escapes (\\x1b, \\n).

    length: truncated after this many characters, which `…` shows.
    """
    text = _written(text, str)
    if length is not None and len(text) > length:
        text = text[:length] + "…"
    if text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable() or c in JOINERS or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def near_miss(name, known):
    """ " (did you mean 'matmul'?)" for a name that is nearly one of those known, else ""."""
    near = difflib.get_close_matches(str(name)[:60], known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listed(word, names):
    """How many names there are, and the first five."""
    return (
        f"{word} {len(names):,} ({', '.join(names[:LISTED])}{', …' if len(names) > LISTED else ''})"
    )


def shown(value):
    """A value that is of the wrong kind, in a few words for a message: its type, and itself where
    that is short."""
    text, named = _on_one_line(value), type(value).__name__
    article = "an" if named[0] in "aeio" else "a"
    return (
        f"the {named} {text}"
        if len(text) <= 60 and "object at 0x" not in text
        else f"{article} {named}"
    )


def quoted(value):
    """A value as Python writes it, for a message: on one line, truncated where it is long."""
    return printable(_on_one_line(value), 60)


def _on_one_line(value):
    return printable(" ".join(_written(value, repr).split()))


def _written(value, how):
    """`how`(value): str or repr; Python writes no integer of more than 4,300 digits."""
    try:
        return how(value)
    except ValueError:
        return f"{type(value).__name__} of thousands of digits"


def visibly(echo):
    """`echo`, which prints a text, for texts that come from files: it gets them as `printable`
    writes them."""
    return lambda text="", **options: echo(printable(text), **options)
