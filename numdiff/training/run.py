"""What `numdiff train` does: a run folder around a `Trainer`: reports, pictures, checkpoints,
resume, a clean stop.

    runs/00000-unet-tiny/
        options.json                every setting of the run
        stats.jsonl                 one record a report: losses of every step, gradient norm, learning rate, speed
        loss.png                    the loss so far
        samples-00000400.png        images from the averaged weights
        best.h5                     the checkpoint of the least distance, with --evaluate-every
        checkpoint-00000400.h5      everything that a bitwise resume needs
        watchdog.log                why a job of several ranks was ended, if it was

Every rank runs all of this; only rank 0 writes and prints (distributed/communicator.py).
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable

from .. import __version__
from ..distributed.communicator import connect
from ..errors import NumdiffError, UsageError, visibly
from ..files import held_folder
from ..progress import doing
from ..settings import flag
from . import kinds
from .build import (
    build_model,
    build_trainer,
    count_parameters,
    describe_average,
    describe_frozen,
    describe_model,
    describe_objective,
    describe_precision,
    describe_preset,
    describe_recomputation,
    in_parts,
    model_options,
    open_data,
)
from .compiling import compiling
from .forecast import Clock, ForecastPlan
from .initial import check_dataset, forget, start_of
from .kinds.kind import imported
from .loop import SIGPIPE, Stopped, TrainingLoop, resume_command
from .options import TrainOptions, load_options
from .plan import plan_run
from .previews import draws
from .price import base_memory, foreseen_step
from .report import STATS, RunOutput, columns_of
from .resume import (
    check_resumed_data,
    check_same_model,
    check_same_options,
    check_same_training,
    check_split,
    load_checkpoint_on_first,
    of_resumed,
    prepare_resumed,
    say_new_rate,
    say_new_split,
    schedule_of,
    split_of,
    why_no_step,
)
from .run_folder import create_run, find_resume, lock_run, sample_path
from .trainer import optimizer_of

LARGE = 50_000_000  # parameters of a model whose building takes long enough to be said


def train(
    options: TrainOptions,
    resume: str | None = None,
    dry_run: bool = False,
    echo: Callable = print,
    new_data: bool = False,
    evaluation: Callable | None = None,
    began: float | None = None,
) -> pathlib.Path | None:
    """Train as `options` (a resolved `TrainOptions`) say; returns the run folder. Under `mpiexec`,
    collective.

    resume: None for a new run; else "auto", a run folder, its number or a checkpoint file
    dry_run: only say what would be done; echo: prints the lines before and after the training
    new_data: a resumed run may continue with data other than it has seen
    evaluation: makes what measures samples for `evaluate_every`, from the trainer and the options;
        the command line gives `numdiff.evaluation.in_training.RunEvaluation`
    began: when the command began, in seconds of `time.perf_counter`, for the forecast; None: now
    """
    echo, clock = visibly(echo), Clock(began=began)
    communicator = connect(options.transport, options.device, options.rank_timeout)
    with communicator.job(), contextlib.ExitStack() as held:
        return _train_job(
            communicator,
            options,
            resume,
            dry_run,
            RunOutput(echo if communicator.rank == 0 else _silent),
            new_data,
            lambda run_dir: communicator.first(held.enter_context, held_folder(run_dir)),
            evaluation,
            clock,
        )


def _silent(text):
    """What ranks above 0 print: nothing."""


def _train_job(communicator, options, resume, dry_run, echo, new_data, hold, evaluation, clock):
    """hold(run_dir): from now on nothing is written to another folder that is given this one's
    name."""
    communicator.check_options(
        {
            **{flag(k): v for k, v in options.to_json().items()},
            "--resume": resume,
            "--new-data": new_data,
            "the version of numdiff": __version__,
        }
    )
    state = None
    if resume is not None:
        check_split(options, communicator)
        run_dir, checkpoint = communicator.first(find_resume, resume, options.outdir, echo)
        hold(run_dir)
        communicator.resumes_by(resume_command(options, run_dir))
        with doing("reading the checkpoint"):
            state, meta = load_checkpoint_on_first(communicator, checkpoint)
    dataset = open_data(communicator, options)
    if state is not None:  # before a model is built with sizes that only options.json vouches for
        check_same_options(meta, options, dataset, checkpoint)
    elif options.init is not None:
        communicator.build(check_images, options, dataset, communicator.rank == 0)
    ahead = contextlib.nullcontext()
    if options.device == "cuda" and not dry_run:
        ahead = compiling(
            lambda card: plan_run(options, dataset, card, communicator), communicator, echo
        )
    channels = dataset.channels
    num_classes = len(dataset.classes) if options.class_cond else None
    sizes = model_options(options, channels, num_classes)
    parameters, _ = count_parameters(options.model, sizes)
    if parameters > LARGE:
        echo(f"build     {parameters:,} parameters, their moments and averages")
    base = base_memory()
    with ahead:
        model = communicator.build(build_model, options, channels, num_classes)
    trainer = build_trainer(
        options if state is None else of_resumed(options, communicator), model, dataset
    )
    trainer.compiles_ahead = False
    if state is not None:
        trainer.origin = meta.get("init")
    for line in describe(options, dataset, trainer):
        echo(line)
    previews = imported(kinds.get(options.model).previews)(trainer, options)
    communicator.build(previews.check)
    evaluation = communicator.build(make_evaluation, evaluation, trainer, options)
    step = 0 if state is None else meta["step"]
    if communicator.rank == 0:
        flops, backend = trainer.flops_per_step, trainer.model.backend
        ranks = communicator.size
        foresee = functools.partial(foreseen_step, options, sizes, backend, base, ranks)
        plan = ForecastPlan(options, sizes, flops, parameters, backend, foresee, ranks)
        clock.measure(plan.key, backend)
        line, measured = plan.forecast(step, None if dry_run else clock.elapsed)
        if not measured:
            clock.announce = plan.after_first_steps
        if dry_run or measured or not plan.is_measured_soon(step):
            echo(f"forecast  {line}")
    if dry_run:
        return None
    if communicator.first(lambda: echo.closed):
        raise Stopped("stopped before the first step, as its output has no reader.", SIGPIPE)
    if state is None:
        run_dir = communicator.first(create_run, options)
        hold(run_dir)
        echo(f"run       {run_dir}")
    else:
        for line in resume_trainer(trainer, options, run_dir, checkpoint, meta, state, new_data):
            echo(line)
    with contextlib.ExitStack() as held:
        held.callback(dataset.close)
        held.callback(trainer.close)
        communicator.first(lambda: held.enter_context(lock_run(run_dir)) and None)
        if state is not None:
            communicator.first(prepare_resumed, options, run_dir, trainer.step)
        communicator.log_to(pathlib.Path(run_dir, "watchdog.log").absolute())
        TrainingLoop(
            options, trainer, previews, pathlib.Path(run_dir), echo, evaluation, clock
        ).run()
    pictures = draws(options, model)
    if pictures and columns_of(model) == len(dataset.classes) > 1:
        echo(f"columns   {', '.join(dataset.classes)}")
    echo(
        f"done      {sample_path(run_dir, trainer.step) if pictures else run_dir}{previews.summary()}"
    )
    return run_dir


def make_evaluation(evaluation, trainer, options):
    """What measures samples on the way; None without --evaluate-every."""
    if not getattr(options, "evaluate_every", 0):  # which not every kind of model has
        return None
    if evaluation is None:
        raise UsageError(
            "evaluate_every needs something that measures: give numdiff.evaluation.in_training.RunEvaluation "
            "as `evaluation`, or leave it out."
        )
    return evaluation(trainer, options)


def resume_trainer(trainer, options, run_dir, checkpoint, meta, state, new_data):
    """Check a checkpoint against the run, and load it; yields the lines to print. Collective.

    meta, state: of the checkpoint. Raises a `NumdiffError` where nothing remains to be done.
    """
    communicator, model = trainer.communicator, trainer.model
    check_same_model(meta, model, checkpoint)
    check_same_training(meta, trainer, checkpoint)
    if warning := check_resumed_data(meta, trainer, checkpoint, new_data):
        yield f"data      {warning}"
    trainer.load_state(state)
    step, steps = trainer.step, options.steps
    if step >= steps:
        lacks = step == steps and communicator.first(lacks_pictures, options, model, run_dir)
        if not lacks:
            raise NumdiffError(communicator.first(why_no_step, run_dir, step, steps))
    if line := say_new_split(meta.get("split"), split_of(trainer)):
        yield f"ranks     {line}"
    then = meta.get("schedule") or schedule_of(communicator.first(load_options, run_dir))
    if step < steps and (line := say_new_rate(then, options, step, checkpoint)):
        yield f"rate      {line}"
    for_pictures = "" if step < steps else ", for its pictures"
    yield f"run       {run_dir}, resumed after step {step} of {steps}{for_pictures}"


def check_images(options, dataset, leads):
    """Raise a `UsageError` for images that the model of `--init` does not take; leads: this rank
    will read its weights.
    """
    start = start_of(options)
    check_dataset(start, dataset)
    if not leads:
        forget()


def describe(options, dataset, trainer):
    """The lines that a run begins with, which are all that a dry run prints."""
    model, backend, ranks = trainer.model, trainer.model.backend, trainer.communicator.size
    part = trainer.step_function
    count, height, width, channels = dataset.shape
    yield f"data      {dataset.path}: {count:,} images of {height}×{width}×{channels}"
    if options.classes:
        yield f"classes   {', '.join(options.classes)}"
    yield f"model     {describe_model(options, model.options)}"
    if trainer.origin:
        for line in trainer.origin["lines"]:
            yield f"init      {line}"
    if options.freeze:
        shapes = {name: parameter.shape for name, parameter in model.parameters.parameters.items()}
        yield f"frozen    {describe_frozen(options.freeze, shapes)}"
    if left := describe_preset(options):
        yield f"preset    {left}"
    yield describe_objective(options)
    shared = f"{ranks} × {part.batch}" if ranks > 1 else f"{options.batch}"
    yield (
        f"step      batch {shared}{in_parts(part.batch, part.microbatch)}, "
        f"{trainer.flops_per_step / 1e12:.3g} TFLOP, {options.precision}; {options.steps:,} steps at learning rate "
        f"{options.learning_rate:g}"
    )
    if found := optimizer_of(options.optimizer):
        yield f"optimizer {found.describe(options, model)}"
    parameters = count_parameters(options.model, model.options)[0]
    yield f"average   {describe_average(options, parameters)}"
    yield f"precision {describe_precision(options)}"
    if options.recompute != "no":
        yield f"recompute {describe_recomputation(options, model.options)}"
    yield f"device    {backend.device_name if backend else 'CPU (NumPy)'}"
    if ranks == 1 and options.shard_update == "yes":
        yield "ranks     1: the update is not shared"
    if ranks > 1:
        why = f" {trainer.exchange.why}" if trainer.exchange.why else ""
        yield (
            f"ranks     {trainer.communicator.describe()}; gradients by {trainer.exchange.name}.{why}"
            f"{shared_out(trainer)}"
        )
        if remark := trainer.communicator.remark():
            yield f"ranks     {remark}"


def shared_out(trainer):
    """How much of the optimiser's state a rank holds, where ranks share the update."""
    if not trainer.shares_update:
        return ""
    own, whole = (
        sum(nbytes) / 1e6 for nbytes in zip(*trainer.optimizer.state_bytes().values(), strict=True)
    )
    return f" Each updates its part: rank 0 holds {own:,.3g} of {whole:,.3g} MB of moments and averages."


def lacks_pictures(options, model, run_dir):
    """Whether a run that did its last step was killed before its pictures were drawn; the loss
    curve comes last."""
    stats, curve = (pathlib.Path(run_dir) / name for name in (STATS, "loss.png"))
    if draws(options, model) and not os.path.exists(sample_path(run_dir, options.steps)):
        return True
    return not curve.exists() or (
        stats.exists() and curve.stat().st_mtime_ns < stats.stat().st_mtime_ns
    )
