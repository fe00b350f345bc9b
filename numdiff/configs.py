"""Typed configurations of `Trainer`, `AdamW` and `Muon`, with Python's defaults.

`python -m numdiff.settings` writes this file from the table in settings.py, which has the ranges. A
setting that an extension adds is given by name: `Trainer(model, dataset, config, ema_std=(0.05,))`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Settings of a `numdiff.training.Trainer`.

    init: Start a new run from the weights in FILE, which the model's settings then follow: a run
        (its folder, its number, a checkpoint), or what `numdiff convert` reads or writes.
    init_weights: With --init: which weights to take where the file has both, averaged or as
        trained.
    shard_update: Whether each of several ranks updates its part of the weights alone, and holds the
        moments and averages of that part only (ZeRO, stage 1): less memory, the same bits; auto: on
        CPU ranks, and with AdamW on the GPUs of one host.
    precision: Arithmetic: fp32 is all float32; tf32, on a GPU, rounds the operands of products to
        10 mantissa bits, for tensor cores; fp16, on a GPU, has activations and products in float16
        on tensor cores, and scales the loss; bf16 has them in bfloat16, and scales nothing; fp8, of
        a DiT from 8.9 on, is fp16 with the products of the linear layers of all blocks but the
        first and the last in E4M3, 8 bits; auto: fp16 on a GPU, else fp32.
    fp8_promotion: With fp8: add up products in float32 every 128 along the sum; without it sums are
        left to the tensor cores, which keep about 14 bits of them.
    eager: Launch each kernel from Python, instead of replaying a graph of them: slower, with the
        same bits.
    recompute: Keep only the inputs of the model's blocks, or of their attention or MLPs alone, for
        the backward pass, and recompute the rest: less memory, more time, the same bits; without a
        value, of the blocks.
    seed: Seed of weights, data order, noise, timesteps and flips.
    flip: Mirror each image with probability one half.
    batch: Images per step, over all microbatches.
    microbatch: Images per forward pass; must divide --batch.  [default: the batch]
    total_steps: Optimiser steps in all.
    optimizer: What makes a step of the gradient: adamw, or muon, which makes the steps of the
        blocks' weight matrices orthogonal and leaves the rest to AdamW, at the same learning rate
        and decay.
    muon_momentum: With --optimizer muon: decay of the matrices' mean gradient.
    learning_rate: Learning rate after the warm-up.
    warmup_steps: Steps over which the learning rate rises.
    cosine: Learning rate after the warm-up: constant, or a cosine to 0 at the last step.
    beta1: AdamW's decay of the mean gradient.
    beta2: AdamW's decay of the mean squared gradient.
    adam_eps: AdamW's epsilon, against division by zero.
    weight_decay: AdamW's decoupled weight decay.
    clip_norm: Clip the gradient to this global norm; 0: no clipping.
    loss_scale: With fp16: the initial loss scale; it then adapts.
    loss_scale_rule: How the loss scale grows: doubling after --loss-scale-interval clean steps, or
        log2, 2^0.001 a step; an overflow halves it.
    loss_scale_interval: Clean steps after which the loss scale is doubled.
    freeze: Names of parameters that are not trained and keep their bits, with * for any text:
        'blocks.*', '*.bias'; may be given several times.
    ema_halflife: Images after which the averaged weights have forgotten half; 0: no average.
    ema_decay: Decay of the averaged weights per step, such as 0.9999, instead of --ema-halflife; 0:
        no average.
    ema_warmup: In step n the average's decay is at most (1 + n) / (10 + n), so that it quickly
        forgets the initial weights.
    """

    init: str | None = None
    init_weights: str = "ema"
    shard_update: str = "auto"
    precision: str = "auto"
    fp8_promotion: bool = True
    eager: bool = False
    recompute: bool | str = "no"
    seed: int = 0
    flip: bool = True
    batch: int = 32
    microbatch: int | None = None
    total_steps: int = 0
    optimizer: str = "adamw"
    muon_momentum: float = 0.95
    learning_rate: float = 0.0001
    warmup_steps: int = 100
    cosine: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-08
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    loss_scale: float = 65536.0
    loss_scale_rule: str = "doubling"
    loss_scale_interval: int = 2000
    freeze: Sequence[str] = ()
    ema_halflife: float = 0.0
    ema_decay: float | None = None
    ema_warmup: bool = True


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Settings of a `numdiff.nn.AdamW`.

    total_steps: Optimiser steps in all.
    learning_rate: Learning rate after the warm-up.
    warmup_steps: Steps over which the learning rate rises.
    cosine: Learning rate after the warm-up: constant, or a cosine to 0 at the last step.
    beta1: AdamW's decay of the mean gradient.
    beta2: AdamW's decay of the mean squared gradient.
    eps: AdamW's epsilon, against division by zero.
    weight_decay: AdamW's decoupled weight decay.
    clip_norm: Clip the gradient to this global norm; 0: no clipping.
    ema_decay: Decay of the averaged weights per step, such as 0.9999, instead of --ema-halflife; 0:
        no average.
    ema_warmup: In step n the average's decay is at most (1 + n) / (10 + n), so that it quickly
        forgets the initial weights.
    """

    total_steps: int = 0
    learning_rate: float = 0.0001
    warmup_steps: int = 0
    cosine: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-08
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    ema_decay: float = 0.0
    ema_warmup: bool = True


@dataclass(frozen=True, kw_only=True)
class MuonConfig(AdamWConfig):
    """Settings of a `numdiff.nn.Muon`; all but the momentum are AdamW's.

    momentum: With --optimizer muon: decay of the matrices' mean gradient.
    """

    momentum: float = 0.95
