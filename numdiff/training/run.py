"""What `numdiff train` does: a run folder around a `Trainer`: reports, pictures, checkpoints,
resume, a clean stop.

    runs/00000-unet-tiny/
        options.json                every setting of the run
        stats.jsonl                 one record a report: losses of every step, gradient norm, learning rate, speed
        loss.png                    the loss so far
        samples-00000400.png        images from the averaged weights
        checkpoint-00000400.h5      everything that a bitwise resume needs
        watchdog.log                why a job of several ranks was ended, if it was

Every rank runs all of this; only rank 0 writes and prints (distributed/communicator.py).
"""

import contextlib
import math
import os
import pathlib
import shlex
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .. import __version__, plots
from ..device.roof import peak_flops
from ..distributed.communicator import connect
from ..distributed.together import stop_signals
from ..errors import NumdiffError, visibly
from ..files import WriteError, check_held, held_folder
from ..progress import doing
from ..settings import flag
from .build import (
    build_model,
    build_trainer,
    count_parameters,
    describe_average,
    describe_diffusion,
    describe_frozen,
    describe_model,
    describe_muon,
    describe_precision,
    describe_preset,
    describe_recomputation,
    in_parts,
    model_options,
    open_data,
)
from .checkpoint import (
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from .compiling import compiling
from .initial import check_dataset, forget, start_of
from .options import TrainOptions, load_options
from .plan import plan_run
from .precision import SCALES_LOSS
from .previews import Previews, draws, sampling_record
from .report import STATS, Output, Reporter, columns_of, image_grid, read_stats, save_png
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
from .run_extension import extensions_of
from .run_folder import create_run, find_resume, lock_run, sample_path

SIGPIPE = getattr(signal, "SIGPIPE", 13)  # Windows has no such signal
LARGE = 50_000_000  # parameters of a model whose building takes long enough to be said
# steps after which the ranks compare their weights, which they also do at every checkpoint
COMPARE_EVERY = 1000


class Stopped(NumdiffError):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP, or its output has no reader) and has
    saved its state."""

    def __init__(self, message, signal_number):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def train(
    options: TrainOptions,
    resume: str | None = None,
    dry_run: bool = False,
    echo: Callable = print,
    new_data: bool = False,
) -> pathlib.Path | None:
    """Train as `options` (a resolved `TrainOptions`) say; returns the run folder. Under `mpiexec`,
    collective.

    resume: None for a new run; else "auto", a run folder, its number or a checkpoint file
    dry_run: only say what would be done; echo: prints the lines before and after the training
    new_data: a resumed run may continue with data other than it has seen
    """
    echo = visibly(echo)
    communicator = connect(options.transport, options.device, options.rank_timeout)
    with communicator.job(), contextlib.ExitStack() as held:
        return _train_job(
            communicator,
            options,
            resume,
            dry_run,
            Output(echo if communicator.rank == 0 else _silent),
            new_data,
            lambda run_dir: communicator.first(held.enter_context, held_folder(run_dir)),
        )


def _silent(text):
    """What ranks above 0 print: nothing."""


def _train_job(communicator, options, resume, dry_run, echo, new_data, hold):
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
    parameters = count_parameters(
        options.model,
        model_options(
            options, dataset.channels, len(dataset.classes) if options.class_cond else None
        ),
    )[0]
    if parameters > LARGE:
        echo(f"build     {parameters:,} parameters, their moments and averages")
    with ahead:
        model = communicator.build(
            build_model,
            options,
            dataset.channels,
            len(dataset.classes) if options.class_cond else None,
        )
    trainer = build_trainer(
        options if state is None else of_resumed(options, communicator), model, dataset
    )
    trainer.compiles_ahead = False
    if state is not None:
        trainer.origin = meta.get("init")
    for line in describe(options, dataset, trainer):
        echo(line)
    previews = Previews(trainer, options)
    communicator.build(previews.check)
    if dry_run:
        return None
    if communicator.first(lambda: echo.closed):
        raise Stopped("stopped before the first step, as its output has no reader.", SIGPIPE)
    if state is None:
        run_dir = communicator.first(create_run, options)
        hold(run_dir)
        echo(f"run       {run_dir}")
    else:
        check_same_model(meta, model, checkpoint)
        check_same_training(meta, trainer, checkpoint)
        if warning := check_resumed_data(meta, trainer, checkpoint, new_data):
            echo(f"data      {warning}")
        trainer.load_state(state)
        unfinished = trainer.step < options.steps
        if not unfinished and not (
            trainer.step == options.steps
            and communicator.first(lacks_pictures, options, model, run_dir)
        ):
            raise NumdiffError(
                communicator.first(why_no_step, run_dir, trainer.step, options.steps)
            )
        if line := say_new_split(meta.get("split"), split_of(trainer)):
            echo(f"ranks     {line}")
        then = meta.get("schedule") or schedule_of(communicator.first(load_options, run_dir))
        if unfinished and (line := say_new_rate(then, options, trainer.step, checkpoint)):
            echo(f"rate      {line}")
        echo(
            f"run       {run_dir}, resumed after step {trainer.step} of {options.steps}"
            f"{'' if unfinished else ', for its pictures'}"
        )
    with contextlib.ExitStack() as held:
        held.callback(dataset.close)
        held.callback(trainer.close)
        communicator.first(lambda: held.enter_context(lock_run(run_dir)) and None)
        if state is not None:
            communicator.first(prepare_resumed, options, run_dir, trainer.step)
        communicator.log_to(pathlib.Path(run_dir, "watchdog.log").absolute())
        _train(options, trainer, previews, pathlib.Path(run_dir), echo)
    pictures = draws(options, model)
    if pictures and columns_of(model) == len(dataset.classes) > 1:
        echo(f"columns   {', '.join(dataset.classes)}")
    echo(f"done      {sample_path(run_dir, trainer.step) if pictures else run_dir}")
    return run_dir


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
    yield f"diffusion {describe_diffusion(trainer.diffusion.options, options.learn_sigma)}"
    shared = f"{ranks} × {part.batch}" if ranks > 1 else f"{options.batch}"
    yield (
        f"step      batch {shared}{in_parts(part.batch, part.microbatch)}, "
        f"{trainer.flops_per_step / 1e12:.3g} TFLOP, {options.precision}; {options.steps:,} steps at learning rate "
        f"{options.learning_rate:g}"
    )
    if options.optimizer == "muon":
        yield f"optimizer {describe_muon(options, model)}"
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


def checkpoint_meta(trainer, options):
    """What a checkpoint says about itself. "pictures": how samples are drawn, by the run and by
    `numdiff sample`."""
    model = trainer.model
    return {
        "model": model.kind,
        "model_options": model.options,
        "index": model.parameters.index,
        "diffusion": trainer.diffusion.options,
        "step": trainer.step,
        "classes": trainer.dataset.classes,
        "data": trainer.fingerprint,
        "seed": trainer.seed,
        "init": trainer.origin,
        "split": split_of(trainer),
        "schedule": schedule_of(options),
        **sampling_record(options),
        **{key: value for each in extensions_of(options) for key, value in each.meta().items()},
    }


@contextlib.contextmanager
def quiet_overflows():
    """Context: NumPy does not warn of overflows, as `NonFiniteError` reports them better, in one
    sentence."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        yield


