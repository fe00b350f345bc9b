"""Cases of what moves numbers: other resolutions, two tensors as one, images, rows of a table."""
import numpy as np

from .. import concat, embedding, resample
from ..diffusion import images
from .case import Case, in_place, normal, one


def movement_cases():
    for name, shape in (("avgpool_forward", (2, 4, 4, 8)), ("avgpool_backward", (2, 2, 2, 8)),
                        ("upsample_forward", (2, 2, 2, 8)), ("upsample_backward", (2, 4, 4, 8))):
        function = getattr(resample, name)
        yield Case(name.removesuffix("_forward"), normal(x=shape), one(lambda a, v, f=function: f(a.x, version=v)),
                   (1, 2, 3))
    yield Case("avgpool_backward", normal(x=(2, 2, 2, 8), residual=(2, 4, 4, 8)), one(
        lambda a, v: resample.avgpool_backward(a.x, version=v, residual=a.residual)), (1, 2, 3),
               label="with a residual")
    yield Case("concat", normal(a=(6, 8), b=(6, 4)), one(lambda a, v: concat.concat_forward(a.a, a.b, version=v)),
               (1, 2, 3))
    yield Case("concat_backward", normal(dy=(6, 12)), lambda a, v: concat.concat_backward(a.dy, 8, version=v),
               (1, 2, 3))

    def pictures(rng):
        return {"images": rng.integers(0, 256, (2, 3, 4, 3)).astype(np.uint8), "flip": np.array([0, 1], np.int32)}

    yield Case("images", pictures, one(lambda a, v: images.images_forward(a.images, a.flip, version=v)), (1, 2))
    yield Case("pixels", normal(x=(2, 3, 4, 3)), one(lambda a, v: images.pixels_forward(a.x)))

    def labels(rng):
        return {"labels": np.array([2, 0, 2, 1], np.int32), **normal(weight=(3, 8), dy=(4, 8), dweight=(3, 8))(rng)}

    yield Case("embedding", labels, one(lambda a, v: embedding.embedding_forward(a.labels, a.weight, version=v)),
               (1, 2))
    yield Case("embedding_backward", labels, in_place(
        lambda a, v: embedding.embedding_backward(a.dy, a.labels, a.dweight, version=v), "dweight"), (1, 2))
    yield Case("timestep_embedding", lambda rng: {"t": np.array([0, 7, 999], np.int32)},
               one(lambda a, v: embedding.timestep_embedding_forward(a.t, 9)), tolerance=5e-5)
