"""Plots of what is measured: ladders of kernels, rooflines, figures against time.

    curves("frechet.png", {"UNet": (seconds, distances)}, x="time (s)", y="Fréchet distance")
    roofline("roof.png", {"matmul": [(flops_per_byte, flops_per_second), …]}, bandwidth=4.0e12,
             peaks={"fp16": 989e12})

The style is that of numdiff/plots.py.
"""

import math

import numpy as np

from ..plots import GREY, INK, SIZE, Plot, draw_bars, log_axis, looks

NEAR = 0.03  # of an axis: labels of points that are closer share a place


def curves(path, series, x, y, title="", log_x=False, log_y=False, levels=None, about=None):
    """One line a name, with a point at each value: for example a Fréchet distance against time.

    series: {name: (xs, ys)} of sequences of equal length; x, y: names of the axes with their units;
    log_x, log_y: logarithmic axes, which leave out what is not above zero; levels: {name: value of
    y to compare with}, drawn as dashed lines; about: a record that a PNG stores
    (training/picture_record.py)
    """
    with Plot(path, title, x, y, about=about) as axes:
        # so that margins are, too
        axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
        for (name, (xs, ys)), (colour, marker) in zip(series.items(), looks(), strict=False):
            xs, ys = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
            shown = (
                np.isfinite(xs)
                & np.isfinite(ys)
                & (xs > 0 if log_x else True)
                & (ys > 0 if log_y else True)
            )
            axes.plot(
                xs[shown],
                ys[shown],
                color=colour,
                marker=marker,
                markersize=4.5,
                linewidth=1.6,
                label=name,
            )
        for name, level in (levels or {}).items():
            axes.axhline(level, color=GREY, linewidth=1, linestyle=(0, (5, 3)))
            axes.annotate(
                name,
                (0, level),
                (4, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=GREY,
                fontsize=9,
            )
        for way, wanted in (("x", log_x), ("y", log_y)):
            if wanted:
                log_axis(axes, way)
        if len(series) > 1:
            axes.legend(loc="best")


def roofline(path, points, bandwidth=None, peaks=None, title="Roofline"):
    """Kernels under the roof of a card (Williams, Waterman and Patterson 2009): FLOP/s over FLOPs
    per byte that must be moved, both logarithmic.

    points: {name: [(FLOPs per byte, FLOP/s), …]}; a third entry is a label for the point
    bandwidth: bytes a second; peaks: {precision: FLOP/s}. Without them no roof is drawn
    """
    with Plot(path, title) as axes:
        draw_roofline(axes, points, bandwidth, peaks or {})


def draw_roofline(axes, points, bandwidth, peaks, legend=True):
    """The roof and points of `roofline`, and the names of the axes."""
    everything = [(p[0], p[1]) for rows in points.values() for p in rows if p[0] > 0 and p[1] > 0]
    fastest = max([p[1] for p in everything] + list(peaks.values()), default=1e12)
    unit, prefix = (1e12, "T") if fastest >= 1e11 else (1e9, "G")  # GFLOP/s on a CPU
    ridges = [peak / bandwidth for peak in peaks.values()] if bandwidth else []
    low, high = (
        extreme([p[0] for p in everything] + ridges, default=1.0) for extreme in (min, max)
    )
    low, high = low / 3, high * 5
    axes.set_xlabel("arithmetic intensity (FLOPs per byte moved)")
    axes.set_ylabel(f"{prefix}FLOP/s")
    if bandwidth:
        top = max(peaks.values()) if peaks else bandwidth * high
        end = min(high, top / bandwidth)
        axes.plot(
            [low, end], [low * bandwidth / unit, end * bandwidth / unit], color=GREY, linewidth=1.4
        )
        at = low**0.75 * end**0.25  # a quarter of the way up, along the line
        axes.annotate(
            f"memory: {bandwidth / 1e9:,.0f} GB/s",
            (at, at * bandwidth / unit),
            (-3, 5),
            rotation=45,
            rotation_mode="anchor",
            transform_rotates_text=True,
            textcoords="offset points",
            color=GREY,
            fontsize=9,
        )
    for precision, peak in peaks.items():
        start = max(low, peak / bandwidth) if bandwidth else low
        axes.plot([start, high], [peak / unit, peak / unit], color=GREY, linewidth=1.4)
        axes.annotate(
            f"{precision}: {peak / unit:,.4g} {prefix}FLOP/s",
            (high, peak / unit),
            (-2, 4),
            ha="right",
            textcoords="offset points",
            color=GREY,
            fontsize=9,
        )
    named = []
    for (name, rows), (colour, marker) in zip(points.items(), looks(), strict=False):
        shown = [p for p in rows if p[0] > 0 and p[1] > 0]
        axes.plot(
            [p[0] for p in shown],
            [p[1] / unit for p in shown],
            linestyle="",
            marker=marker,
            color=colour,
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.6,
            label=name,
        )
        named += [(*p, colour) for p in shown if p[2:]]
    axes.set_xscale("log")
    axes.set_yscale("log")
    values = [p[1] for p in everything] + list(peaks.values()) or [unit]
    bottom, top = min(values) / 3, max(values) * 2
    axes.set_xlim(low, high)
    axes.set_ylim(bottom / unit, top / unit)
    for group in close_ones(named, high / low, top / bottom):
        intensity, flops = (
            max(p[0] for p in group),
            math.prod(p[1] for p in group) ** (1 / len(group)),
        )
        axes.annotate(
            ", ".join(p[2] for p in group),
            (intensity, flops / unit),
            (6, -3),
            textcoords="offset points",
            fontsize=8,
            color=group[0][3] if len(group) == 1 else INK,
        )
    for way in "xy":
        log_axis(axes, way)
    if points and legend:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize=9)


def close_ones(points, x_range, y_range):
    """Groups of points (x, y, …) so close on logarithmic axes that labels next to them would
    overlap.

    x_range, y_range: the axes' upper ends over their lower ones
    """
    groups = []
    for point in points:
        near = [
            group
            for group in groups
            if any(
                abs(math.log(point[0] / p[0])) < NEAR * math.log(x_range)
                and abs(math.log(point[1] / p[1])) < NEAR * math.log(y_range)
                for p in group
            )
        ]
        groups = [group for group in groups if group not in near] + [[*sum(near, []), point]]
    return groups


def ladder(path, values, unit, title, points, bandwidth=None, peaks=None):
    """Horizontal bars of `values` ({name: number}), one a kernel, above a `roofline` of the points,
    whose labels are the beginnings of the bars' names."""
    with Plot(path, title, unit, height=2.3 + 0.34 * len(values) + SIZE[1], panels=2) as (
        above,
        below,
    ):
        draw_bars(above, values)
        draw_roofline(below, points, bandwidth, peaks or {}, legend=False)
