"""The cost functions of the project's kernels against what the emulator counts: operations one by
one.

A cost counts the traffic that perfect caches would leave: every byte once in each launch. That is
`distinct_bytes`, and is met exactly wherever the operation has no small arrays on the side. FLOPs
of a cost count each function (exp, tanh) as one; what a kernel does beyond the mathematics (trees
of sums, a second pass) is written out below. test_exact_costs.py has those for which a line is
enough.
"""

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.extras.convnext import depthwise
from numdiff.extras.fp8 import both, quantise
from numdiff.extras.fp8 import matmul as fp8_matmul
from numdiff.extras.fp8 import weights as weights_of_fp8
from numdiff.extras.sla import kernels as sla
from numdiff.float8 import bits_of
from numdiff.kernels import conv2d, dropout
from numdiff.kernels.attention import unfused as attention
from numdiff.kernels.concat import Pair
from numdiff.kernels.elementwise import (
    add_forward,
    add_forward_cost,
    cast_forward,
    cast_forward_cost,
    gelu_backward,
    gelu_backward_cost,
    gelu_forward,
    gelu_forward_cost,
    silu_backward,
    silu_backward_cost,
    silu_forward,
    silu_forward_cost,
)
from numdiff.kernels.groupnorm import (
    groupnorm_backward,
    groupnorm_backward_cost,
    groupnorm_forward,
    groupnorm_forward_cost,
)
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
from numdiff.kernels.optimizer.adamw import Rule, State, adamw_update, adamw_update_cost
from numdiff.kernels.peers import pieces as peer_pieces
from numdiff.kernels.peers import reduce as peer_reduce
from numdiff.kernels.reduce.second_pass import Sum, add_parts, add_parts_cost
from numdiff.kernels.reduce.trees import column_sum, column_sum_cost
from numdiff.kernels.softmax import (
    softmax_backward,
    softmax_backward_cost,
    softmax_forward,
    softmax_forward_cost,
)
from tests.conftest import exhaustive, exhaustively
from tests.emulator.counted import RNG, B, C, Counted, N, P, number, samples

float16, float32 = np.float16, np.float32


