import numpy as np
import pytest

import numdiff.device.emulator
from numdiff import kernels as K
from numdiff.benchmark.costs import bytes_of, cost_of
from numdiff.benchmark.kernels import (
    Array,
    Recorded,
    TimedCalls,
    bench_call,
    bench_kernels,
    record_calls,
    told_apart,
    versions_of,
)
from numdiff.benchmark.step import NumdiffStep
from numdiff.benchmark.watch import operations
from numdiff.device.roof import Roof
from numdiff.errors import UsageError
from numdiff.kernels import conv2d
from numdiff.kernels.conv2d.hopper import convolution as conv2d_hopper
from numdiff.kernels.conv2d.hopper import weight_gradient as conv2d_hopper_gradient
from numdiff.kernels.optimizer.grad_norm import global_norm
from numdiff.training.options import resolve
from tests.conftest import exhaustive, exhaustively

from .fake_gpu import FakeGpu
from .test_profile import TINY_DIT, small_unet


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def cost(function, result, **given):
    return cost_of(function, given, result)


def test_costs_come_from_the_operations_files():
    x, weight, y = zeros(2, 8, 6, 4), zeros(5, 3, 3, 4), zeros(2, 4, 3, 5)
    assert cost(K.conv2d_forward, y, x=x, weight=weight, stride=2) == (
        4 * (x.size + weight.size + y.size),
        conv2d.conv2d_forward_cost(2, 8, 6, 4, 5, 3, 2)[1],
    )
    gradients = {"dweight": weight.copy(), "dbias": zeros(5), "need_dx": True}
    assert cost(K.conv2d_backward, x.copy(), dy=y, x=x, weight=weight, stride=2, **gradients) == (
        4 * (y.size + 2 * x.size + 3 * weight.size + 10),
        conv2d.conv2d_backward_cost(2, 8, 6, 4, 5, 3, 2)[1],
    )
    a, b, c = (zeros(*shape, dtype=np.float16) for shape in ((7, 16), (9, 16), (7, 9)))
    assert cost(K.matmul_forward, c, a=a, b=b, transpose_a=False, transpose_b=True) == (
        2 * (7 * 16 + 9 * 16 + 63),
        2 * 7 * 9 * 16,
    )
    pair, layer = K.Pair(zeros(2, 3, 6), zeros(2, 3, 2)), {"weight": zeros(5, 8), "bias": zeros(5)}
    assert cost(K.linear_forward, zeros(2, 3, 5), x=zeros(2, 3, 8), **layer)[1] == 2 * 6 * 5 * 8
    norm = {"weight": zeros(8), "bias": zeros(8), "groups": 2, "silu": True}
    for function, result, given in (
        (K.linear_forward, zeros(2, 3, 5), layer),
        (K.groupnorm_forward, zeros(2, 3, 8), norm),
    ):
        of_two, of_one = (cost(function, result, x=x, **given) for x in (pair, pair.joined()))
        assert of_two == of_one
    qkv = zeros(2, 16, 24)
    assert (
        cost(K.flash_attention_forward, zeros(2, 16, 8), qkv=qkv, heads=2)[1] == 4 * 2 * 16 * 16 * 8
    )
    assert cost(K.silu_forward, x.copy(), x=x) == (8 * x.size, 4 * x.size)
    assert cost(global_norm, zeros(1), x=x) == (4 * x.size + 4, 2 * x.size)


def test_costs_of_a_convolutions_passes():
    dy, x, dweight = zeros(1, 4, 4, 8), zeros(1, 4, 4, 16), zeros(8, 3, 3, 16)
    flops = cost(conv2d_hopper_gradient.hopper_weight_gradient, None, dy=dy, x=x, dweight=dweight)[
        1
    ]
    assert flops == conv2d.conv2d_weight_gradient_cost(1, 4, 4, 16, 8, 3)[1]
    flops = cost(conv2d_hopper.hopper_input_gradient, x, dy=dy, weight=dweight, dx=x)[1]
    assert flops == conv2d.conv2d_input_gradient_cost(1, 4, 4, 16, 8, 3)[1]


def test_an_array_counts_once():
    x = zeros(10)
    assert bytes_of({"a": x, "b": x, "parts": [zeros(3), zeros(3)]}, x) == 4 * 16


def test_operations_are_found():
    names = {function.__name__ for function in operations()}
    assert {
        "conv2d_forward",
        "matmul_forward",
        "adamw_update",
        "flash_attention_backward",
        "column_sum",
        "hopper_weight_gradient",
        "random_normal",
        "upsample_backward",
    } <= names
    assert not any(name.endswith(("_cost", "_reference")) for name in names)


