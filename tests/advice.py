"""What messages advise, held against the program: every command and option in them is parsed.

`listen` notes the text of every error of numdiff, and of every line that a command prints of what
comes from files, while tests run; conftest.py fails the test in which one advises a command, an
option or a value that does not exist. A message has a command in backticks, or at its end after
"with: "; words in capitals stand for what the user has. tests/test_advice.py runs commands as they
are advised.
"""

import contextlib
import functools
import re
import shlex

import click

from numdiff_cli.main import main

GET_COMMAND = type(main).get_command  # as it is before tests replace it
COMMAND = re.compile(r"`(numdiff [^`]+)`|with: (numdiff .+)$", re.MULTILINE)
OPTION = re.compile(r"(?<![\w/.-])(--[a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w/-])(?:[ =]([\w.+*'-]+))?")
OTHERS = {"--help", "--often", "--width"}  # click's, and of settings that tests make up
heard = []  # texts of which none has been checked yet
checked = set()


def listen(monkeypatch):
    """From now on note what is said."""
    from numdiff import errors

    original = errors.printable

    @functools.wraps(original)
    def noted(text, length=None):
        text = str(text)
        if ("--" in text or "numdiff " in text) and text not in checked:
            heard.append(text)
        return original(text, length)

    monkeypatch.setattr(errors, "printable", noted)


def faults_heard():
    """[what is wrong with what was said since the last call]."""
    found = []
    while heard:
        text = heard.pop()
        if text not in checked:
            checked.add(text)
            found += [f"{fault}, in: {text}" for fault in faults(text)]
    return found


def faults(text):
    """What is wrong with the commands and options of a message."""
    found = []
    for quoted, last in COMMAND.findall(text):
        command = quoted or last
        try:
            parse(command)
        except click.MissingParameter as error:
            found += [f"{command}: {error.format_message()}"] if last else []
        except click.ClickException as error:
            found.append(f"{command}: {error.format_message()}")
    known = options()
    for name, _ in OPTION.findall(text):
        if name not in known and name not in OTHERS:
            found.append(f"there is no option {name}")
    remedy = re.split(r"[:;] ", COMMAND.sub("", text))[1:]
    for name, value in OPTION.findall(" ".join(remedy)):
        if (
            value
            and name in known
            and not any(takes(parameter, value.rstrip(".'")) for parameter in known[name])
        ):
            found.append(f"{name} does not take {value}")
    return found


def parse(command):
    """Parse a `numdiff …`; a click.UsageError for a command, an option or a value that there is
    not."""
    words, found = shlex.split(command)[1:], main
    context = click.Context(main)
    while isinstance(found, click.Group) and words:
        _, found, words = found.resolve_command(context, words)
    if words and not isinstance(found, click.Group) and "--help" not in words:
        found.make_context(command, words)


@functools.cache
def options():
    """{name: [click's parameters of this name]} of all commands."""
    found = {}

    def look(command):
        for parameter in command.params:
            for name in (*parameter.opts, *parameter.secondary_opts):
                found.setdefault(name, []).append(parameter)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                look(
                    GET_COMMAND(command, context, name)
                    if isinstance(command, type(main))
                    else command.get_command(context, name)
                )

    look(main)
    return found


def takes(parameter, word):
    """Whether what follows an option in a message is a value of it, or another word of the
    sentence."""
    if (
        getattr(parameter, "is_flag", False)
        or not re.fullmatch(r"-?[0-9][\w.+-]*", word)
        and not isinstance(parameter.type, click.Choice)
    ):
        return True
    with contextlib.suppress(click.BadParameter):
        parameter.type.convert(word, parameter, None)
        return True
    return isinstance(parameter.type, click.Choice) and word in WORDS


WORDS = set(
    """
    alone and as at below belongs by does exclude for has if in instead is keeps leave
    measured names needs of on or other out say such that to too where which with without
    """.split()
)
