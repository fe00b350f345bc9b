"""Run the tests that numba-cuda ships for its own compiler, in the emulator: python -m
tests.emulator.numba_suite

The tests are those of the installed numba-cuda, `numba.cuda.tests.cudapy` and `.doc_examples`;
nothing of them is copied. numba_suite.txt lists the ones that do not pass, in groups with the
reason. A test that fails and is not listed is an error, and so is a listed one that passes. Test
files run in child processes, each test for at most LIMIT seconds of the processor. A test that
fails is run again after Numba's compiler, `emulator.device(compile=True)`: some look at what it
makes.

    python -m tests.emulator.numba_suite                        # all 1,600, in a quarter of an hour on two cores
    python -m tests.emulator.numba_suite test_atomics test_sm   # these files; --show prints why tests fail
    python -m tests.emulator.numba_suite --part 2/6             # the second sixth of the files

Of numba-cuda 0.30.4's 1,661 tests 1,498 pass, 135 do not, and numba-cuda skips 28. On a machine that
is busy with other work a run takes as many times longer; it says at its end what differs from the list.

Needs the packages that those tests import: `pip install filecheck cffi psutil`.
"""

import argparse
import contextlib
import fnmatch
import importlib
import importlib.util
import json
import os
import pathlib
import selectors
import signal
import sys
import tempfile
import time
import unittest

import psutil

LIST = pathlib.Path(__file__).with_name("numba_suite.txt")
# its sitecustomize.py enters the emulator in processes that tests start
STARTUP = LIST.parent / "startup"
PACKAGES = "cudapy", "doc_examples"
LIMIT = 120  # seconds of processor time of one test; a busy processor takes twice as many
SILENCE = 600  # seconds without a result, and idle, after which a child is killed


class Late(BaseException):
    """A test takes longer than LIMIT; no `except Exception` catches this."""


# In a child process -------------------------------------------------------------------------------


class Results(unittest.TestResult):
    """Prints the name of each test that starts, and its outcome."""

    def __init__(self, pipe):
        super().__init__()
        self._pipe = pipe

    def _say(self, **what):
        print(json.dumps(what), file=self._pipe, flush=True)

    def startTest(self, test):
        super().startTest(test)
        self._failed = False
        self._say(start=test.id())
        signal.setitimer(signal.ITIMER_PROF, LIMIT)

    def stopTest(self, test):
        signal.setitimer(signal.ITIMER_PROF, 0)
        super().stopTest(test)

    def _ended(self, test, outcome, why=""):
        name = test.id() if isinstance(test, unittest.TestCase) else str(test)
        self._say(name=name, outcome=outcome, why=why)

    def _fails(self, test, error):
        kind, value, trace = error
        if kind is Late:
            return self._ended(test, "fail", f"takes more than {LIMIT} s")
        if kind.__name__ == "Skipped":  # pytest's
            return self._ended(test, "skip", str(value))
        lines = [
            line for line in self._exc_info_to_string(error, test).splitlines() if line.strip()
        ]
        return self._ended(test, "fail", "\n".join(lines[-40:]))

    def addSuccess(self, test):
        if not self._failed:
            self._ended(test, "pass")

    def addSubTest(self, test, subtest, error):
        if error is not None and not self._failed:
            self._failed = True
            self._fails(test, error)

    def addSkip(self, test, reason):
        self._ended(test, "skip", reason)

    def addError(self, test, error):
        if isinstance(test, unittest.TestCase):
            self._fails(test, error)
        else:  # a class or a module could not be set up
            self._say(name=str(test), outcome="broken", why=self._exc_info_to_string(error, test))

    addFailure = addError

    def addExpectedFailure(self, test, error):
        self._ended(test, "pass")

    def addUnexpectedSuccess(self, test):
        self._ended(test, "fail", "passes, where a GPU is expected to fail")


