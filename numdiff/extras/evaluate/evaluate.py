"""What `numdiff evaluate` does: figures that compare samples with a reference, each with the
settings it belongs to."""

import math
import os
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...device import get_backend
from ...distributed.communicator import connect
from ...errors import UsageError, visibly
from ...evaluation.features import RandomConv, extract, find_extractor
from ...evaluation.frechet import frechet_distance
from ...evaluation.kid import kid_subsets
from ...evaluation.precision_recall import precision_recall
from ...files import write_json
from ...outputs import check_ending, check_outputs
from ...progress_bar import progress_bar
from ...sizes import as_size
from ...training.options import resolve_device
from ...training.picture_record import say_counts
from .sources import Features, Images, Statistics, open_source, save_features, save_statistics

UNKNOWN = "?"
NAMES = {
    "frechet_distance": "Fréchet distance",
    "spatial_frechet_distance": "spatial Fréchet",
    "kid": "KID",
    "precision": "precision",
    "recall": "recall",
}
COLUMNS = (("count", 19), ("seed", 6), ("steps", 6), ("sampler", 16), ("EMA", 10))


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationRequest:
    """The settings of `evaluate_command`, which describes them."""

    features: str | os.PathLike | None = None
    classes: Any = None
    nearest: int = 3
    subsets: int = 100
    subset_size: int = 1000
    seed: int = 0
    batch: int = 64
    device: str = "auto"
    precision: str = "auto"
    save_stats: str | os.PathLike | None = None
    save_feature_file: str | os.PathLike | None = None
    json_file: str | os.PathLike | None = None


def evaluate_command(samples, reference=None, progress=False, echo=print, **given):
    """Print the figures of `samples` against `reference`; returns {figure: value}.

    samples, reference: files or folders (see sources.py); without a reference there must be
    something to save
    features: extractor of images, as `find_extractor` takes it
    classes: of a reference that is a dataset, or without a reference of the samples
    precision: arithmetic of random-conv, "fp32" ("auto") or "tf32"
    nearest: k of precision and recall; subsets, subset_size, seed: KID's; save_…: of `samples`

    Under `mpiexec` each rank computes the features of its part of the images, in the batches that
    one rank would make: on GPUs the bits are the same, on a CPU they depend on a rank's cores, as a
    product's sums do. Rank 0 does the rest; the others return {}.
    """
    request = EvaluationRequest(**given)
    device = resolve_device(request.device)
    communicator = connect("auto", device)
    with communicator.job():
        return _evaluate(
            communicator, replace(request, device=device), samples, reference, progress, echo
        )


def _evaluate(communicator, request, samples, reference, progress, echo):
    """`evaluate_command`, on a rank."""
    began, first = time.perf_counter(), communicator.rank == 0
    echo = visibly(echo)
    if reference is None and not (request.save_stats or request.save_feature_file):
        raise UsageError(
            "there is nothing to compare with: give a REFERENCE, or --save-stats or --save-features."
        )
    if reference is None and request.json_file:
        raise UsageError("--json needs a REFERENCE: give one, or leave it out.")
    for option, path, ending in (
        ("--save-stats", request.save_stats, ".npz"),
        ("--save-features", request.save_feature_file, ".npz"),
        ("--json", request.json_file, ".json"),
    ):
        check_ending(option, path, ending)
    check_outputs(
        [
            ("--save-stats", "the statistics", request.save_stats),
            ("--save-features", "the features", request.save_feature_file),
            ("--json", "the figures", request.json_file),
        ],
        samples,
        reference,
    )
    sources = (
        [open_source(samples, request.classes)]
        if reference is None
        else [open_source(samples), open_source(reference, request.classes)]
    )
    if request.save_feature_file and isinstance(sources[0], Statistics):
        raise UsageError(
            f"{samples} holds statistics, which contain no features: leave --save-features out."
        )
    sources = _of_one_size(sources, request.classes)
    images = [s for s in sources if isinstance(s, Images)]
    communicator.check_options(
        {"--batch": request.batch, **{f"the images of {s.path}": s.count for s in images}}
    )
    if images:
        extractor, name = find_extractor(
            request.features, get_backend(request.device), request.precision
        )
        with progress_bar(
            sum(s.count for s in images),
            "evaluating",
            "image",
            shown=None if progress and first else False,
        ) as bar:
            described = [_say_source(s) for s in sources]
            sources = [
                _features(s, extractor, name, request.batch, communicator, bar)
                if isinstance(s, Images)
                else s
                for s in sources
            ]
    else:
        described = [_say_source(s) for s in sources]
        if request.features:
            raise UsageError(
                "--features computes features of images, and neither side has images: leave it out."
            )
    if not first:
        return {}
    for what, text in zip(("samples", "reference"), described, strict=False):
        echo(f"{what:<11}{text}")
    echo(f"{'features':<11}{_say_features(sources)}")
    _save(sources[0], request.save_stats, request.save_feature_file, echo)
    if reference is None:
        return {}
    _check_comparable(*sources)
    figures = measure(*sources, request.nearest, request.subsets, request.subset_size, request.seed)
    for line in table(figures, *sources):
        echo(line)
    for line in warnings(*sources, request.nearest):
        echo(line)
    values = {name: value for name, value, _ in figures}
    if request.json_file:
        write_json(
            request.json_file,
            {
                "figures": values,
                "count": [s.count for s in sources],
                "extractor": _extractor(sources),
                "seconds": time.perf_counter() - began,
                "samples": {"path": sources[0].path, **sources[0].record},
                "reference": {"path": sources[1].path, **sources[1].record},
            },
            "the figures",
        )
    return values


