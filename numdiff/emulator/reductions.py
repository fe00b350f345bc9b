"""Loops that only add up what they read from arrays: NumPy computes all of their iterations at once.

    for k in range(n):              __r = range(n)
        total += x[k] * y[k]        __n = len(__r)
                                    if __n >= LEAST and the classes and accesses are as expected:
                                        __x, __y = __span(x, 0, n - 1, …), __span(y, 0, n - 1, …)
                                        total, k = __sum(total, __x * __y), n - 1
                                    else:
                                        the loop itself

A loop is a `Reduction` if its variable runs over a `range` of signed integers, and each statement of
its body is one of three. `name = index`: an integer. `name = value` or `total += value`: a value is a
product, a sum or a difference of float32 elements, of names and of other values. Each index must be
affine in the loop's variable, so that the first and the last one bound all others.

`Spans` gives the elements. The results are those of the loop: each product and each sum is rounded
to float32, and the sums are taken in the order of the loop. A span without a fault is recorded as
one read of the thread. Where anything is unusual (an index out of bounds, an element that was never
written, a write since the last barrier, a copy in flight), there is no span: the loop runs, and
reports what it finds.
"""

import ast
import copy

import numpy as np

from .arrays import CheckedArray
from .integers import LARGEST, UNKNOWN, cast_named
from .values import bfloat16, float32

LEAST = 8  # iterations of a loop that are worth the calls of NumPy: one iteration costs about a fifth of them
_CONVERTED = frozenset(
    {np.float16, np.float64, bfloat16} - {None}
)  # elements that `float32(…)` converts


# Recognising a loop -------------------------------------------------------------------------------


class NotReduced(Exception):
    """The loop is not a `Reduction`."""


class Replaced(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, by):
        self.by = by

    def visit_Name(self, node):
        return copy.deepcopy(self.by[node.id]) if node.id in self.by else node