def resume_command(options, run_dir):
    """The command that continues with a run."""
    return f"numdiff train {options.model} --resume {shlex.quote(str(run_dir))}"


@contextlib.contextmanager
def saying_how_to_go_on(options, run_dir):
    """Context, or decorator: where a file of the run cannot be written, which ends it, the message
    says so."""
    try:
        yield
    except WriteError as error:
        check_held(run_dir)
        newest = newest_checkpoint(run_dir)
        if newest is None:
            raise
        raise WriteError(
            f"{str(error).rstrip('.')}; then continue after step {checkpoint_step(newest)} with: "
            f"{resume_command(options, run_dir)}"
        ) from error


def _train(options, trainer, previews, run_dir, output):
    backend, communicator = trainer.model.backend, trainer.communicator
    peak = peak_flops(backend, options.precision)
    peak = peak and peak * communicator.size
    with quiet_overflows(), stop_signals() as request, contextlib.ExitStack() as held:
        # rank 0's; written: the first checkpoint, while it is in flight
        reporters, written, said = [], [], set()
        communicator.first(
            lambda: reporters.append(
                held.enter_context(
                    Reporter(
                        run_dir,
                        options.steps,
                        options.batch,
                        trainer.step,
                        trainer.flops_per_step,
                        peak,
                        output=output,
                    )
                )
            )
        )

        def pause(doing=""):
            """Context: what is done inside does not count as time of the steps."""
            return reporters[0].pause(doing) if reporters else contextlib.nullcontext()

        saved = None  # the step of the last checkpoint

        @saying_how_to_go_on(options, run_dir)
        def save(state):
            settle()
            with doing(f"saving step {trainer.step}"):
                # a damaged model is never saved: the earlier checkpoints stay the newest
                trainer.check_finite(state)
                write(trainer.step, state, checkpoint_meta(trainer, options))

        def write(step, state, meta):
            save_checkpoint(run_dir / checkpoint_name(step), state, meta)
            communicator.resumes_by(resume_command(options, run_dir))
            prune_checkpoints(run_dir, options.keep)

        def state():
            """The trainer's, on rank 0."""
            return communicator.build(trainer.state, False)

        def save_first(state):
            """Runs concurrently with the first steps, which do not wait for the disk."""
            writer = held.enter_context(
                ThreadPoolExecutor(1, thread_name_prefix="numdiff checkpoint")
            )
            written.append(
                writer.submit(write, trainer.step, state, checkpoint_meta(trainer, options))
            )

        def settle():
            """Wait for the first checkpoint; what it raised is raised here."""
            while written:
                written.pop().result()

        @saying_how_to_go_on(options, run_dir)
        def draw(images):
            if images is not None:
                save_png(sample_path(run_dir, trainer.step), sample_grid(trainer.model, images))
            try:
                # last: it shows that all was written
                plots.loss_curve(run_dir / "loss.png", *read_stats(run_dir))
            except plots.NoPlotsError as error:  # no reason to end a run
                if str(error) not in said:
                    output(f"note      loss.png is not drawn: {error}")
                    said.add(str(error))

        def due(every):
            return trainer.step == options.steps or (every and trainer.step % every == 0)

        @saying_how_to_go_on(options, run_dir)
        def report(reports):
            check_held(run_dir)
            if written and written[0].done():
                settle()
            last = next(
                (r for r in reversed(reports) if math.isfinite(r.gradient_norm)), reports[-1]
            )
            more = {}
            if trainer.precision in SCALES_LOSS:
                more = {"loss_scale": reports[-1].loss_scale, "skipped": reports[-1].skipped}
            reporters[0].report(
                reports[-1].step + 1,
                [r.loss for r in reports],
                last.gradient_norm,
                last.learning_rate,
                **more,
            )
            if output.closed:
                request.number = request.number or SIGPIPE

        def asked():
            return request.number or 0

        def save_all():
            nonlocal saved
            if saved != trainer.step:
                with pause():
                    trainer.check_ranks()
                    communicator.first(save, state())
                saved = trainer.step

        def stop(number):
            save_all()
            why = ", as its output has no reader" if number == SIGPIPE else ""
            after = f"after step {trainer.step} of {options.steps}{why}; continue with"
            if trainer.step == options.steps:
                after = f"after its last step{why}, before its pictures, which are drawn by"
            raise Stopped(f"stopped {after}: {resume_command(options, run_dir)}", number)

        def draw_all():
            if communicator.rank == 0:
                plots.import_ahead()
            with pause("drawing samples"), doing(f"drawing samples after step {trainer.step}"):
                images, number = (
                    previews.draw(asked) if draws(options, trainer.model) else (None, 0)
                )
                if number:
                    stop(number)
                communicator.first(draw, images)

        if communicator.first(lambda: not list_checkpoints(run_dir)):
            with pause():
                # so that a run killed at any moment can be resumed
                communicator.first(save_first, state())
        if communicator.rank > 0:  # rank 0 says so once the first checkpoint is written
            communicator.resumes_by(resume_command(options, run_dir))
        if trainer.step == options.steps:  # it was killed before its pictures
            saved = trainer.step
            draw_all()
        reports, extensions = [], extensions_of(options)
        while trainer.step < options.steps:
            steps = steps_until_next_event(trainer.step, options, communicator.size)
            for part in trainer.run(steps, options.log_every, asked):
                reports += part
                if (reports[-1].step + 1) % options.log_every == 0:
                    communicator.first(report, reports)
                    reports = []
            number = communicator.largest(asked())
            if reports and (number or due(options.checkpoint_every) or due(options.sample_every)):
                # a resumed run starts from here, or the loss is drawn
                communicator.first(report, reports)
                reports, number = [], communicator.largest(asked())
            if number:
                stop(number)
            for extension in extensions:
                if extension.every() and due(extension.every()):
                    with pause(), doing(f"storing the averages of step {trainer.step}"):
                        averages = communicator.build(trainer.averages)
                        communicator.first(
                            saying_how_to_go_on(options, run_dir)(extension.store),
                            run_dir,
                            trainer,
                            averages,
                            checkpoint_meta(trainer, options),
                        )
            if due(options.checkpoint_every):
                save_all()
            elif communicator.size > 1 and due(COMPARE_EVERY):
                with pause():
                    trainer.check_ranks()
            if due(options.sample_every):
                draw_all()


def steps_until_next_event(step, options, ranks=1):
    """Steps until something must be saved, drawn or compared."""
    intervals = (
        options.checkpoint_every,
        options.sample_every,
        *(each.every() for each in extensions_of(options)),
        COMPARE_EVERY if ranks > 1 else 0,
    )
    return min([options.steps - step, *(every - step % every for every in intervals if every)])


def lacks_pictures(options, model, run_dir):
    """Whether a run that did its last step was killed before its pictures were drawn; the loss
    curve comes last."""
    stats, curve = (pathlib.Path(run_dir) / name for name in (STATS, "loss.png"))
    if draws(options, model) and not os.path.exists(sample_path(run_dir, options.steps)):
        return True
    return not curve.exists() or (
        stats.exists() and curve.stat().st_mtime_ns < stats.stat().st_mtime_ns
    )


def sample_grid(model, images):
    """A picture of images."""
    return image_grid(
        images,
        columns_of(model),
        zoom=max(1, 128 // images.shape[1]) if images.shape[1] < 64 else 1,
    )
