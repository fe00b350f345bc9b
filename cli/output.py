"""The commands' output. Text that comes from files (names of classes, paths) is shown in visible
characters."""

import click


def echo(text="", err=False):
    """Print one line, in which control characters are escaped."""
    from numdiff.errors import printable

    click.echo(printable(text), err=err)


def command_line(context):
    """The words of the command that is running: its name, its arguments, then the options that were
    given."""
    words, options = ["numdiff", context.info_name], []
    for parameter in context.command.params:
        value = context.params.get(parameter.name)
        if (
            context.get_parameter_source(parameter.name)
            is not click.core.ParameterSource.COMMANDLINE
        ):
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif parameter.is_flag:
            options.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for each in value if parameter.multiple else [value]:
                text = ",".join(map(str, each)) or "none" if isinstance(each, tuple) else str(each)
                options += [parameter.opts[0], text]
    return [*words, *options]
