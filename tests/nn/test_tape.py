import gc
import weakref

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import download, zeros
from numdiff.device.emulator import EmulatorDevice
from numdiff.extras.convnext import depthwise
from numdiff.extras.convnext.block import DepthwiseConv2d, LayerScale
from numdiff.nn import Tape, Tensor, slots
from numdiff.nn import functional as F
from numdiff.nn.layers import LayerNorm, Linear
from numdiff.nn.module import FlatParameters, Module
from numdiff.nn.parameter import Parameter
from numdiff.nn.recording import check_finite
from tests.conftest import exhaustive, numerical_gradient, on, relative_error
from tests.models import small_unet, with_random_weights
from tests.nn.steps import unet


def test_gradient_of_a_shared_input_is_the_sum(engine, rng):
    x = rng.standard_normal((3, 8))
    dy = rng.standard_normal((3, 8))

    def value(v):
        s = v / (1 + np.exp(-v))
        return s + v + s

    leaf = Tensor(engine(x), requires_grad=True)
    with Tape() as tape:
        s = F.silu(leaf)
        y = F.add(F.add(s, leaf), s)
    tape.backward(y, engine(dy))
    engine.check(leaf.grad, numerical_gradient(value, x, dy), 1e-5)


def test_what_others_gave_is_added_where_the_kernel_can(engine, rng, monkeypatch):
    """A skip of a UNet: three gradients of one array, and no kernel that only adds, whatever is
    done with it next."""
    added = []
    monkeypatch.setattr(
        slots, "add_forward", lambda a, b: added.append(a.shape) or K.add_forward(a, b)
    )
    x, weight, bias, dy = (rng.standard_normal(s) for s in ((2, 4, 4, 8), (8,), (8,), (2, 4, 4, 8)))

    def parameter(data):
        made = Parameter(data.shape, None)
        made.data, made.grad = engine(data), engine.zeros(data.shape)
        return made

    def gradient(reader):
        leaf = Tensor(engine(x), requires_grad=True)
        with Tape() as tape:
            y = F.add(reader(leaf), F.silu(leaf))
            if y.shape == leaf.shape:
                y = F.add(y, leaf)  # its gradient and SiLU's wait for that of `reader`
        tape.backward(y, engine(dy[:, : y.shape[1], : y.shape[2]]))
        return leaf.grad

    normalised = gradient(lambda t: F.group_norm(t, parameter(weight), parameter(bias), 4))
    assert added == []
    wide = [a.astype(np.float64) for a in (dy, x)]
    _, mean, rstd = K.groupnorm_forward(wide[1], weight, bias, 4)
    want = (
        K.groupnorm_backward(*wide, weight, bias, mean, rstd, weight * 0, bias * 0, 4)
        + K.silu_backward(*wide)
        + dy
    )
    engine.check(normalised, want, 1e-5)
    convolved = gradient(lambda t: F.conv2d(t, parameter(np.eye(8).reshape(8, 1, 1, 8))))
    assert added == [x.shape]  # which takes one gradient, of two
    engine.check(convolved, 2 * dy + K.silu_backward(*wide), 1e-5)


def test_an_average_adds_what_others_gave(engine, rng, monkeypatch):
    monkeypatch.setattr(slots, "add_forward", None)
    x, other, dy = (rng.standard_normal((2, n, n, 8)) for n in (4, 4, 2))
    leaf = Tensor(engine(x), requires_grad=True)
    with Tape() as tape:
        y = F.avgpool(leaf)
    leaf.slot.receive(engine(other))
    tape.backward(y, engine(dy))
    engine.check(leaf.grad, K.avgpool_backward(dy) + other, 1e-6)


def test_nothing_is_recorded_without_a_tape_or_without_a_need():
    x = Tensor(np.ones((2, 4), np.float32))
    assert F.silu(x).slot is None
    with Tape() as tape:
        F.silu(x)
    assert tape.records == []
    with pytest.raises(ValueError, match="requires_grad"):
        tape.backward(x)


def test_tapes_nest_and_end_with_their_context():
    x = Tensor(np.ones(4, np.float32), requires_grad=True)
    with Tape() as outer:
        F.silu(x)
        with Tape() as inner:
            F.silu(x)
    F.silu(x)
    assert len(outer.records) == len(inner.records) == 1


def test_activations_are_freed_as_the_tape_is_played_back_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        x = Tensor(np.ones((4, 4), np.float32), requires_grad=True)
        with Tape() as tape:
            a = F.silu(x)
            b = F.silu(a)
        alive = weakref.ref(a.data)
        del a
        assert alive() is not None  # the second silu keeps its input
        tape.backward(b, np.ones((4, 4), np.float32))
        assert alive() is None and tape.records == []
    finally:
        gc.enable()


