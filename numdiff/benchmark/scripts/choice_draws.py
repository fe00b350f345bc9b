"""Which problems choices.py measures: draws of plausible models, and the calls of the presets' steps.

DRAWS. Shapes come from a seed. Those of a transformer: 192 to 1,152 channels, 64 to 4,096 tokens,
up to 512 images. Those of a UNet: 64 to 1,152 channels, images of 16 to 256 pixels and their lower
levels. A problem has at most MAX_FLOPS operations and MAX_BYTES bytes.
PRESETS. The calls of a training step of the presets, recorded on a stand-in for the card.

READ NEXT
    choices.py
"""

import math

import numpy as np

from ...dtypes import float16
from .choice_problems import (
    attention_of,
    block_gradients,
    convolution,
    gelu_product,
    product,
    resampled,
    single_product,
    weight_gradient,
)

MAX_FLOPS, MAX_BYTES = 1e12, 1.5e9

# Draws --------------------------------------------------------------------------------------------

WIDTHS = 192, 256, 320, 384, 512, 640, 768, 1024, 1152
TOKENS = 64, 77, 144, 196, 256, 400, 576, 1024, 1600, 2304, 4096
SIDES = 7, 8, 12, 14, 16, 20, 24, 28, 32, 48, 56, 64, 96, 112, 128, 192, 256


class Draw:
    """Draws shapes by a random generator."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def one(self, values):
        return values[self.rng.integers(len(values))]

    def chance(self, share):
        return self.rng.random() < share

    def log_uniform(self, low, high, step=1):
        value = math.exp(self.rng.uniform(math.log(low), math.log(high)))
        return int(max(low, round(value / step) * step))

    def batch(self):
        """1 to 512, a power of two as often as not."""
        if self.chance(0.5):
            return 2 ** int(self.rng.integers(10))
        return self.log_uniform(1, 512)

    def channels(self):
        return self.log_uniform(64, 1152, self.one((8, 32, 32, 64)))

    def weight(self):
        """(outputs, inputs) of a linear layer."""
        D = self.one(WIDTHS)
        return self.one(
            ((3 * D, D), (D, D), (4 * D, D), (D, 4 * D), (8 * self.log_uniform(1, 12), D))
            + ((self.channels(), self.channels()), (6 * D, D))
        )

    def rows(self):
        return self.batch() * (self.one(TOKENS) if self.chance(0.7) else self.one(SIDES) ** 2)

    def image(self):
        return self.batch(), self.one(SIDES)

    def matmul(self):
        N, K = self.weight()
        if N > 4 * K:  # modulation: a row for each image
            M = 8 * -(-self.batch() // 8)
            return self.one((product(M, N, K, "NT", extra=("bias",)), product(M, K, N, "NN")))
        M = 8 * -(-self.rows() // 8)
        if self.chance(0.15):  # scores, and values, of attention without a fused kernel
            T, HS, batch = 8 * -(-self.one(TOKENS) // 8), self.one((64, 72, 80, 96)), self.batch()
            return self.one(
                (
                    product(T, T, HS, "NT", batch, single=True),
                    product(T, HS, T, "NN", batch),
                    product(T, HS, T, "TN", batch),
                )
            )
        extra = ("bias", "residual") if self.chance(0.3) else ("bias",)
        return self.one(
            (product(M, N, K, "NT", extra=extra), product(M, K, N, "NN"), product(M, N, K, "NT"))
        )

    def matmul_weight_gradient(self):
        N, K = self.weight()
        rows = 8 * -(-(self.batch() if N > 4 * K else self.rows()) // 8)
        return product(N, K, rows, "TN", single=True, extra=("sums",))

    def matmul_gelu(self):
        D, M = self.one(WIDTHS), 8 * -(-self.rows() // 8)
        backward = self.chance(0.5)
        return gelu_product(M, 4 * D, D, backward)

    def matmul_single(self):
        N, K = self.weight()
        M = 4 * -(-self.rows() // 4)
        return self.one(
            (
                single_product(M, N, K, "NT"),
                single_product(M, K, N, "NN"),
                single_product(N, K, M, "TN"),
            )
        )

    def block_gradients(self):
        D, rows = self.one(WIDTHS), 8 * -(-self.rows() // 8)
        sizes = (3 * D, D), (D, D), (4 * D, D), (D, 4 * D)
        return block_gradients(rows, self.one((sizes, sizes[:2], sizes[2:], sizes[:3])))

    def convolution(self, gradient=False):
        (B, S), C = self.image(), self.channels()
        N = C if self.chance(0.5) else self.channels()
        if self.chance(0.2):  # after a skip connection
            C, N = (N, 2 * C) if gradient else (2 * C, N)
        residual = self.chance(0.3)
        size = 5 if self.chance(0.04) else 3
        return convolution(B, S, S, min(C, 1152), min(N, 1152), size, gradient, residual)

    def weight_gradient(self):
        (B, S), C = self.image(), self.channels()
        N = C if self.chance(0.5) else self.channels()
        stride = 2 if self.chance(0.2) else 1
        return weight_gradient(B, S, S, C, N, stride)

    def resampled(self):
        B, S = self.image()
        C = 64 * -(-self.channels() // 64)
        return resampled(B, S + S % 2, S + S % 2, C, self.channels(), self.chance(0.5))

    def attention(self, backward=False):
        HS = self.one((32, 64, 64, 72, 128))
        heads = max(1, min(16, self.one(WIDTHS) // HS))
        return attention_of(self.batch(), self.one(TOKENS), heads, HS, backward)


def flops_of(problem):
    """Floating-point operations of a problem."""
    s = problem.shape
    if "T" in s:
        return (10 if problem.operation.endswith("backward") else 4) * (
            s["B"] * s["T"] ** 2 * s["heads"] * s["HS"]
        )
    if "sizes" in s:
        sizes = [map(int, pair.split("x")) for pair in s["sizes"].split(",")]
        return 2 * s["rows"] * sum(N * K for N, K in sizes)
    if "K" in s:
        return 2 * s.get("batch", 1) * s["M"] * s["N"] * s["K"]
    pixels = s["B"] * s["H"] * s["W"]
    if "halved" in s:
        return (18 / 4 if s["halved"] else 32) * pixels * s["C"] * s["N"]
    return 2 * s.get("size", 3) ** 2 * pixels // s.get("stride", 1) ** 2 * s["C"] * s["N"]


def written_bytes(problem):
    """Bytes of a result, about."""
    s = problem.shape
    if "sizes" in s or "T" in s:
        return problem.nbytes
    if "K" in s:
        return 4 * s.get("batch", 1) * s["M"] * s["N"]
    return 2 * s["B"] * s["H"] * s["W"] * s["N"] * (1 if s.get("halved", 1) else 4)


def fits(problem):
    """Whether a problem is neither tiny nor too large to be measured in a few milliseconds."""
    most = MAX_FLOPS / (8 if problem.operation == "matmul float32" else 1)
    return (
        2e7 < flops_of(problem) < most
        and problem.nbytes + written_bytes(problem) < MAX_BYTES
        and all(math.prod(shape) < 2**31 for shape, _ in problem.arrays.values())
    )


# how many of each kind are drawn
COUNTS = {
    "matmul": 60,
    "matmul_weight_gradient": 40,
    "matmul_gelu": 16,
    "matmul_single": 14,
    "block_gradients": 16,
    "convolution": 44,
    "input_gradient": 30,
    "weight_gradient": 36,
    "resampled": 10,
    "attention_forward": 14,
    "attention_backward": 20,
}
SPECIAL = {
    "input_gradient": ("convolution", True),
    "attention_forward": ("attention", False),
    "attention_backward": ("attention", True),
}


def drawn_problems(seed, hopper=True):
    """[Drawn] of a seed, in a random order. hopper: whether the device has Hopper's kernels"""
    found = []
    for i, (kind, count) in enumerate(COUNTS.items()):
        if kind == "resampled" and not hopper:
            continue
        draw = Draw([seed, i])
        name, *given = SPECIAL.get(kind, (kind,))
        kept = {}
        while len(kept) < count:
            problem = getattr(draw, name)(*given)
            if fits(problem):
                kept.setdefault(problem.key, problem)
        found += kept.values()
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[i] for i in order]


