"""Linear layers: y = x·weightᵀ + bias, alone and several at once. Read the files in this order.

    layer.py        a layer as products, with what is fused to it
    group.py        many small layers of one input, in one launch
    stack.py        layers at equal distances in memory, as one product
    gradients.py    the gradients of several weights in one launch

READ NEXT
    layer.py
"""
