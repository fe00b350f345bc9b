"""Cases of float32 on tensor cores: operands rounded to tf32, float32 sums."""
from .. import conv2d, matmul
from ..conv2d.tf32 import launcher as conv2d_tf32
from ..matmul import tf32
from .case import Case, normal

TF32_TOLERANCE = 5e-4  # operands are rounded to 10 mantissa bits


def chosen(module, choice, function):
    """function() with this choice of a tile and of how its sums are cut."""
    choose = module.choose
    module.choose = lambda *_: choice
    try:
        return function()
    finally:
        module.choose = choose


def tf32_cases():
    """Every kernel on a small problem: all transposes, a sum in slices, a convolution in parts."""
    def product(tile, a_across, b_across, slices=1, M=16, N=12, K=8):
        shapes = {"a": (K, M) if a_across else (M, K), "b": (K, N) if b_across else (N, K)}

        def run(a, v):
            return (chosen(tf32, (tile, slices), lambda: matmul.matmul_forward(a.a, a.b, a_across, not b_across,
                                                                              version=v)),)

        layout = f"{'a' + 'ᵀ' * a_across}·{'b' + 'ᵀ' * (not b_across)}"
        return Case("matmul", normal(**shapes), run, (tf32.VERSION,), TF32_TOLERANCE,
                    f"tf32, {layout}, tile {tile}{', in slices' * (slices > 1)}")

    for tile, a_across, b_across in tf32.KERNELS:
        yield product(tile, a_across, b_across)
    yield product((64, 64), True, True, 2, 20, 12, 40)

    def operands(h, w, c, n, size, stride):
        def make(rng):
            weight = (n, size, size, c)
            dy = 1, (h - 1) // stride + 1, (w - 1) // stride + 1, n
            return {**normal(x=(1, h, w, c), weight=weight, dy=dy, dweight=weight, dbias=(n,), bias=(n,),
                             channel=(1, n), residual=dy)(rng)}
        return make

    def forward(tile, parts, stride):
        def run(a, v):
            n, size, _, c = a.weight.shape
            steps = size * size * -(-c // tf32.BK)
            return (chosen(conv2d_tf32, (tile, parts, -(-steps // parts)), lambda: conv2d.conv2d_forward(
                a.x, a.weight, a.bias, stride, v, a.channel, a.residual)),)
        return run

    def backward(tile, gradient_tile, stride):
        def choice(rows, columns, steps, size, multiprocessors, gradient):
            return (gradient_tile if gradient else tile), 1, steps

        def run(a, v):
            choose, conv2d_tf32.choose = conv2d_tf32.choose, choice
            try:
                dx = conv2d.conv2d_backward(a.dy, a.x, a.weight, a.dweight, a.dbias, stride, version=v)
            finally:
                conv2d_tf32.choose = choose
            return dx, a.dweight, a.dbias
        return run

    gradient_tiles = iter(conv2d_tf32.GRADIENT_TILES)
    for tile in conv2d_tf32.TILES:  # as many as gradient tiles
        small = tile == (64, 64)
        size, stride, parts = (3, 2, 2) if small else (1, 1, 1)
        inputs, label = operands(2, 3, 4, 8, size, stride), f"tf32, tile {tile}{', in parts' * (parts > 1)}"
        yield Case("conv2d", inputs, forward(tile, parts, stride), (conv2d_tf32.VERSION,), TF32_TOLERANCE, label)
        inputs = operands(2, 3, 4, 8, 3 if small else 1, 1)
        yield Case("conv2d_backward", inputs, backward(tile, next(gradient_tiles), 1), (conv2d_tf32.VERSION,),
                   TF32_TOLERANCE, label)
