"""The memory that MPICH's ranks on a host share, as files: those of killed jobs are removed when
the next job starts.

A rank that is killed cannot remove them, and each takes megabytes of memory until the machine
restarts. A file is removed if it has MPICH's name, belongs to this user, is a minute old, and is
open in no process of this user that /proc shows. (If it is open elsewhere, as in another container,
removing its name takes nothing from the process that has opened it.)
"""

import contextlib
import os
import pathlib
import re
import stat
import time

FOLDERS = ("/dev/shm", "/tmp")
NAME = re.compile(r"^mpich_shm_[0-9a-zA-Z_]+$")
AGE = 60.0  # seconds: a process that is starting may not have opened its own yet


def remove_stray_memory(folders=FOLDERS, age=AGE):
    """Remove what killed jobs of this user have left; returns the paths."""
    strays = []
    for folder in folders:
        with contextlib.suppress(OSError):
            strays += [
                path
                for path in pathlib.Path(folder).iterdir()
                if NAME.match(path.name) and is_ours(path, age)
            ]
    if strays:
        used = files_in_use()
        strays = [path for path in strays if used is not None and identity(path) not in used]
    removed = []
    for path in strays:
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def is_ours(path, age):
    found = path.lstat()
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.getuid()
        and time.time() - found.st_mtime > age
    )


def identity(path):
    """(device, inode) of a file; None if it has gone."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return os.major(found.st_dev), os.minor(found.st_dev), found.st_ino


def files_in_use():
    """Identities of all files that this user's processes have mapped; None if the system does not
    say."""
    used = None
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # another user's, or it has ended
            with open(process / "maps", "rb") as file:
                # address, rights, offset, device as hexadecimal major:minor, inode, path
                for line in file:
                    _, _, _, device, inode, *_ = line.split(None, 5)
                    used = used or set()
                    if inode != b"0":
                        major, minor = device.split(b":")
                        used.add((int(major, 16), int(minor, 16), int(inode)))
    return used
