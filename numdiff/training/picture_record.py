"""How a picture of samples was made, in the PNG itself: a text chunk `numdiff` of JSON (PNG 1.2,
section 4.2.3.3).

    save_png(path, array, record)          report.py; `record` from `describe` of sampling.py, `command` and `seconds`
    read_record(path), lines_of(record)    what `numdiff info FILE.png` prints
"""

import collections
import json
import shlex

from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from .. import schema
from ..errors import NumdiffError
from ..files import Refused, open_regular

KEY = "numdiff"  # of the text chunk
RECORD_BYTES = 1 << 20
WORDS = schema.items(schema.text(1 << 12), 256)
RECORD = schema.record(
    {"model": schema.text(1 << 12), "sampler": schema.text(40), "count": schema.integer(1)},
    {
        "seed": schema.integer(0),
        "weights": schema.text(40),
        "precision": schema.text(40),
        "training_steps": schema.integer(0),
        "steps": schema.integer(1),
        "numdiff": schema.text(40),
        "cfg_scale": schema.optional(schema.number()),
        "seconds": schema.number(0),
        "command": WORDS,
        "class_counts": schema.items(schema.items(schema.anything, 2, 2), 1 << 16),
        "vae": schema.text(1 << 12),
    },
    schema.anything,
)


def chunk_of(record):
    """The `PngInfo` that stores a record."""
    info = PngInfo()
    info.add_itxt(KEY, json.dumps(record))
    return info


def class_counts(labels, names):
    """[[name or index, count], …] of the classes of images, in the order of their indices; []
    without classes."""
    counted = sorted(collections.Counter(map(int, () if labels is None else labels)).items())
    return [[names[index] if index < len(names) else index, count] for index, count in counted]


def read_record(path):
    """The record in a PNG; a `NumdiffError` of one sentence for a file that is no PNG, or has none."""
    try:
        with open_regular(path) as file, Image.open(file, formats=["PNG"]) as picture:
            text = picture.info.get(KEY)
    except FileNotFoundError:
        raise NumdiffError(f"there is no file {path}: check the path.") from None
    except UnidentifiedImageError:
        raise NumdiffError(
            f"{path} is no PNG: give a picture that `numdiff sample` wrote."
        ) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise NumdiffError(
            f"{path} cannot be read ({error}): give a picture that `numdiff sample` wrote."
        ) from None
    if not isinstance(text, str):
        raise NumdiffError(
            f"{path} does not say how it was made: give a picture that `numdiff sample` wrote."
        )
    try:
        return schema.check(schema.parse_json(text, RECORD_BYTES), RECORD, "the record")
    except Refused as error:
        raise NumdiffError(
            f"what {path} says of how it was made is damaged ({error}): give another picture."
        ) from None


def lines_of(record):
    """Yields the lines that describe a record."""
    yield (
        f"model       {record['model']}, step {record.get('training_steps', 0):,}, {record.get('weights', '?')} "
        f"weights, {record.get('precision', '?')}"
    )
    if vae := record.get("vae"):
        yield f"decoder     {vae}"
    seed = record.get("seed", 0)
    yield (
        f"images      {record['count']:,}, {record['sampler']}, {record.get('steps', '?')} steps, "
        f"guidance {record.get('cfg_scale') or 1:g}, seeds {seed} to {seed + record['count'] - 1}"
    )
    if counts := record.get("class_counts"):
        yield f"classes     {', '.join(f'{name} ({count})' for name, count in counts)}"
    if "seconds" in record:
        yield f"made        in {record['seconds']:.1f} s by numdiff {record.get('numdiff', '?')}"
    if "command" in record:
        yield f"command     {shlex.join(record['command'])}"
