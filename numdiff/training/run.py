"""What `numdiff train` does: a run folder around a `Trainer`: reports, pictures, checkpoints, resume, a clean stop.

    runs/00000-unet-tiny/
        options.json                every setting of the run
        stats.jsonl                 one record a report: losses of every step, gradient norm, learning rate, speed
        loss.png                    the loss so far
        samples-00000400.png        images from the averaged weights
        checkpoint-00000400.h5      everything that a bitwise resume needs

Every rank runs all of this; what is written or printed, rank 0 writes and prints (distributed.py).
"""
import contextlib
import math
import pathlib
import signal
import warnings

import numpy as np

from .. import __version__
from ..device.roof import peak_flops
from ..diffusion import sample
from ..errors import NumdiffError, visibly
from ..nn.module import same_index
from .build import (
    build_dataset,
    build_model,
    build_trainer,
    describe_diffusion,
    describe_model,
    describe_precision,
    model_options,
)
from .checkpoint import (
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    set_aside_later,
)
from .distributed import connect
from .model_files import KINDS, check_model_meta, defaults_of
from .options import flag
from .report import Reporter, image_grid, loss_curve_png, read_stats, save_png
from .run_folder import create_run, find_resume, lock_run, sample_path

SAMPLE_SEED = 1  # of the first image of every grid, the same in all of them, so that one sees them grow
SAMPLE_BATCH = 16  # images sampled together
COMPARE_EVERY = 1000  # steps after which the ranks compare their weights, and at every checkpoint


class Stopped(NumdiffError):
    """The run was asked to stop (Ctrl-C or SIGTERM) and has saved its state."""

    def __init__(self, message, signal_number):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def train(options, resume=None, dry_run=False, echo=print):
    """Train as `options` (a resolved `TrainOptions`) say; returns the run folder. Under `mpiexec`, collective.

    resume: None for a new run; else "auto", a run folder, its number or a checkpoint file
    dry_run: only tell what would be done; echo: prints the lines before and after the training
    """
    echo = visibly(echo)
    communicator = connect(options.transport, options.device)
    with communicator.job():
        return _train_job(communicator, options, resume, dry_run, echo if communicator.rank == 0 else _silent)


def _silent(text):
    """What ranks above 0 say."""


def _train_job(communicator, options, resume, dry_run, echo):
    communicator.check_options({**{flag(k): v for k, v in options.to_json().items()}, "--resume": resume,
                                "the version of numdiff": __version__})
    state = None
    if resume is not None:
        run_dir, checkpoint = communicator.first(find_resume, resume, options.outdir, echo)
        state, meta = load_checkpoint_on_first(communicator, checkpoint)
    dataset = communicator.build(build_dataset, options)
    if state is not None:  # before a model is built of sizes that options.json alone knows
        check_same_options(meta, options, dataset, checkpoint)
    model = communicator.build(build_model, options, dataset.channels,
                               len(dataset.classes) if options.class_cond else None)
    trainer = build_trainer(options, model, dataset)
    for line in describe(options, dataset, trainer):
        echo(line)
    if dry_run:
        return None
    if state is None:
        run_dir = communicator.first(create_run, options)
        echo(f"run       {run_dir}")
    else:
        check_same_model(meta, model, checkpoint)
        trainer.load_state(state)
        echo(f"run       {run_dir}, resumed after step {trainer.step} of {options.steps}")
        if trainer.step >= options.steps:
            raise NumdiffError(f"{run_dir} has done its {trainer.step} steps; give more with --steps to go on.")
    with contextlib.ExitStack() as held:
        held.callback(dataset.close)
        held.callback(trainer.close)
        communicator.first(lambda: held.enter_context(lock_run(run_dir)) and None)
        if state is not None:
            communicator.first(prepare_resumed, options, run_dir, trainer.step)
        _train(options, trainer, pathlib.Path(run_dir))
    echo(f"done      {sample_path(run_dir, trainer.step) if draws(options, model) else run_dir}")
    return run_dir


