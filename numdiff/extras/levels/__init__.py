"""The lecture versions of the kernels on tensor cores: one idea a level, whole tiles, one layout.
No model runs them; the models run kernels/matmul/mma.py, kernels/matmul/hopper/ and
kernels/conv2d/hopper/.

mma/       `mma.sync`: fragments, ldmatrix and a swizzle, cp.async
wgmma/     the Hopper ladder: wgmma, TMA, warp specialisation, a persistent grid, TMA stores
fused.py   a chain of operations in one kernel, with an operand at each place
conv2d/    the same for a 3 × 3 convolution: a shifted box for each tap, one box with its halo
"""
