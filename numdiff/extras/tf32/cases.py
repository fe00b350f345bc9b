"""Cases of float32 on tensor cores: operands rounded to tf32, float32 sums."""
from ...kernels import conv2d
from ...kernels.check.case import Case, normal
from ...kernels.problem import replaced
from . import matmul as tf32
from .conv2d import launcher as conv2d_tf32

TF32_TOLERANCE = 5e-4  # operands are rounded to 10 mantissa bits


def tf32_cases():
    """Every kernel on a small problem: a convolution in parts."""
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
            with replaced(conv2d_tf32.__name__, choose=lambda *_: (tile, parts, -(-steps // parts))):
                return (conv2d.conv2d_forward(a.x, a.weight, a.bias, stride, v, a.channel, a.residual),)
        return run

    def backward(tile, gradient_tile, stride):
        def choice(rows, columns, steps, size, multiprocessors, gradient):
            return (gradient_tile if gradient else tile), 1, steps

        def run(a, v):
            with replaced(conv2d_tf32.__name__, choose=choice):
                dx = conv2d.conv2d_backward(a.dy, a.x, a.weight, a.dweight, a.dbias, stride, version=v)
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
