"""Run small weight-gradient kernels on a side stream of the GPU, concurrently with the backward
pass.

WHY
    A layer's backward is two independent kernels. One computes the gradient of its input, which the
    layer before it needs next. The other computes the gradient of its weight, which is not read
    before the pass ends. Neither fills the GPU for a small layer: a UNet's convolution at 8×8 has
    16 tiles for 132 multiprocessors. In sequence they leave most of the GPU idle, and each begins
    and ends with microseconds without a product.
HOW
    Within `backward_pass`, work launched in `on_side_stream` goes to the side stream, which waits
    there for the main stream. The main stream continues. It waits for the side stream (`rejoin`)
    before work that needs its results or its memory:
        a gradient that is read or added to before the pass ends         `wait_for_gradient`
        an array that was made there and is read by the pass itself      `made_on_side_stream`, `wait_for`
        memory that is freed: the arena holds it back meanwhile; of more than HELD bytes the older half, `wait_if_full`
        the end of the pass, second passes (kernels/reduce/second_pass.py), and aliased activations (nn/aliasing.py)
    A third stream that takes gradients to other ranks waits for the side stream by itself
    (`follow`).
    Both streams launch the same kernels as one would, on the same numbers: the same bits.
    `at_once` is for tasks of which all are there at the same time, such as Muon's stacks of
    matrices (nn/optimizer.py).
WHERE
    dy has up to SMALL bytes: of a larger layer each kernel fills the GPU by itself. On a device
    that is not a GPU, or in a step that is not recorded, everything is launched in order; memory is
    held back all the same, so that a recorded step takes no other than the one that runs before it.
MEASURED
    The UNet's step in fp16, H100: 5.95 to 5.61 ms with 32 images, 5.69 with 32 MiB held, 5.54 with
    128, 5.52 with all; 3.34 to 2.87 with 8 images; DiT-S/2 with 64 images as before. H200, where
    the main stream still waited for all when too much was held: 5.54 to 5.25 ms.
SOURCE
    CUDA programming guide, "CUDA Graphs", on stream capture across streams.
READ NEXT
    kernels/linear/group.py
"""

import contextlib
from typing import Any, NamedTuple

from ..device import GRADIENTS, forked, is_device, join
from .arena import StreamArena
from .threads import ThreadStack

SMALL = 17 << 20  # bytes of dy: all of a UNet's layers with 32 images
HELD = 64 << 20  # bytes that wait for the side stream


class Job(NamedTuple):
    """One launch in `on_side_stream`. first: the arena's position when it began; event: recorded
    after it, or None"""

    first: int
    event: Any


class Pass:
    """A thread's backward pass.

    backend: whose side stream has work that the main stream has not waited for, or None; jobs: that
    work; arena: the one
        that holds back what is freed; targets, results: arrays that are made there, gradients and
        others
    inside: whether that stream is launched to now
    """

    def __init__(self):
        self.inside = False
        self.forget()

    def forget(self):
        self.backend, self.arena, self.jobs, self.targets, self.results = None, None, [], [], []

    @contextlib.contextmanager
    def job(self, backend):
        if self.backend is None:
            self.backend, self.arena = backend, getattr(backend, "arena", None)
            if self.arena is not None:
                self.arena.hold()
        first, event = self.arena and self.arena.position, None
        self.inside = True
        try:
            if forks(backend):
                with forked(backend, GRADIENTS):
                    yield
                event = backend.mark(GRADIENTS)
            else:
                yield
        finally:
            self.inside = False
        self.jobs.append(Job(first, event))

    def make_room(self):
        """Wait for as many jobs, the oldest first, as leave half of HELD to the arena."""
        for left, job in enumerate(self.jobs[1:], 1):
            if self.arena.held_since(job.first) <= HELD // 2:
                if (event := self.jobs[left - 1].event) is not None:
                    self.backend.wait_for(event)
                self.arena.let_go(job.first)
                del self.jobs[:left]
                return
        self.close()

    def close(self):
        """Wait for all."""
        if self.backend is not None:
            join(self.backend, GRADIENTS)
        self.let_go()

    def let_go(self):
        if self.arena is not None:
            self.arena.let_go()
        self.forget()