class Reduction:
    """A loop that NumPy can compute, as the expressions that do so.

    Raises `NotReduced` if the loop is none.
    """

    def __init__(self, rewriter, loop):
        self.rewriter, self.integers = rewriter, rewriter.integers
        self.variable = loop.target.id
        self.indices = {loop.target.id: ast.Name(loop.target.id, ast.Load())}  # by loop.target.id
        self.values = {}  # name -> the name of the array of its values
        self.spans = []  # (name of the array, node of the call)
        self.singles = []  # nodes that must be a float32
        self.sums, self.fast = [], []  # names of accumulators; statements
        self.first, self.last, self.count = (rewriter.temporary() for _ in range(3))
        self.assigned = {loop.target.id}
        for statement in loop.body:
            self.assigned.add(self._target(statement))
        if len(self.assigned) != len(loop.body) + 1:
            raise NotReduced
        for statement in loop.body:
            self._take(statement)
        if not self.sums or not self.spans:
            raise NotReduced
        self._set(self.variable, ast.Name(self.last, ast.Load()), loop)

    @staticmethod
    def _target(statement):
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            target = statement.target
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            (target,) = statement.targets
        else:
            raise NotReduced
        if not isinstance(target, ast.Name):
            raise NotReduced
        return target.id

    def _take(self, statement):
        name = self._target(statement)
        if isinstance(statement, ast.AugAssign):
            value = self.array(statement.value)
            if isinstance(value, ast.Name):  # `__sum` changes what it is given
                value = ast.Call(ast.Attribute(value, "copy", ast.Load()), [], [])
            total = ast.Name(name, ast.Load())
            self.sums.append(name)
            self.singles.append(total)
            self._set(name, ast.Call(ast.Name("__sum", ast.Load()), [total, value], []), statement)
        elif self.is_index(statement.value):
            self.indices[name] = self.replaced(statement.value, self.indices)
            self._set(name, self.index(statement.value, self.last), statement)
        else:
            made = self.rewriter.temporary()
            self._set(made, self.array(statement.value), statement)
            self.values[name] = made
            last = ast.Subscript(ast.Name(made, ast.Load()), ast.Constant(-1), ast.Load())
            self._set(name, last, statement)

    def _set(self, name, value, node):
        made = ast.Assign([ast.Name(name, ast.Store())], value)
        self.fast.append(ast.copy_location(made, node))

    # indices --------------------------------------------------------------------------------------

    def is_index(self, node):
        """Whether an expression is a signed integer that does not wrap, and affine in the variable."""
        magnitude = self.integers.of(node)
        return magnitude is not UNKNOWN and magnitude <= LARGEST and self.is_affine(node)

    def is_affine(self, node):
        if self.is_fixed(node):
            return True
        if isinstance(node, ast.Name):
            return node.id in self.indices
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and self.is_affine(node.operand)
        if not isinstance(node, ast.BinOp):
            return False
        if isinstance(node.op, (ast.Add, ast.Sub)):
            return self.is_affine(node.left) and self.is_affine(node.right)
        return isinstance(node.op, ast.Mult) and (
            self.is_fixed(node.left)
            and self.is_affine(node.right)
            or self.is_affine(node.left)
            and self.is_fixed(node.right)
        )

    def is_fixed(self, node):
        """Whether an expression of numbers has one value in all iterations."""
        if isinstance(node, ast.Name):
            return node.id not in self.assigned
        if isinstance(node, ast.Constant):
            return node.value.__class__ is int
        if isinstance(node, ast.Attribute):
            return self.is_fixed(node.value)
        if isinstance(node, ast.UnaryOp):
            return self.is_fixed(node.operand)
        return (
            isinstance(node, ast.BinOp) and self.is_fixed(node.left) and self.is_fixed(node.right)
        )

    @staticmethod
    def replaced(node, by):
        return Replaced(by).visit(copy.deepcopy(node))

    def index(self, node, place):
        """An index, rewritten, in the iteration whose variable the name `place` has."""
        node = self.replaced(
            self.replaced(node, self.indices), {self.variable: ast.Name(place, ast.Load())}
        )
        return self.rewriter.visit(node)

    # values ---------------------------------------------------------------------------------------

    def array(self, node):
        """The expression that gives an array of a value in all iterations: a name, or a new array."""
        made = self.value(node)
        arrays = {name for name, _ in self.spans} | set(self.values.values())
        if not any(isinstance(n, ast.Name) and n.id in arrays for n in ast.walk(made)):
            raise NotReduced
        return made

    def value(self, node):
        """As `array`, or an expression that gives one number if the value has none from an array."""
        if isinstance(node, ast.Subscript):
            return self.span(node, converted=False)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            made = ast.BinOp(self.value(node.left), node.op, self.value(node.right))
            return ast.copy_location(made, node)
        if self.is_single(node):
            (inner,) = node.args
            if isinstance(inner, ast.Subscript):
                return self.span(inner, converted=True)
            if isinstance(inner, ast.Constant):
                return self.rewriter.visit(copy.deepcopy(node))
            node = inner
        if not isinstance(node, ast.Name):
            raise NotReduced
        if node.id in self.values:
            return ast.Name(self.values[node.id], ast.Load())
        if node.id in self.assigned:
            raise NotReduced
        self.singles.append(ast.Name(node.id, ast.Load()))
        return ast.Name(node.id, ast.Load())

    def is_single(self, node):
        """Whether an expression is a cast to float32."""
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id not in self.integers.inner
            and len(node.args) == 1
            and not node.keywords
            and cast_named(self.integers.outside.get(node.func.id)) == "float32"
        ):
            return False
        self.integers.assumed[node.func.id] = "cast", "float32"
        return True

    def span(self, node, converted):
        """The name of the array that `__span` gives for an element `a[i]` or `a[i, j]`."""
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if (
            not isinstance(node.value, ast.Name)
            or node.value.id in self.assigned
            or len(parts) > 2
            or not all(map(self.is_index, parts))
        ):
            raise NotReduced
        ends = [self.index(part, place) for place in (self.first, self.last) for part in parts]
        more = [ast.Constant(converted), ast.Constant(self.rewriter.site(node))]
        arguments = [node.value, *ends, ast.Name(self.count, ast.Load()), *more]
        call = ast.Call(ast.Name(f"__span{len(parts)}", ast.Load()), arguments, [])
        self.spans.append((self.rewriter.temporary(), ast.copy_location(call, node)))
        return ast.Name(self.spans[-1][0], ast.Load())

    # the statements -------------------------------------------------------------------------------

    def statements(self, loop, bounds):
        """Statements in place of the rewritten loop, whose range is `bounds`."""

        def name(of):
            return ast.Name(of, ast.Load())

        numbers = self.rewriter.temporary()
        tests = [
            ast.Compare(
                ast.Attribute(single, "__class__", ast.Load()), [ast.Is()], [name("__float32")]
            )
            for single in {s.id: s for s in self.singles}.values()
        ]
        tests += [
            ast.copy_location(
                ast.Compare(
                    ast.NamedExpr(ast.Name(made, ast.Store()), call),
                    [ast.IsNot()],
                    [ast.Constant(None)],
                ),
                call,
            )
            for made, call in self.spans
        ]
        fits = self.rewriter.temporary()

        def let(target, value):
            return ast.copy_location(ast.Assign([ast.Name(target, ast.Store())], value), loop)

        def end(index):
            return ast.Subscript(name(numbers), ast.Constant(index), ast.Load())

        loop.iter = ast.copy_location(name(numbers), loop.iter)
        enough = ast.Compare(name(self.count), [ast.GtE()], [ast.Constant(LEAST)])
        test = ast.BoolOp(ast.And(), tests) if len(tests) > 1 else tests[0]
        ready = [let(self.first, end(0)), let(self.last, end(-1)), let(fits, test)]
        # where the first statement is in the source: a line that is run counts as covered
        ast.copy_location(ready[-1], loop.body[0])
        return [
            let(numbers, bounds),
            let(self.count, ast.Call(name("len"), [name(numbers)], [])),
            ast.copy_location(ast.If(enough, ready, [let(fits, ast.Constant(False))]), loop),
            ast.copy_location(ast.If(name(fits), self.fast, [loop]), loop),
        ]


