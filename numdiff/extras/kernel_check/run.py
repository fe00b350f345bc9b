"""Running cases on a device, and judging what comes out."""

import contextlib
import dataclasses
import functools
import re
import sys
import time
from dataclasses import dataclass, field

import numpy as np

from ...children import WorkerLost, map_in_processes
from ...device import PtxError, download, get_backend, synchronize, upload, why_no_gpu
from ...device.compiler import kernels_by_name
from ...device.cpu import as_worker
from ...device.emulator import EmulatorDevice
from ...device.forks import can_fork
from ...device.planned import Planned, cards_with
from ...device.requires import supports
from ...dtypes import is_half
from ...emulator import Film, KernelFault, LaunchRefused, Recorder, Unsupported
from ...errors import NumdiffError, UsageError, near_miss
from ...kernels.operation import Unfit, all_operations, kernel_modules
from ...kernels.operation.versions import FOR, NAMES, name_of, operation_of
from .bfloat16 import bfloat16_cases
from .case import Case, CaseArrays
from .records import cases_of

# in which the emulator's threads take turns; the first two always
ORDERS = ("forward", "shuffled", "reversed")
# of a version, after which the check continues
FAULTS = KernelFault, LaunchRefused, Unsupported, PtxError, ValueError
# seconds of checking after which new processes, which import all kernels first, save time
SPAWN_PAYS = 3.0
# in PTX: a fused multiply-add, or a product (`mul` without its own rounding) and a sum that ptxas
# may join to one; an approximate instruction; a call of a function that was not inlined
FUSED = re.compile(
    r"\bfma\.rn\.|\.approx\.|\bcall\.uni\b|\bmul\.f32\b.*\b(?:add|sub)\.f32\b", re.DOTALL
)
CASES = [case for record in all_operations() for case in cases_of(record)]
CASES += bfloat16_cases(CASES)


def cases_named(names):
    """The cases of these operations (all for none); a `UsageError` for a name that is none."""
    known = sorted({case.name for case in CASES})
    for name in names:
        if not any(k == name or k.startswith(name + "_") for k in known):
            raise UsageError(
                f"there is no operation {name!r}{near_miss(name, known)}: use some of "
                f"{', '.join(known)}."
            )
    return [
        c
        for c in CASES
        if not names or any(c.name == n or c.name.startswith(n + "_") for n in names)
    ]


# Running them -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The outcome of a case's version on a device. error: relative, the largest of its results;
    fault: text or None."""

    case: Case
    version: int | None
    error: float = 0.0
    same: bool = True
    fault: str | None = None
    lacking: bool = False  # whether the device's compute capability has no such version
    seconds: float = 0.0
    results: list = field(default_factory=list)

    @property
    def passed(self):
        return (
            not self.lacking
            and self.fault is None
            and self.same
            and self.error <= self.case.tolerance
        )

    @property
    def name(self):
        label = f" ({self.case.label})" if self.case.label else ""
        if self.version is None:
            return f"{self.case.name}{label}"
        return f"{self.case.name}{label} v{self.version} {name_of(self.case.name, self.version, dtype_of(self.case))}"


def _inputs(case):
    return case.inputs(np.random.default_rng(list(f"{case.name} {case.label}".encode())))


@functools.cache
def _type_of(inputs):
    arrays = inputs(np.random.default_rng(0)).values()
    first = next(a.dtype for a in arrays if a.dtype.kind == "f" or is_half(a.dtype))
    return first.name if is_half(first) else "float32"


def dtype_of(case):
    """The type of a case's operands on a device; None if names of its versions do not depend on it."""
    return (
        _type_of(case.inputs)
        if FOR.keys() & NAMES.get(operation_of(case.name), {}).keys()
        else None
    )


def _is_wanted(case, each, version):
    """Whether to run the version `each` of a case; version: a number, a name, or None for all.

    each: None if the case itself says what runs, such as one tile of a Hopper kernel: it counts as
    a version with a name that its type has.
    """
    if version is None or each == version:
        return True
    names = NAMES.get(operation_of(case.name), {})
    if not isinstance(version, str):
        return each is None and any(
            _is_wanted(case, None, name) for name, number in names.items() if number == version
        )
    return (
        version in names
        and each in (None, names[version])
        and (name_of(case.name, names[version], dtype_of(case)) == version)
    )


def _on_device(arrays, backend):
    """The inputs on a device: float64 becomes float32."""
    return CaseArrays(
        {
            name: upload(a.astype(np.float32) if a.dtype == np.float64 else a, backend)
            for name, a in arrays.items()
        }
    )


def run_once(case, version, backend):
    """The results of a case as NumPy arrays."""
    results = case.run(_on_device(_inputs(case), backend), version)
    synchronize(backend)
    return [download(r) for r in results]


