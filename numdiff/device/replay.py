"""Work that is launched kernel by kernel the first time, recorded the second time and replayed from
then on."""


class Replayed:
    """A function of no arguments that launches the same kernels over the same addresses whenever it
    is called.

    On a GPU the first call launches them one by one, which compiles them. The second call records
    them as a CUDA graph. That call and every later one replay the graph: the same kernels with the
    same bits, launched in a microsecond each. What the function allocates and frees comes from
    `arena`, and is free again after each call; what it leaves, and what it reads, must be in arrays
    that others hold. Elsewhere, and with `eager`, every call launches.

    arena: of the device (default: the one that all inference shares); several functions may share
        one, as they run one after the other; a training step's will do as well
    """

    def __init__(self, function, backend, arena=None, eager=False):
        self.function, self.backend = function, backend
        self._captures = not eager and hasattr(backend, "capture")
        self._arena = arena or (backend.inference_arena if hasattr(backend, "capture") else None)
        self._replay, self._has_run = None, False

    def __call__(self):
        if self._replay is None:
            self._launch_or_record()
        if self._replay is not None:
            self._replay()

    def _launch_or_record(self):
        if self._arena is None:
            self.function()
            return
        # no other thread's replay may write in between
        with self.backend.turn, self.backend.within(self._arena):
            if self._captures and self._has_run:
                self._replay = self.backend.capture(self.function)
            else:
                self.function()
        self._has_run = True
