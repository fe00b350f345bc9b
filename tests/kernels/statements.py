"""Which statements of the kernels' texts no case of the first command reaches, but one of the
exhaustive part does.

    python -m tests.kernels.statements                 all cases of `numdiff kernels check`, in about 15 minutes
    python -m tests.kernels.statements sla depthwise   those of these operations, and of operations named after them

Two specialisations of one text are two programs: a statement under `if HS % 16` is in no kernel of
another head size. So a case may go to the exhaustive part (REPEATED in test_check.py) only if
another case, or another test of the operation, reaches its statements. Cases that alone reach one
are listed in ALONE. This prints the statements in question by file and line, an arm of `a if b else
c` as one, and the quickest cases that together reach them.
"""

import ast
import collections
import contextlib
import sys
import time

from numdiff.emulator import rewrite
from numdiff.extras.kernel_check import run as checking
from tests.kernels.test_check import repeats


class Probes(ast.NodeTransformer):
    """Puts `__reached(place)` before each statement, and into both arms of a conditional
    expression."""

    def __init__(self, path):
        self.path = path

    def call(self, node):
        place = ast.Constant((self.path, node.lineno, node.col_offset))
        return ast.copy_location(ast.Call(ast.Name("__reached", ast.Load()), [place], []), node)

    def visit_IfExp(self, node):
        self.generic_visit(node)
        node.body, node.orelse = (
            ast.copy_location(ast.BoolOp(ast.Or(), [self.call(arm), arm]), arm)
            for arm in (node.body, node.orelse)
        )
        return node

    def generic_visit(self, node):
        super().generic_visit(node)
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(
                    node,
                    name,
                    [
                        each
                        for statement in block
                        for each in (
                            ast.copy_location(ast.Expr(self.call(statement)), statement),
                            statement,
                        )
                    ],
                )
        return node


@contextlib.contextmanager
def probed(reached):
    """Context: what the emulator runs of numdiff.kernels calls reached(place)."""
    path = None

    def finish(tree):
        names = finished(tree)
        if path and ("/numdiff/kernels/" in path or "/numdiff/extras/" in path):
            Probes(path.rpartition("/numdiff/")[2]).visit(tree)
            ast.fix_missing_locations(tree)
        return names

    def rewritten(function, *more):
        nonlocal path
        path = function.__code__.co_filename
        return before(function, *more)

    before, finished, linking = (
        rewrite.rewrite,
        rewrite.finish,
        sys.modules["numdiff.emulator.linking"],
    )
    machine = checking.get_backend("emulator").machine
    rewrite.finish = finish
    linking.rewrite, machine.helpers["__reached"] = rewritten, reached
    try:
        yield
    finally:
        rewrite.finish, linking.rewrite = finished, before


def reached_by(pairs):
    """{(case, version): (places, seconds)}."""
    found, places = {}, set()
    with probed(lambda place: places.add(place)):
        for case, version in pairs:
            places.clear()
            start = time.process_time()
            outcome = checking.check_case(case, version, "emulator", ("shuffled",))
            assert outcome.passed, f"{outcome.name}: {outcome.fault or outcome.error}"
            found[case.name, case.label, version] = set(places), time.process_time() - start
    return found


def main():
    pairs = [
        (case, version) for case in checking.cases_named(sys.argv[1:]) for version in case.versions
    ]
    known = set().union(
        *(places for places, _ in reached_by(p for p in pairs if not repeats(*p)).values())
    )
    moved = reached_by(p for p in pairs if repeats(*p) and not p[0].only_compiled)
    missing = set().union(*(places for places, _ in moved.values())) - known
    files = collections.defaultdict(set)
    for path, line, _ in missing:
        files[path].add(line)
    for path, lines in sorted(files.items()):
        print(f"{path}: {', '.join(map(str, sorted(lines)))}")
    while missing:
        name, label, version = best = max(
            moved, key=lambda key: len(moved[key][0] & missing) / moved[key][1]
        )
        print(f"{moved[best][1]:6.1f} s  {name}: {label} v{version}")
        missing -= moved[best][0]


if __name__ == "__main__":
    main()
