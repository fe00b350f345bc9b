import copy
import math
import pickle

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice, get_emulator
from numdiff.errors import NumdiffError, UsageError
from numdiff.kernels.linear import layer as linear
from numdiff.nn import AdamW, DiT, Tape, Tensor
from numdiff.nn import functional as F
from numdiff.nn.dit import MODELS, doubling, padded_columns, padded_rows
from numdiff.nn.dit_shapes import dit_parameter_counts
from numdiff.nn.flops import dit_forward_flops, forward_flops
from numdiff.sizes import sides
from numdiff.training.kinds.dit import ARCHITECTURES
from numdiff.training.step import Randomness
from tests.conftest import exhaustive, relative_error
from tests.models import LIGHTNING, small_dit


def tiny(**options):
    sizes = {"patch_size": 2, "hidden_size": 32, "depth": 2, "num_classes": 4}
    return small_dit(**{**sizes, **options})


def fill(model, rng):
    model.parameters.load_flat(0.2 * rng.standard_normal(model.parameters.total))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learn_sigma": False},
        {"num_classes": None},
        {"class_dropout": 0.0},
        {"in_channels": 1},
        {"in_channels": 5},
        {"patch_size": 4},
        {"patch_size": 8},
        {"image_size": 6, "patch_size": 3},
        {"mlp_ratio": 2.5},
        {"depth": 1},
        {"hidden_size": 36, "num_heads": 3},
        {"norm": "rms"},
        {"qk_norm": True},
        {"rope": True},
        {"mlp": "swiglu"},
        {"shift": False},
        LIGHTNING,
        {"image_size": (6, 10), "rope": True},
        {"image_size": (18, 22), "attention": "sla"},
        {"image_size": 18, "attention": "sla"},
        {"image_size": 18, "attention": "sla", "sla_topk": 1.0, "sla_linear": "all", **LIGHTNING},
    ],
)
def test_every_option_runs_and_keeps_its_shape(rng, options):
    model = fill(tiny(**options), rng)
    size, channels = sides(model.image_size), model.in_channels
    x = rng.standard_normal((2, *size, channels))
    y = np.array([0, 3]) if model.num_classes else None
    out = model.predict(x, 10, y)
    assert out.shape == (2, *size, channels * (2 if model.learn_sigma else 1))
    assert np.isfinite(out).all() and out.std() > 0
    again = DiT(**model.options, device="cpu")
    again.load_arrays(model.arrays())
    np.testing.assert_array_equal(again.predict(x, 10, y), out)


def test_it_starts_as_the_public_code_starts():
    """adaLN and the last layer at zero, so that the output is zero; Xavier's range; deviation 0.02;
    biases zero."""
    model = tiny(in_channels=4, hidden_size=128, num_classes=1000)
    for name, value in model.arrays().items():
        if "adaLN" in name or name.startswith("final_layer.") or name.endswith("bias"):
            assert not value.any(), name
        elif name.startswith(("t_embedder", "y_embedder")):
            assert abs(value.std() / 0.02 - 1) < 0.02 and abs(value.mean()) < 1e-3, name
        else:
            fan_out, fan_in = len(value), value.size // len(value)
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert 0.98 * bound < np.abs(value).max() <= bound, name
            assert abs(value.std() / (bound / math.sqrt(3)) - 1) < 0.05, name
    assert not model.predict(np.ones((1, 8, 8, 4)), 5, 0).any()
    np.testing.assert_array_equal(
        model.parameters.data, DiT(**model.options, device="cpu").parameters.data
    )


