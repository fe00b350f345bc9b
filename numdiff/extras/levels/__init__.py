"""The lecture versions of kernels: one idea a level; on tensor cores whole tiles and one layout.
No model runs them; the models run kernels/matmul/mma.py, kernels/matmul/hopper/,
kernels/conv2d/hopper/ and kernels/attention/.

mma/       `mma.sync`: fragments, ldmatrix and a swizzle, cp.async
wgmma/     the Hopper ladder: wgmma, TMA, warp specialisation, a persistent grid, TMA stores
attention/ flash attention before tensor cores: a thread a row; rows in registers
fused.py   a chain of operations in one kernel, with an operand at each place
conv2d/    the same for a 3 × 3 convolution: a shifted box for each tap, one box with its halo
"""
