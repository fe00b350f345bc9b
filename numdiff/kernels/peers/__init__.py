"""Several GPUs that read each other's memory. Read the files in this order.

    reduce.py    a sum over GPUs, with a barrier between them
    pieces.py    pieces of weights, from the GPU that has updated them

READ NEXT
    reduce.py
"""
