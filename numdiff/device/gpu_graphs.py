"""Steps of a GPU as CUDA graphs: what is launched is recorded, cut where the host has a part, and
replayed."""

import contextlib

# branches of `forked`: between ranks, and of parameters; others go, too
EXCHANGE, GRADIENTS = "exchange", "gradients"
# others and the first stream have 0; blocks of a lower number are placed first
PRIORITIES = {EXCHANGE: -1}


class Branch:
    """A second stream. fork, join: events; joined: whether the first has waited for all that was
    launched here; marks: further events, and how many of them have been used since"""

    def __init__(self, gpu, priority):
        from cuda.core import StreamOptions

        self.stream = gpu.device.create_stream(
            options=StreamOptions(nonblocking=True, priority=priority)
        )
        self.handle = int(self.stream.handle)
        self.fork, self.join = gpu.new_event(), gpu.new_event()
        self.joined, self.marks, self.marked = True, [], 0


class Graphs:
    """The part of a `Gpu` that captures graphs and launches work on side streams."""

    _graph_options = ()  # with which graphs are made
    # whether the next kernel follows others than the one that was launched before it
    _waits = False

    @property
    def recording(self):
        """Whether what is launched now is recorded."""
        return self._parts is not None

    def capture(self, function):
        """Record what `function()` launches as a CUDA graph, running nothing; returns a function
        that replays it.

        `function` must launch the same kernels over the same addresses each time, allocate within a
        separate arena, and neither read back nor wait. Where it calls `between(action)` the graph
        is cut in two, and a replay calls `action()` there. (CUDA programming guide, "CUDA Graphs",
        stream capture.)
        """
        with self.turn:
            # uploads during the capture bypass the stream: nothing may be under way there
            self.synchronize()
            self._parts = []
            self._begin_part()
            try:
                function()
            finally:
                self._end_part()
                parts, self._parts = self._parts, None

        def replay():
            for part in parts:
                part()

        return parts[0] if len(parts) == 1 else replay

    def between(self, action):
        """Call `action()`, a function of the host, once everything before it is launched; while
        capturing, in every replay."""
        with self.turn:  # if it is captured, then by this thread
            if self._parts is not None:
                self._end_part()
                self._parts.append(action)
                self._begin_part()
                return
        action()

    @contextlib.contextmanager
    def forked(self, name=EXCHANGE):
        """Work launched inside the context goes to a side stream. It waits for all work launched
        before on the main stream, and runs concurrently with what follows, until `join`.

        Captured, it becomes a branch of the graph. No array that it reads or writes may be freed
        before the join, or what is freed must not be given to others until then (`Arena.hold`).
        """
        with self.turn:
            if name not in self._branches:
                self._open(name)
            branch = self._branches[name]
            self.check(self._driver.cuEventRecord(branch.fork, self._handle))
            self.check(self._driver.cuStreamWaitEvent(branch.handle, branch.fork, 0))
            outer = self._target, self._handle
            self._target, self._handle, branch.joined, self._waits = (
                branch.stream,
                branch.handle,
                False,
                True,
            )
            try:
                yield
            finally:
                self._target, self._handle = outer

    def _open(self, name):
        from cuda.core.graph import GraphCompleteOptions

        self._branches[name] = Branch(self, PRIORITIES.get(name, 0))
        if name in PRIORITIES:
            self._graph_options = (GraphCompleteOptions(use_node_priority=True),)

    def join(self, name=EXCHANGE):
        """Later launches wait for the work launched within `forked`."""
        with self.turn:
            branch = self._branches.get(name)
            if branch and not branch.joined:
                self.check(self._driver.cuEventRecord(branch.join, branch.handle))
                self.wait_for(branch.join)
                branch.joined, branch.marked = True, 0

    def mark(self, name):
        """An event, for `wait_for`, after all that was launched within `forked` so far. A `join`
        ends its use."""
        with self.turn:
            branch = self._branches[name]
            if branch.marked == len(branch.marks):
                branch.marks.append(self.new_event())
            event = branch.marks[branch.marked]
            branch.marked += 1
            self.check(self._driver.cuEventRecord(event, branch.handle))
            return event

    def wait_for(self, event):
        """Later launches wait for it."""
        with self.turn:
            self.check(self._driver.cuStreamWaitEvent(self._handle, event, 0))
            self._waits = True

    def new_event(self):
        return self.check(
            self._driver.cuEventCreate(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        )

    def _begin_part(self):
        self._target = self.stream.create_graph_builder()
        # relaxed: loading a kernel for the first time is allowed meanwhile
        self._target.begin_building("relaxed")

    def _end_part(self):
        for name in self._branches:  # a graph cannot end before its branches
            self.join(name)
        builder, self._target = self._target, self.stream
        builder.end_building()
        graph = builder.complete(*self._graph_options)

        def launch():
            with self.turn:
                graph.launch(self.stream)

        self._parts.append(launch)
