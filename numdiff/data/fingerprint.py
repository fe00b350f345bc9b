"""Fingerprints of sets of images: compared between ranks that train together, and between a run and
its resumption.

    {"rule": 1, "shape": [N, H, W, C], "dtype": "uint8", "classes": [names], "labels": digest or
    None, "rows": digest}

It describes the images as training sees them: the chosen classes, in the chosen size, wherever the
    file is. Of a set in memory up to 32 MB are hashed: whole images, evenly spaced from the first
    to the last. Of a set on disk, where at least a chunk of 64 is read at a time, eight images of
    each of four chunks.
"""

import hashlib

import numpy as np

from .dataset import CHUNK
from .names import key

RULE = 1  # how the rows are chosen and hashed: digests of different rules are not compared
SAMPLE_BYTES = 32 << 20
SAMPLE_CHUNKS, SAMPLE_ROWS = 4, 8


def fingerprint(dataset):
    """The fingerprint of a `Dataset`, a dict for JSON."""
    digest, dtype = hash_of(), np.dtype(getattr(dataset, "dtype", np.uint8))
    rows = sampled_rows(dataset.shape, dtype.itemsize, getattr(dataset, "in_memory", True))
    for start in range(0, len(rows), CHUNK):
        digest.update(
            np.ascontiguousarray(dataset.read(rows[start : start + CHUNK])).view(np.uint8)
        )
    labels = (
        None
        if dataset.labels is None
        else hash_of(np.ascontiguousarray(dataset.labels, "<i4").view(np.uint8))
    )
    return {
        "rule": RULE,
        "shape": [int(n) for n in dataset.shape],
        "dtype": dtype.name,
        "classes": list(getattr(dataset, "classes", ())),
        "labels": labels and labels.hexdigest(),
        "rows": digest.hexdigest(),
    }


def sampled_rows(shape, itemsize, in_memory):
    """The rows that are hashed, int64, ascending, for a set of images of this shape (N, H, W, C)."""
    if in_memory:
        return spaced(
            shape[0], max(SAMPLE_ROWS, SAMPLE_BYTES // (int(np.prod(shape[1:])) * itemsize))
        )
    first = spaced(-(-shape[0] // CHUNK), SAMPLE_CHUNKS)[:, None] * CHUNK
    rows = (first + spaced(CHUNK, SAMPLE_ROWS)).reshape(-1)
    return rows[rows < shape[0]]


def spaced(count, wanted):
    """At most this many of the integers below `count`, evenly spaced, the first and the last among
    them."""
    return np.unique(np.linspace(0, count - 1, min(wanted, count)).astype(np.int64))


def hash_of(data=b""):
    return hashlib.blake2b(data, digest_size=16)


def difference(one, other, first, second):
    """The difference of two fingerprints, in words, or None; `first` and `second` name their
    owners."""
    if one["shape"] != other["shape"] or one["dtype"] != other["dtype"]:
        return f"{first} has {describe(one)}, {second} {describe(other)}"
    if list(map(key, one["classes"])) != list(map(key, other["classes"])):
        return reordered(one["classes"], other["classes"], first, second) or (
            f"{first} has {len(one['classes'])} classes, {second} {len(other['classes'])}"
        )
    if (one["labels"] is None) != (other["labels"] is None):
        return f"{first if one['labels'] is None else second} has no labels"
    if one["rule"] == other["rule"]:
        if one["labels"] != other["labels"]:
            return f"the labels of {first} and {second} differ"
        if one["rows"] != other["rows"]:
            return f"the images of {first} and {second} differ"
    return None


def reordered(one, other, first, second):
    """The first class whose names differ in the two lists, in words; None if one list is the
    beginning of the other."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if key(a) != key(b):
            return f"class {index} of {first} is {a!r}, of {second} {b!r}"
    return None


def describe(fingerprint):
    count, height, width, channels = fingerprint["shape"]
    return f"{count:,} {fingerprint['dtype']} images of {height}×{width}×{channels}"