def test_the_block_of_lightningdit_starts_as_its_public_code_starts():
    """Norms at one, SwiGLU in Xavier's range of its true width, zeros in what fills it up; a DiT's
    own numbers stay."""
    model = tiny(hidden_size=128, depth=1, mlp_ratio=1.96, **LIGHTNING)
    values = model.arrays()
    for name in ("norm1", "norm2", "attn.q_norm", "attn.k_norm"):
        assert (values[f"blocks.0.{name}.weight"] == 1).all()
    assert (values["final_layer.norm_final.weight"] == 1).all()
    assert values["blocks.0.mlp.w12.weight"].shape == (336, 128)  # 2 · 168, for 2 · 166
    for half in np.split(values["blocks.0.mlp.w12.weight"], 2):
        bound = math.sqrt(6 / (128 + 2 * 166))
        assert not half[166:].any() and 0.98 * bound < np.abs(half[:166]).max() <= bound
    assert not values["blocks.0.mlp.w3.weight"][:, 166:].any()
    assert values["blocks.0.adaLN_modulation.1.weight"].shape == (4 * 128, 128)
    assert model.parameters.trained == dit_parameter_counts(model.options)[1]
    assert (
        sum(array.size for array in values.values())
        == model.parameters.trained + 3 * 2 * 128 + 2 * 2
    )
    assert copy.deepcopy(model).blocks[0].mlp.w12.weight.padding == 2 * 2 * 128
    assert pickle.loads(pickle.dumps(model)).blocks[0].mlp.w3.weight.padding == 2 * 128


def test_what_fills_up_a_width_stays_zero(rng):
    """Through AdamW with decay, clipping and an average, whose other numbers all move."""
    model = tiny(mlp="swiglu", mlp_ratio=2.6, depth=1)  # 55 inside, of 56
    fresh = {
        name: array if array.any() else 0.1 * rng.standard_normal(array.shape).astype(np.float32)
        for name, array in model.arrays().items()
    }
    for name, array in fresh.items():
        fresh[name] = padded_with_zeros(name, array)
    model.load_arrays(fresh)
    optimizer = AdamW(
        model.parameters, learning_rate=1e-2, weight_decay=0.1, clip_norm=1.0, ema_decay=0.9
    )
    x = rng.standard_normal((2, 8, 8, 3)).astype(np.float32)
    for _ in range(3):
        model.parameters.begin_gradients()
        with Tape() as tape:
            loss = F.mse(
                model(Tensor(x), np.array([3, 500], np.int32), np.array([2, 4], np.int32)), x
            )
        tape.backward(loss)
        optimizer.update(loss.data)
    for arrays in (model.gradients(), model.arrays(), model.parameters.arrays(optimizer.ema)):
        for name in ("blocks.0.mlp.w12.weight", "blocks.0.mlp.w12.bias", "blocks.0.mlp.w3.weight"):
            np.testing.assert_array_equal(arrays[name], padded_with_zeros(name, arrays[name]))
            assert np.count_nonzero(arrays[name]) >= 0.95 * arrays[name].size * 55 / 56
    assert all((array != fresh[name]).any() for name, array in model.arrays().items())


def padded_with_zeros(name, array):
    """What 55 of 56 channels of a SwiGLU have, and zeros."""
    if ".mlp.w12." in name:
        return padded_rows(np.concatenate([half[:55] for half in np.split(array, 2)]), 55)
    return padded_columns(array[:, :55], 55) if name.endswith("mlp.w3.weight") else array


def test_classes_and_the_null_class(rng):
    model = fill(tiny(), rng)
    assert model.null_class == 4
    assert tiny(class_dropout=0.0).null_class is None and tiny(num_classes=None).null_class is None
    x = rng.standard_normal((5, 8, 8, 3))
    x[:] = x[0]
    outputs = model.predict(x, 10, [0, 1, 2, 3, 4])
    assert all(np.abs(outputs[i] - outputs[j]).max() > 1e-3 for i in range(5) for j in range(i))


