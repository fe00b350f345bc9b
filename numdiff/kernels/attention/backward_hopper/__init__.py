"""Flash attention backward on Hopper, v5: five products by wgmma, in one kernel. Read the files in
this order.

    layout.py      constants, shared memory, pipelines
    products.py    the location of each operand, and its orientation
    round.py       64 queries by 64 keys: scores, probabilities, dv and dk
    row_sums.py    D = Σ dy · y of each query, by two warps, concurrently with the products
    kernel.py      producer, consumers, dq, launcher; what was measured

READ NEXT
    layout.py
"""
