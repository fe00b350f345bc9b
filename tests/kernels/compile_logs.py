"""What ptxas says of the tensor-core kernels, and of those that keep rows in registers, compiled
without a GPU.

    python -m tests.kernels.compile_logs                       every one, for the architectures that it is for
    python -m tests.kernels.compile_logs conv2d.hopper. attention  those whose name has one of these words

One line a kernel and architecture: registers, and what is wrong: bytes spilled or on the stack,
advisories (C75xx), float64. Exit code 1 where anything is. The tests read the same logs
(test_compile_logs.py).
"""

import concurrent.futures
import functools
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from numdiff.device.ada import for_ada, lacks_halves
from numdiff.device.compiler import type_of_word, word_of
from numdiff.device.ptx import PtxDevice, capabilities_of
from numdiff.device.ptxas import find_ptxas
from numdiff.device.requires import supports
from numdiff.device.turing import for_turing
from numdiff.extras.kernel_check.run import CASES, run_once
from tests import kept
from tests.kernels.ptx_equal import normalised

# Limited by memory, with a row or more in registers: a spill would go there and back.
IN_REGISTERS = (
    "groupnorm.clusters.",
    "groupnorm.one_pass",
    "norms.",
    "numdiff.extras.muon.update.",
    "numdiff.extras.layer_norm.",
    "numdiff.extras.rms_norm.",
    "transformer.adaln.",
    "transformer.gate_adaln.",
    "numdiff.extras.qk_norm_rope.",
    "transformer.swiglu.",
    "numdiff.extras.post_hoc_ema.power_ema.",
)
# files whose kernels take most of the time: they are unrolled, or many
LONG = (
    "attention.",
    "conv2d.implicit",
    "fuse.chain.",
    "groupnorm.",
    "norms.",
    "linear.group.",
    "numdiff.extras.im2win.",
    "numdiff.extras.layer_norm.",
    "numdiff.extras.levels.attention.",
    "numdiff.extras.tf32.",
    "numdiff.extras.sla.",
    "matmul.register_tiles.",
    "matmul.vectorised.",
    "numdiff.extras.fp8.",
    "transformer.adaln.",
    "transformer.gate",
    "numdiff.extras.qk_norm_rope.",
)
TURING, ADA = (7, 5), (8, 9)
# cards that run what is compiled for 8.0, with fewer bytes of shared memory
LATER = (8, 6), (8, 9), (12, 0)
# cards that run what is compiled for 8.9; on 9.0 and 10.0 `mma.sync` multiplies E4M3 as float16
LATER_FP8 = (10, 0), (12, 0)
# gradients of convolutions, written for 8.0, of which ptxas spills 8 bytes a thread for 12.0
SPILLING = (
    "conv2d.mma_halo_gradient.conv2d_weight_gradient_kernel_v4_halo_16_3",
    "conv2d.narrow_half.weight_gradient.conv2d_narrow_weight_gradient_kernel_half",
)
SPILLING_FP8 = "numdiff.extras.fp8.mma.gemm_mma_128x128x32x4_nt_e4m3_"  # likewise for 9.0 and 10.0
CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


