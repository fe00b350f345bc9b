"""Guidance of a sample, checked: the model's own classes (cfg_scale), or another model
(autoguidance).

denoiser.py says what guidance is, and applies it; here stands what a model can be guided by.
"""

import numbers

from ..errors import UsageError, shown
from ..sizes import image_shape

# of guidance, and of churn's noise: far above what makes an image, and far from overflowing
LARGEST_SCALE = 1000
# of autoguidance, where none is given: about the paper's best for class-conditional ImageNet
GUIDE_SCALE = 2.0


def check_scale(name, scale):
    """Raise a `UsageError` for a strength of guidance that is no number, or so large that images
    overflow."""
    if (
        isinstance(scale, bool)
        or not isinstance(scale, numbers.Real)
        or not abs(scale) <= LARGEST_SCALE
    ):
        raise UsageError(
            f"{name} must be a finite number from -{LARGEST_SCALE} to {LARGEST_SCALE}, not "
            f"{shown(scale)}."
        )


def checked_guide(guide, scale, model, cfg_scale):
    """The model that guides; None for none, also if its scale makes it one that has no effect. A
    `UsageError` if it is not of the same images and classes as `model`, or is combined with class
    guidance, cfg_scale."""
    if guide is None:
        if scale is not None:
            raise UsageError(
                "guide_scale has no effect without a model that guides: give a guide, too."
            )
        return None
    if not all(
        hasattr(guide, name) for name in ("image_size", "in_channels", "diffusion", "num_classes")
    ):
        raise UsageError(f"a guide is a model, as numdiff.load gives it, and not {shown(guide)}.")
    if guide is model:
        raise UsageError(
            "a model cannot guide itself: give a smaller one as its guide, or an earlier checkpoint."
        )
    check_scale("guide_scale", scale)
    if cfg_scale not in (None, 1):
        raise UsageError(
            f"cfg_scale {cfg_scale:g} and a guide exclude each other: guide by the class or by "
            "another model, and leave one of them out."
        )
    sizes = [image_shape(m) for m in (guide, model)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            "the guide makes images of {}×{}×{} and the model of {}×{}×{}: give a guide of the same "
            "images.".format(*sizes[0], *sizes[1])
        )
    if getattr(guide, "out_channels", guide.in_channels) < guide.in_channels:
        raise UsageError(
            f"the guide takes {guide.in_channels} channels and gives {guide.out_channels}: give one "
            "with as many outputs as inputs."
        )
    names = [(getattr(m, "meta", None) or {}).get("classes") for m in (guide, model)]
    if guide.num_classes not in (None, model.num_classes):
        raise UsageError(
            f"the guide has {guide.num_classes} classes and the model {model.num_classes or 'none'}: "
            "give a guide of the same classes, or one without."
        )
    if guide.num_classes is not None and all(names) and list(names[0]) != list(names[1]):
        raise UsageError(
            "the guide's classes are others than the model's, or in another order: give a guide that "
            "was trained on the same data."
        )
    if guide.backend is not model.backend:
        raise UsageError(
            "the guide is on another device than the model: load both with the same device."
        )
    return None if scale == 1 else guide


def check_guidance(model, scale, channels, interval, guide):
    """Raise a `UsageError` for guidance by the class that the model cannot have, and for what has
    no effect without guidance. scale, channels, interval: cfg_scale, cfg_channels and cfg_interval
    of `Sampling`, or None; guide: as `checked_guide` gives it"""
    if interval and scale in (None, 1) and guide is None:
        raise UsageError(
            "cfg_interval has no effect without guidance: give a cfg_scale other than 1, or a guide, "
            "too."
        )
    if channels is not None and scale in (None, 1):
        raise UsageError(
            "cfg_channels has no effect without guidance: give a cfg_scale other than 1, too."
        )
    if channels is not None and not 1 <= channels <= model.in_channels:
        raise UsageError(
            f"cfg_channels must be between 1 and the model's {model.in_channels}, not {channels}."
        )
    if scale is not None:
        check_scale("cfg_scale", scale)
    if scale not in (None, 1) and getattr(model, "null_class", None) is None:
        why = (
            "it was trained without classes"
            if model.num_classes is None
            else "it was trained without class dropout"
        )
        raise UsageError(
            f"guidance needs a model with a null class, and this one has none ({why}): leave "
            "cfg_scale out."
        )
