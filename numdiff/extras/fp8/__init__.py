"""Linear layers of a DiT's blocks in E4M3, floats of 8 bits, forward and backward: `--precision
fp8`. Read the files in this order.

quantise.py     a tensor in E4M3, with a scale from earlier steps
weights.py      all weights of a model, in both orientations
both.py         a tensor in both orientations in one pass, and its column sums
matmul.py       the products of E4M3, and Hopper's, the top rung
epilogues.py    GELU and its derivative as E4M3, for the next product
mma.py          the products by mma.sync, for capability 8.9, 10.0 and 12.0
mma_epilogues.py    their scales, and GELU as E4M3
problems.py     small problems of the product
linear.py       a layer: three products
inference.py    the layers of a model that only makes samples
layers.py       the layers of a model, with delayed scales
gate_problems.py    problems of gates and norms that round (kernels/transformer/gate_adaln/)
"""
