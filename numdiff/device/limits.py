"""Numbers of the hardware that kernels name: one name for each, here."""

WARP = 32  # threads that run in step
WARPGROUP = 128  # threads that give a wgmma together
FULL_MASK = 0xFFFFFFFF  # all lanes of a warp take part (in a shuffle, a vote, a match)
HOPPER_SHARED = 227 << 10  # bytes of shared memory that a block may have on sm_90
