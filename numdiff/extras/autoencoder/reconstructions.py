"""What a run that trains an autoencoder draws: pictures next to their reconstructions, with the PSNR.

    samples-00000400.png     pairs: a picture of the dataset, and what the averaged weights make of it
    reconstructions.jsonl    a line a grid: {"step", "images", "held_out", "psnr"} in dB, the mean over the
                             pictures, which is in stats.jsonl, too
    autoencoder.h5           the averaged weights as a model file, with the scaling factor that gives its
                             latents a standard deviation of 1, measured on those pictures

The pictures are those that the run holds out (`--held-out`), up to MEASURED of them, evenly spread,
of which the grid shows `sample_count`. Without any they are `sample_count` of the dataset, on which
the model was trained, too.
"""

import json
import math
import pathlib

import numpy as np

from ...device import download, empty
from ...diffusion.sampling import to_uint8
from ...distributed.together import make_together
from ...files import cannot_write, open_to_append, write_all
from ...nn import Tensor
from ...settings import counted
from ...sizes import image_shape, scaled_down, sides
from ...training.autoencoders import KIND, OF_RUN
from ...training.model_files import write_model_file
from ...training.previews import BATCH, draws
from ...training.report import image_grid, save_png

RECORDS = "reconstructions.jsonl"
MEASURED = 128  # held-out pictures at most


def psnr(pictures, others):
    """Peak signal-to-noise ratio in dB of each of uint8 pictures (N, H, W, C), float64 (N,); equal
    ones have that of an error of half a level in one value."""
    difference = pictures.astype(np.float64) - others
    squares = (difference**2).mean((1, 2, 3))
    return 10 * np.log10(255**2 / np.maximum(squares, 0.25 / pictures[0].size))


class Reconstructions:
    """Pictures and their reconstructions by the averaged weights of a `Trainer`; each rank makes
    its part of them.
    """

    measures = True

    def __init__(self, trainer, options):
        self.trainer, self.options = trainer, options
        held_out = getattr(trainer.dataset, "held_out", None)
        self.dataset, self.is_held_out = held_out or trainer.dataset, held_out is not None
        pictures = self.dataset.shape[0]
        self.most = max(options.sample_count, MEASURED * self.is_held_out)
        count = min(self.most, pictures)
        rows = np.linspace(0, pictures - 1, count).round().astype(np.int64)
        self._drawn, self._psnr = None, None
        self.first, self.stop = self._part(count)
        self._all_rows, self.rows = rows, rows[self.first : self.stop]

    def _part(self, count):
        """(first, stop) of this rank's pictures, of `count` in all."""
        ranks, rank = self.trainer.communicator.size, self.trainer.communicator.rank
        return tuple(count * k // ranks for k in (rank, rank + 1))

    def check(self):
        """Nothing that the objective has not checked."""

    def draw(self, asked=lambda: 0):
        """((pictures, reconstructions, standard deviation of the latents, averaged weights), 0) on
        every rank; or (None, number) as of `Previews.draw`. Collective."""
        if self._drawn is not None:
            drawn, self._drawn = self._drawn, None
            return drawn, 0
        with self.trainer.ema_weights():
            parts, number = make_together(self.trainer.communicator, self._draw_part, asked)
        if number:
            return None, number
        pictures, made, means, variances = (
            np.concatenate(each) for each in zip(*parts, strict=True)
        )
        return (pictures, made, math.sqrt(means.var() + variances.mean()), self._average()), 0

    def figures(self, asked=lambda: 0):
        """{"psnr"} for the run's records, of what `draw` returns next; {} where a signal came."""
        self._drawn, _ = self.draw(asked)
        if self._drawn is None:
            return {}
        self._psnr = float(psnr(*self._drawn[:2]).mean())
        return {"psnr": self._psnr}

    def summary(self):
        """The last PSNR, for the run's last line."""
        return "" if self._psnr is None else f", PSNR {self._say(self._psnr, len(self._all_rows))}"

    def _say(self, mean, count):
        return f"{mean:.2f} dB of {counted(count, 'held-out ' * self.is_held_out + 'picture')}"

    def _average(self):
        """The averaged weights, a flat NumPy array, of which a rank may hold a part; collective."""
        optimizer = self.trainer.optimizer
        if optimizer.ema is None:
            return download(self.trainer.model.parameters.data)
        return optimizer.whole(optimizer.ema)

    def _draw_part(self, look):
        model, dataset = self.trainer.model, self.dataset
        latents = tuple(n // model.factor for n in dataset.shape[1:3])
        pictures = np.empty((len(self.rows), *dataset.shape[1:]), np.uint8)
        made = np.empty_like(pictures)
        means = np.empty((len(self.rows), *latents, model.latent_channels), np.float32)
        variances = np.empty_like(means)
        for first in range(0, len(self.rows), BATCH):
            look()
            part = slice(first, first + BATCH)
            pictures[part] = dataset.read(self.rows[part])
            mean, logvar = model.encode(pictures[part].astype(np.float32) / 127.5 - 1)
            means[part], variances[part] = mean, np.exp(logvar)
            made[part] = to_uint8(model.decode(mean))
        return pictures, made, means, variances

    def save(self, path, drawn, output):
        """Write the grid, the PSNR and the autoencoder of what `draw` gave, on rank 0."""
        pictures, made, deviation, flat = drawn
        model, step = self.trainer.model, self.trainer.step
        folder = pathlib.Path(path).parent
        count = min(self.options.sample_count, len(pictures))
        shown = np.linspace(0, len(pictures) - 1, count).round().astype(np.int64)
        pairs = np.stack([pictures[shown], made[shown]], 1).reshape(-1, *pictures.shape[1:])
        columns = 2 * max(1, round(math.sqrt(count / 2)))
        zoom = max(1, 96 // pictures.shape[1]) if pictures.shape[1] < 64 else 1
        save_png(path, image_grid(pairs, columns, zoom=zoom))
        mean = float(psnr(pictures, made).mean())
        record = {"step": step, "images": len(pictures), "held_out": self.is_held_out, "psnr": mean}
        try:
            with open_to_append(folder / RECORDS, "the records") as file:
                write_all(file, (json.dumps(record) + "\n").encode())
        except OSError as error:
            raise cannot_write("the records", folder / RECORDS, error) from error
        factor = 1 / deviation if 1e-6 < deviation < 1e6 else 1.0
        arrays = {
            entry["name"]: flat[
                entry["offset"] : entry["offset"] + math.prod(entry["shape"])
            ].reshape(entry["shape"])
            for entry in model.parameters.index
        }
        options = {**model.options, "scaling_factor": factor}
        write_model_file(folder / OF_RUN, options, arrays, model=KIND)
        output(f"psnr      {self._say(mean, len(pictures))} after step {step:,}")

    def rehearse(self):
        """Launch every kernel that drawing launches, and read nothing back."""
        model = self.trainer.model
        # a stand-in for a dataset has one picture
        first, stop = self._part(max(self.options.sample_count, MEASURED))
        sizes = {
            min(BATCH, count - done)
            for count in (len(self.rows), stop - first)
            for done in range(0, count, BATCH)
        }
        with self.trainer.ema_weights(), model.arithmetic():
            for size in sizes if draws(self.options, model) else ():
                shape = size, *image_shape(model)
                model.moments(Tensor(empty(shape, np.float32, model.backend)))
                small = sides(scaled_down(model.image_size, model.factor))
                shape = size, *small, model.latent_channels
                model.reconstruct(Tensor(empty(shape, np.float32, model.backend)))
