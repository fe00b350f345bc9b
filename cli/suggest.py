"""A group of commands that suggests `train` for `numdiff trian`."""

import difflib

import click

from numdiff.extensions import entries, find

# in a message; click says "integer range"
NUMBERS = {click.IntRange: "whole number", click.FloatRange: "number"}


class SuggestingGroup(click.Group):
    """Suggests similar subcommands for one that does not exist, in the words that click uses for
    options."""

    group_class = type  # of its sub-groups

    def format_commands(self, ctx, formatter):
        """Each subcommand with its first sentence, which click would cut off at the end of a line."""
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(1000)) for name, command in named]
            )

    def resolve_command(self, ctx, args):
        name = str(args[0])
        if (
            self.get_command(ctx, name) is None
            and not ctx.resilient_parsing
            and not name.startswith("-")
        ):
            near = difflib.get_close_matches(name.lower(), self.list_commands(ctx))
            options = ", ".join(map(repr, sorted(near)))
            hint = (
                f" (Possible commands: {options})"
                if len(near) > 1
                else f" Did you mean {options}?"
                if near
                else ""
            )
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        for parameter in command.params:
            if (
                isinstance(parameter.type, (click.types.StringParamType, click.Path))
                and parameter.callback is None
            ):
                parameter.callback = refuse_empty
            for kind, words in NUMBERS.items():
                if isinstance(parameter.type, kind):
                    parameter.type.name = words
        return name, command, rest


class ExtensibleGroup(SuggestingGroup):
    """A group with the subcommands of extensions at `place`, which are imported when they are called
    or described."""

    def __init__(self, *args, place, **kwargs):
        super().__init__(*args, **kwargs)
        self.place = place

    def list_commands(self, ctx):
        return sorted([*super().list_commands(ctx), *entries(self.place)])

    def get_command(self, ctx, name):
        if name in entries(self.place):
            return find(self.place, name, f"numdiff {self.name} {name}")
        return super().get_command(ctx, name)


def refuse_empty(ctx, parameter, value):
    """Refuse an empty name or path, as a variable of the shell that is not set gives it: it would
    count as none, or as the folder that one is in."""
    if "" in (value if isinstance(value, tuple) else (value,)):
        raise click.BadParameter("it is empty: give a value, or leave it out.", ctx, parameter)
    return value
