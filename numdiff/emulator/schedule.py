"""Which thread of a GPU runs next, where threads meet, and what it means when none can continue.

A thread, which is a greenlet (threads.py), runs until it must wait: at a barrier, for the other
lanes of its warp, for an mbarrier. Then the next one runs. Nothing is ever preempted (a `while`
loop that spins gives others a turn), so a launch is deterministic. The order of the threads' turns
(forward, reversed, or shuffled by a seed) is an option: a correct kernel gives the same bits in
each.

Blocks run one after another, those of a cluster together. The next one starts early only if all
started blocks wait for something that none of them can provide, as at a grid-wide barrier.
"""

import random

from .loops import Loops
from .threads import FULL_MASK, WARP, WORKERS, Block, Cluster, greenlet


def blocks_of(place, across, size):
    """The indices of a cluster's blocks. place: its number, x fastest; across: clusters along each
    dimension; size: blocks"""
    x, y = place % across[0], place // across[0]
    x, y, z = x * size[0], y % across[1] * size[1], y // across[1] * size[2]
    return [
        (x + i, y + j, z + k)
        for k in range(size[2])
        for j in range(size[1])
        for i in range(size[0])
    ]


def _all_run(block):
    """Whether all warps of a block have all their lanes, none of which has ended."""
    return block.whole and block.alive == len(block.threads)


