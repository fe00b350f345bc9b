"""An emulated GPU's reports: the place in the code, and the fault there."""

import sys

from .arrays import CheckedArray, IntegerArray
from .faults import Fault, KernelFault, LaunchRefused, Place, Unsupported
from .rewrite import SITES

# NumPy's words where an array is stored into one element
_SEQUENCE = "setting an array element with a sequence."


class Reports:
    """The part of an `Emulator` that notes faults, and finds out why threads do not meet."""

    def site_here(self):
        """The site of the innermost kernel line that is running."""
        frame = sys._getframe(2)  # the caller of this is no kernel
        while frame is not None:
            names = frame.f_globals
            if "__emulated__" in names:
                return self.site_of(frame) if names["__words__"] else SITES.of(frame)
            frame = frame.f_back
        return self.site_of(None)

    @staticmethod
    def site_of(frame):
        """The site of the line that a frame is at; in a module of words (WORDS), of the line that
        uses the word."""
        frame = Reports.kernel_frame(frame)
        return SITES.number("?", "?", 0) if frame is None else SITES.of(frame)

    @staticmethod
    def kernel_frame(frame):
        """The frame of a kernel's line at or above a frame, as `site_of`. A twin that keeps a frame
        keeps this one: the other is none of the kernel's where `generators.wait` has called the
        twin."""
        while frame is not None and "__emulated__" not in frame.f_globals:
            frame = frame.f_back
        while (
            frame is not None
            and frame.f_globals.get("__words__")
            and frame.f_back is not None
            and ("__emulated__" in frame.f_back.f_globals)
        ):
            frame = frame.f_back
        return frame

    def place(self, site, thread=None):
        function, file, line = SITES.places[site]
        return Place(function, file, line, thread and thread.block.index, thread and thread.index)

    @staticmethod
    def calling_frame(frame=None):
        """The innermost frame of the program that calls this, or the code at `frame`, outside of
        the emulator."""
        frame, package = frame or sys._getframe(1), f"{__package__}."
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(package):
            frame = frame.f_back
        return frame

    @staticmethod
    def line_of(frame):
        """The `Place` of the program's line that a frame is at."""
        return Place(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)

    def report(self, kind, message, site, thread=None, others=(), pair=None):
        """Note a fault, and return whether it is new; the same kind at the same line is counted,
        not repeated.

        pair: of a race, the other line
        """
        known = self.seen_faults.get((kind, site, pair))
        if known is not None:
            known.count += 1
            return False
        fault = Fault(
            kind, message, self.place(site, thread or self.thread), list(others), 1, self.kernel
        )
        self.seen_faults[kind, site, pair] = fault
        self.faults.append(fault)
        if self.film is not None:
            self.film.fault(fault, thread or self.thread)
        return True

    def thread_failed(self, thread, error):
        """A Python exception came out of a thread."""
        if isinstance(error, (KernelFault, LaunchRefused)):
            raise error
        site, trace = None, error.__traceback__
        while trace is not None:
            if "__emulated__" in trace.tb_frame.f_globals:
                code = trace.tb_frame.f_code
                site = SITES.number(code.co_name, code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        site = SITES.number("?", "?", 0) if site is None else site
        if isinstance(error, Unsupported):
            raise Unsupported(f"{str(error).rstrip('.')}; used at {self.place(site)}.") from None
        kind = {IndexError: "bounds", ZeroDivisionError: "division"}.get(type(error), "error")
        self.report(kind, _in_words(error), site, thread)

    def _here(self):
        """Whether breakpoint() stops in this thread."""
        if self.stop_at is None:
            self.stop_at = self.thread.block.index, self.thread.index
        return self.stop_at == (self.thread.block.index, self.thread.index)

    def absent_lane(self, name, thread, lane):
        block = thread.block
        other = next((t for t in block.warp_threads(thread.warp) if t.lane == lane), None)
        why = (
            "does not exist"
            if other is None
            else "has ended"
            if other.done
            else "is not in the mask"
        )
        self.report(
            "divergence",
            f"{name}: lane {thread.lane} takes a value from lane {lane}, which {why}",
            self.site_of(thread.wait[2] if thread.wait else self._frame_here()),
            thread,
        )

    @staticmethod
    def _frame_here():
        frame = sys._getframe(1)
        while frame is not None and "__emulated__" not in frame.f_globals:
            frame = frame.f_back
        return frame

    def check_meeting(self, block, name, arrived, count):
        """A barrier is complete: did all the threads come to it, and to the same one?"""
        if "divergence" not in self.checks or count is not None:
            return
        thread, _, first, *_ = arrived[0]
        calls = _calls(first, self.entry)
        if block.alive < len(block.threads):
            gone = next(t for t in block.threads if t.done)
            self.report(
                "divergence",
                f"{name} is reached by {block.alive} of the block's {len(block.threads)} "
                f"threads: thread {gone.index} has ended before it",
                self.site_of(first),
                thread,
            )
        for other, _, frame, *_ in arrived:
            if frame is not first and not _is_at(frame, calls, self.entry):
                self.report(
                    "divergence",
                    f"thread {thread.index} waits at this {name}, thread {other.index} at another",
                    self.site_of(first),
                    thread,
                    [("the other is", self.place(self.site_of(frame), other))],
                )
                return

    def check_gathering(self, name, mask, lanes):
        """A warp operation is complete: was it the same one for all?"""
        if "divergence" not in self.checks:
            return
        (_, first, thread, _), *others = lanes.values()
        calls = _calls(first, self.entry)
        for _, frame, other, _ in others:
            if not _is_at(frame, calls, self.entry):
                self.report(
                    "divergence",
                    f"lane {thread.lane} is at this {name}, lane {other.lane} at another",
                    self.site_of(first),
                    thread,
                    [("the other is", self.place(self.site_of(frame), other))],
                )
                return

    def stuck(self, scheduler):
        """No thread can continue: report which threads wait where, and for what."""
        waiting = [
            t for b in scheduler.blocks for t in b.threads if not t.done and t.wait is not None
        ]
        groups = {}
        for thread in waiting:
            wait = thread.wait
            groups.setdefault((wait[0], self.site_of(wait[2]), str(wait[1])), []).append(thread)

        def say(key, threads):
            kind, site, detail = key
            more = f" and {len(threads) - 1} more" if len(threads) > 1 else ""
            what = {"loop": "spins in a loop", "warp operation": "waits for its warp"}.get(
                kind, "waits"
            )
            return (
                f"thread {threads[0].index} of block {threads[0].block.index}{more} {what}"
                f"{' at ' + self._say_wait(threads[0].wait) if kind != 'loop' else ''}:",
                self.place(site),
            )

        def deadlock(key):
            thread = groups[key][0]
            self.report(
                "deadlock",
                f"no thread can continue: {self._say_wait(thread.wait)}",
                key[1],
                thread,
                others,
            )

        others = [say(key, threads) for key, threads in groups.items()]
        at_mbarrier = next((key for key in groups if key[0] == "mbarrier"), None)
        # others wait for it, at a barrier of the warp, the block or the cluster
        if at_mbarrier is not None:
            deadlock(at_mbarrier)
        for block in scheduler.blocks:
            for (warp, name, mask), lanes in block.collectives.items():
                missing = [
                    t
                    for t in block.warp_threads(warp)
                    if mask >> t.lane & 1 and t.lane not in lanes and not t.done
                ]
                _, frame, thread, _ = next(iter(lanes.values()))
                names = ", ".join(str(t.lane) for t in missing)
                self.report(
                    "divergence",
                    f"{name} with the mask {mask:#x} waits for lane{'s' * (len(missing) > 1)} "
                    f"{names}, which never come{'s' * (len(missing) == 1)}",
                    self.site_of(frame),
                    thread,
                    others,
                )
            barriers = dict(block.arrived)
            if block.waiting:
                barriers["syncthreads"] = [(t, None, t.wait[2], None, None) for t in block.waiting]
            for name, arrived in barriers.items():
                thread, _, frame, _, count = arrived[0]
                self.report(
                    "divergence",
                    f"{name} is reached by {len(arrived)} of {count or block.alive} threads, the "
                    "others never come",
                    self.site_of(frame),
                    thread,
                    others,
                )
        if (
            not any(f.kind in ("divergence", "deadlock") for f in self.seen_faults.values())
            and waiting
        ):
            deadlock(next((key for key in groups if key[0] != "loop"), next(iter(groups))))

    @staticmethod
    def _say_wait(wait):
        if wait[0] == "loop":
            return "a loop waits for something that never comes, or its condition never changes"
        if wait[0] == "warp operation":
            return f"{wait[1][0]} with the mask {wait[1][1]:#x}"
        return str(wait[1])


def _in_words(error):
    """A Python exception in a kernel, as one sentence that names none of the emulator's own
    classes."""
    text = str(error)
    owner = getattr(error, "obj", None)
    if (
        isinstance(error, AttributeError)
        and type(owner) in (CheckedArray, IntegerArray)
        and not owner.dtype.names
    ):
        text = f"the emulator does not know .{error.name} of arrays"
    elif "CheckedArray" in text or "IntegerArray" in text or text == _SEQUENCE:
        text = "the emulator does not know arithmetic on whole arrays: index their elements"
    elif text == "'function' object is not subscriptable":
        text = "the emulator does not know kernels that launch kernels (dynamic parallelism)"
    return f"{type(error).__name__}: {text}"


def _calls(frame, entry):
    """[(code, instruction)] of a thread's call and of the calls of device functions that it was
    reached through. entry: the code of the kernel, above which there are none"""
    calls = [(frame.f_code, frame.f_lasti)]
    while frame.f_code is not entry:  # Python makes an object for each frame that is looked at
        frame = frame.f_back
        if frame is None or "__emulated__" not in frame.f_globals:
            break
        calls.append((frame.f_code, frame.f_lasti))
    return calls


def _is_at(frame, calls, entry):
    """Whether another thread is at the same call, reached through the same ones."""
    for code, instruction in calls:
        if frame is None or frame.f_lasti != instruction or frame.f_code is not code:
            return False
        if code is entry:
            return True
        frame = frame.f_back
    return frame is None or "__emulated__" not in frame.f_globals