_passes = ThreadStack()  # at most one a thread
_orders = ThreadStack()  # of `in_order`


@contextlib.contextmanager
def in_order():
    """Context: steps are recorded with everything in one stream, for timing kernels one by one."""
    _orders.append(None)
    try:
        yield
    finally:
        _orders.pop()


def forks(backend):
    """Whether there is a side stream for what is launched now: on a GPU that records a step."""
    return getattr(backend, "recording", False) and not _orders


@contextlib.contextmanager
def backward_pass():
    """Context: at its end the main stream waits for the second."""
    if _passes:  # a pass within a pass
        yield
        return
    _passes.append(Pass())
    try:
        yield
        _passes[-1].close()
    finally:
        _passes.pop().let_go()


@contextlib.contextmanager
def on_side_stream(dy, *targets, small=None):
    """Context: work launched here computes gradients, and adds to or writes `targets` (None: not
    wanted).

    small: bytes of dy up to which it goes to the side stream; None: SMALL
    """
    current = _passes[-1] if _passes else None
    # what waits may have been made before the last `rejoin`
    if current is not None and current.inside:
        current.targets.extend(array for array in targets if array is not None)
    if (
        current is None
        or current.inside
        or not is_device(dy)
        or dy.nbytes > (SMALL if small is None else small)
    ):
        yield
        return
    current.targets.extend(array for array in targets if array is not None)
    with current.job(dy.backend):
        yield


def rejoin():
    """Later launches wait for all work launched in `on_side_stream`."""
    if _passes and not _passes[-1].inside:
        _passes[-1].close()


def follow():
    """Later launches on the current stream, a further one, wait for all work launched in
    `on_side_stream`; the main stream does not wait."""
    if _passes and _passes[-1].jobs and (event := _passes[-1].jobs[-1].event) is not None:
        _passes[-1].backend.wait_for(event)


def made_on_side_stream(array):
    """Register an array (or None) made within `on_side_stream` that the pass will read, by way of
    `wait_for`."""
    if array is not None and _passes and _passes[-1].backend is not None:
        _passes[-1].results.append(array)


def wait_for(arrays):
    """`rejoin` if one of these arrays was `made_on_side_stream`."""
    if _passes and any(array is made for array in arrays for made in _passes[-1].results):
        rejoin()


def wait_for_gradient(array):
    """`rejoin` if a gradient in this array's memory is made in the side stream."""
    if _passes and any(overlaps(array, target) for target in _passes[-1].targets):
        rejoin()


def wait_if_full():
    """Wait for the side stream's older work, if too much memory does."""
    if _passes and _passes[-1].arena is not None and _passes[-1].arena.held_since(0) > HELD:
        _passes[-1].make_room()


def at_once(backend, tasks):
    """Call functions that launch what does not need one another, each for a separate stream; what
    is launched afterwards waits for all. What they allocate must be gone when they return."""
    several, outer = forks(backend), getattr(backend, "arena", None)
    names, lanes = [f"task {k}" for k in range(1, len(tasks))], []
    for name, task in zip([*names, None], [*tasks[1:], tasks[0]], strict=True):
        # the first task is last: each of the others waits for all that the main stream has been
        # given
        with contextlib.ExitStack() as own:
            if several and name:
                own.enter_context(forked(backend, name))
            if outer is not None:
                lanes.append(StreamArena(outer))
                own.enter_context(backend.within(lanes[-1]))
            task()
    for name in names:
        join(backend, name)
    for lane in lanes:
        lane.close()


def overlaps(a, b):
    """Whether an array shares memory with a device array."""
    return (
        is_device(a)
        and a.memory is b.memory
        and a.offset < b.offset + b.nbytes
        and b.offset < a.offset + a.nbytes
    )
