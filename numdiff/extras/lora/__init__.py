"""Low-rank adaptation, LoRA (Hu et al. 2021, arXiv:2106.09685): `numdiff train dit --init FILE --lora
16`.

The weights W of a trained DiT's attention and MLP stay as they are. A product of two thin matrices
is trained in addition, and the model computes with W + s·B·A (`parameters.py`).

READ NEXT: parameters.py, then files.py
"""
