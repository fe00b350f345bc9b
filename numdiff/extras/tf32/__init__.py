"""Products and convolutions of float32 on tensor cores, rounded to tf32: `--precision tf32`.

    matmul.py    the product, and its problems
    conv2d/      the convolution
    cases.py     the convolution's cases of `numdiff kernels check`
"""