def reference(case):
    """The results in float64 by NumPy, from inputs rounded to float32 as those of a device are."""
    arrays = {
        name: a.astype(np.float32) if a.dtype == np.float64 else a.copy()
        for name, a in _inputs(case).items()
    }
    for name, a in arrays.items():
        if is_half(a.dtype) or a.dtype == np.float32:
            arrays[name] = a.astype(np.float64)
    return case.run(CaseArrays(arrays), None)


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return np.inf
    finite = np.isfinite(want)
    scale = np.linalg.norm(want[finite])
    return float(np.linalg.norm((got - want)[finite]) / (scale or 1.0))


def check_case(case, version, device, orders=ORDERS[:2], seed=0):
    """Run one version of a case on a device ("emulator", "cuda", "ptx", "cpu") and judge it: an
    `Outcome`."""
    backend, outcome, start = get_backend(device), Outcome(case, version), time.perf_counter()
    runs = []
    try:
        for order in orders if device == "emulator" else ORDERS[: 1 if device == "ptx" else 2]:
            if device == "emulator":
                backend.machine.order, backend.machine.seed = order, seed
            runs.append(run_once(case, None if device == "cpu" else version, backend))
    except (*FAULTS, NumdiffError) as error:
        outcome.fault, outcome.lacking = (
            str(error),
            device == "cuda"
            and (isinstance(error, LaunchRefused) or lacks(backend, case, version, error)),
        )
        if not (outcome.lacking or isinstance(error, FAULTS)):
            raise
    finally:
        if device == "emulator":
            backend.machine.order = "forward"
    if outcome.fault is None and device != "ptx":
        outcome.results = runs[0]
        outcome.same = all(
            a.tobytes() == b.tobytes()
            for other in runs[1:]
            for a, b in zip(runs[0], other, strict=True)
        )
        outcome.error = max(
            relative_error(a, b) for a, b in zip(runs[0], reference(case), strict=True)
        )
    outcome.seconds = time.perf_counter() - start
    return outcome


def lacks(backend, case, version, error):
    """Whether a version of a case, which failed with this error, runs on a Hopper: it does not fit
    the backend, or launches kernels that the backend's compute capability does not run."""
    hopper = Planned(cards_with((9, 0))[0])
    run_once(case, version, hopper)
    if isinstance(error, Unfit):
        return True
    known = kernels_by_name()
    return not supports(backend, *(known[key[:2]] for key in hopper.kernels if key[:2] in known))


def check(
    names=(), device="emulator", orders=None, seed=None, version=None, against=None, jobs=None
):
    """Check the operations of these names (all for none), one `Outcome` after the other.

    orders: how many of `ORDERS` the emulator tries (2); seed: of the shuffled one (0); version:
    only cases of this one, a number or a name; against: the device that results will be compared
    with; jobs: processes in which the emulator runs (1). A `UsageError` where none of the
    operations has the version, and for what the device does not have
    """
    cases = cases_named(names)
    _check_device(device, orders, seed, version, against, jobs)
    _check_version(cases, version)
    runs = [
        (case, each, device, ORDERS[: orders or 2], seed or 0)
        for case in cases
        for each in (case.versions if device != "cpu" else (None,))
        if _is_wanted(case, each, version)
    ]
    method = start_method() if against != "cuda" and min(jobs or 1, len(runs)) > 1 else None
    start, done = time.perf_counter(), 0
    while done < len(runs) and method != "fork":
        if method == "spawn" and time.perf_counter() - start > SPAWN_PAYS:
            break
        yield check_case(*runs[done])
        done += 1
    if done < len(runs):
        yield from _check_in_processes(runs[done:], jobs, method)


def start_method():
    """How processes that check cases start, "fork" or "spawn"; None where neither is safe."""
    if sys.platform == "linux":
        return "fork" if can_fork() else None
    return "spawn" if sys.version_info >= (3, 11) else None


def _check_in_processes(runs, jobs, method):
    """Yield the `Outcome` of each run, a tuple of arguments of `check_case`, from `jobs` processes."""
    places = {id(case): place for place, case in enumerate(CASES)}
    arguments = [(places[id(case)], *rest) for case, *rest in runs]
    found = map_in_processes(_check_place, arguments, min(jobs, len(runs)), method)
    with contextlib.closing(found) as outcomes:
        for case, each, *_ in runs:
            try:
                yield dataclasses.replace(next(outcomes), case=case)
            except WorkerLost:
                raise NumdiffError(
                    f"a worker process was killed, or out of memory, in {Outcome(case, each).name} or in "
                    "a case after it: --jobs 1 checks one after the other."
                ) from None


def _check_place(place, *rest):
    """`check_case` in a worker process, of the case at this place of `CASES`: a case itself is made
    of functions that other processes do not have."""
    with as_worker():  # the other cores have other cases
        return dataclasses.replace(check_case(CASES[place], *rest), case=None)


