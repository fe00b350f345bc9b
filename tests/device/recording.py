"""An emulator that records launches as a GPU's graphs do, and replays them over the same memory."""

import contextlib

from numdiff.device.emulator import EmulatorDevice


class RecordingDevice(EmulatorDevice):
    """What the host does while a step is recorded happens then, and never again; what is launched
    happens in every replay, and not while it is recorded. Attributes replays, eager: how many
    graphs and kernels were launched."""

    inference_arena, turn, _noted = "one", contextlib.nullcontext(), None

    def __init__(self):
        super().__init__(checks=False, float64=False)
        self.replays = self.eager = 0

    @staticmethod
    def pointer(array):
        return array.memory.address + array.offset

    @contextlib.contextmanager
    def within(self, arena):
        yield

    def capture(self, function):
        self._noted = noted = []
        try:
            function()
        finally:
            self._noted = None

        def replay():
            self.replays += 1
            for call, arguments in noted:
                call(*arguments)

        return replay

    def _now_or_later(self, call, *arguments):
        if self._noted is None:
            self.eager += 1
            call(*arguments)
        else:
            self._noted.append((call, arguments))

    def launch(self, *arguments):
        self._now_or_later(super().launch, *arguments)

    def copy(self, *arguments):
        self._now_or_later(super().copy, *arguments)

    def fill(self, *arguments):
        self._now_or_later(super().fill, *arguments)

    def download(self, array):
        assert self._noted is None, "a step that is recorded must not read back"
        return super().download(array)
