"""The judge: runs a learner's kernel in the emulator and says how many stars it has, and why.

    0 stars   it does not run, has a fault, or differs from the NumPy specification in one of three thread orders
    1 star    right
    2 stars   and coalesced, with no float64 arithmetic in a float32 kernel
    3 stars   and within the puzzle's limits: bank conflicts, and what its LIMITS and USES name

A learner's file may contain anything. Whatever happens in it ends in a verdict: one sentence, and
never a traceback.
"""

import ast
import contextlib
import inspect
import linecache
import signal
import threading
import time
import types
from dataclasses import dataclass

import numpy as np

from .. import emulator
from ..emulator.advice import FLOAT64
from . import advice

ORDERS = ("forward", "reversed", "shuffled")
SECONDS = 4  # of processor time, after which a learner's code counts as endless
FILM_SECONDS = 20  # the same while a film is recorded
PATIENCE = 1.0  # seconds without progress after which a waiting loop is called endless
# times the transactions that would do: more is not coalesced. A row that is not aligned takes less
UNCOALESCED = 2.0


@dataclass
class Verdict:
    """stars: 0 to 3; message: what is wrong or what is left to do; recorder: what was counted, or
    None."""

    stars: int
    message: str
    recorder: object = None
    seconds: float = 0.0


class Wrong(Exception):
    """The learner's code cannot be judged further; the message teaches."""


class TooLong(BaseException):
    """The learner's code does not end; no `except Exception` of it catches this."""


def judge(puzzle, path, seed=0):
    """The `Verdict` on the learner's file at `path`."""
    begun, module = time.perf_counter(), puzzle.module
    try:
        with time_limit(SECONDS, path):
            verdict = _judge(module, path, seed)
    except Wrong as error:
        verdict = Verdict(0, str(error))
    except TooLong as stopped:
        verdict = Verdict(0, endless(stopped, SECONDS))
    verdict.seconds = time.perf_counter() - begun
    return verdict


def endless(stopped, seconds):
    """What a `TooLong` means."""
    where = f"in line {stopped.args[0]}" if stopped.args[0] else "in the kernel"
    return (
        f"Stopped after {seconds} seconds {where}: a loop does not end, or takes far more steps than it must. "
        "Check what ends it."
    )


def film_of(puzzle, path, seed=0):
    """(`Film` of the learner's kernel on the puzzle's first problem, or None if it does not run; a
    sentence)"""
    module, film = puzzle.module, emulator.Film()
    message = "The result is right; the judge also looks at other problems and thread orders."
    try:
        with time_limit(FILM_SECONDS, path):
            text = read(path)
            learner = loaded(module, path, text, parse(text, path))
            grid, block, inputs = next(iter(module.problems(np.random.default_rng(seed))))
            run(module, learner, path, text, grid, block, inputs, "forward", seed, film=film)
    except Wrong as error:
        message = str(error)
    except TooLong as stopped:
        message = endless(stopped, FILM_SECONDS)
    return (film if film.launches else None), message


def _judge(module, path, seed):
    text = read(path)
    tree = parse(text, path)
    learner = loaded(module, path, text, tree)
    rng, recorder, float64, ordered = np.random.default_rng(seed), emulator.Recorder(), None, True
    for number, (grid, block, inputs) in enumerate(module.problems(rng)):
        results = set()
        for order in ORDERS:
            counting = recorder if number == 0 and order == "forward" else None
            result, found = run(
                module, learner, path, text, grid, block, inputs, order, seed, counting
            )
            results.add(result.tobytes())
            float64 = float64 or found
        ordered = ordered and len(results) == 1
    stars, message = rate(module, recorder, tree, path, float64, ordered)
    return Verdict(stars, message, recorder)


@contextlib.contextmanager
def time_limit(seconds, path):
    """Context that raises `TooLong` after this processor time, with the line of the file at `path`
    that runs then; without effect outside the main thread."""
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def stop(number, frame):
        while frame is not None and frame.f_code.co_filename != str(path):
            frame = frame.f_back
        raise TooLong(None if frame is None else frame.f_lineno)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# The learner's file -------------------------------------------------------------------------------


def read(path):
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Wrong(
            f"There is no file {path}: open the puzzle with `numdiff learn {int(path.name[:2])}`, in this "
            "folder."
        ) from None
    except UnicodeDecodeError:
        raise Wrong(f"{path} is no text in UTF-8: save it as such.") from None
    except OSError as error:
        raise Wrong(f"{path} cannot be read: {error.strerror}.") from None


