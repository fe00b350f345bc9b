"""The launcher of this process: `mpiexec`, `mpirun` or `srun` as one rank of several, or none of
them.

Only the environment is inspected, so that a run of one process neither imports mpi4py nor needs it.
"""

import os
import shutil
import sys

from ..errors import UsageError

VARIABLES = (  # (rank, number of ranks), as launchers name them
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI's mpirun
    ("PMI_RANK", "PMI_SIZE"),  # MPICH's and Intel MPI's mpiexec, srun --mpi=pmi2
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    # srun; a batch script has the first but not the second, or a second of 1
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def launched():
    """(rank, ranks) where a launcher started several processes, else None."""
    for rank, ranks in VARIABLES:
        values = os.environ.get(rank, ""), os.environ.get(ranks, "")
        if all(v.isdigit() for v in values) and int(values[1]) > 1:
            return int(values[0]), int(values[1])
    return None


def import_mpi():
    """mpi4py's MPI, initialised; a `UsageError` says what to install where it is missing."""
    started = launched()
    why = (
        f"this process was started as one of {started[1]}"
        if started
        else "a transport between ranks was requested"
    )
    try:
        import mpi4py
    except ImportError:
        raise UsageError(
            f"{why}, and mpi4py is not installed: pip install 'numdiff-diffusion[mpi]', or start one "
            "process, without mpiexec."
        ) from None
    # numdiff calls MPI from one thread: no lock for every call
    mpi4py.rc.thread_level = "serialized"
    choose_library()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no library that it can load
        raise UsageError(
            f"{why}, and mpi4py finds no MPI library ({' '.join(str(error).split())}): pip install mpich, "
            "or install Open MPI."
        ) from error
    if started and MPI.COMM_WORLD.size != started[1]:
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise UsageError(
            f"the launcher started {started[1]} processes and mpi4py's library ({library}) knows of "
            f"{MPI.COMM_WORLD.size}: they belong to different MPIs; use the mpiexec of that library."
        )
    return MPI


def choose_library():
    """Let mpi4py load the library of Open MPI in a process that Open MPI has started.

    It would take the first that it finds, which is MPICH where the `mpi` extra is installed, and
    MPICH cannot join such a job. The mpi4py of the package index reads this variable; one built on
    this machine is tied to its library.
    """
    if (
        "OMPI_COMM_WORLD_SIZE" not in os.environ
        or {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & os.environ.keys()
    ):
        return
    name = "libmpi.40.dylib" if sys.platform == "darwin" else "libmpi.so.40"  # 40: Open MPI 2 to 5
    program = shutil.which("mpiexec") or ""
    installed = os.path.join(
        os.path.dirname(os.path.dirname(os.path.realpath(program))), "lib", name
    )
    os.environ["MPI4PY_LIBMPI"] = os.pathsep.join([name, installed])
