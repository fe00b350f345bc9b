"""The compute capability that a kernel needs: written above it, and checked by all that launch,
compile or choose it.

    @requires("8.0")                 # cp.async, mma.sync: there and on everything later
    @cuda.jit
    def product_kernel(…): …

    @requires("9.0a")                # wgmma: on that architecture alone
    def gemm(…): …                   # a text from which `cuda.jit` or `specialise` makes kernels, each needs it

    supports(x, product_kernel)      # whether the device of x runs it

SOURCE
    PTX ISA, "Target ISA Notes" of each instruction; ".target": an architecture with an "a" has
    instructions that no later one has.
"""

import re

from ..errors import NumdiffError


def requires(capability):
    """Decorator: a kernel, or a text of kernels, needs this compute capability: "8.0", or "9.0a"
    for it alone."""
    major, minor, alone = re.fullmatch(r"(\d+)\.(\d)(a?)", capability).groups()
    needed = (int(major), int(minor), *alone)

    def mark(kernel):
        getattr(kernel, "py_func", kernel).requires = needed
        return kernel

    return mark


def required(kernel):
    """What `requires` has said: (8, 0) or (9, 0, "a"); (0, 0) where it has said nothing. For a dict
    of variants, which are made from one text, what the first needs."""
    if isinstance(kernel, dict):
        kernel = next(iter(kernel.values()))
    return getattr(getattr(kernel, "py_func", kernel), "requires", (0, 0))


def supports(device, *kernels):
    """Whether a device runs all these kernels, or dicts of variants.

    device: a backend, an array on one, or a capability such as (8, 0)
    """
    device = getattr(device, "backend", device)
    capability = tuple(getattr(device, "capability", device))[:2]
    return all(
        capability == needed[:2] if len(needed) == 3 else capability >= needed
        for needed in map(required, kernels)
    )


def check_supported(device, kernel, name=None):
    """Raise a `NumdiffError` if the device, of this name, does not run the kernel."""
    if not supports(device, kernel):
        major, minor, *alone = required(kernel)
        capability = ".".join(map(str, tuple(getattr(device, "capability", device))[:2]))
        raise NumdiffError(
            f"{kernel.py_func.__name__} needs compute capability {major}.{minor}{''.join(alone)}, and "
            f"{name or 'this device'} has {capability}: leave the version out, and one is chosen that "
            "runs here."
        )
