"""What a page shows of a run folder: curves, sample grids, settings.

A run may be in progress, and its files may be damaged. What cannot be read is left out, and a
sentence in `notes` says so.
"""

import io
import os
import pathlib
import re
import warnings

import numpy as np
from PIL import Image

from ...errors import NumdiffError, printable
from ...files import open_regular
from ...plots import running_mean
from ...training.options import load_options, settings_of
from ...training.report import STATS, read_records
from ...training.run_folder import check_run, find_run

POINTS = 2000  # of a curve, at most: more than a screen has pixels in a row
GRIDS = 60  # of a run, at most
GRID = re.compile(r"^samples-(\d{8})\.png$")
GRID_PIXELS = 1 << 26  # of a grid, at most: one that claims more is not opened
SMOOTHED = {"loss", "norm"}  # drawn with their running mean
WINDOW = 50  # of which share of a curve, as its inverse, that is the mean
CURVES = {  # name: (title, key in stats.jsonl, logarithmic axis)
    "loss": ("Loss", "loss", True),
    "norm": ("Gradient norm", "gradient_norm", True),
    "rate": ("Learning rate", "learning_rate", False),
    "scale": ("Loss scale", "loss_scale", True),
    "speed": ("Images per second", "images_per_second", False),
    "frechet": ("Fréchet distance", "frechet", False),
}


def find_runs(names, outdir="runs"):
    """Paths of the run folders that `names` mean: folders, or numbers in `outdir`."""
    found = []
    for name in names:
        path = find_run(name, outdir)
        path = path.parent if path.is_file() else path
        check_run(path)
        if path.resolve() not in [other.resolve() for other in found]:
            found.append(path)
    return found


def read_run(run_dir):
    """A dict for JSON: name, step, steps, finished, curves, settings, notes.

    curves: {name: {"x", "y", "low", "high", "smooth"}}, arrays of at most POINTS values; low and
    high are the extremes of the steps that a value of the mean y stands for, smooth the running
    mean of y over a WINDOWth of the steps, where the curve is SMOOTHED.
    """
    run_dir = pathlib.Path(run_dir)
    options = load_options(run_dir)
    records, damaged, partial = read_records(run_dir)
    notes = []
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged:,} lines"
        notes.append(f"{STATS} is damaged: {lines} that are no records are left out.")
    if not records:
        notes.append("The run has no report yet: its curves appear after --log-every steps.")
    step = records[-1]["step"] if records else 0
    if partial and step < options.steps:
        notes.append("A report is being written: this page ends at the one before.")
    return {
        "name": printable(run_dir.resolve().name, 120),
        "step": step,
        "steps": options.steps,
        "finished": step >= options.steps,
        "curves": {
            name: curve
            for name, (_, key, _) in CURVES.items()
            if (curve := curve_of(records, key, name in SMOOTHED)) is not None
        },
        "settings": say_settings(options.to_json()),
        "notes": notes,
    }


def say_settings(settings):
    """{name: text} of the settings that a run's kind of model has."""
    own = {"model", *settings_of(settings["model"])}
    return {name: say_value(value) for name, value in settings.items() if name in own}


def say_value(value):
    """A setting's value, of JSON, as text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    values = value if isinstance(value, list) else [value]
    return printable(", ".join(map(str, values)) or "none", 400)


def curve_of(records, key, smoothed=False):
    """The thinned curve of a key of the records; None if no record has it. The loss has a value for
    each step."""
    x, y = [], []
    for record in records:
        values = record.get("losses") if key == "loss" else None
        if values:
            x.extend(range(record["step"] - len(values) + 1, record["step"] + 1))
            y.extend(values)
        elif key in record:
            x.append(record["step"])
            y.append(record[key])
    y = np.array([v if is_number(v) else np.nan for v in y], np.float64)
    finite = np.isfinite(y)
    if not finite.any():
        return None
    x, y = np.array(x, np.float64)[finite], y[finite]
    window = (len(y) // WINDOW) // 2 * 2 + 1 if smoothed else 1
    smooth = running_mean(y, window) if window > 1 else y
    return {**thin(x, y), "smooth": thin(x, smooth)["y"]}


def is_number(value):
    return type(value) in (int, float) and abs(value) < 1e30


def thin(x, y, points=POINTS):
    """{"x", "y", "low", "high"}: means and extremes of at most `points` groups of neighbours."""
    count = min(len(x), points)
    starts = np.arange(count) * len(x) // count
    sizes = np.diff([*starts, len(x)])
    return {
        "x": np.add.reduceat(x, starts) / sizes,
        "y": (np.add.reduceat(y, starts) / sizes).astype(np.float32),
        "low": np.minimum.reduceat(y, starts).astype(np.float32),
        "high": np.maximum.reduceat(y, starts).astype(np.float32),
    }


# Sample grids -------------------------------------------------------------------------------------


def list_grids(run_dir, most=GRIDS):
    """[(step, path)] of a run's sample grids, in order; of very many the first, the last and evenly
    spaced ones between them."""
    found = sorted(
        (int(match[1]), pathlib.Path(run_dir) / name)
        for name in os.listdir(run_dir)
        if (match := GRID.match(name))
    )
    if len(found) <= most:
        return found
    return [found[round(k * (len(found) - 1) / (most - 1))] for k in range(most)]


def read_grid(path):
    """A grid as an RGB `Image`; None if it is no readable PNG, such as one that is being replaced."""
    try:
        with warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=["PNG"]) as picture:
                if picture.width * picture.height > GRID_PIXELS:
                    return None
                return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError):
        return None


def shrink(pictures, room):
    """WebP files of `Image`s that take at most `room` bytes together: at the quality, then the size,
    that it takes. Raises a `NumdiffError` where none fits."""
    for scale, quality in (
        (1, 90),
        (1, 75),
        (0.75, 70),
        (0.5, 60),
        (0.35, 50),
        (0.2, 40),
        (0.1, 30),
    ):
        files, left = [], room
        for picture in pictures:
            size = [max(1, round(scale * n)) for n in picture.size]
            longest = max(size)
            if longest > 2048:
                size = [max(1, n * 2048 // longest) for n in size]
            made = picture if tuple(size) == picture.size else picture.resize(size, Image.LANCZOS)
            file = io.BytesIO()
            made.save(file, "WEBP", quality=quality, method=2)
            files.append(file.getvalue())
            left -= len(files[-1])
            if left < 0:
                break
        else:
            return files
    raise NumdiffError("the sample grids do not fit into a report: give fewer runs.")
