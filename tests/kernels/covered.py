"""Tests of kernels that run nothing but what quicker ones run: covered.txt names them, the
exhaustive part has them.

    pytest -n 0 -p tests.kernels.covered tests/kernels -k "emulator or passes"        rewrites covered.txt

That takes half an hour. It notes for each test in the emulator which statements of numdiff.kernels
it reaches, which arms of their conditions, whether their loops turn not at all, once, twice or more
often, whether integers that they assign or are given are negative, 0, 1 or more, and in which
directions a grid has several blocks. Of all tests it chooses those that together show what all do
in the least time, always the one that adds most in a second: each statement, version and source of
a kernel among the cases of `numdiff kernels check`, the rest anywhere. Of what is left it names the
tests that take LONG, but of each test function one stays.
"""

import ast
import collections
import functools
import heapq
import pathlib
import sys
import time

import pytest

LONG = 0.03  # seconds
SHORT = 0.004  # what a test takes at least, as it is chosen
PATH = pathlib.Path(__file__).with_suffix(".txt")
CASES = "tests/kernels/test_check.py::test_every_kernel_passes"
NAME = __name__ if __name__ != "__main__" else "tests.kernels.covered"

reached, places, launched = {}, set(), set()  # {test: (places, seconds)}; of the test that runs


@functools.cache
def listed():
    """The ids of the tests that covered.txt names; none if it is being rewritten."""
    if any(NAME in argument for argument in sys.argv):
        return frozenset()
    return frozenset(PATH.read_text(encoding="utf-8").splitlines())


def is_covered(name):
    """Whether a case of the check is among them, by its name with its version's."""
    return f"{CASES}[{name.encode('unicode_escape').decode()}-shuffled]" in listed()


# Rewritten ----------------------------------------------------------------------------------------


def turns(place, values):
    """The values of a loop; notes how often it turns."""
    count = 0
    for value in values:
        count += 1
        yield value
    places.add((*place, min(count, 3)))


def note_numbers(place, numbers):
    """Notes of these numbers, as far as they are integers, whether they are negative, 0, 1 or more."""
    from numdiff.emulator.values import INTEGERS

    places.update(
        (*place, i, min(max(int(n), -1), 2))
        for i, n in enumerate(numbers)
        if n.__class__ in INTEGERS
    )


def flat(arguments):
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from flat(argument)
        else:
            yield argument


def pytest_configure(config):
    """The emulator's functions call `places.add` before each statement and in each arm, and
    `note_numbers` after each assignment; loops go over `turns`."""
    from numdiff.emulator.launch import Emulator, in_three
    from tests.kernels import statements

    class Probes(statements.Probes):
        def visit_For(self, node):
            self.generic_visit(node)
            place = ast.Constant((self.path, node.lineno, node.col_offset, "turns"))
            node.iter = ast.copy_location(
                ast.Call(ast.Name("__turns", ast.Load()), [place, node.iter], []), node.iter
            )
            return node

        def visit_Assign(self, node):
            self.generic_visit(node)
            names = [
                each.id
                for target in node.targets
                for each in getattr(target, "elts", [target])
                if isinstance(each, ast.Name)
            ]
            place = ast.Constant((self.path, node.lineno, node.col_offset, "numbers"))
            numbers = ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load())
            call = ast.Call(ast.Name("__numbers", ast.Load()), [place, numbers], [])
            return (
                [node, ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)]
                if names
                else node
            )

        def visit_If(self, node):
            has_else = bool(node.orelse)
            self.generic_visit(node)
            if not has_else:
                call = self.call(node)
                call.args = [ast.Constant((*call.args[0].value, "else"))]
                node.orelse = [ast.copy_location(ast.Expr(call), node)]
            return node

    helpers, launch = Emulator._helpers, Emulator.launch

    def noted(self, kernel, grid, block, *arguments, **named):
        code = getattr(kernel, "py_func", kernel).__code__
        place = code.co_filename, code.co_firstlineno
        launched.add(place)
        places.update(("grid", *place, i, n > 1) for i, n in enumerate(in_three(grid)))
        note_numbers(("given", *place), flat(arguments))
        return launch(self, kernel, grid, block, *arguments, **named)

    Emulator._helpers = lambda self: {
        **helpers(self),
        "__reached": places.add,
        "__turns": turns,
        "__numbers": note_numbers,
    }
    Emulator.launch = noted
    statements.Probes = Probes
    config.stack = statements.probed(places.add)
    config.stack.__enter__()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    places.clear()
    launched.clear()
    start = time.process_time()
    yield
    seconds, found = time.process_time() - start, set(places)
    if found and item.nodeid.startswith(CASES):
        case, version = (item.callspec.params[name] for name in ("case", "version"))
        found |= {
            (case.name, version),
            *launched,
            *(("check", *place) for place in found if len(place) == 3),
        }
    if found:
        reached[item.nodeid] = found, max(seconds, SHORT)


def chosen():
    """The tests that together reach all places."""
    left, found = set().union(*(places for places, _ in reached.values())), []
    heap = [(-len(places) / seconds, test) for test, (places, seconds) in reached.items()]
    heapq.heapify(heap)
    while left:
        _, test = heapq.heappop(heap)
        places, seconds = reached[test]
        if places & left:
            rate = -len(places & left) / seconds
            if heap and rate > heap[0][0]:
                heapq.heappush(heap, (rate, test))  # to be looked at again, when it is the best
                continue
            found.append(test)
            left -= places
    counts = collections.Counter(place for test in found for place in reached[test][0])
    # those that later ones have made needless
    for test in sorted(found, key=lambda test: -reached[test][1]):
        if all(counts[place] > 1 for place in reached[test][0]):
            found.remove(test)
            counts.subtract(reached[test][0])
    return set(found)


def pytest_sessionfinish(session):
    kept, functions, named = chosen(), collections.defaultdict(list), []
    for test in reached:
        functions[test.partition("[")[0]].append(test)
    for tests in functions.values():
        others = [test for test in tests if test not in kept]
        if len(others) == len(tests):
            others.remove(min(others, key=lambda test: reached[test][1]))
        named += [test for test in others if reached[test][1] >= LONG]
    PATH.write_text("".join(f"{test}\n" for test in sorted(named)), encoding="utf-8")
