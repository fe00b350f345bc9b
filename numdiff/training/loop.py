"""The loop of a training run: steps, and between them reports, checkpoints, sample grids, and a
clean stop. run.py prepares it.

    loop = TrainingLoop(options, trainer, previews, run_dir, output, evaluation)
    loop.run()
"""

import contextlib
import math
import os
import shlex
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

from .. import plots
from ..device.roof import peak_flops
from ..distributed.together import stop_signals
from ..errors import NumdiffError
from ..files import WriteError, check_held, set_aside
from ..progress import doing
from .checkpoint import (
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    load_meta,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from .forecast import Clock
from .precision import SCALES_LOSS
from .previews import draws, sampling_record
from .report import Reporter, read_records, read_stats
from .resume import schedule_of, split_of
from .run_extension import extensions_of
from .run_folder import BEST, sample_path

SIGPIPE = getattr(signal, "SIGPIPE", 13)  # Windows has no such signal
# steps after which the ranks compare their weights, which they also do at every checkpoint
COMPARE_EVERY = 1000


class Stopped(NumdiffError):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP, or its output has no reader) and has
    saved its state."""

    def __init__(self, message, signal_number):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class TrainingLoop:
    """The steps of a run, and what happens between them.

    Every rank runs the same loop, so that all ranks take part in each collective. Rank 0 alone has
    a reporter and writes files. evaluation: `evaluation.in_training.RunEvaluation`, or None.
    """

    def __init__(self, options, trainer, previews, run_dir, output, evaluation=None, clock=None):
        self.options, self.trainer, self.previews = options, trainer, previews
        self.clock = clock or Clock()
        self.evaluation = evaluation  # has `every` and `measure`; None: no measurements
        self.run_dir, self.output, self.communicator = run_dir, output, trainer.communicator
        self.extensions = extensions_of(options)
        self.resume_command = resume_command(options, run_dir)
        self.reporter = None  # of rank 0
        self.reports = []  # of the steps since the last line of the log
        self.first_checkpoint = None  # the future of the first checkpoint while it is in flight
        self.saved_step = None  # of the last checkpoint
        self.notes = set()  # that have been printed

    def run(self):
        """Train until the last step. Raises `Stopped` after a signal, once the state is saved."""
        with contextlib.ExitStack() as self.resources:
            self.resources.enter_context(quiet_overflows())
            self.request = self.resources.enter_context(stop_signals())
            self.communicator.first(self.open_reporter)
            self.communicator.first(self.set_aside_best)
            self.begin()
            self.clock.begin_steps()
            try:
                while not self.is_at_end:
                    count = self.communicator.first(self.clock.next_count) or math.inf
                    self.train_until(self.trainer.step + min(count, self.steps_until_next_event()))
                    self.announce_forecast()
                    self.handle_events()
            finally:
                self.clock.store()

    def begin(self):
        """Save the first checkpoint of a new run; draw the last pictures of a run that lacks them."""
        if self.communicator.first(lambda: not list_checkpoints(self.run_dir)):
            with self.paused():
                # a run that is killed at any moment can be resumed
                self.communicator.first(self.save_in_background, self.state())
        if self.communicator.rank > 0:  # rank 0 does this once the first checkpoint is written
            self.communicator.resumes_by(self.resume_command)
        if self.is_at_end:
            self.saved_step = self.trainer.step
            self.draw_samples()

    # Steps ------------------------------------------------------------------------------------

    @property
    def is_at_end(self):
        return self.trainer.step >= self.options.steps

    def is_due(self, every):
        """Whether an event of each `every` steps, and of the last step, happens now."""
        return self.is_at_end or bool(every and self.trainer.step % every == 0)

    def steps_until_next_event(self):
        more = self.evaluation.every if self.evaluation else 0
        return steps_until_next_event(self.trainer.step, self.options, self.communicator.size, more)

    def train_until(self, last):
        """Train until the step `last`, or until a stop is requested; report every `log_every`
        steps."""
        every, began, first = self.options.log_every, time.perf_counter(), self.trainer.step
        for part in self.trainer.run(last - first, every, self.requested_signal):
            self.reports += part
            step = self.reports[-1].step + 1
            # the line of a step that is evaluated has its distance
            if step % every == 0 and not (self.is_evaluated(step) or self.has_figures(step)):
                self.report()
        self.clock.steps(self.trainer.step - first, time.perf_counter() - began)

    def announce_forecast(self):
        """Once the first steps are measured: print the forecast, where it was not known before."""
        announce, clock = self.clock.announce, self.clock
        if announce and self.reporter and clock.next_count() is None:
            clock.announce = None
            line = announce(clock.measured, self.trainer.step, clock.elapsed)
            self.reporter.message(f"forecast  {line}")

    def handle_events(self):
        """Between two steps: stop, or save, compare and draw what is due."""
        options, number = self.options, self.communicator.largest(self.requested_signal())
        is_drawn, distance = self.is_due(options.sample_every), None
        if self.reports and not number and self.is_evaluated(self.trainer.step):
            distance, number = self.evaluate()
        figures = {}
        if self.reports and not number and self.has_figures(self.trainer.step):
            with self.paused("drawing samples"), self.clock.timed("draw"):
                figures = self.previews.figures(self.requested_signal)
        if self.reports and (
            number or distance is not None or self.is_due(options.checkpoint_every) or is_drawn
        ):
            # a resumed run starts from here, or the loss is drawn
            self.report(distance, figures)
            number = self.communicator.largest(self.requested_signal())
        if number:
            self.stop(number)
        is_best = distance is not None and self.communicator.first(self.is_best, distance)
        for extension in self.extensions:
            if extension.every() and self.is_due(extension.every()):
                self.store(extension)
        is_saved = self.is_due(options.checkpoint_every)
        if is_saved:
            self.save()
        if is_best:
            self.save_best()
        if not is_saved and self.communicator.size > 1 and self.is_due(COMPARE_EVERY):
            with self.paused():
                self.trainer.check_ranks()
        if is_drawn:
            self.draw_samples()

    def requested_signal(self):
        """The number of the signal that asks this rank to stop, or 0."""
        return self.request.number or 0

    def stop(self, number):
        """Save, then raise `Stopped`; number: of the signal."""
        self.save()
        why = ", as its output has no reader" if number == SIGPIPE else ""
        after = f"after step {self.trainer.step} of {self.options.steps}{why}; continue with"
        if self.is_at_end:
            after = f"after its last step{why}, before its pictures, which are drawn by"
        raise Stopped(f"stopped {after}: {self.resume_command}", number)

    # Reports ----------------------------------------------------------------------------------

    def open_reporter(self):
        peak = peak_flops(self.trainer.model.backend, self.options.precision)
        self.reporter = self.resources.enter_context(
            Reporter(
                self.run_dir,
                self.options.steps,
                self.options.batch,
                self.trainer.step,
                self.trainer.flops_per_step,
                peak and peak * self.communicator.size,
                output=self.output,
            )
        )
        for extension in self.extensions:
            extension.begin(self.run_dir, self.trainer.step, self.reporter.message)
            self.resources.callback(lambda each=extension: each.end(self.is_at_end))

    def paused(self, doing=""):
        """Context: its time does not count as time of the steps."""
        return self.reporter.pause(doing) if self.reporter else contextlib.nullcontext()

    def report(self, distance=None, figures=()):
        """Write a record of the steps since the last one. distance, figures {name: number}: what was
        measured after them."""
        reports, self.reports = self.reports, []
        self.communicator.first(self.write_report, reports, distance, figures)

    def write_report(self, reports, distance=None, figures=()):
        with self.hinting_at_resume():
            check_held(self.run_dir)
            if self.first_checkpoint and self.first_checkpoint.done():
                self.finish_first_checkpoint()
            newest = reports[-1]
            finite = (r for r in reversed(reports) if math.isfinite(r.gradient_norm))
            last = next(finite, newest)
            more = dict(figures)
            if self.trainer.precision in SCALES_LOSS:
                more |= {"loss_scale": newest.loss_scale, "skipped": newest.skipped}
            if distance is not None:
                more |= {"frechet": distance, **self.evaluation.record}
            losses = [r.loss for r in reports]
            record = self.reporter.report(
                newest.step + 1, losses, last.gradient_norm, last.learning_rate, **more
            )
            for extension in self.extensions:
                extension.report(record)
            if self.output.closed:
                self.request.number = self.request.number or SIGPIPE

    @contextlib.contextmanager
    def hinting_at_resume(self):
        """Context: if a file of the run cannot be written, which ends the run, the message names
        the command that continues it."""
        try:
            yield
        except WriteError as error:
            check_held(self.run_dir)
            newest = newest_checkpoint(self.run_dir)
            if newest is None:
                raise
            raise WriteError(
                f"{str(error).rstrip('.')}; then continue after step {checkpoint_step(newest)} with: "
                f"{self.resume_command}"
            ) from error

    # Checkpoints ------------------------------------------------------------------------------

    def state(self):
        """The trainer's state on rank 0; collective."""
        return self.communicator.build(self.trainer.state, False)

    def meta(self):
        return checkpoint_meta(self.trainer, self.options)

    def save(self):
        """Write a checkpoint, unless this step has one; collective."""
        if self.saved_step != self.trainer.step:
            with self.paused(), self.clock.timed("save"):
                self.trainer.check_ranks()
                self.communicator.first(self.save_state, self.state())
            self.saved_step = self.trainer.step

    def save_state(self, state):
        with self.hinting_at_resume():
            self.finish_first_checkpoint()
            with doing(f"saving step {self.trainer.step}"):
                # a damaged model is never saved: the earlier checkpoints stay the newest
                self.trainer.check_finite(state)
                self.write_checkpoint(self.trainer.step, state, self.meta())

    def save_in_background(self, state):
        """Write the first checkpoint concurrently with the first steps."""
        writer = ThreadPoolExecutor(1, thread_name_prefix="numdiff checkpoint")
        self.first_checkpoint = self.resources.enter_context(writer).submit(
            self.write_checkpoint, self.trainer.step, state, self.meta()
        )

    def finish_first_checkpoint(self):
        """Wait for the first checkpoint; an error of its thread is raised here."""
        first, self.first_checkpoint = self.first_checkpoint, None
        if first is not None:
            first.result()

    def write_checkpoint(self, step, state, meta):
        path = self.run_dir / checkpoint_name(step)
        save_checkpoint(path, state, meta)
        self.clock.checkpoint = path.stat().st_size
        self.communicator.resumes_by(self.resume_command)
        prune_checkpoints(self.run_dir, self.options.keep)

    def store(self, extension):
        """Write what an extension keeps of the averages; collective."""
        with (
            self.paused(),
            doing(f"storing the averages of step {self.trainer.step}"),
            self.clock.timed("store"),
        ):
            averages = self.communicator.build(self.trainer.averages)
            self.communicator.first(self.store_averages, extension, averages)

    def store_averages(self, extension, averages):
        with self.hinting_at_resume():
            extension.store(self.run_dir, self.trainer, averages, self.meta())

    # Evaluation -------------------------------------------------------------------------------

    def is_evaluated(self, step):
        """Whether samples are measured after a step."""
        found = self.evaluation
        return found is not None and (step == self.options.steps or step % found.every == 0)

    def has_figures(self, step):
        """Whether a grid is drawn after a step that gives numbers for the records."""
        o = self.options
        is_drawn = step == o.steps or o.sample_every and step % o.sample_every == 0
        return self.previews.measures and is_drawn and draws(o, self.trainer.model)

    def evaluate(self):
        """(distance, 0), or (None, number of a signal); collective."""
        step = self.trainer.step
        with (
            self.paused("evaluating samples"),
            doing(f"evaluating samples after step {step}"),
            self.clock.timed("evaluate"),
        ):
            return self.evaluation.measure(self.requested_signal)

    def is_best(self, distance):
        """Whether no distance that the run has measured in the same way is less; says what was
        measured."""
        records, *_ = read_records(self.run_dir)
        way = self.evaluation.record
        known = [
            r["frechet"]
            for r in records
            if isinstance(r.get("frechet"), int | float) and way.items() <= r.items()
        ]
        best = distance <= min(known, default=distance)
        step, word = self.trainer.step, ", the best so far" if best else ""
        self.reporter.message(f"evaluate  Fréchet distance {distance:.4g} after step {step}{word}")
        return best

    def save_best(self):
        """Write best.h5, or give this step's checkpoint that name, too; collective."""
        with self.paused(), self.clock.timed("best"):
            if not self.communicator.first(self.link_best):
                self.communicator.first(self.write_best, self.state())

    def link_best(self):
        """Whether best.h5 is now another name of this step's checkpoint, which takes no time; a file
        system without hard links, or a step without a checkpoint, has none."""
        if self.saved_step != self.trainer.step:
            return False
        link = self.run_dir / f"{BEST}.link"
        try:
            link.unlink(missing_ok=True)
            os.link(self.run_dir / checkpoint_name(self.trainer.step), link)
            os.replace(link, self.run_dir / BEST)
        except OSError:
            return False
        return True

    def write_best(self, state):
        with self.hinting_at_resume(), doing(f"saving step {self.trainer.step}, the best"):
            self.trainer.check_finite(state)
            save_checkpoint(self.run_dir / BEST, state, self.meta())

    def set_aside_best(self):
        """Set aside a best.h5 of a later step, as a run continues from before it."""
        path = self.run_dir / BEST
        if path.exists():
            try:
                later = load_meta(path).get("step", 0) > self.trainer.step
            except NumdiffError:  # damaged
                later = True
            if later:
                set_aside(path)

    # Pictures ---------------------------------------------------------------------------------

    def draw_samples(self):
        """Draw a grid of samples and the loss curve; collective."""
        if self.communicator.rank == 0:
            plots.import_ahead()
        step, images, number = self.trainer.step, None, 0
        with (
            self.paused("drawing samples"),
            doing(f"drawing samples after step {step}"),
            self.clock.timed("draw"),
        ):
            if draws(self.options, self.trainer.model):
                images, number = self.previews.draw(self.requested_signal)
            if number:
                self.stop(number)
            self.communicator.first(self.save_pictures, images)

    def save_pictures(self, images):
        with self.hinting_at_resume():
            if images is not None:
                path = sample_path(self.run_dir, self.trainer.step)
                self.previews.save(path, images, self.output)
                for extension in self.extensions:
                    extension.drawn(self.trainer.step, path)
            try:
                # last: it shows that all was written
                plots.loss_curve(self.run_dir / "loss.png", *read_stats(self.run_dir))
            except plots.NoPlotsError as error:  # no reason to end a run
                if str(error) not in self.notes:
                    self.output(f"note      loss.png is not drawn: {error}")
                    self.notes.add(str(error))


def steps_until_next_event(step, options, ranks=1, evaluate_every=0):
    """Steps until something must be saved, drawn, measured or compared."""
    intervals = (
        evaluate_every,
        options.checkpoint_every,
        options.sample_every,
        *(each.every() for each in extensions_of(options)),
        COMPARE_EVERY if ranks > 1 else 0,
    )
    return min([options.steps - step, *(every - step % every for every in intervals if every)])


def objective_meta(trainer):
    """What a checkpoint says about what was minimised."""
    if trainer.diffusion is None:
        return {"objective": trainer.objective.options}
    return {"diffusion": trainer.diffusion.options}


def checkpoint_meta(trainer, options):
    """What a checkpoint says about itself. "pictures": how samples are drawn, by the run and by
    `numdiff sample`."""
    model = trainer.model
    return {
        "model": model.kind,
        "model_options": model.options,
        **model.parameters.describe(),
        **objective_meta(trainer),
        "step": trainer.step,
        "classes": trainer.dataset.classes,
        "data": trainer.fingerprint,
        "seed": trainer.seed,
        "init": trainer.origin,
        "split": split_of(trainer),
        "schedule": schedule_of(options),
        **(sampling_record(options) if trainer.diffusion else {}),
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
