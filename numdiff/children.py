"""How this project starts other Python processes: in one place, so that none imports from the
current folder.

`python -c …` puts the current folder first on the module path, and a file `json.py` in it would run
instead of the standard library's. So every process starts isolated (`python -I`: neither the
current folder nor the environment variables of Python count) and receives this process's module
path without the current folder. What is installed for this process, in a virtual environment, for
the user or in a folder of PYTHONPATH, is found there, too. `numdiff` is the one of this process,
wherever it is.
"""

import contextlib
import json
import os
import pathlib
import site
import sys

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
