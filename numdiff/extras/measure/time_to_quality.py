"""How long training takes to a quality: a run that is stopped at fixed steps, whose samples are
then measured.

    seconds   of training: from the first step's data to the step in question, loading kernels and capturing the step
              included; compiling, sampling and measuring are left out
    samples   as many as there are reference images, from the averaged weights, the seeds 10,000 on, each class as
              often as the data have it: drawn more often it would count as an error in a distance to all images
    figures   Fréchet distances, precision and recall in the features of `random-conv-1` (features.py),
              against all images of the data. What is compared with a target is the spatial distance, which sees where
              things are; recall falls where few images are copied again and again, and below 0.5 no target counts

A run ends when the last target is reached, or after its steps. LEADERBOARD.md has the rules for a
row of its table; `rules_broken` names those that a run does not keep.
"""

import os
import pathlib
import subprocess
import time

import numpy as np

from ... import __version__
from ...data.dataset import default_path
from ...device import download, synchronize
from ...distributed.communicator import connect
from ...errors import NumdiffError, UsageError
from ...evaluation.features import SMALLEST, RandomConv, extract
from ...evaluation.frechet import frechet_distance
from ...evaluation.precision_recall import precision_recall
from ...evaluation.sampled_labels import in_proportion
from ...progress import doing
from ...sizes import sides
from ...training.autoencoders import array_hash
from ...training.build import build_model, build_trainer, open_data
from ...training.compiling import compiling
from ...training.loop import quiet_overflows
from ...training.picture_record import class_counts
from ...training.plan import plan_run
from ...training.previews import Previews, draws, sample_grid
from ...training.trainer import NonFiniteError
from ..evaluate.sources import Features, open_source

TARGETS = 0.30, 0.15, 0.08  # spatial Fréchet distances
FIRST_SEED = 10_000  # of the samples: those of a run's own grids are other ones
POINTS = 16  # of the curve, where no interval is given
NEAREST = 3  # k of precision and recall
MAX_EVALUATIONS = 1000
RECALL = 0.5  # below, a target does not count as reached
# Of a row of LEADERBOARD.md: pixels, samples, sampler and its steps.
SIZE, SAMPLES, SAMPLER, SAMPLE_STEPS = 64, 1906, "dpm++2m", 20
GRID_IMAGES = 64  # in a picture of them, at most