def test_versions():
    assert versions_of(K.matmul_forward)[:4] == (1, 2, 3, 4) and versions_of(
        K.linear_backward
    ) == versions_of(K.linear_forward)
    assert (
        versions_of(K.conv2d_backward) == (1, 2, 3, 4, 5, 6, 7)
        and versions_of(K.chunk_forward) == ()
    )
    assert versions_of(K.silu_backward) and versions_of(K.groupnorm_backward) == (1, 2, 3)


def test_calls_of_the_same_shapes_are_told_apart():
    def call(weight, residual=None, dx=None):
        given = {
            "x": image,
            "y": image,
            "weight": weight,
            "dweight": weight,
            "scale": 0.5,
            "residual": residual,
            "dx": dx,
        }
        return Recorded(conv2d.conv2d_forward, given, 0, 0, True)

    image = Array((4, 8, 8, 2), np.dtype(np.float32))
    small, large = (Array((2, n, n, 2), np.dtype(np.float32)) for n in (1, 3))
    calls = told_apart(
        [
            call(small),
            call(large, image),
            call(large, None, image),
            call(Array((2,), np.dtype("int8"))),
        ]
    )
    text = "4×8×8×2, 4×8×8×2, "
    assert [c.shape() for c in calls] == [
        f"{text}weight 2×1×1×2",
        f"{text}weight 2×3×3×2, residual",
        f"{text}weight 2×3×3×2, dx",
        f"{text}weight 2",
    ]
    assert told_apart([call(small, image)])[0].shape() == text[:-2]


def test_no_two_rows_of_a_step_look_the_same():
    calls = told_apart(record_calls(NumdiffStep(small_unet())))
    texts = [(call.name, call.dtype, call.shape()) for call in calls]
    assert len(set(texts)) == len(texts)


def test_on_the_cpu():
    rows = list(bench_kernels(small_unet(), ("conv2d", "groupnorm_forward"), shapes=1))
    assert [row["operation"] for row in rows] == [
        "conv2d_forward",
        "groupnorm_forward",
        "conv2d_weight_gradient",
        "conv2d_input_gradient",
    ]
    assert all(
        row["us"] > 0 and row["roof"] is None and (row["version"], row["name"]) == ("*", None)
        for row in rows
    )
    with pytest.raises(
        UsageError,
        match=r"no operation 'conv3d' in this step \(did you mean 'conv2d'\?\): use "
        "some of .*conv2d_forward",
    ):
        list(bench_kernels(small_unet(), ("conv3d",)))


@exhaustive
@pytest.mark.slow
def test_on_a_gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(numdiff.device.emulator, "get_emulator", lambda **_: gpu)
    options = resolve({**TINY_DIT, "device": "emulator"})
    rows = list(bench_kernels(options, ("gate_adaln", "adamw"), shapes=1))
    found = {(row["operation"], row["version"], row["name"]) for row in rows}
    assert {
        ("gate_adaln_forward", "v1", "unfused"),
        ("gate_adaln_forward", "v2*", "fused"),
        ("gate_adaln_backward", "v1", "unfused"),
    } <= found
    for operation in {row["operation"] for row in rows}:
        assert sum("*" in row["version"] for row in rows if row["operation"] == operation) == 1
    assert all(row["roof"] > 0 and row["bound"] in ("memory", "arithmetic") for row in rows)
    chosen = list(bench_kernels(options, ("gate_adaln",), chosen=True))
    assert all("*" in row["version"] for row in chosen)


@pytest.mark.parametrize("versions", [None, (5, 6)])
@pytest.mark.parametrize(
    "function", [K.conv2d_forward, *exhaustively(conv2d.conv2d_input_gradient)]
)
def test_only_the_launchers_version_is_starred(function, versions):
    """Versions 5 and 6 of a convolution launch the same kernels with other numbers."""
    x, weight = (
        Array((1, 8, 8, 64), np.dtype(np.float16)),
        Array((64, 3, 3, 64), np.dtype(np.float16), place=1),
    )
    arguments = (
        {"x": x, "weight": weight}
        if function is K.conv2d_forward
        else {"dy": x, "weight": weight, "x": Array(x.shape, x.dtype, place=2), "stride": 1}
    )
    gpu = FakeGpu()
    rows = bench_call(
        Recorded(function, arguments, 1, 1, True),
        TimedCalls(gpu),
        Roof(gpu),
        "fp16",
        versions=versions,
    )
    assert [row["version"] for row in rows][-2:] == ["v5", "v6*"]
