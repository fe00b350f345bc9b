"""How a picture of samples was made, in the PNG itself: a text chunk `numdiff` of JSON (PNG 1.2,
section 4.2.3.3).

    record = finished(describe(…), labels, made, seconds)         `describe` of sampling.py
    save_png(path, array, record)          report.py
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
SHOWN_CLASSES = 12  # that a line names
COUNTS = schema.items(schema.items(schema.anything, 2, 2), 1 << 16)
WORDS = schema.items(schema.text(1 << 12), 1 << 12)
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
        "class_counts": COUNTS,
        "vae": schema.text(1 << 12),
        "model_hash": schema.text(40),
        "seeds": schema.items(schema.integer(0), 2, 2),
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


def say_counts(counts):
    """`class_counts` in words: a cat (3), dog (1)."""
    shown = ", ".join(f"{name} ({count})" for name, count in counts[:SHOWN_CLASSES])
    return f"{shown} … ({len(counts):,} classes)" if len(counts) > SHOWN_CLASSES else shown


def finished(record, labels, made, seconds, decoder=None, command=()):
    """A record with what is known once images are made: how many, their classes, and the seconds.
    decoder: of latents; command: the words of the command that makes them again."""
    counts = class_counts(labels if labels is None else labels[:made], record["classes"])
    record = {**record, "count": made, "class_counts": counts, "seconds": seconds}
    if decoder is not None:
        record["vae"] = str(decoder.path)
    return {**record, "command": list(command)} if command else record


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
        f"weights, {record.get('precision', '?')}{', hash ' + record['model_hash'] if 'model_hash' in record else ''}"
    )
    if vae := record.get("vae"):
        yield f"decoder     {vae}"
    seed = record.get("seed", 0)
    first, last = record.get("seeds") or (seed, seed + record["count"] - 1)
    yield (
        f"images      {record['count']:,}, {record['sampler']}, {record.get('steps', '?')} steps, "
        f"guidance {record.get('cfg_scale') or 1:g}, seeds {first} to {last}"
    )
    if counts := record.get("class_counts"):
        yield f"classes     {say_counts(counts)}"
    if "seconds" in record:
        yield f"made        in {record['seconds']:.1f} s by numdiff {record.get('numdiff', '?')}"
    if "command" in record:
        yield f"command     {shlex.join(record['command'])}"