def measure(samples, reference, nearest=3, subsets=100, subset_size=1000, seed=0):
    """[(figure, value, remark)] that can be computed from two `Features` or `Statistics`."""
    ours, theirs = samples.statistics(), reference.statistics()
    figures = [
        ("frechet_distance", frechet_distance(ours.mu, ours.sigma, theirs.mu, theirs.sigma), "")
    ]
    if ours.mu_s is not None and theirs.mu_s is not None:
        spatial = frechet_distance(ours.mu_s, ours.sigma_s, theirs.mu_s, theirs.sigma_s)
        figures.append(("spatial_frechet_distance", spatial, ""))
    if isinstance(samples, Statistics) or isinstance(reference, Statistics):
        return figures
    mean, deviation = kid_subsets(samples.features, reference.features, subset_size, subsets, seed)
    remark = (
        "all pairs"
        if math.isnan(deviation)
        else f"± {deviation:.2g} over {subsets} subsets of {subset_size:,}"
    )
    figures.append(("kid", mean, remark))
    if min(samples.count, reference.count) > nearest:
        precision, recall = precision_recall(samples.features, reference.features, nearest)
        figures += [
            ("precision", precision, f"k = {nearest}"),
            ("recall", recall, f"k = {nearest}"),
        ]
    return figures


def table(figures, samples, reference):
    """A line for each figure, with the count, seed, steps, sampler and EMA."""
    record = samples.record
    columns = [
        f"{_count(samples)} / {_count(reference)}",
        record.get("seed", UNKNOWN),
        record.get("steps", UNKNOWN),
        record.get("sampler", UNKNOWN),
        _ema(record),
    ]
    cells = "".join(
        f"{str(value):<{width}}" for value, (_, width) in zip(columns, COLUMNS, strict=True)
    )
    yield (
        f"{'figure':<18}{'value':>10}   "
        + "".join(f"{name:<{width}}" for name, width in COLUMNS).rstrip()
    )
    for name, value, remark in figures:
        yield f"{NAMES[name]:<18}{value:>10.4g}   {cells}{remark}".rstrip()


def warnings(samples, reference, nearest=3):
    """Sentences on how far the figures can be trusted."""
    unknown = [s.path for s in (samples, reference) if s.image_size is None]
    if unknown:
        yield (
            f"note: {' and '.join(dict.fromkeys(unknown))} does not say of what size its images were, so equal "
            "sizes could not be checked."
        )
    dimensions = len(samples.statistics().mu)
    few = [s.count for s in (samples, reference) if s.count is not None and s.count <= dimensions]
    if few:
        yield (
            f"note: {min(few):,} images are fewer than the {dimensions} features, so the Fréchet distance is much "
            "larger than it would be for many images: compare figures of equal counts only."
        )
    if isinstance(samples, Statistics) or isinstance(reference, Statistics):
        yield "note: KID, precision and recall need the features of both sides; one side has only statistics."
    elif min(samples.count, reference.count) <= nearest:
        yield (
            f"note: precision and recall need more images on both sides than the {nearest} neighbours of --nearest: "
            "give more images, or a smaller --nearest."
        )


def _of_one_size(sources, classes):
    """Average the images of a larger dataset down to the size of the other side; a `UsageError` if
    that is impossible. A file of features or statistics that does not say of what size its images
    were is of any size."""
    sizes = [s.image_size for s in sources]
    if len(sources) < 2 or None in sizes or sizes[0] == sizes[1]:
        return sources
    small, large = sorted(sources, key=lambda s: s.image_size[0])
    factors = {n / m for n, m in zip(large.image_size, small.image_size, strict=True)}
    if (
        not (isinstance(large, Images) and large.dataset)
        or len(factors) > 1
        or not max(factors).is_integer()
    ):
        raise _other_size(*sources)
    again = open_source(large.path, classes if large is sources[1] else None, small.image_size)
    return [again if s is large else s for s in sources]


def _other_size(*sources):
    """The `UsageError` for two sides whose images have different sizes."""
    said = " and ".join(
        f"{s.path} {'has' if isinstance(s, Images) else f'holds {_kind(s)} of'} images of "
        f"{_say_size(s.image_size)}"
        for s in sources
    )
    made = next((s for s in reversed(sources) if not isinstance(s, Images)), None)
    if made is None:
        return UsageError(f"{said}: bring both to one size (numdiff data import --size does).")
    size = next(s.image_size for s in sources if s is not made)
    option = "--save-stats" if isinstance(made, Statistics) else "--save-features"
    return UsageError(
        f"{said}: make {_kind(made)} of images of {_say_size(size)} (`numdiff data import "
        f"SOURCE OUT.h5 --size {as_size(size)}`, then `numdiff evaluate OUT.h5 {option} FILE.npz`)."
    )


