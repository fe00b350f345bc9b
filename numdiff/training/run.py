"""What `numdiff train` does: a run folder around a `Trainer`: reports, pictures, checkpoints, resume, a clean stop.

    runs/00000-unet-tiny/
        options.json                every setting of the run
        stats.jsonl                 one record a report: losses of every step, gradient norm, learning rate, speed
        loss.png                    the loss so far
        samples-00000400.png        images from the averaged weights
        checkpoint-00000400.h5      everything that a bitwise resume needs
"""
import contextlib
import pathlib
import signal
import warnings

from ..diffusion import sample
from ..errors import NumdiffError
from ..nn.module import same_index
from .build import build_dataset, build_model, build_trainer
from .checkpoint import (
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    set_aside_later,
)
from .report import Reporter, image_grid, loss_curve_png, read_stats, save_png
from .run_folder import create_run, find_resume, lock_run, sample_path

SAMPLE_SEED = 1  # of the first image of every grid, the same in all of them, so that one sees them grow
SAMPLE_BATCH = 16  # images sampled together


class Stopped(NumdiffError):
    """The run was asked to stop (Ctrl-C or SIGTERM) and has saved its state."""

    def __init__(self, message, signal_number):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def train(options, resume=None, dry_run=False, echo=print):
    """Train as `options` (a resolved `TrainOptions`) say; returns the run folder.

    resume: None for a new run; else "auto", a run folder, its number or a checkpoint file
    dry_run: only tell what would be done; echo: prints the lines before and after the training
    """
    state = None
    if resume is not None:
        run_dir, checkpoint = find_resume(resume, options.outdir, warn=echo)
        state, meta = load_checkpoint(checkpoint)
    dataset = build_dataset(options)
    model = build_model(options, dataset.channels, len(dataset.classes) if options.class_cond else None)
    trainer = build_trainer(options, model, dataset)
    for line in describe(options, dataset, trainer):
        echo(line)
    if dry_run:
        return None
    if state is None:
        run_dir = create_run(options)
        echo(f"run       {run_dir}")
    else:
        check_same_model(meta, model, checkpoint)
        trainer.load_state(state)
        echo(f"run       {run_dir}, resumed after step {trainer.step} of {options.steps}")
        if trainer.step >= options.steps:
            raise NumdiffError(f"{run_dir} has done its {trainer.step} steps; give more with --steps to go on.")
    with lock_run(run_dir):
        if state is not None:
            options.save(pathlib.Path(run_dir) / "options.json")
            set_aside_later(run_dir, trainer.step)
        try:
            _train(options, trainer, pathlib.Path(run_dir))
        finally:
            trainer.close()
            dataset.close()
    echo(f"done      {sample_path(run_dir, trainer.step) if options.sample_count else run_dir}")
    return run_dir


def describe(options, dataset, trainer):
    """The lines that a run begins with, and all that a dry run prints."""
    model, backend = trainer.model, trainer.model.backend
    count, height, width, channels = dataset.shape
    yield f"data      {dataset.path}: {count:,} images of {height}×{width}×{channels}"
    if options.classes:
        yield f"classes   {', '.join(options.classes)}"
    yield (f"model     {options.model}, preset {options.preset}: {model.parameters.count:,} parameters, "
           f"{options.model_channels} channels × {tuple(options.channel_mult)}")
    yield (f"diffusion {options.diffusion_steps} steps, {options.schedule} schedule, predicts {options.prediction}")
    yield (f"step      batch {options.batch} in {options.batch // (options.microbatch or options.batch)} part(s), "
           f"{trainer.flops_per_step / 1e12:.3g} TFLOP, {options.precision}; {options.steps:,} steps at learning rate "
           f"{options.learning_rate:g}")
    yield f"device    {backend.device_name if backend else 'CPU (NumPy)'}"


def check_same_model(meta, model, path):
    """Refuse a checkpoint of another model."""
    if not same_index(meta.get("index", []), model.parameters.index):
        raise NumdiffError(f"{path} is a checkpoint of another model; resume with the run's own model options.")


def checkpoint_meta(trainer):
    """What a checkpoint says about itself."""
    model = trainer.model
    return {"model": "unet", "model_options": model.options, "index": model.parameters.index,
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
    backend = trainer.model.backend
    with quiet_overflows(), stop_signals() as request, Reporter(
            run_dir, options.steps, options.batch, trainer.step, trainer.flops_per_step,
            backend.peak_float32_flops if backend else None) as reporter:

        def save():
            with reporter.pause():
                trainer.check_finite()  # a damaged model is never saved: the checkpoints before stay the newest
                save_checkpoint(run_dir / checkpoint_name(trainer.step), trainer.state(), checkpoint_meta(trainer))
                prune_checkpoints(run_dir, options.keep)

        def draw():
            with reporter.pause():
                loss_curve_png(run_dir / "loss.png", *read_stats(run_dir))
                if options.sample_count:
                    save_png(sample_path(run_dir, trainer.step), sample_grid(trainer, options))

        def due(every):
            return trainer.step == options.steps or (every and trainer.step % every == 0)

        if not list_checkpoints(run_dir):
            save()  # so that a run killed at any moment can be resumed
        while trainer.step < options.steps:
            reports = []
            steps = steps_until_next_event(trainer.step, options)
            for part in trainer.run(steps, stop=lambda: request.number is not None):
                reports += part
            last = reports[-1]
            reporter.report(trainer.step, [r.loss for r in reports], last.gradient_norm, last.learning_rate)
            if due(options.checkpoint_every) or request.number is not None:
                save()
            if request.number is not None and trainer.step < options.steps:
                raise Stopped(f"stopped after step {trainer.step} of {options.steps}; go on with: numdiff train "
                              f"{options.model} --resume {run_dir}", request.number)
            if due(options.sample_every):
                draw()


def steps_until_next_event(step, options):
    """Steps until something is to be reported, saved or drawn."""
    intervals = (options.log_every, options.checkpoint_every, options.sample_every)
    return min(options.steps - step, *(every - step % every for every in intervals if every))


def sample_grid(trainer, options):
    """A picture of images from the averaged weights."""
    with trainer.ema_weights() as model:
        images = sample(model, options.sample_count, options.sample_steps, options.sampler, seed=SAMPLE_SEED,
                        batch=SAMPLE_BATCH)
    columns = model.num_classes if model.num_classes and model.num_classes <= 12 else None  # a column a class
    return image_grid(images, columns, zoom=max(1, 128 // images.shape[1]) if images.shape[1] < 64 else 1)
