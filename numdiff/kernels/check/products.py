"""Cases of products in float32: matmul, linear layers, attention in three operations."""
from .. import linear, matmul
from ..attention import unfused as attention
from ..matmul import launcher, vectorised
from .case import Case, normal, one


def products_cases():
    for transposes in ((False, False), (False, True), (True, False)):
        shape_a, shape_b = ((20, 12), (12, 24))
        yield Case("matmul", normal(a=shape_a[::-1] if transposes[0] else shape_a,
                                    b=shape_b[::-1] if transposes[1] else shape_b, bias=(24,)),
                   one(lambda a, v, t=transposes: matmul.matmul_forward(a.a, a.b, *t, bias=a.bias, alpha=0.5,
                                                                        version=v)),
                   (1, 2, 3, 4), label="".join("nt"[t] for t in transposes))
    yield Case("matmul", normal(a=(3, 5, 7), b=(3, 7, 9)), one(lambda a, v: matmul.matmul_forward(a.a, a.b, version=v)),
               (1, 2, 3), label="batch, odd")
    yield Case("matmul", normal(a=(20, 40), b=(40, 24)), one(lambda a, v: matmul.matmul_forward(a.a, a.b, version=v)),
               (2, 3), label="several tiles of K")  # each tile is written over what others may still read

    def tiled(tile):
        def run(a, version):
            tiles, vectorised.TILES = vectorised.TILES, (tile,)
            try:
                return (matmul.matmul_forward(a.a, a.b, version=version),)
            finally:
                vectorised.TILES = tiles
        return run

    for tile in vectorised.TILES:
        yield Case("matmul", normal(a=(68, 8), b=(8, 68)), tiled(tile), (4,), label=f"tile {tile[0]}×{tile[1]}")

    def split(a, version):
        choose, launcher.choose_tile = launcher.choose_tile, lambda *_: ((64, 64), 3)
        try:
            return (matmul.matmul_forward(a.a, a.b, version=version),)
        finally:
            launcher.choose_tile = choose

    yield Case("matmul", normal(a=(8, 44), b=(44, 4)), split, (3, 4), label="split K")
    yield Case("linear", normal(x=(5, 12), weight=(8, 12), bias=(8,)),
               one(lambda a, v: linear.linear_forward(a.x, a.weight, a.bias, version=v)), (None,))
    yield Case("linear_backward", normal(dy=(5, 8), x=(5, 12), weight=(8, 12), dweight=(8, 12), dbias=(8,)),
               lambda a, v: (linear.linear_backward(a.dy, a.x, a.weight, a.dweight, a.dbias), a.dweight, a.dbias))
    yield Case("linear_backward", normal(dy=(5, 8), x=(5, 12), weight=(8, 12), dweight=(8, 12), dbias=(8,)),
               lambda a, v: (linear.linear_backward(a.dy, a.x, a.weight, a.dweight, a.dbias, accumulate=False),
                             a.dweight, a.dbias), label="written")
    for order in ("legacy", "new"):
        yield Case("attention", normal(qkv=(1, 5, 24)),
                   lambda a, v, o=order: attention.attention_forward(a.qkv, 2, o), label=order)

        def inputs(rng, order=order):
            made = normal(qkv=(1, 5, 24), dy=(1, 5, 8))(rng)
            made["p"] = attention.attention_forward(made["qkv"], 2, order)[1]
            return made

        yield Case("attention_backward", inputs,
                   one(lambda a, v, o=order: attention.attention_backward(a.dy, a.qkv, a.p, 2, o)), label=order)
