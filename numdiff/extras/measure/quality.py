"""`numdiff bench quality`: how many seconds of training a quality takes."""

import click

from numdiff.sizes import in_pixels
from numdiff.training.options import settings_of
from numdiff_cli.output import echo
from numdiff_cli.settings import KindGroup, ListOf, classes_given, kind_command

from .shared import check_results, measured_by, model_name

OF_RUNS = (
    "checkpoint_every",
    "keep",
    "ema_std",
    "ema_snapshots",
    "sample_every",
    "sample_count",
    "evaluate_every",
    "evaluate_count",
    "evaluate_features",
    "log_every",
)
QUALITY = measured_by(
    (
        "--target",
        {
            "metavar": "DISTANCE,…",
            "type": ListOf(float),
            "help": "Spatial Fréchet distances to reach; the run "
            "ends with the smallest.  [default: 0.3,0.15,0.08]",
        },
    ),
    (
        "--every",
        {
            "metavar": "STEPS",
            "type": click.IntRange(1, 10**9),
            "help": "Steps between two measurements.  [default: a sixteenth of --steps]",
        },
    ),
    (
        "--samples",
        {
            "metavar": "IMAGES",
            "type": click.IntRange(4, 1_000_000),
            "help": "Images of a measurement.  [default: as many as the data has]",
        },
    ),
    (
        "--sample-batch",
        {
            "metavar": "IMAGES",
            "type": click.IntRange(1),
            "default": 128,
            "show_default": True,
            "help": "How many of them are made at a time.",
        },
    ),
    (
        "--json",
        {
            "metavar": "FILE.json",
            "type": click.Path(dir_okay=False),
            "help": "Write what was measured, after each measurement.",
        },
    ),
    (
        "--png",
        {
            "metavar": "FILE.png",
            "type": click.Path(dir_okay=False),
            "help": "Draw the distances over the seconds of training.",
        },
    ),
    (
        "--grid",
        {
            "metavar": "FILE.png",
            "type": click.Path(dir_okay=False),
            "help": "Write the first samples of each "
            "measurement, a column for each class, over those of the measurement before.",
        },
    ),
)


def quality_command(kind):
    names = [name for name in settings_of(kind.name) if name not in OF_RUNS]
    return kind_command(kind, "bench quality", *names, options=QUALITY, run=measure_quality)


@click.group(cls=KindGroup, make=quality_command)
def quality():
    """Train, and measure how many seconds it takes to a quality: LEADERBOARD.md has the rules."""


def measure_quality(model, target, every, samples, sample_batch, json, png, grid, **given):
    import shlex
    import sys

    from numdiff.data.dataset import default_path
    from numdiff.distributed.communicator import current
    from numdiff.files import write_json
    from numdiff.training.options import resolve
    from numdiff.training.picture_record import lines_of
    from numdiff.training.report import save_png

    from .time_to_quality import (
        SAMPLE_STEPS,
        SAMPLER,
        TARGETS,
        bench_quality,
        check_targets,
        conclusion,
        draw,
        leaderboard_row,
        revision,
        rules_broken,
    )

    if given.get("data") is None:
        given["data"] = default_path()  # named: all its classes, of which the presets choose a few
    given = {
        name: value for name, value in classes_given(model, given).items() if value is not None
    }
    targets = check_targets(TARGETS if target is None else target)
    check_results(png, ("--grid", "the picture", grid), ("--json", "what was measured", json))
    options = resolve({"model": model, **given})
    echo(
        f"model        {model_name(options)}, {in_pixels(options.image_size)}, batch {options.batch}, "
        f"{options.precision}, {options.steps:,} steps"
    )
    command = ["numdiff", *sys.argv[1:]]
    sampling = given.get("sampler", SAMPLER), given.get("sample_steps", SAMPLE_STEPS)
    broken = rules_broken(options, samples, *sampling, given.get("cfg_scale"))
    if broken:  # said before the training, which may take long
        echo(f"row          none of LEADERBOARD.md, for {', '.join(broken)}")
    record = bench_quality(
        options,
        targets,
        every,
        samples,
        *sampling,
        sample_batch,
        given.get("cfg_scale"),
        echo,
        lambda so_far: write_json(json, so_far, "what was measured") if json else None,
        lambda picture, made: (
            save_png(grid, picture, {**made, "command": command}) if grid else None
        ),
    )
    for text in (*conclusion(record), *lines_of(record["made"])):
        echo(text)
    if png:
        if current().rank == 0:
            draw(png, record, f"{model_name(options)}, {record['card']}", command)
        echo(f"curve        {png}")
    if grid:
        echo(f"samples      {grid}")
    if not broken:
        reached = any("seconds" in row for row in record["targets"])
        echo(
            f"row          {leaderboard_row(record, revision(), shlex.join(command))}"
            if reached
            else "row          none of LEADERBOARD.md: no target was reached"
        )
