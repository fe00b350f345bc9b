"""Which operations of a kernel are on signed integers whatever it is given: Python's own operators
do them.

A call of `values.add` takes five times as long as `a + b`. Where both are signed integers the two
are the same; so are products and quotients that cannot leave 64 bits. An index is mostly made of
such: thread and block numbers, shapes, literals, casts to int32, the variables of `for … in
range(…)`, and sums and products of these.

A magnitude k says that a signed integer is within ±2^k; None: it may be anything else than a signed
integer. A tuple has `Fields`, the magnitudes of its elements.
"""

import ast
import functools
import math
import types
from typing import NamedTuple

import numpy as np

from .namespace import TWINS
from .overloads import overloads_of
from .signatures import explicit_signatures
from .source import captured, source_tree
from .values import ALIASES, SIGNED, is_numbas, numbas_name
from .weak_table import WeakTable

UNKNOWN = None
ANY = math.inf  # an integer of any size
# bits of lengths, of numbers from a module, and of how often a loop can turn in an emulator
INDEX = 31
SMALL = 20  # bits of most numbers that a kernel is given
# bits of what launch.py allows of the blocks and threads along x, y and z
GRID, BLOCK = {"x": 31, "y": 16, "z": 16}, {"x": 10, "y": 10, "z": 6}
CASTS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
LARGEST = 62  # what is within ±2^62 does not wrap
_OPERATORS = {
    ast.Add: lambda a, b: max(a, b) + 1,
    ast.Sub: lambda a, b: max(a, b) + 1,
    ast.Mult: lambda a, b: a + b,
    ast.FloorDiv: lambda a, b: a,
    ast.Mod: lambda a, b: b,
    ast.BitAnd: lambda a, b: max(a, b) + 1,
    ast.BitOr: lambda a, b: max(a, b) + 1,
    ast.BitXor: lambda a, b: max(a, b) + 1,
    ast.RShift: lambda a, b: a,
}
_ROUNDS = 6  # after which a magnitude that still grows counts as ANY


# nodes with nothing in them
EMPTY = ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop


# fields in which there is no node below another, and those that may have None among their nodes
_PLAIN = frozenset(
    """ctx op ops id attr arg name names kind type_comment conversion simple level module asname n s
    is_async rest kwd_attrs""".split()
)
_GAPS = frozenset(("keys", "kw_defaults"))
_FIELDS = {
    ast.Constant: (),
    ast.MatchSingleton: (),
}  # class of a node -> its fields that have nodes


def _fields_of(kind):
    found = _FIELDS[kind] = tuple(field for field in kind._fields if field not in _PLAIN)
    return found


def parts_of(node):
    """The nodes right below a node, but contexts, operators and names that are imported."""
    found, kind = [], node.__class__
    for field in _FIELDS[kind] if kind in _FIELDS else _fields_of(kind):
        value = getattr(node, field, None)
        if value.__class__ is list:
            found += [part for part in value if part is not None] if field in _GAPS else value
        elif value is not None:
            found.append(value)
    return found


def nodes_of(tree):
    """A node and all below it; as `ast.walk`, in a fifth of its time."""
    found = [tree]
    for node in found:  # which grows meanwhile
        kind = node.__class__
        for field in _FIELDS[kind] if kind in _FIELDS else _fields_of(kind):
            value = getattr(node, field, None)
            if value.__class__ is list:
                found += [part for part in value if part is not None] if field in _GAPS else value
            elif value is not None:
                found.append(value)
    return found


class Fields(NamedTuple):
    """Magnitudes of a tuple's elements; the names of a named tuple's, else ()."""

    names: tuple
    magnitudes: tuple

    def at(self, key):
        """The magnitude of an element, by its name or number."""
        if key in self.names:
            return self.magnitudes[self.names.index(key)]
        inside = key.__class__ is int and 0 <= key < len(self.magnitudes)
        return self.magnitudes[key] if inside else UNKNOWN


