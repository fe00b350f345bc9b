"""Measurements under the roof of the card: the pictures of `numdiff bench kernels` and `numdiff
profile`.

A kernel is plotted by its arithmetic per second over its arithmetic per byte that it must move. One
without arithmetic, such as a copy or a fill, is left out.
"""

from ..errors import NumdiffError
from . import plots
from .costs import roof_of


def draw_kernels(path, rows, title):
    """The picture of `bench_kernels`' rows, a colour an operation, a label a version; returns the
    number of points."""
    points = {}
    for row in rows:
        if row["tflops"]:
            points.setdefault(row["operation"], []).append(
                (1e3 * row["tflops"] / row["gb_s"], 1e12 * row["tflops"], row["version"].strip("*"))
            )
    peaks = {row["precision"]: row["peak"] for row in rows if row["tflops"] and row["peak"]}
    return _draw(path, points, next((row["bandwidth"] for row in rows), None), peaks, title)


def draw_profile(path, profile, rows, title):
    """The picture of the `rows` kernels of a `Profile` that take longest; returns the number of
    points."""
    table = [row for row in profile.by_kernel() if row[2] and row[4] and row[5]][:rows]
    points = {
        name: [(flops / moved, 1e6 * flops / us)] for name, _, us, _, moved, flops, _ in table
    }
    shown = {
        launch.span
        for launch in profile.launches
        if launch.kernel in points and launch.span is not None
    }
    spans = [profile.spans[number] for number in sorted(shown)]
    found = {roof_of(span.name, span.dtype, profile.precision) for span in spans if span.flops}
    peaks = {name: profile.roof.flops(name) for name in sorted(found) if profile.roof.flops(name)}
    return _draw(path, points, profile.roof.bandwidth, peaks, title)


def draw_ladder(path, rows, title):
    """The picture of `bench_ladder`'s measured rows: images/s as bars, and a point a row under the
    roof."""
    timed = [row for row in rows if "ms" in row]
    if not timed:
        raise NumdiffError(f"no row was measured, so {path} would be empty.")
    names = {row["number"]: f"{row['number']}  {row['name']}" for row in timed}
    points = {
        names[row["number"]]: [
            (row["flops"] / row["moved"], 1e12 * row["tflops"], str(row["number"]))
        ]
        for row in timed
        if row["moved"]
    }
    peaks = {row["precision"]: row["peak"] for row in timed if row["peak"]}
    plots.ladder(
        path,
        {names[row["number"]]: row["images_per_second"] for row in timed},
        "images/s",
        title,
        points,
        timed[0]["bandwidth"],
        peaks,
    )


def _draw(path, points, bandwidth, peaks, title):
    if not points:
        raise NumdiffError(
            f"nothing that was measured computes anything, so {path} would be empty; name an "
            "operation such as conv2d or matmul."
        )
    plots.roofline(path, points, bandwidth, peaks, title)
    return sum(map(len, points.values()))
