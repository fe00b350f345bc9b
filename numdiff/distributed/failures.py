"""Handling of an error in a job of several ranks: its message, and the exit code of each process.

An error on all ranks is an `AgreedError`: all end in order, and rank 0 reports it. Any other is one
rank's own, which reports it and ends the others. Errors of MPI and NCCL are known by their modules.
"""

import os

from ..errors import NumdiffError, why_no_process
from ..progress import progress


class LibraryFault(Exception):
    """An error of a library between the ranks in work that it had already accepted, in its own
    words. Attribute library: its name."""

    library = ""


class AgreedError(NumdiffError):
    """An error that every rank has, with the same message."""

    def __init__(self, message, exit_code):
        super().__init__(message)
        self.exit_code = exit_code


def raise_first(errors):
    """Raise the first of the errors (message, exit code), which all ranks know; None is no error."""
    for error in errors:
        if error:
            raise AgreedError(*error)


def is_clean(error):
    """Whether an exception is no failure: the process ends with exit code 0."""
    return getattr(error, "code" if isinstance(error, SystemExit) else "exit_code", 1) in (0, None)


def failed_library(error):
    """Which of the libraries between the ranks an error is from, and what it says: the network has
    failed, say; or None. Of MPICH's stack of calls the last line has the reason."""
    library = (
        error.library
        if isinstance(error, LibraryFault)
        else {"mpi4py": "MPI", "nccl": "NCCL"}.get(type(error).__module__.partition(".")[0])
    )
    first, _, rest = str(error).partition(", error stack:")
    reason = (
        f"{first}: {rest.strip().splitlines()[-1].rpartition('): ')[2]}" if rest.strip() else first
    )
    return library and f"{library} failed ({' '.join(reason.split())})"


def sentence(error):
    """An error in one line."""
    if library := failed_library(error):
        return f"{library}, {progress.ends(repeats=True)}"
    if hasattr(error, "exit_code"):  # numdiff's own, and those of the command line
        return " ".join(str(error).split())
    if why := why_no_process(error):
        return why
    if isinstance(error, OSError) and error.strerror:
        return f"{f'{error.filename}: ' if error.filename else ''}{os.strerror(error.errno)}."
    if isinstance(error, MemoryError):
        return f"this machine is out of memory ({error}); use a smaller --microbatch, --batch or model."
    if isinstance(error, KeyboardInterrupt):
        return "interrupted."
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def waited_for(message, rank, size):
    """The last message of a job in which a rank failed inside a collective on which the others
    block."""
    return (
        f"Error: rank {rank} of {size} failed while others wait for it: {message.removesuffix('.')}, "
        f"{progress.ends(repeats=True)}"
    )


def exit_code(error):
    """The exit code of a process that ends with this error; never 0."""
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
    return (
        130
        if isinstance(error, KeyboardInterrupt)
        else code
        if isinstance(code, int) and code
        else 1
    )
