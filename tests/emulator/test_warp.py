"""Warp operations: what every lane gets, in whichever order the lanes come, and what is said when
some do not."""

import numpy as np
import pytest

from numdiff.device import cuda
from tests.conftest import THREAD_ORDERS
from tests.emulator.planting import fault_at, faults_of, marked, run

ALL = 0xFFFFFFFF


@THREAD_ORDERS
def test_activemask_names_no_lane_that_has_gone_elsewhere(order):
    """Which lanes it names is for the hardware to say; lanes that have ended, or wait elsewhere,
    are not among them."""

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if t >= 20:
            return
        cuda.syncwarp(0xFFFFF)
        out[t] = cuda.activemask()

    out = np.zeros(32, np.int64)
    run(kernel, 1, 32, out, order=order, checks=False)
    assert all(mask >> t & 1 and not mask >> 20 for t, mask in enumerate(out[:20].tolist()))


@cuda.jit(device=True)
def agree():
    return cuda.all_sync(ALL, True)  # in a function


@cuda.jit
def faulty(x, n):
    t = cuda.threadIdx.x
    if n == 0:
        cuda.syncwarp(0xF)  # lane not in the mask
    elif n == 1 and t < 31:
        cuda.ballot_sync(ALL, True)  # lane 31 is not there
    elif n == 2:
        # over the edge of the mask
        x[t] = cuda.shfl_down_sync(0xFF if t < 8 else 0xFFFFFF00, x[t], 1)
    elif n == 3:
        if t % 2:
            cuda.all_sync(ALL, True)  # odd
        else:
            cuda.all_sync(ALL, False)  # even
    elif n == 4:
        if t == 0:
            cuda.syncwarp()  # syncwarp
        else:
            cuda.any_sync(ALL, True)  # vote
    elif n == 5:
        if t % 2 == 0:
            agree()
        else:
            agree()
    if n == 1:
        cuda.syncthreads()


@THREAD_ORDERS
@pytest.mark.parametrize(
    "n, marks, text",
    [
        (0, ["lane not in the mask"], "does not name"),
        (1, ["lane 31 is not there"], "waits for lane 31, which never comes"),
        (2, ["over the edge of the mask"], "is not in the mask"),
        (3, ["odd", "even"], "at another"),
        (4, ["syncwarp", "vote"], "never come"),
        (5, ["in a function"], "at another"),
    ],
)
def test_faults_of_warp_operations(order, n, marks, text):
    faults = faults_of(faulty, 1, 32, np.zeros(32, np.float32), n, order=order)
    found = [f for f in faults if text in f.message]
    assert found and {f.line for f in found} <= {marked(__file__, m) for m in marks}, [
        str(f) for f in faults
    ]
    assert {f.kind for f in faults} == {"divergence"}


def test_a_value_from_a_lane_that_ended_is_undefined():
    @cuda.jit
    def kernel(x):
        t = cuda.threadIdx.x
        if t < 31:
            x[t] = cuda.shfl_down_sync(ALL, x[t], 1)  # 31 has ended

    x = np.zeros(32, np.float32)
    fault = fault_at(
        faults_of(kernel, 1, 32, x), "divergence", __file__, marked(__file__, "31 has ended")
    )
    assert (
        fault.thread == (30, 0, 0)
        and "lane 31, which has ended" in fault.message
        and np.isnan(x[30])
    )
