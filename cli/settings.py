"""Command-line options from the table of settings (numdiff/settings.py), and commands from the
kinds of models."""

import re

import click

from numdiff.errors import UsageError
from numdiff.settings import flag, say
from numdiff.training import kinds
from numdiff.training.options import settings_of, table

from .suggest import SuggestingGroup
from .values import Choice, Number, Size

ALIASES = {"image_size": "--size", "learning_rate": "--lr"}
WIDEST = 30  # characters of the column of option names, so that the groups line up


class ListOf(click.ParamType):
    """Values separated by commas; "none" is the empty list."""

    name = "list"

    def __init__(self, kind):
        self.kind = kind

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        if value.strip().lower() in ("", "none"):
            return ()
        try:
            return tuple(self.kind(v.strip()) for v in value.split(","))
        except ValueError:
            what = "whole numbers" if self.kind is int else "numbers"
            self.fail(f"{value!r} is not a list of {what} separated by commas.", param, ctx)


class Switch(Choice):
    """The choices of what was yes or no before."""

    def __init__(self, line):
        super().__init__(line.choices)
        self.line = line

    def convert(self, value, param, ctx):
        return super().convert(
            self.line.meant(value.lower() if isinstance(value, str) else value), param, ctx
        )


class SettingOption(click.Option):
    """An option with the heading under which help shows it."""

    def __init__(self, *args, heading="Options", **kwargs):
        super().__init__(*args, **kwargs)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings."""

    def format_options(self, ctx, formatter):
        groups = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "heading", "Other"), []).append(record)
        widest = max(
            len(name) for rows in groups.values() for name, _ in rows if len(name) <= WIDEST
        )
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(widest), text) for name, text in rows], col_max=WIDEST
                )


class KindGroup(SuggestingGroup):
    """A group with a subcommand for each kind of model that there is, those that a program has
    registered among them.

    make(kind): the command of a `ModelKind`; names, where the kind's own name does not do, come
    from it
    every: whether there is one for autoencoders, too
    """

    def __init__(self, *args, make=None, every=False, **kwargs):
        super().__init__(*args, **kwargs)
        self._make, self._made, self._every = make, {}, every

    def list_commands(self, ctx):
        return sorted(kinds.every() if self._every else kinds.KINDS)

    def get_command(self, ctx, name):
        kind = (kinds.every() if self._every else kinds.KINDS).get(name)
        if kind is not None and self._made.get(name, (None,))[0] is not kind:
            self._made[name] = kind, self._make(kind)
        return self._made[name][1] if kind is not None else None


def either(yes, given, no, otherwise):
    """True where the flag `yes` was given, False where `no` was, None without both; they exclude
    each other."""
    if given and otherwise:
        raise UsageError(f"{yes} and {no} exclude each other: give one of them.")
    return True if given else False if otherwise else None


def kind_command(kind, command, *names, options=(), run):
    """A subcommand: the text of `command` from the record of the kind, the kind's settings as
    options, further ones.

    names: of the settings (default: all of the kind's); options: click's decorators; run(model,
    **given)
    """

    def callback(**given):
        run(kind.name, **given)

    for option in reversed(options):
        callback = option(callback)
    callback = settings(*names, model=kind.name, emoji=command == "train")(callback)
    return click.command(kind.name, cls=GroupedCommand, help=kind.say(command))(callback)


def classes_given(model, given):
    """`--classes all` is every class of the data, unless one is called so, also where a preset
    would choose a few; `--classes 1000` of a kind that may have any number of classes is their
    number; else they are names.

    A `UsageError` where a class of the data has that number for its name.
    """
    names = given.get("classes")
    if names and len(names) == 1 and names[0].lower() == "all":
        from numdiff.data.dataset import class_names

        found = class_names(given.get("data"))
        return (
            given
            if names[0] in found
            else {**given, "classes": tuple(found) if given.get("data") is None else None}
        )
    by_number = "num_classes" in kinds.get(model).table and given.get("num_classes") is None
    if not (
        by_number and names and len(names) == 1 and names[0].isdecimal() and len(names[0]) < 19
    ):
        return given
    from numdiff.data.dataset import class_names

    if names[0] in class_names(given.get("data")):
        raise UsageError(
            f"--classes {names[0]} may mean {int(names[0])} classes, or the one that is called "
            f"{names[0]}: give --num-classes {int(names[0])}, or --classes {names[0]},{names[0]} for "
            "that one."
        )
    return {**given, "classes": None, "num_classes": int(names[0])}


def settings(*names, model=None, emoji=False):
    """Decorator: an option for each of the named settings (default: all of the model's). An option
    that was not given is None. model: the kind whose defaults help shows; None: those that all
    kinds share; emoji: help also shows the values that presets have with the default dataset."""

    def decorate(command):
        for name in reversed(names or settings_of(model)):
            line = table(model)[name]
            if line.switch:
                command = click.option(
                    f"--no-{flag(name)[2:]}",
                    f"no_{name}",
                    is_flag=True,
                    is_eager=True,
                    hidden=True,
                    expose_value=False,
                    callback=_note,
                )(command)
            command = click.option(
                *_declaration(line), name, cls=SettingOption, **_attributes(line, model, emoji)
            )(command)
        return command

    return decorate


def _declaration(line):
    yes = flag(line.name)
    if line.name in ALIASES:
        return [ALIASES[line.name], yes]
    return [f"{yes}/--no-{yes[2:]}" if line.kind is bool else yes]


def _attributes(line, model, emoji=False):
    words = _help(line, model) + (_of_emoji(line, model) if emoji else "")
    common = {"heading": line.group, "default": None, "help": words}
    if line.name == "preset":
        return {**common, "type": Choice(tuple(kinds.get(model).presets))}
    if line.kind is bool:
        return common
    if line.switch:
        return {
            **common,
            "type": Switch(line),
            "is_flag": False,
            "flag_value": line.switch[True],
            "callback": lambda ctx, param, value: _switched(ctx, line, value),
        }
    if line.choices and not line.many:
        return {**common, "type": Choice(line.choices), "metavar": line.unit or None}
    if line.repeated:
        return {
            **common,
            "type": ListOf(line.kind),
            "metavar": line.unit,
            "multiple": True,
            "callback": _joined,
        }
    if line.many:
        return {**common, "type": ListOf(line.kind), "metavar": line.unit}
    if line.kind is str:
        return {**common, "type": str, "metavar": line.unit}
    if line.sides:
        return {**common, "type": Size(line.high), "metavar": line.unit}
    limits = {
        "min": line.low if line.above is None else line.above,
        "min_open": line.above is not None,
        "max": line.high if line.below is None else line.below,
        "max_open": line.below is not None,
    }
    return {
        **common,
        "type": (click.IntRange if line.kind is int else Number)(**limits),
        "metavar": line.unit,
    }


def _note(ctx, param, value):
    ctx.meta[param.name] = value


def _switched(ctx, line, value):
    """The value of an option that was a yes-or-no switch before: its value, else the meaning of
    --no-…."""
    return line.switch[False] if value is None and ctx.meta.get(f"no_{line.name}") else value


def _joined(ctx, param, values):
    """One tuple of the values of an option that was given several times; None if it was not given."""
    return tuple(value for part in values for value in part) if values else None


def _help(line, model):
    """The help text with the default, or with the values of the presets if they differ."""
    if line.name == "preset":
        default = kinds.get(model).default_preset
        return f"{line.help}  [default: {{cuda}} with a GPU, {{cpu}} without]".format(**default)
    shown = [kinds.get(model)] if model else kinds.KINDS.values()
    values = [
        (name, preset.get(line.name, line.default))
        for kind in shown
        for name, preset in kind.presets.items()
    ]
    if any(value != values[0][1] for _, value in values):
        if model is None:
            return f"{line.help}  [default: the preset's]"
        shown = "; ".join(
            f"{preset}: {text(value)}" for preset, value in values if value is not None
        )
        return f"{line.help}  [{shown}]"
    return line.help + ("" if values[0][1] is None else f"  [default: {text(values[0][1])}]")


def text_of_default(line):
    """The default of a setting that no preset fills, in the words of its help."""
    match = re.search(r"\[default: ([^]]*)\]$", line.help)
    return match[1] if match else "none"


def _of_emoji(line, model):
    """The help's note on presets that have another value with the default dataset."""
    values = [
        f"{preset}: {text(given[line.name])}"
        for preset, given in kinds.get(model).emoji.items()
        if line.name in given
    ]
    return f"  [on the emoji {'; '.join(values)}]" if values else ""


def text(value):
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return say(value)
