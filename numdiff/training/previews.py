"""The samples that a run draws from its averaged weights on the way, by the same code as `numdiff
sample`."""

import os

import numpy as np

from ..diffusion import Sampling
from ..diffusion.sampling import PIXEL_CHANNELS
from ..distributed.together import make_together
from ..errors import UsageError
from ..option_names import as_options
from ..sizes import image_shape
from .autoencoders import LatentDecoder
from .report import columns_of, image_grid, save_png

# of the first image of every grid, the same in all of them, so that one sees the samples improve
SEED = 1
BATCH = 16  # images sampled together, at least


def draws(options, model):
    """Whether the run draws samples: latents are not pictures, unless there is an autoencoder that
    decodes them."""
    return options.sample_count and (model.in_channels in PIXEL_CHANNELS or options.vae is not None)


def sampling_record(options):
    """{"pictures": how a run draws its own, or would}, for its checkpoints (diffusion/pictures.py)."""
    drawing = how(options)
    decoder = {"vae": os.path.abspath(options.vae)} if options.vae else {}
    interval = drawing["cfg_interval"] and list(drawing["cfg_interval"])
    return {"pictures": {**drawing, **decoder, "cfg_interval": interval}}


def how(options):
    """What a run's options say of sampling, as arguments of `Sampling`."""
    return {
        "sampler": options.sampler,
        "steps": options.sample_steps,
        "cfg_scale": options.cfg_scale,
        "cfg_interval": options.cfg_interval,
    }


class Previews:
    """Samples from the averaged weights of a `Trainer`; each rank makes its part of them.

    The graphs that a GPU records at the first preview serve all later ones, and intermediate
    results use the memory of the training step, which is free in between. seed: of the first image;
    batch: images sampled together, at least;
    labels: classes (count,) of the images, for a model with classes (default: each in turn)
    """

    measures = False  # whether `figures` gives any

    def __init__(self, trainer, options, seed=SEED, batch=BATCH, labels=None):
        self.trainer, self.options, self.seed, self.batch, self.labels = (
            trainer,
            options,
            seed,
            batch,
            labels,
        )
        count, ranks, rank = (
            options.sample_count,
            trainer.communicator.size,
            trainer.communicator.rank,
        )
        self.first, self.stop = (count * k // ranks for k in (rank, rank + 1))
        self._sampling = self._decoder = None

    def figures(self, asked=lambda: 0):
        """{name: number} that a grid gives for the run's records."""
        return {}

    def summary(self):
        """What the run's last line says of its last grid."""
        return ""

    def draw(self, asked=lambda: 0):
        """(all images, uint8 (count, H, W, C), 0) on every rank; or (None, number) where `asked()`,
        called between evaluations, gave that number on one of them. Collective."""
        with self.trainer.ema_weights():
            parts, number = make_together(self.trainer.communicator, self._draw_part, asked)
        return (None, number) if number else (np.concatenate(parts), 0)

    def _draw_part(self, look):
        model = self.trainer.model
        shape = self.decoder().shape if self.options.vae else image_shape(model)
        images = np.empty((self.stop - self.first, *shape), np.uint8)
        if not len(images):
            return images
        self._sampling = self._sampling or self.make_sampling()
        for rows, made in self._sampling.batches(look):
            images[rows] = self._decoder(made) if self.options.vae else made
        return images

    def decoder(self):
        """The `LatentDecoder` of --vae; a `UsageError` where it does not fit the model or its data."""
        if self._decoder is None:
            model, trainer = self.trainer.model, self.trainer
            if model.in_channels in PIXEL_CHANNELS:
                raise UsageError(
                    f"--vae {self.options.vae} decodes latents, and the images of --data are pictures of "
                    f"{model.in_channels} channels: leave it out, or run `numdiff data encode` first."
                )
            self._decoder = LatentDecoder(
                self.options.vae,
                image_shape(model),
                model.backend or "cpu",
                self.options.precision,
                getattr(trainer.dataset, "encoded_by", None),
            )
        return self._decoder

    def make_sampling(self):
        """The `Sampling` of this rank's images."""
        model, step, options = self.trainer.model, self.trainer.step_function, self.options
        labels = None
        if model.num_classes is not None:  # those of all images, whichever rank makes them
            labels = (
                np.arange(options.sample_count) % model.num_classes
                if self.labels is None
                else self.labels
            )
            labels = labels[self.first : self.stop].astype(np.int32)
        return Sampling(
            model,
            count=self.stop - self.first,
            seed=self.seed + self.first,
            y=labels,
            batch=max(self.batch, step.microbatch),
            eager=options.eager,
            arena=step.arena,
            **how(options),
        )

    def check(self):
        """Raise a `UsageError` if the run, or a later command, could not sample with these options.
        It is called before the first step."""
        with as_options():
            if self.options.vae:
                self.decoder()
            if not draws(self.options, self.trainer.model):
                Sampling(
                    self.trainer.model, count=1, **how(self.options)
                )  # as `numdiff sample` will
            elif self.stop > self.first:
                self._sampling = self.make_sampling()

    def save(self, path, images, output):
        """Write the grid of what `draw` gave, on rank 0."""
        save_png(path, sample_grid(self.trainer.model, images))

    def rehearse(self):
        """Launch every kernel that drawing launches, and read nothing back."""
        if self.stop > self.first:
            with self.trainer.ema_weights():
                self.make_sampling().rehearse()


def sample_grid(model, images):
    """A picture of images."""
    return image_grid(
        images,
        columns_of(model),
        zoom=max(1, 128 // images.shape[1]) if images.shape[1] < 64 else 1,
    )
