"""Norms of rows, all on one row kernel. Read the files in this order.

    row_norm.py     what they share: a row's statistics, and the pass over it
    ../../extras/layer_norm/  LayerNorm
    ../../extras/rms_norm/    RMSNorm, whose rows stay in registers

READ NEXT
    row_norm.py
"""
