"""Threads of a GPU, the blocks and clusters that they make up, and the greenlets that run them."""

import contextvars
import threading

try:
    import greenlet
except ImportError:  # WebAssembly has none: generators.py runs the threads
    greenlet = None

WARP, FULL_MASK = 32, 0xFFFFFFFF  # lanes, and the mask that names them all
# workers that have nothing to do are kept for later launches: to make one takes as long as 30
# switches
KEPT = 1024


# What a launch is made of -------------------------------------------------------------------------


class Dim3:
    """Three numbers of a launch or of a thread, as a kernel reads them."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x=1, y=1, z=1):
        self.x, self.y, self.z = x, y, z

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __repr__(self):
        return f"({self.x}, {self.y}, {self.z})"


class Thread:
    """One GPU thread: where it is, what it has seen (races.py), what it waits for."""

    __slots__ = (
        "tid",
        "index",
        "block",
        "warp",
        "lane",
        "clock",
        "stamp",
        "seen",
        "greenlet",
        "wait",
        "done",
        "result",
        "turns",
        "fenced",
        "state",
        "log",
    )

    def __init__(self, tid, index, block):
        self.tid, self.index, self.block = tid, index, block
        self.warp, self.lane = tid // WARP, tid % WARP
        self.clock, self.seen = 1, None
        self.stamp = (self, 1)  # thread and time: one object for all accesses between two barriers
        self.greenlet = self.wait = self.result = None
        self.done, self.turns = False, 0
        self.fenced = 0  # clock at its last fence for the asynchronous proxy
        self.state = {}  # what asynchronous instructions keep for each thread
        self.log = None  # of a film (film.py)

    def tick(self, seen):
        """Advance the clock: later events are after all in `seen`, and distinct from earlier ones."""
        self.seen = seen
        self.clock += 1
        self.stamp = (self, self.clock)


class Block:
    """The threads of one block, its shared memory, and the places where its threads meet."""

    def __init__(self, machine, index, dimensions, cluster, rank):
        self.machine, self.index, self.cluster, self.rank = machine, index, cluster, rank
        # of its shared memory by other blocks of the cluster: stamp -> (site, in words)
        self.uses = {}
        self.met = {}  # other block of the cluster -> clocks of its threads at their last barrier
        x, y, z = dimensions
        self.threads = [
            Thread(t, (t % x, t // x % y, t // (x * y)), self) for t in range(x * y * z)
        ]
        start = [0] * len(self.threads)
        for thread in self.threads:
            thread.seen = start
        self.alive = len(self.threads)
        self.whole = self.alive % WARP == 0  # whether all its warps have all their lanes
        self.token = object()  # another one after each barrier of the whole block
        self.waiting = []  # threads at syncthreads()
        self.arrived = {}  # other barriers: name -> [(thread, value, frame, combine, count)]
        self.collectives = {}  # (warp, name, mask) -> {lane: (payload, frame)}
        self.fenced = False  # whether a thread used an atomic, a fence or a grid barrier
        self.shared = {}  # where a shared array was made -> (memory, offset, shape, dtype)
        self.static = self.dynamic = None  # Memory
        self.state = {}

    def warp_threads(self, warp):
        return self.threads[warp * WARP : (warp + 1) * WARP]


class Cluster:
    """Blocks that run together and reach each other's shared memory; most clusters are a single
    block."""

    def __init__(self):
        self.blocks = []
        # where a shared array of fixed size was made -> its place in the memory of each block
        self.offsets = {}
        # threads at cluster_sync(); whether one of them orders no memory
        self.waiting, self.relaxed = [], False

    def __str__(self):
        alive = sum(block.alive for block in self.blocks)
        return (
            f"cluster_sync, which {len(self.waiting)} of the cluster's {alive} threads have reached"
        )


# Greenlets ----------------------------------------------------------------------------------------


class Workers(threading.local):
    """Greenlets that run the threads of one launch after another; they belong to the CPU's thread
    that made them."""

    def __init__(self):
        self.idle = []

    def take(self, hub):
        """A worker that waits for (scheduler, thread), and ends in the greenlet `hub` if it ends."""
        if self.idle:
            worker = self.idle.pop()
            if worker.parent is not hub:
                worker.parent = hub
            return worker
        worker = greenlet.greenlet(_work, hub)
        # NumPy keeps there that overflow is no error
        worker.gr_context = contextvars.copy_context()
        return worker

    def shrink(self):
        """End those that are more than are kept."""
        while len(self.idle) > KEPT:
            self.idle.pop().throw(greenlet.GreenletExit)


WORKERS = Workers()


def _work(scheduler, thread):
    """Body of a worker greenlet: runs one thread after another."""
    while True:
        try:
            scheduler.body()
        except greenlet.GreenletExit:
            return
        except Exception as error:
            scheduler.machine.thread_failed(thread, error)
        scheduler.exit(thread)
        thread = scheduler.following()
        if thread is not None and thread.greenlet is None:
            thread.greenlet = greenlet.getcurrent()
            continue
        to, idle = scheduler.hub, scheduler.idle
        if thread is not None:
            to, thread.wait = thread.greenlet, None
        scheduler = thread = None  # what waits for work keeps no launch's memory
        idle.append(greenlet.getcurrent())
        del idle
        scheduler, thread = to.switch()
