"""From a kernel's source to a function that the emulator runs: the same lines, with every operation
made explicit.

The syntax tree of the function is changed in a few places and compiled under its own file name and
line numbers, so that tracebacks, `breakpoint()` and coverage point into the real source:

    a + b           __Add(a, b)              Numba's types and rounding (arithmetic.py); where both are known to be
                                             signed integers, it stays (integers.py)
    float32(0.5)    a constant, made once
    a < b           __Lt(a, b)               unless both are known to be signed integers, or one is a literal float
    a is b          __Is(a, b)               by type and value (identity.py), unless one is None
    f(a, b)         the variant of a device function for the integers among its arguments
    0.5             a float64 constant       which is what Numba takes it for
    a[i], a[i] = v  __load(a, i), __store    only where accesses are checked
    while c:        while __turn(1) and c:   so that a waiting loop gives others a turn, and an endless one is noticed
    breakpoint()    __here() and breakpoint()   at the chosen block and thread only

In a checked function each of these calls also carries the number of its site (its line).
"""

import ast
import builtins
import types
import weakref
from typing import NamedTuple

import numpy as np

from .arithmetic import COMPARISONS, OPERATIONS
from .identity import IDENTITIES
from .integers import EMPTY, cast_named, integers_of, is_function, nodes_of, parts_of
from .loops import WAITING
from .memory import READ_SITE
from .reductions import class_of, reduction_of
from .source import captured, source_tree
from .values import TYPES, is_numbas, scalar
from .whole_arrays import WHOLE


class Sites:
    """Numbers for lines: site number -> (function, file, line). `spins`: the conditions of `while`
    loops."""

    def __init__(self):
        self.places, self._numbers, self.spins = [], {}, set()
        # (id of a code object, instruction) -> (site, the code object: no other gets its id)
        self._found = {}

    def number(self, function, file, line):
        key = (function, file, line)
        if key not in self._numbers:
            self._numbers[key] = len(self.places)
            self.places.append(key)
        return self._numbers[key]

    def of(self, frame):
        """The number of the line that a frame is at."""
        code = frame.f_code
        key = id(code), frame.f_lasti
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = (
                self.number(code.co_name, code.co_filename, frame.f_lineno),
                code,
            )
        return found[0]


_MAKING = weakref.WeakKeyDictionary()  # code of a function -> whether it makes arrays
_METHODS = {}  # class of a node -> the rewriter's method for it
SITES = Sites()  # of all machines: site numbers are compiled into the rewritten functions


SHUFFLES = ("shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync")
MODULES = ("cuda", "math", "cmath", "np", "numpy")
_DIMENSIONS = ("threadIdx", "blockIdx", "blockDim", "gridDim")


