"""The settings of a DiT with sparse-linear attention."""

from ...setting import SAME, setting


class SparseAttentionSettings:
    heading = "DiT"
    sla_topk: float = setting(
        0.2,
        "With --attention sla: the share of the blocks that is attended to exactly.",
        unit="SHARE",
        above=0,
        high=1,
        needs=("attention", "sla"),
        model=SAME,
    )
    sla_linear: str = setting(
        "rest",
        "With --attention sla: the keys that the linear part takes: those of the other blocks, or all, as the authors' "
        "current code has it.",
        choices=("rest", "all"),
        needs=("attention", "sla"),
        model=SAME,
    )
