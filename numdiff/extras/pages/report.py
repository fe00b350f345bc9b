"""The report of one run or several: one HTML file that needs no network.

    save_report("report.html", ["runs/00000-unet-tiny"])

Bokeh draws the charts. Its Python package ships its JavaScript, which the file contains, so the
packages of the extra `report` are needed to write a report, and none to read it. Texts of a run
(names, settings) reach the page as JSON only, and its script writes them as text, never as HTML.
"""

import base64
import html
import json
import pathlib
import re

import numpy as np

from ...errors import NumdiffError, UsageError
from ...files import atomic_file
from ...plots import COLOURS
from .runs import CURVES, SMOOTHED, list_grids, read_grid, read_run, shrink

ASSETS = pathlib.Path(__file__).parent / "assets"
PICTURES_ROOM = 900_000  # bytes of all sample grids of a page, before base64
RUNS = 10  # of a page: as many as there are colours
HEIGHT = 250  # pixels of a chart
GREY = "#6e747e"


def save_report(path, run_dirs):
    """Write the report of run folders to `path`, which must end in .html; returns the notes, one
    sentence each."""
    if not str(path).endswith(".html"):
        raise UsageError(f"--out {path} must end in .html.")
    runs = read_runs(run_dirs)
    for run, grids in zip(runs, embedded_grids(run_dirs), strict=True):
        run["grids"] = grids
    text = page(runs)
    with atomic_file(path, "the report") as file:
        file.write(text.encode())
    return [f"{run['name']}: {note}" for run in runs for note in run["notes"]]


def read_runs(run_dirs):
    """The runs, each with a label and a colour that no other one of the page has."""
    if len(run_dirs) > RUNS:
        raise UsageError(
            f"a report shows at most {RUNS} runs, and not {len(run_dirs)}: give fewer."
        )
    runs = [read_run(run_dir) for run_dir in run_dirs]
    names = [run["name"] for run in runs]
    for k, run in enumerate(runs):
        again = names[:k].count(run["name"])
        run["label"] = run["name"] + (f" ({again + 1})" if again else "")
        run["colour"] = COLOURS[k]
    return runs