@pytest.mark.parametrize("version", [1, 2])
def test_elementwise_costs(version):
    n = 256
    t = Counted(lambda u: add_forward(u(n), u(n), version=version)).total
    assert (t.distinct_bytes, t.total_flops) == add_forward_cost(n)
    assert t.global_bytes == t.distinct_bytes and t.efficiency == 1

    t = Counted(lambda u: silu_forward(u(n), version=version)).total
    negations = n  # of the exponent, which the cost counts
    assert (t.distinct_bytes, t.total_flops + t.special + negations) == silu_forward_cost(n)

    t = Counted(lambda u: silu_backward(u(n), u(n), version=version)).total
    assert (t.distinct_bytes, t.total_flops + t.special) == silu_backward_cost(n)

    t = Counted(lambda u: gelu_forward(u(n), version=version)).total
    assert (t.distinct_bytes, t.total_flops + t.special) == gelu_forward_cost(n)

    t = Counted(lambda u: cast_forward(u(n), float32, version=version)).total
    assert (t.distinct_bytes, t.total_flops) == cast_forward_cost(n)

    t = Counted(lambda u: gelu_backward(u(n), u(n), version=version)).total
    moved, flops = gelu_backward_cost(n)
    assert t.distinct_bytes == moved
    folded = n  # float32(3) · GELU_CUBIC, which the compiler computes beforehand
    # the cost leaves out the tanh
    assert flops <= t.total_flops + t.special - folded <= 1.06 * flops


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

    def half(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

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

    def half(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

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


@exhaustive
def test_costs_of_a_matmul_of_two_arrays():
    rows, N, K = 128, 128, 128

    def half(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

    def pair(u):
        return Pair(half(u, rows, 64), half(u, rows, K - 64))

    forward = Counted(lambda u: matmul_pair_forward(pair(u), half(u, N // 2, K))).total
    gradient = Counted(lambda u: matmul_pair_gradient(half(u, rows, N), pair(u), u(N, K))).total
    assert forward.tensor_flops == matmul_pair_forward_cost(rows, N // 2, K)[1]
    assert gradient.tensor_flops == matmul_pair_gradient_cost(rows, N, K)[1]


@exhaustive
def test_costs_of_a_stack_of_layers():
    B, N, K, G = 128, 128, 64, 2

    def layers(u, dtype):
        flat = upload(RNG.standard_normal(G * N * K).astype(dtype), u.device)
        vectors = u(G * N)
        return (
            [flat[at : at + N * K].reshape(N, K) for at in range(0, G * N * K, N * K)],
            [vectors[at : at + N] for at in range(0, G * N, N)],
        )

    def forward(u):
        x = upload(RNG.standard_normal((B, K)).astype(float16), u.device)
        linear_stack_forward(x, [*zip(*layers(u, float16), strict=True)])

    def backward(u):
        x, dy = (
            upload(RNG.standard_normal(shape).astype(float16), u.device)
            for shape in ((B, K), (B, G * N))
        )
        linear_stack_backward(
            dy, x, layers(u, float16)[0], [*zip(*layers(u, float32), strict=True)], False
        )

    assert Counted(forward).total.tensor_flops == linear_stack_forward_cost(B, K, G * N)[1]
    assert Counted(backward).total.tensor_flops == linear_stack_backward_cost(B, K, G * N)[1]


@exhaustive
def test_costs_of_gradients_that_come_together():
    R, sizes = 128, ((128, 256), (256, 256))

    def call(u):
        linear_gradients_backward(
            [
                (
                    *(upload(RNG.standard_normal((R, n)).astype(float16), u.device) for n in size),
                    u(*size),
                    u(size[0]),
                )
                for size in sizes
            ],
            False,
        )

    counted = Counted(call).total
    assert counted.tensor_flops == linear_gradients_backward_cost(R, sizes, False)[1]


@exhaustive
def test_costs_of_e4m3():
    def halves(u, *shape):
        return upload(RNG.standard_normal(shape).astype(float16), u.device)

    def product(u):
        a, b = (
            upload(bits_of(RNG.standard_normal((rows, 128)).astype(float32)), u.device)
            for rows in (128, 64)
        )
        fp8_matmul.matmul_fp8_forward(a, b, u(1), u(1))

    def weights(u):
        flat = halves(u, 64 * 64)
        weights_of_fp8.quantise_weights(
            flat,
            weights_of_fp8.matrices8([(0, 64, 64)], flat),
            number(u, 0, np.uint8, 64 * 64),
            number(u, 0, np.uint8, 64 * 64),
            u(1),
        )

    assert (
        Counted(product).total.tensor_flops == fp8_matmul.matmul_fp8_forward_cost(128, 64, 128)[1]
    )
    n = 8 * 512
    t = Counted(
        lambda u: quantise.quantise_forward(
            halves(u, 8, 512), u(1), number(u, 0, np.uint32, quantise.PARTIALS)
        )
    ).total
    assert t.distinct_bytes == quantise.quantise_forward_cost(n)[0] + 4 + 2 * 4
    assert t.total_flops == 3 * n + 256  # each is also compared with infinity; a thread's quotient
    matrix = 64, 64
    for operation, cost, given in (
        (both.quantise_both, both.quantise_both_cost, halves),
        (both.columns_of, both.columns_of_cost, None),
    ):
        t = Counted(
            lambda u, operation=operation, given=given: operation(
                number(u, 0, np.uint8, n).reshape(*matrix) if given is None else given(u, *matrix),
                u(1),
            )
        ).total
        moved, flops = cost(n)
        assert t.distinct_bytes == moved + 4 and t.total_flops == (3 * n + 256 if flops else 256)
    # the table, read by all three launches; a tile's largest, written and read, and so the scale
    moved = Counted(weights).total.distinct_bytes
    assert (
        moved
        == weights_of_fp8.quantise_weights_cost(n)[0] + 2 * (3 * 8 + 8) + 8 + 8 + 2 * 4 + 2 * 4
    )
    history = quantise.HISTORY
    t = Counted(
        lambda u: quantise.scale_update(
            number(u, 0, np.uint32, quantise.PARTIALS).reshape(1, -1), u(1, history), u(1)
        )
    ).total
    assert (
        t.distinct_bytes - quantise.scale_update_cost(quantise.PARTIALS)[0] == 2 * 4 * history + 4
    )
    t = Counted(
        lambda u: quantise.share_largest(
            number(u, 0, np.uint32, quantise.PARTIALS).reshape(1, -1),
            number(u, 0, np.uint32, 4).reshape(1, -1),
            1,
        )
    ).total
    assert t.distinct_bytes - quantise.share_largest_cost(quantise.PARTIALS)[0] == 4 * 4


@exhaustive
def test_costs_of_e4m3_with_activations():
    def activations(u):
        a, b = (
            upload(bits_of(RNG.standard_normal((128, 128)).astype(float32)), u.device)
            for _ in range(2)
        )
        fp8_matmul.matmul_fp8_gelu_forward(a, b[:64], u(1), u(1), u(64))
        fp8_matmul.matmul_fp8_swiglu_forward(a, b, u(1), u(1))
        fp8_matmul.matmul_fp8_gradient(a, b[:64], u(1), u(1), u(128, 64))

    assert Counted(activations).total.tensor_flops == (
        fp8_matmul.matmul_fp8_gelu_forward_cost(128, 64, 128)[1]
        + fp8_matmul.matmul_fp8_swiglu_forward_cost(128, 128, 128)[1]
        + fp8_matmul.matmul_fp8_gradient_cost(128, 64, 128)[1]
    )


def test_softmax_costs():
    rows, N, threads = 2, 128, 128
    tree = rows * (threads - 1)  # additions of v1's tree
    moved, flops = softmax_forward_cost(rows, N)
    t = Counted(lambda u: softmax_forward(u(rows, N), version=1)).total
    assert t.distinct_bytes == moved
    # two more passes: scale twice more, and subtract and exponentiate once more
    again = rows * N * (2 + 1 + 1)
    assert t.total_flops + t.special == flops + again + tree
    assert t.read_bytes["global"] == 3 * 4 * rows * N  # the docstring's "x three times"

    t = Counted(lambda u: softmax_forward(u(rows, N), version=2)).total
    assert t.distinct_bytes == moved
    assert t.read_bytes["global"] == 2 * 4 * rows * N  # "reads x twice instead of three times"

    moved, flops = softmax_backward_cost(rows, N)
    t = Counted(lambda u: softmax_backward(u(rows, N), u(rows, N), version=1)).total
    assert (t.distinct_bytes, t.total_flops) == (moved, flops + tree)
    t = Counted(lambda u: softmax_backward(u(rows, N), u(rows, N), version=3)).total
    shuffles = rows * 32 * 5  # additions of five steps between all lanes
    assert t.distinct_bytes == moved and t.total_flops == flops + shuffles


@pytest.mark.parametrize("adds", [False, True])
def test_second_pass_costs(adds):
    count, n = 4, 1024
    t = Counted(lambda u: add_parts([Sum(u(count * n), count, u(n), adds)])).total
    assert t.distinct_bytes == add_parts_cost(count, n, adds)[0] == 4 * n * (5 + adds)
    # threads add zeros of parts, too
    assert t.total_flops >= add_parts_cost(count, n, adds)[1] == n * (3 + adds)


def test_reduce_costs():
    M, N = 40, 32
    moved, flops = column_sum_cost(M, N)
    t = Counted(lambda u: column_sum(u(M, N), version=1)).total
    assert (t.distinct_bytes, t.total_flops) == (moved, flops)
    for version in (2, 3):
        t = Counted(lambda u, version=version: column_sum(u(M, N), version=version)).total
        assert t.distinct_bytes == moved
        # each thread's partial sums enter a tree once; version 3 adds zeros for up to three rows
        # that are not there
        assert flops <= t.total_flops <= flops + {2: 4, 3: 4 + 3 * 4}[version] * 256
    assert t.conflicts == 0


@pytest.mark.parametrize("silu", [*exhaustively(False), True])
def test_groupnorm_costs(silu):
    """Version 3, whose cost the functions give. It also moves weights and statistics: at these 32
    pixels up to a tenth of the bytes of x and y, at the model's 4096 negligible. Version 2 reads
    its inputs twice. Of its one pixel a thread also finds the mean, and joins it with those of
    others: 10 operations a channel."""
    B, P, C, groups = 1, 32, 32, 8
    n = B * P * C
    moved, flops = groupnorm_forward_cost(B, P, C, silu)
    t = Counted(
        lambda u: groupnorm_forward(u(B, P, C), u(C), u(C), groups, silu=silu, version=3)
    ).total
    assert moved <= t.distinct_bytes <= 1.1 * moved
    added = t.total_flops + t.special + (n if silu else 0)
    assert flops <= added <= 2 * flops + 10 * n  # at so few pixels trees are much
    twice = Counted(
        lambda u: groupnorm_forward(u(B, P, C), u(C), u(C), groups, silu=silu, version=2)
    ).total
    assert moved + 4 * n <= twice.distinct_bytes <= 1.2 * (moved + 4 * n)

    moved, flops = groupnorm_backward_cost(B, P, C, silu)
    t = Counted(
        lambda u: groupnorm_backward(
            u(B, P, C),
            u(B, P, C),
            u(C),
            u(C),
            u(B, groups),
            u.full(1, B, groups),
            u(C),
            u(C),
            groups,
            silu=silu,
            version=3,
        )
    ).total
    assert moved <= t.distinct_bytes <= 1.15 * moved
    assert flops <= t.total_flops + t.special + (2 * n if silu else 0) <= 2.5 * flops


def test_groupnorm_version_1_wastes_sectors():
    """Its docstring: a group of 4 channels is 16 bytes of each pixel, and the memory delivers whole
    sectors."""
    t = Counted(lambda u: groupnorm_forward(u(1, 32, 32), u(32), u(32), 8, version=1)).recorder
    line = t.line("C + group * width + e % width]")
    assert line.efficiency == 0.5


@pytest.mark.parametrize("version", [1, 2])
def test_adamw_cost(version):
    n = 256

    def update(u):
        adamw_update(
            u(n),
            u(n),
            u(n),
            u.full(1, n),
            State(u.full(1, 1), u.full(1e-3, 1), u.full(1, 1)),
            Rule(0.9, 0.99, 1e-8, 0.01, 1.0),
            version=version,
        )

    t = Counted(update).total
    moved, flops = adamw_update_cost(n)
    # step, learning rate and gradient norm, 1 / the loss's scale
    assert 3 * 4 <= t.distinct_bytes - moved <= 4 * 4
    threads = n // {1: 1, 2: 4}[version]
    own = n * (13 + 1)  # thirteen FLOPs and a root
    shared = t.total_flops + t.special - own  # each thread works out the step's scalars for itself
    assert threads * (10 + 3) <= shared <= threads * (11 + 3)
    assert abs(own - flops) <= 0.1 * flops  # the cost counts 15


@pytest.mark.parametrize("version", [1, 2])
def test_dropout_costs(version):
    moved, flops = dropout.dropout_forward_cost(N)
    assert (moved, flops) == dropout.dropout_backward_cost(N)
    t = Counted(
        lambda u: dropout.dropout_forward(
            u.full(1, B, P, C), 0.3, 7, 1, *samples(u), version=version
        )
    ).total
    assert t.total_flops == flops == N
    assert t.distinct_bytes == moved + 4 + 4 * B


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


@pytest.mark.parametrize("half", [False, True])
def test_copied_pieces_cost(half):
    n = 64
    t = Counted(
        lambda u: peer_pieces.peer_copy_pieces(
            [u(n), u(n)],
            u(n),
            upload(peer_pieces.pieces_of([(1, 0, 0, n)]), u.device),
            u(n) if half else None,
        )
    ).total
    moved, flops = peer_pieces.peer_copy_pieces_cost(n, half)
    # half of float32; a row
    assert t.distinct_bytes == moved + 2 * n * half + 32 and flops == t.total_flops == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_summed_pieces_cost(ranks):
    n = 8 * peer_pieces.BLOCK  # so that no thread adds up zeros
    t = Counted(
        lambda u: peer_pieces.peer_reduce_pieces(
            [u(n) for _ in range(ranks)],
            u(n),
            upload(peer_pieces.pieces_of([(0, 0, 0, n)]), u.device),
        )
    ).total
    moved, flops = peer_pieces.peer_reduce_pieces_cost(n, ranks)
    assert t.distinct_bytes == moved + 24 and t.total_flops == flops  # three numbers of the piece


def test_linear_costs():
    """A 64 × 64 tile is computed whole: at these sizes all of it is wanted."""
    rows, n, k = 64, 64, 16
    t = Counted(lambda u: linear.linear_forward(u(rows, k), u(n, k), u(n))).total
    moved, flops = linear.linear_forward_cost(rows, n, k)
    assert t.distinct_bytes == moved + 4 * n  # bias
    assert t.total_flops == flops + 2 * rows * n  # alpha and bias


@pytest.mark.parametrize("accumulate", [True, False])
def test_linear_backward_cost(accumulate):
    rows, n, k = 5, 8, 12
    t = Counted(
        lambda u: linear.linear_backward(
            u(rows, n), u(rows, k), u(n, k), u(n, k), u(n), accumulate=accumulate
        )
    ).total
    moved, flops = linear.linear_backward_cost(rows, n, k, accumulate)
    assert t.distinct_bytes == moved + 4 * (rows * n + 2 * n)  # dbias: dy once more, and added to
    assert t.total_flops >= flops


@pytest.mark.parametrize("order", [*exhaustively("legacy"), "new"])
def test_attention_costs(order):
    """The traffic is met exactly. Of FLOPs a 64 × 64 tile is computed whole, though it is 5 × 5 or
    5 × 4 here."""
    T, channels, heads = 5, 4, 1
    whole = 2 * heads * 64 * 64 * 16  # one product of all heads, its K of 4 or 5 filled up to 16
    t = Counted(lambda u: attention.attention_forward(u(1, T, 3 * channels), heads, order)).total
    moved, flops = attention.attention_forward_cost(1, T, channels, heads)
    assert t.distinct_bytes == moved
    assert flops - 4 * T * T * channels == 5 * heads * T * T  # of the cost, what the softmax does
    assert 0 <= t.total_flops - 2 * whole - 5 * heads * T * T <= 16 * heads * T * 64


def test_attention_backward_cost():
    T, channels, heads = 5, 4, 1
    whole = 2 * heads * 64 * 64 * 16
    t = Counted(
        lambda u: attention.attention_backward(
            u(1, T, channels), u(1, T, 3 * channels), u(1, heads, T, T), heads
        )
    ).total
    moved, flops = attention.attention_backward_cost(1, T, channels, heads)
    assert t.distinct_bytes == moved
    assert 0 <= t.total_flops - 4 * whole - 5 * heads * T * T <= 16 * heads * T * 64


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

    def backward(u):
        conv2d.conv2d_backward(
            u(1, out, out, n),
            u(1, size, size, c),
            u(n, 3, 3, c),
            u(n, 3, 3, c),
            u(n),
            stride,
            version=1,
        )

    moved, flops = conv2d.conv2d_backward_cost(1, size, size, c, n, 3, stride)
    parts = [
        function(1, size, size, c, n, 3, stride)
        for function in (conv2d.conv2d_input_gradient_cost, conv2d.conv2d_weight_gradient_cost)
    ]
    assert (moved, flops) == tuple(map(sum, zip(*parts, strict=True)))
    counted = Counted(backward)
    assert counted.total.distinct_bytes == moved + 4 * out**2 * n  # dbias reads dy for itself
    assert counted.recorder.total("conv2d_input_gradient_kernel_v1").total_flops == 2 * products
    weights = counted.recorder.total("conv2d_weight_gradient_kernel_v1")
    # sums of rows are put together, and added
    assert weights.total_flops == 2 * products + (out + 1) * 9 * c * n


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
