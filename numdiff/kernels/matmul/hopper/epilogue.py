"""What an epilogue of Hopper's matmul consists of, and all epilogues by name.

AN EPILOGUE is a record of device functions, which `specialise` puts into the kernel's text:

    prefetch_maps(maps)                             one thread, at the start: tensor maps into TMA's cache
    prefetch(gates, place, target)                  a consumer, before a tile's main loop: this thread's elements of the
                                                    bias, and its gates, which are loaded while the tile is multiplied
    stage(staging, b0, b1)                          … after it: the bias into shared memory
    write(block, turn, amax, acc, gates, …)         … each block of 64 columns of the results; (turn, amax) after it
    finish(amax, arrays, lane, elected)             … after the last tile
    assist(t, shared, unit, walk, target)           the idle warps of the producer's warpgroup
    fetch(tile, maps, barrier, x, y)                in `assist_exchange`: load what `write` reads
    give_back(tile, maps, x, y)                     … store what it has written
    share_steps(tile, steps, work)                  in `assist_sum_rows`: (steps before the tile's first, the distance
                                                    from one of its steps to the next)
    write_sums(row, lane, sums, sharing, …)         … write a warp's sums

READ NEXT
    staging.py
"""

from typing import NamedTuple

from ....device import device_inline, int32
from ....device.eight import array_of
from ....device.tma import tma_prefetch
from .epilogues import (
    prefetch_bias_of_stack,
    prefetch_gates,
    stage_gates,
    write_float,
    write_float_of_group,
    write_float_of_stack,
    write_gate,
    write_half,
    write_half_of_batch,
    write_half_of_stack,
    write_layer_scale,
)
from .exchange import (
    assist_exchange,
    assist_nothing,
    fetch_halves,
    fetch_one,
    return_both,
    return_halves,
    return_one,
)
from .gelu_epilogues import write_gelu, write_gelu_again_gradient, write_gelu_gradient
from .group_schedule import PRODUCTS
from .layout import STAGES
from .row_sums import (
    assist_sum_rows,
    share_row,
    share_row_of_group,
    share_row_of_stack,
    write_sums_of_group,
    write_sums_of_matrix,
    write_sums_of_stack,
)
from .staging import (
    finish_nothing,
    finish_stores,
    prefetch_bias,
    prefetch_nothing,
    stage_bias,
    stage_nothing,
)
from .swiglu_epilogues import prefetch_biases, write_swiglu, write_swiglu_gradient

# Tensor maps --------------------------------------------------------------------------------------


@device_inline
def prefetch_operand_maps(maps):
    """Of a float32 result, which no TMA writes."""
    tma_prefetch(maps.a)
    tma_prefetch(maps.b)
    tma_prefetch(maps.second)


@device_inline
def prefetch_result_map(maps):
    """Of a result."""
    tma_prefetch(maps.a)
    tma_prefetch(maps.b)
    tma_prefetch(maps.c)
    tma_prefetch(maps.second)


@device_inline
def prefetch_all_maps(maps):
    """Of a result and of another matrix that the epilogue reads or writes."""
    tma_prefetch(maps.a)
    tma_prefetch(maps.b)
    tma_prefetch(maps.c)
    tma_prefetch(maps.d)
    tma_prefetch(maps.second)


@device_inline
def prefetch_maps_of_group(maps):
    """Of the products of a group."""
    for product in range(PRODUCTS):
        tma_prefetch(array_of(int32(product), maps.a))
        tma_prefetch(array_of(int32(product), maps.b))


# The epilogues ------------------------------------------------------------------------------------


class EpilogueParts(NamedTuple):
    """An epilogue's device functions; the first is `write`, the others are of one that stores 16
    bits.

    tiles: of 64 × 64 that leave shared memory together; halves: 2 where a tile has columns of both
    halves of B; exchanges: whether `assist_exchange` brings tiles; sums_rows: whether it can add up
    A's rows
    """

    write: object
    prefetch_maps: object = prefetch_result_map
    prefetch: object = prefetch_bias
    stage: object = stage_bias
    finish: object = finish_stores
    assist: object = assist_nothing
    fetch: object = None
    give_back: object = None
    share_steps: object = None
    write_sums: object = None
    tiles: int = 1
    halves: int = 1
    exchanges: bool = False
    sums_rows: bool = False


def float_epilogue(write, share_steps, write_sums, prefetch_maps=prefetch_operand_maps):
    """Of a float32 result."""
    return EpilogueParts(
        write,
        prefetch_maps,
        prefetch_nothing,
        stage_nothing,
        finish_nothing,
        assist_sum_rows,
        share_steps=share_steps,
        write_sums=write_sums,
        sums_rows=True,
    )


def exchanging(write, fetch=fetch_one, give_back=return_one, finish=finish_nothing, tiles=1):
    """With tiles that are loaded and stored by an idle warp, and without a bias."""
    return EpilogueParts(
        write,
        prefetch_all_maps,
        prefetch_nothing,
        stage_nothing,
        finish,
        assist_exchange,
        fetch,
        give_back,
        tiles=tiles,
        exchanges=True,
    )


EPILOGUES = {
    "half": EpilogueParts(write_half),
    "batch": EpilogueParts(write_half_of_batch),
    "half_stack": EpilogueParts(write_half_of_stack, prefetch=prefetch_bias_of_stack),
    "float": float_epilogue(write_float, share_row, write_sums_of_matrix),
    "float_stack": float_epilogue(write_float_of_stack, share_row_of_stack, write_sums_of_stack),
    "float_group": float_epilogue(
        write_float_of_group, share_row_of_group, write_sums_of_group, prefetch_maps_of_group
    ),
    "gate": exchanging(write_gate)._replace(prefetch=prefetch_gates, stage=stage_gates),
    "layer_scale": EpilogueParts(write_layer_scale, prefetch_all_maps),
    "gelu": EpilogueParts(write_gelu, prefetch_all_maps),
    "gelu_gradient": exchanging(write_gelu_gradient),
    "gelu_again_gradient": exchanging(write_gelu_again_gradient, give_back=return_both, tiles=2),
    "swiglu": EpilogueParts(write_swiglu, prefetch_all_maps, prefetch_biases, halves=2),
    "swiglu_gradient": exchanging(write_swiglu_gradient, fetch_halves, return_halves, tiles=2),
}
SWIGLU_WIDTHS = 256, 128  # of a tile that has two blocks of 64 columns, or four, in pairs
# the activations, and the widths of tile that there are for them
ACTIVATIONS = {
    "gate": STAGES,
    "gelu": STAGES,
    "gelu_gradient": STAGES,
    "swiglu": SWIGLU_WIDTHS,
    "swiglu_gradient": STAGES,
    "layer_scale": (256, 128, 64),
    "gelu_again_gradient": STAGES,
}


def has_two_tiles(activation):
    """Whether a kernel has four tiles for each consumer, and fewer stages."""
    return activation != "" and EPILOGUES[activation].tiles == 2
