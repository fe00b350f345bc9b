"""numdiff's command line, within a test's process."""

import shlex

from click.testing import CliRunner

from numdiff_cli.main import main


def run(*words):
    """The result of a command: run("sample", path, "--steps 2 --class 'a cat'", "--seed", seed).

    Text is split as a shell does it; what is no text, such as a path or a number, is one word.
    """
    line = []
    for word in words:
        line += shlex.split(word) if isinstance(word, str) else [str(word)]
    return CliRunner().invoke(main, line, catch_exceptions=False)


def output_of(*words):
    """What a command prints that must succeed."""
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.output


def last_line(result):
    return result.output.splitlines()[-1]


def refusal_of(*words):
    """The last line of a command that must end with an error: a sentence, and no traceback."""
    result = run(*words)
    assert result.exit_code in (1, 2) and "Traceback" not in result.output, result.output
    line = last_line(result)
    assert line.startswith("Error: "), result.output
    return line