def shared_or_local(node):
    """The memory space of the array that a call makes, `cuda.shared.array(…)`: "shared", "local" or
    None."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "array":
        return None
    space = (
        node.func.value.attr
        if isinstance(node.func.value, ast.Attribute)
        else getattr(node.func.value, "id", None)
    )
    return space if space in ("shared", "local") else None


def _passes_on(called):
    """Whether a function may be given a variable without a value: a shuffle, or a device
    function."""
    if isinstance(called, ast.Attribute):
        return called.attr in SHUFFLES or getattr(called.value, "id", "cuda") not in MODULES
    return isinstance(called, ast.Name) and called.id not in vars(builtins)


class Rewriter(ast.NodeTransformer):
    """Makes the operations of one function explicit. `negative` collects the sites whose index is a
    literal -1, -2 …"""

    def __init__(self, function, sites, checked, fixed, integers, filmed=False):
        self.function, self.sites, self.checked, self.fixed, self.integers = (
            function,
            sites,
            checked,
            fixed,
            integers,
        )
        self.constants, self.negative, self._temporaries = {}, set(), 0
        self.casts, self.variants = {}, {}  # see `Rewritten`
        self.filmed, code = filmed, function.__code__
        self.parameters = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        self.outside = Outside(function)
        self._bindings, self.makes_local = None, False

    def visit(self, node):
        """As the base class does, without a search for the method each time."""
        kind = node.__class__
        method = _METHODS.get(kind)
        if method is None:
            method = _METHODS[kind] = getattr(
                Rewriter, f"visit_{kind.__name__}", Rewriter.generic_visit
            )
        return method(self, node)

    def generic_visit(self, node):
        """As the base class does, of what a tree of expressions and statements has."""
        for field in node._fields:
            old = getattr(node, field, None)
            if old.__class__ is list:
                new = []
                for part in old:
                    made = self.visit(part) if isinstance(part, ast.AST) else part
                    if made.__class__ is list:
                        new.extend(made)
                    elif made is not None or not isinstance(part, ast.AST):
                        new.append(made)
                old[:] = new
            elif isinstance(old, ast.AST) and not isinstance(old, EMPTY):
                setattr(node, field, self.visit(old))
        return node

    def site(self, node):
        return self.sites.number(
            self.function.__code__.co_name, self.function.__code__.co_filename, node.lineno
        )

    def call(self, name, arguments, node, with_site=True):
        arguments = list(arguments)
        if self.checked and with_site:
            arguments.append(ast.Constant(self.site(node)))
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), arguments, []), node)

    def load(self, name, arguments, node):
        place = ast.Constant(self.site(node) << READ_SITE)
        return self.call(name, (*arguments, place), node, with_site=False)

    def operation(self, operator, operands, node):
        return self.call(f"__{type(operator).__name__}", operands, node)

    def visit_Constant(self, node):
        if isinstance(node.value, (float, complex)):
            name = f"__float_{len(self.constants)}"
            self.constants[name] = scalar(node.value)
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        return node

    def bindings(self, name):
        """The expressions that a variable is assigned, [None] for what is none (a loop's variable,
        say)."""
        if self._bindings is None:
            self._bindings, plain = {}, set()
            nodes = nodes_of(self.tree)
            for part in nodes:
                if part.__class__ is ast.Assign:
                    for target in part.targets:
                        if target.__class__ is ast.Name:
                            self._bindings.setdefault(target.id, []).append(part.value)
                            plain.add(id(target))
            for part in nodes:
                if (
                    part.__class__ is ast.Name
                    and part.ctx.__class__ is not ast.Load
                    and id(part) not in plain
                ):
                    self._bindings.setdefault(part.id, []).append(None)
        return self._bindings.get(name, [])

    def is_literal(self, node, arithmetic=True):
        """Whether Numba knows a number, or a tuple of them, when it compiles: its types are those
        of literals.

        A parameter is one if what it is called with is, which is seen when it runs.
        """
        if isinstance(node, ast.Constant):
            return node.value.__class__ is int
        if isinstance(node, ast.Tuple):
            return all(map(self.is_literal, node.elts))
        if isinstance(node, ast.BinOp):  # Numba folds those of constants alone
            return arithmetic and all(
                isinstance(part, (ast.Constant, ast.BinOp, ast.operator)) for part in nodes_of(node)
            )
        if isinstance(node, ast.Subscript):
            return (
                isinstance(node.slice, ast.Constant)
                and isinstance(node.value, ast.Name)
                and (self.is_literal(node.value))
            )
        if isinstance(node, ast.Attribute):
            return node.attr == "ndim"
        if not isinstance(node, ast.Name):
            return False
        bound = self.bindings(node.id)
        if node.id in self.parameters:
            return not bound
        if bound:
            return all(
                value is not None and not isinstance(value, ast.Name) and self.is_literal(value)
                for value in bound
            )
        value = self.outside.get(node.id)
        return (
            value.__class__ is int
            or value.__class__ is tuple
            and all(v.__class__ is int for v in value)
        )

    def varies(self, node):
        """Whether Numba would find that a shape is no constant, as far as that can be read off its
        expression."""
        if isinstance(node, ast.Tuple):
            return any(self.varies(part) for part in node.elts)
        if isinstance(node, ast.Name):
            if node.id in self.parameters:
                return bool(self.bindings(node.id))
            return any(
                value is None
                or isinstance(value, (ast.BinOp, ast.Call))
                and not self.is_literal(value)
                for value in self.bindings(node.id)
            )
        if isinstance(node, ast.Subscript):
            return self.varies(node.value)
        if isinstance(node, ast.Attribute):
            inner = (
                node.value.attr
                if isinstance(node.value, ast.Attribute)
                else getattr(node.value, "id", None)
            )
            return inner in _DIMENSIONS or node.attr in ("shape", "size")
        if isinstance(node, ast.BinOp):
            return any(
                not isinstance(part, (ast.Constant, ast.BinOp, ast.operator))
                for part in nodes_of(node)
            )
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("len", "min", "max")
        )

    def shape_of(self, call, space):
        """The call that makes an array; where its shape has a parameter, that is looked at when it
        runs."""
        place = next((k for k in call.keywords if k.arg == "shape"), None)
        shape = place.value if place else call.args[0] if call.args else None
        if shape is None:
            return call
        text = ast.Constant(
            f"Numba does not compile {ast.unparse(shape)} as the shape of a {space} array: "
            "give it a number, or the name of a number outside of the kernel"
        )
        if self.varies(shape):
            return ast.copy_location(
                ast.Call(ast.Name("__unsupported", ast.Load()), [text], []), call
            )
        if any(
            isinstance(part, ast.Name) and part.id in self.parameters for part in nodes_of(shape)
        ):
            shape = self.as_literal(shape)
            checked = ast.copy_location(
                ast.Call(ast.Name("__constant", ast.Load()), [shape, text], []), call
            )
            if place:
                place.value = checked
            else:
                call.args[0] = checked
        return call

    def is_fixed(self, node):
        """Whether an expression is made of constants alone: the compiler computes it, the GPU never
        does."""
        if isinstance(node, ast.BinOp):
            return self.is_fixed(node.left) and self.is_fixed(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.is_fixed(node.operand)
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.value.id == "math"
        return (
            isinstance(node, ast.Constant) or isinstance(node, ast.Name) and node.id in self.fixed
        )

    def visit_BinOp(self, node):
        fixed = self.is_fixed(node)
        self.generic_visit(node)
        if fixed or getattr(node, "native", False):
            return node
        return self.arithmetic(node.op, node.left, node.right, node)

    def arithmetic(self, operator, left, right, node):
        """The call for an operation of two operands; for a product and a sum, one for both."""
        if isinstance(operator, ast.Add):
            if self.is_product(right, node):
                return self.fused("__AddMult", (left, *right.args[:2]), node)
            if self.is_product(left, node):
                return self.fused("__MultAdd", (*left.args[:2], right), node)
        if type(operator).__name__ not in OPERATIONS:
            return node
        return self.operation(operator, (left, right), node)

    def fused(self, name, operands, node):
        """A product and a sum, most often of three float32, for which no function is called."""
        if self.integers is None:  # what is counted calls one for each operation
            return self.call(name, operands, node)
        # how each operand is read again; the classes of those that are evaluated here, in order, and
        # of the others, which are names
        known, evaluated, named = [], [], []
        for operand in operands:
            if isinstance(operand, ast.Name):
                known.append(operand.id)
                named.append(class_of(operand))
            else:
                known.append(self.temporary())
                kept = ast.NamedExpr(ast.Name(known[-1], ast.Store()), operand)
                evaluated.append(class_of(kept))
        a, b, c = (ast.Name(n, ast.Load()) for n in known)
        # a chain of comparisons evaluates its first two operands, whatever they are
        first = [ast.Compare(kind, [ast.IsNot()], [ast.Constant(None)]) for kind in evaluated[:-2]]
        repeated = [class_of(ast.Name(n, ast.Load())) for n in known[: len(first)]]
        chain = [*evaluated[-2:], *named, *repeated, ast.Name("__float32", ast.Load())]
        single = ast.Compare(chain[0], [ast.Is()] * (len(chain) - 1), chain[1:])
        test = ast.BoolOp(ast.And(), [*first, single]) if first else single
        mult, add = ast.Mult(), ast.Add()
        sum_ = (
            ast.BinOp(a, add, ast.BinOp(b, mult, c))
            if name == "__AddMult"
            else ast.BinOp(ast.BinOp(a, mult, b), add, c)
        )
        return ast.copy_location(
            ast.IfExp(
                test,
                sum_,
                self.call(name, [ast.Name(n, ast.Load()) for n in known], node),
            ),
            node,
        )

    @staticmethod
    def is_product(node, of):
        """Whether a rewritten expression is a product on the line of a node."""
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "__Mult"
            and (node.lineno == of.lineno)
        )

    def visit_UnaryOp(self, node):
        fixed = self.is_fixed(node) or getattr(node, "native", False)
        self.generic_visit(node)
        if not fixed and type(node.op).__name__ in OPERATIONS:
            return ast.copy_location(
                ast.Call(ast.Name(f"__{type(node.op).__name__}", ast.Load()), [node.operand], []),
                node,
            )
        return node

    def visit_IfExp(self, node):
        """Both branches get one type; where one is a number that is written down, the other is
        converted here."""
        known = self.integers is not None and None not in map(
            self.integers.of, (node.body, node.orelse)
        )
        numbers = literal_of(node.body), literal_of(node.orelse)
        self.generic_visit(node)
        for branch, number in (("orelse", numbers[0]), ("body", numbers[1])):
            if number is not None and not known:
                kind = ast.Constant("d" if isinstance(number, float) else "l")
                value = self.call("__unified", (getattr(node, branch), kind), node, with_site=False)
                setattr(node, branch, value)
        return node

    def visit_Compare(self, node):
        """Comparisons of what may be numbers of two types; a < b < c becomes two of them."""
        if self.is_native(node):
            return self.generic_visit(node)
        operands = [node.left, *node.comparators]
        for k, op in enumerate(node.ops):
            if type(op).__name__ in IDENTITIES:
                operands[k : k + 2] = map(self.with_width, operands[k : k + 2])
        node.left, *node.comparators = operands
        self.generic_visit(node)
        parts, left = [], node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            name = self.temporary() if right is not node.comparators[-1] else None
            kept = ast.NamedExpr(ast.Name(name, ast.Store()), right) if name else right
            parts.append(self.call(f"__{type(op).__name__}", (left, kept), node, with_site=False))
            left = name and ast.Name(name, ast.Load())
        return (
            parts[0] if len(parts) == 1 else ast.copy_location(ast.BoolOp(ast.And(), parts), node)
        )

    @staticmethod
    def is_native(node):
        """Whether Python's own comparison is Numba's."""
        if getattr(node, "native", False):
            return True
        names = {type(op).__name__ for op in node.ops}
        literals = {
            part.value.__class__
            for part in (node.left, *node.comparators)
            if isinstance(part, ast.Constant)
        }
        if names & IDENTITIES.keys():
            return len(node.ops) == 1 and type(None) in literals
        return not names <= COMPARISONS.keys() or bool(literals & {float, str, type(None)})

    def with_width(self, node):
        """An operand of `is`, where a number of a thread or block must be the int32 that it is."""
        if not self.is_index(node):
            return node
        return ast.copy_location(ast.Call(ast.Name("__Int32", ast.Load()), [node], []), node)

    def is_index(self, node):
        """Whether an expression is a number such as `cuda.threadIdx.x`, or a variable for one."""
        if isinstance(node, ast.Name):
            bound = () if node.id in self.parameters else self.bindings(node.id)
            return bool(bound) and all(
                isinstance(value, ast.Attribute) and self.is_index(value) for value in bound
            )
        if not isinstance(node, ast.Attribute):
            return False
        owner = getattr(node.value, "attr", getattr(node.value, "id", None))
        return owner in _DIMENSIONS or node.attr in ("laneid", "warpsize")

    def visit_match_case(self, node):
        """`case True:` is a comparison by `is`, which becomes the case's condition."""
        name = self.temporary()
        test = self.condition_of(node.pattern, name)
        if test is not None and any(
            isinstance(part, ast.MatchSingleton) for part in ast.walk(node.pattern)
        ):
            tests = [test, node.guard] if node.guard is not None else [test]
            guard = ast.BoolOp(ast.And(), tests) if len(tests) > 1 else test
            node.guard = ast.copy_location(guard, node.pattern)
            node.pattern = ast.copy_location(ast.MatchAs(None, name), node.pattern)
        return self.generic_visit(node)

    def condition_of(self, pattern, name):
        """The condition under which the variable of this name matches a pattern of single values;
        None for any other pattern."""
        value = ast.copy_location(ast.Name(name, ast.Load()), pattern)
        if isinstance(pattern, ast.MatchSingleton):
            literal = ast.copy_location(ast.Constant(pattern.value), pattern)
            return ast.copy_location(ast.Compare(value, [ast.Is()], [literal]), pattern)
        if isinstance(pattern, ast.MatchValue):
            return ast.copy_location(ast.Compare(value, [ast.Eq()], [pattern.value]), pattern)
        if isinstance(pattern, ast.MatchOr):
            tests = [self.condition_of(part, name) for part in pattern.patterns]
            if None not in tests:
                return ast.copy_location(ast.BoolOp(ast.Or(), tests), pattern)
        return None

    def visit_Call(self, node):
        space = shared_or_local(node)
        if space:
            node = self.shape_of(node, space)
            if isinstance(node.func, ast.Name):
                return node
        elif isinstance(node.func, ast.Name) and makes_arrays(self.outside.get(node.func.id)):
            for named in node.keywords:
                named.value = self.as_literal(named.value)
            node.args = list(map(self.as_literal, node.args))
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in WHOLE
            and not node.keywords
            and not (
                isinstance(node.func.value, ast.Name)
                and isinstance(self.outside.get(node.func.value.id), types.ModuleType)
            )
        ):
            node.args = [ast.Constant(node.func.attr), node.func.value, *node.args]
            node.func = ast.copy_location(ast.Name("__method", ast.Load()), node.func)
        elif (
            isinstance(node.func, ast.Name)
            and node.func.id in ("range", "zip")
            and not (self.bindings(node.func.id) or self.outside.get(node.func.id))
            and not (
                node.func.id == "range"
                and self.integers
                and None not in map(self.integers.of, node.args)
            )
        ):
            node.func = ast.copy_location(ast.Name(f"__{node.func.id}", ast.Load()), node.func)
        outside = (
            self.integers
            and isinstance(node.func, ast.Name)
            and node.func.id not in self.integers.inner
            and (self.integers.outside.get(node.func.id))
        )
        literal = len(node.args) == 1 and not node.keywords and literal_of(node.args[0])
        if outside and literal.__class__ in (int, float) and cast_named(outside) in TYPES:
            self.integers.assumed[node.func.id] = "cast", cast_named(outside)
            name = f"__cast_{len(self.casts)}"
            self.casts[name] = (
                node.func.id,
                np.float64(literal) if literal.__class__ is float else literal,
            )
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        magnitudes = getattr(node, "magnitudes", ())
        self.generic_visit(node)
        if (
            outside
            and len(node.args) == 1
            and not node.keywords
            and not isinstance(node.args[0], ast.Starred)
            and cast_named(outside) == "float32"
        ):
            return self.single(node)
        if outside and any(magnitudes) and is_function(outside):
            name = f"{node.func.id}__{len(self.variants)}"
            name = next(
                (
                    known
                    for known, given in self.variants.items()
                    if given == (node.func.id, magnitudes)
                ),
                name,
            )
            self.variants[name] = node.func.id, magnitudes
            node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        return node

    def single(self, cast):
        """A cast to float32, for which nothing is called where the number is one: what is read of
        an array that may be float16."""
        self.integers.assumed[cast.func.id] = "cast", "float32"
        kept = self.temporary()
        number = ast.NamedExpr(ast.Name(kept, ast.Store()), cast.args[0])
        is_single = ast.Compare(class_of(number), [ast.Is()], [ast.Name("__float32", ast.Load())])
        cast.args[0] = ast.Name(kept, ast.Load())
        return ast.copy_location(ast.IfExp(is_single, ast.Name(kept, ast.Load()), cast), cast)

    def as_literal(self, node):
        """An argument of a device function that makes arrays: marked if Numba knows it when it
        compiles."""
        if isinstance(node, ast.Tuple):
            node.elts = list(map(self.as_literal, node.elts))
            return node
        if not self.is_literal(node) or isinstance(node, ast.Name) and node.id in self.parameters:
            return node
        return ast.copy_location(ast.Call(ast.Name("__literal", ast.Load()), [node], []), node)

    def index(self, node):
        """An index expression as a value: slices become slice(...)."""
        if isinstance(node, ast.Slice):
            parts = [part or ast.Constant(None) for part in (node.lower, node.upper, node.step)]
            return ast.copy_location(ast.Call(ast.Name("slice", ast.Load()), parts, []), node)
        if isinstance(node, ast.Tuple):
            return ast.copy_location(
                ast.Tuple([self.index(e) for e in node.elts], ast.Load()), node
            )
        return node

    def _note_negative(self, node):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(
            isinstance(p, ast.UnaryOp)
            and isinstance(p.op, ast.USub)
            and isinstance(p.operand, ast.Constant)
            for p in parts
        ):
            self.negative.add(self.site(node))

    def visit_Subscript(self, node):
        self._note_negative(node)
        self.generic_visit(node)
        if self.checked and isinstance(node.ctx, ast.Load):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else ()
            if len(parts) == 2 and not any(isinstance(e, (ast.Slice, ast.Starred)) for e in parts):
                return self.load("__load2", (node.value, *parts), node)
            load = self.load("__load", (node.value, self.index(node.slice)), node)
            if isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant):
                # most such values are tuples, not arrays
                kind = ast.Attribute(node.value, "__class__", ast.Load())
                is_tuple = ast.Compare(kind, [ast.Is()], [ast.Name("__tuple", ast.Load())])
                return ast.copy_location(ast.IfExp(is_tuple, node, load), node)
            return load
        return node

    def temporary(self):
        self._temporaries += 1
        return f"__value_{self._temporaries}"

    def visit_Assign(self, node):
        if not self.checked or not any(
            isinstance(t, ast.Subscript) for target in node.targets for t in nodes_of(target)
        ):
            self.generic_visit(node)
            return node
        node.value = self.visit(node.value)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
            return self._stores(node.targets[0], node.value, node)
        name = self.temporary()
        statements = [
            ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], node.value), node)
        ]
        for target in node.targets:
            stores = self._stores(target, ast.Name(name, ast.Load()), node)
            statements.extend(stores if isinstance(stores, list) else [stores])
        return statements

    def _stores(self, target, value, node):
        """Statements that assign `value` to one target."""
        if isinstance(target, ast.Subscript):
            self._note_negative(target)
            array, index = self.visit(target.value), self.index(self.visit(target.slice))
            return ast.copy_location(
                ast.Expr(self.call("__store", (array, index, value), target)), node
            )
        if isinstance(target, (ast.Tuple, ast.List)) and any(
            isinstance(t, ast.Subscript) for t in nodes_of(target)
        ):
            names = [self.temporary() for _ in target.elts]
            unpack = ast.Assign(
                [ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())], value
            )
            statements = [ast.copy_location(unpack, node)]
            for name, element in zip(names, target.elts, strict=True):
                stores = self._stores(element, ast.Name(name, ast.Load()), node)
                statements.extend(stores if isinstance(stores, list) else [stores])
            return statements
        return ast.copy_location(ast.Assign([self.visit(target)], value), node)

    def visit_AugAssign(self, node):
        name = f"__{type(node.op).__name__}"
        value = self.visit(node.value)
        if type(node.op).__name__ not in OPERATIONS:
            node.value = value
            return node
        if isinstance(node.target, ast.Subscript):
            self._note_negative(node.target)
            array, index = self.visit(node.target.value), self.index(self.visit(node.target.slice))
            return ast.copy_location(
                ast.Expr(
                    self.call(
                        "__augment", (array, index, ast.Name(name, ast.Load()), value), node.target
                    )
                ),
                node,
            )
        left = (
            ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            if isinstance(node.target, ast.Name)
            else ast.copy_location(
                ast.Attribute(node.target.value, node.target.attr, ast.Load()), node
            )
        )
        if getattr(node, "native", False):
            node.value = value
            return node
        return ast.copy_location(
            ast.Assign([node.target], self.arithmetic(node.op, left, value, node)), node
        )

    def visit_AnnAssign(self, node):
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_While(self, node):
        self.sites.spins.update(
            self.site(part) for part in nodes_of(node.test) if isinstance(part, ast.expr)
        )
        waits = isinstance(node.test, ast.Constant) or any(
            isinstance(part, (ast.Subscript, ast.Call)) for part in nodes_of(node.test)
        )
        self.generic_visit(node)
        weight = ast.Constant(WAITING if waits else 1)
        turn = ast.copy_location(ast.Call(ast.Name("__turn", ast.Load()), [weight], []), node)
        report = (
            [self.call("__iterate", (ast.Constant(self.site(node)),), node, False)]
            if self.filmed
            else []
        )
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [turn, *report, node.test]), node)
        return node

    def visit_For(self, node):
        reduction = reduction_of(self, node)
        self.generic_visit(node)
        return node if reduction is None else reduction.statements(node)

    def visit_Return(self, node):
        """A local array must not leave the function that makes it."""
        self.generic_visit(node)
        if (
            self.checked
            and node.value is not None
            and not isinstance(node.value, ast.Constant)
            and self.makes_local
        ):
            node.value = self.call("__returned", (node.value,), node)
        return node

    def visit_Expr(self, node):
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "breakpoint"
        ):
            here = ast.copy_location(ast.Call(ast.Name("__here", ast.Load()), [], []), node)
            node.value = ast.copy_location(ast.BoolOp(ast.And(), [here, call]), node)
            return node
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node):
        node.decorator_list, node.returns = [], None
        for argument in nodes_of(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        shuffled = self._bound_in_branches(node) if node is self.tree else ()
        node.body = [
            statement
            for child in node.body
            for statement in (lambda v: v if isinstance(v, list) else [v])(self.visit(child))
        ]
        node.body[:0] = [
            ast.copy_location(
                ast.Assign(
                    [ast.Name(name, ast.Store())],
                    ast.Call(ast.Name("__unbound", ast.Load()), [ast.Constant(name)], []),
                ),
                node,
            )
            for name in shuffled
        ]
        return node

    def _bound_in_branches(self, node):
        """Variables that are passed on, to a function, a variable, an element or the caller, and
        that some lanes may not have given a value."""
        taken = set()
        for part in nodes_of(node):
            kind = part.__class__
            if kind is ast.Call and _passes_on(part.func):
                passed = part.args
            elif kind is ast.Assign or kind is ast.Return:
                passed = part.value.elts if isinstance(part.value, ast.Tuple) else (part.value,)
            else:
                continue
            taken.update(name.id for name in passed if isinstance(name, ast.Name))
        if not taken:
            return ()
        stored, always = set(), set()
        for statement in node.body:
            names = [n for n in nodes_of(statement) if n.__class__ is ast.Name]
            bound = {n.id for n in names if n.ctx.__class__ is ast.Store}
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                always |= bound - stored - {n.id for n in names if n.ctx.__class__ is ast.Load}
            stored |= bound
        return sorted((taken & stored) - always - self.parameters)


class Reporting:
    """Adds calls to the statements of a function that report its lines and variables to a film
    (film.py)."""

    def __init__(self, site):
        self.site = site

    def call(self, name, node, *arguments):
        call = ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
        return ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)

    def at(self, name, node):
        return self.call(name, node, ast.Constant(self.site(node)))

    def lets(self, targets, node):
        """Reports of the variables in these targets of an assignment."""
        names = [
            n.id
            for target in targets
            for n in nodes_of(target)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
        return [
            self.call("__let", node, ast.Constant(name), ast.Name(name, ast.Load()))
            for name in names
        ]

    def of_function(self, node):
        """The body of a function with its reports."""
        arguments = [
            a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ]
        lets = [
            self.call("__let", node, ast.Constant(name), ast.Name(name, ast.Load()))
            for name in arguments
        ]
        inner = ast.Try(self.of(node.body), [], [], [self.call("__return", node)])
        return [self.at("__call", node), *lets, ast.copy_location(inner, node.body[0])]

    def of(self, statements):
        """A list of statements with reports."""
        return [new for statement in statements for new in self.of_one(statement)]

    def of_one(self, node):
        if isinstance(
            node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.FunctionDef)
        ) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return [node]
        if isinstance(node, (ast.For, ast.While)):
            node.body = self.of(node.body)
            if isinstance(node, ast.For):  # that of a `while` is in its condition
                node.body = [
                    self.at("__iterate", node),
                    *self.lets([node.target], node),
                    *node.body,
                ]
            node.orelse = self.of(node.orelse)
            return [self.at("__loop", node), node, self.call("__unloop", node)]
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, name, None), list):
                setattr(node, name, self.of(getattr(node, name)))
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AugAssign)
            or isinstance(node, ast.AnnAssign)
            and node.value is not None
            else []
        )
        return [self.at("__step", node), node, *self.lets(targets, node)]


