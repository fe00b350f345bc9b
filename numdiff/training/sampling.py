"""What `numdiff sample` does: images from a run, a checkpoint or a converted model, as one picture."""
import pathlib
import time

import numpy as np
from tqdm import tqdm

from ..diffusion import sample
from ..errors import UsageError
from .model_files import load
from .report import image_grid, save_png
from .run_folder import find_checkpoint


def sample_command(run, count=16, steps=50, sampler="ddim", eta=None, seed=0, class_name=None, batch=16,
                   grid="samples.png", device="auto", weights="ema", outdir="runs", columns=None, progress=False,
                   echo=print):
    """Write a picture of `count` images; returns them, uint8 (count, H, W, C).

    run: run folder, its number in `outdir`, "auto" for the newest, a checkpoint or a model file
    class_name: a class by name or index, or a list of them, for a model with classes; None takes them in turn
    columns: of the picture; progress: show a bar on a terminal
    The other arguments are those of `numdiff.sample` and `numdiff.load`.
    """
    if pathlib.Path(grid).suffix.lower() != ".png":
        raise UsageError(f"--grid {grid} must end in .png.")
    checkpoint = find_checkpoint(run, outdir, warn=echo)
    model = load(checkpoint, device, weights)
    labels = class_indices(class_name, model)
    evaluations = steps * -(-count // batch)
    started = time.perf_counter()
    with tqdm(total=evaluations, unit="step", desc="sampling", disable=None if progress else True) as bar:
        images = sample(model, count, steps, sampler, eta, seed, labels, batch, progress=bar.update)
    save_png(grid, image_grid(images, columns, zoom=max(1, 128 // images.shape[1]) if images.shape[1] < 64 else 1))
    echo(f"{grid}: {count} images of {checkpoint} (step {model.meta.get('step', 0)}, {weights} weights), {sampler}, "
         f"{steps} steps, seeds {seed} to {seed + count - 1}, {time.perf_counter() - started:.1f} s")
    return images


def class_indices(y, model):
    """Indices of classes given by name or index; a `UsageError` names those that there are."""
    if y is None:
        return None
    names = model.meta.get("classes") or []
    indices = []
    for value in [y] if isinstance(y, (str, int, np.integer)) else y:
        if isinstance(value, str) and value in names:
            indices.append(names.index(value))
        elif str(value).isdigit():
            indices.append(int(value))
        else:
            listed = (f": use {', '.join(map(repr, names))} or an index" if names
                      else ", and it has no class names: use an index")
            raise UsageError(f"the model has no class {value!r}{listed}.")
    return indices
