"""The cost functions of the project's operations against what the emulator counts.

A cost counts the traffic that perfect caches would leave: every byte once in each launch. FLOPs of
a cost count each function (exp, tanh) as one. Each version of each operation runs the first problem
of its record. BEYOND has what a kernel moves and computes in addition to the cost.
"""

import contextlib
import inspect
import pathlib
import types

import numpy as np
import pytest

from numdiff.benchmark.costs import cost_of, extents
from numdiff.device import download, upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.emulator.counts import Recorder
from numdiff.extras.convnext import depthwise
from numdiff.extras.fp8 import matmul as fp8_matmul
from numdiff.extras.kernel_check import records
from numdiff.extras.kernel_check import run as checking
from numdiff.extras.sla import kernels as sla
from numdiff.extras.transports import reduce as peer_reduce
from numdiff.float8 import bits_of
from numdiff.kernels import bias, conv2d
from numdiff.kernels.concat import Pair
from numdiff.kernels.groupnorm import groupnorm_forward
from numdiff.kernels.linear import layer as linear
from numdiff.kernels.linear.gradients import (
    linear_gradients_backward,
    linear_gradients_backward_cost,
)
from numdiff.kernels.linear.stack import (
    linear_stack_backward,
    linear_stack_backward_cost,
    linear_stack_forward,
    linear_stack_forward_cost,
)
from numdiff.kernels.matmul import (
    matmul_forward,
    matmul_forward_cost,
    matmul_pair_forward,
    matmul_pair_gradient,
)
from numdiff.kernels.matmul.pair import matmul_pair_forward_cost, matmul_pair_gradient_cost
from numdiff.kernels.operation import OPERATIONS
from numdiff.kernels.reduce.second_pass import Sum, add_parts, add_parts_cost
from numdiff.kernels.reduce.trees import column_sum
from tests.conftest import exhaustive, exhaustively

RNG = np.random.default_rng(0)
float16, float32 = np.float16, np.float32
checking.all_kernels()  # imports their modules

# {operation: {extent: what its cost takes}} of its first problem, where arrays' contents say it
EXTENTS = {
    "peer_reduce_pieces": {"n": 36, "ranks": 1},
    "squares_of_pieces": {"n": 4 + 1032 + 8, "pieces": 3},
    "zero_ranges": {"n": 13 - 8 + 2103 - 40},
}


