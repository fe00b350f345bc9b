"""How the emulator's tests plant faults and look for them: launches, marked lines, copies of
kernels with a change."""

import importlib
import importlib.util
import pathlib
import sys

import pytest

from numdiff.emulator import Emulator, KernelFault
from numdiff.kernels.operation import OPERATIONS


def run(kernel, grid, block, *arguments, shared=0, cluster=1, **options):
    """Launch a kernel on an emulator with these options, which is returned."""
    machine = Emulator(**options)
    machine.launch(kernel, grid, block, *arguments, shared=shared, cluster=cluster)
    return machine


def faults_of(kernel, grid, block, *arguments, shared=0, **options):
    """The faults of a launch, which must have some."""
    with pytest.raises(KernelFault) as caught:
        run(kernel, grid, block, *arguments, shared=shared, **options)
    return caught.value.faults


def marked(file, mark):
    """Number of the one line of a file that ends in the comment `# <mark>`, or stands below it."""
    lines = pathlib.Path(file).read_text().splitlines()
    found = [n for n, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    assert len(found) == 1, (mark, found)
    return found[0] + lines[found[0] - 1].lstrip().startswith("#")


def listed(faults):
    return "\n".join(str(f) for f in faults)


def fault_at(faults, kind, file, line):
    """The fault of this kind at this line."""
    found = [f for f in faults if (f.kind, f.file, f.line) == (kind, str(file), line)]
    assert found, f"no {kind} at line {line} among:\n{listed(faults)}"
    return found[0]


def race_between(faults, file, *lines):
    """The race whose two sides are at these lines (one line: both are there), in whichever order
    they ran."""
    for fault in faults:
        if fault.kind == "race" and {fault.line, *(place.line for _, place in fault.others)} == set(
            lines
        ):
            assert fault.file == str(file)
            return fault
    raise AssertionError(f"no race between lines {lines} among:\n{listed(faults)}")


class PlantedCopies:
    """PlantedCopies of the project's modules with a change in them; their kernels take the places of the
    originals."""

    def __init__(self, folder):
        self.folder, self.undo = folder, []

    def plant(self, name, before, after, which=0):
        """Change the occurrence number `which` of `before`; returns (file, source lines) of the
        copy."""
        original = importlib.import_module(name)
        parts = pathlib.Path(original.__file__).read_text().split(before)
        assert len(parts) > which + 1, f"{name} has no {before!r}"
        source = before.join(parts[: which + 1]) + after + before.join(parts[which + 1 :])
        path = self.folder / f"{name.replace('.', '_')}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"{original.__package__}.planted", path)
        copy = importlib.util.module_from_spec(spec)
        known = dict(OPERATIONS)
        for operation in [o for o, record in OPERATIONS.items() if record.module == name]:
            del OPERATIONS[operation]  # the copy declares it again
        try:
            spec.loader.exec_module(copy)
        finally:
            OPERATIONS.clear()
            OPERATIONS.update(known)
        self._replace(
            {
                id(old): new
                for old, new in self._kernels(original, copy)
                if old.py_func.__module__ == name
            }
        )
        return str(path), source.splitlines()

    @staticmethod
    def _kernels(original, copy):
        for name, value in vars(original).items():
            other = vars(copy).get(name)
            if isinstance(value, dict) and isinstance(other, dict):
                yield from ((v, other[k]) for k, v in value.items() if hasattr(v, "py_func"))
            elif hasattr(value, "py_func"):
                yield value, other

    def _replace(self, news):
        versions = [vars(version) for record in OPERATIONS.values() for version in record.versions]
        for names in versions:
            self._replace_in(names, news)
        for module in [m for name, m in sys.modules.items() if name.startswith("numdiff.")]:
            for names in [
                vars(module),
                *(v for k, v in vars(module).items() if isinstance(v, dict) and k[:2] != "__"),
            ]:
                self._replace_in(names, news)

    def _replace_in(self, names, news):
        for name, value in list(names.items()):
            if id(value) in news:
                self.undo.append((names, name, value))
                names[name] = news[id(value)]

    def restore(self):
        for names, name, value in reversed(self.undo):
            names[name] = value


@pytest.fixture
def copies(tmp_path):
    made = PlantedCopies(tmp_path)
    yield made
    made.restore()
