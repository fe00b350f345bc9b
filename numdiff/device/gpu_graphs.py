"""Steps of a GPU as CUDA graphs: what is launched is recorded, cut where the host has a part, and replayed."""
import contextlib


class Graphs:
    """The part of a `Gpu` that records what is launched, and that launches beside it what is to run beside it."""

    _branch = None  # of `forked`: a second stream, events of fork and join, and with which options a graph is made then
    _joined = True  # whether nothing is launched there that the first has not waited for
    _waits = False  # whether the next kernel follows others than the one that was launched before it

    def capture(self, function):
        """Record what `function()` launches as a CUDA graph, running nothing; returns a function that replays it.

        `function` must launch the same kernels over the same addresses each time, allocate within an arena of its own,
        and neither read back nor wait. Where it calls `between(action)` the graph is cut in two, and a replay calls
        `action()` there. (CUDA programming guide, "CUDA Graphs", stream capture.)
        """
        with self.turn:
            self.synchronize()  # uploads during the capture bypass the stream: nothing may be under way there
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
        """Call `action()`, a function of the host, once everything before it is launched; while capturing, in every
        replay."""
        with self.turn:  # if it is captured, then by this thread
            if self._parts is not None:
                self._end_part()
                self._parts.append(action)
                self._begin_part()
                return
        action()

    @contextlib.contextmanager
    def forked(self):
        """What is launched inside the context goes to a second stream: it waits for all that was launched before, and
        runs beside what follows, until `join`. Its blocks are placed before those that wait in the first stream.

        Captured, it becomes a branch of the graph. No array that it reads or writes may be freed before the join.
        """
        with self.turn:
            self._branch = self._branch or self._open_branch()
            stream, fork, *_ = self._branch
            self.check(self._driver.cuEventRecord(fork, self._handle))
            self.check(self._driver.cuStreamWaitEvent(int(stream.handle), fork, 0))
            outer = self._target, self._handle
            self._target, self._handle, self._joined, self._waits = stream, int(stream.handle), False, True
            try:
                yield
            finally:
                self._target, self._handle = outer

    def _open_branch(self):
        from cuda.core import StreamOptions
        from cuda.core.graph import GraphCompleteOptions
        flag = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        return (self.device.create_stream(options=StreamOptions(nonblocking=True, priority=-1)),
                *(self.check(self._driver.cuEventCreate(flag)) for _ in range(2)),
                GraphCompleteOptions(use_node_priority=True))

    def join(self):
        """What is launched from now on waits for what was launched within `forked`."""
        with self.turn:
            if not self._joined:
                stream, _, join, _ = self._branch
                self.check(self._driver.cuEventRecord(join, int(stream.handle)))
                self.check(self._driver.cuStreamWaitEvent(self._handle, join, 0))
                self._joined = self._waits = True

    def _begin_part(self):
        self._target = self.stream.create_graph_builder()
        self._target.begin_building("relaxed")  # relaxed: loading a kernel for the first time is allowed meanwhile

    def _end_part(self):
        self.join()  # a graph cannot end before its branches
        builder, self._target = self._target, self.stream
        builder.end_building()
        graph = builder.complete(*(self._branch or ())[3:])

        def launch():
            with self.turn:
                graph.launch(self.stream)
        self._parts.append(launch)