def magnitude_of(value):
    """The magnitude of a number that a kernel is given: SMALL, INDEX, ANY or UNKNOWN, so that few
    numbers need another text of the kernel; `Fields` of a tuple."""
    if isinstance(value, tuple):
        return Fields(getattr(type(value), "_fields", ()), tuple(map(magnitude_of, value)))
    if value.__class__ not in SIGNED:
        return UNKNOWN
    return next((m for m in (SMALL, INDEX) if -1 << m <= value <= 1 << m), ANY)


def _line(node):
    return node.lineno


class Integers:
    """The signed integers of one function. After `mark`, an operation's node has `native`: whether
    Python does it.

    given: magnitudes of its parameters
    assumed: {name: (what the function is taken to find under it outside, …)}: to be checked by
    `holds`
    """

    def __init__(self, function, node, given):
        code, self.assumed, self.nodes = function.__code__, {}, nodes_of(node)
        self.results = {}  # (name of a function, magnitudes it is given) -> those that it gives
        self.repeated = set()  # ids of the names within loops
        loops = set()
        for loop in self.nodes:
            if loop.__class__ in (ast.For, ast.While) and id(loop) not in loops:
                inside = nodes_of(loop)
                loops.update(id(n) for n in inside if n.__class__ in (ast.For, ast.While))
                self.repeated.update(id(n) for n in inside if n.__class__ is ast.Name)
        closure = captured(function)
        names = [n for n in self.nodes if n.__class__ is ast.Name]
        self.inner = (
            {n.id for n in names if n.ctx.__class__ is not ast.Load}
            | set(code.co_varnames)
            | set(code.co_cellvars)
        )
        self.outside = {}
        for name in {n.id for n in names} - self.inner:
            if name in closure:
                self.outside[name] = closure[name]
            elif name not in code.co_freevars and name in function.__globals__:
                self.outside[name] = function.__globals__[name]
        parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        self.bindings = {
            name: [magnitude] for name, magnitude in zip(parameters, given, strict=False)
        }
        others = self._all_parameters(node)
        # in the order of the source, so that most are known before they are used
        order = dict.fromkeys(n.id for n in sorted(names, key=_line))
        for name in (*order, *self.inner):
            if name in self.inner and name not in self.bindings:
                self.bindings[name] = [UNKNOWN] if name in others else []
        self._bind(node)
        # parameters that are tuples, and stay what they are
        self.tuples = {
            name: bindings[0]
            for name, bindings in self.bindings.items()
            if bindings and bindings[0].__class__ is Fields and len(bindings) == 1
        }
        self._solve()

    @staticmethod
    def _all_parameters(node):
        return {a.arg for a in nodes_of(node.args) if isinstance(a, ast.arg)}

    # what is assigned to names --------------------------------------------------------------------

    def _bind(self, node):
        understood, stored = set(), []  # ids of the nodes of names
        for part in self.nodes:
            kind = part.__class__
            if kind is ast.Name:
                if part.ctx.__class__ is not ast.Load:
                    stored.append(part)
            elif kind is ast.Assign:
                for target in part.targets:
                    self._assign(target, part.value, understood)
            elif kind is ast.AnnAssign and part.value is not None:
                self._assign(part.target, part.value, understood)
            elif (
                kind is ast.AugAssign
                and isinstance(part.target, ast.Name)
                or kind is ast.For
                and isinstance(part.target, ast.Name)
                and self.is_range(part.iter)
            ):
                self.bindings[part.target.id].append(part)
                understood.add(id(part.target))
            elif kind in (ast.FunctionDef, ast.Lambda) and part is not node:  # a separate scope
                for name in {
                    n.id for n in nodes_of(part) if isinstance(n, ast.Name)
                } | self._all_parameters(part):
                    self.bindings.setdefault(name, []).append(UNKNOWN)
        for part in stored:
            if id(part) not in understood:
                self.bindings.setdefault(part.id, []).append(UNKNOWN)

    def _assign(self, target, value, understood):
        if isinstance(target, ast.Name):
            if (
                isinstance(value, ast.BinOp)
                and isinstance(value.left, ast.Name)
                and value.left.id == target.id
            ):
                value = ast.AugAssign(target, value.op, value.right)  # the same
            self.bindings.setdefault(target.id, []).append(value)
            understood.add(id(target))
        elif isinstance(target, ast.Tuple):
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                for one, its in zip(target.elts, value.elts, strict=True):
                    self._assign(one, its, understood)
            elif self._is_shape(value) or self._is_grid(value):
                for one in target.elts:
                    if isinstance(one, ast.Name):
                        self.bindings.setdefault(one.id, []).append(INDEX)
                        understood.add(id(one))
            elif isinstance(value, ast.Call):
                for k, one in enumerate(target.elts):
                    if isinstance(one, ast.Name):
                        element = ast.Subscript(value, ast.Constant(k), ast.Load())
                        self._assign(one, element, understood)

    def is_range(self, node):
        return (
            isinstance(node, ast.Call)
            and not node.keywords
            and all(not isinstance(a, ast.Starred) for a in node.args)
            and self._names(node.func, "range")
        )

    def _names(self, node, builtin):
        """Whether a node is the name of one of Python's own functions."""
        if (
            not isinstance(node, ast.Name)
            or node.id != builtin
            or node.id in self.inner
            or node.id in self.outside
        ):
            return False
        self.assumed[builtin] = ("missing",)
        return True

    @staticmethod
    def _is_shape(node):
        return isinstance(node, ast.Attribute) and node.attr == "shape"

    def _is_cuda(self, node):
        if (
            isinstance(node, ast.Name)
            and isinstance(self.outside.get(node.id), types.ModuleType)
            and (numbas_name(self.outside[node.id].__name__) == "numba.cuda")
        ):
            self.assumed[node.id] = ("cuda",)
            return True
        return False

    def _is_grid(self, node):
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (node.func.attr in ("grid", "gridsize"))
            and self._is_cuda(node.func.value)
        )

    # magnitudes -----------------------------------------------------------------------------------

    def _solve(self):
        self.solved = False  # whether the magnitudes of names are final
        self.locals = {name: 0 if bindings else UNKNOWN for name, bindings in self.bindings.items()}
        changed, rounds = True, 0
        while changed:
            changed, rounds = False, rounds + 1
            for name, bindings in self.bindings.items():
                old = self.locals[name]
                if old is UNKNOWN:
                    continue
                found = [self._of_binding(name, binding) for binding in bindings]
                new = (
                    UNKNOWN
                    if UNKNOWN in found
                    else max(old, *found)
                    if not any(isinstance(b, ast.AugAssign) for b in bindings)
                    else max(old, max(found) + 1)
                )
                if new != old:
                    self.locals[name] = (
                        new if new is UNKNOWN or rounds < _ROUNDS and new <= LARGEST else ANY
                    )
                    changed = changed or self.locals[name] != old
        self.solved = True

    def _of_binding(self, name, binding):
        if isinstance(binding, ast.For):
            return self._of_range(binding.iter.args)
        if isinstance(binding, ast.AugAssign):
            by = self.of(binding.value)
            if (
                isinstance(binding.op, (ast.Add, ast.Sub))
                and by is not UNKNOWN
                and name not in {n.id for n in nodes_of(binding.value) if isinstance(n, ast.Name)}
            ):
                if id(binding.target) not in self.repeated:  # added once
                    return by + len(self.bindings[name]).bit_length()
                return by + INDEX  # each turn adds as much
            return self._of_operation(binding.op, self.locals[name], by, binding.value)
        if isinstance(binding, ast.AST):
            return self.of(binding)
        return UNKNOWN if binding.__class__ is Fields else binding

    def _of_range(self, arguments):
        start = self.of(arguments[0]) if len(arguments) > 1 else 0
        stop, step = (
            self.of(arguments[min(len(arguments) - 1, 1)]),
            self.of(arguments[2]) if len(arguments) > 2 else 0,
        )
        turning = ANY if start is UNKNOWN or step is UNKNOWN else max(start, step + INDEX) + 1
        return turning if start is UNKNOWN or stop is UNKNOWN else min(turning, max(start, stop))

    @staticmethod
    def _of_operation(operator, a, b, right):
        if a is UNKNOWN or b is UNKNOWN:
            return UNKNOWN
        by = right.value if isinstance(right, ast.Constant) and right.value.__class__ is int else -1
        if isinstance(operator, ast.LShift):
            return a + by if 0 <= by < 64 else 63
        if isinstance(operator, ast.RShift) and 0 <= by < 64:
            return max(a - by, 0)
        if isinstance(operator, ast.FloorDiv) and by > 0:
            return max(a - by.bit_length() + 1, 0)
        if isinstance(operator, ast.BitAnd) and by >= 0:
            return b
        rule = _OPERATORS.get(operator.__class__)
        return UNKNOWN if rule is None else min(rule(a, b), ANY)

    def of(self, node):
        """The magnitude of an expression that is a number."""
        found = self._find(node)
        return UNKNOWN if found.__class__ is Fields else found

    def _find(self, node):
        """The magnitude of an expression."""
        if not self.solved:
            return self._look(node)
        try:
            return node.magnitude
        except AttributeError:
            node.magnitude = found = self._look(node)
            return found

    def _look(self, node):
        kind = node.__class__
        if kind is ast.Constant:
            if node.value.__class__ is int:
                return node.value.bit_length()
            return 1 if node.value.__class__ is bool else UNKNOWN
        if kind is ast.Name:
            return self._of_name(node.id)
        if kind is ast.BinOp:
            return self._of_operation(node.op, self.of(node.left), self.of(node.right), node.right)
        if kind is ast.UnaryOp:
            inner = self.of(node.operand)
            if isinstance(node.op, ast.Not) or inner is UNKNOWN:
                return UNKNOWN
            return inner + 1
        if kind is ast.IfExp:
            a, b = self.of(node.body), self.of(node.orelse)
            return UNKNOWN if a is UNKNOWN or b is UNKNOWN else max(a, b)
        if kind is ast.Subscript and isinstance(node.slice, ast.Constant):
            if self._is_shape(node.value):
                return INDEX
            within = self._find(node.value)
            return within.at(node.slice.value) if within.__class__ is Fields else UNKNOWN
        if kind is ast.Attribute:
            return self._of_attribute(node)
        return self._of_call(node) if kind is ast.Call else UNKNOWN

    def _of_name(self, name):
        if name in self.tuples:
            return self.tuples[name]
        if name in self.inner:
            return self.locals.get(name, UNKNOWN)
        value = self.outside.get(name)
        if (
            magnitude_of(value) in (SMALL, INDEX)
            or isinstance(value, np.signedinteger)
            and abs(int(value)) < 1 << INDEX
        ):
            self.assumed[name] = ("integer",)
            return INDEX
        return UNKNOWN

    def _of_attribute(self, node):
        if node.attr in ("size", "ndim"):
            return (
                INDEX
                if isinstance(node.value, ast.Name) and node.value.id in self.inner
                else UNKNOWN
            )
        if (
            node.attr in ("x", "y", "z")
            and isinstance(node.value, ast.Attribute)
            and node.value.attr in ("threadIdx", "blockIdx", "blockDim", "gridDim")
            and self._is_cuda(node.value.value)
        ):
            return (GRID if node.value.attr in ("blockIdx", "gridDim") else BLOCK)[node.attr]
        if node.attr in ("laneid", "warpsize") and self._is_cuda(node.value):
            return 6
        within = self._find(node.value)
        return within.at(node.attr) if within.__class__ is Fields else UNKNOWN

    def _of_call(self, node):
        if (
            self._is_grid(node)
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
            and (node.args[0].value == 1)
        ):
            return INDEX
        if not isinstance(node.func, ast.Name) or node.keywords or len(node.args) == 0:
            return UNKNOWN
        if self._names(node.func, "len"):
            return INDEX
        if self._names(node.func, "min") or self._names(node.func, "max"):
            found = [self.of(a) for a in node.args]
            return UNKNOWN if UNKNOWN in found or len(found) < 2 else max(found)
        cast = (
            cast_named(self.outside.get(node.func.id)) if node.func.id not in self.inner else None
        )
        if cast in CASTS:
            self.assumed[node.func.id] = "cast", cast
            return CASTS[cast]
        return self._of_result(node)

    def _of_result(self, call):
        """What the call of another function gives."""
        name = call.func.id
        function = None if name in self.inner else self.outside.get(name)
        if not is_function(function) or any(isinstance(a, ast.Starred) for a in call.args):
            return UNKNOWN
        given = tuple(self._rounded(self._find(a)) for a in call.args)
        found = magnitude_of_result(function, given)
        if found is not UNKNOWN:
            self.results[name, given] = found
        return found

    # what follows ---------------------------------------------------------------------------------

    def mark(self):
        """Say of each operation whether it is Python's own."""
        for part in self.nodes:
            kind = part.__class__
            if kind is ast.BinOp:
                part.native = self._is_native(
                    part.op, self.of(part.left), self.of(part.right), part.right
                )
            elif kind is ast.AugAssign and isinstance(part.target, ast.Name):
                part.native = self._is_native(
                    part.op, self._of_name(part.target.id), self.of(part.value), part.value
                )
            elif kind is ast.UnaryOp:
                inner = self.of(part.operand)
                part.native = (
                    isinstance(part.op, ast.USub)
                    and inner is not UNKNOWN
                    and inner <= LARGEST
                    and (
                        # int64: others negate in their own width
                        isinstance(part.operand, (ast.BinOp, ast.Constant))
                    )
                )
            elif kind is ast.Compare:
                by_value = not any(isinstance(op, (ast.Is, ast.IsNot)) for op in part.ops)
                part.native = by_value and UNKNOWN not in map(
                    self.of, (part.left, *part.comparators)
                )
            elif kind is ast.Call:
                part.magnitudes = (
                    ()
                    if any(isinstance(a, ast.Starred) for a in part.args)
                    else tuple(self._rounded(self._find(a)) for a in part.args)
                )

    @staticmethod
    def _rounded(magnitude):
        """One of four, so that a function has few variants; of a tuple's elements one of five."""
        if magnitude.__class__ is Fields:
            return Fields(magnitude.names, tuple(map(_rounded_field, magnitude.magnitudes)))
        return (
            magnitude
            if magnitude is UNKNOWN
            else next(m for m in (INDEX, LARGEST, ANY) if magnitude <= m)
        )

    def result(self):
        """The magnitude of what the function returns."""
        returned = [n.value for n in self.nodes if n.__class__ is ast.Return]
        inner = any(n.__class__ in (ast.FunctionDef, ast.Lambda) for n in self.nodes[1:])
        if inner or not returned or None in returned:
            return UNKNOWN
        if not all(isinstance(value, ast.Tuple) for value in returned):
            found = [self.of(value) for value in returned]
            return UNKNOWN if UNKNOWN in found else max(found)
        if len({len(value.elts) for value in returned}) > 1:
            return UNKNOWN
        elements = zip(*(value.elts for value in returned), strict=True)
        columns = [list(map(self.of, values)) for values in elements]
        return Fields((), tuple(UNKNOWN if UNKNOWN in c else max(c) for c in columns))

    def _is_native(self, operator, a, b, right):
        if a is UNKNOWN or b is UNKNOWN:
            return False
        if isinstance(operator, (ast.BitAnd, ast.BitOr, ast.BitXor)):
            return True
        if isinstance(operator, (ast.Add, ast.Sub)):
            return max(a, b) <= LARGEST
        if isinstance(operator, ast.Mult):
            return a + b <= LARGEST
        if isinstance(operator, (ast.FloorDiv, ast.Mod)):
            return a <= LARGEST
        if isinstance(operator, (ast.LShift, ast.RShift)):
            by = (
                right.value
                if isinstance(right, ast.Constant) and right.value.__class__ is int
                else None
            )
            return (
                by is not None
                and 0 <= by < 64
                and a + (by if isinstance(operator, ast.LShift) else 0) <= LARGEST
            )
        return False


