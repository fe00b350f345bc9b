"""What a DiT needs besides matrix products and attention. Read the files in this order.

    adaln.py       LayerNorm or RMSNorm, scaled and shifted by the conditioning
    gate.py        a gated residual
    bias_gelu.py   bias and GELU in one pass
    swiglu.py      half of the channels gates the other half
    gate_adaln/    a gated residual and the next adaLN in one pass
    patchify.py    an image as a row of patches, and the way back
    chunk.py       one row cut into several arrays
    columns.py     columns of a matrix as arrays, in place

READ NEXT
    adaln.py
"""