def fixed_names(function):
    """Names of numbers that a function takes from its module or closure, and so are constants to a
    compiler."""
    code = function.__code__
    found = {
        name
        for name in code.co_names
        if name not in code.co_varnames
        and isinstance(function.__globals__.get(name), (int, float, np.number))
    }
    return found | {
        name
        for name, value in captured(function).items()
        if isinstance(value, (int, float, np.number))
    }


def finish(tree):
    """Say of new nodes that they are where the nodes above them are; returns all names in the tree."""
    found, names = [tree], set()
    for node in found:  # which grows meanwhile
        if node.__class__ is ast.Name:
            names.add(node.id)
        for part in parts_of(node):
            if not hasattr(part, "lineno"):
                part.lineno, part.col_offset = node.lineno, node.col_offset
                part.end_lineno, part.end_col_offset = node.end_lineno, node.end_col_offset
            found.append(part)
    return names


def literal_of(node):
    """The number that a literal is, with its sign; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = literal_of(node.operand)
        return None if number is None else -number
    return (
        node.value
        if isinstance(node, ast.Constant) and node.value.__class__ in (int, float)
        else None
    )


class Outside(dict):
    """{name: value} of what a function finds in its closure and its module, looked up when
    requested."""

    def __init__(self, function):
        super().__init__(captured(function))
        code = function.__code__
        self._inner, self._globals = (
            {*code.co_varnames, *code.co_cellvars, *code.co_freevars},
            function.__globals__,
        )

    def get(self, name):
        return super().get(name) if name in self._inner else self._globals.get(name)


def makes_arrays(value):
    """Whether a value is a device function that makes shared or local arrays, or calls one that
    does."""
    python = getattr(value, "py_func", value)
    if not isinstance(python, types.FunctionType) or is_numbas(python.__module__):
        return False
    code = python.__code__
    if code not in _MAKING:
        _MAKING[code] = "shared" in code.co_names or "local" in code.co_names
        outside = Outside(python)
        _MAKING[code] |= any(
            makes_arrays(outside.get(name)) for name in (*code.co_names, *code.co_freevars)
        )
    return _MAKING[code]


class Rewritten(NamedTuple):
    """What `rewrite` makes of a function."""

    code: types.CodeType
    names: set  # that it takes from outside
    constants: dict  # further names that it takes: floats
    negative: set  # sites whose index is a literal -1, -2 …
    casts: dict = {}  # name -> (name of a type, a number to cast)
    variants: dict = {}  # name -> (name of a function, magnitudes of its arguments)
    assumed: dict = {}  # name -> what `Integers` takes for granted of it
    results: dict = {}  # (name of a function, magnitudes it is given) -> those that it gives


def rewrite(function, sites, checked, given=None, filmed=False, change=None):
    """A kernel or device function with its operations made explicit: `Rewritten`.

    given: magnitudes of its arguments (integers.py); None: all operations are made explicit, for
    counting
    filmed: whether each line and each variable is reported to a film (film.py), but not those of a
    module of words
    change: called with the tree, the function and the variants before it is compiled
    (generators.py)
    Without source (a function made by exec) the code object is the function's own: accesses of
    checked arrays are then still checked, but mixed arithmetic follows NumPy's rules, and loops
    that wait are not noticed.
    """
    tree, integers = (
        (source_tree(function), None) if given is None else integers_of(function, given)
    )
    if tree is None:
        code = function.__code__
        code = code.replace(
            co_consts=tuple(np.float64(c) if c.__class__ is float else c for c in code.co_consts)
        )
        return Rewritten(code, set(code.co_names) | set(code.co_freevars), {}, set())
    if integers is not None:
        integers.mark()
    filmed = filmed and function.__globals__.get("WORDS") is not True
    rewriter = Rewriter(function, sites, checked, fixed_names(function), integers, filmed)
    rewriter.tree = tree
    rewriter.makes_local = any(
        n.__class__ is ast.Call and shared_or_local(n) == "local" for n in nodes_of(tree)
    )
    if filmed:
        tree.body = Reporting(rewriter.site).of_function(tree)
    tree = rewriter.visit(tree)
    # set on the function object, below
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [d and ast.Constant(None) for d in tree.args.kw_defaults]
    if change is not None:
        change(tree, function, rewriter.variants)
    names = finish(tree)
    code = compile(ast.Module([tree], []), function.__code__.co_filename, "exec", dont_inherit=True)
    body = next(c for c in code.co_consts if hasattr(c, "co_code"))
    names |= {name for name, _ in (*rewriter.casts.values(), *rewriter.variants.values())}
    return Rewritten(
        body,
        names,
        rewriter.constants,
        rewriter.negative,
        rewriter.casts,
        rewriter.variants,
        {} if integers is None else integers.assumed,
        {} if integers is None else integers.results,
    )
