"""Run folders without a training: options, records and grids as a run writes them."""

import json

import numpy as np

from numdiff.training.options import resolve
from numdiff.training.report import STATS, save_png
from numdiff.training.run_folder import create_run, sample_path


def make_run(outdir, steps=40, every=10, grids=(20, 40), name=None, planned=None, **more):
    """A folder of a run whose loss falls; name: of the folder."""
    options = resolve(
        {"model": "unet", "device": "cpu", "outdir": str(outdir), "steps": planned or steps, **more}
    )
    run_dir = create_run(options)
    if name:
        run_dir = run_dir.rename(run_dir.parent / name)
    report_steps(run_dir, 0, steps, every)
    for step in grids:
        shade = np.full((40, 60, 3), step % 256, np.uint8)
        save_png(sample_path(run_dir, step), shade)
    return run_dir


def report_steps(run_dir, first, last, every):
    """Append the records of the steps after `first`."""
    rng = np.random.default_rng(first)
    with open(run_dir / STATS, "a") as file:
        for step in range(first + every, last + 1, every):
            losses = (1 / np.arange(step - every + 1, step + 1) + 0.1 * rng.random(every)).tolist()
            record = {
                "step": step,
                "loss": float(np.mean(losses)),
                "gradient_norm": 1 + 1 / step,
                "learning_rate": 1e-3,
                "ms_per_step": 10.0,
                "images_per_second": 400.0,
                "losses": losses,
            }
            file.write(json.dumps(record) + "\n")
