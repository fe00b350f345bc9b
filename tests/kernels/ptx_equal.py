"""Which kernels a change leaves as they were: compare their PTX at another revision with the
working tree's.

    python -m tests.kernels.ptx_equal HEAD~3                   every kernel variant, for sm_80 and sm_90a
    python -m tests.kernels.ptx_equal HEAD~3 --only 'flash|mma'   those whose case or whose own name matches
    python -m tests.kernels.ptx_equal HEAD~3 --jobs 8          number of processes (default: the cores)

Kernel variants are what the cases of `numdiff kernels check` launch, and a training step and the
previews of every preset in every precision on an A100, an H100 and an H200. A kernel at one
revision belongs to that one at the other which the same case launches at the same place; names of
kernels and files do not matter. PTX is compared without names and debug information (`normalised`).
Prints one line for each pair that differs, with the result of ptxas for both: the same machine
code, or the counts of registers and spilled bytes. Exit code 1 if machine code differs, or a case
or launch is missing.

What has been compiled is kept in numdiff's cache folder under a digest of the source that it comes
from: of the kernel's file and of all that it imports, without comments, docstrings and paths. So a
second run compiles what has changed, and a file that only moves is not compiled again.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import difflib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import types
import zlib

CARDS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200")
PRECISIONS = ("fp32", "tf32", "fp16")
# of functions, parameters and memory
NAMES = re.compile(r"(?<![\w$.%])(?:_Z|_cudapy|cudapy|__numba)[\w$]*")
# .common: a word that Numba declares for each device function, inlined or not, and that nothing
# reads
DEBUG = re.compile(
    r"^\s*(?://|\.file\b|\.loc\b|\.section\b|\.common \.global \.align 8 \.u64 _ZN08NumbaEnv|$)"
)
KEPT = 3  # of the files' format: what is kept under another number is not found


def normalised(text):
    """PTX whose names are numbers in the order in which they are first met, without comments, file
    names and lines."""
    numbers = collections.defaultdict(itertools.count().__next__)
    kept = (line.rstrip() for line in text.splitlines() if not DEBUG.match(line))
    return "\n".join(NAMES.sub(lambda name: f"name{numbers[name.group()]}", line) for line in kept)


def paired(before, after):
    """[(launch or None, launch or None)] of the launches (module, name, types) of one case at two
    revisions.

    One by one where there are as many; else those belong together whose arguments' types do, in
    their order, and of the others those of one name. A tuple counts as its elements: so Numba
    passes it.
    """

    def elements(launch):
        return re.sub(r"[\w.]*\(|\)", "", ",".join(launch[2]))

    if len(before) == len(after):
        return list(zip(before, after, strict=True))
    blocks = difflib.SequenceMatcher(
        None, list(map(elements, before)), list(map(elements, after)), autojunk=False
    )
    pairs = []
    for tag, a, b, c, d in blocks.get_opcodes():
        if tag == "equal":
            pairs += zip(before[a:b], after[c:d], strict=True)
        else:
            pairs += [(launch, None) for launch in before[a:b]] + [
                (None, launch) for launch in after[c:d]
            ]
    new = [launch for one, launch in pairs if one is None]
    for i, (one, other) in enumerate(pairs):
        namesake = (
            next((launch for launch in new if launch[1] == one[1]), None) if other is None else None
        )
        if namesake is not None:
            new.remove(namesake)
            pairs[i] = one, namesake
    return [pair for pair in pairs if pair[0] is not None or pair[1] in new]


# The source of a kernel ---------------------------------------------------------------------------


class SourceTree:
    """Digests of the modules of a package, each with all that it imports of the package.

    A module counts by its content alone, not by its path; of `from .device import name`, with a
    package's __init__.py that only hands the name on, the module counts that has it.
    """

    def __init__(self, package):
        package = pathlib.Path(package)
        self.paths = {}
        for path in sorted(package.rglob("*.py")):
            parts = (package.name, *path.relative_to(package).with_suffix("").parts)
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.texts = {
            module: path.read_text(encoding="utf-8") for module, path in self.paths.items()
        }
        self.read, self.digest = functools.cache(self.read), functools.cache(self.digest)

    def read(self, module):
        """(its statements as text, without docstrings and imports from the package; [(name, module)
        imported])."""
        imports, path = [], self.paths[module]
        owner = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]

        class Own(ast.NodeTransformer):
            def visit_ImportFrom(_, node):
                base = ".".join(
                    [
                        *(owner[: len(owner) - node.level + 1] if node.level else ()),
                        *filter(None, [node.module]),
                    ]
                )
                if base not in self.paths:
                    return node
                imports.extend(
                    (alias.asname or alias.name, self.home(base, alias.name))
                    for alias in node.names
                )
                return ast.parse(repr([(alias.name, alias.asname) for alias in node.names])).body[0]

            def visit_Import(_, node):
                imports.extend(
                    (alias.name, alias.name) for alias in node.names if alias.name in self.paths
                )
                return node

            def visit_Expr(_, node):
                return (
                    None
                    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
                    else node
                )

        tree = ast.parse(self.texts[module])
        return ast.dump(Own().visit(tree)), imports

    def home(self, module, name):
        """The module that has `name`, which is imported from this one."""
        if f"{module}.{name}" in self.paths:
            return f"{module}.{name}"
        if self.paths[module].stem == "__init__":
            return next((home for bound, home in self.read(module)[1] if bound == name), module)
        return module

    def digest(self, module):
        """Of a module and all below it. A circle is cut where it closes: its files are all counted
        by then."""
        known, open_modules = {}, set()

        def of(module):
            if module in open_modules:
                return "circle"
            if module not in known:
                open_modules.add(module)
                text, imports = self.read(module)
                known[module] = hash_of(text, *(of(home) for _, home in imports))
                open_modules.discard(module)
            return known[module]

        return of(module)


def hash_of(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


# At one revision: a process whose numdiff is that one's -------------------------------------------


def collect_launches():
    """({case: [Key]} in the order of the first launches, {Key: kernel}) of all cases and presets;
    nothing is run."""
    from numdiff.device import planned
    from numdiff.device.compiler import key_of
    from numdiff.device.ptx import PtxDevice

    try:
        from numdiff.extras.kernel_check.run import CASES, run_once
    except ModuleNotFoundError:  # a revision before the check was an extra
        from numdiff.kernels.check import CASES
        from numdiff.kernels.check.run import run_once
    from numdiff.training.options import PRESETS, resolve
    from numdiff.training.plan import Described, plan_run

    kernels, launches = {}, {}

    def note(case, kernel, arguments):
        key = key_of(kernel, arguments)
        kernels.setdefault(key, kernel)
        launches.setdefault(case, {})[key] = None

    class Recorder(PtxDevice):
        def launch(self, kernel, grid, block, arguments, *_, **__):
            note(self.case, kernel, arguments)

    for case in CASES:
        for version in case.versions:
            recorder = Recorder()
            recorder.case = " ".join(
                filter(None, (case.name, case.label, version and f"v{version}"))
            )
            run_once(case, version, recorder)

    class Planned(planned.Planned):
        def launch(self, kernel, grid, block, arguments, *_, **__):
            note(label, kernel, arguments)

    planned.Planned = Planned
    cards = [card for card in planned.CARDS if card.device_name in CARDS]
    for model, presets in PRESETS.items():
        for preset, precision, card in itertools.product(presets, PRECISIONS, cards):
            options = resolve(
                {"model": model, "preset": preset, "precision": precision}, card.capability
            )
            label = f"train {model} {preset} {precision} {card.device_name}"
            plan_run(
                options, Described(options.image_size, 3, 9 if options.class_cond else None), card
            )
    return {case: list(keys) for case, keys in launches.items()}, kernels


def made_of(function, sources, seen):
    """[text] of a kernel's function and of those that it calls: their files' digests, and the plain
    values that they know by name, which may come from their factory (its arguments, a copy's
    globals)."""
    seen.add(function)
    cells = zip(
        function.__code__.co_freevars,
        (cell.cell_contents for cell in function.__closure__ or ()),
        strict=True,
    )
    known = {name: function.__globals__.get(name) for name in function.__code__.co_names} | dict(
        cells
    )
    texts = [
        sources.digest(name)
        for name in (function.__module__, function.__globals__.get("__name__"))
        if name in sources.paths
    ]
    for name, value in known.items():
        inner = getattr(value, "py_func", value)
        if isinstance(inner, types.FunctionType):
            texts += made_of(inner, sources, seen) if inner not in seen else []
        elif value is not None and not hasattr(value, "__dict__") and not callable(value):
            texts.append(f"{name} = {value!r}")
    return texts


def file_of(key, kernel, sources, capabilities):
    """Where a kernel's PTX is kept."""
    from numdiff.device import kernel_cache

    text = hash_of(
        str(KEPT),
        *made_of(kernel.py_func, sources, set()),
        sources.digest("numdiff.device.ptx"),
        key.name,
        *key.types,
        repr(capabilities),
        kernel_cache.toolchain(),
        sys.version,
    )
    return pathlib.Path(kernel_cache.cache_directory()).parent / "ptx-equal" / text[:2] / text[2:]


