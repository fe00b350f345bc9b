"""The command `numdiff`: finds its subcommands, and turns errors into one sentence and an exit
code.

Exit codes: 0 done · 1 an error, whose message says what to do · 2 wrong usage · 128 + n ended by
signal n (130: Ctrl-C)
"""

import contextlib
import errno
import importlib
import math
import os
import signal
import sys
import time

handler = signal.getsignal(signal.SIGINT)
with contextlib.suppress(ValueError):  # not in the main thread
    # a Ctrl-C during the imports ends the process without a traceback
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    import click

    from numdiff.distributed.launcher import launched
    from numdiff.extensions import entries, find

    from .suggest import SuggestingGroup
finally:
    if signal.getsignal(signal.SIGINT) != handler:
        signal.signal(signal.SIGINT, handler)

# name -> (module with a click command of that name, line for `numdiff --help`); extensions add more
COMMANDS = {
    "train": (".train", "Train a model on a dataset."),
    "sample": (".sample", "Make images with a trained model."),
    "data": (".data", "Import images, and describe datasets."),
    "info": (".info", "Show what this machine has, and what will run on it."),
    "compile": (".compile", "Compile the kernels of a run ahead of time, even without a GPU."),
}


@contextlib.contextmanager
def job():
    """`distributed.job()`, whose module is imported only if there are ranks."""
    started = launched()
    if started is None:
        yield
        return
    from numdiff.distributed.monitor import monitor

    if started[0] == 0:
        monitor.start(started[1])
    try:
        from numdiff.distributed.communicator import job

        with job():
            yield
    finally:
        monitor.stop()


class Terminated(SystemExit):
    """A signal asks this process to end: raised wherever it is, so that no temporary file stays
    behind."""

    def __init__(self, number):
        super().__init__(f"ended by {signal.Signals(number).name}.")
        self.code = 128 + number


def handle(handlers):
    """Set {signal: handler}, but where a signal is ignored, as `nohup` does."""
    with contextlib.suppress(ValueError):  # not in the main thread
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


@contextlib.contextmanager
def ended_in_order():
    """Context of a subcommand in a separate process: Ctrl-C, SIGTERM and SIGHUP raise
    `KeyboardInterrupt` and `Terminated`. One of the latter that arrives again at once, as of a
    closing terminal, does not. Outside of it all end the process at once, as Python would be
    interrupted at its own end, and say so in many lines.
    """
    last = -math.inf

    def end(number, frame):
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > 0.5:
            raise Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    default = dict.fromkeys([signal.SIGINT, *numbers], signal.SIG_DFL)
    handle({signal.SIGINT: signal.default_int_handler, **dict.fromkeys(numbers, end)})
    try:
        yield
    finally:
        try:
            handle(default)
        finally:
            handle(default)  # as one may come meanwhile


class Failure(click.ClickException):
    """One sentence on stderr and an exit code."""

    def __init__(self, message, exit_code=1):
        from numdiff.errors import printable

        super().__init__(printable(" ".join(str(message).split())))
        self.exit_code = exit_code


class Commands(SuggestingGroup):
    """The subcommands, each imported when it is called: `numdiff --help` loads neither NumPy nor
    Numba."""

    context = contextlib.nullcontext  # of a subcommand

    def __call__(self, *args, **kwargs):
        """Run as a separate process; `main` runs a command within one."""
        if launched() is None:  # ranks are left to their launcher
            handle({signal.SIGINT: signal.SIG_DFL})
            self.context = ended_in_order
        return super().__call__(*args, **kwargs)

    def main(self, *args, **kwargs):
        open_streams()
        if not kwargs.get("standalone_mode", True):
            return super().main(*args, **kwargs)
        code = 0
        try:
            try:
                super().main(*args, **kwargs)
            except SystemExit as end:
                code = end.code
            if not code:
                sys.stdout.flush()
        except BrokenPipeError:  # a reader such as `head` has gone
            code = 1
        except OSError as error:  # stdout cannot be written: help redirected to a full disk
            click.echo(f"Error: {error.strerror or error}.", err=True)
            code = 1
        leave(sys.stdout)
        sys.exit(code)

    def list_commands(self, ctx):
        return [*COMMANDS, *entries("command")]

    def get_command(self, ctx, name):
        if name in COMMANDS:
            return getattr(importlib.import_module(COMMANDS[name][0], __package__), name)
        return find("command", name, f"numdiff {name}") if name in entries("command") else None

    def format_commands(self, ctx, formatter):
        lines = [(name, line) for name, (_, line) in COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(
                [*lines, *((name, entry.text) for name, entry in entries("command").items())]
            )

    def invoke(self, ctx):
        """Run the subcommand; no error that a user can cause ends in a traceback. Of several ranks,
        one reports it."""
        try:
            with self.context():
                return self._invoke(ctx)
        except KeyboardInterrupt:  # just as the context ends: click would say "Aborted!"
            raise SystemExit(130) from None

    def _invoke(self, ctx):
        try:
            with job():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            # Ctrl-C interrupts all ranks, and the first one says so
            if (launched() or (0,))[0] > 0:
                raise SystemExit(130) from None
            raise Failure("interrupted.", 130) from None
        except Terminated as end:
            raise Failure(end.args[0], end.code) from None
        except MemoryError as error:
            reason = f" ({error})" if str(error) else ""
            raise Failure(
                f"this machine is out of memory{reason}; use a smaller --microbatch, --batch or "
                "model."
            ) from error
        except BrokenPipeError:
            raise  # click exits quietly when a reader such as `head` has gone
        except OSError as error:
            from numdiff.errors import why_no_process

            if why := why_no_process(error):
                raise Failure(why) from error
            if error.strerror is None:
                raise
            where = f"{error.filename}: " if error.filename else ""
            from numdiff.files import REASONS

            reason = f"{os.strerror(error.errno)}; check the path and its permissions"
            # not a matter of permissions
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
                reason = REASONS[error.errno]
            raise Failure(f"{where}{reason}.") from error
        except Exception as error:
            from numdiff.errors import NumdiffError, why_no_process

            if why := why_no_process(error):
                raise Failure(why) from error
            if not isinstance(error, NumdiffError):
                raise
            raise Failure(error, error.exit_code) from error


def open_streams():
    """Open the standard streams that the caller has closed (`2>&-`) as /dev/null: otherwise the
    next file opened takes the number of stderr, and receives what libraries print."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) != number:  # takes the lowest free one
                raise
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # so that names outside this encoding can be shown, too
            stream.reconfigure(errors="backslashreplace")


def leave(stream):
    """Let Python write what it holds back for a stream, or nowhere: or it would add lines of its
    own as it ends."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_version(ctx, _, wanted):
    if wanted:
        from numdiff import __version__

        click.echo(f"numdiff {__version__}")
        ctx.exit()


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Show the version and exit.",
)
def main():
    """Diffusion models, trained end to end by GPU kernels written in Python.

    \b
    numdiff train unet                   train on emoji, on a GPU if there is one
    numdiff sample runs/00000-unet-tiny  make images with the trained model
    """
