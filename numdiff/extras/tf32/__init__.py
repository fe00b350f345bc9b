"""Products and convolutions of float32 on tensor cores, rounded to tf32: `--precision tf32`.

matmul.py    the product, and its problems
conv2d/      the convolution, and its problems
"""