def load_checkpoint_on_first(communicator, path):
    """(buffers, meta) of a checkpoint that rank 0 can read, on every rank."""
    loaded = {}

    def load():
        loaded["buffers"], meta = load_checkpoint(path)
        check_model_meta(path, meta)
        return meta

    meta = communicator.first(load)
    return communicator.broadcast_arrays(loaded.get("buffers")), meta


def prepare_resumed(options, run_dir, step):
    """Note the options that a resumed run goes on with, and put aside what it leaves behind."""
    options.save(pathlib.Path(run_dir) / "options.json")
    set_aside_later(run_dir, step)


def describe(options, dataset, trainer):
    """The lines that a run begins with, and all that a dry run prints."""
    model, backend, ranks = trainer.model, trainer.model.backend, trainer.communicator.size
    part = trainer.step_function
    count, height, width, channels = dataset.shape
    yield f"data      {dataset.path}: {count:,} images of {height}×{width}×{channels}"
    if options.classes:
        yield f"classes   {', '.join(options.classes)}"
    yield f"model     {describe_model(options, model)}"
    yield f"diffusion {describe_diffusion(trainer.diffusion.options)}"
    shared = f"{ranks} × {part.batch}" if ranks > 1 else f"{options.batch}"
    yield (f"step      batch {shared} in {part.batch // part.microbatch} part(s), "
           f"{trainer.flops_per_step / 1e12:.3g} TFLOP, {options.precision}; {options.steps:,} steps at learning rate "
           f"{options.learning_rate:g}")
    yield f"precision {describe_precision(options)}"
    yield f"device    {backend.device_name if backend else 'CPU (NumPy)'}"
    if ranks > 1:
        why = f" {trainer.exchange.why}" if trainer.exchange.why else ""
        yield f"ranks     {trainer.communicator.describe()}; gradients by {trainer.exchange.name}.{why}"


def check_same_options(meta, options, dataset, path):
    """Refuse to go on from a checkpoint of a model with other options than the run's."""
    kind = KINDS[options.model]
    own = model_options(options, dataset.channels, len(dataset.classes) if options.class_cond else None)
    own = {k: list(v) if isinstance(v, tuple) else v for k, v in own.items()}
    if meta["model"] != options.model or {**defaults_of(kind), **meta["model_options"]} != {**defaults_of(kind), **own}:
        raise NumdiffError(f"{path} is a checkpoint of another model; resume with the run's own model options and "
                           "data.")


def check_same_model(meta, model, path):
    """Refuse a checkpoint of another model."""
    if not same_index(meta.get("index", []), model.parameters.index):
        raise NumdiffError(f"{path} is a checkpoint of another model; resume with the run's own model options.")


def checkpoint_meta(trainer):
    """What a checkpoint says about itself."""
    model = trainer.model
    return {"model": model.kind, "model_options": model.options, "index": model.parameters.index,
            "diffusion": trainer.diffusion.options, "step": trainer.step, "classes": trainer.dataset.classes,
            "seed": trainer.seed}


