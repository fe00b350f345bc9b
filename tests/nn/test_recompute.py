"""Recomputed blocks: the same bits, less memory."""

import tracemalloc

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device.array import set_poison
from numdiff.errors import UsageError
from tests.conftest import quick
from tests.models import LIGHTNING
from tests.nn.steps import check_what_left, dit, step_of, unet, watch_buckets


def narrow_unet(**options):
    return unet(**{"model_channels": 8, "groups": 4, "num_head_channels": 8, **options})


BUILDS = {
    "unet": narrow_unet,
    "dropout": lambda: narrow_unet(
        dropout=0.3, use_scale_shift_norm=True, resblock_updown=True, num_classes=3
    ),
    "convnext": lambda: narrow_unet(dropout=0.3, block="convnext", resblock_updown=True),
    "dit": dit,
    "bare": lambda: dit(num_classes=None, learn_sigma=False),
    "lightning": lambda: dit(depth=2, mlp_ratio=3.0, **LIGHTNING),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(
    "part, microbatch", [("blocks", None), ("blocks", 2), ("attention", None), ("mlp", None)]
)
@quick(
    lambda name, part, microbatch: (
        name
        in {("blocks", None): BUILDS, ("blocks", 2): ["dropout", "dit"]}.get(
            (part, microbatch), ["unet", "convnext", "dit", "lightning"]
        )
    )
)
def test_recomputed_blocks_give_the_same_bits(name, part, microbatch):
    build = BUILDS[name]
    if part not in ("blocks", *build().part_kinds):
        with pytest.raises(
            UsageError,
            match="--recompute mlp names no part of the blocks of a unet: use blocks or ",
        ):
            build().recompute_blocks(part)
        return
    plain, again = build(), build()
    again.recompute_blocks(part)
    steps = [step_of(model, microbatch=microbatch) for model in (plain, again)]
    for step in steps:
        for _ in range(2):
            step.run()
    np.testing.assert_array_equal(*(step.telemetry(0, 2) for step in steps))
    for name, gradient in plain.gradients().items():
        np.testing.assert_array_equal(gradient, again.gradients()[name], err_msg=name)
        assert gradient.any(), name
    x = np.random.default_rng(0).standard_normal((2, 8, 8, 3))
    y = None if plain.num_classes is None else [0, 1]
    np.testing.assert_array_equal(plain.predict(x, 7, y), again.predict(x, 7, y))


def test_less_memory_is_held():
    peaks = []
    for part in (None, "attention", "mlp", "blocks"):
        model = dit(depth=6, hidden_size=64)
        if part:
            model.recompute_blocks(part)
        step = step_of(model, batch=16)
        step.run()
        tracemalloc.start()
        step.run()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (
        peaks[3] < 0.5 * peaks[0]
        and peaks[3] < min(peaks[1:3])
        and max(peaks[1:3]) < 0.9 * peaks[0]
    )


def test_what_is_recomputed_and_what_it_takes():
    model = dit(depth=2)
    assert [m.name for m in model.parts_within("blocks")] == ["blocks.0", "blocks.1"]
    assert [m.name for m in model.parts_within("attention")] == ["blocks.0.attn", "blocks.1.attn"]
    assert [m.name for m in dit(depth=1, mlp="swiglu").parts_within("mlp")] == ["blocks.0.mlp"]
    assert [m.name for m in narrow_unet().parts_within("attention")] == [
        "input_blocks.3.1",
        "middle_block.1",
        "output_blocks.0.1",
        "output_blocks.1.1",
    ]
    tokens, D = 16, 32
    assert model.recomputed_flops("mlp") == 2 * 2 * tokens * 4 * D * D  # without the last product
    assert model.recomputed_flops("mlp", float8=True) == 2 * 2 * tokens * 8 * D * D
    assert model.recomputed_flops("attention") == 2 * (
        2 * tokens * 3 * D * D + 2 * 2 * tokens * tokens * D
    )
    for float8 in (False, True):
        assert model.recomputed_flops("blocks", float8) == 2 * (
            2 * tokens * 12 * D * D + 2 * 2 * tokens * tokens * D + 2 * 6 * D * D
        )


def test_a_fault_inside_a_block_is_named_as_ever():
    model = dit()
    model.recompute_blocks()
    step = step_of(model)
    arrays = model.arrays()
    arrays["blocks.1.mlp.fc2.bias"][0] = np.nan
    model.load_arrays(arrays)
    assert step.name_first_nonfinite().startswith("blocks.1.mlp")


@pytest.mark.parametrize("build", [narrow_unet, dit])
def test_buckets_leave_when_their_gradients_are_whole(build):
    """The exchange between ranks sees in a block's record which parameters it adds to."""
    model = build()
    model.recompute_blocks()
    step = step_of(model)
    watched = watch_buckets(step)
    step.run()
    check_what_left(step, *watched)


@pytest.mark.parametrize(
    "build, part, layer",
    [
        (dit, "attention", "attn.proj"),
        (dit, "mlp", "mlp.fc2"),
        (lambda: dit(mlp="swiglu"), "mlp", "mlp.w3"),
        (narrow_unet, "attention", "proj_out"),
    ],
)
def test_the_last_product_is_not_computed_again(build, part, layer, monkeypatch):
    """The memory of its result may hold anything."""
    model, computed = build(), []
    model.recompute_blocks(part)
    forward, weights = K.linear_forward, {}

    def counted(x, weight, *given, **more):
        computed.append(weights.get(weight.ctypes.data))
        return forward(x, weight, *given, **more)

    step = step_of(model)
    weights.update({p.data.ctypes.data: name for name, p in model.parameters.parameters.items()})
    monkeypatch.setattr(K, "linear_forward", counted)
    old = set_poison(True)
    step.run()
    set_poison(old)
    last = [name for name in weights.values() if name.endswith(f"{layer}.weight")]
    assert last and all(computed.count(name) == 1 for name in last)
    assert np.isfinite(model.parameters.grad).all() and any(
        computed.count(n) == 2 for n in weights.values()
    )
