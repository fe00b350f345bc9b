"""Learned steps of a trained model compared with other samplers: a table in Markdown.

    python -m numdiff.extras.learned_steps.benchmark runs/00000-unet-unet64 --counts
    4,6,8,10 --samples 512

Fréchet is the distance in the features of random-conv-1 (numdiff/evaluation) to all images that the
run was trained on. RMS is the root mean square distance, in pixel values (0 to 255), to the result
of many DDIM steps from the same seed. There is no Fréchet distance of latents, and of images below
32×32 pixels. heun evaluates the model twice a step, except in the last. Its result with as many
evaluations as the others is the row "heun, half the steps".
"""

import argparse
import json
import pathlib
import time

import numpy as np

from numdiff.data.dataset import default_path
from numdiff.device import get_backend
from numdiff.diffusion import Sampling
from numdiff.evaluation.features import SMALLEST, RandomConv, extract
from numdiff.evaluation.frechet import frechet_distance
from numdiff.extras.evaluate.sources import Features, open_source
from numdiff.extras.learned_steps.fit import Trajectory
from numdiff.sizes import sides
from numdiff.training.model_files import load
from numdiff.training.options import resolve_device
from numdiff.training.run_folder import OPTIONS
from numdiff.training.sampling import find_model

SAMPLERS = "ddim", "heun", "dpm++2m"
FIRST_SEED = 1 << 20  # of the images that are learned from, as of `numdiff schedule`
BATCH_OF_FEATURES = 64


def images_of(model, count, batch, seed, **how):
    """(images, seconds) of all seeds; the seconds have what had to be compiled."""
    sampling = Sampling(model, count=count, seed=seed, batch=batch, **how)
    started = time.perf_counter()
    images = np.concatenate([made for _, made in sampling.batches()])
    return images, time.perf_counter() - started


def statistics_of(batches, count, extractor):
    colours = (batch if batch.shape[-1] == 3 else np.repeat(batch, 3, axis=-1) for batch in batches)
    return Features("", *extract(extractor, colours, count)).statistics()


def reference_of(model, checkpoint, data, extractor):
    """The statistics of the images that the run was trained on; None of what has none."""
    if model.in_channels not in (1, 3) or min(sides(model.image_size)) < SMALLEST:
        return None
    options = checkpoint.parent / OPTIONS
    options = json.loads(options.read_text()) if options.exists() else {}
    source = open_source(
        data or options.get("data") or default_path(),
        None if data else options.get("classes"),
        sides(model.image_size),
    )
    return statistics_of(source.batches(BATCH_OF_FEATURES), source.count, extractor)


def rows_of(model, options, reference, extractor):
    """Yields (steps, sampler, Fréchet distance or None, RMS distance, seconds)."""
    guided = {} if options.cfg_scale is None else {"cfg_scale": options.cfg_scale}
    how = {"count": options.samples, "batch": options.batch, "seed": options.seed, **guided}
    target, seconds = images_of(model, steps=options.reference_steps, sampler="ddim", **how)

    def row(steps, name, images, seconds):
        distance = None
        if reference is not None:
            batches = (
                images[i : i + BATCH_OF_FEATURES] for i in range(0, len(images), BATCH_OF_FEATURES)
            )
            ours = statistics_of(batches, len(images), extractor)
            distance = frechet_distance(ours.mu, ours.sigma, reference.mu, reference.sigma)
        rms = np.sqrt(
            np.mean((images.astype(np.float32) - target.astype(np.float32)) ** 2, dtype=np.float64)
        )
        return steps, name, distance, rms, seconds

    yield row(options.reference_steps, "ddim", target, seconds)
    long = Trajectory(
        Sampling(
            model,
            count=options.learn,
            steps=options.reference_steps,
            sampler="ddim",
            seed=FIRST_SEED,
            batch=options.batch,
            **guided,
        )
    )
    for count in options.counts:
        schedule = long.schedule(count)
        yield row(count, "learned", *images_of(model, schedule=schedule, **how))
        for sampler in SAMPLERS:
            yield row(count, sampler, *images_of(model, steps=count, sampler=sampler, **how))
        if count > 2:
            yield row(
                count // 2,
                "heun, half the steps",
                *images_of(model, steps=count // 2, sampler="heun", **how),
            )


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run folder, its number in runs/, a checkpoint, or auto")
    parser.add_argument(
        "--counts", type=lambda text: [int(n) for n in text.split(",")], default=[4, 6, 8, 10]
    )
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--reference-steps", type=int, default=300)
    parser.add_argument("--learn", type=int, default=32, help="images that are learned from")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cfg-scale", type=float)
    parser.add_argument("--data", help="what to compare with, instead of the run's own images")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args(arguments)
    checkpoint = pathlib.Path(find_model(options.run))
    device = resolve_device(options.device)
    model = load(checkpoint, device, precision=options.precision)
    extractor = RandomConv(get_backend(device))
    reference = reference_of(model, checkpoint, options.data, extractor)
    print(
        f"{checkpoint}, {options.samples} images, guidance {options.cfg_scale or 'none'}, {model.precision}\n"
    )
    print(
        "| steps | sampler | Fréchet | RMS to the first row | s |\n| --- | --- | --- | --- | --- |"
    )
    for steps, name, distance, rms, seconds in rows_of(model, options, reference, extractor):
        print(
            f"| {steps} | {name} | {'–' if distance is None else f'{distance:.3f}'} | {rms:.2f} | {seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
