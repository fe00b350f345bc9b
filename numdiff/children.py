"""How this project starts other Python processes: in one place, so that none imports from the
current folder.

`python -c …` puts the current folder first on the module path, and a file `json.py` in it would run
instead of the standard library's. So every process starts isolated (`python -I`: neither the
current folder nor the environment variables of Python count) and receives this process's module
path without the current folder. What is installed for this process, in a virtual environment, for
the user or in a folder of PYTHONPATH, is found there, too. `numdiff` is the one of this process,
wherever it is.

`map_in_processes` computes in worker processes: forks, which import nothing again, or new ones.
"""

import contextlib
import json
import os
import pathlib
import signal
import site
import sys
import threading
import warnings

PACKAGE = pathlib.Path(__file__).resolve().parent
# The process's own module path is searched last: the standard library, where this process has an
# unusual path
START = """import importlib.util, json, site, sys
path, site.ENABLE_USER_SITE, package = json.loads(sys.argv.pop(1))  # NVIDIA's libraries are looked for there, too
sys.path[:] = path + [folder for folder in sys.path if folder not in path]
spec = importlib.util.spec_from_file_location("numdiff", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["numdiff"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["numdiff"])
"""


def module_path():
    """This process's module path without the current folder, unless PYTHONPATH names that in full."""
    named = {
        os.path.realpath(folder)
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if os.path.isabs(folder)
    }
    current = None
    with contextlib.suppress(OSError):  # the folder has been removed
        current = os.path.realpath(os.getcwd())
    return [
        folder
        for folder in sys.path
        if isinstance(folder, str)
        and os.path.isabs(folder)
        and (os.path.realpath(folder) != current or current in named)
    ]


def python_command(code, *arguments):
    """The command of a process that runs Python code, `numdiff` imported, with these arguments in
    `sys.argv[1:]`."""
    found = json.dumps([module_path(), site.ENABLE_USER_SITE, str(PACKAGE)])
    return [sys.executable or "", "-I", "-c", START + code, found, *map(str, arguments)]


def script_command(path, *arguments):
    """The command of a process that runs a file, which imports the standard library alone; it
    starts faster."""
    return [sys.executable or "", "-I", "-S", str(path), *map(str, arguments)]


# Worker processes ---------------------------------------------------------------------------------

# of a terminal or a job scheduler, which may send them to all processes: the first one decides
SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGHUP", "SIGTERM") if hasattr(signal, n)]


class WorkerLost(Exception):
    """A worker process was killed, or ended by itself."""


def map_in_processes(function, arguments, count, method):
    """Yield function(*each) for each tuple in `arguments`, in order, computed in `count` processes.

    The processes end at once when the generator is closed. method: "fork", or "spawn", which needs
    a function that can be imported, and Python 3.11 to keep the current folder off the module path.
    A `WorkerLost` if one of them is killed.
    """
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(min(count, 61), context, _begin_worker)  # Windows allows 61
    try:
        with _signals_held(), _safe_path(), warnings.catch_warnings():
            # of threads, which a fork does not have: no worker waits for one
            warnings.simplefilter("ignore", DeprecationWarning)
            futures = [pool.submit(function, *each) for each in arguments]
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        raise WorkerLost from None
    finally:
        for process in list((pool._processes or {}).values()):  # from 3.14 on: pool.kill_workers
            process.kill()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _signals_held():
    """Context: signals arrive when it ends. Processes that start in it ignore them from their
    first instruction on."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _safe_path():
    """Context: Python starts without the current folder on its module path."""
    before = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}
    os.environ.pop("PYTHONPATH", None)  # `multiprocessing` passes this process's module path on
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _begin_worker():
    """In a new worker process: it ends when its parent ends, and for no signal but SIGTERM."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    import multiprocessing

    multiprocessing.parent_process().join()
    os._exit(1)
