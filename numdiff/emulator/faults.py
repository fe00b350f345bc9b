"""The emulator's reports: faults, each with its kernel, file, line, block and thread."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """A line of a kernel, and the thread there. block, thread: (x, y, z) or None."""

    function: str
    file: str
    line: int
    block: tuple | None = None
    thread: tuple | None = None

    def __str__(self):
        who = "" if self.thread is None else f", block {self.block}, thread {self.thread}"
        return f"{self.file}:{self.line} in {self.function}{who}"


@dataclass
class Fault:
    """One fault of a kernel.

    kind: "bounds", "uninitialised", "race", "divergence", "deadlock", "mbarrier", "wgmma",
        "cp.async", "descriptor", "alignment", "float64", "proxy", "cluster", "escape", "division",
        "error"
    message: one sentence; place: where; others: [(what happened there, Place)]; count: how often it
    was seen
    launched: the line that launched the kernel, a Place without block and thread; None if no line
    is known
    """

    kind: str
    message: str
    place: Place
    others: list = field(default_factory=list)
    count: int = 1
    kernel: str = ""
    launched: Place | None = None

    @property
    def file(self):
        return self.place.file

    @property
    def line(self):
        return self.place.line

    @property
    def block(self):
        return self.place.block

    @property
    def thread(self):
        return self.place.thread

    def __str__(self):
        lines = [f"{self.kind}: {self.message}", f"    at {self.place}"]
        lines += [f"    {what} {place}" for what, place in self.others]
        if self.count > 1:
            lines.append(f"    and {self.count - 1} more of this kind at this line")
        return "\n".join(lines)


class EmulatorError(Exception):
    """An error of the emulator; the message says in words what is wrong."""


class KernelFault(EmulatorError):
    """A kernel did what a kernel must not do; `faults` is the list, in the order in which they were
    seen."""

    def __init__(self, kernel, faults):
        self.kernel, self.faults = kernel, list(faults)
        count = len(self.faults)
        super().__init__(
            f"kernel {kernel} has {count} fault{'s' if count > 1 else ''}:\n"
            + "\n".join(str(f) for f in self.faults)
        )

    def __reduce__(self):  # to another process, as those of multiprocessing and pytest-xdist
        return type(self), (self.kernel, self.faults)


class Unsupported(EmulatorError):
    """A kernel uses something that the emulator does not know."""


class LaunchRefused(EmulatorError):
    """A launch that a GPU of this compute capability would refuse."""


class Missing:
    """Something that the emulator does not know: whatever a kernel does with it raises
    `Unsupported`, or `error`."""

    def __init__(self, text, error=Unsupported):
        self.__dict__.update(_text=text, _error=error)

    def _refuse(self, *arguments, **named):
        raise self.__dict__["_error"](self.__dict__["_text"])

    __call__ = __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __bool__ = (
        __index__
    ) = __float__ = _refuse
    __int__ = __complex__ = __abs__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__
    for _name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ):
        locals().update({f"__{_name}__": _refuse, f"__r{_name}__": _refuse})
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __invert__ = _refuse


class Unbound(Missing):
    """The value of a variable that no line gave one: a compiled kernel has some bits there. It can
    be passed on, shuffled and stored in shared or local memory, which then counts as never
    written."""

    def __init__(self, name):
        super().__init__(
            f"variable {name} has no value in the thread from which it is taken", UnboundLocalError
        )

    def __repr__(self):
        return "no value"
