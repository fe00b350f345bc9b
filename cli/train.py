"""`numdiff train`: parse, resolve, train. The options come from the table of settings, a command a
kind of model."""

import os
import time

import click

from numdiff.settings import flag

from .output import echo
from .settings import KindGroup, SettingOption, classes_given, kind_command, text, text_of_default

OPTIONS = (
    click.option(
        "--resume",
        metavar="RUN",
        is_flag=False,
        flag_value="auto",
        cls=SettingOption,
        heading="Run",
        help="Continue a run: its folder, its number, or one of its checkpoints; without a value (or with "
        "`auto`), the newest run in --outdir that has a valid checkpoint.",
    ),
    click.option(
        "--new-data",
        is_flag=True,
        cls=SettingOption,
        heading="Run",
        help="With --resume: continue on other data than the run was trained on; the classes must be the "
        "same, in the same order.",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        cls=SettingOption,
        heading="Run",
        help="Print the settings, the parameter count, the TFLOP of a step and a forecast of time, memory and disk, "
        "and exit.",
    ),
)


@click.group(
    cls=KindGroup,
    every=True,
    make=lambda kind: kind_command(kind, "train", options=OPTIONS, run=run_training),
)
def train():
    """Train a model on a dataset."""


def run_training(model, resume, dry_run, new_data, **given):
    """Resolve the settings, and train. What takes a second to import comes last, so that errors
    come at once."""
    from numdiff.errors import UsageError
    from numdiff.training.options import load_options, resolve, resolve_resumed
    from numdiff.training.run_folder import check_outdir, find_resume

    given = classes_given(model, given)
    if new_data and not resume:
        raise UsageError("--new-data needs --resume; add it, or leave --new-data out.")
    given = {name: value for name, value in given.items() if value is not None}
    for name in (name for name in ("init", "init_weights") if resume and name in given):
        raise UsageError(
            f"{flag(name)} and --resume exclude each other: --init starts a new run from given weights, "
            "--resume continues one; give one of them."
        )
    if resume:
        asked, outdir = resume, given.pop("outdir", None)
        run_dir, resume = find_resume(resume, outdir or "runs", lambda text: echo(text, err=True))
        if outdir is not None:
            check_outdir(asked, run_dir, outdir)
        where = asked if os.path.exists(asked) else run_dir
        options = resolve_resumed(load_options(run_dir), {"model": model, **given}, where)
    else:
        options = resolve({"model": model, **given})
    if dry_run:
        from numdiff.training import kinds

        for name, line in kinds.get(model).table.items():
            echo(f"{name:<24} {text_of_setting(line, options)}")
        from numdiff.training import price
        from numdiff.training.build import describe_without_training
        from numdiff.training.rehearsal import rehearse

        for line in describe_without_training(options, price, rehearse):
            echo(line)
        return
    from numdiff.training import train as run
    from numdiff.training.forecast import process_age

    evaluation = None
    if getattr(options, "evaluate_every", 0):
        from numdiff.evaluation.in_training import RunEvaluation as evaluation
    run(
        options,
        resume=resume,
        new_data=new_data,
        echo=echo,
        evaluation=evaluation,
        began=time.perf_counter() - process_age(),
    )


def text_of_setting(line, options):
    """The value of a setting in a dry run."""
    value = getattr(options, line.name)
    if value is not None:
        return text(value)
    room = options.num_classes if line.name == "classes" and options.class_cond else None
    return text_of_default(line) + (f" of the dataset, in a model for {room:,}" if room else "")
