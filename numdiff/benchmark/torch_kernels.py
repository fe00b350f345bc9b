"""How long PyTorch (cuBLAS, cuDNN, its fused attention) takes for an operation of numdiff, where it
is installed."""

import importlib.util
import time
import warnings

import numpy as np

from ..device import download
from ..kernels.concat import Pair
from .replays import MAX_CALLS, REPLAY_S, repeated


def torch_call(call, arguments, precision):
    """(run, wait, calls) of PyTorch's counterpart of a recorded call, on the same numbers; None if
    there is none."""
    if importlib.util.find_spec("torch") is None or call.name not in COUNTERPARTS:
        return None
    import torch

    cuda = torch.cuda.is_available() and not isinstance(next(iter(arguments.values())), np.ndarray)
    if not cuda and not isinstance(next(iter(arguments.values())), np.ndarray):
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True

    def tensor(array):
        made = torch.from_numpy(download(array.joined() if isinstance(array, Pair) else array))
        return made.cuda() if cuda else made

    if not cuda:
        once = COUNTERPARTS[call.name](torch, arguments, tensor)
        return once and (once, lambda: None, 1)
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):  # a backward pass runs where its forward pass ran
            once = COUNTERPARTS[call.name](torch, arguments, tensor)
            return once and _captured(torch, stream, once)
    except Exception as fault:  # a failure in PyTorch must not hide numdiff's figures
        warnings.warn(f"{call.name}: PyTorch's counterpart failed: {fault}", stacklevel=2)
        return None


def _captured(torch, stream, once):
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        once()
        torch.cuda.synchronize()
    calls = int(np.clip(4 * REPLAY_S / (time.perf_counter() - start), 4, MAX_CALLS))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            once()
    return repeated(graph.replay, torch.cuda.synchronize, calls)


def _image(torch, tensor, array):
    """(B, H, W, C) as PyTorch's (B, C, H, W), stored channels-last."""
    return tensor(array).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def _conv2d(torch, a, tensor):
    x, weight = _image(torch, tensor, a["x"]), _image(torch, tensor, a["weight"])
    bias = None if a["bias"] is None else tensor(a["bias"]).to(x.dtype)
    pad = weight.shape[2] // 2
    return lambda: torch.nn.functional.conv2d(x, weight, bias, a["stride"], pad)


def _conv2d_gradient(which):
    def make(torch, a, tensor):
        dy, x = _image(torch, tensor, a["dy"]), _image(torch, tensor, a["x"])
        weight = _image(torch, tensor, a["weight" if which == "dx" else "dweight"]).to(x.dtype)
        pad, stride = weight.shape[2] // 2, a["stride"]
        wanted = [which == "dx", which == "dweight", False]
        return lambda: torch.ops.aten.convolution_backward(
            dy, x, weight, None, [stride, stride], [pad, pad], [1, 1], False, [0, 0], 1, wanted
        )

    return make


def _taps(torch, a, tensor, name="weight"):
    """(kernel, kernel, C) as PyTorch's (C, 1, kernel, kernel)."""
    return tensor(a[name]).permute(2, 0, 1)[:, None].contiguous()


def _depthwise(torch, a, tensor):
    x, weight = _image(torch, tensor, a["x"]), _taps(torch, a, tensor)
    bias = None if a["bias"] is None else tensor(a["bias"]).to(x.dtype)
    return lambda: torch.nn.functional.conv2d(
        x, weight, bias, padding=weight.shape[2] // 2, groups=x.shape[1]
    )


def _depthwise_gradient(which):
    def make(torch, a, tensor):
        dy = _image(torch, tensor, a["dy"])
        # of dx, it only gives its shape
        x = _image(torch, tensor, a["x"]) if which == "dweight" else dy
        weight = _taps(torch, a, tensor, "weight" if which == "dx" else "dweight").to(dy.dtype)
        pad, wanted = weight.shape[2] // 2, [which == "dx", which == "dweight", False]
        return lambda: torch.ops.aten.convolution_backward(
            dy, x, weight, None, [1, 1], [pad, pad], [1, 1], False, [0, 0], dy.shape[1], wanted
        )

    return make


