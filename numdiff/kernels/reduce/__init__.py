"""Sums over many numbers. Read the files in this order.

    trees.py          trees in shared memory, partial sums in a fixed order
    second_pass.py    the second pass of several layers' partial sums, in one launch

READ NEXT
    trees.py
"""
