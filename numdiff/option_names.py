"""Errors of `Sampling`, `load` and the like in the words of the command line.

They call arguments as one writes them in Python, cfg_scale; a user of the commands knows them as
options, --cfg-scale.
"""

import contextlib
import re

from .errors import UsageError
from .settings import flag

# words only where no other is meant: as a sentence's first, or before a value
ARGUMENTS = re.compile(
    r"\b(cfg_(scale|interval|channels)|guide_scale|time_shift|s_(churn|tmin|tmax|noise)|ema_std|learn_sigma|eta)\b"
    r"|^(variance|slerp|steps|invert)\b|\b(slerp|count)(?= (a row|must be)\b)"
    r"|\bspacing(?= [\w'])|\bweights(?= raw\b)|\bthe class(?= out\b)"
    r"|(?<=give )a guide(?=,)|\ba guide(?= exclude\b)"
    r"|(?<=nothing to say by )(steps|sampler|inpainting|spacing|guide)\b"
)
OTHERWISE = {
    "the class": "--class",
    "a guide": "--guide-with",
    "guide": "--guide-with",
    "inpainting": "--inpaint",
}


@contextlib.contextmanager
def as_options():
    """Context: a `UsageError` of `Sampling` or `load` calls their arguments as the command line
    does."""
    try:
        yield
    except UsageError as error:
        raise type(error)(
            ARGUMENTS.sub(lambda name: OTHERWISE.get(name[0]) or flag(name[0]), str(error))
        ) from None