# {operation: (bytes, FLOPs) in addition to its cost, or {version: these}}; none where it is not
# named. Bytes: small arrays, such as tables, weights and statistics, partial sums between two
# passes, gradients that are added to; negative where padding is not read. FLOPs: trees of sums,
# and what each thread computes for itself; negative where the kernel leaves out products with
# padding, or the compiler folds a sign; None: no fewer than the cost, since tiles are filled with
# zeros or trees are much at so few elements.
BEYOND = {
    "adaln": {1: (0, None), 2: (0, 2880)},
    "adaln_backward": (0, None),
    "adamw_update": {1: (16, 312), 2: (16, 60), 3: (16, 60)},
    "attention": (0, None),
    "attention_backward": (0, None),
    "bias_gelu_backward": {1: (288, 2612), 2: (288, None)},
    "bias_relu": (32, -120),
    "blend": (-96, 0),
    "cast": (-30, 0),
    "class_dropout": (-16, 0),
    "column_sum": {2: (0, 492), 3: (0, 2352)},
    "columns_of": (2724, None),
    "conv2d": {1: (0, -10240), 2: (5184, None), 3: (0, None), 7: (14400, None)},
    "conv2d_backward": {1: (720, -13160), 2: (10064, None), 3: (23760, None), 7: (46512, None)},
    "conv2d_input_gradient": (0, None),
    "conv2d_weight_gradient": (448, None),
    "depthwise": (132, -240),
    "depthwise_input_gradient": (108, -300),
    "depthwise_layernorm": (1320, None),
    "depthwise_weight_gradient": (216, -165),
    "dropout": (12, 0),
    "dropout_backward": (12, 0),
    "ema_update": {1: (8, 48), 2: (8, 12)},
    "embedding": (-16, 0),
    "embedding_backward": (-48, 24),
    "estimate_x_0": (8, 0),
    "flash_attention": (0, None),
    "flash_attention_backward": {1: (3936, None), 2: (816, None), 4: (816, None)},
    "gate_adaln": {1: (960, 2880), 2: (0, 2640)},
    "gate_adaln_backward": {1: (4848, None), 2: (0, None)},
    "gate_backward": {2: (0, None)},
    "gelu_backward": (0, 30),
    "gelu_erf": (0, -360),
    "global_norm": {1: (12, 512), 2: (12, 1280)},
    "groupnorm": {1: (160, None), 2: (1024, None), 3: (160, None)},
    "groupnorm_backward": {1: (960, None), 2: (4160, None), 3: (964, 1064)},
    "guide": (-24, -18),
    "halved_conv2d": (32, None),
    "hybrid_loss": (240, 711),
    "hybrid_loss_backward": (232, 381),
    "im2col_backward": (-800, -200),
    "images": (8, 0),
    "l1": (12, 416),
    "l1_backward": (4, 96),
    "latch_nonfinite": (-4, 0),
    "latch_skips": (4, 0),
    "layernorm": {1: (328, None), 2: (328, 2400)},
    "layernorm_backward": {1: (800, None), 2: (1376, None), 3: (40, None)},
    "learned_step": (16, 48),
    "learning_rate": (0, -5),
    "linear": (32, None),
    "linear_backward": (224, None),
    "loss_scale_update": (-8, 1),
    "matmul": {1: (96, 960), 2: (96, None), 3: (96, None), 4: (96, None)},
    "matmul_fp8": (808, None),
    "matmul_fp8_gelu": (424, None),
    "matmul_fp8_gelu_backward": (8, None),
    "matmul_fp8_gradient": (8, None),
    "matmul_fp8_swiglu": (328, None),
    "matmul_fp8_swiglu_backward": (1608, None),
    "matmul_pair": (-2560, None),
    "matmul_pair_backward": (-2592, None),
    "matmul_pair_gradient": (1056, None),
    "model_input": (16, 0),
    "mse": {1: (12, 512), 2: (12, 1408)},
    "mse_backward": {1: (4, 128), 2: (4, 32)},
    "muon_apply": (28, 120),
    "muon_momentum": (64, None),
    "newton_schulz": (-1024, None),
    "patches": (-160, 0),
    "peer_reduce_pieces": (48, 0),
    "pixels": (0, 144),
    "pool": {1: (-320, 0), 2: (-320, -368)},
    "posterior_kl": (12, 512),
    "posterior_kl_backward": (4, 0),
    "posterior_sample_backward": (0, 128),
    "power_ema_update": {1: (16, 192), 2: (16, 48)},
    "q_sample": (24, 0),
    "qk_norm_rope": {1: (0, 288), 2: (0, None)},
    "qk_norm_rope_backward": {1: (8608, None), 2: (384, None)},
    "quantise": (4, 2368),
    "quantise_both": (804, None),
    "quantise_weights": (-120, None),
    "random_normal": {1: (12, 300), 2: (12, 0)},
    "random_uniform": (12, 0),
    "resize": (48, 0),
    "rmsnorm": {1: (164, None), 2: (164, 1800)},
    "rmsnorm_backward": {1: (1912, None), 2: (2200, None)},
    "root_of_sum": (0, 256),
    "sample_sum": {2: (0, 496), 3: (0, 2480)},
    "scale_shift_backward": {2: (0, None)},
    "scale_update": (264, 4),
    "share_largest": (24, 0),
    "silu": (0, -15),
    "single_head_attention": (0, None),
    "sla": (10176, -87739),  # the cost is of keys in whole blocks
    "sla_backward": (23160, -63136),
    "softmax": {1: (0, 465), 2: (0, 3444)},
    "softmax_backward": {1: (0, 381), 2: (0, 480)},
    "squares_of_pieces": (0, None),
    "swiglu": (0, 36),
    "timestep_embedding": (0, 675),
    "timesteps_ahead": (36, 0),
    "upsample": (0, 384),
    "upsampled_conv2d": (128, None),
    "velocity": (24, 0),
    "weigh": (16, 0),
    "weighted_sum": (4, 0),
    "zero_ranges": (32, 0),
}
LONG = set(
    """
    adaln adaln_backward attention attention_backward bias_gelu_backward columns_of conv2d
    conv2d_backward conv2d_input_gradient conv2d_level conv2d_weight_gradient
    depthwise_layernorm flash_attention flash_attention_backward gate_adaln
    gate_adaln_backward gate_backward groupnorm groupnorm_backward halved_conv2d layernorm
    layernorm_backward linear linear_backward matmul matmul_fp8 matmul_fp8_gelu
    matmul_fp8_gelu_backward matmul_fp8_gradient matmul_fp8_swiglu matmul_fp8_swiglu_backward
    matmul_level matmul_mma_level matmul_pair matmul_pair_backward matmul_pair_gradient
    muon_momentum newton_schulz qk_norm_rope qk_norm_rope_backward quantise_both
    quantise_weights rmsnorm rmsnorm_backward sample_sum scale_shift_backward scale_update
    share_largest single_head_attention sla sla_backward squares_of_pieces upsampled_conv2d
    """.split()
)  # of the exhaustive part
ELSEWHERE = {"add_parts", "fused", "levels"}  # several sums at once; a part of other costs


