"""Whether all ranks run the same numdiff: two hosts may have the same version with other sources,
and would train two models without a word.

What is compared is a hash of each file of the package, a fiftieth of a second. It says nothing of
what has changed in memory since, nor of NumPy and Numba.
"""

import functools
import hashlib
import pathlib
import socket

from ..errors import UsageError
from ..settings import counted
from .failures import AgreedError

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ".py", ".json"  # endings of the files that determine what is computed


@functools.cache
def digests():
    """{path within the package: hash} of the sources that this process runs."""
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in SOURCES)
    return {
        path.relative_to(PACKAGE).as_posix(): hashlib.blake2b(
            path.read_bytes(), digest_size=8
        ).hexdigest()
        for path in files
    }


def check_code(communicator, found=digests):
    """Raise an `AgreedError` where ranks run other sources of numdiff than rank 0. Collective."""
    own = found()
    rows = communicator.gather((hashlib.blake2b(repr(own).encode()).digest(), socket.gethostname()))
    others = [rank for rank, (digest, _) in enumerate(rows) if digest != rows[0][0]]
    if not others:
        return
    files = communicator.gather(own)
    hosts = ", ".join(dict.fromkeys(rows[rank][1] for rank in others))
    names = sorted(
        name
        for name in files[0].keys() | files[others[0]].keys()
        if files[0].get(name) != files[others[0]].get(name)
    )
    more = f" and {counted(len(names) - 1, 'other file')}" if len(names) > 1 else ""
    who = (
        f"rank {others[0]} on {hosts} runs"
        if len(others) == 1
        else (f"ranks {', '.join(map(str, others))} on {hosts} run")
    )
    raise AgreedError(
        f"{who} another numdiff than rank 0 on {rows[0][1]}, in numdiff/{names[0]}{more}: install the "
        "same on all hosts.",
        UsageError.exit_code,
    )
