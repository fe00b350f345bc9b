"""What `numdiff kernels show OPERATION VERSION` prints: kernels, the difference to the rung below,
and resources."""

import difflib
import inspect
import re
import subprocess
import tempfile
from pathlib import Path

from ...device.limits import WARP
from ...device.ptx import PtxDevice
from ...device.ptxas import find_ptxas
from ...errors import NumdiffError, UsageError
from .run import cases_named, run_once
from .show import record_of

# Of a multiprocessor: registers, warps, blocks, KiB of shared memory (CUDA C++ Programming Guide,
# table of technical specifications by compute capability)
MULTIPROCESSORS = {(8, 0): (65536, 64, 32, 164), (9, 0): (65536, 64, 32, 228)}


class Launches(PtxDevice):
    """Compiles every kernel that is launched, and keeps how it is launched.

    kernels: {(module, name): (kernel, grid, block, bytes of dynamic shared memory)}
    lacks: why nothing can be compiled here, or None
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.lacks = {}, None

    def launch(self, kernel, grid, block, args, shared=0, cluster=1):
        self.kernels.setdefault(
            (kernel.py_func.__module__, kernel.py_func.__name__), (kernel, grid, block, shared)
        )
        try:
            super().launch(kernel, grid, block, args, shared, cluster)
        # the compiler's libraries are not there
        except (ImportError, OSError, RuntimeError) as error:
            self.lacks = f"{type(error).__name__}; pip install 'numdiff-diffusion[cuda13]' has CUDA's compiler"


def version_text(operation, wanted, with_ptx=False):
    """Text about a version of an operation: source, difference to the version below it, registers,
    occupancy.

    wanted: its name or number; with_ptx: the PTX of each kernel, too. A `UsageError` for what there
    is not.
    """
    record = record_of(operation)
    if not record.versions:
        raise UsageError(
            f"{operation} has no versions: numdiff kernels show {operation} describes it."
        )
    try:
        version = record.version(int(wanted) if str(wanted).isdecimal() else wanted)
    except ValueError as error:
        raise UsageError(f"{error}.") from None
    launches, texts, lacks = _launched(record, version)
    lines = [f"{operation}, version {version}", ""]
    for (_, name), (kernel, grid, block, shared) in launches.items():
        lines += [
            f"{name}, grid {grid}, block {block}",
            "",
            inspect.getsource(kernel.py_func).rstrip(),
            "",
        ]
        lines += [
            resources(text, capability, block, shared)
            for capability, text in texts.get(name, {}).items()
        ]
        lines += [f"not compiled: {lacks}"] * bool(lacks)
        lines.append("")
    below = [each for each in record.versions if each.number < version.number]
    if below:
        before, *_ = _launched(record, below[-1])
        lines += [
            f"difference to version {below[-1]}",
            "",
            *difflib.unified_diff(
                _sources(before), _sources(launches), str(below[-1]), str(version), lineterm="", n=2
            ),
            "",
        ]
    if with_ptx:
        for name, found in texts.items():
            capability, text = list(found.items())[-1]
            lines += [
                f"PTX of {name} for compute capability {_words(capability)}",
                "",
                text.rstrip(),
                "",
            ]
    return "\n".join(lines).rstrip()


def _launched(record, version):
    """({(module, name): launch} of the version's first problem, {name: {capability: PTX}}, why
    nothing compiles)."""
    device = Launches()
    case = next(
        (
            c
            for c in cases_named([record.name])
            if c.name == record.name and version.number in c.versions
        ),
        None,
    )
    if case is None:
        raise NumdiffError(f"no problem of {record.name} runs version {version}.")
    run_once(case, version.number, device)
    texts = {}
    for (_, name, _, capability), text in device.texts.items():
        texts.setdefault(name, {})[capability] = text
    return device.kernels, texts, device.lacks


def _sources(launches):
    return [
        line
        for kernel, *_ in launches.values()
        for line in inspect.getsource(kernel.py_func).splitlines()
    ]


def _words(capability):
    return f"{capability[0]}.{capability[1]}{''.join(map(str, capability[2:]))}"


def resources(text, capability, block, dynamic):
    """A line with registers, shared memory, spills and occupancy of a kernel's PTX, as ptxas
    reports them."""
    ptxas = find_ptxas()
    if ptxas is None:
        return "registers: ptxas is not installed; pip install nvidia-cuda-nvcc"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [
                ptxas,
                "-v",
                f"-arch=sm_{capability[0]}{capability[1]}{''.join(capability[2:])}",
                source,
                "-o",
                Path(folder) / "kernel.cubin",
            ],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        return f"compute capability {_words(capability)}: ptxas failed: {done.stderr.strip().splitlines()[0]}"
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    static = int((re.search(r"(\d+) bytes smem", done.stderr) or [0, 0])[1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    threads = block if isinstance(block, int) else block[0] * (block[1] if len(block) > 1 else 1)
    blocks, warps = resident(capability, registers, threads, static + dynamic)
    return (
        f"compute capability {_words(capability)}: {registers} registers, {static + dynamic:,} bytes of shared "
        f"memory, {f'{spilled} bytes spilled' if spilled else 'no spills'}; {blocks} blocks a multiprocessor, "
        f"occupancy {100 * blocks * -(-threads // WARP) // warps} %"
    )


def resident(capability, registers, threads, shared):
    """(blocks that a multiprocessor holds at once, warps that it can hold at most)."""
    all_registers, warps, blocks, kib = MULTIPROCESSORS[capability[:2]]
    own = -(-threads // WARP)
    # a warp's registers come in units of 256
    by_registers = all_registers // (own * -(-registers * WARP // 256) * 256)
    return min(blocks, warps // own, by_registers, (kib << 10) // (shared + 1024)), warps
