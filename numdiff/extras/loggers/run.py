"""A run with --log: what rank 0 gives to other programs, in a thread of its own.

The training only puts records into a queue. A program that fails, or that hangs, ends its own log,
and a line says so; the training continues with the same bits. At the end of a run the thread has
`PATIENCE` seconds for what is left.
"""

import contextlib
import importlib.util
import pathlib
import queue
import secrets
import threading

from ... import schema
from ...errors import UsageError
from ...files import Refused, open_regular, write_json
from ...training.run_extension import RunExtension
from .sinks import SINKS

PATIENCE = 60  # seconds
WAITING = 10_000  # records, at most: those that a program which hangs has not taken are lost
STEP = schema.integer(-1)
WRITTEN = schema.record({"identity": schema.text(64), "scalars": STEP, "picture": STEP})
LEFT_OUT = {"step", "frechet_count"}


class RunLog(RunExtension):
    """Of a run with --log."""

    def check(self):
        for name in self.options.log:
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:  # a folder of this name is no package
                raise UsageError(
                    f"--log {name} needs the package {name}, which is not installed: pip install {name}."
                )

    def begin(self, run_dir, step, say):
        self._logs = [
            Log(name, pathlib.Path(run_dir).absolute(), self.options.to_json(), step, say)
            for name in dict.fromkeys(self.options.log)
        ]

    def report(self, record):
        values = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and name not in LEFT_OUT
        }
        for log in self._logs:
            log.put("scalars", record["step"], values)

    def drawn(self, step, path):
        for log in self._logs:
            log.put("picture", step, path)

    def end(self, finished):
        for log in self._logs:
            log.end(finished)


class Log:
    """What one program is given: a queue, and the thread that empties it.

    say: prints a line; the training's thread alone calls it
    """

    def __init__(self, name, run_dir, settings, step, say):
        self.name, self._say, self._fault = name, say, None
        self._queue = queue.Queue(WAITING)
        self._thread = threading.Thread(
            target=self._work, args=(run_dir, settings, step), name=f"log {name}", daemon=True
        )
        self._thread.start()

    def put(self, *item):
        """Queue (method, step, value); say what has failed."""
        self._tell()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(item)

    def _tell(self):
        fault, self._fault = self._fault, None
        if fault:
            self._say(f"note      --log {self.name} has ended, and the training continues: {fault}")

    def end(self, finished):
        """Wait until all is written, but not for long."""
        self.put("close", None, finished)
        self._thread.join(PATIENCE)
        self._tell()
        if self._thread.is_alive():
            self._say(
                f"note      --log {self.name} has not ended within {PATIENCE} s, and is left."
            )

    # its thread -----------------------------------------------------------------------------------

    def _work(self, run_dir, settings, step):
        try:
            path = run_dir / f"log-{self.name}.json"
            written = read_written(path)
            sink = SINKS[self.name](run_dir, settings, written["identity"], step)
            while (item := self._queue.get())[0] != "close":
                method, step, value = item
                if sink.rewinds or step > written[method]:
                    getattr(sink, method)(step, value)
                    written[method] = step
                    write_json(path, written, "what has been logged")
            sink.close(item[2])
        except Exception as error:  # of another program's code: anything may be wrong there
            self._fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]


def read_written(path):
    """What a program has of a run: its identity there, and the last steps; new where there is none."""
    try:
        with open_regular(path) as file:
            return schema.check(schema.parse_json(file.read(4096), 4096), WRITTEN, "it")
    except (OSError, Refused):
        return {"identity": secrets.token_hex(4), "scalars": -1, "picture": -1}
