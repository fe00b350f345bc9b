"""LayerNorm over the last axis with a weight and a bias: `F.layer_norm`, `numdiff.nn.LayerNorm`. DiT's norms
are adaptive (kernels/transformer/adaln.py); ConvNeXt blocks and DINOv2 have this one.

layernorm.py     the kernels
functional.py    as a differentiable operation
"""
