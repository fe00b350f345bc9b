"""The syntax tree of a kernel's definition, found by its file and first line."""

import ast
import contextlib
import inspect
import linecache
import textwrap
import tokenize
import weakref

_TEXTS = weakref.WeakKeyDictionary()  # code of a function -> what `_text_of` gave


def captured(function):
    """{name: value} of what a function finds in its closure, without names that have no value yet:
    a branch that is not taken may name them."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell without contents
            found[name] = cell.cell_contents
    return found


def source_tree(function):
    """The syntax tree of a function's definition, line numbers as in its file; None if the source
    is not known."""
    code = function.__code__
    if code.co_name == "<lambda>":
        return lambda_tree(function)
    try:
        tree = quick_tree(code)
    except (SyntaxError, ValueError):
        tree = None
    if tree is not None:
        return tree
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    # its file is another text, such as a page with it
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None
    node = next(
        (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name),
        None,
    )
    if node is not None:
        ast.increment_lineno(tree, start - 1)
    return node


def quick_tree(code):
    """The same, from the first line of a definition to the next one that is not indented more. None
    or a `SyntaxError` if that is wrong: a string or parentheses may reach further."""
    if code not in _TEXTS:
        _TEXTS[code] = _text_of(code)
    text, indent = _TEXTS[code]
    if text is None:
        return None
    tree = ast.parse(text).body
    node = (tree[0].body if indent else tree)[0]
    return node if isinstance(node, ast.FunctionDef) and node.name == code.co_name else None


def _text_of(code):
    """(the text of a definition, below as many empty lines as are above it in its file; its
    indentation); (None, 0) if the file has no such line."""
    linecache.checkcache(code.co_filename)
    lines, start = linecache.getlines(code.co_filename), code.co_firstlineno - 1
    if not 0 <= start < len(lines):
        return None, 0
    indent, stop, inside = (
        _indent(lines[start]),
        start + 1,
        lines[start].lstrip().startswith("def "),
    )
    while stop < len(lines):
        line = lines[stop]
        if _indent(line) <= indent and not line.isspace() and not line.lstrip().startswith("#"):
            if inside:
                break
            inside = line.lstrip().startswith("def ")  # after its decorators
        stop += 1
    above = "\n" * start if not indent else "\n" * (start - 1) + "if 1:\n"
    return above + "".join(lines[start:stop]), indent


def _indent(line):
    return len(line) - len(line.lstrip())


def lambda_tree(function):
    """A lambda as a definition; None if its source is not known, or where its line has several."""
    code = function.__code__
    try:
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, TypeError, SyntaxError):
        return None
    found = [
        n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno
    ]
    if len(found) > 1 and hasattr(code, "co_positions"):
        positions = {(line, column) for line, _, column, _ in code.co_positions()}
        found = [n for n in found if (n.body.lineno, n.body.col_offset) in positions]
    if len(found) != 1:
        return None
    body = ast.copy_location(ast.Return(found[0].body), found[0].body)
    # from Python 3.12 on
    more = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    return ast.copy_location(
        ast.FunctionDef(code.co_name, found[0].args, [body], [], None, None, **more), found[0]
    )