def run_module(name, compile, without, pipe):
    """Run the tests of a module, but those named."""
    from numdiff import emulator

    emulator.install(float64=True, compile=compile)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(STARTUP), str(STARTUP.parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    signal.signal(signal.SIGPROF, _late)
    try:
        module = importlib.import_module(name)
    except unittest.SkipTest as reason:
        print(
            json.dumps({"name": name, "outcome": "skip", "why": str(reason)}), file=pipe, flush=True
        )
        return
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    chosen = unittest.TestSuite(test for test in tests_of(suite) if test.id() not in without)
    chosen.run(Results(pipe))


def _late(*signal_and_frame):
    raise Late


def tests_of(suite):
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from tests_of(part)
        else:
            yield part


# In the parent ------------------------------------------------------------------------------------


def modules(files):
    """Names of the modules with tests, of which a file's name or a part of it may have been asked
    for."""
    found = importlib.util.find_spec("numba_cuda")
    folder = (
        found and pathlib.Path(found.submodule_search_locations[0]) / "numba" / "cuda" / "tests"
    )
    if folder is None or not folder.is_dir():
        sys.exit("numba-cuda with its tests is not installed: pip install numba-cuda.")
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("test_*.py")):
            inner = ".".join(path.relative_to(folder).with_suffix("").parts)
            if not files or any(f in inner for f in files):
                yield f"numba.cuda.tests.{inner}"


