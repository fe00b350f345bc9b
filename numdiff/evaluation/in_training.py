"""Measurements during a training run (`--evaluate-every`): the Fréchet distance between samples of
the averaged weights and the training images, in the features of `RandomConv`, or of what an
extension's setting `evaluate_features` names.

    evaluation = RunEvaluation(trainer, options)
    distance, number = evaluation.measure()

The samples have the same seeds in each measurement, and classes in the proportion of the data, so
that the figures of one run compare. Those of `RandomConv` are not FID. The images of the data are
read once.
"""

import numpy as np

from ..errors import UsageError
from ..sizes import in_pixels, sides
from ..training.previews import Previews
from .features import SMALLEST, extract, find_extractor
from .frechet import frechet_distance, mean_and_covariance
from .sampled_labels import in_proportion

SEED = 20_000  # of the first image: those of a run's grids and of `bench quality` are other ones
REFERENCE = 10_000  # images of the data, at most, evenly spaced
BATCH = 64


class RunEvaluation:
    """Of a `Trainer` and the options of its run; `every`: steps between two measurements; `record`:
    how they are made, for the run's records.

    Raises a `UsageError` for a model of latents, and for images that are too small.
    """

    def __init__(self, trainer, options):
        model = trainer.model
        if trainer.diffusion is None or model.in_channels not in (1, 3):
            raise UsageError(
                "--evaluate-every measures samples of a model of pictures, and this one makes none: leave it "
                "out, and evaluate samples with `numdiff sample --npz` and `numdiff evaluate`."
            )
        features = getattr(options, "evaluate_features", None)
        if features is None and min(sides(model.image_size)) < SMALLEST:
            raise UsageError(
                f"--evaluate-every needs images of at least {SMALLEST}×{SMALLEST} pixels, and these are "
                f"{in_pixels(model.image_size)}: leave it out, or train on larger ones."
            )
        self.trainer, self.every = trainer, options.evaluate_every
        labels = model.num_classes and in_proportion(trainer.dataset.labels, options.evaluate_count)
        self.previews = Previews(
            trainer,
            options.changed(sample_count=options.evaluate_count, vae=None),
            SEED,
            labels=labels,
        )
        self._extractor = self._reference = None  # of rank 0
        name = trainer.communicator.first(self._find_extractor, features)
        self.record = {"frechet_count": options.evaluate_count, "frechet_features": name}

    def _find_extractor(self, features):
        """Its name."""
        self._extractor, name = find_extractor(features, self.trainer.model.backend)
        return name

    def measure(self, asked=lambda: 0):
        """(distance, 0) on every rank; (None, number) where `asked()` gave that number. Collective."""
        images, number = self.previews.draw(asked)
        if number:
            return None, number
        return self.trainer.communicator.first(self._distance, images), 0

    def _distance(self, images):
        if self._reference is None:
            count = len(self.trainer.dataset)
            rows = np.arange(min(count, REFERENCE)) * count // min(count, REFERENCE)
            self._reference = self._statistics(self.trainer.dataset.read, rows)
        return frechet_distance(
            *self._statistics(lambda rows: images[rows], np.arange(len(images))), *self._reference
        )

    def _statistics(self, read, rows):
        """Mean and covariance of the features of images; read(rows): uint8 (n, H, W, C)."""
        batches = (read(rows[k : k + BATCH]) for k in range(0, len(rows), BATCH))
        coloured = (b if b.shape[-1] == 3 else np.repeat(b, 3, axis=-1) for b in batches)
        return mean_and_covariance(extract(self._extractor, coloured, len(rows))[0])
