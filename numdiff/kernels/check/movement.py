"""Cases of what moves numbers: other resolutions, two tensors as one, images, rows of a table."""
import numpy as np

from ..diffusion import images
from .case import Case, normal, one


def movement_cases():
    def pictures(rng):
        return {"images": rng.integers(0, 256, (2, 3, 4, 3)).astype(np.uint8), "flip": np.array([0, 1], np.int32)}

    yield Case("images", pictures, one(lambda a, v: images.images_forward(a.images, a.flip, version=v)), (1, 2))
    yield Case("pixels", normal(x=(2, 3, 4, 3)), one(lambda a, v: images.pixels_forward(a.x)))
