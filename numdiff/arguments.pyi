# Written by `python -m numdiff.settings` from the table there; not there at run time.
from collections.abc import Sequence
from typing import TypedDict

class TrainerArguments(TypedDict, total=False):
    init: str | None
    init_weights: str
    shard_update: str
    precision: str
    fp8_promotion: bool
    eager: bool
    recompute: bool | str
    seed: int
    flip: bool
    batch: int
    microbatch: int | None
    total_steps: int
    optimizer: str
    muon_momentum: float
    learning_rate: float
    warmup_steps: int
    cosine: bool
    beta1: float
    beta2: float
    adam_eps: float
    weight_decay: float
    clip_norm: float
    loss_scale: float
    loss_scale_rule: str
    loss_scale_interval: int
    freeze: Sequence[str]
    ema_halflife: float
    ema_decay: float | None
    ema_warmup: bool
    ema_std: Sequence[float] | None

class AdamWArguments(TypedDict, total=False):
    total_steps: int
    learning_rate: float
    warmup_steps: int
    cosine: bool
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float
    ema_decay: float
    ema_warmup: bool
    ema_std: Sequence[float] | None
