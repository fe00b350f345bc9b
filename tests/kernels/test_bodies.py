"""A kernel reads as set-up, producer, main loop, epilogue: how long a body may be, how many
arguments, how deep."""

import ast

import pytest

from tests.kernels.test_reading_order import KERNELS, statements, tree_of

STATEMENTS, ARGUMENTS, DEPTH = 72, 14, 6  # of a body without its docstring; blocks within blocks
# of cuda: who names it runs on a GPU
HARDWARE = ("threadIdx", "blockIdx", "shared", "local", "grid", "syncthreads")


def gpu_functions(tree):
    """[function] of a file that a GPU runs: decorated by cuda.jit or device_inline, given to one or
    to `specialise`, or one that asks for its thread, where a factory's own helper compiles it."""
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    given = {
        node.args[0].id
        for node in nodes
        if isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Name)
        and (
            is_of_cuda(node.func, ("jit",))
            or isinstance(node.func, ast.Name)
            and node.func.id == "specialise"
        )
    }

    def asks(node):
        """Whether it names the hardware itself, not in a function within it."""
        return any(
            is_of_cuda(each, HARDWARE) or not isinstance(each, ast.FunctionDef) and asks(each)
            for each in ast.iter_child_nodes(node)
        )

    return [
        node
        for node in functions
        if node.name in given
        or asks(node)
        or any(
            is_of_cuda(each, ("jit",)) or isinstance(each, ast.Name) and each.id == "device_inline"
            for decorator in node.decorator_list
            for each in ast.walk(decorator)
        )
    ]


def is_of_cuda(node, names):
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == "cuda"
    )


def measure(function):
    """(statements of the body without its docstring, arguments, blocks within blocks)."""

    def depth(node):
        # elif
        if (
            isinstance(node, ast.If)
            and len(node.orelse) == 1
            and isinstance(node.orelse[0], ast.If)
        ):
            return max(1 + max(map(depth, node.body)), depth(node.orelse[0]))
        inner = max(
            map(depth, (*getattr(node, "body", ()), *getattr(node, "orelse", ()))), default=0
        )
        return inner + isinstance(node, (ast.For, ast.While, ast.If, ast.With))

    body = function.body[ast.get_docstring(function) is not None :]
    count = sum(ast.unparse(part).count("\n") + 1 for part in body)  # a line each, as written
    return count, len(function.args.args), depth(function)


def measured():
    """{"folder/file.py function": its measures} of what is over a bar; of namesakes the largest of
    each."""
    found = {}
    for path in sorted(KERNELS.rglob("*.py")):
        tree = tree_of(path)
        over = [
            node
            for node in statements(tree)
            if isinstance(node, ast.FunctionDef)
            and any(
                size > bar
                for size, bar in zip(measure(node), (STATEMENTS, ARGUMENTS, DEPTH), strict=True)
            )
        ]
        # which of a file's are takes longer
        for function in set(over) & set(gpu_functions(tree)) if over else ():
            name, sizes = (
                f"{path.relative_to(KERNELS).as_posix()} {function.name}",
                measure(function),
            )
            found[name] = tuple(map(max, sizes, found.get(name, sizes)))
    return found


def test_bodies_can_be_held():
    assert not measured(), "cut it into named device functions, group its arguments: NamedTuple"


@pytest.mark.parametrize(
    "text, sizes",
    [
        (
            "def kernel(x):\n    '''X.'''\n    for i in x:\n        if i:\n            pass\n    return\n",
            (4, 1, 2),
        ),
        ("def kernel(x, y):\n    return\n", (1, 2, 0)),
    ],
)
def test_what_is_measured(text, sizes):
    assert measure(ast.parse(text).body[0]) == sizes


def test_who_is_measured(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("""
@cuda.jit(device=True)
def a():
    pass
def b():
    pass
def make():
    def c():
        pass
    def d():
        return cuda.threadIdx.x
    return cuda.jit(c, launch_bounds=1), compiled(d)
B = specialise(b, N=1)
@device_inline
def e():
    pass
""")
    assert sorted(function.name for function in gpu_functions(tree_of(path))) == [
        "a",
        "b",
        "c",
        "d",
        "e",
    ]