def _kind(source):
    return "statistics" if isinstance(source, Statistics) else "features"


def _say_size(size):
    return f"{size[0]}×{size[1]}"


def _features(source, extractor, name, batch, communicator, bar):
    """The `Features` of images, complete on rank 0."""
    ranks = communicator.size
    shares = [source.share(batch, rank, ranks) for rank in range(ranks)]
    start, stop = shares[communicator.rank]
    own = (None, None)
    if start < stop:
        own = extract(
            extractor,
            source.batches(batch, start, stop),
            stop - start,
            lambda count: bar.update(min(count * ranks, bar.total - bar.n)),
        )
    widths = communicator.gather([None if part is None else part.shape[1] for part in own])
    features, spatial = (
        _gathered(communicator, part, next(filter(None, each), None), shares)
        for part, each in zip(own, zip(*widths, strict=True), strict=True)
    )
    return Features(
        source.path,
        features,
        spatial,
        {
            **source.record,
            "count": source.count,
            "image_size": list(source.size),
            "extractor": name,
        },
    )


def _gathered(communicator, part, width, shares):
    """An array (N, width) on rank 0, of whose rows each rank has its share; None elsewhere, and
    where no rank has any."""
    if width is None:
        return None
    part = np.empty(0, np.float32) if part is None else part.reshape(-1)
    bounds = [start * width for start, _ in shares] + [shares[-1][1] * width]
    whole = communicator.gather_parts(part, bounds, everywhere=False)
    return None if whole is None else whole.reshape(-1, width)


def _extractor(sources):
    return next((s.record["extractor"] for s in sources if "extractor" in s.record), None)


def _check_comparable(samples, reference):
    names = [s.record.get("extractor") for s in (samples, reference)]
    if None not in names and names[0] != names[1]:
        raise UsageError(
            f"the features are of {names[0]} on one side and of {names[1]} on the other: use one "
            "extractor for both."
        )
    ours, theirs = (
        s.mu.size if isinstance(s, Statistics) else s.features.shape[1]
        for s in (samples, reference)
    )
    if ours != theirs:
        raise UsageError(
            f"{samples.path} has {ours} features per image and {reference.path} has {theirs}: use one "
            "extractor for both (--features)."
        )
    for s in (samples, reference):
        if s.count is not None and s.count < 2:
            raise UsageError(f"{s.path} holds one image, and the figures need at least two.")
    ours, theirs = (None if s is None else s.shape[-1] for s in _spatial(samples, reference))
    if None not in (ours, theirs) and ours != theirs:
        raise UsageError(
            f"{samples.path} has {ours} spatial features per image and {reference.path} has {theirs}: use "
            "one extractor for both (--features)."
        )


def _spatial(*sources):
    return [s.mu_s if isinstance(s, Statistics) else s.spatial for s in sources]


def _say_source(source):
    if isinstance(source, Images):
        text = f"{source.path}: {source.count:,} images of {_say_size(source.size)}"
    else:
        text = f"{source.path}: {_kind(source)} of {_count(source)} images"
        if source.image_size:
            text += f" of {_say_size(source.image_size)}"
    record = source.record
    if isinstance(source, Images) and source.note:
        text += f", {source.note}"
    elif record.get("classes") and "sampler" not in record:
        text += f", classes {', '.join(record['classes'])}"
    if "sampler" in record:
        guidance = record.get("cfg_scale")
        text += (
            f"; {record['sampler']}, {record.get('steps', UNKNOWN)} steps, seed {record.get('seed', UNKNOWN)}, "
            + (f"guidance {guidance:g}, " if isinstance(guidance, (int, float)) else "")
            + f"{record.get('weights', UNKNOWN)} weights of {record.get('model', UNKNOWN)}, trained for "
            f"{record.get('training_steps', UNKNOWN)} steps"
            + (f", hash {record['model_hash']}" if "model_hash" in record else "")
        )
        if counts := say_counts(record.get("class_counts") or ()):
            text += f"; classes {counts}"
    return text


def _say_features(sources):
    name = _extractor(sources)
    size = (
        sources[0].mu.size if isinstance(sources[0], Statistics) else sources[0].features.shape[1]
    )
    if str(name).startswith(RandomConv.name):
        return (
            f"{name}: {size} numbers per image, of a fixed random network, not Inception: a Fréchet distance of "
            "them is not FID"
        )
    return f"{name or 'of an extractor that the files do not name'}: {size} numbers an image"


def _count(source):
    return UNKNOWN if source.count is None else f"{source.count:,}"


def _ema(record):
    weights = record.get("weights", UNKNOWN)
    return {"ema": "yes", "raw": "no"}.get(weights, weights)


def _save(source, stats, feature_file, echo):
    if feature_file:
        save_features(feature_file, source)
        echo(f"{'written':<11}{feature_file}: features of {_count(source)} images")
    if stats:
        save_statistics(stats, replace(source.statistics(), record=source.record))
        echo(f"{'written':<11}{stats}: mu, sigma of {_count(source)} images")
