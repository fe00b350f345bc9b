"""Cases of sums over rows, samples and everything; of biases, scales and mse, which lead to such sums."""
import numpy as np

from .. import second_pass
from ..diffusion import mse
from ..optimizer import grad_norm
from .case import Case, normal, one


def reductions_cases():
    sizes = (1, 8), (70, 12), (3, 1100), (2, 4), (33, 4), (9, 260), (4, 16), (5, 8), (6, 12)  # the ninth comes alone
    given = {f"parts{k}": size for k, size in enumerate(sizes)} | {f"into{k}": (n,) for k, (_, n) in enumerate(sizes)}

    def of_parts(a, v):
        sums = [second_pass.Sum(getattr(a, f"parts{k}"), count, getattr(a, f"into{k}"), k % 2 == 0)
                for k, (count, _) in enumerate(sizes)]
        second_pass.add_parts(sums)
        return tuple(s.target for s in sums)

    yield Case("add_parts", normal(**given), of_parts)
    yield Case("global_norm", normal(x=(1000,)), one(lambda a, v: grad_norm.global_norm(a.x, version=v)), (1, 2))

    def of_pieces(a, v):
        grad_norm.squares_of_pieces(a.x, a.pieces, a.partials)
        return grad_norm.root_of_sum(a.partials), a.partials

    yield Case("global_norm", lambda rng: {"x": rng.standard_normal(1096), "partials": np.zeros(3),
                                           "pieces": np.array([(0, 4), (64, 1096), (8, 16)])}, of_pieces,
               label="of pieces")
    for channels, versions in ((3, (1,)), (4, (1, 2))):
        yield Case("mse", normal(prediction=(2, 4, 4, 4), target=(2, 4, 4, channels)),
                   one(lambda a, v: mse.mse_forward(a.prediction, a.target, version=v)), versions,
                   label=f"of {channels}")
    yield Case("mse_backward", normal(prediction=(2, 4, 4, 4), target=(2, 4, 4, 4)),
               one(lambda a, v: mse.mse_backward(a.prediction, a.target, 0.5, version=v)), (1, 2))
