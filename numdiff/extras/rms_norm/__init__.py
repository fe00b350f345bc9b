"""RMSNorm over the last axis: `F.rms_norm`, and `--norm rms` of a DiT where no adaptive norm follows.

rmsnorm.py       the kernels
functional.py    as a differentiable operation
"""
