"""Who runs when: barriers and their results, orders, tricky programs that are right, waits that
never end."""

import gc
import time
import tracemalloc

import greenlet
import numpy as np
import pytest

from numdiff.device import cuda, float32, int32
from numdiff.emulator import ORDERS, Emulator, KernelFault
from numdiff.emulator.schedule import Scheduler
from tests.conftest import THREAD_ORDERS, exhaustive, exhaustively
from tests.emulator.planting import fault_at, faults_of, marked, race_between, run

ALL = 0xFFFFFFFF
MODES = pytest.mark.parametrize(
    "options",
    [
        {"order": "shuffled"},
        {"checks": False},
        *exhaustively(
            {"order": "forward"}, {"order": "reversed"}, {"order": "shuffled", "seed": 7}
        ),
    ],
    ids=["shuffled", "unchecked", "forward", "reversed", "seed 7"],
)
float64 = np.float64


@cuda.jit
def barrier_results(x, out):
    t = cuda.threadIdx.x
    out[0, t] = cuda.syncthreads_count(x[t] > 2)
    out[1, t] = cuda.syncthreads_and(x[t] > 2)
    out[2, t] = cuda.syncthreads_or(x[t] > 2)


@exhaustive
def test_a_launch_leaves_no_threads_behind():
    """Python's collector sees no cycle through a greenlet: whatever is not ended stays for good."""

    run(barrier_results, 1, 40, np.arange(40), np.zeros((3, 40), np.int32))
    gc.collect()
    gc.freeze()  # so that what other tests have left is not looked through
    run(barrier_results, 1, 40, np.arange(40), np.zeros((3, 40), np.int32))
    gc.collect()
    assert not any(issubclass(type(thing), greenlet.greenlet) for thing in gc.get_objects())


# programs that look wrong and are right -----------------------------------------------------------