def _rounded_field(magnitude):
    if magnitude is UNKNOWN or magnitude.__class__ is Fields:
        return Integers._rounded(magnitude)
    return next(m for m in (SMALL, INDEX, LARGEST, ANY) if magnitude <= m)


_UNKNOWN = WeakTable()  # a function -> {magnitudes for which it returns UNKNOWN: None}
# a function -> {magnitudes: (its tree, its `Integers`)}, which `magnitude_of_result` has looked at,
# for `integers_of`
_READY = WeakTable()
_RESULTS = WeakTable()  # a function -> {magnitudes that it is given: those that it returns}


def magnitude_of_result(function, given):
    """The magnitude of what a device function returns for arguments of these."""
    python = getattr(function, "py_func", function)
    results = _RESULTS.dict_of(python)
    if given not in results:
        results[given] = UNKNOWN  # while it is looked at: a function that calls itself
        unknown = _UNKNOWN.dict_of(python)
        if any(_says_no_more(given, other) for other in unknown):
            return UNKNOWN
        tree = source_tree(python)
        if tree is not None:
            found = Integers(python, tree, given)
            results[given] = found.result()
            _READY.dict_of(python)[given] = tree, found
        if results[given] is UNKNOWN:
            unknown[given] = None
    return results[given]


def _says_no_more(given, other):
    """Whether magnitudes bound the same arguments as others do, by as much or more, or fewer."""
    return len(given) == len(other) and all(
        a is UNKNOWN or a == b or Fields not in (a.__class__, b.__class__) and UNKNOWN is not b <= a
        for a, b in zip(given, other, strict=True)
    )