def problem_of(record):
    """The first problem that calls the operation itself; None if there is none."""
    return next(
        (p for p in record.problems if not (p.measured or p.run or p.call or p.only_compiled)),
        None,
    )


def cases():
    """(operation, version) of each that a problem calls and whose cost has known extents."""
    for name, record in sorted(OPERATIONS.items()):
        if record.cost is None or name in ELSEWHERE or problem_of(record) is None:
            continue
        for version in records._versions(record, problem_of(record)):
            yield pytest.param(
                name, version, marks=[exhaustive] if name in LONG else [], id=f"{name}-v{version}"
            )


def counted(name, version):
    """(bytes, FLOPs) that the emulator counts in addition to the cost, which `numdiff bench kernels`
    finds, too, or does not know."""
    record = OPERATIONS[name]
    problem, recorder = problem_of(record), Recorder()
    device = EmulatorDevice(recorder=recorder, checks=False)
    made = problem.make(np.random.default_rng(0))
    arrays = {name: upload(array, device) for name, array in made.items()}
    values = records._values(record, problem, arrays)
    wanted = inspect.signature(record.cost).parameters
    known = values if wanted.keys() <= values.keys() else extents(values)
    if name in EXTENTS:
        known = {**known, **EXTENTS[name]}
    moved, flops = record.cost(**{key: known[key] for key in wanted if key in known})
    benchmarked = cost_of(record.call, values, ())[1]
    assert benchmarked == flops or name in EXTENTS and not benchmarked
    with problem.within() if problem.within else contextlib.nullcontext():
        records._results(record, problem, types.SimpleNamespace(**arrays), version)
    t = recorder.total()
    return t.distinct_bytes - moved, t.total_flops + t.special + t.tensor_flops - flops


@pytest.mark.parametrize("name, version", list(cases()))
def test_costs(name, version):
    given = BEYOND.get(name, (0, 0))
    moved, flops = given.get(version, (0, 0)) if isinstance(given, dict) else given
    got_moved, got_flops = counted(name, version)
    assert got_moved == moved
    assert got_flops >= 0 if flops is None else got_flops == flops


def test_a_cost_is_counted_for_every_operation():
    """A cost function without a count may be wrong."""
    counted = {case.values[0] for case in cases()}
    source = pathlib.Path(__file__).read_text(encoding="utf-8")
    missing = {
        name
        for name, record in OPERATIONS.items()
        if record.cost and name not in counted and record.cost.__name__ not in source
    }
    assert missing == {
        "levels",
        "linear_group",
        "linear_group_backward",
    }  # a few bytes; to be counted


# Operations one by one ----------------------------------------------------------------------------


class Counted:
    """Runs an operation on an emulated device and keeps its figures."""

    def __init__(self, operation):
        recorder = Recorder()
        self.device = EmulatorDevice(recorder=recorder, checks=False)
        operation(self)
        self.recorder, self.total = recorder, recorder.total()

    def __call__(self, *shape):
        return upload(RNG.standard_normal(shape).astype(np.float32), self.device)

    def full(self, value, *shape):
        return upload(np.full(shape, value, np.float32), self.device)


