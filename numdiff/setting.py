"""One line of a table of settings: `Setting`, and how values are written in messages. The table is
settings.py."""

import numbers
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import printable
from .sizes import Sides, as_size

LIMIT_DIGITS = 12  # characters of a limit that is shown in full
SAME = object()  # as the argument: of the setting's own name and default


class Argument(NamedTuple):
    """How a reader takes a setting. default: SAME or another; name: None or another; of: from the
    setting's value."""

    default: Any = SAME
    name: str | None = None
    of: Callable | None = None


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    kind: the type of a value, bool, int, float or str; many: it is a tuple of such; open: None
    goes, too
    sides: (height, width) goes, too, for the side of a square
    repeated: its option may be given several times, which joins the values
    switch: {True, False, "yes": a value}: it was yes or no before there were choices, which keep
        their meaning; so do its option without a value, and with no- before it
    low, high: the smallest and largest value; above, below: limits that the value itself must not
    touch
    resume: a run that continues may change it and still be the same run
    readers: {reader: Argument} of "trainer", "adamw", "muon", "model", "diffusion"
    needs: (another setting, the value that it must have; None: any) where this one alone means
    nothing
    missing: why the extension that has it cannot be used
    """

    name: str
    kind: type
    many: bool
    open: bool
    default: Any
    group: str
    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple = ()
    sides: bool = False
    repeated: bool = False
    switch: dict = field(default_factory=dict)
    resume: bool = False
    readers: dict = field(default_factory=dict)
    needs: tuple = ()
    missing: str = ""

    def argument(self, reader):
        """(name, default, of) as this reader takes it."""
        default, name, of = self.readers[reader]
        return name or self.name, self.default if default is SAME else default, of

    def meant(self, value):
        """The value that this one stands for; a tuple for a list."""
        if isinstance(value, list | tuple):
            return as_size(value) if self.sides else tuple(value)
        return self.switch.get(value, value) if isinstance(value, bool | str) else value

    @property
    def range(self):
        """Its range in words; empty if any value goes."""
        limits = (
            ("at least", self.low),
            ("above", self.above),
            ("at most", self.high),
            ("below", self.below),
        )
        return " and ".join(
            f"{word} {say_limit(limit)}" for word, limit in limits if limit is not None
        )


def setting(
    default: Any,
    help: str,
    *,
    trainer=None,
    adamw=None,
    muon=None,
    model=None,
    diffusion=None,
    **more,
) -> Any:
    """One line of a table: see `Setting` and the head of settings.py; None: this reader does not
    read it."""
    readers = {"trainer": trainer, "adamw": adamw, "muon": muon}
    readers |= {"model": model, "diffusion": diffusion}
    readers = {
        name: how if isinstance(how, Argument) else Argument(how)
        for name, how in readers.items()
        if how is not None
    }
    return {"default": default, "help": help, "readers": readers, **more}


def settings_in(table):
    """{name: Setting} of a class whose lines are `name: type = setting(…)`, in their order.

    Their heading in help is the class's `heading`, else its name without "Settings".
    """
    found, group = {}, getattr(table, "heading", table.__name__.removesuffix("Settings"))
    for name, hint in typing.get_type_hints(table).items():
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        open_ = types.NoneType in typing.get_args(hint)
        (kind,) = parts if open_ else (hint,)
        many = typing.get_origin(kind) is tuple
        found[name] = Setting(
            name,
            typing.get_args(kind)[0] if many else kind,
            many,
            open_,
            group=group,
            **vars(table)[name],
        )
    return found


def flag(name):
    """The command line's name of a setting."""
    return "--model" if name == "architecture" else "--" + name.replace("_", "-")


def say(value):
    """A value as one writes it on the command line: 1, and not 1.0."""
    if isinstance(value, tuple) and not isinstance(value, Sides):
        return printable(",".join(map(say, value)) or "none", 200)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return str(value).removesuffix(".0")
    return printable(value, 200)


def say_limit(value):
    """A limit in short, to six digits where it has many: 64, 0.001, 1000000, 5.96046e-08, 1e+30."""
    text = say(value)
    return text if len(text) <= LIMIT_DIGITS else f"{value:g}"