@contextlib.contextmanager
def quiet_overflows():
    """Within the context NumPy does not warn of overflows: `NonFiniteError` says it better, in one sentence."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
        yield


@contextlib.contextmanager
def stop_signals():
    """Within the context, Ctrl-C and SIGTERM only set `.number` of what this yields; a second Ctrl-C interrupts."""
    class Request:
        number = None

    def ask(number, frame):
        if Request.number is not None:
            raise KeyboardInterrupt
        Request.number = number

    old = {}
    with contextlib.suppress(ValueError):  # signals belong to the main thread; elsewhere there is nothing to catch
        old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield Request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _train(options, trainer, run_dir):
    backend, communicator = trainer.model.backend, trainer.communicator
    peak = peak_flops(backend, options.precision)
    peak = peak and peak * communicator.size
    with quiet_overflows(), stop_signals() as request, contextlib.ExitStack() as held:
        reporters = []  # rank 0's
        communicator.first(lambda: reporters.append(held.enter_context(Reporter(
            run_dir, options.steps, options.batch, trainer.step, trainer.flops_per_step, peak))))

        def pause(doing=""):
            """Context: what is done inside does not count as time of the steps."""
            return reporters[0].pause(doing) if reporters else contextlib.nullcontext()

        def save():
            trainer.check_finite()  # a damaged model is never saved: the checkpoints before stay the newest
            save_checkpoint(run_dir / checkpoint_name(trainer.step), trainer.state(), checkpoint_meta(trainer))
            prune_checkpoints(run_dir, options.keep)

        def draw(images):
            loss_curve_png(run_dir / "loss.png", *read_stats(run_dir))
            if images is not None:
                save_png(sample_path(run_dir, trainer.step), sample_grid(trainer.model, images))

        def due(every):
            return trainer.step == options.steps or (every and trainer.step % every == 0)

        def report(reports):
            last = next((r for r in reversed(reports) if math.isfinite(r.gradient_norm)), reports[-1])
            more = {}
            if trainer.precision == "fp16":
                more = {"loss_scale": reports[-1].loss_scale, "skipped": reports[-1].skipped}
            reporters[0].report(reports[-1].step + 1, [r.loss for r in reports], last.gradient_norm,
                                last.learning_rate, **more)

        if communicator.first(lambda: not list_checkpoints(run_dir)):
            with pause():
                communicator.first(save)  # so that a run killed at any moment can be resumed
        stopped = 0
        while trainer.step < options.steps:
            reports = []
            steps = steps_until_next_event(trainer.step, options, communicator.size)
            for part in trainer.run(steps, options.log_every, lambda: request.number is not None):
                reports += part
                if (reports[-1].step + 1) % options.log_every == 0:
                    communicator.first(report, reports)
                    reports = []
            if reports:
                communicator.first(report, reports)
            stopped = communicator.largest(request.number or 0)
            if due(options.checkpoint_every) or stopped:
                with pause():
                    trainer.check_ranks()
                    communicator.first(save)
            elif communicator.size > 1 and due(COMPARE_EVERY):
                with pause():
                    trainer.check_ranks()
            if stopped and trainer.step < options.steps:
                raise Stopped(f"stopped after step {trainer.step} of {options.steps}; go on with: numdiff train "
                              f"{options.model} --resume {run_dir}", stopped)
            if due(options.sample_every):
                with pause("drawing samples"):
                    images = draw_samples(trainer, options) if draws(options, trainer.model) else None
                    communicator.first(draw, images)


def steps_until_next_event(step, options, ranks=1):
    """Steps until something is to be saved, drawn or compared."""
    intervals = (options.checkpoint_every, options.sample_every, COMPARE_EVERY if ranks > 1 else 0)
    return min([options.steps - step, *(every - step % every for every in intervals if every)])


def draws(options, model):
    """Whether the run makes pictures of samples: latents are none."""
    return options.sample_count and model.in_channels in (1, 3)


def draw_samples(trainer, options):
    """Images from the averaged weights, on every rank; each makes its part of them. Collective."""
    communicator, count = trainer.communicator, options.sample_count
    first, stop = (count * k // communicator.size for k in (communicator.rank, communicator.rank + 1))

    def make():
        with trainer.ema_weights() as model:
            if first == stop:
                return np.empty((0, model.image_size, model.image_size, model.in_channels), np.uint8)
            labels = None
            if model.num_classes is not None:  # round robin over all images, whichever rank makes them
                labels = np.arange(first, stop, dtype=np.int32) % model.num_classes
            return sample(model, stop - first, options.sample_steps, options.sampler, seed=SAMPLE_SEED + first,
                          y=labels, batch=SAMPLE_BATCH)

    return np.concatenate(communicator.everywhere(make))


def sample_grid(model, images):
    """A picture of images."""
    columns = model.num_classes if model.num_classes and model.num_classes <= 12 else None  # a column a class
    return image_grid(images, columns, zoom=max(1, 128 // images.shape[1]) if images.shape[1] < 64 else 1)