def test_class_dropout_is_of_training_alone(rng):
    model = fill(tiny(class_dropout=0.5), rng)
    x = Tensor(np.repeat(rng.standard_normal((1, 8, 8, 3)).astype(np.float32), 64, axis=0))
    t, y = np.full(64, 10, np.int32), np.full(64, 2, np.int32)
    random = Randomness(3, np.array([7], np.uint32), np.arange(64, dtype=np.uint32))
    plain, dropped = model(x, t, y).numpy(), model(x, t, y, randomness=random).numpy()
    null = model(x, t, np.full(64, 4, np.int32)).numpy()
    changed = np.abs(dropped - plain).max((1, 2, 3)) > 1e-5
    assert 16 < changed.sum() < 48
    np.testing.assert_allclose(dropped[changed], null[changed], atol=1e-5)
    np.testing.assert_array_equal(dropped, model(x, t, y, randomness=random).numpy())


def test_a_chunk_that_is_not_used_and_one_that_is_used_twice(engine, rng):
    x = Tensor(engine(rng.standard_normal((3, 8))), requires_grad=True)
    g = rng.standard_normal((3, 4))
    with Tape() as tape:
        _, second = F.chunk(x, 2)
        y = F.add(second, second)
    tape.backward(y, engine(g))
    engine.check(x.grad, np.concatenate((np.zeros((3, 4)), 2 * g), axis=1), 1e-6)


@pytest.mark.parametrize("options", [{}, LIGHTNING], ids=["dit", "lightning"])
@pytest.mark.parametrize("recorded", [True, False])
def test_the_block_computes_the_two_lines_of_the_paper(rng, options, recorded):
    """`Block.forward` and `Block.forward_reference`: tokens, the norm that follows, and the gradients
    of all parameters and inputs."""
    model = tiny(hidden_size=64, **options)
    block, after = model.blocks[0], model.blocks[1]
    for parameter in model.parameters.parameters.values():
        parameter.data[:] += 0.1 * rng.standard_normal(parameter.shape).astype(np.float32)
    tokens, *vectors = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((3, 16, 64), *[(3, 64)] * 8)
    )
    dx, dy = (rng.standard_normal((3, 16, 64)).astype(np.float32) for _ in range(2))
    shift = options.get("shift", True)

    def run(fused):
        model.parameters.begin_gradients()
        x, *rows = (Tensor(array, requires_grad=True) for array in (tokens, *vectors))
        own, theirs = block.modulation(rows[: 6 if shift else 4]), rows[6:]
        if not shift:
            theirs = None, theirs[1]
        with Tape() as tape:
            if fused:
                y = block.norm1(x, *own[:2])
                following = after.norm1, *theirs, after.attn.qkv.weight
                z, y = block(x, y, own, following, model.rotation)
            else:
                z = block.forward_reference(x, own, model.rotation)
                y = after.norm1(z, *theirs)
        z.slot.receive(dx)
        tape.backward(y, dy)
        model.parameters.end_gradients()
        gradients = [row.grad for row in (x, *rows) if row.grad is not None]
        return [z.data, y.data, *gradients, model.parameters.grad.copy()]

    def run_without_tape(fused):
        x, *rows = (Tensor(array) for array in (tokens, *vectors))
        own = block.modulation(rows[: 6 if shift else 4])
        if not fused:
            return [block.forward_reference(x, own, model.rotation).data]
        y = block.norm1(x, *own[:2])
        following = after.norm1, rows[6] if shift else None, rows[7], after.attn.qkv.weight
        return [block(x, y, own, following, model.rotation)[0].data]

    function = run if recorded else run_without_tape
    for got, want in zip(function(True), function(False), strict=True):
        assert np.abs(want).max() > 0.1 and relative_error(got, want) < 1e-5


