"""`numdiff report --serve`: the report of runs that are being written.

The page asks for the curves every two seconds. A run's files are read again only if they have
changed.
"""

import os
import pathlib
import threading

from ...files import open_regular
from ...training.report import STATS
from .report import page, read_runs
from .runs import list_grids
from .server import Answer, Refusal, Server, json_answer

GRID_BYTES = 64 << 20


class LiveReport:
    """The pages of the report of some run folders: `routes` for a `Server`."""

    def __init__(self, run_dirs):
        self.run_dirs = [pathlib.Path(run_dir) for run_dir in run_dirs]
        self._lock, self._seen, self._runs = threading.Lock(), None, None
        self.routes = {
            ("GET", "/"): self.page,
            ("GET", "/data"): self.data,
            ("GET", "/grid"): self.grid,
        }
        self.runs()

    def runs(self):
        """The runs as they are now."""
        with self._lock:
            seen = [[stamp(run_dir / STATS), grids_of(run_dir)] for run_dir in self.run_dirs]
            if seen != self._seen:
                self._runs = read_runs(self.run_dirs)
                for k, (run, (_, grids)) in enumerate(zip(self._runs, seen, strict=True)):
                    run["grids"] = [[step, f"grid?run={k}&step={step}"] for step, _ in grids]
                self._seen = seen
            return self._runs

    def page(self, request):
        return Answer(page(self.runs(), live=True).encode())

    def data(self, request):
        return json_answer(
            {
                "runs": [
                    {
                        **run,
                        "curves": {
                            name: {key: column.tolist() for key, column in curve.items()}
                            for name, curve in run["curves"].items()
                        },
                    }
                    for run in self.runs()
                ]
            }
        )

    def grid(self, request):
        """A sample grid, as the run wrote it."""
        run, step = (request.query.get(name, "") for name in ("run", "step"))
        if not all(text.isascii() and text.isdecimal() and len(text) < 9 for text in (run, step)):
            raise Refusal(400, "A sample grid is asked for by run and step, two whole numbers.")
        if int(run) >= len(self.run_dirs):
            raise Refusal(404, "There is no such run.")
        path = dict(grids_of(self.run_dirs[int(run)])).get(int(step))
        try:
            if path is None or os.path.islink(path) or path.stat().st_size > GRID_BYTES:
                raise FileNotFoundError
            with open_regular(path) as file:
                return Answer(file.readall(), "image/png")
        except OSError:
            raise Refusal(404, "There is no such sample grid.") from None


def grids_of(run_dir):
    """As `list_grids`; none if the folder has gone."""
    try:
        return list_grids(run_dir)
    except OSError:
        return []


def stamp(path):
    """What changes when a file is written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def serve_report(run_dirs, host, port, echo):
    """Serve until Ctrl-C. Prints the address."""
    with Server(LiveReport(run_dirs).routes, host, port) as server:
        echo(f"report    {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            echo("ended")
