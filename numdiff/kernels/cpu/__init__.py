"""The CPU engine's kernels: loops that Numba compiles for the host's cores (`on_host`), and
products by BLAS, where NumPy's references are slow.

    reductions.py      sums over a row, by the core's vectors
    exp.py             e^a and sigmoid, many elements at once
    convolution.py     a few large products, on rows that BLAS reads in place
    winograd.py        a 3×3 convolution by 16 products instead of 36 for four pixels
    winograd_rows.py   the same an image at a time, where BLAS gives no equal bits to several
    groupnorm.py       GroupNorm, an image at a time
    adamw.py           AdamW and the average of the weights, in one pass
    gate_adaln.py      gate, residual, norm and modulation, a token at a time

Each operation's launcher calls these for arrays of the host. What they run on is in device/cpu.py
(threads over a batch, `on_host`) and device/loop_cache.py (compiled loops on disk).
"""