def reduction_of(rewriter, loop):
    """The `Reduction` that a `for` loop is; None if it is none."""
    integers = rewriter.integers
    if (
        integers is None
        or rewriter.filmed
        or loop.orelse
        or not isinstance(loop.target, ast.Name)
        or not integers.is_range(loop.iter)
        or UNKNOWN in map(integers.of, loop.iter.args)
    ):
        return None
    try:
        return Reduction(rewriter, loop)
    except NotReduced:
        return None


# Running it ---------------------------------------------------------------------------------------


class Spans:
    """`__span1` and `__span2` of a machine: elements of an array, as an array of float32 that the
    caller does not change; None where the loop must read them one by one.

    a: a CheckedArray, or NumPy's array where accesses are not checked
    first, last: the index in the first and the last of `count` iterations
    converted: whether elements of another float type become float32
    """

    def __init__(self, machine):
        self.machine = machine
        self.span1 = self._make_checked1() if machine.checked else span1
        self.span2 = self._make_checked2() if machine.checked else span2

    def _make_checked1(self):
        take = self._make_take()

        def checked1(a, first, last, count, converted, site):
            if a.__class__ is CheckedArray and 0 <= first < a._length and 0 <= last < a._length:
                return take(
                    a, a.offset + first * a.row, a.offset + last * a.row, count, converted, site
                )
            return None

        return checked1

    def _make_checked2(self):
        take = self._make_take()

        def checked2(a, i, j, last_i, last_j, count, converted, site):
            if (
                a.__class__ is CheckedArray
                and 0 <= i < a.rows
                and 0 <= j < a.columns  # arrays of one dimension have none
                and 0 <= last_i < a.rows
                and 0 <= last_j < a.columns
            ):
                row, column, start = a.row, a.column, a.offset
                first, last = start + i * row + j * column, start + last_i * row + last_j * column
                return take(a, first, last, count, converted, site)
            return None

        return checked2

    def _make_take(self):
        machine, access = self.machine, self.machine.access
        races, initialised, calm = access.races, access.initialised, access._calm
        usable = machine.noted_access is None

        def take(a, first, last, count, converted, site):
            """The span between two offsets, after the checks of a load of each element."""
            memory, kind = a.memory, a.exact
            step = (last - first) // (count - 1)
            if (
                not usable
                or step < 0
                or memory.grain
                or memory.busy
                or kind is not float32
                and not (converted and kind in _CONVERTED)
            ):
                return None
            valid, end = memory.valid, last + 1
            if initialised and valid is not None:
                if 0 in (valid[first:end:step] if step else valid[first:end]):
                    return None
            if races and memory.plain:
                stamp = machine.thread.stamp
                if memory.calm is not stamp and (memory.tried is stamp or not calm(memory, stamp)):
                    return None
                memory.reads.append((first, end - first, step or 1, stamp, site, machine.token))
            shift = a.shift
            if step:
                found = a.flat[first >> shift : (last >> shift) + 1 : step >> shift]
            else:
                found = a.flat[[first >> shift] * count]
            return found if kind is float32 else found.astype(float32)

        return take


def span1(a, first, last, count, converted, site):
    if a.__class__ is not np.ndarray or a.ndim != 1 or not 0 <= first <= last < len(a):
        return None
    step = (last - first) // (count - 1)
    if not step:
        return None
    return of_type(a[first : last + 1 : step], converted)


def span2(a, i, j, last_i, last_j, count, converted, site):
    if a.__class__ is not np.ndarray or a.ndim != 2:
        return None
    rows, columns = a.shape
    if not (0 <= i <= last_i < rows and 0 <= j <= last_j < columns):
        return None
    if i == last_i and j != last_j:
        return of_type(a[i, j : last_j + 1 : (last_j - j) // (count - 1)], converted)
    if j == last_j and i != last_i:
        return of_type(a[i : last_i + 1 : (last_i - i) // (count - 1), j], converted)
    return None


def of_type(found, converted):
    """Elements as float32; None for those of another type that are not converted."""
    kind = found.dtype.type
    if kind is float32:
        return found
    return found.astype(float32) if converted and kind in _CONVERTED else None


def add_up(total, values):
    """A float32 and the elements of an array, which is changed, added in order."""
    values[0] = total + values[0]
    return np.add.accumulate(values)[-1]
