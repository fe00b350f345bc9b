"""Which norm an adaptive norm has, and how one text becomes a kernel for each.

MATHEMATICS, what today's transformers change of adaln.py's, each on its own
    RMSNorm (rmsnorm.py): mean is 0, and average(h) is not subtracted: neither is stored, read or computed.
    A weight w: y = xhat · w[c] · (1 + scale[b, c]) + shift[b, c], so h = dy · w · (1 + scale). With S = Σ_t dy · xhat
        dscale[b, c] = w[c] · S[b, c]          dweight[c] += Σ_b (1 + scale[b, c]) · S[b, c]
    both follow from the one sum over tokens that there was.
    No shift: y = xhat · (1 + scale), and no dshift.
ONE TEXT
    A kernel's text branches on RMS, WEIGHTED and SHIFTED, which are constants of each kernel (device/specialise.py):
    what a norm does without is not in its machine code.
SOURCE
    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4 (RMSNorm); Yao, Yang, Wang 2025, arXiv:2501.01423 (LightningDiT:
    its block has RMSNorm with a weight).
READ NEXT
    gate_adaln/, whose kernels have the same norms.
"""

import itertools
from typing import NamedTuple

from ...device import cuda, float32
from ...device.specialise import Constant, Variants, specialise

RMS, WEIGHTED, SHIFTED = Constant(), Constant(), Constant()


class Norm(NamedTuple):
    """rms: RMSNorm, else LayerNorm; weighted: xhat is multiplied by a weight (C,); shifted: a shift
    is added."""

    rms: bool = False
    weighted: bool = False
    shifted: bool = True

    kind = property(lambda self: "rms" if self.rms else "layer")

    def __str__(self):
        return " ".join(
            [self.kind, *["weighted"] * self.weighted, *["unshifted"] * (not self.shifted)]
        )

    def kernel(self, text, name, *constants, **others):
        """What a kernel's text becomes for this norm; constants: which of RMS, WEIGHTED and SHIFTED
        it knows."""
        values = dict(zip(("RMS", "WEIGHTED", "SHIFTED"), self, strict=True))
        # none of DiT's own
        prefix = str(self).removeprefix("layer").replace(" ", "_").removeprefix("_")
        prefix += "_" if prefix else ""
        return specialise(
            text,
            name=prefix + name,
            **{constant: values[constant] for constant in constants},
            **others,
        )


NORMS = [Norm(*each) for each in itertools.product((False, True), (False, True), (True, False))]


def variants(name, texts, norms, *constants):
    """{(version, norm): kernel} of the texts of versions 1 and 2."""
    return Variants(
        itertools.product((1, 2), norms),
        lambda key: key[1].kernel(texts[key[0] - 1], f"{name}{key[0]}", *constants),
    )


@cuda.jit(device=True, forceinline=True)
def average_of(mean, row):
    """What is taken away from a token: of RMSNorm nothing, and there is no `mean`."""
    if RMS:
        return float32(0)
    return mean[row]


def check_norm(name, C, weight, norm="layer"):
    """A `ValueError` for a norm that there is not, or a weight that is not (C,)."""
    if norm not in ("layer", "rms"):
        raise ValueError(f"{name}: norm must be layer or rms, not {norm!r}")
    if weight is not None and tuple(weight.shape) != (C,):
        raise ValueError(
            f"{name}: weight must be ({C},), one for each channel, not {tuple(weight.shape)}"
        )