def test_a_tape_is_played_once_and_only_from_what_it_holds():
    x = Tensor(np.ones(4, np.float32), requires_grad=True)
    with Tape() as tape:
        y = F.silu(x)
        z = F.silu(y)
    with Tape() as other:
        F.silu(x)
    with pytest.raises(ValueError, match="does not hold the operation"):
        other.backward(z)
    tape.backward(z)
    gradient = x.grad.copy()
    for output in (z, y):
        with pytest.raises(ValueError, match="played back only once"):
            tape.backward(output)
    np.testing.assert_array_equal(x.grad, gradient)
    with tape:  # what it records from now on can be played
        again = F.silu(x)
    tape.backward(again)
    assert (x.grad > gradient).all()


def test_check_finite_names_the_module_and_the_operation():
    model = unet()
    weights = model.arrays()
    weights["middle_block.0.in_layers.2.weight"][0] = np.inf
    model.load_arrays(weights)
    x = Tensor(np.ones((1, 8, 8, 3), np.float32))
    with (
        pytest.raises(
            FloatingPointError, match="middle_block.0.in_layers.2 conv2d is the first non-finite"
        ),
        Tape(check_finite=True),
        np.errstate(all="ignore"),
    ):
        model(x, np.zeros(1, np.int32))


def test_a_pair_gives_what_a_concatenation_gives(engine, rng):
    """A norm and a 1×1 convolution of two tensors' channels: the same bits, whether a copy is made
    or not."""
    if engine.name == "ptx":
        return  # compiled in tests/kernels
    shapes = {"norm": (80,), "norm_bias": (80,), "conv": (16, 1, 1, 80), "conv_bias": (16,)}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    dtype = np.float32 if engine.name == "cpu" else np.float16
    a, b, before, dy, dz = (rng.standard_normal((1, 2, 3, n)) for n in (64, 16, 16, 80, 16))
    results = []
    for join in (F.concat, F.pair):
        weights = {}
        for name, value in values.items():
            weights[name] = p = Parameter(value.shape, None)
            p.data, p.grad, p.half = (
                engine(value),
                engine.zeros(value.shape),
                engine(value, np.float16),
            )
        first, second = (Tensor(engine(v, dtype), requires_grad=True) for v in (a, b))
        with Tape() as tape:
            x = join(first, second)
            y = F.group_norm(x, weights["norm"], weights["norm_bias"], 5, silu=True)
            z = F.conv2d(x, weights["conv"], weights["conv_bias"])
        names = [record.name for record in tape.records]
        hopper = engine.name != "cpu" and engine.backend.capability[0] == 9
        assert names[0] == ("pair" if join is F.pair and hopper else "concat")
        second.slot.gradient = engine(before, dtype)  # what another consumer has left there
        z.slot.gradient = engine(dz, dtype)
        y.slot.receive(engine(dy, dtype))
        tape.backward(z, engine(np.zeros_like(dz), dtype))
        results.append(
            [y.data, z.data, first.grad, second.grad, *(p.grad for p in weights.values())]
        )
    for of_one, of_two in zip(*results, strict=True):
        engine.check_equal(of_one, of_two)
        assert np.abs(download(of_two).astype(np.float32)).max() > 0


def test_a_skip_that_is_added_as_it_is_is_concatenated():
    """A first block with as many channels as come in has no 1×1 convolution: it adds its input, one
    array."""
    device = EmulatorDevice(float64=False, checks=False)
    device.launch = lambda *_: None
    sizes = {"image_size": 4, "model_channels": 64, "channel_mult": (1, 2), "num_res_blocks": 0}
    model = small_unet(**sizes, device=device)
    model.compute_in_half()
    with Tape() as tape:
        y = model(Tensor(zeros((1, 4, 4, 3), np.float32, device)), zeros((1,), np.int32, device))
    assert [record.name for record in tape.records if record.name in ("pair", "concat")] == [
        "concat",
        "pair",
    ]
    tape.backward(y, zeros(y.shape, np.float32, device))
    assert y.shape == (1, 4, 4, 3)


def test_check_finite_looks_at_both_of_a_pair():
    pair = K.Pair(np.zeros((2, 3), np.float32), np.full((2, 1), np.nan, np.float32))
    with pytest.raises(FloatingPointError, match="2 of 8"):
        check_finite(pair, "pair")


def test_parameter_gradients_accumulate_over_two_backwards(rng):
    model = with_random_weights(unet(), 0.1)
    x, g = rng.standard_normal((2, 2, 8, 8, 3)).astype(np.float32)
    t = np.array([3, 500], np.int32)

    def backward():
        with Tape() as tape:
            y = model(Tensor(x), t)
        tape.backward(y, g)

    backward()
    once = model.parameters.grad.copy()
    backward()
    assert relative_error(model.parameters.grad, 2 * once.astype(np.float64)) < 1e-6
    assert np.abs(once).max() > 0


