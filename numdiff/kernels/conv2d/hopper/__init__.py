"""Convolution in float16 on Hopper's tensor cores, fed by TMA. Read extras/levels/conv2d/ first, then these
files in this order.

    boxes.py                the layout of pixels in shared memory: boxes with a halo, sub-blocks, matrix descriptors
    layout.py               the convolution's constants, arguments, stages and buffers
    products.py             its main loop: the products of all taps and channels of one tile
    convolution.py          v5, v6  the kernel: producers, consumers, launcher; forward and input gradient
    epilogue.py             results out, residuals in, statistics for the GroupNorm that follows
    resampled.py            the same kernel after upsampling, and with stride 2
    plan.py                 which tile and how many stages
    column_sums.py          a bias's gradient, concurrently with the products
    weight_gradient.py      v5, v6  pixels as the long inner dimension, split over blocks
    weight_gradient_plan.py  which chunks of pixels, and how many parts share them
    cluster_sums.py         sums of the blocks of a cluster, through each other's shared memory
    weight_gradient_3x3_layout.py  arguments, stages, a block's work
    weight_gradient_3x3.py  v5, v6  three taps in one product
    weight_gradient_3x3_plan.py  which tile, and how many blocks and clusters share the pixels

READ NEXT
    boxes.py
"""
