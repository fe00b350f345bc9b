"""The options of an emulated GPU as texts: of `python -m numdiff.emulator`, of pytest's command
line, and of its mark.

This file imports nothing of the emulator: pytest reads it in projects without kernels too.
"""

import argparse
from typing import Any, NamedTuple

NAMES = (
    "bounds",
    "negative",
    "uninitialised",
    "race",
    "unchanged",
    "divergence",
    "float64",
    "asynchronous",
)
EQUAL = "equal"  # as launch.STRICT
THREAD_ORDERS = ("forward", "reversed", "shuffled")  # as launch.ORDERS


def capability(given):
    """8.0, "8.0", "9.0a" or (8, 0) as (8, 0)."""
    if (
        isinstance(given, (tuple, list))
        and len(given) == 2
        and all(isinstance(n, int) for n in given)
    ):
        return tuple(given)
    major, dot, minor = str(given).rstrip("af").partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise argparse.ArgumentTypeError(
            f"{given!r} is no compute capability: write 8.0, for example."
        )
    return int(major), int(minor)


def order_count(given):
    """How many thread orders: 1, 2 or 3."""
    if str(given) not in ("1", "2", "3"):
        raise argparse.ArgumentTypeError(
            f"{given!r} orders: there are 1 (forward), 2 (and reversed) or 3 (and shuffled)."
        )
    return int(given)


def check_names(given):
    """Names of checks, as "race,negative" or a sequence."""
    names = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
    unknown = [str(name) for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no check {', '.join(unknown)}: use some of {', '.join(NAMES)}."
        )
    return names


def whole(given):
    try:
        return int(given)
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{given!r} is no whole number.") from None


def seconds(given):
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = 0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{given!r} must be seconds, above 0.")
    return number


def order(given):
    if given not in THREAD_ORDERS:
        raise argparse.ArgumentTypeError(
            f"there is no order {given!r}: use {', '.join(THREAD_ORDERS)}."
        )
    return given


def yes(given):
    if not isinstance(given, bool):
        raise argparse.ArgumentTypeError(f"{given!r} must be True or False.")
    return given


class Option(NamedTuple):
    """An option. of: reads what is given, or raises `argparse.ArgumentTypeError`; metavar: None of
    a flag."""

    of: Any
    default: Any
    metavar: str | None
    help: str


OPTIONS = {
    "cc": Option(capability, (9, 0), "X.Y", "compute capability of the emulated GPU (9.0)"),
    "orders": Option(
        order_count,
        1,
        "N",
        "run in 1, 2 or 3 orders of the threads: forward, reversed, shuffled (1)",
    ),
    "order": Option(
        order, "forward", "ORDER", "the order if it is one: forward, reversed or shuffled (forward)"
    ),
    "seed": Option(whole, 0, "N", "of the order shuffled (0)"),
    "without": Option(
        check_names, (), "CHECKS", f"leave out checks, separated by commas: {', '.join(NAMES)}"
    ),
    "strict": Option(
        yes,
        False,
        None,
        "equal values that two threads write on a line are a fault, and so is float64",
    ),
    "float64": Option(yes, False, None, "float64 arithmetic is meant: no advice about it"),
    "patience": Option(
        seconds, 5.0, "S", "seconds without progress after which a waiting loop is endless (5)"
    ),
    "counts": Option(
        yes, False, None, "advise on bank conflicts and on accesses that are not coalesced"
    ),
}


def add_options(add, prefix="--"):
    """Declare all options by `add(name, **keywords)`, such as `ArgumentParser.add_argument`."""
    for name, option in OPTIONS.items():
        how = (
            {"action": "store_true"}
            if option.metavar is None
            else {"type": option.of, "metavar": option.metavar}
        )
        add(prefix + name, default=None, help=option.help, **how)


def read(given):
    """{name: value} of what is given; a `ValueError` names what is wrong."""
    read = {}
    for name, value in given.items():
        if name not in OPTIONS:
            raise ValueError(f"there is no option {name!r}: use some of {', '.join(OPTIONS)}.")
        try:
            read[name] = OPTIONS[name].of(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: {error}") from None
    return read


def orders_of(given):
    """The thread orders in which to run: one, or the first of THREAD_ORDERS."""
    count = given.get("orders", 1)
    return THREAD_ORDERS[:count] if count > 1 else (given.get("order", "forward"),)


def as_arguments(given, order):
    """The arguments of `emulator.device` for options and one thread order; a recorder is made by
    the caller."""
    checks = [name for name in NAMES if name not in given.get("without", ())]
    strict = given.get("strict", False)
    return {
        "cc": given.get("cc", (9, 0)),
        "checks": [*checks, EQUAL] if strict and "race" in checks else checks,
        "order": order,
        "seed": given.get("seed", 0),
        "patience": given.get("patience", 5.0),
        "float64": True if given.get("float64") else False if strict else None,
    }
