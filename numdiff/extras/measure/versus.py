"""`--versus torch`: its options, what of PyTorch is measured next to numdiff, and how a signal ends
that."""

import atexit
import contextlib
import os
import pathlib
import signal
import threading
import time

from numdiff_cli.settings import ListOf
from numdiff_cli.values import Choice

VERSUS = (
    (
        "--versus",
        {
            "type": Choice(["torch"]),
            "help": "Also measure PyTorch with the same model, alternating with numdiff.",
        },
    ),
    (
        "--modes",
        {
            "metavar": "MODE,…",
            "type": ListOf(str),
            "help": "PyTorch's modes: eager, compile, graphs (compiled, "
            "with CUDA graphs), or all. Compiling takes up to two minutes.  [default: eager,graphs; on the CPU "
            "eager,compile]",
        },
    ),
    (
        "--torch-precision",
        {
            "metavar": "NAME,…",
            "type": ListOf(str),
            "help": "PyTorch's arithmetic: fp32 (strict), "
            "tf32, bf16, fp16, or all.  [default: the counterpart of --precision; bf16 for fp16]",
        },
    ),
)


GRACE_S = 2  # from a signal to the end of the process, whatever PyTorch makes of the exception


@contextlib.contextmanager
def ended_promptly(versus=True):
    """Context of a measurement of PyTorch: Ctrl-C, SIGTERM and SIGHUP end the process within some
    `GRACE_S` seconds.

    PyTorch's compiler may swallow the exception or wait for its helper processes, and the teardown
    of its modules takes seconds. So a thread, which each signal wakes at once, waits that long,
    then ends the helpers and this process; and a process that gets to its end sooner leaves without
    the teardown. versus: whether PyTorch is measured at all
    """
    # or not in a process of the command's own
    if not versus or not callable(signal.getsignal(signal.SIGTERM)):
        yield
        return
    numbers = [
        int(getattr(signal, name))
        for name in ("SIGINT", "SIGTERM", "SIGHUP")
        if hasattr(signal, name)
    ]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    leaving, woken, came = threading.Event(), threading.Event(), []

    def end():
        if came:
            for child in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            if not leaving.is_set():  # the command has not said it
                os.write(2, f"\nError: ended by {signal.Signals(came[0]).name}.\n".encode())
            os._exit(128 + came[0])

    def watch():
        while byte := os.read(reader, 1):  # none: the measurement has ended
            if byte[0] in numbers:
                came.append(byte[0])
                woken.set()
                time.sleep(GRACE_S)
                end()
        os.close(reader)

    atexit.register(end)  # what is registered later runs before it
    threading.Thread(target=watch, name="end after a signal", daemon=True).start()
    try:
        yield
        atexit.unregister(end)
    except (KeyboardInterrupt, SystemExit):
        woken.wait(1)  # so that `end` knows of the signal
        raise
    finally:
        leaving.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def descendants(parent):
    """The processes that a process has started, and those that these have; empty where there is no
    /proc."""
    children = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is no process
            number = int(name)
            fields = (
                pathlib.Path("/proc", name, "stat")
                .read_text(errors="replace")
                .rpartition(")")[2]
                .split()
            )
            children.setdefault(int(fields[1]), []).append(number)
    found, left = [], [parent]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return found


def measured(result):
    return sum("ms" in row for row in result["versus"])


def torch_pairs(options, versus, modes, torch_precision):
    """The (mode, precision) pairs of PyTorch to measure; a `UsageError` for one that does not
    exist."""
    from numdiff.benchmark.step import BEST_MODES, COMPARED
    from numdiff.benchmark.torch_step import MODES, PRECISIONS, require_torch, require_twin
    from numdiff.errors import UsageError

    if not versus:
        if modes or torch_precision:
            raise UsageError(
                f"{'--modes' if modes else '--torch-precision'} needs --versus torch; add it, or leave it "
                "out."
            )
        return []
    if options.optimizer != "adamw":
        raise UsageError(
            f"--optimizer {options.optimizer} has no counterpart in --versus torch, whose step is "
            "AdamW's: leave one of them out."
        )
    for option, names, known in (
        ("--modes", modes, MODES),
        ("--torch-precision", torch_precision, PRECISIONS),
    ):
        for name in names or ():
            if name not in known and names != ("all",):
                raise UsageError(
                    f"{option} {name} does not exist; use some of {', '.join(known)}, or all."
                )
    require_twin(options)
    require_torch()
    device = "cuda" if options.device == "cuda" else "cpu"
    if modes == ("all",):
        modes = [mode for mode in MODES if device == "cuda" or mode != "graphs"]
    if torch_precision == ("all",):
        torch_precision = PRECISIONS
    modes = modes or BEST_MODES[device]
    precisions = torch_precision or (COMPARED[options.precision] if device == "cuda" else ("fp32",))
    return [(mode, precision) for precision in precisions for mode in modes]
