"""Measurements of one kernel or of several ranks by hand: `python -m numdiff.benchmark.scripts.half_matmul`.

They compare versions, tiles and estimates in more detail than `numdiff bench kernels` does.
"""