def _linear(torch, a, tensor):
    x, weight = tensor(a["x"]), tensor(a["weight"])
    bias = None if a["bias"] is None else tensor(a["bias"]).to(x.dtype)
    return lambda: torch.nn.functional.linear(x, weight, bias)


def _linear_backward(torch, a, tensor):
    dy, x, weight = tensor(a["dy"]), tensor(a["x"]), tensor(a["weight"])
    rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    bias, need_dx = a["dbias"] is not None, a["need_dx"]
    return lambda: (
        rows.T @ inputs,
        rows.sum(0) if bias else None,
        rows @ weight if need_dx else None,
    )


def _matmul(torch, a, tensor):
    left, right = tensor(a["a"]), tensor(a["b"])
    left = left.transpose(-1, -2) if a["transpose_a"] else left
    right = right.transpose(-1, -2) if a["transpose_b"] else right
    return lambda: left @ right


def _matmul_fp8(torch, a, tensor):
    left, right = (tensor(a[name]).view(torch.float8_e4m3fn) for name in ("a", "b"))
    scales, bias = (tensor(a["scale_a"]), tensor(a["scale_b"])), a["bias"]
    bias = None if bias is None else tensor(bias).half()
    return lambda: torch._scaled_mm(
        left, right.T, *scales, bias=bias, out_dtype=torch.float16, use_fast_accum=not a["promoted"]
    )


def _first(torch, a, tensor):
    left, right = tensor(a["a"]), tensor(a["b"])
    return lambda: left @ right


def _level(torch, a, tensor):
    left, right = tensor(a["a"]), tensor(a["b"])
    return lambda: left @ right.T


def _conv2d_level(torch, a, tensor):
    return _conv2d(torch, {**a, "bias": None, "stride": 1}, tensor)


def _heads(torch, a, tensor):
    qkv = tensor(a["qkv"])
    B, T, _ = qkv.shape
    if a["order"] == "legacy":
        parts = qkv.view(B, T, a["heads"], 3, -1).permute(3, 0, 2, 1, 4)
    else:
        parts = qkv.view(B, T, 3, a["heads"], -1).permute(2, 0, 3, 1, 4)
    return [part.contiguous() for part in parts]


def _attention(torch, a, tensor):
    q, k, v = _heads(torch, a, tensor)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _attention_backward(torch, a, tensor):
    q, k, v = (part.requires_grad_() for part in _heads(torch, a, tensor))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    dy = tensor(a["dy"]).view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)
    return lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)


def _group_norm(torch, a, tensor):
    if len(a["x"].shape) != 4:
        return None
    x = _image(torch, tensor, a["x"])
    weight, bias = tensor(a["weight"]).to(x.dtype), tensor(a["bias"]).to(x.dtype)
    norm, silu = torch.nn.functional.group_norm, torch.nn.functional.silu
    if a["silu"]:
        return lambda: silu(norm(x, a["groups"], weight, bias, a["eps"]))
    return lambda: norm(x, a["groups"], weight, bias, a["eps"])


COUNTERPARTS = {
    "conv2d_forward": _conv2d,
    "conv2d_input_gradient": _conv2d_gradient("dx"),
    "conv2d_weight_gradient": _conv2d_gradient("dweight"),
    "conv2d_level_forward": _conv2d_level,
    "depthwise_forward": _depthwise,
    "depthwise_input_gradient": _depthwise_gradient("dx"),
    "depthwise_weight_gradient": _depthwise_gradient("dweight"),
    "matmul_first_forward": _first,
    "matmul_level_forward": _level,
    "linear_forward": _linear,
    "linear_backward": _linear_backward,
    "matmul_forward": _matmul,
    "matmul_fp8_forward": _matmul_fp8,
    "flash_attention_forward": _attention,
    # to all keys
    "flash_attention_backward": _attention_backward,
    "sla_forward": _attention,
    "sla_backward": _attention_backward,
    "attention_forward": _attention,
    "groupnorm_forward": _group_norm,
}
