"""What `numdiff schedule` does: few steps, learned from a trained model, in a file that `numdiff
sample` takes."""

import math
import time

from ... import __version__
from ...diffusion import Sampling
from ...distributed.communicator import connect
from ...errors import UsageError
from ...files import write_json
from ...option_names import as_options
from ...outputs import check_ending, check_output
from ...progress_bar import progress_bar
from ...sizes import image_shape
from ...training.model_files import files_of
from ...training.options import resolve_device
from ...training.sampling import find_model, load_by_options
from .fit import CHOICES, Trajectory

MAX_BYTES = 4 << 30  # of what is kept of the long run


def schedule_command(
    run,
    steps=6,
    output="schedule.json",
    from_steps=300,
    count=32,
    seed=1 << 20,
    batch=16,
    device="auto",
    outdir="runs",
    progress=False,
    echo=print,
    **more,
):
    """Write a schedule of `steps` steps, learned from `from_steps` of DDIM on `count` images;
    returns it.

    run: as `sample_command`'s; more: weights and precision, likewise, and of `Sampling` cfg_scale,
    cfg_channels, clip
    """
    weights, precision = more.pop("weights", None), more.pop("precision", "auto")
    device = resolve_device(device)
    communicator = connect("auto", device)
    with communicator.job():
        if communicator.size > 1:
            raise UsageError("numdiff schedule is the work of one process: leave mpiexec out.")
        check_ending("--output", output, ".json")
        if steps > from_steps:
            raise UsageError(
                f"--steps {steps} cannot be learned from --from-steps {from_steps}: give fewer, or more "
                "to learn from."
            )
        checkpoint = find_model(run, outdir, echo)
        check_output("the schedule", output, *files_of(checkpoint))
        model = load_by_options(checkpoint, device, weights, precision, None, echo)
        # bytes of an image's states
        image = 4 * (from_steps + 1) * math.prod(image_shape(model))
        kept = image * (count + min(batch, count))  # and of a batch's answers
        if kept > MAX_BYTES:
            raise UsageError(
                f"the states of {count} images in {from_steps} steps, and the answers of a batch of "
                f"{min(batch, count)}, would take {kept / 2**30:,.1f} GiB of memory, and at most "
                f"{MAX_BYTES >> 30} are taken: give fewer by --count, --batch or --from-steps."
            )
        with as_options():
            sampling = Sampling(
                model, count=count, steps=from_steps, sampler="ddim", seed=seed, batch=batch, **more
            )
        started = time.perf_counter()
        evaluations = len(sampling.sigmas) - 1
        with progress_bar(
            (evaluations + CHOICES * steps) * -(-count // sampling.batch),
            "learning",
            "step",
            shown=None if progress else False,
        ) as bar:
            schedule = {
                **Trajectory(sampling, lambda: bar.update(1)).schedule(steps),
                "numdiff": __version__,
            }
        with as_options():
            # what cannot be sampled with is refused now
            Sampling(model, count=1, schedule=schedule, **more)
        write_json(output, schedule, "the schedule")
        echo(
            f"{output}: {steps} steps of {evaluations} of DDIM, from {count} images of {checkpoint}, "
            f"{time.perf_counter() - started:.1f} s"
        )
        echo(f"levels       {', '.join(f'{sigma:.3g}' for sigma in schedule['sigmas'])}")
        echo(
            f"errors       {', '.join(f'{error:.2g}' for error in schedule['errors'])}, root mean square of x_t"
        )
    return schedule