@cuda.jit
def double_buffer(x, y, n):
    """One barrier a step: what is written in step s was last read in step s - 2."""
    tile = cuda.shared.array((2, 64), float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for s in range(n):
        tile[s % 2, t] = x[s * 64 + t]
        cuda.syncthreads()
        total += tile[s % 2, 63 - t] + tile[s % 2, (t + 1) % 64]
    y[t] = total


@cuda.jit
def warp_synchronous(x, y):
    """A tree in shared memory, each warp in its own part, with syncwarp for barriers."""
    shared = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    lane = t % 32
    shared[t] = x[t]
    cuda.syncwarp()
    distance = 16
    while distance > 0:
        other = float32(0)
        if lane < distance:
            other = shared[t + distance]
        cuda.syncwarp()
        if lane < distance:
            shared[t] += other
        cuda.syncwarp()
        distance //= 2
    y[t] = shared[t - lane]


@cuda.jit
def barrier_by_vote(x, y):
    """syncthreads_and is a barrier as any."""
    shared = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    for s in range(3):
        shared[t] = x[t] + float32(s)
        if cuda.syncthreads_and(x[t] < float32(100)):
            y[t] += shared[63 - t]
        cuda.syncthreads_count(1)


@cuda.jit
def all_set_the_flag(x, y):
    """Many threads write the same value."""
    flag = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    if t == 0:
        flag[0] = 0
    cuda.syncthreads()
    if x[t] > 0:
        flag[0] = 1
    cuda.syncthreads()
    y[t] = flag[0]


@cuda.jit
def uniform_branch(x, y):
    """A barrier in a branch that all of the block take, and in a loop that all leave together."""
    shared = cuda.shared.array(64, float32)
    t, step = cuda.threadIdx.x, 0
    shared[t] = x[t]
    if cuda.blockDim.x > 32:
        cuda.syncthreads()
        y[t] = shared[63 - t]
        cuda.syncthreads()
    while True:
        step += 1
        shared[t] += float32(1)
        cuda.syncthreads()
        done = shared[(t + 7) % 64] > float32(5)
        if not cuda.syncthreads_or(not done):
            break
    y[t] += float32(step)


@cuda.jit
def leaves_early(x, y, n):
    """Threads that have nothing to do end before the others exchange by warps that are whole."""
    t = cuda.threadIdx.x
    if t >= n:
        return
    value = x[t]
    for distance in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(ALL, value, distance)
    y[t] = value


@cuda.jit
def in_turn(x, y):
    """A thread reads what it has written itself, and what is its own."""
    shared = cuda.shared.array((64, 2), float32)
    t = cuda.threadIdx.x
    shared[t, 0] = x[t]
    shared[t, 1] = shared[t, 0] * float32(2)
    y[t] = shared[t, 1]
    y[t] += shared[t, 0]


@cuda.jit
def grid_exchange(x, y):
    i = cuda.grid(1)
    grid = cuda.cg.this_grid()
    for _ in range(3):
        value = x[(i + 16) % x.size] + float32(1)
        grid.sync()
        x[i] = value
        grid.sync()
    y[i] = x[i]


X = np.random.default_rng(0).integers(-5, 50, 64).astype(np.float32)
RIGHT = {
    double_buffer: (1, (np.tile(X, 5), 5), lambda: 5 * (X[::-1] + np.roll(X, -1))),
    warp_synchronous: (1, (X,), lambda: np.repeat(X.reshape(2, 32).sum(1), 32)),
    barrier_by_vote: (1, (X,), lambda: (3 * X + 3)[::-1]),
    all_set_the_flag: (1, (X,), lambda: np.ones(64)),
    uniform_branch: (1, (X - X.min(),), lambda: (X - X.min())[::-1] + 6),
    leaves_early: (1, (X, 32), lambda: np.r_[np.full(32, X[:32].sum()), np.zeros(32)]),
    in_turn: (1, (X,), lambda: 3 * X),
    grid_exchange: (4, (X.copy(),), lambda: np.roll(X, -48) + 3),
}


@MODES
@pytest.mark.parametrize("kernel", RIGHT, ids=lambda k: k.py_func.__name__)
def test_right_programs_give_no_report(kernel, options):
    grid, (x, *more), want = RIGHT[kernel]
    y = np.zeros(64, np.float32)
    arguments = (x.copy(), y, *more)
    run(kernel, grid, 64 // grid, *arguments, **options)
    assert np.array_equal(y, want())


# the same programs with a fault -------------------------------------------------------------------


@THREAD_ORDERS
def test_a_grid_barrier_that_is_missing(order):
    @cuda.jit
    def kernel(x):
        i = cuda.grid(1)
        value = x[(i + 16) % x.size]  # of another block
        cuda.syncthreads()
        x[i] = value  # of this one

    faults = faults_of(kernel, 4, 16, np.zeros(64, np.float32), order=order)
    race_between(
        faults, __file__, marked(__file__, "of another block"), marked(__file__, "of this one")
    )


# waits that never end -----------------------------------------------------------------------------


def waiting_kernels():
    @cuda.jit
    def on_global_memory(x):
        while x[0] == 0:  # global
            pass

    @cuda.jit
    def on_shared_memory(x):
        flag = cuda.shared.array(1, int32)
        if cuda.threadIdx.x == 0:
            flag[0] = 0
        cuda.syncthreads()
        while flag[0] == 0:  # shared
            pass

    @cuda.jit
    def without_a_turn(x):
        while True:  # nothing
            pass

    @cuda.jit
    def in_the_body(x):
        while True:
            if cuda.atomic.add(x, 0, 0) > 0:  # body
                break

    @cuda.jit
    def on_a_lock(x):
        while cuda.atomic.cas(x, 1, 0, 1) != 0:  # lock
            pass
        cuda.syncthreads()  # the holder

    @cuda.jit
    def after_a_sleep(x):
        while x[0] == 0:
            cuda.nanosleep(100)  # sleep

    return {
        "global": on_global_memory,
        "shared": on_shared_memory,
        "nothing": without_a_turn,
        "body": in_the_body,
        "lock": on_a_lock,
        "sleep": after_a_sleep,
    }


@pytest.mark.parametrize("checks", [True, ("divergence",)], ids=["all checks", "divergence"])
@pytest.mark.parametrize("name", waiting_kernels())
def test_an_endless_wait_is_a_deadlock(name, checks):
    start = time.monotonic()
    faults = faults_of(
        waiting_kernels()[name], 1, 4, np.zeros(2, np.int32), patience=0.1, checks=checks
    )
    assert time.monotonic() - start < 10
    stuck = [f for f in faults if f.kind in ("deadlock", "divergence")]
    lines = {f.line for f in stuck} | {place.line for f in stuck for _, place in f.others}
    line = marked(__file__, name)
    assert lines & {line, line - 1, line + 1}, [str(f) for f in faults]
    assert stuck[0].kind == ("divergence" if name == "lock" else "deadlock")
    assert stuck[0].block == (0, 0, 0) and stuck[0].others


def test_a_deadlock_says_who_waits_where():
    @cuda.jit
    def kernel(x):
        t = cuda.threadIdx.x
        if t < 32:
            cuda.syncthreads()  # first warp
        elif t < 64:
            cuda.shfl_sync(ALL, t, 0)
            while x[0] == 0:  # second warp
                pass
        elif t % 2 == 0:
            cuda.syncwarp()  # even lanes

    faults = faults_of(kernel, 1, 96, np.zeros(1, np.int32), patience=0.1)
    text = "\n".join(str(f) for f in faults)
    first = fault_at(faults, "divergence", __file__, marked(__file__, "first warp"))
    assert "reached by 32 of" in first.message and {place.line for _, place in first.others} >= {
        marked(__file__, "first warp"),
        marked(__file__, "second warp"),
    }, text


def test_blocks_that_wait_for_later_blocks_go_on():
    @cuda.jit
    def kernel(x, y):
        if cuda.blockIdx.x == cuda.gridDim.x - 1:
            y[0] = 5
            cuda.threadfence()
            cuda.atomic.add(x, 0, 1)
        else:
            while cuda.atomic.add(x, 0, 0) == 0:
                pass
        y[1 + cuda.blockIdx.x] = y[0]

    for order in ORDERS:
        x, y = np.zeros(1, np.int32), np.zeros(4, np.int32)
        run(kernel, 3, 1, x, y, order=order)
        assert (y == 5).all()


@pytest.mark.parametrize("checks", [True, False])
def test_long_loops_are_no_deadlock(checks):
    @cuda.jit
    def collatz(x, steps):
        i = cuda.grid(1)
        value, n = x[i], 0
        while value != 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            n += 1
        while n < 10000:
            n += 1
        steps[i] = n

    steps = np.zeros(4, np.int64)
    run(collatz, 2, 2, np.array([1, 27, 97, 871]), steps, patience=0.05, checks=checks)
    assert (steps == 10000).all()


# one bit in another order -------------------------------------------------------------------------


def test_orders_are_what_they_say():
    @cuda.jit
    def kernel(head, out):
        out[cuda.atomic.add(head, 0, 1)] = cuda.grid(1)

    results = {}
    for order, seed in (
        ("forward", 0),
        ("reversed", 0),
        ("shuffled", 0),
        ("shuffled", 0),
        ("shuffled", 1),
    ):
        out = np.zeros(24, np.int32)
        run(kernel, 3, 8, np.zeros(1, np.int32), out, order=order, seed=seed)
        assert sorted(out) == list(range(24))
        assert results.setdefault((order, seed), out.tolist()) == out.tolist()
    assert (
        results["forward", 0] == list(range(24)) and results["reversed", 0] == list(range(24))[::-1]
    )
    assert len({tuple(r) for r in results.values()}) == 4
    with pytest.raises(
        ValueError, match="unknown order 'backward': use forward, reversed, shuffled"
    ):
        run(kernel, 1, 1, order="backward")
    with pytest.raises(ValueError, match="unknown checks bound: use some of bounds"):
        run(kernel, 1, 1, checks=("bound",))


def test_a_thread_that_ends_lets_the_others_pass_and_is_reported():
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x == 3:
            return
        cuda.syncthreads()  # without thread 3
        x[cuda.threadIdx.x] = 1

    x = np.zeros(8, np.float32)
    with pytest.raises(KernelFault) as caught:
        run(kernel, 1, 8, x)
    fault = fault_at(
        caught.value.faults, "divergence", __file__, marked(__file__, "without thread 3")
    )
    assert "thread (3, 0, 0) has ended" in fault.message and x.sum() == 7


@cuda.jit
def forgets_its_next_index(x):
    i = cuda.grid(1)
    while i < x.size:  # the same again
        x[i] = float32(1)


@cuda.jit
def waits_in_vain_for_nan(x):
    error = x[0]
    while not error < float32(1):  # never true
        error *= x[1]


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(
    "kernel, value, mark",
    [(forgets_its_next_index, 0, "the same again"), (waits_in_vain_for_nan, np.nan, "never true")],
)
def test_a_loop_that_repeats_itself_is_endless_though_it_stores(kernel, value, mark, checks):
    faults = faults_of(kernel, 1, 2, np.full(4, value, np.float32), patience=0.02, checks=checks)
    assert [f.kind for f in faults] == ["deadlock"] and faults[0].line == marked(__file__, mark)


@cuda.jit
def counts_in_memory(x):
    own = cuda.local.array(1, int32)
    own[0] = 0
    while own[0] < 20000:
        own[0] += 1
    while x[0] < 20000:
        x[0] += 1


@pytest.mark.parametrize("checks", [True, False])
def test_a_loop_that_changes_memory_alone_goes_on(checks):
    x = np.zeros(1, np.int32)
    run(counts_in_memory, 1, 1, x, patience=0.002 if checks else 0.05, checks=checks)
    assert x[0] == 20000


def test_a_grid_of_many_blocks_takes_no_memory_for_each():
    machine = Emulator()
    scheduler = Scheduler(machine, None, (1, 1, 1))
    scheduler.start = lambda blocks: started.append(blocks) or 1 / 0
    started = []
    tracemalloc.start()
    with pytest.raises(ZeroDivisionError):
        scheduler.run((2**31 - 1, 65535, 65535), (1, 1, 1))
    assert started == [[(0, 0, 0)]] and tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