@exhaustive  # test_half.py has the kernel
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.usefixtures("few_frequencies")
def test_gates_within_the_products_give_the_same_bits(rng, mlp, monkeypatch):
    """In 16 bits on Hopper, which the emulator is, a block's two products before a gate take it in
    without a tape."""
    monkeypatch.setattr(linear, "GATE_COLUMNS", 0)
    monkeypatch.setattr(linear, "GATE_ROUNDS", 0)  # for few tokens, too
    backend = get_emulator(float64=False)
    sizes = {"in_channels": 4, "depth": 1, "num_heads": 1, "mlp_ratio": 1}
    model = tiny(**sizes, mlp=mlp, num_classes=None, learn_sigma=False, device=backend)
    fill(model, rng)
    model.compute_in_half()
    x, t = rng.standard_normal((1, 8, 8, 4)).astype(np.float32), np.array([500], np.int32)

    def answer():
        backend.launched.clear()
        found = download(model(Tensor(upload(x, backend)), upload(t, backend)).data)
        return found, {
            name
            for _, name in backend.launched
            if name.endswith("_gate") or name.startswith("gate_adaln")
        }

    alone, fused = answer()
    with Tape():
        recorded, apart = answer()
    assert fused == {"gemm_hopper_64_nt_gate"} and apart == {"gate_adaln_forward_kernel_v2_1"}
    np.testing.assert_array_equal(alone, recorded)
    assert np.abs(alone).max() > 0


def test_sparse_attention_starts_as_attention_to_what_it_chooses(rng):
    """…to all with a share of 1, whatever else: its layer is zero. It counts less arithmetic, and
    more parameters."""
    # 289 tokens, 5 blocks, one of a row too many
    options = {"image_size": 34, "patch_size": 2, "depth": 1}
    full, sparse = tiny(**options), tiny(**options, attention="sla", sla_topk=1.0)
    arrays = fill(full, rng).arrays()
    new = {name: array for name, array in sparse.arrays().items() if name not in arrays}
    assert [*new] == ["blocks.0.attn.proj_l.weight", "blocks.0.attn.proj_l.bias"] and not any(
        map(np.any, new.values())
    )
    sparse.load_arrays({name: arrays.get(name, array) for name, array in sparse.arrays().items()})
    x = rng.standard_normal((2, 34, 34, 3))
    np.testing.assert_allclose(sparse.predict(x, 3, 1), full.predict(x, 3, 1), rtol=1e-4, atol=1e-5)
    few = tiny(**options, attention="sla", sla_topk=0.2)
    assert (
        forward_flops(few) < forward_flops(full)
        and dit_parameter_counts(few.options)[1] == few.parameters.trained
    )
    fewer = forward_flops(full) - forward_flops(few)
    assert fewer == 4 * 289 * (289 - 64) * 32 - 6 * 289 * 32 * 16


def test_the_linear_part_over_all_keys(rng):
    """`sla_linear` reaches the kernels of both passes."""
    x = rng.standard_normal((1, 130, 96)).astype(np.float32)
    for choice, all_keys in (("rest", False), ("all", True)):
        attn = (
            fill(tiny(image_size=18, depth=1, attention="sla", sla_linear=choice), rng)
            .blocks.modules[0]
            .attn
        )
        leaf, (weight, bias) = Tensor(x, requires_grad=True), (attn.proj_l.weight, attn.proj_l.bias)
        with Tape() as tape:
            y = F.sparse_linear_attention(leaf, 2, 0.5, weight, bias, "new", attn.all_keys)
        tape.backward(y, y.data)
        want, kept = K.sla_forward(x, weight.data, bias.data, 2, 0.5, "new", all_keys=all_keys)
        np.testing.assert_array_equal(y.data, want)
        np.testing.assert_array_equal(
            leaf.grad,
            K.sla_backward(
                want, x, want, kept, weight.data, bias.data, None, None, 2, "new", all_keys=all_keys
            ),
        )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"patch_size": 3},
            "image_size 8 is not divisible by patch_size 3: use a patch_size of 2 or 4 or 8",
        ),
        ({"num_heads": 5}, "32 does not divide into 5 heads"),
        ({"hidden_size": 30}, "multiple of 4"),
        ({"class_dropout": 1.0}, "class_dropout"),
        ({"num_classes": 0}, "num_classes 0"),
        ({"depth": 0}, "at least 1"),
        ({"mlp_ratio": 0.01}, "mlp_ratio"),
        ({"norm": "batch"}, "norm 'batch' does not exist: use layer or rms"),
        ({"mlp": "relu"}, "mlp 'relu' does not exist: use gelu or swiglu"),
        ({"qk_norm": 1}, "qk_norm must be True or False"),
        ({"attention": "flash"}, "attention 'flash' does not exist: use full or sla"),
        (
            {"attention": "sla"},
            "blocks of 64 tokens, and an image has 16, which is one block: use larger images",
        ),
        (
            {"attention": "sla", "image_size": 18, "sla_topk": 0.0},
            "--sla-topk 0 is no share of the blocks",
        ),
        (
            {"rope": True, "hidden_size": 36, "num_heads": 6},
            "4 must divide their number 6: change num_heads",
        ),
        (
            {"mlp": "swiglu", "mlp_ratio": 1 / 32},
            "mlp_ratio 0.03125 leaves the MLP without channels",
        ),
    ],
)
def test_options_that_cannot_be_laid_out_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        tiny(**options)