@pytest.mark.parametrize("passes", [1, 2])
def test_a_written_gradient_is_as_one_that_is_added_to_zeros(rng, passes):
    """Two layers, of which one is used twice in a pass; a third is not used at all. What the
    gradients held before the step is of no matter."""

    class Three(Module):
        def __init__(self):
            self.first, self.second, self.idle = (Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.first(F.silu(self.second(F.silu(self.first(x)))))

    model = Three()
    parameters = FlatParameters(model)
    x, dy = rng.standard_normal((2, passes, 3, 4)).astype(np.float32)

    def gradients():
        for k in range(passes):
            with Tape() as tape:
                y = model(Tensor(x[k]))
            tape.backward(y, dy[k])
        return parameters.grad.copy()

    want = gradients()
    parameters.grad[...] = np.nan
    parameters.begin_gradients()
    got = gradients()
    assert np.isnan(got).any()  # the idle layer's, still
    parameters.end_gradients()
    for name, value in parameters.arrays(parameters.grad).items():
        np.testing.assert_array_equal(value, parameters.arrays(want)[name], err_msg=name)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_an_mlp_of_fused_products_writes_its_gradients_too(monkeypatch, rng, passes, scaled):
    """Where GELU, and a layer scale, are part of the products, as on Hopper in float16: no weight
    gradient keeps the step before."""

    class Two(Module):
        def __init__(self):
            self.fc0, self.fc1, self.fc2, self.scale = (
                Linear(4, 4),
                Linear(4, 8),
                Linear(8, 4),
                LayerScale(4, 0.5),
            )

        def forward(self, x):
            more = {"scale": self.scale.weight, "residual": self.fc0(x)} if scaled else {}
            return F.mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, **more)

    model = Two()
    parameters = FlatParameters(model)
    x, dy = rng.standard_normal((2, passes, 3, 4)).astype(np.float32)

    def gradients():
        parameters.grad[...] = np.nan
        parameters.begin_gradients()
        for k in range(passes):
            with Tape() as tape:
                y = model(Tensor(x[k]))
            tape.backward(y, dy[k])
        parameters.end_gradients()
        return parameters.arrays(parameters.grad)

    apart = gradients()
    monkeypatch.setattr(K, "linear_gelu_supports", lambda *_: True)
    for name, value in gradients().items():
        np.testing.assert_allclose(value, apart[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_depthwise_convolution_and_layer_scale(engine, rng):
    """x + scale · (depthwise(x) + channel): the gradients of all that is in it."""
    backend, B, C = engine.backend, 2, 8
    layer, scale = DepthwiseConv2d(C, 3), LayerScale(C, 0.5)

    class Both(Module):
        def __init__(self):
            self.layer, self.scale = layer, scale

    FlatParameters(Both(), backend, 1)
    x, channel, dy = (
        rng.standard_normal((B, 3, 4, C)),
        rng.standard_normal((B, C)),
        rng.standard_normal((B, 3, 4, C)),
    )
    weight, bias, factor = (
        download(p.data).astype(np.float64) for p in (layer.weight, layer.bias, scale.weight)
    )

    def value(x=x, channel=channel, weight=weight, bias=bias, factor=factor):
        return x + factor * depthwise.depthwise_forward_reference(x, weight, bias, channel)

    leaf, e = Tensor(engine(x), requires_grad=True), Tensor(engine(channel), requires_grad=True)
    with Tape() as tape:
        y = scale(leaf, layer(leaf, e))
    engine.check(y.data, value(), 1e-5)
    tape.backward(y, engine(dy))
    for name, got, at in (
        ("x", leaf.grad, x),
        ("channel", e.grad, channel),
        ("weight", layer.weight.grad, weight),
        ("bias", layer.bias.grad, bias),
        ("factor", scale.weight.grad, factor),
    ):
        engine.check(got, numerical_gradient(lambda a, name=name: value(**{name: a}), at, dy), 1e-5)


@exhaustive
@on("emulator", "cuda")
def test_depthwise_convolution_and_layer_norm(engine, rng):
    """The result and the gradients of x of the two separate operations; what arrived at x before is
    added."""
    C = 8
    layer, norm = DepthwiseConv2d(C), LayerNorm(C)

    class Both(Module):
        def __init__(self):
            self.layer, self.norm = layer, norm

    parameters = FlatParameters(Both(), engine.backend, 1)
    parameters.keep_half()
    x, dy = (engine(rng.standard_normal((1, 2, 3, C)).astype(np.float16)) for _ in range(2))
    e = engine(rng.standard_normal((1, C)))

    def run(together):
        leaf, channel = Tensor(x, requires_grad=True), Tensor(e, requires_grad=True)
        parameters.begin_gradients()
        with Tape() as tape:
            if together:
                y = F.depthwise_layer_norm(
                    leaf, layer.weight, layer.bias, channel, norm.weight, norm.bias
                )
            else:
                y = F.layer_norm(
                    F.depthwise_conv2d(leaf, layer.weight, layer.bias, channel),
                    norm.weight,
                    norm.bias,
                )
            y = F.add(y, leaf)
        tape.backward(y, dy)
        return [download(a) for a in (y.data, leaf.grad, channel.grad, parameters.grad)]

    for a, b in zip(run(True), run(False), strict=True):
        assert relative_error(a, b) < 1e-3
