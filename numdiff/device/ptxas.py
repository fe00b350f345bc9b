"""Where ptxas is, which assembles PTX and says how many registers a kernel takes.

SOURCE
    plain bookkeeping.
"""

import shutil
import sys
from pathlib import Path


def find_ptxas():
    """Path of ptxas: of the package nvidia-cuda-nvcc, whose version fits the compiler's, or on
    PATH; None: neither."""
    inside = [
        path
        for folder in filter(None, sys.path)
        for path in sorted(Path(folder).glob("nvidia/*/bin/ptxas"))
    ]
    return str(inside[0]) if inside else shutil.which("ptxas")