def half(u, *shape):
    return upload(RNG.standard_normal(shape).astype(float16), u.device)


def number(u, value, dtype, count=1):
    return upload(np.full(count, value, dtype), u.device)


@pytest.mark.parametrize("version", [1, 2])
def test_matmul_cost(version):
    M, N, K = 16, 32, 32
    counted = Counted(lambda u: matmul_forward(u(M, K), u(K, N), version=version))
    t = counted.total
    moved, flops = matmul_forward_cost(1, M, N, K)
    assert t.distinct_bytes == moved
    assert t.total_flops == flops + M * N  # alpha times each sum
    # a tile of 16 × 16 is fetched once for 16 products
    asked = {1: 2 * M * N * K, 2: 2 * M * N * K // 16}[version]
    assert t.reads["global"] == asked
    if version == 2:
        inner = counted.recorder.line("total += tile_a[y, k] * tile_b[k, x]")
        assert inner.flops["float32"] == flops and inner.conflicts == 0
        assert inner.reads["shared"] == flops


@exhaustive
def test_costs_of_depthwise_products():
    """16 × 16 pixels of 16 channels: bands of 16 × 8 where a run of 8 outputs has 3 taps; the
    forward pass writes its planes without bank conflicts, the weight gradient takes 15 turns where
    11 would do."""

    shape, taps = (1, 16, 16, 16), (3, 3, 16)
    forward = Counted(
        lambda u: depthwise.depthwise_forward(half(u, *shape), half(u, *taps), version=3)
    )
    gradient = Counted(
        lambda u: depthwise.depthwise_weight_gradient(
            half(u, *shape), half(u, *shape), u(*taps), version=3
        )
    )
    moved, flops = depthwise.depthwise_forward_cost(*shape, 3, 2)
    assert forward.total.distinct_bytes == moved + 2 * 9 * 16
    assert forward.total.tensor_flops == gradient.total.tensor_flops == flops * 16 // 3
    assert gradient.total.distinct_bytes == moved + 4 * 4 * 9 * 16
    for counted, requests, conflicts in ((forward, 56, 0), (gradient, 88, 32)):
        for text in ("low_halves", "high_halves"):
            written = counted.recorder.line(text)
            assert (written.shared_requests, written.conflicts) == (requests, conflicts)


@exhaustive
def test_costs_of_depthwise_products_by_tma():
    """A tile of 16 × 32 pixels, half of them outside: 16 × 8 of a band for 16 × 8 outputs of a row
    of taps; a lane's four channels are half of 16 bytes, so every access to shared memory takes
    twice its share of the banks."""

    shape, taps = (1, 16, 16, 16), (3, 3, 16)
    moved, flops = depthwise.depthwise_forward_cost(*shape, 3, 2)
    forward = Counted(
        lambda u: depthwise.depthwise_forward(half(u, *shape), half(u, *taps), version=4)
    ).total
    assert forward.distinct_bytes == moved + 2 * 9 * 16
    # of four warps: 6 of each of 6 rows of a strip, 4 of each of 4
    reads, writes = 4 * 6 * (4 + 2), 4 * 4 * 4
    assert forward.shared_requests == reads + writes and forward.conflicts == 2 * (reads + writes)
    gradient = Counted(
        lambda u: depthwise.depthwise_weight_gradient(
            half(u, *shape), half(u, *shape), u(*taps), version=4
        )
    ).total
    assert forward.tensor_flops == gradient.tensor_flops == 2 * flops * 16 // 3
    assert gradient.distinct_bytes == moved + 4 * 4 * 9 * 16


def pair(u):
    return Pair(half(u, 128, 64), half(u, 128, 64))


def two_layers(u, flat, N=128, K=64):
    """([weight], [bias]) of two layers whose weights follow each other in `flat`."""
    vectors = u(2 * N)
    return (
        [flat[at : at + N * K].reshape(N, K) for at in (0, N * K)],
        [vectors[:N], vectors[N:]],
    )


def stack_forward(u):
    linear_stack_forward(half(u, 128, 64), [*zip(*two_layers(u, half(u, 16384)), strict=True)])


def stack_backward(u):
    x, dy, weights = half(u, 128, 64), half(u, 128, 256), two_layers(u, half(u, 16384))[0]
    linear_stack_backward(dy, x, weights, [*zip(*two_layers(u, u(16384)), strict=True)], False)


GRADIENTS = (128, 256), (256, 256)


def gradients_together(u):
    linear_gradients_backward(
        [(*(half(u, 128, n) for n in size), u(*size), u(size[0])) for size in GRADIENTS], False
    )


def e4m3(u, *shape):
    return upload(bits_of(RNG.standard_normal(shape).astype(float32)), u.device)


# {name: (what runs, the FLOPs of its cost)}: shapes that tiles divide, so that nothing is padded
PRODUCTS = {
    "pair": (
        lambda u: matmul_pair_forward(pair(u), half(u, 64, 128)),
        matmul_pair_forward_cost(128, 64, 128)[1],
    ),
    "gradient of a pair": (
        lambda u: matmul_pair_gradient(half(u, 128, 128), pair(u), u(128, 128)),
        matmul_pair_gradient_cost(128, 128, 128)[1],
    ),
    "stack": (stack_forward, linear_stack_forward_cost(128, 64, 256)[1]),
    "backward of a stack": (stack_backward, linear_stack_backward_cost(128, 64, 256)[1]),
    "gradients that come together": (
        gradients_together,
        linear_gradients_backward_cost(128, GRADIENTS, False)[1],
    ),
    "E4M3": (
        lambda u: fp8_matmul.matmul_fp8_forward(e4m3(u, 128, 128), e4m3(u, 64, 128), u(1), u(1)),
        fp8_matmul.matmul_fp8_forward_cost(128, 64, 128)[1],
    ),
    "E4M3 and GELU": (
        lambda u: fp8_matmul.matmul_fp8_gelu_forward(
            e4m3(u, 128, 128), e4m3(u, 64, 128), u(1), u(1), u(64)
        ),
        fp8_matmul.matmul_fp8_gelu_forward_cost(128, 64, 128)[1],
    ),
    "E4M3 and SwiGLU": (
        lambda u: fp8_matmul.matmul_fp8_swiglu_forward(
            e4m3(u, 128, 128), e4m3(u, 128, 128), u(1), u(1)
        ),
        fp8_matmul.matmul_fp8_swiglu_forward_cost(128, 128, 128)[1],
    ),
    "gradient of E4M3": (
        lambda u: fp8_matmul.matmul_fp8_gradient(
            e4m3(u, 128, 128), e4m3(u, 64, 128), u(1), u(1), u(128, 64)
        ),
        fp8_matmul.matmul_fp8_gradient_cost(128, 64, 128)[1],
    ),
}


@exhaustive
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_cost_what_tensor_cores_do(name):
    operation, flops = PRODUCTS[name]
    assert Counted(operation).total.tensor_flops == flops


@pytest.mark.parametrize("adds", [False, True])
def test_second_pass_costs(adds):
    count, n = 4, 1024
    t = Counted(lambda u: add_parts([Sum(u(count * n), count, u(n), adds)])).total
    assert t.distinct_bytes == add_parts_cost(count, n, adds)[0] == 4 * n * (5 + adds)
    # threads add zeros of parts, too
    assert t.total_flops >= add_parts_cost(count, n, adds)[1] == n * (3 + adds)


def test_groupnorm_version_1_wastes_sectors():
    """Its docstring: a group of 4 channels is 16 bytes of each pixel, and the memory delivers whole
    sectors."""
    t = Counted(lambda u: groupnorm_forward(u(1, 32, 32), u(32), u(32), 8, version=1)).recorder
    line = t.line("C + group * width + e % width]")
    assert line.efficiency == 0.5


@pytest.mark.parametrize("version", [1, 2])
def test_peer_costs(version):
    """Four ranks of one device, one after the other: in addition to the peers' slices, each reads
    its own."""
    n, ranks = 64, 4

    def reduce_all(u):
        buffers = [u(n) for _ in range(ranks)]
        for step in peer_reduce.peer_reduce_scatter, peer_reduce.peer_all_gather:
            for rank in range(ranks):
                step(buffers, rank, version=version)

    t = Counted(reduce_all).total
    read, flops = peer_reduce.peer_all_reduce_cost(n, ranks)
    assert t.read_bytes["global"] == ranks * read + 4 * n
    assert t.total_flops == ranks * flops


def test_costs_of_bias_gradients():
    t = Counted(lambda u: bias.channel_add_backward(u(2, 8, 32))).total
    moved, flops = bias.channel_add_backward_cost(2, 8, 32)
    assert t.distinct_bytes == moved and t.total_flops >= flops
    t = Counted(lambda u: column_sum(u(16, 32), version=1)).total
    assert (t.distinct_bytes, t.total_flops) == bias.bias_add_backward_cost(16, 32)


def test_linear_costs():
    """A 64 × 64 tile is computed whole: at these sizes all of it is wanted."""
    rows, n, k = 64, 64, 16
    t = Counted(lambda u: linear.linear_forward(u(rows, k), u(n, k), u(n))).total
    moved, flops = linear.linear_forward_cost(rows, n, k)
    assert t.distinct_bytes == moved + 4 * n  # bias
    assert t.total_flops == flops + 2 * rows * n  # alpha and bias


@pytest.mark.parametrize(
    "size, c, n, stride", [*exhaustively((3, 8, 20, 1), (4, 3, 19, 1)), (5, 4, 8, 2)]
)
def test_convolution_costs(size, c, n, stride):
    """Version 1 leaves out the products with padding, which the cost counts as everyone does: each
    is accounted."""
    out = -(-size // stride)
    # taps inside, along one axis
    along = sum(0 <= o * stride + k - 1 < size for o in range(out) for k in range(3))
    products = along**2 * c * n
    moved, flops = conv2d.conv2d_forward_cost(1, size, size, c, n, 3, stride)
    t = Counted(
        lambda u: conv2d.conv2d_forward(u(1, size, size, c), u(n, 3, 3, c), u(n), stride, version=1)
    ).total
    assert t.distinct_bytes == moved
    assert t.total_flops == 2 * products
    assert flops - t.total_flops == 2 * (9 * out**2 - along**2) * c * n

    parts = [
        function(1, size, size, c, n, 3, stride)
        for function in (conv2d.conv2d_input_gradient_cost, conv2d.conv2d_weight_gradient_cost)
    ]
    backward = conv2d.conv2d_backward_cost(1, size, size, c, n, 3, stride)
    assert backward == tuple(map(sum, zip(*parts, strict=True)))


@exhaustive
@pytest.mark.parametrize("HS", [32, 72])
def test_sparse_linear_attention_costs(HS):
    """Of full blocks the tensor cores do what is counted, and S and dP of the backward once more;
    of heads of 72, eight rows of zeros for the last eight of H."""
    T, count = 128, 1
    rng, half, results = np.random.default_rng(0), {}, []
    for name, shape in (("qkv", (1, T, 3 * HS)), ("dy", (1, T, HS)), ("weight", (HS, HS))):
        half[name] = rng.standard_normal(shape).astype(float16)

    def given(u):
        return {name: upload(a, u.device) for name, a in half.items()}

    def forward(u):
        a = given(u)
        y, kept = sla.sla_forward(a["qkv"], a["weight"], u.full(0, HS), 1, 0.5, version=2)
        results.extend(download(x) for x in (y, *kept))

    def backward(u):
        a, (y, *kept) = given(u), [upload(x, u.device) for x in results]
        sla.sla_backward(
            a["dy"],
            a["qkv"],
            y,
            sla.Kept(*kept),
            a["weight"],
            u.full(0, HS),
            u.full(0, HS, HS),
            u.full(0, HS),
            1,
            version=2,
        )

    zeros = 2 * T * HS * (HS % 16)
    assert (
        Counted(forward).total.tensor_flops == sla.sla_forward_cost(1, T, HS, 1, count)[1] + zeros
    )
    if HS == 72:  # the backward, in half a minute, has nothing else
        return
    again = 2 * 2 * T * 64 * count * HS
    assert (
        Counted(backward).total.tensor_flops == sla.sla_backward_cost(1, T, HS, 1, count)[1] + again
    )
