"""Matmul in float16 on Hopper's tensor cores, v6: wgmma, fed by TMA. Read extras/levels/wgmma/ first, then
these in this order.

    kernel.py              what is new, and why it pays; the roles of warps; the kernel and its variants; figures
    layout.py              its constants and arguments; where tiles are, in shared memory and in C
    work.py                which tiles a block takes, and the slices of a long sum
    producer.py            TMA's requests: transposes, two matrices as one, pairs of blocks, batches
    consumer.py            a warpgroup's way: bias, main loop, epilogue, next tile
    main_loop.py           the products of a tile, stage after stage
    epilogue.py            what an epilogue consists of, and all epilogues by name
    staging.py             a thread's results, and the shared memory through which they go
    epilogues.py           what becomes of the accumulators: float16, float32, a gate, a layer's scale
    exchange.py            tiles that an epilogue reads, brought and taken away by a warp that is idle
    fast_gelu.py           GELU in few instructions
    gelu_epilogues.py      GELU and its derivative
    swiglu_epilogues.py    SwiGLU and its backward
    row_sums.py            the sums of A's rows, concurrently with the products
    group_schedule.py      the tiles of several products with the same K, shared among all blocks
    parts.py               split tiles: the last-arriving block reduces the partials
    launcher.py            tensor maps, the variant that fits, and the second pass of a split sum

READ NEXT
    kernel.py
"""
