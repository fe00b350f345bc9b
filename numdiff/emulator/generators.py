"""Threads as generators, where greenlet cannot be had: WebAssembly has no second stack to switch
to.

A greenlet waits in the middle of whatever functions have called each other. A generator can wait
only in its own text, so the kernel's text is changed once more (`yielding`), after rewrite.py:

    cuda.syncthreads()      (yield from __wait(cuda.syncthreads))      and all that may wait, or is not known
    device_function(x)      (yield from device_function(x))            if its text waits somewhere
    __turn(1)               (__turn(1) or not (yield))                 the head of each `while`

A function that waits nowhere stays as it is. `__wait` calls the function. Where that must wait,
`Scheduler.give_way` raises `Waits`, which ends the emulator's frames up to `__wait`. It yields, and
returns the thread's result once the scheduler has resumed it. So no function of the emulator has
anything left to do after it has waited, but for the `then` of `Scheduler.pause`.

Faults are those of greenlets, and so are results. `python -m tests.emulator.test_generators`
measures the time: a matrix product in tiles takes 1.3 times as long, a kernel of barriers alone 1.7
times. Without greenlet, a call that may wait must be visible in the text: a function without
source, and one called in a comprehension, end in `Unsupported`.
"""

import ast
import builtins
import sys
import types

from .faults import Unsupported
from .integers import nodes_of
from .loops import TURNS
from .namespace import TWINS
from .overloads import overloads_of
from .rewrite import Outside, source_tree
from .schedule import Scheduler
from .values import is_numbas

# Functions of Numba that may wait, by their last name
WAITING = frozenset(
    """syncthreads syncthreads_count syncthreads_and syncthreads_or syncwarp shfl_sync shfl_up_sync
    shfl_down_sync shfl_xor_sync all_sync any_sync eq_sync ballot_sync match_any_sync match_all_sync activemask
    nanosleep sync""".split()
)


class Waits(BaseException):
    """The current thread waits. then: what makes its result of what it is woken with, or None."""

    def __init__(self, then=None):
        self.then = then


def wait(machine):
    """`__wait` of a machine: call a function that may wait, or a generator function, from within a
    kernel."""

    def waiting(function, *arguments, **named):
        try:
            result = function(*arguments, **named)
        except Waits as waits:
            then = waits.then
        else:
            return (yield from result) if result.__class__ is types.GeneratorType else result
        while True:
            yield
            result = machine.thread.result
            if then is None:
                return result
            try:
                return then(result)
            except Waits as waits:
                then = waits.then

    return waiting


# The text -----------------------------------------------------------------------------------------

_WAIT = {}  # code of a function -> whether it may wait


def may_wait(function):
    """Whether a function of a kernel waits somewhere: it has a `while`, a call that may wait or is
    not known, or calls a function that waits."""
    code = function.__code__
    if code not in _WAIT:
        _WAIT[code] = False  # while it is looked at: a function that calls itself
        tree, outside = source_tree(function), Outside(function)
        _WAIT[code] = tree is not None and any(
            isinstance(node, ast.While)
            or isinstance(node, ast.Call)
            and kind_of(node, outside) != "plain"
            for statement in tree.body
            for node in nodes_of(statement)
        )
    return _WAIT[code]


def kind_of(call, outside, variants=()):
    """ "plain", "waits" (or it is not known), or "generator": of a function whose text waits.

    outside: what the calling function finds outside of itself; variants: names of rewrite.py's ->
    (name, magnitudes)
    """
    parts, node = [], call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return "waits" if parts and parts[0] in WAITING else "plain"
    name = variants[node.id][0] if node.id in variants else node.id
    if name.startswith("__"):
        return "plain"
    value = outside.get(name)
    if value is None:
        if parts:  # a method of a variable
            return "waits" if parts[0] in WAITING else "plain"
        return "plain" if hasattr(builtins, name) else "waits"  # a function that is a variable
    for part in reversed(parts):
        value = getattr(value, part, None)
    if id(value) in TWINS:
        return "waits"
    python = getattr(value, "py_func", value)
    if isinstance(python, types.FunctionType) and not is_numbas(python.__module__):
        return "waits" if overloads_of(value) else "generator" if may_wait(python) else "plain"
    if parts:
        return "waits" if parts[0] in WAITING else "plain"
    return "waits" if getattr(value, "__name__", "") in WAITING else "plain"


def yielding(tree, function, variants):
    """Change the rewritten tree of a function that may wait, so that it does so by `yield`."""
    if may_wait(function):
        outside = Outside(function)
        Yielding(lambda call: kind_of(call, outside, variants)).visit(tree)


