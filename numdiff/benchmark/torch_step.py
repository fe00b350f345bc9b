"""PyTorch's training step of the same model, to compare numdiff's with. Only the torch_* files need
PyTorch.

One step is forward, squared error, backward and AdamW (the fused one on a GPU), on images that are
on the device, channels-last where the model has convolutions; attention is PyTorch's fused one.
Noise, clipping and the average of the weights, which are part of numdiff's step, are left out: a
real run in PyTorch would take longer.
"""

import contextlib
import importlib.util
import threading
import time

from ..errors import NumdiffError, UsageError
from ..progress_bar import progress_bar
from ..sizes import sides
from ..training import kinds
from ..training.build import model_options
from ..training.kinds.kind import imported
from . import CLASSES

# name -> mode of torch.compile
MODES = {"eager": None, "compile": "default", "graphs": "reduce-overhead"}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
FLOAT16_SCALE = 2.0**16  # of the loss, initially, as in numdiff
TICK_S = 1  # of its bar
# the longest that torch.compile took of a model of the size of DiT-B/2 or unet.cu's
COMPILE_S = 120


def wait_of(mode):
    """Words on the wait for the first run in a mode; empty where PyTorch does not compile."""
    return (
        ""
        if MODES[mode] is None
        else f", which compiles first, for up to {COMPILE_S // 60} minutes"
    )


@contextlib.contextmanager
def compile_bar(mode):
    """Context of the first run in a mode: where PyTorch compiles, a bar whose end is the longest
    time it may take."""
    if MODES[mode] is None:
        yield
        return
    over = threading.Event()
    with progress_bar(COMPILE_S, "PyTorch compiles", "second") as bar:

        def advance():
            for _ in range(COMPILE_S - 1):
                if over.wait(TICK_S):
                    break
                bar.update()

        thread = threading.Thread(target=advance, name="compile bar", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def require_torch():
    """Raise a `NumdiffError` if PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise NumdiffError(
            "--versus torch needs PyTorch, which is not installed here; pip install torch, or leave it "
            "out."
        )


def require_twin(options):
    """Raise a `UsageError` if the model of a run's options has not been written in PyTorch."""
    kind = kinds.get(options.model)
    if kind.twin is None:
        raise UsageError(
            f"--versus torch: there is no {kind.title} in PyTorch to compare with; leave it out."
        )


def build_twin(options, channels=3, num_classes=None):
    """The PyTorch module with the architecture and parameter names of the model that a run's
    options describe."""
    require_twin(options)
    return imported(kinds.get(options.model).twin)(**model_options(options, channels, num_classes))


class TorchTwin:
    """The twin of the model that a run's options describe, and what its measurement needs.

    mode: of MODES; precision: of PRECISIONS ("fp32" is strict)
    Attributes model; classes: how many it has, or None; parameters: how many there are; device,
    cuda; `started`.
    """

    def __init__(self, options, mode="eager", precision="fp32"):
        import torch

        self.started = time.perf_counter()
        self.torch, self.mode, self.precision = torch, mode, precision
        self.device = "cuda" if options.device == "cuda" else "cpu"
        self.cuda = self.device == "cuda"
        if self.cuda and not torch.cuda.is_available():
            raise NumdiffError(
                "this PyTorch sees no GPU; install one with CUDA, or use --device cpu."
            )
        if not self.cuda and mode == "graphs":
            raise NumdiffError("CUDA graphs need a GPU; leave the mode graphs out.")
        torch._dynamo.reset()
        torch.manual_seed(0)
        self._set_tf32(precision == "tf32")
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        self.classes = (options.num_classes or CLASSES) if options.class_cond else None
        self.model = build_twin(options, options.channels or 3, self.classes).to(self.device)
        if kinds.get(options.model).twin_channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    @property
    def half(self):
        """The 16-bit type that it computes in, or None."""
        return {"bf16": self.torch.bfloat16, "fp16": self.torch.float16}.get(self.precision)

    def run_first(self):
        """The first run, in which PyTorch compiles; sets first_s."""
        with compile_bar(self.mode):
            self.run()
            self.wait()
        self.first_s = time.perf_counter() - self.started

    def compiled(self, function):
        """`function` in this mode."""
        return (
            function
            if MODES[self.mode] is None
            else self.torch.compile(function, mode=MODES[self.mode])
        )

    def wait(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    @property
    def peak_bytes(self):
        """The twin's peak; 0 on the CPU, where PyTorch does not count."""
        return self.torch.cuda.max_memory_allocated() - self._before if self.cuda else 0

    def close(self):
        """Give the memory back."""
        kept = {k: v for k, v in vars(self).items() if k in ("torch", "cuda", "_before")}
        vars(self).clear()
        vars(self).update(kept)
        self.torch._dynamo.reset()
        if self.cuda:
            self.torch.cuda.empty_cache()

    def _set_tf32(self, on):
        backends = self.torch.backends
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = on
        backends.cudnn.benchmark = True


class TorchStep(TorchTwin):
    """A training step of the twin; "fp16" scales the loss.

    Attributes first_s: seconds of building, compiling and the first step.
    """

    def __init__(self, options, mode="eager", precision="fp32"):
        super().__init__(options, mode, precision)
        torch, model = self.torch, self.model
        self.forward = self.compiled(model)
        weights = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            weights, lr=options.learning_rate, weight_decay=options.weight_decay, fused=self.cuda
        )
        self.scaler = torch.amp.GradScaler(self.device, FLOAT16_SCALE, enabled=precision == "fp16")
        shape = (options.batch, options.channels or 3, *sides(options.image_size))
        self.x = torch.randn(shape, device=self.device).to(memory_format=torch.channels_last)
        self.target = torch.randn_like(self.x)
        self.t = torch.randint(0, options.diffusion_steps, shape[:1], device=self.device)
        self.y = (
            None
            if self.classes is None
            else torch.randint(0, self.classes, shape[:1], device=self.device)
        )
        self.run_first()

    def run(self):
        with self.torch.autocast(self.device, self.half, enabled=self.half is not None):
            prediction = self.forward(self.x, self.t, self.y)
        error = prediction[:, : self.target.shape[1]].float() - self.target
        self.scaler.scale((error * error).mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
