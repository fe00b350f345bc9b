"""One ConvNeXt block, measured."""

import numpy as np

from numdiff.device.planned import CARDS, collect
from numdiff.extras.convnext import benchmark as block
from tests.benchmark.fake_gpu import FakeGpu
from tests.command import output_of, refusal_of
from tests.conftest import needs

H200 = next(card for card in CARDS if card.device_name == "NVIDIA H200")


def test_on_a_gpu_and_the_cpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(block, "get_backend", lambda name: gpu)
    ours, cpu = block.bench_block("cuda", "fp16", 1, 4, 8, repeats=1)
    assert gpu.captured == 2 and "GPU, fp16" in ours["where"] and "CPU, fp32" in cpu["where"]
    assert all(row[what] > 0 for row in (ours, cpu) for what in ("forward", "both"))
    (alone,) = block.bench_block("cuda", "fp16", 1, 4, 8, repeats=1, cpu=False)
    assert "GPU" in alone["where"]


def test_its_kernels_are_compiled_side_by_side():
    names = {key.name for key in block.plan_block("fp16", (32, 32, 128), H200)}
    assert any("nt_layer_scale" in name for name in names) and any(
        "nn_gelu_gradient" in name for name in names
    )


def test_four_launches_forward():
    """On an H200 in float16: the convolution; the LayerNorm; a layer and GELU; a layer, the vector
    and the input. (The first two in one kernel take longer.) What is left out is the model's own:
    it rounds its weights. Backward: GELU' with a product, no addition by itself."""

    def launched(what):
        keys = collect(
            lambda device: getattr(block.OurBlock(device, "fp16", 32, 32, 128), what)(), H200
        )
        return {key.name for key in keys if not key.name.startswith("cast")}

    forward = launched("forward")
    assert len(forward) == 4 and all(
        any(name in kernel for kernel in forward)
        for name in (
            "depthwise_forward_kernel_v4",
            "layernorm_forward_kernel_v2",
            "nt_gelu",
            "nt_layer_scale",
        )
    ), forward
    backward = " ".join(launched("both") - forward)
    assert all(
        name in backward
        for name in (
            "nn_gelu_gradient",
            "layernorm_backward_kernel_v3",
            "depthwise_forward_kernel",
            "depthwise_weight_gradient_kernel",
        )
    )
    assert "add_forward" not in backward and "layernorm_sums" not in backward


def test_command():
    output = output_of("bench block --device cpu --batch 1 --size 4 --channels 8")
    assert "\n| numdiff, CPU, fp32 " in output
    sentence = "--channels 12: a ConvNeXt block takes a multiple of 8"
    assert sentence in refusal_of("bench block --channels 12")


@needs("torch")
def test_comparison_with_torch():
    rows = list(block.bench_block("cpu", "fp32", 1, 4, 8, ("eager",), repeats=1))
    assert "fault" not in rows[1] and rows[1]["against"][0] > 0


@needs("torch")
def test_torch_computes_the_same(rng, channels=8):
    import torch

    from numdiff.extras.convert.layout import to_torch_layout
    from numdiff.extras.convnext.torch_block import TorchOneBlock
    from numdiff.nn import Tensor

    ours, theirs = block.OneBlock(channels), TorchOneBlock(channels)
    arrays = {k: rng.standard_normal(v.shape).astype(np.float32) for k, v in ours.arrays().items()}
    ours.load_arrays(arrays)
    state = {
        k.removeprefix("block."): torch.from_numpy(np.ascontiguousarray(v))
        for k, v in to_torch_layout(arrays).items()
        if "emb_layers" not in k
    }
    theirs.load_state_dict(state)
    x, added = (
        rng.standard_normal(s).astype(np.float32) for s in ((2, 5, 6, channels), (2, channels))
    )
    want = ours(Tensor(x), Tensor(added)).data
    with torch.no_grad():
        got = (
            theirs(torch.from_numpy(x.transpose(0, 3, 1, 2)), torch.from_numpy(added))
            .numpy()
            .transpose(0, 2, 3, 1)
        )
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)