def keep_ptx(key):
    """Compile a kernel and keep what comes out; says why where that fails."""
    from numdiff.device import compiler, ptx, quick_types

    kernel, path = WORK[key]
    try:
        with quick_types.quick_types():
            texts = ptx.compile_for(
                kernel, tuple(map(compiler.type_of_word, key.types)), ptx.capabilities_of(kernel)
            )
    except Exception as fault:  # this kernel's, not the next one's
        return " ".join(f"{type(fault).__name__}: {fault}".split())[:200]
    texts = {
        "sm_" + "".join(map(str, capability)): normalised(text)
        for capability, text in texts.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(zlib.compress(json.dumps(texts).encode(), 1))
    unfinished.replace(path)


WORK = {}  # {Key: (kernel, its file)}, for processes that are forked from this one


def work(tree, jobs):
    """Says what is launched, as a line of JSON, reads which of it is wanted, and answers with {key:
    its file}, or why there is none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    import numdiff

    package = pathlib.Path(numdiff.__file__).resolve().parent
    assert package.parent == pathlib.Path(tree).resolve(), package
    sources = SourceTree(package)  # before its modules are imported: they may be edited
    from numdiff.device.ptx import capabilities_of

    launches, kernels = collect_launches()
    print(json.dumps(launches), file=answers, flush=True)
    asked = sys.stdin.readline()
    if not asked:  # the other tree could not be read
        return
    wanted = {tuple(map(hashable, key)) for key in json.loads(asked)}
    for key, kernel in kernels.items():
        if key in wanted:
            WORK[key] = kernel, file_of(key, kernel, sources, capabilities_of(kernel))
    missing = [key for key, (_, path) in WORK.items() if not path.exists()]
    print(
        f"{tree}: {len(WORK)} kernels, {len(missing)} of them to compile",
        file=sys.stderr,
        flush=True,
    )
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        faults = {
            key: fault
            for key, fault in zip(missing, pool.map(keep_ptx, missing), strict=True)
            if fault
        }
    print(
        json.dumps([(key, str(path), faults.get(key)) for key, (_, path) in WORK.items()]),
        file=answers,
        flush=True,
    )


def hashable(item):
    return tuple(item) if isinstance(item, list) else item


# Both ---------------------------------------------------------------------------------------------


class GitTree:
    """A process for one revision's tree. launches: {case: [(module, name, types)]}."""

    def __init__(self, folder, jobs):
        self.process = subprocess.Popen(
            [
                sys.executable,
                pathlib.Path(__file__).resolve(),
                "--tree",
                folder,
                "--jobs",
                str(jobs),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                "ptx_equal: a tree's kernels could not be collected; what it said stands above"
            )
        return json.loads(line)

    def collect(self):
        self.launches = {
            case: [tuple(map(hashable, key)) for key in keys] for case, keys in self.read().items()
        }
        return self.launches

    def compile(self, keys):
        """{key: {architecture: PTX}}; a fault stands in its place, under its own name."""
        print(json.dumps(list(keys)), file=self.process.stdin, flush=True)
        self.files = {tuple(map(hashable, key)): (path, fault) for key, path, fault in self.read()}

    @functools.lru_cache(8)  # noqa: B019 - two trees, which live as long as the process
    def ptx(self, key):
        path, fault = self.files[key]
        return (
            {"": fault} if fault else json.loads(zlib.decompress(pathlib.Path(path).read_bytes()))
        )


def assembled(text, arch):
    """(machine code, "n registers", and spilled bytes if there are any) that ptxas makes of a PTX
    text."""
    from numdiff.device.ptxas import find_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, made = pathlib.Path(folder) / "kernel.ptx", pathlib.Path(folder) / "kernel.cubin"
        source.write_text(text)
        done = subprocess.run(
            [find_ptxas(), "-v", "-arch", arch, source, "-o", made], capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        words = [f"{sum(map(int, re.findall(r'Used ([0-9]+) registers', said)))} registers"]
        if spilled := sum(map(int, re.findall(r"([0-9]+) bytes spill", said))):
            words.append(f"{spilled} bytes spilled")
        # wgmma that waits for each other, say
        words += sorted(set(re.findall(r"\(C75[0-9]*\)", said)))
        return instructions(made.read_bytes()) if made.exists() else said, " and ".join(words)


def instructions(cubin):
    """The machine code of a cubin, an ELF file: its sections .text…, without the names around them."""
    start, (size, count, names) = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        struct.unpack_from("<3H", cubin, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + n * size) for n in range(count)]
    at = sections[names][4]
    return [
        cubin[offset : offset + length]
        for name, *_, offset, length in sections
        if cubin[at + name :].startswith(b".text.")
    ]


SAME = "the same machine code"


def assembled_difference(one, other, arch):
    """What ptxas makes of two texts that differ: `SAME`, or their registers and spills."""
    from numdiff.device.ptxas import find_ptxas

    if not find_ptxas():
        return ""
    (before, said), (after, now) = assembled(one, arch), assembled(other, arch)
    return f" ({SAME if before == after else said if said == now else f'{said}, {now} after'})"


def difference(before, after):
    """What differs between two {architecture: PTX}, in words; "" for nothing."""
    said = []
    for arch in sorted({*before, *after}):
        one, other = before.get(arch), after.get(arch)
        if not arch:
            said.append(f"cannot be compiled: {other or 'before, ' + one}")
        elif one is None or other is None:
            if before.keys() & after.keys():
                said.append(f"{arch} {'before' if other is None else 'after'} only")
        elif one != other:
            lines, now = one.splitlines(), other.splitlines()
            first = next(
                (i for i, (a, b) in enumerate(itertools.zip_longest(lines, now)) if a != b), 0
            )
            said.append(
                f"{arch} from line {first + 1} of {len(lines)}, {len(now)} after"
                f"{assembled_difference(one, other, arch)}"
            )
    return "; ".join(said)


def compare(before, after, only, out=print):
    """Compare two trees that have collected; returns (pairs compared, faults: what differs or has
    gone)."""
    places, gone, new = collections.defaultdict(list), [], []
    for case in dict.fromkeys((*before.launches, *after.launches)):
        for one, other in paired(before.launches.get(case, []), after.launches.get(case, [])):
            if only and not re.search(
                only, "\n".join((case, *(f"{k[0]}.{k[1]}" for k in (one, other) if k)))
            ):
                continue
            if one and other:
                places[one, other].append(case)
            else:
                (gone if one else new).append((case, f"{(one or other)[0]}.{(one or other)[1]}"))
    for tree, side in ((before, 0), (after, 1)):
        tree.compile(dict.fromkeys(pair[side] for pair in places))
    faults = 0
    for (one, other), cases in places.items():
        if before.files[one][0] == after.files[other][0] and not before.files[one][1]:
            continue  # from the same source
        if said := difference(before.ptx(one), after.ptx(other)):
            name, now = (".".join(key[:2]) for key in (one, other))
            more = f" and {len(cases) - 1} more" if cases[1:] else ""
            out(f"differs  {name}{'' if name == now else f' -> {now}'} ({cases[0]}{more}): {said}")
            faults += any(SAME not in each for each in said.split("; "))
    for word, found in (("gone    ", gone), ("new     ", new)):
        for case, name in found:
            out(f"{word} {name} ({case})")
    return len(places), faults + len(gone)


@contextlib.contextmanager
def revision(name):
    """The folder of a temporary git worktree that has this revision."""
    with tempfile.TemporaryDirectory(prefix="ptx-equal-") as folder:
        tree = pathlib.Path(folder).resolve() / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, name], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.ptx_equal", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("revision", nargs="?")
    parser.add_argument(
        "--only", metavar="PATTERN", help="a regular expression, for cases and kernels"
    )
    parser.add_argument("--jobs", type=int, metavar="N", default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tree", help=argparse.SUPPRESS)  # what this program starts itself with
    given = parser.parse_args()
    if given.tree:
        del sys.path[0]  # this file's folder
        return work(given.tree, given.jobs)
    if not given.revision:
        parser.error("say which REVISION to compare with")
    with revision(given.revision) as folder:
        before, after = (
            GitTree(f, given.jobs) for f in (folder, pathlib.Path(__file__).resolve().parents[2])
        )
        before.collect(), after.collect()
        pairs, faults = compare(before, after, given.only)
    print(
        f"{pairs} kernels compared with {given.revision}: "
        f"{'machine code as before' if not faults else f'{faults} differ or are gone'}"
    )
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