def integers_of(function, given):
    """(the syntax tree of a function, to be changed; its `Integers`); (None, None) without source."""
    tree, found = _READY.dict_of(function).pop(given, (None, None))
    if tree is None:
        tree = source_tree(function)
        found = tree and Integers(function, tree, given)
    return tree, found


def is_function(value):
    """Whether a value is a function like a kernel's own, of which there may be variants.

    Not one that makes shared arrays: each is one array wherever it is called. Nor one whose
    signature says its types.
    """
    python = getattr(value, "py_func", value)
    return (
        isinstance(python, types.FunctionType)
        and "shared" not in python.__code__.co_names
        and (
            not is_numbas(python.__module__)
            and id(value) not in TWINS
            and not explicit_signatures(value)
            and not overloads_of(value)
        )
    )


def cast_named(value):
    """The name of the type that a value outside of a kernel is, such as "int32"; None if it is
    none."""
    if isinstance(value, type):
        return _numpy_name(value)
    name = (
        getattr(value, "name", None)
        if is_numbas(getattr(type(value), "__module__", None))
        else None
    )
    return ALIASES.get(name, name) if isinstance(name, str) else None


@functools.cache
def _numpy_name(kind):
    numpys = issubclass(kind, np.generic) and kind is not np.generic
    return np.dtype(kind).name if numpys else None


def holds(assumed, namespace, cuda, types_by_name):
    """Whether a function finds outside of itself what `Integers` took for granted; a namespace is
    of resolved names."""
    for name, (what, *more) in assumed.items():
        value = namespace.get(name)
        if what == "missing":
            right = name not in namespace or name in ("min", "max")
        elif what == "cuda":
            right = value is cuda
        elif what == "cast":
            right = value is types_by_name[more[0]]
        else:
            right = magnitude_of(value) in (SMALL, INDEX)
        if not right:
            return False
    return True
