"""The first steps of a run, timed for the forecast of a dry run, and given up."""

import contextlib
import time

from ..errors import OutOfMemoryError
from .build import build_dataset, build_model, build_trainer
from .compiling import compiling
from .forecast import Clock, process_age
from .plan import plan_run


def rehearse(options, plan):
    """The line of the forecast, or None where the first steps take too long or do not fit.

    plan: the run's `Plan`. Kernels that the cache lacks are compiled, as the run would compile them.
    What is measured is stored for the run.
    """
    if not plan.is_measured_soon():
        return None
    clock = Clock(began=time.perf_counter() - process_age())
    clock.measure(plan.key, plan.backend)
    try:
        with build_dataset(options) as dataset:
            time_first_steps(options, dataset, clock)
    except OutOfMemoryError:  # which the run would report, unless others leave the card by then
        return None
    clock.store()
    record = clock.measured
    if plan.backend is None:  # what these steps have compiled is in the cache
        record |= {"first": 0.0, "memory": 0}
        plan.foresee_again()
    return plan.after_first_steps(record, 0)


def time_first_steps(options, dataset, clock):
    """Build the model, and train it until the clock has measured the first steps."""
    ahead = contextlib.nullcontext()
    if options.device == "cuda":
        ahead = compiling(lambda card: plan_run(options, dataset, card))
    with ahead:
        model = build_model(
            options, dataset.channels, len(dataset.classes) if options.class_cond else None
        )
    with contextlib.closing(build_trainer(options, model, dataset)) as trainer:
        trainer.compiles_ahead = False
        clock.begin_steps()
        while count := clock.next_count():
            began = time.perf_counter()
            for _ in trainer.run(count):
                pass
            clock.steps(count, time.perf_counter() - began)