class Yielding(ast.NodeTransformer):
    """Makes a rewritten function wait by `yield`. kind(call): "plain", "generator" or "waits"."""

    def __init__(self, kind):
        self.kind, self.inside = kind, 0

    def visit_Call(self, node):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        kind = "turn" if name == "__turn" else self.kind(node)
        self.generic_visit(node)
        if kind == "plain":
            return node
        if self.inside:
            raise Unsupported(
                "a call that may wait, within a comprehension or a lambda, needs greenlet"
            )
        if kind == "turn":
            return ast.copy_location(
                ast.BoolOp(ast.Or(), [node, ast.UnaryOp(ast.Not(), ast.Yield())]), node
            )
        if kind == "waits":
            wait = ast.copy_location(ast.Name("__wait", ast.Load()), node)
            node = ast.copy_location(ast.Call(wait, [node.func, *node.args], node.keywords), node)
        return ast.copy_location(ast.YieldFrom(node), node)

    def _within(self, node):
        self.inside += 1
        self.generic_visit(node)
        self.inside -= 1
        return node

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _within


# The scheduler ------------------------------------------------------------------------------------


class Stop:
    """A frame at which a thread waits, as long as its generator is suspended: Python then unlinks
    frames."""

    __slots__ = ("_frame", "f_code", "f_lasti", "f_lineno", "f_globals", "f_back")

    def __init__(self, frame):
        self._frame, self.f_code, self.f_lasti = frame, frame.f_code, frame.f_lasti
        self.f_lineno, self.f_globals = frame.f_lineno, frame.f_globals
        back = frame.f_back
        self.f_back = Stop(back) if back is not None and "__emulated__" in back.f_globals else None

    @property
    def f_locals(self):
        return self._frame.f_locals


def stop_at(frame):
    """The `Stop` of the innermost frame of the kernel's at or above one."""
    while "__emulated__" not in frame.f_globals:
        frame = frame.f_back
    return frame if frame.__class__ is Stop else Stop(frame)


class GeneratorScheduler(Scheduler):
    """A `Scheduler` whose threads are generators: `thread.greenlet` is one, or None before it has
    begun."""

    def _turn_until_stuck(self):
        while self.awake:
            ready, self.awake = self.awake, []
            if self.machine.order == "shuffled":
                ready.sort(key=self._draw)
            self.round = iter(ready)
            while (thread := self.following()) is not None:
                self._resume(thread)
            if self.polls and not self.awake:
                self._poll()

    def _resume(self, thread):
        """Run a thread until it waits or ends."""
        try:
            if thread.greenlet is None:
                body = self.body()
                if body.__class__ is types.GeneratorType:
                    thread.greenlet = body
                    next(body)
                    return
            else:
                thread.wait = None
                next(thread.greenlet)
                return
        except StopIteration:
            pass
        except Waits as waits:
            error = Unsupported(
                "a function without source, or one that the emulator cannot follow, waits here, which "
                "needs greenlet"
            )
            self.machine.thread_failed(thread, error.with_traceback(waits.__traceback__))
        except Exception as error:
            self.machine.thread_failed(thread, error)
        self.exit(thread)

    def give_way(self):
        raise Waits

    def pause(self, kind, detail, frame, then=None):
        self.machine.thread.wait = (kind, detail, stop_at(frame))
        raise Waits(then)

    def turn(self, weight):
        """As for greenlets; False where the kernel must yield."""
        thread = self.machine.thread
        thread.turns += weight
        if thread.turns < TURNS:
            return True
        thread.turns = 0
        thread.wait = ("loop", "", stop_at(sys._getframe(2)))
        self.spinning.append(thread)
        return False

    def yield_turn(self, frame):
        super().yield_turn(stop_at(frame))

    def syncthreads(self, frame):
        thread = self.machine.thread
        thread.wait = ("barrier", "syncthreads", stop_at(frame))
        waiting = thread.block.waiting
        waiting.append(thread)
        if len(waiting) == thread.block.alive:
            self._release(thread.block)
        raise Waits

    def meet(self, name, value, combine, frame, count=None):
        return super().meet(name, value, combine, stop_at(frame), count)

    def gather(self, name, mask, payload, combine, frame, then=None):
        return super().gather(name, mask, payload, combine, stop_at(frame), then)

    def cluster_meet(self, relaxed, frame):
        super().cluster_meet(relaxed, stop_at(frame))

    def abandon(self):
        if self.machine.film is not None:
            self.machine.film.abandons(self.blocks)
        for block in self.blocks:
            for thread in block.threads:
                if thread.greenlet is not None and not thread.done:
                    thread.greenlet.close()
        self.blocks, self.awake, self.spinning, self.polls, self.round = [], [], [], [], iter(())