class LogRecorder(PtxDevice):
    """Compiles nothing: notes which kernels are launched, with what types."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels = kernels

    def launch(self, kernel, grid, block, args, shared=0, cluster=1):
        signatures = self.kernels.setdefault(name_of(kernel), (kernel, {}))[1]
        signatures[tuple(type_of_word(word_of(a)) for a in args)] = None


def name_of(kernel):
    return f"{kernel.py_func.__module__}.{kernel.py_func.__name__}".removeprefix("numdiff.kernels.")


@functools.cache
def launches():
    """{name: (kernel, {types of its arguments: None, …})} of all kernels that the check's cases
    launch.

    Nothing runs and nothing is compiled.
    """
    found = {}
    for case in CASES:
        for version in case.versions:
            run_once(case, version, LogRecorder(found))
    return dict(sorted(found.items()))


@functools.cache
def kernels():
    """{name: (kernel, types of its arguments)}: of each the first."""
    return {
        name: (kernel, next(iter(signatures))) for name, (kernel, signatures) in launches().items()
    }


@functools.cache
def kernels_in_registers():
    """Those of IN_REGISTERS from other files, with all types that they are launched with."""
    return {
        name if i == 0 else f"{name}, types {i + 1}": (kernel, signature)
        for name, (kernel, signatures) in launches().items()
        if name.startswith(IN_REGISTERS) and name not in tensor_core_kernels()
        for i, signature in enumerate(signatures)
    }


def widest_in_registers():
    """Names of `kernels_in_registers`: the last of each text, which keeps most there. The command
    has all."""
    texts = {}
    for name, (kernel, _) in sorted(
        kernels_in_registers().items(), key=lambda item: numbered(item[0])
    ):
        code = kernel.py_func.__code__
        texts.setdefault((code.co_filename, code.co_firstlineno), []).append(name)
    return [names[-1] for names in texts.values()]


def widest(names):
    """The kernel names of the widest variant of each text, which keeps most in registers. The
    command has all."""
    return [variants[0] for variants in by_text(names)]


def covering(items, parts_of):
    """Items that together have all parts of the items, `parts_of`(item) being a set; the richest
    come first."""
    parts = {item: parts_of(item) for item in items}
    left, chosen = set().union(*parts.values()), []
    while left:
        item = max(items, key=lambda item: len(parts[item] & left))
        left -= parts[item]
        chosen.append(item)
    return chosen


def one_of_each_source():
    """The names of kernels no two of which come from the same lines."""
    return list(
        {
            kernel.py_func.__code__.co_code
            + repr(
                (kernel.py_func.__code__.co_filename, kernel.py_func.__code__.co_firstlineno)
            ).encode(): name
            for name, (kernel, _) in reversed(kernels().items())
        }.values()
    )[::-1]


def one_of_each_folder(names):
    """The last kernel name of each folder, and of each file outside the folders: mostly the longest
    text. A generated text (versions 1 and 2 of an elementwise operation) is used only if there is
    no other."""
    made = {name: kernels()[name][0].py_func.__code__.co_filename.startswith("<") for name in names}
    return [
        *{
            name.partition(".")[0]: name for name in sorted(names, key=made.get, reverse=True)
        }.values()
    ]


def by_text(names):
    """Lists of names of kernels that come from the same lines, the widest first."""
    texts, known = {}, {**kernels_in_registers(), **kernels()}
    for name in sorted(names, key=numbered, reverse=True):
        code = known[name][0].py_func.__code__
        texts.setdefault((code.co_filename, code.co_firstlineno), []).append(name)
    return texts.values()


@functools.cache
def names_of_tests():
    """{what tests are made of: [name of a kernel, …]}. Within tests it is kept, as every worker
    asks for it, and that takes two seconds."""
    return kept.said(
        lambda: {
            "one of each folder": one_of_each_folder(
                [
                    name
                    for name in one_of_each_source()
                    if name not in tensor_core_kernels() and not name.startswith(LONG)
                ]
            ),
            "variants": sorted(set(widest(kernels())) - set(widest(tensor_core_kernels()))),
            "logs": [*widest(tensor_core_kernels()), *widest_in_registers()],
            "later": widest(tensor_core_kernels()),
            "left out": sorted(kernels().keys() - set(widest(kernels()))),
            "tf32": [name for name in tensor_core_kernels() if "_tf32_" in name],
        },
        kept.whole_package(),
        pathlib.Path(__file__).read_text(),
    )


def is_left_out(kernel):
    """Whether `widest` leaves a kernel out."""
    return name_of(kernel) in names_of_tests()["left out"]


def numbered(name):
    """A key by which v2_10 comes after v2_9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


