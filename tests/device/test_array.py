"""Launching: over device arrays alone."""

import numpy as np
import pytest

from numdiff.device import cuda, launch
from numdiff.errors import UsageError


@cuda.jit
def nothing_kernel(x):
    pass


@pytest.mark.parametrize(
    "arguments",
    [(), (np.zeros(4, np.float32),), ((np.zeros(4, np.float32), 2),)],
    ids=["none", "numpy", "tuple"],
)
def test_a_launch_without_device_arrays_says_how_to_make_them(arguments):
    with pytest.raises(
        UsageError,
        match=r'none was given: make them with upload\(array, get_backend\("emulator"\)\)',
    ):
        launch(nothing_kernel, 1, 32, *arguments)