def bench_quality(
    options,
    targets=TARGETS,
    every=None,
    samples=None,
    sampler=SAMPLER,
    sample_steps=SAMPLE_STEPS,
    sample_batch=128,
    cfg_scale=None,
    echo=lambda text: None,
    keep=lambda record: None,
    show=lambda picture, made: None,
):
    """Train as `options` (a resolved `TrainOptions`) say, and measure; returns a record for JSON.
    Under `mpiexec`, collective.

    targets: spatial Fréchet distances; every: steps between two measurements (default: a sixteenth
    of the run)
    samples: images of a measurement (default: as many as the data has); sampler, sample_steps,
        cfg_scale: how they are made, sample_batch at a time
    echo: prints a heading, and a line after each measurement; keep: is given the record after each,
        show: the first of its images as a picture, uint8 (H, W, C), and how they were made
        (training/picture_record.py); on rank 0
    """
    targets = check_targets(targets)
    if min(sides(options.image_size)) < SMALLEST:
        raise UsageError(
            f"--image-size {options.image_size}: distances are of images of at least {SMALLEST}×"
            f"{SMALLEST} pixels; give a larger one."
        )
    every = every or max(1, -(-options.steps // POINTS))
    if options.steps // every > MAX_EVALUATIONS:
        raise UsageError(
            f"--every {every} would measure {options.steps // every:,} times in {options.steps:,} steps: "
            f"give at least {-(-options.steps // MAX_EVALUATIONS)}."
        )
    communicator = connect(options.transport, options.device, options.rank_timeout)
    with communicator.job():
        dataset = open_data(communicator, options)
        count = samples or len(dataset)
        options = options.changed(
            sample_count=count, sampler=sampler, sample_steps=sample_steps, cfg_scale=cfg_scale
        )
        trainer = _trainer(options, dataset, communicator, echo)
        try:
            run = QualityRun(trainer, options, targets, sample_batch, communicator)
            with quiet_overflows():
                return run.measure(
                    every, echo if communicator.rank == 0 else lambda text: None, keep, show
                )
        finally:
            trainer.close()
            dataset.close()


def check_targets(targets):
    """Targets as descending floats; a `UsageError` for what is none."""
    targets = sorted({float(target) for target in targets}, reverse=True)
    if not targets or not all(0 < target < np.inf for target in targets):
        raise UsageError(
            "--target takes spatial Fréchet distances, numbers above 0 such as 0.30,0.15,0.08."
        )
    return targets


def _trainer(options, dataset, communicator, echo):
    if options.device == "cuda":
        with compiling(
            lambda card: plan_run(options, dataset, card, communicator), communicator, echo
        ):
            model = build(options, dataset, communicator)
    else:
        model = build(options, dataset, communicator)
    if not draws(options, model):
        raise UsageError(
            f"the images of {dataset.path!r} have {dataset.channels} channels, as latents have, and what "
            "is measured are pictures: give --data with pictures."
        )
    trainer = build_trainer(options, model, dataset)
    trainer.compiles_ahead = False
    return trainer


def build(options, dataset, communicator):
    return communicator.build(
        build_model, options, dataset.channels, len(dataset.classes) if options.class_cond else None
    )


class QualityRun:
    """One run: its trainer, its reference, and what was measured so far."""

    def __init__(self, trainer, options, targets, sample_batch, communicator):
        self.trainer, self.options, self.targets, self.communicator = (
            trainer,
            options,
            targets,
            communicator,
        )
        self.labels = trainer.model.num_classes and in_proportion(
            trainer.dataset.labels, options.sample_count
        )
        self.previews = Previews(trainer, options, FIRST_SEED, sample_batch, self.labels)
        self.extractor = RandomConv(trainer.model.backend) if communicator.rank == 0 else None
        size = sides(trainer.model.image_size)
        self.reference = communicator.rank == 0 and self._features(
            open_source(trainer.dataset.path, options.classes, size)
        )
        self.seconds, self.sampled, self.points, self.reached = 0.0, 0.0, [], {}

    def measure(self, every, echo, keep, show):
        """Train and measure; returns the record."""
        fault = None
        echo(HEADING)
        while (
            self.trainer.step < self.options.steps
            and len(self.reached) < len(self.targets)
            and not fault
        ):
            try:
                self._train(min(every, self.options.steps - self.trainer.step))
            except NonFiniteError as error:
                fault = str(error)
                break
            images = self._samples()
            point = self.communicator.first(self._point, images)
            self.points.append(point)
            near = [
                target
                for target in self.targets
                if target not in self.reached and point["spatial_frechet_distance"] <= target
            ]
            if counts(point):
                self.reached |= dict.fromkeys(near, point)
            echo(line(point, near))
            self.communicator.first(keep, self.record())
            self.communicator.first(
                lambda images: show(self._grid(images), self.made()) and None, images
            )
        if not self.points:
            raise NumdiffError(f"nothing was measured: {fault}")
        return {**self.record(), **({"fault": fault} if fault else {})}

    def _train(self, steps):
        began = time.perf_counter()
        for reports in self.trainer.run(steps):
            self.loss = reports[-1].loss
        synchronize(self.trainer.model.backend)
        self.seconds += time.perf_counter() - began

    def _samples(self):
        began = time.perf_counter()
        with doing(f"drawing samples after step {self.trainer.step}"):
            images = self.previews.draw()[0]
        self.sampled = time.perf_counter() - began
        with self.trainer.ema_weights() as model:
            self.hash = array_hash(download(model.parameters.in_use))
        return images

    def _point(self, images):
        ours = self._features(images)
        a, b = ours.statistics(), self.reference.statistics()
        precision, recall = precision_recall(ours.features, self.reference.features, NEAREST)
        return {
            "step": self.trainer.step,
            "seconds": self.seconds,
            "images": self.trainer.step * self.options.batch,
            "tflop": self.trainer.step * self.trainer.flops_per_step / 1e12,
            "loss": self.loss,
            "frechet_distance": frechet_distance(a.mu, a.sigma, b.mu, b.sigma),
            "spatial_frechet_distance": frechet_distance(a.mu_s, a.sigma_s, b.mu_s, b.sigma_s),
            "precision": precision,
            "recall": recall,
        }

    def _grid(self, images):
        classes = self.trainer.model.num_classes or 1
        # whole rows
        return sample_grid(self.trainer.model, images[: max(GRID_IMAGES // classes, 1) * classes])

    def _features(self, images):
        """The `Features` of images, an array or a source of them."""
        count = len(images) if isinstance(images, np.ndarray) else images.count
        batches = (
            (images[i : i + 64] for i in range(0, count, 64))
            if isinstance(images, np.ndarray)
            else images.batches(64)
        )
        batches = (
            batch if batch.shape[-1] == 3 else np.repeat(batch, 3, axis=-1) for batch in batches
        )
        return Features("", *extract(self.extractor, batches, count))

    def made(self):
        """How the images of the last measurement were made, as `numdiff info` reads it."""
        options, trainer = self.options, self.trainer
        return {
            "model": f"{options.model}, {options.preset or 'custom'}",
            "model_hash": self.hash,
            "weights": "ema",
            "precision": trainer.precision,
            "training_steps": trainer.step,
            "sampler": options.sampler,
            "steps": options.sample_steps,
            "cfg_scale": options.cfg_scale,
            "count": options.sample_count,
            "seed": FIRST_SEED,
            "class_counts": class_counts(self.labels, trainer.dataset.classes),
            "seconds": self.sampled,
            "numdiff": __version__,
        }

    def record(self):
        """The measurement and its settings, for JSON."""
        backend = self.trainer.model.backend
        return {
            "model": self.options.model,
            "options": self.options.to_json(),
            "card": backend.device_name if backend else "CPU",
            "ranks": self.communicator.size,
            "extractor": RandomConv.name,
            "samples": self.options.sample_count,
            "first_seed": FIRST_SEED,
            "sampler": self.options.sampler,
            "sample_steps": self.options.sample_steps,
            "cfg_scale": self.options.cfg_scale,
            "made": self.made(),
            "points": self.points,
            "targets": [
                {"target": target, **self.reached.get(target, {})} for target in self.targets
            ],
        }


HEADING = (
    f"{'step':>8} {'seconds':>8} {'images':>10} {'TFLOP':>8} {'loss':>8} {'Fréchet':>8} {'spatial':>8} "
    f"{'precision':>9} {'recall':>7}"
)


def counts(point):
    """Whether a measurement may count as reaching a target."""
    return point["recall"] >= RECALL


def line(point, near=()):
    """A measurement as a row under HEADING; near: targets whose distance it has, and none before
    it."""
    said = f"   reaches {', '.join(f'{target:g}' for target in near)}" if near else ""
    said += (
        f", which does not count: recall is below {RECALL:g}" if near and not counts(point) else ""
    )
    return (
        f"{point['step']:8,} {point['seconds']:8.1f} {point['images']:10,} {point['tflop']:8,.4g} "
        f"{point['loss']:8.4f} {point['frechet_distance']:8.3f} {point['spatial_frechet_distance']:8.3f} "
        f"{point['precision']:9.2f} {point['recall']:7.2f}{said}"
    )


def conclusion(record):
    """A line for each target: when it was reached, or how far the run came; then what kept a
    measurement from counting.
    """
    best = min(record["points"], key=lambda point: point["spatial_frechet_distance"])
    for row in record["targets"]:
        if "seconds" in row:
            yield (
                f"target {row['target']:g}: {row['seconds']:.1f} s of training, {row['step']:,} steps, "
                f"{row['images']:,} images, {row['tflop']:,.4g} TFLOP"
            )
        else:
            yield (
                f"target {row['target']:g}: not reached in {record['points'][-1]['step']:,} steps; the best was "
                f"{best['spatial_frechet_distance']:.3f} after {best['step']:,}"
            )
    if not counts(best) and any("seconds" not in row for row in record["targets"]):
        yield f"the best had a recall of {best['recall']:.2f}, and below {RECALL:g} nothing counts"
    if "fault" in record:
        yield f"the run ended early: {record['fault']}"


def rules_broken(options, samples=None, sampler=SAMPLER, sample_steps=SAMPLE_STEPS, cfg_scale=None):
    """["--option value (rule N)", …] of what keeps a run from a row of LEADERBOARD.md; as of
    `bench_quality`."""
    path = default_path()
    emoji = options.data is None or os.path.realpath(options.data) == os.path.realpath(path)
    broken = [
        (1, "data", options.data, emoji),
        (1, "init", options.init, not options.init),
        (1, "classes", ",".join(options.classes or ()), not options.classes),
        (1, "image-size", options.image_size, options.image_size == SIZE),
        (2, "samples", samples, samples in (None, SAMPLES)),
        (2, "sampler", sampler, sampler == SAMPLER),
        (2, "sample-steps", sample_steps, sample_steps == SAMPLE_STEPS),
        (2, "cfg-scale", cfg_scale, cfg_scale is None),
    ]
    return [f"--{name} {value} (rule {rule})" for rule, name, value, kept in broken if not kept]


def leaderboard_row(record, commit, command):
    """A row of LEADERBOARD.md."""
    cells = [f"{row['seconds']:.1f}" if "seconds" in row else "–" for row in record["targets"]]
    card = record["card"] if record["ranks"] == 1 else f"{record['ranks']} × {record['card']}"
    return f"| {commit} | {card} | {' | '.join(cells)} | `{command}` |  |"


def revision():
    """The commit of the code, or the version where it is installed without one."""
    folder = pathlib.Path(__file__).parents[3]
    # git would look above it, where a repository may name programs to run
    if not (folder / ".git").exists():
        return __version__
    try:
        said = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return __version__
    return said.stdout.strip() if said.returncode == 0 else __version__


def draw(path, record, title, command):
    """The curve: spatial Fréchet distance against seconds, and the targets. command: the words that
    measure it again."""
    from ...benchmark.plots import curves

    points = record["points"]
    seconds = [point["seconds"] for point in points]
    series = {
        name: (seconds, [point[key] for point in points])
        for name, key in (
            ("spatial Fréchet distance", "spatial_frechet_distance"),
            ("Fréchet distance", "frechet_distance"),
        )
    }
    curves(
        path,
        series,
        "seconds of training",
        f"distance, {record['extractor']}",
        title,
        log_y=True,
        levels={f"target {row['target']:g}": row["target"] for row in record["targets"]},
        about={**record["made"], "command": command},
    )