class Scheduler(Loops):
    """Runs the blocks of a launch. The emulator's functions call `meet`, `gather`, `pause` from
    within threads."""

    def __init__(self, machine, body, dimensions):
        super().__init__()
        self.machine, self.body, self.dimensions = machine, body, dimensions
        self.hub = greenlet and greenlet.getcurrent()
        self.idle = WORKERS.idle  # workers without a thread
        self.awake = []
        self.round = iter(())  # of those that were awake, whose turn is still to come
        self.unborn = None  # a thread whose turn it is, for which the hub must make a worker
        self.polls = []  # (thread, condition) of threads in wait_for_others
        draw = random.Random(machine.seed).random
        # sorted by what it gives, threads are shuffled, in half of shuffle()'s time
        self._draw = lambda _: draw()
        self.progress = 0  # counts everything that may let a waiting thread continue
        self.checked = machine.checked
        self.blocks = []
        self.total = self.ended = 0  # blocks
        self.grid_arrived = []

    # running --------------------------------------------------------------------------------------

    def run(self, grid, cluster):
        """Run all clusters of blocks, one after another, or together where they wait for each
        other."""
        self.total = grid[0] * grid[1] * grid[2]
        across = [n // k for n, k in zip(grid, cluster, strict=True)]
        clusters = self.ordered(range(self.total // (cluster[0] * cluster[1] * cluster[2])))
        # a grid may have more blocks than there is memory for a list of them
        coming = (blocks_of(place, across, cluster) for place in clusters)
        following = next(coming, None)
        while following or self.blocks:
            if not self.blocks:
                self.start(following)
                following = next(coming, None)
            self._turn_until_stuck()
            for block in [b for b in self.blocks if not b.alive]:
                self.finish(block)
            if self.blocks and not self.awake:
                if self.machine.asynchronous.deliver():
                    continue
                if following and not (self.spinning and self._loops_go_on()):
                    self.start(following)
                    following = next(coming, None)
                elif self.spinning:
                    self._spin()
                else:
                    self.machine.stuck(self)
                    self.abandon()

    def start(self, indices):
        cluster = Cluster()
        cluster.blocks = [
            Block(self.machine, index, self.dimensions, cluster, rank)
            for rank, index in enumerate(indices)
        ]
        for block in self.ordered(cluster.blocks) if len(indices) > 1 else cluster.blocks:
            self.blocks.append(block)
            self.machine.block_starts(block)
            self.awake.extend(self.ordered(block.threads))

    def finish(self, block):
        self.machine.block_ends(block)
        self.blocks.remove(block)
        self.ended += 1

    def abandon(self):
        """Drop all threads that still wait: Python's collector sees no cycle through a greenlet."""
        if self.machine.film is not None:
            self.machine.film.abandons(self.blocks)
        for block in self.blocks:
            for thread in block.threads:
                if thread.greenlet is not None and not thread.done:
                    thread.greenlet.throw(greenlet.GreenletExit)
        WORKERS.shrink()
        self.blocks, self.awake, self.spinning, self.polls, self.round = [], [], [], [], iter(())

    def _turn_until_stuck(self):
        while self.awake:
            ready, self.awake = self.awake, []
            if self.machine.order == "shuffled":
                ready.sort(key=self._draw)
            self.round = iter(ready)
            thread = self.following()
            # one switches to the next by itself; the last one comes back here
            while thread is not None:
                if thread.greenlet is None:
                    thread.greenlet = WORKERS.take(self.hub)
                    thread.greenlet.switch(self, thread)
                else:
                    thread.wait = None
                    thread.greenlet.switch()
                thread, self.unborn = self.unborn, None
            if self.polls and not self.awake:
                self._poll()

    def following(self):
        """The thread whose turn comes next in this round, now the current one; None if all have had
        theirs."""
        machine = self.machine
        for thread in self.round:
            if not thread.done:
                # what `enter` does, inlined for the most frequent case
                if machine.block is thread.block:
                    machine.thread, at = thread, machine.thread_index
                    at.x, at.y, at.z = thread.index
                else:
                    self.enter(thread)
                return thread
        return None

    def give_way(self):
        """Let the others run; comes back when the current thread, once woken, has its turn again."""
        machine = self.machine
        block = machine.block
        for thread in self.round:
            # what `following` does, inlined for the most frequent case
            if thread.block is block and thread.greenlet is not None and not thread.done:
                machine.thread, at = thread, machine.thread_index
                at.x, at.y, at.z = thread.index
                thread.wait = None
                thread.greenlet.switch()
                return
            if not thread.done:
                self.switch_to(thread)
                return
        self.hub.switch()

    def switch_to(self, thread):
        """Let this thread run."""
        self.enter(thread)
        if thread.greenlet is not None:
            thread.wait = None
            thread.greenlet.switch()
        elif self.idle:
            thread.greenlet = WORKERS.take(self.hub)
            thread.greenlet.switch(self, thread)
        else:  # a worker that is made here would have its stack on top of this one's
            self.unborn = thread
            self.hub.switch()

    def enter(self, thread):
        """Make `thread` the current one: what threadIdx and blockIdx say."""
        machine = self.machine
        machine.thread = thread
        at = machine.thread_index
        at.x, at.y, at.z = thread.index
        if machine.block is not thread.block:
            machine.block = thread.block
            machine.token = thread.block.token
            at = machine.block_index
            at.x, at.y, at.z = thread.block.index

    def exit(self, thread):
        thread.done, block = True, thread.block
        block.alive -= 1
        self.progress += 1
        self.machine.asynchronous.thread_ends(thread)
        if block.waiting and len(block.waiting) == block.alive:
            self._release(block)
        for name in list(block.arrived):
            self._release_if_complete(block, name)
        for key in [k for k in block.collectives if k[0] == thread.warp]:
            self._combine_if_complete(block, key)
        if block.cluster.waiting:
            self._cluster_release(block.cluster)
        if self.grid_arrived:
            self._grid_release()

    def ordered(self, threads):
        if self.machine.order == "reversed":
            return threads[::-1]
        if self.machine.order == "shuffled":
            return sorted(threads, key=self._draw)
        return threads

    # waiting --------------------------------------------------------------------------------------

    def pause(self, kind, detail, frame, then=None):
        """Let others run until this thread is woken; returns what `wake` brought, or what `then`
        makes of it.

        The caller returns its result as it is: what is to be done when the thread has been woken is
        in `then`.
        """
        thread = self.machine.thread
        thread.wait = (kind, detail, frame)
        self.give_way()
        return thread.result if then is None else then(thread.result)

    def wake(self, threads):
        self.progress += 1
        self.awake.extend(threads)

    def syncthreads(self, frame):
        """The barrier of the whole block."""
        machine = self.machine
        thread = machine.thread
        block = thread.block
        thread.wait = ("barrier", "syncthreads", frame)
        waiting = block.waiting
        waiting.append(thread)
        if len(waiting) == block.alive:
            self._release(block)
        for thread in self.round:  # `give_way`, inlined for the most frequent case
            if thread.block is block and thread.greenlet is not None and not thread.done:
                machine.thread, at = thread, machine.thread_index
                at.x, at.y, at.z = thread.index
                thread.wait = None
                thread.greenlet.switch()
                return
            if not thread.done:
                self.switch_to(thread)
                return
        self.hub.switch()

    def _release(self, block):
        threads, block.waiting = block.waiting, []
        machine = self.machine
        if self.checked:
            machine.check_meeting(
                block, "syncthreads", [(t, None, t.wait[2]) for t in threads], None
            )
            self._after_barrier(block, threads)
        if machine.film is not None:
            machine.film.meets(threads, "syncthreads")
        self.progress += 1
        self.awake.extend(threads)

    def _after_barrier(self, block, threads):
        """All threads of the block have now seen what any of them did."""
        seen = [t.clock for t in block.threads]
        for thread in threads:
            thread.seen = seen
            thread.clock += 1
            thread.stamp = (thread, thread.clock)
        block.token = object()
        if self.machine.block is block:
            self.machine.token = block.token

    def meet(self, name, value, combine, frame, count=None):
        """A barrier: wait until all threads of the block (or `count`) are here; `combine(values)`
        is the result."""
        thread = self.machine.thread
        block = thread.block
        arrived = block.arrived.get(name)
        if arrived is None:
            arrived = block.arrived[name] = []
        arrived.append((thread, value, frame, combine, count))
        if len(arrived) >= (count or block.alive):
            self._release_if_complete(block, name)
        return self.pause("barrier", name, frame)

    def _release_if_complete(self, block, name):
        arrived = block.arrived.get(name)
        if not arrived:
            return
        _, _, first, combine, count = arrived[0]
        if len(arrived) < (count or block.alive):
            return
        del block.arrived[name]
        machine = self.machine
        if self.checked:
            machine.check_meeting(block, name, arrived, count)
            if count is None:
                self._after_barrier(block, [t for t, *_ in arrived])
            else:
                self.join([t for t, *_ in arrived])
        if machine.film is not None:
            machine.film.meets([t for t, *_ in arrived], name)
        result = combine([v for _, v, *_ in arrived]) if combine else None
        for thread, *_ in arrived:
            thread.result = result
        self.wake([t for t, *_ in arrived])

    def join(self, threads):
        """Each of these threads has now seen what any of them has."""
        lists = {id(t.seen): t.seen for t in threads}
        seen = (
            list(map(max, zip(*lists.values(), strict=True)))
            if len(lists) > 1
            else list(threads[0].seen)
        )
        for thread in threads:
            seen[thread.tid] = max(seen[thread.tid], thread.clock)
        for thread in threads:
            thread.tick(seen)

    def gather(self, name, mask, payload, combine, frame, then=None):
        """A warp operation: wait for the lanes in `mask`; `combine({lane: payload})` gives {lane:
        result}; `then` as in `pause`."""
        thread = self.machine.thread
        block, key = thread.block, (thread.warp, name, mask)
        lanes = block.collectives.get(key)
        if lanes is None:
            lanes = block.collectives[key] = {}
        lanes[thread.lane] = (payload, frame, thread, combine)
        # lanes that have ended are missing: the rest may be complete
        if mask != FULL_MASK or len(lanes) == WARP or not _all_run(block):
            self._combine_if_complete(block, key)
        return self.pause("warp operation", (name, mask), frame, then)

    def _combine_if_complete(self, block, key):
        warp, name, mask = key
        lanes = block.collectives.get(key)
        if lanes is None:
            return
        if len(lanes) < WARP:
            for thread in block.warp_threads(warp):
                if mask >> thread.lane & 1 and not thread.done and thread.lane not in lanes:
                    return
        del block.collectives[key]
        combine = next(iter(lanes.values()))[3]
        if self.checked:
            self.machine.check_gathering(name, mask, lanes)
        if self.machine.film is not None:
            self.machine.film.meets([given[2] for given in lanes.values()])
        results = combine(
            {lane: given[0] for lane, given in lanes.items()},
            {lane: given[2] for lane, given in lanes.items()},
        )
        woken = []
        for lane in sorted(lanes, reverse=self.machine.order == "reversed"):
            thread = lanes[lane][2]
            thread.result = results.get(lane) if results else None
            woken.append(thread)
        self.wake(woken)

    def wait_for_others(self, condition, kind, detail, frame, then):
        """Wait until no other thread can continue, and `condition()` holds then; `then` as in
        `pause`."""
        self.polls.append((self.machine.thread, condition))
        return self.pause(kind, detail, frame, then)

    def _poll(self):
        waiting, self.polls = self.polls, []
        for thread, condition in waiting:
            if thread.done:
                continue
            self.enter(thread)
            if condition():
                self.wake([thread])
            else:
                self.polls.append((thread, condition))

    def grid_meet(self, frame):
        """A barrier over the whole grid: all blocks must have started."""
        thread = self.machine.thread
        self.grid_arrived.append(thread)
        self._grid_release()
        self.pause("grid barrier", "grid.sync()", frame)

    def _grid_release(self):
        alive = sum(b.alive for b in self.blocks)
        if len(self.blocks) + self.ended == self.total and len(self.grid_arrived) == alive:
            threads, self.grid_arrived = self.grid_arrived, []
            if self.machine.film is not None:
                self.machine.film.meets(threads, "grid.sync")
            for block in self.blocks:
                block.fenced = True
                self._after_barrier(block, block.threads)
            self.machine.grid_synchronised()
            self.wake(threads)

    def cluster_meet(self, relaxed, frame):
        """A barrier of all threads of the cluster that have not ended, wherever they call it."""
        thread = self.machine.thread
        cluster = thread.block.cluster
        thread.wait = ("cluster barrier", cluster, frame)
        cluster.waiting.append(thread)
        cluster.relaxed |= relaxed
        self._cluster_release(cluster)
        self.give_way()

    def _cluster_release(self, cluster):
        blocks = [b for b in cluster.blocks if b.alive]
        if len(cluster.waiting) < sum(b.alive for b in blocks):
            return
        threads, cluster.waiting = cluster.waiting, []
        if self.checked:
            clocks = {b: [t.clock for t in b.threads] for b in cluster.blocks}
            for block in blocks:
                block.met.update(
                    (other, clock) for other, clock in clocks.items() if other is not block
                )
                if not cluster.relaxed:
                    block.state.setdefault("acquired", {}).update(block.met)
                    self._after_barrier(block, [t for t in threads if t.block is block])
            if cluster.relaxed:
                for thread in threads:
                    thread.tick(thread.seen)
        cluster.relaxed = False
        if self.machine.film is not None:
            self.machine.film.meets(threads, "cluster_sync")
        self.wake(threads)