def embedded_grids(run_dirs):
    """[[step, data URL of a WebP], …] of each run; all of them take PICTURES_ROOM bytes at most."""
    found = []
    most = max(4, 60 // len(run_dirs))
    for run_dir in run_dirs:
        read = [(step, read_grid(path)) for step, path in list_grids(run_dir, most)]
        read = [(step, picture) for step, picture in read if picture is not None]
        files = shrink([picture for _, picture in read], PICTURES_ROOM // len(run_dirs))
        found.append(
            [
                [step, f"data:image/webp;base64,{base64.b64encode(file).decode()}"]
                for (step, _), file in zip(read, files, strict=True)
            ]
        )
    return found


# The page -----------------------------------------------------------------------------------------


def page(runs, live=False):
    """The page as text. runs: of `read_runs`, with "grids" [[step, URL], …]; live: the page asks its
    server for what is new."""
    script, charts = draw_charts(runs, live)
    names = [run["label"] for run in runs]
    title = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    parts = {
        "title": html.escape(title),
        "style": asset("page.css") + asset("report.css"),
        "library": library(),
        "data": for_script(
            {"runs": [without_curves(run) for run in runs], "live": live, "charts": list(charts)}
        ),
        "charts": "".join(
            f'<section class="chart" id="chart-{name}"><h2>{html.escape(CURVES[name][0])}</h2>{div}</section>'
            for name, div in charts.items()
        ),
        "plots": script,
        "script": asset("report.js"),
    }
    return filled("report.html", parts)


def filled(name, parts):
    """An asset in which each {{part}} is replaced, once."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset(name))


def asset(name):
    return (ASSETS / name).read_text(encoding="utf-8")


def for_script(value):
    """JSON that may stand in an HTML script element: no text in it can end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def without_curves(run):
    return {key: value for key, value in run.items() if key != "curves"}


def columns_of_chart(curve):
    """The columns of a chart's data source. A band needs its edges as one polygon."""
    return {
        "x": np.asarray(curve["x"], np.float64),
        "y": np.asarray(curve["y"], np.float32),
        "low": np.asarray(curve["low"], np.float32),
        "high": np.asarray(curve["high"], np.float32),
        "smooth": np.asarray(curve["smooth"], np.float32),
    }


EMPTY = {"x": [], "y": [], "low": [], "high": [], "smooth": []}


def is_logarithmic(name, runs):
    """Whether a chart has a logarithmic axis: where its values are all positive."""
    lows = [run["curves"][name]["low"].min() for run in runs if name in run["curves"]]
    return CURVES[name][2] and bool(lows) and min(lows) > 0


def draw_charts(runs, live=False):
    """(script, {name: div}) of the charts that the runs have data for; live: also of those that
    every run will have."""
    try:
        from bokeh.embed import components
        from bokeh.models import (
            BasicTickFormatter,
            ColumnDataSource,
            DataRange1d,
            HoverTool,
            LogTicker,
        )
        from bokeh.plotting import figure
    except ImportError:
        raise NumdiffError(
            "a report is drawn by bokeh, which is not installed: pip install 'numdiff-diffusion[report]'."
        ) from None
    later = ("loss", "norm", "rate", "speed") if live else ()
    shown = [n for n in CURVES if n in later or any(n in run["curves"] for run in runs)]
    figures, steps = {}, DataRange1d(range_padding=0.01, only_visible=True)
    for name in shown:
        chart = figures[name] = figure(
            height=HEIGHT,
            sizing_mode="stretch_width",
            x_range=steps,
            y_axis_type="log" if is_logarithmic(name, runs) else "linear",
            tools="pan,box_zoom,wheel_zoom,reset,save",
            active_drag="box_zoom",
            output_backend="canvas",
            min_border_right=12,
        )
        chart.toolbar.logo = None
        chart.toolbar.autohide = True
        chart.y_range.only_visible = True
        lines, sources = [], []
        for k, run in enumerate(runs):
            curve = run["curves"].get(name)
            columns = columns_of_chart(curve) if curve else EMPTY
            sources.append(ColumnDataSource(columns, name=f"{name}/{k}"))
            how = {"source": sources[k], "line_color": run["colour"]}
            chart.varea(
                "x", "low", "high", source=sources[k], fill_color=run["colour"], fill_alpha=0.2
            )
            if name in SMOOTHED:
                chart.line("x", "y", **how, line_width=1, line_alpha=0.35)
            if curve and len(curve["x"]) == 1:  # a line of one point is not seen
                chart.scatter("x", "y", source=sources[k], color=run["colour"], size=6)
        for source, run in zip(sources, runs, strict=True):  # over what is light of all runs
            lines.append(
                chart.line("x", "smooth", source=source, line_color=run["colour"], line_width=1.8)
            )
        chart.add_tools(
            HoverTool(
                renderers=lines,
                tooltips=[("step", "@x{0,0}"), (CURVES[name][0].lower(), "@smooth{0.0000a}")],
                mode="vline",
            )
        )
        chart.xaxis.axis_label = "step"
        chart.xaxis.formatter = BasicTickFormatter(use_scientific=False)
        chart.yaxis.formatter = BasicTickFormatter(power_limit_low=-5, power_limit_high=6)
        if is_logarithmic(name, runs):
            # powers of two; those of ten would leave most charts with one
            chart.yaxis.ticker = LogTicker(base=2, mantissas=[1], num_minor_ticks=0)
        for axis in (*chart.xaxis, *chart.yaxis):
            axis.axis_line_color = axis.major_tick_line_color = GREY
            axis.minor_tick_line_color = None
        chart.grid.grid_line_color = "#e5e8ec"
        chart.outline_line_color = None
    if not figures:
        return "", {}
    script, charts = components(figures, wrap_script=False)
    return f"<script>{script}</script>", charts


def library():
    """Bokeh's JavaScript, as script elements."""
    from bokeh.resources import Resources

    texts = Resources(mode="inline", components=["bokeh"]).js_raw
    ended = [text.replace("</script", "<\\/script") for text in texts]
    return "\n".join(f"<script>{text}</script>" for text in ended)
