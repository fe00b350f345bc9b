"""Convolution of float32 on tensor cores, rounded to tf32 while loading: v4. Read the files in this
order.

    forward.py           the implicit GEMM by cp.async and mma.m16n8k8; also the input gradient
    weight_gradient.py   the same with pixels as the inner dimension
    launcher.py              when they run, in which tiles, and what was measured

READ NEXT
    forward.py
"""
