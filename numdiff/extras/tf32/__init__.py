"""Products and convolutions of float32 on tensor cores, rounded to tf32: `--precision tf32`. And
flash attention of float32 on them, which loses no digits.

matmul.py     the product, and its problems
conv2d/       the convolution, and its problems
attention/    version 4 of flash attention, which float32 takes without an option
"""