class Child:
    """A process that runs the tests of a module; `results` is {name of a test: (outcome, why)}.

    compile: whether Numba compiles the kernels first; without: names of tests that it does not run
    """

    def __init__(self, module, compile=False, without=()):
        self.module, self._compile, self._without, self.results, self._last = (
            module,
            compile,
            set(without),
            {},
            None,
        )

    def start(self):
        """Run those that have no result yet."""
        self.running, self.heard, self.used = None, time.monotonic(), 0
        self._output = tempfile.TemporaryFile()
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.close(read)
                for stream in (1, 2):
                    os.dup2(self._output.fileno(), stream)
                run_module(
                    self.module,
                    self._compile,
                    self._without | set(self.results),
                    os.fdopen(write, "w"),
                )
                code = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            finally:
                os._exit(code)
        os.close(write)
        self.pipe = os.fdopen(read, "rb")
        self._rest = b""

    def hear(self):
        """Read what there is; False at the end of the process."""
        self.heard = time.monotonic()
        data = os.read(self.pipe.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what = json.loads(line)
            if "start" in what:
                self.running = what["start"]
            else:
                self.results[what["name"]] = what["outcome"], what["why"]
                self.running = None if what["name"] == self.running else self.running
        return bool(data)

    def hangs(self):
        """Whether nothing comes, though the process has no work; on a busy machine it may wait long
        for the processor, and LIMIT ends a test that computes."""
        if time.monotonic() - self.heard <= SILENCE:
            return False
        used = sum(psutil.Process(self.pid).cpu_times()[:2])
        working, self.used, self.heard = used - self.used > 1, used, time.monotonic()
        return not working

    def end(self):
        """After the process's end: whether all tests have a result. One that has ended its process
        is noted."""
        self.pipe.close()
        _, status = os.waitpid(self.pid, 0)
        if status:
            name = self.running or self.module
            self._output.seek(0)
            tail = self._output.read()[-2000:].decode(errors="replace")
            self.results[name] = (
                "fail",
                f"the process ends with {os.waitstatus_to_exitcode(status)}: {tail}",
            )
            if self.running is not None and self.running != self._last:
                self._last = self.running
                return False
        return True


def module_of(name):
    """The module of a test's name, such as
    "numba.cuda.tests.cudapy.test_sm.TestSharedMemory.test_issue_5073"."""
    return ".".join(name.partition(" ")[0].split(".")[:5])


def run_all(waiting, workers, heard):
    """{name of a test: (outcome, why)} of several `Child`, `workers` processes at once. They are
    forked, as importing Numba takes longer than most of them."""
    waiting, results, selector, children = waiting[::-1], {}, selectors.DefaultSelector(), 0
    while waiting or children:
        while waiting and children < workers:
            child = waiting.pop()
            child.start()
            selector.register(child.pipe, selectors.EVENT_READ, child)
            children += 1
        ready = {key.data for key, _ in selector.select(1)}
        for key in list(selector.get_map().values()):
            child = key.data
            if child.hangs():
                os.kill(child.pid, signal.SIGKILL)
            if child in ready and not child.hear():
                selector.unregister(child.pipe)
                children -= 1
                if child.end():
                    results.update(child.results)
                    heard(child)
                else:
                    child.start()
                    selector.register(child.pipe, selectors.EVENT_READ, child)
                    children += 1
    return results


def short(name):
    return name.removeprefix("numba.cuda.tests.")


def listed():
    """[(reason, pattern)] of numba_suite.txt: after a line "# reason" the tests that do not pass
    for it."""
    reason, found = "", []
    for line in LIST.read_text().splitlines() if LIST.exists() else ():
        if line.startswith("# "):
            reason = line[2:]
        elif line.strip():
            found.append((reason, line.strip()))
    return found


def complaints(results, patterns):
    """What differs from the list, as sentences."""
    failing = [name for name, (outcome, _) in results.items() if outcome in ("fail", "broken")]
    passing = [name for name, (outcome, _) in results.items() if outcome == "pass"]
    unlisted = [n for n in failing if not any(fnmatch.fnmatchcase(n, p) for _, p in patterns)]
    return [f"{name} fails and is not in {LIST.name}" for name in unlisted] + [
        f"{name} passes: take {pattern} off {LIST.name}"
        for _, pattern in patterns
        for name in fnmatch.filter(passing, pattern)
    ]


def tally(results):
    outcomes = [outcome for outcome, _ in results.values()]
    return (
        f"{outcomes.count('pass')} pass, {outcomes.count('fail') + outcomes.count('broken')} do not, "
        f"{outcomes.count('skip')} are skipped by numba-cuda"
    )


def part(text):
    """(2, 6) of "2/6"."""
    number, count = (int(n) for n in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="parts of names of test files; all without")
    parser.add_argument("--workers", type=int, default=2, help="child processes at once")
    parser.add_argument(
        "--part", type=part, default=(1, 1), help="2/6: the second of six parts of the files"
    )
    parser.add_argument("--show", action="store_true", help="print why tests fail")
    parser.add_argument("--uncompiled", action="store_true", help="without Numba's compiler")
    parser.add_argument("--json", help="a file for all outcomes")
    options = parser.parse_args()
    began = time.monotonic()
    import numba.cuda  # once, before the processes are forked

    import numdiff.emulator  # noqa: F401

    importlib.import_module(f"{numba.cuda.__name__}.testing")
    with contextlib.suppress(Exception):  # the search for the compiler's libraries takes long, too
        importlib.import_module(f"{numba.cuda.__name__}.cudadrv.nvrtc").get_supported_ccs()

    done = {}

    def heard(child):
        done.update(child.results)
        if options.json:
            pathlib.Path(options.json).write_text(
                json.dumps({short(n): o for n, o in done.items()}, indent=0)
            )
        print(f"{short(child.module)}: {tally(child.results)}", file=sys.stderr, flush=True)

    number, count = options.part
    chosen = list(modules(options.files))[number - 1 :: count]
    found = run_all([Child(m) for m in chosen], options.workers, heard)
    if not options.uncompiled:
        again = {}
        for name, (outcome, _) in found.items():
            if outcome in ("fail", "broken"):
                again.setdefault(module_of(name), set()).add(name)
        print(f"without Numba's compiler {tally(found)}; with it:", file=sys.stderr)
        found.update(
            run_all(
                [
                    Child(m, True, {n for n in found if n not in names})
                    for m, names in again.items()
                ],
                options.workers,
                heard,
            )
        )
    results = {short(name): outcome for name, outcome in found.items()}
    if options.show:
        for name, (outcome, why) in results.items():
            if outcome in ("fail", "broken"):
                print(f"{name}\n    " + why.replace("\n", "\n    "))
    print(f"{tally(results)}, of {len(results)} in {time.monotonic() - began:.0f} s")
    wrong = complaints(results, listed())
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