def test_wrong_inputs_are_named():
    model = tiny()
    x = np.zeros((2, 8, 8, 3))
    with pytest.raises(UsageError, match="has classes"):
        model.predict(x, 0)
    with pytest.raises(UsageError, match="classes 0 to 3, and 4 for no class"):
        model.predict(x, 0, [0, 5])
    with pytest.raises(UsageError, match="classes 0 to 3[.]"):
        tiny(class_dropout=0.0).predict(x, 0, [0, 4])
    with pytest.raises(UsageError, match="has no classes"):
        tiny(num_classes=None).predict(x, 0, 1)
    arrays = model.arrays()
    arrays["pos_embed"] = np.zeros((1, 16, 32))
    with pytest.raises(NumdiffError, match="unexpected pos_embed"):
        model.load_arrays(arrays)


def test_the_names_are_those_of_the_options_and_flops_are_counted_once():
    assert set(MODELS) == set(ARCHITECTURES)
    assert sum(size["patch_size"] == 4 for size in MODELS.values()) >= 4
    model = tiny()
    assert forward_flops(model) == dit_forward_flops(model.options)
    # Peebles and Xie, table 1: 119 Gflops, a multiply-add as one, for DiT-XL/2 at 32×32×4
    xl = {
        **model.options,
        **MODELS["DiT-XL/2"],
        "image_size": 32,
        "in_channels": 4,
        "num_classes": 1000,
    }
    assert dit_forward_flops(xl) / 2 == pytest.approx(118.6e9, rel=0.01)
    # a SwiGLU has three products of two thirds of the width, and leaves the arithmetic as it was
    assert dit_forward_flops({**xl, **LIGHTNING, "shift": True}) == dit_forward_flops(xl)
    shifts = 28 * 2 * 2 * 1152 * 1152
    assert dit_forward_flops({**xl, "shift": False}) == dit_forward_flops(xl) - shifts


def test_one_product_conditions_all_blocks_or_each_has_its_own():
    device = EmulatorDevice(float64=False)
    device.launch = lambda *_: None
    sizes = {"in_channels": 4, "hidden_size": 64, "depth": 6, "num_classes": None}
    model = tiny(**sizes, device=device, seed=None)
    assert model.conditioning_columns() == ([384] * 6 + [128], np.float32)
    model.compute_in_half()
    assert model.conditioning_columns() == ([6 * 384, 128], np.float16)
    # then each by itself, as one kernel writes all gradients or none
    model.parameters.freeze(["blocks.2.*"])
    assert model.conditioning_columns() == ([384] * 6 + [128], np.float16)
    assert [doubling(count) for count in (1, 3, 12, 28)] == [
        [1],
        [2, 1],
        [2, 2, 4, 4],
        [2, 2, 4, 8, 12],
    ]
