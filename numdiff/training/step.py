"""One training step, static: after its first run it allocates nothing new and reads nothing back.

Everything that changes from step to step is in device memory at a fixed address: the step number,
the batch, the learning rate. Noise, timesteps and flips are counted from (seed, step, index of the
image in the global batch), so they do not depend on how the batch is split into microbatches or
among ranks.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from ..device import empty, synchronize, upload, zeros
from ..device.traffic import make_feed, make_readback
from ..distributed.buckets import WatchedTape
from ..distributed.exchange_base import NoExchange
from ..kernels.diffusion.images import images_forward
from ..kernels.elementwise import add_forward
from ..kernels.optimizer.telemetry import telemetry_read, telemetry_record
from ..kernels.random import PURPOSE_FLIP, random_integers
from ..nn.aliasing import aliasing_of
from ..sizes import image_shape

# steps whose loss, gradient norm and learning rate are kept on the device until the host reads them
RING = 1024


@dataclass(frozen=True)
class Randomness:
    """What counts the random numbers of one microbatch: Python int, uint32 (1,) and uint32
    (microbatch,) arrays."""

    seed: int
    step: object
    samples: object


class TrainingStep:
    """The computation of one optimiser step of a model on this rank's part of a batch of images.

    objective: what it minimises: a `Diffusion` or a `Reconstruction`, whose `inputs_of` draws what
        it needs for a microbatch, and whose `loss_of` gives the loss
    batch: images a step of this rank, over all microbatches; microbatch: images a forward pass
    (must divide the batch)
    part: (rank, ranks), which part of the global batch (ranks · batch images) this is
    exchange: adds up the gradients of the ranks (distributed/exchange.py)
    flip: mirror each image with probability one half
    capture: on a GPU, record the step as a CUDA graph at its second run and replay it from then on:
        the same kernels with the same bits, launched in a microsecond each where Python takes
        twenty
    dtype: of the images; seed: of all the step's randomness
    """

    def __init__(
        self,
        model,
        objective,
        optimizer,
        batch,
        microbatch=None,
        flip=False,
        seed=0,
        capture=True,
        part=(0, 1),
        exchange=None,
        dtype=np.uint8,
    ):
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.batch, self.microbatch = batch, microbatch or batch
        self.flip, self.seed = flip, seed
        rank, self.ranks = part
        self.exchange = exchange or NoExchange()
        self.aliasing = aliasing_of(model) if self.microbatch == batch else None
        backend = model.backend
        self.images = empty((batch, *image_shape(model)), dtype, backend)
        self.labels = zeros(batch, np.int32, backend) if model.num_classes is not None else None
        self.samples = upload(np.arange(rank * batch, (rank + 1) * batch, dtype=np.uint32), backend)
        self.ring = zeros((RING, 5), np.float32, backend)
        self._feed = make_feed([self.images] if self.labels is None else [self.images, self.labels])
        status = getattr(self.exchange, "status", None)
        self._figures = make_readback(
            [self.ring, optimizer.first_bad_step, *([] if status is None else [status])]
        )
        self.capture = capture and hasattr(backend, "capture")
        self.arena = backend.new_arena() if self.capture else None
        self._replay = None
        self._has_run = False

    def load(self, images, labels=None):
        """Bring a batch to the device: images (batch, H, W, C), labels int32 (batch,) where there
        are classes.

        A GPU gets it while it computes the step before. The arrays must stay as they are until the
        next `load` has returned.
        """
        self._feed.put([images] if self.labels is None else [images, labels])

    def run(self):
        """One step over the loaded batch: forward, backward, update. Launches only."""
        if not self.capture:
            self._run()
        elif self._replay:
            self._replay()
        else:
            with self.model.backend.within(self.arena):
                # the kernels are compiled and the memory is allocated: now it can be recorded
                if self._has_run:
                    self._replay = self.model.backend.capture(self._run)
                else:
                    self._run()
            if self._replay:
                self._replay()
        self._has_run = True

    def record_anew(self):
        """The next `run` records the step once more, if it records at all."""
        self._replay = None

    def _run(self):
        optimizer = self.optimizer
        loss, scale = self._gradients(exchange=self.exchange)
        self.exchange.finish(loss)
        with self.model.arithmetic():
            optimizer.update(
                loss,
                before_advance=lambda: telemetry_record(
                    self.ring,
                    optimizer.step,
                    loss,
                    optimizer.gradient_norm,
                    optimizer.rate,
                    optimizer.loss_scale.scale,
                    optimizer.loss_scale.counts,
                    scale,
                ),
            )

    def _gradients(self, check_finite=False, exchange=None):
        """This rank's part of the loaded batch's gradients, in the parameters, each weighted so
        that the sum over microbatches and ranks is their mean; returns the microbatches' summed
        losses and that weight.

        exchange: may send gradients to the other ranks as soon as the last microbatch completes
        them
        """
        self.model.parameters.begin_gradients(self.aliasing and self.aliasing.rest)
        count = self.batch // self.microbatch
        scale = 1 / (count * self.ranks)
        loss = None
        with self.aliasing or nullcontext():
            for k in range(count):
                samples = slice(k * self.microbatch, (k + 1) * self.microbatch)
                with exchange.watch() if exchange and k == count - 1 else nullcontext():
                    part = self._forward_backward(samples, scale, check_finite)
                loss = part if loss is None else add_forward(loss, part)
        self.model.parameters.end_gradients()
        return loss, scale

    def _forward_backward(self, rows, scale, check_finite):
        """Loss (1,) of the microbatch `rows`, its gradients times `scale` added to the parameters'
        gradients."""
        random = Randomness(self.seed, self.optimizer.step, self.samples[rows])
        images = self.images[rows]
        flip = None
        if self.flip:
            flip = random_integers(self.seed, PURPOSE_FLIP, random.step, random.samples, 2)
        # floats are latents: as they are
        x_0 = images_forward(images, flip) if images.dtype == np.uint8 else images
        inputs = self.objective.inputs_of(self.model, x_0, random)
        labels = None if self.labels is None else self.labels[rows]
        with (
            WatchedTape(check_finite) as tape,
            self.aliasing.forward() if self.aliasing else nullcontext(),
        ):
            loss = self.objective.loss_of(self.model, inputs, labels, random, scale)
        with self.model.arithmetic():
            tape.backward(loss, self.optimizer.loss_scale.scale)
        return loss.data

    @property
    def lag(self):
        """How many steps after `ask` the `answer` is ready without waiting."""
        return self._figures.lag

    def ask(self):
        """Start reading back the figures of all steps so far."""
        self._figures.begin()

    def answer(self, first, stop):
        """As `ask` found them: the `telemetry` of steps first … stop-1; the optimiser's first bad
        step, or -1; the exchange's status, or None."""
        ring, first_bad_step, *status = self._figures.values()
        return (
            telemetry_read(ring, first, stop),
            int(first_bad_step[0]),
            status[0] if status else None,
        )

    def telemetry(self, first, stop):
        """(loss, gradient norm, learning rate, loss scale, steps skipped so far) of steps first …
        stop-1, float32 (stop - first, 5). Waits."""
        return telemetry_read(self.ring, first, stop)

    def name_first_nonfinite(self):
        """Repeat this rank's part of the loaded step, which gave a loss or gradient that is not
        finite, and name the first such tensor; None if there is none in this part."""
        try:
            self._gradients(check_finite=True)
        except FloatingPointError as error:
            return str(error)
        for name, gradient in self.model.gradients().items():
            if not np.isfinite(gradient).all():
                return f"gradient of {name} is the first non-finite tensor"
        return None

    def synchronize(self):
        synchronize(self.model.backend)
