"""Flash attention backward on Hopper, v5: five products by wgmma, in one kernel. Read the files in this order.

    layout.py      constants, shared memory, pipelines
    products.py    which operand lies where, and which way round it is read
    round.py       64 queries by 64 keys: scores, probabilities, dv and dk
    row_sums.py    D = Σ dy · y of each query, by two warps beside the products
    kernel.py      producer, consumers, dq, launcher; what was measured

READ NEXT
    layout.py
"""