# Presets ------------------------------------------------------------------------------------------


# the default presets, and two of DiT's own sizes
PRESETS = (
    {"model": "unet"},
    {"model": "dit"},
    {"model": "dit", "architecture": "DiT-B/2", "batch": 64},
    {"model": "dit", "architecture": "DiT-XL/2", "batch": 32},
)


def preset_problems(card):
    """[Drawn] of the calls of a training step of PRESETS in float16, each once."""
    from ...training.options import resolve
    from ..tune import planned_calls

    found = {}
    for given in PRESETS:
        options = resolve({**given, "precision": "fp16"}, capability=card.capability)
        for call in planned_calls(options, card):
            for problem in _of_call(call):
                problem.preset = given.get("architecture", given["model"])
                if fits(problem):
                    found.setdefault(problem.key, problem)
    return list(found.values())


def _of_call(call):
    """[Drawn] of a recorded call, none for operations without a choice."""
    given = call.arguments
    if call.name == "linear_gradients_backward":
        layers = given["layers"]
        sizes = tuple((dy.shape[1], x.shape[1]) for dy, x, *_ in layers)
        return [block_gradients(layers[0][0].shape[0], sizes)]
    if call.dtype != np.dtype(float16):
        return []
    if call.name == "conv2d_forward" and given["stride"] == 1 and given["weight"].shape[1] > 1:
        N, size, _, C = given["weight"].shape
        if C % 8 == N % 8 == 0 and C > 8 and N > 8:
            return [
                convolution(
                    *given["x"].shape[:3], C, N, size, residual=given["residual"] is not None
                )
            ]
    if call.name == "conv2d_backward" and given["stride"] == 1 and given["weight"].shape[1] == 3:
        N, size, _, C = given["weight"].shape
        B, H, W = given["x"].shape[:3]
        if C % 8 == N % 8 == 0 and C > 8 and N > 8:
            return [
                convolution(B, H, W, N, C, size, True, given["residual"] is not None),
                weight_gradient(B, H, W, C, N),
            ]
    if call.name in ("flash_attention_forward", "flash_attention_backward"):
        B, T, width = given["qkv"].shape
        HS = width // 3 // given["heads"]
        return [attention_of(B, T, given["heads"], HS, call.name.endswith("backward"))]
    if call.name == "matmul_forward" and len(given["a"].shape) == 2:
        layout = "NT"[given["transpose_a"]] + "NT"[given["transpose_b"]]
        M, K = given["a"].shape[::-1] if given["transpose_a"] else given["a"].shape
        N = given["b"].shape[0] if given["transpose_b"] else given["b"].shape[1]
        out = given["out"]
        single = np.float32 in (given["out_dtype"], None if out is None else out.dtype)
        extra = {"bias": "bias", "residual": "residual", "row_sums": "sums"}
        extra = tuple(word for name, word in extra.items() if given[name] is not None)
        if M % 8 == N % 8 == K % 8 == 0:
            return [product(M, N, K, layout, single=bool(single), extra=extra)]
    if call.name in ("matmul_gelu_forward", "matmul_gelu_backward"):
        (M, K), backward = given["a"].shape, call.name.endswith("backward")
        return [gelu_product(M, given["b"].shape[backward], K, backward)]
    return []
