"""ConvNeXt's blocks in a UNet (Liu et al. 2022, arXiv:2201.03545): `--block convnext`, `numdiff
bench block`.

    depthwise/       kernels: every channel by a filter of its own, also with the LayerNorm that follows
    functional.py    these as differentiable operations
    block.py         the block
    names.py         its weights in files
    benchmark.py     one block, measured; torch_block.py: PyTorch's; command.py: the options
"""
