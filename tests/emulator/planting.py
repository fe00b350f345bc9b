"""How the emulator's tests plant faults and look for them: launches, marked lines, copies of
kernels with a change."""

import importlib
import importlib.util
import inspect
import pathlib
import sys

import pytest

from numdiff.device.specialise import Variants
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


def line_with(path, text):
    """Number of the one line of a file that contains `text`."""
    lines = pathlib.Path(path).read_text().splitlines()
    (found,) = (n for n, line in enumerate(lines, 1) if text in line)
    return found


def changed_copy(folder, module, changes):
    """(a copy of a module with changes [(before, after)], the path of its file)."""
    source = inspect.getsource(module)
    for before, after in changes:
        assert source.count(before) == 1, (before, source.count(before))
        source = source.replace(before, after)
    path = folder / f"planted_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.{path.stem}", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy, path


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
    """Copies of the project's modules with a change in them; their kernels take the places of the
    originals. copy: the last module."""

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
        self.copy = copy
        self._replace(
            {id(old): new for old, new in self._kernels(original, copy) if old is not new}
        )
        return str(path), source.splitlines()

    @staticmethod
    def _kernels(original, copy):
        for name, value in vars(original).items():
            other = vars(copy).get(name)
            if hasattr(value, "py_func") or isinstance(value, Variants):
                yield value, other
            elif isinstance(value, dict) and isinstance(other, dict):
                yield from ((v, other[k]) for k, v in value.items() if hasattr(v, "py_func"))

    def _replace(self, news):
        versions = [vars(version) for record in OPERATIONS.values() for version in record.versions]
        for names in versions:
            self._replace_in(names, news)
        for module in [m for name, m in sys.modules.items() if name.startswith("numdiff.")]:
            self._replace_in(vars(module), news)
            for name, value in vars(module).items():
                # not of Variants, whose values are made when they are looked at
                if type(value) is dict and name[:2] != "__":
                    self._replace_in(value, news)

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
