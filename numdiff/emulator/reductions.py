"""Loops that only add up what they read from arrays: NumPy computes all of their iterations at once.

    for k in range(n):              if n >= LEAST and the classes and accesses are as expected:
        total += x[k] * y[k]            products = __span(x, 0, n - 1, …) * __span(y, 0, n - 1, …)
                                        products[0] += total
                                        total, k = np.add.accumulate(products)[-1], n - 1
                                    else:
                                        the loop itself

A loop is a `Reduction` if its variable runs over a `range` of signed integers, and each statement of
its body is one of three. `name = index`: an integer. `name = value` or `total += value`: a value is a
product, a sum or a difference of float32 elements, of names and of other values. Each index must be
affine in the loop's variable, so that the first and the last one bound all others.

`Spans` gives the elements; where accesses are not checked, most are slices. The results are those
of the loop: each product and each sum is rounded to float32, and the sums are taken in the order of
the loop. A span without a fault is recorded as one read of the thread. Where anything is unusual (an
index out of bounds, an element that was never written, a write since the last barrier, a copy in
flight), there is no span: the loop runs, and reports what it finds.
"""

import ast
import copy

import numpy as np

from .arrays import CheckedArray
from .integers import LARGEST, UNKNOWN, cast_named, nodes_of
from .values import bfloat16, float32

