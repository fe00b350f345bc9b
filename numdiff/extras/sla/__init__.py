"""Sparse-linear attention of a DiT (Zhang et al. 2025, arXiv:2509.24006): `--attention sla`.

kernels/         the operation
functional.py    it, with its gradient
attention.py     the layer, its arithmetic, its weights in files, its checks
settings.py      --sla-topk, --sla-linear; command.py: those of `numdiff convert`
"""