def _check_device(device, orders, seed, version, against, jobs):
    """Raise a `UsageError` for an option that says nothing on this device."""
    for option, value, fits, why in (
        (
            "--orders",
            orders,
            device == "emulator",
            f"is of the emulator, and not of --device {device}",
        ),
        ("--seed", seed, device == "emulator", f"is of the emulator, and not of --device {device}"),
        ("--jobs", jobs, device == "emulator", f"is of the emulator, and not of --device {device}"),
        ("--seed", seed, orders != 1, "is of the shuffled order, which --orders 1 leaves out"),
        (
            "--version",
            version,
            device != "cpu",
            "is of kernels, and --device cpu runs the references alone",
        ),
        ("--against", against, device != "ptx", "compares results, and --device ptx only compiles"),
    ):
        if value is not None and not fits:
            raise UsageError(f"{option} {value} {why}: leave it out.")
    reason = why_no_gpu() if "cuda" in (device, against) else None
    if reason:
        option, remedy = (
            ("--against", "leave it out")
            if against == "cuda"
            else ("--device", "use --device emulator")
        )
        raise UsageError(f"{option} cuda: no GPU can be used ({reason}); {remedy}.")


def _check_version(cases, version):
    """Raise a `UsageError` for a version in which none of the cases is run."""
    runs = [(case, each) for case in cases for each in case.versions if each is not None]
    if version is None or any(_is_wanted(case, each, version) for case, each in runs):
        return
    known = {
        name
        for case, each in runs
        for name in NAMES.get(operation_of(case.name), {})
        if _is_wanted(case, each, name)
    }
    raise UsageError(
        f"none of these operations has a version {version}: "
        + (f"use {', '.join(sorted(known))} or a number." if known else "leave out --version.")
    )


def counts_of(case, version):
    """A `Recorder` (numdiff/emulator/counts.py) that has counted one run of a case in the emulator."""
    recorder = Recorder()
    run_once(case, version, EmulatorDevice(recorder=recorder, on_fault="collect"))
    return recorder


def trace_of(case, version):
    """A `Film` (numdiff/emulator/film.py) of one run of a case in the emulator."""
    film = Film()
    run_once(case, version, EmulatorDevice(film=film, on_fault="collect"))
    return film


def run_version(operation, wanted, problem=None, filmed=False):
    """(`Outcome`, `Film` or None) of one run of an operation's version in the emulator, on one of
    its problems.

    wanted: the version's name or number; problem: its label, None for the first. A `UsageError` for
    what there is not
    """
    cases = [case for case in CASES if case.name == operation] or cases_named([operation])
    wanted = int(wanted) if str(wanted).isdecimal() else wanted
    _check_version(cases, wanted)
    runs = [
        (case, each)
        for case in cases
        for each in case.versions
        if each is not None and _is_wanted(case, each, wanted) and problem in (None, case.label)
    ]
    if not runs:
        labels = [
            case.label
            for case in cases
            if any(_is_wanted(case, each, wanted) for each in case.versions)
        ]
        raise UsageError(
            f"--problem {problem}: {operation} {wanted} has the problems {'; '.join(labels)}."
        )
    (case, version), film, start = runs[0], Film() if filmed else None, time.perf_counter()
    outcome = Outcome(case, version)
    backend = EmulatorDevice(film=film, on_fault="collect")
    try:
        outcome.results = run_once(case, version, backend)
        outcome.error = max(
            relative_error(a, b) for a, b in zip(outcome.results, reference(case), strict=True)
        )
    except FAULTS as error:
        outcome.fault = str(error)
    outcome.fault = "\n".join(map(str, backend.machine.faults)) or outcome.fault
    outcome.seconds = time.perf_counter() - start
    return outcome, film


def compare_devices(case, version, first="emulator", second="cuda"):
    """(whether two devices give the same bits, their largest difference relative to the result's
    2-norm)."""
    a, b = (run_once(case, version, get_backend(d)) for d in (first, second))
    same = all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
    return same, max(relative_error(x, y) for x, y in zip(a, b, strict=True))


def fused_kernels(case, version):
    """Which of a case's kernels have fused multiply-adds or a float32 function of NVIDIA's in their
    sm_90a code.

    The emulator rounds after each operation and takes functions from the C library; these kernels
    may differ from it in their last bits, all others must not.
    """
    backend = get_backend("ptx")
    del backend.launched[:]
    run_once(case, version, backend)
    return sorted(
        {key[1] for key in backend.launched if key[3][0] == 9 and FUSED.search(backend.texts[key])}
    )


def all_kernels():
    """{(module, name)} of every kernel that a launch can name."""
    found = set()
    for module in kernel_modules():
        for value in vars(module).values():
            for kernel in value.values() if isinstance(value, dict) else [value]:
                options = getattr(kernel, "targetoptions", {"device": True})
                # nor a loop for the host (`on_host`)
                if not (options.get("device") or options.get("nogil")):
                    found.add((kernel.py_func.__module__, kernel.py_func.__name__))
    return found