def parse(text, path):
    try:
        return ast.parse(text, str(path))
    except SyntaxError as error:
        if error.lineno is None:
            raise Wrong(f"{path.name} is no valid Python: {error.msg}.") from None
        raise Wrong(
            f"Line {error.lineno} is no valid Python: {error.msg}. Check brackets, colons and indentation "
            "there, and in the line above."
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Wrong(f"{path.name} is no valid Python: {error}.") from None


def line_in(error, path):
    """The last line of the learner's file in an exception's traceback, or None."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def in_words(error, path, doing):
    """What a Python exception of the learner's code means."""
    line = line_in(error, path)
    where = f"Line {line}" if line else f"The code, while {doing},"
    if isinstance(error, SystemExit):
        return f"{where} ends the program: remove exit() from the file."
    text = f"{where} raises {type(error).__name__}" + (f": {error}" if str(error) else "")
    more = ""
    if isinstance(error, NameError):
        more = " Is the name misspelt, or not imported?"
    elif isinstance(error, ImportError):
        more = " Keep the imports of the puzzle."
    return advice.sentence(text) + more


def load(text, path):
    """The learner's module."""
    linecache.checkcache(str(path))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        with emulator.device(on_fault="collect"):
            exec(compile(text, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise Wrong(in_words(error, path, "the file is loaded")) from None
    return module


def loaded(module, path, text, tree):
    """The learner's module, whose kernels have the names and arguments of the puzzle's."""
    learner = load(text, path)
    for name in [name for name in vars(module) if name.endswith("kernel")]:
        check_kernel(learner, name, getattr(module, name), tree)
    return learner


def check_kernel(learner, name, original, tree):
    found = getattr(learner, name, None)
    if found is None:
        raise Wrong(f"The file has no function `{name}`: keep the name that the puzzle gives it.")
    if not hasattr(found, "py_func") or not type(found).__module__.startswith(
        ("numba.cuda", "numba_cuda", "numdiff")
    ):
        raise Wrong(f"`{name}` is no kernel: put @cuda.jit in the line above its def.")
    wanted, given = (list(inspect.signature(each.py_func).parameters) for each in (original, found))
    if len(wanted) != len(given):
        raise Wrong(
            f"`{name}` takes ({', '.join(given)}), and the puzzle calls it with ({', '.join(wanted)}): keep "
            "the first line as it was."
        )
    body = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name),
        None,
    )
    for node in ast.walk(body) if body is not None else ():
        if isinstance(node, ast.Return) and node.value is not None:
            raise Wrong(
                f"Line {node.lineno} returns a value, and a kernel returns nothing: store the result in out."
            )


# Runs ---------------------------------------------------------------------------------------------


def run(module, learner, path, text, grid, block, inputs, order, seed, recorder=None, film=None):
    """One run; a `Wrong` where it is not right. Returns the output, and the float64 fault or None."""
    expected = module.specification(*inputs)
    out = emulator.EmulatedArray(expected.shape, expected.dtype)
    gpu = emulator.Emulator(
        order=order,
        seed=seed,
        on_fault="collect",
        float64=False,
        patience=PATIENCE,
        recorder=recorder,
        film=film,
    )

    def launch(kernel, grid, block, *arguments):
        gpu.launch(kernel, grid, block, *arguments)
        check_faults(gpu, path)

    launch.empty = emulator.EmulatedArray
    given = [
        emulator.EmulatedArray(a.shape, a.dtype, a) if isinstance(a, np.ndarray) else a
        for a in inputs
    ]
    try:
        if hasattr(module, "launch"):
            module.launch(launch, learner, grid, block, inputs, out)
        else:
            launch(learner.kernel, grid, block, *given, out)
    except emulator.LaunchRefused as error:
        raise Wrong(f"A GPU would refuse this launch: {error}") from None
    except emulator.Unsupported as error:
        known = "" if str(error).startswith("Numba ") else "The emulator does not know this: "
        raise Wrong(f"{known}{error}") from None
    except Wrong:
        raise
    except (Exception, SystemExit) as error:
        raise Wrong(in_words(error, path, "the kernel runs")) from None
    size = expected.dtype.itemsize
    valid = np.frombuffer(out.memory.valid, np.uint8)[: expected.nbytes]
    written = valid.reshape(*expected.shape, size).all(axis=-1)
    if not written.all():
        raise Wrong(advice.explain_unwritten(written, text, int(np.prod(grid))))
    result, tolerance = out.copy_to_host(), getattr(module, "TOLERANCE", 1e-5 if size > 2 else 2e-3)
    if not advice.close(result, expected, tolerance).all():
        half = any(getattr(value, "dtype", None) == np.float16 for value in inputs)
        raise Wrong(advice.explain_values(result, expected, tolerance, half))
    return result, next((f for f in gpu.faults if f.kind == "float64"), None)


def check_faults(gpu, path):
    faults = [f for f in gpu.faults if f.kind != "float64"]
    if faults:
        raise Wrong(advice.explain(advice.most_telling(faults), path))


# Stars --------------------------------------------------------------------------------------------


def rate(module, recorder, tree, path, float64, ordered):
    """(stars, message) of a kernel that is right. ordered: whether its bits are the same in each
    thread order."""
    if not ordered:
        return 1, advice.ORDER
    lines = {
        line: figures for (file, line), figures in recorder.lines().items() if file == str(path)
    }
    if float64 is not None:
        line = advice.line_of(float64, path)
        return 1, f"Right, but line {line} computes in float64. {FLOAT64}"
    limit = getattr(module, "UNCOALESCED", UNCOALESCED)
    worst = max(
        (
            (figures.sectors / figures.ideal_sectors, line)
            for line, figures in lines.items()
            if figures.ideal_sectors
        ),
        default=(1, None),
    )
    if worst[0] > limit:
        return 1, advice.explain_uncoalesced(
            worst[1], lines[worst[1]], getattr(module, "COALESCE", "")
        )
    conflicts = {line: figures for line, figures in lines.items() if figures.conflicts > 0}
    total = recorder.total()
    if total.conflicts > getattr(module, "CONFLICTS", 0) and conflicts:
        line = max(conflicts, key=lambda n: conflicts[n].conflicts)
        return 2, advice.explain_conflicts(line, conflicts[line])
    for key, (most, why) in getattr(module, "LIMITS", {}).items():
        if getattr(total, key) > most:
            return 2, advice.explain_cost(key, getattr(total, key), most, why)
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    for name, why in getattr(module, "USES", {}).items():
        if name not in names:
            return 2, f"Right and coalesced, but it does not use {name}; three stars need it. {why}"
    return 3, "Right, coalesced, and within the puzzle's limits."
