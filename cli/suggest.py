"""A group of commands that suggests `train` for `numdiff trian`."""
import difflib

import click


class Group(click.Group):
    """Suggests similar subcommands for one that does not exist, in the words that click uses for options."""

    group_class = type  # of its sub-groups

    def resolve_command(self, ctx, args):
        name = str(args[0])
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing and not name.startswith("-"):
            near = difflib.get_close_matches(name.lower(), self.list_commands(ctx))
            options = ", ".join(map(repr, sorted(near)))
            hint = f" (Possible commands: {options})" if len(near) > 1 else f" Did you mean {options}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)