# tiles of matmul/mma.py of which Turing's shared memory holds two stages
MANY_STAGES = re.compile(r"gemm_mma_\d+x\d+x\d+x[34]_")


@functools.cache
def tensor_core_kernels():
    """Those from files that name mma."""
    return {
        name: item
        for name, item in kernels().items()
        if uses_tensor_cores(item[0].py_func.__module__)
    }


@functools.cache
def uses_tensor_cores(module):
    return "mma" in inspect.getsource(sys.modules[module])


def ptx_of(name):
    """{capability: PTX} of a kernel, for the capabilities that it is for, as `PtxDevice.launch`
    compiles it, and for Turing and Ada; of one without tensor cores for the last."""
    kernel, signature = {**kernels_in_registers(), **kernels()}[name]
    capabilities = capabilities_of(kernel)
    if name not in tensor_core_kernels():
        return PtxDevice.compile(kernel, signature, capabilities[-1:])
    turing = (TURING,) if supports(TURING, kernel) and not MANY_STAGES.search(name) else ()
    texts = PtxDevice.compile(kernel, signature, (*turing, *capabilities))
    if lacks_halves(ADA, kernel):
        (text,) = PtxDevice.compile(kernel, signature, (ADA,)).values()
        texts[ADA] = for_ada(text)
    return texts | {capability: for_turing(texts[capability]) for capability in turing}


def architecture(capability):
    return "sm_" + "".join(map(str, capability))


def assemble(text, capability):
    """What ptxas says of a PTX text: (registers, the lines that tell of something wrong); within
    tests it is kept."""
    # kept.py knows the versions of the other compilers
    version = str(os.path.getsize(find_ptxas()))
    return tuple(
        kept.said(lambda: ptxas_log(text, capability), version, normalised(text), repr(capability))
    )


def ptxas_log(text, capability):
    """`assemble`, by ptxas itself."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(text)
        done = subprocess.run(
            [
                find_ptxas(),
                "-v",
                "-arch",
                architecture(capability),
                source,
                "-o",
                source.with_suffix(".cubin"),
            ],
            capture_output=True,
            text=True,
        )
    said = done.stdout + done.stderr
    wrong = [] if done.returncode == 0 else [said.strip().splitlines()[-1]]
    wrong += [
        line.strip()
        for line in said.splitlines()
        if "spill" in line and CLEAN not in line or "(C75" in line
    ]
    return sum(map(int, re.findall(r"Used (\d+) registers", said))), wrong


def compile_log(name, later=LATER):
    """[(architecture, registers, what is wrong, "" for nothing)] of a kernel; what is for 8.0 is
    assembled for `later`, too."""
    logs = []
    for capability, text in ptx_of(name).items():
        others = {(8, 0): later, ADA: LATER_FP8}.get(capability, ())
        for target in (capability, *others):
            registers, wrong = assemble(text, target)
            if (
                target == (12, 0)
                and name.startswith(SPILLING)
                or target[:2] in ((9, 0), (10, 0))
                and name.startswith(SPILLING_FP8)
            ):
                wrong = [line for line in wrong if not is_small_spill(line)]
            wrong = [*wrong, *["uses float64"] * (".f64" in text)]
            logs.append((architecture(target), registers, "; ".join(wrong)))
    return logs


def is_small_spill(line):
    """Whether ptxas spills at most 16 bytes a thread."""
    found = re.fullmatch(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
    )
    return found is not None and max(map(int, found.groups())) <= 16


def main():
    words = sys.argv[1:]
    names = [
        name
        for name in (*tensor_core_kernels(), *kernels_in_registers())
        if not words or any(word in name for word in words)
    ]
    faults = 0
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, logs in zip(names, pool.map(compile_log, names), strict=True):
            for arch, registers, wrong in logs:
                print(
                    f"{name:80} {arch:7} {registers:3d} registers  {wrong or 'clean'}", flush=True
                )
                faults += bool(wrong)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
