"""A DiT's sparse-linear attention: the layer, its arithmetic, its weights in files, its options."""

import functools

from ...errors import UsageError
from ...kernels.attention import HEAD_SIZES
from ...nn.dit import Attention
from ...nn.layers import Linear
from .functional import sparse_linear_attention
from .kernels import BLOCK, blocks_of, count_of

LINEAR = "rest", "all"  # keys that the linear part takes


class SparseLinearAttention(Attention):
    """topk: the share of the blocks of 64 keys that is attended to exactly; linear: "rest", the
    linear part takes the keys of the other blocks, or "all".

    The linear part passes through proj_l, the same layer for all heads, which starts from zero: the
    softmax part alone.
    """

    name, title, part, mark = "sla", "sparse-linear attention", "linear part", ".attn.proj_l."
    free = {
        "sla_topk": lambda v: type(v) in (int, float) and 0 < v <= 1,
        "sla_linear": lambda v: v in LINEAR,
    }
    foreign = {"sla_linear": "all"}  # as in the authors' code

    def __init__(self, hidden, heads, qk_norm=False, topk=0.2, linear="rest"):
        super().__init__(hidden, heads, qk_norm)
        self.proj_l = Linear(hidden // heads, hidden // heads, zero=True, matrices=0)
        self.topk, self.all_keys = topk, linear == "all"

    def attend(self, qkv):
        return sparse_linear_attention(
            qkv, self.heads, self.topk, self.proj_l.weight, self.proj_l.bias, "new", self.all_keys
        )

    @classmethod
    def of(cls, options):
        return functools.partial(cls, topk=options["sla_topk"], linear=options["sla_linear"])

    @staticmethod
    def check(options, tokens, head=None):
        topk, linear = options["sla_topk"], options["sla_linear"]
        if linear not in LINEAR:
            raise UsageError(
                f"sla_linear {linear!r:.60} does not exist: use {' or '.join(LINEAR)}."
            )
        if not 0 < topk <= 1:
            raise UsageError(
                f"--sla-topk {topk:g} is no share of the blocks of keys: use more than 0 and at most 1, "
                "as in --sla-topk 0.2."
            )
        if tokens <= BLOCK:
            raise UsageError(
                f"--attention sla chooses among blocks of {BLOCK} tokens, and an image has {tokens}, "
                "which is one block: use larger images, smaller patches, or --attention full."
            )
        if head is not None and head not in HEAD_SIZES:
            raise UsageError(
                f"--attention sla has kernels for heads of {', '.join(map(str, HEAD_SIZES))} channels, "
                f"and these have {head}: change --heads, or use --attention full."
            )

    @staticmethod
    def layers(options):
        head = options["hidden_size"] // options["num_heads"]
        return {"proj_l": (head, head)}

    @staticmethod
    def products(options, tokens):
        hidden, head = options["hidden_size"], options["hidden_size"] // options["num_heads"]
        # attended to exactly
        keys = min(tokens, BLOCK * count_of(options["sla_topk"], blocks_of(tokens)))
        # and H, φ(q) S and W of the linear part
        return [
            ("qkv", 2 * tokens * (keys + head) * hidden, False),
            ("proj_l", tokens * hidden * head, True),
        ]

    @staticmethod
    def words(options):
        return (
            f", sparse-linear attention to {options['sla_topk']:g} of the blocks"
            + ", linear to all keys" * (options.get("sla_linear") == "all")
        )