LEAST = 8  # iterations that take longer than NumPy's calls
# classes of elements that `float32(…)` converts
_CONVERTED = frozenset({np.float16, np.float64, bfloat16} - {None})


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
        self.variable, self.bounds = loop.target.id, loop.iter.args
        self.indices = {loop.target.id: ast.Name(loop.target.id, ast.Load())}  # by loop.target.id
        self.values = {}  # name -> the name of the array of its values
        self.spans = []  # (name of the array, [tests that give it this value])
        self.singles = []  # nodes that must be a float32
        self.sums, self.fast = [], []  # names of accumulators; statements
        self.numbers, self.first, self.last, self.count = (rewriter.temporary() for _ in range(4))
        self.ends = (  # the variable in the first and in the last iteration
            ast.Name(self.first, ast.Load()) if len(self.bounds) > 1 else ast.Constant(0),
            ast.Name(self.last, ast.Load()),
        )
        self.assigned = {loop.target.id}
        for statement in loop.body:
            self.assigned.add(self._target(statement))
        if len(self.assigned) != len(loop.body) + 1:
            raise NotReduced
        for statement in loop.body:
            self._take(statement)
        if not self.sums or not self.spans:
            raise NotReduced
        self._set(self.variable, self.ends[1], loop)

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
            value, made = self.array(statement.value), self.rewriter.temporary()
            if isinstance(value, ast.Name):  # the array is changed
                value = ast.Call(ast.Attribute(value, "copy", ast.Load()), [], [])
            total, array = ast.Name(name, ast.Load()), ast.Name(made, ast.Load())
            self.sums.append(name)
            self.singles.append(total)
            self._set(made, value, statement)
            first = ast.Assign(
                [at(array, 0, ast.Store())], ast.BinOp(total, ast.Add(), at(array, 0))
            )
            self.fast.append(ast.copy_location(first, statement))
            sums = ast.Call(ast.Name("__accumulate", ast.Load()), [array], [])
            self._set(name, at(sums, -1), statement)
        elif self.is_index(statement.value):
            self.indices[name] = self.replaced(statement.value, self.indices)
            self._set(name, self.index(statement.value, self.ends[1]), statement)
        else:
            made = self.rewriter.temporary()
            self._set(made, self.array(statement.value), statement)
            self.values[name] = made
            self._set(name, at(ast.Name(made, ast.Load()), -1), statement)

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

    def index(self, node, end):
        """An index, rewritten, in the iteration whose variable is `end`."""
        node = self.replaced(self.replaced(node, self.indices), {self.variable: end})
        return self.rewriter.visit(node)

    def stride(self, node):
        """By how much an index grows from one iteration to the next; None if that is no number in the
        source."""
        step = self.bounds[2] if len(self.bounds) == 3 else ast.Constant(1)
        grows = self.coefficient(node)
        known = isinstance(step, ast.Constant) and step.value.__class__ is int
        return grows * step.value if known and grows is not None else None

    def coefficient(self, node):
        """What the variable is multiplied by in an index."""
        if self.is_fixed(node):
            return 0
        if isinstance(node, ast.Name):
            return 1 if node.id == self.variable else self.coefficient(self.indices[node.id])
        if isinstance(node, ast.UnaryOp):
            inner = self.coefficient(node.operand)
            return None if inner is None else -inner
        left, right = self.coefficient(node.left), self.coefficient(node.right)
        if isinstance(node.op, ast.Mult):
            factor, of = (node.left, right) if self.is_fixed(node.left) else (node.right, left)
            constant = isinstance(factor, ast.Constant)
            return factor.value * of if constant and of is not None else None
        if None in (left, right):
            return None
        return left + right if isinstance(node.op, ast.Add) else left - right

    # values ---------------------------------------------------------------------------------------

    def array(self, node):
        """The expression that gives an array of a value in all iterations: a name, or a new array."""
        made = self.value(node)
        arrays = {name for name, _ in self.spans} | set(self.values.values())
        if not any(isinstance(n, ast.Name) and n.id in arrays for n in nodes_of(made)):
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
        made = self.rewriter.temporary()
        self.spans.append((made, self.tests(node.value, parts, node, made, converted)))
        return ast.Name(made, ast.Load())

    def tests(self, a, parts, node, made, converted):
        """Expressions that are all true where the name `made` now has the elements a[parts]."""
        strides = list(map(self.stride, parts))
        moving = [k for k, stride in enumerate(strides) if stride != 0]
        array = ast.NamedExpr(ast.Name(made, ast.Store()), None)
        count = ast.Name(self.count, ast.Load())
        if self.rewriter.checked or converted or len(moving) != 1 or (strides[moving[0]] or 0) < 1:
            ends = [self.index(part, end) for end in self.ends for part in parts]
            more = [ast.Constant(converted), ast.Constant(self.rewriter.site(node))]
            called = ast.Name(f"__span{len(parts)}", ast.Load())
            array.value = ast.Call(called, [a, *ends, count, *more], [])
            return [ast.Compare(array, [ast.IsNot()], [ast.Constant(None)])]
        # a part of NumPy's array, which has as many elements where all of them are inside
        first, last = (self.index(parts[moving[0]], end) for end in self.ends)
        places = [self.index(part, self.ends[0]) for part in parts]
        end = ast.BinOp(last, ast.Add(), ast.Constant(1))
        places[moving[0]] = ast.Slice(first, end, ast.Constant(strides[moving[0]]))
        place = places[0] if len(places) == 1 else ast.Tuple(places, ast.Load())
        array.value = ast.Subscript(a, place, ast.Load())
        shape = ast.Attribute(array, "shape", ast.Load())
        kind = ast.Attribute(ast.Name(made, ast.Load()), "dtype", ast.Load())
        return [
            ast.Compare(class_of(a), [ast.Is()], [ast.Name("__ndarray", ast.Load())]),
            ast.Compare(first, [ast.GtE()], [ast.Constant(0)]),
            ast.Compare(shape, [ast.Eq()], [ast.Tuple([count], ast.Load())]),
            ast.Compare(kind, [ast.Is()], [ast.Name("__single", ast.Load())]),
        ]

    # the statements -------------------------------------------------------------------------------

    def statements(self, loop):
        """Statements in place of the rewritten loop."""

        def name(of):
            return ast.Name(of, ast.Load())

        def let(target, value):
            return ast.copy_location(ast.Assign([ast.Name(target, ast.Store())], value), loop)

        if len(self.bounds) == 1:
            before = [let(self.count, loop.iter.args[0])]
            loop.iter.args = [name(self.count)]
            last = ast.BinOp(name(self.count), ast.Sub(), ast.Constant(1))
            ready = [let(self.last, last)]
        else:
            numbers = name(self.numbers)
            before = [
                let(self.numbers, loop.iter),
                let(self.count, ast.Call(name("len"), [numbers], [])),
            ]
            loop.iter = ast.copy_location(numbers, loop.iter)
            ready = [let(self.first, at(numbers, 0)), let(self.last, at(numbers, -1))]
        singles = {single.id: single for single in self.singles}.values()
        tests = [ast.Compare(class_of(s), [ast.Is()], [name("__float32")]) for s in singles]
        tests += [test for _, tests in self.spans for test in tests]
        fits, enough = (
            self.rewriter.temporary(),
            ast.Compare(name(self.count), [ast.GtE()], [ast.Constant(LEAST)]),
        )
        # where the first statement is in the source: a line that is run counts as covered
        ready.append(ast.copy_location(let(fits, ast.BoolOp(ast.And(), tests)), loop.body[0]))
        return [
            *before,
            ast.copy_location(ast.If(enough, ready, [let(fits, ast.Constant(False))]), loop),
            ast.copy_location(ast.If(name(fits), self.fast, [loop]), loop),
        ]


def at(array, index, context=None):
    """array[index]"""
    return ast.Subscript(array, ast.Constant(index), context or ast.Load())


def class_of(node):
    return ast.Attribute(node, "__class__", ast.Load())


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
