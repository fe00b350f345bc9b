"""A grouped GEMM: several products with the same K in one launch of Hopper's matmul; the blocks of
each tile, and over which steps.

    C_p (M_p, N_p) = A_p · B_p over K, for up to four products p: the gradients of a transformer
    block's four weights, each of which by itself has too few tiles for all multiprocessors, or a
    few more than they take in one round

The tiles of all products are numbered consecutively. With P blocks, the first ones, a multiple of
P, are multiplied whole, P at a time. The R < P that remain are cut along K so that all blocks end
together, after L = R · K / P steps:

    R = 3 tiles, P = 5 blocks        block 0, 1, 2   the first L steps of tile 0, 1, 2
                                     block 3         the rest of tile 0, and the first steps of the rest of tile 1
                                     block 4         what is left of tile 1, and the rest of tile 2

    More generally every tile has `slices` slices of L steps, each with a block of its own, and a
    last one of `left` steps; the last slices of all tiles, laid end to end, are cut into shares,
    one for each remaining block. A share is no shorter than a last slice, so a last slice is cut at
    most once, and a tile has slices + 1 or slices + 2 parts.

    Stream-K (Osama et al.) cuts all R · K steps into P runs, and no two blocks work on the same k
    at the same time, so each would read its operands from memory. Here the blocks with slices of
    their own run in step, and the others a few steps apart, so that the L2 cache has what a
    neighbour has read.

DETERMINISM
    a plan follows from the sizes and the number of multiprocessors; a tile's parts are added in
    their order.
SOURCE
    Osama et al. 2023, "Stream-K", arXiv:2301.03598, section 3 and, on whole tiles first, section
    4.2.
READ NEXT
    parts.py; ../group.py, which launches it.
"""

from typing import NamedTuple

from ....device import cuda, device_inline, int32, uint32
from .layout import tile_place

PRODUCTS = 4  # of one launch
NEVER = 2**31 - 1  # the first tile of a product that does not exist


class GemmGroup(NamedTuple):
    """The products of a launch, and how their tiles are shared among the blocks; in place of
    `Work`.

    M, N, tiles_m, tiles_n: four numbers each, a product's size and its rows and columns of tiles;
    first: its first
    tile; sums: the element at which its row sums begin (four numbers each, too)
    k_tiles: steps along K; tiles: of all products; whole: how many of them are multiplied by one
    block each of the others: slice_tiles: steps of a slice that has a block of its own; slices:
    such slices of a tile; alone: of all tiles; left: steps of a tile's last slice; share: steps of
    a block that takes last slices, one after the other
    parts: that a tile has at most
    """

    M: tuple
    N: tuple
    tiles_m: tuple
    tiles_n: tuple
    first: tuple
    sums: tuple
    k_tiles: int
    tiles: int
    whole: int
    slice_tiles: int
    slices: int
    alone: int
    left: int
    share: int
    parts: int


class GemmGroupWalk(NamedTuple):
    """A block's way through its units. A unit below `whole` is a tile's number; one from there on
    is `whole` plus the number of a step of the tiles that are cut, at which a part begins. The
    steps of slices with a block of their own are numbered first, then those of the last slices.

    stride: from one whole tile to the next; begin, last: the block's first step, and the one after
    its last. In a walk that is not a group's, last is the number of units, and begin 0.
    """

    stride: int
    begin: int
    last: int


class GroupTile(NamedTuple):
    """As `WorkTile` (work.py); product: the one it belongs to; number: the tile's among those of
    all products."""

    part: int
    row: int
    column: int
    first_k: int
    end_k: int
    product: int
    number: int


@device_inline
def of_product(product, numbers):
    n0, n1, n2, n3 = numbers  # named one by one: an index that is not constant would need memory
    return int32(n0 if product == 0 else n1 if product == 1 else n2 if product == 2 else n3)


@device_inline
def product_of(tile, first):
    """The product that a tile belongs to."""
    _, f1, f2, f3 = first
    return int32(int32(tile >= f1) + int32(tile >= f2) + int32(tile >= f3))


@device_inline
def walk_of(block, blocks, group):
    """(first unit, `GemmGroupWalk`) of a block."""
    steps = int32(group.alone * group.slice_tiles)
    if block < group.alone:
        begin = int32(block * group.slice_tiles)
        last = int32(begin + group.slice_tiles)
    else:
        begin = int32(steps + (block - group.alone) * group.share)
        last = int32(
            min(int32(begin + group.share), int32(steps + (group.tiles - group.whole) * group.left))
        )
    begin = int32(group.whole + begin)
    last = int32(max(int32(group.whole + last), group.whole))
    return int32(block if block < group.whole else begin), GemmGroupWalk(blocks, begin, last)


@device_inline
def group_start(group):
    """(first unit, `GemmGroupWalk`), for all threads of a block."""
    cuda.syncthreads()
    return walk_of(int32(cuda.blockIdx.x), int32(cuda.gridDim.x), group)


@device_inline
def unit_after(unit, tile, walk, group):
    """The block's next unit."""
    if unit >= group.whole:
        return int32(unit + (tile.end_k - tile.first_k))
    unit = int32(unit + walk.stride)
    return int32(unit if unit < group.whole else walk.begin)


@device_inline
def group_tile(unit, walk, group):
    """The `GroupTile` that begins at this unit."""
    number, part, first_k, end_k = unit, int32(0), int32(0), group.k_tiles
    if unit >= group.whole:
        at, rest = int32(unit - group.whole), int32(group.tiles - group.whole)
        before = int32(group.alone * group.slice_tiles)
        if at < before:
            index = int32(uint32(at) // uint32(group.slice_tiles))
            part = int32(uint32(index) // uint32(rest))
            number = int32(index - part * rest)
            first_k = int32(part * group.slice_tiles)
            end_k = int32(first_k + group.slice_tiles)
        else:
            at = int32(at - before)
            number = int32(uint32(at) // uint32(group.left))
            inside = int32(at - number * group.left)
            part = int32(group.slices + int32(inside > 0))
            first_k = int32(group.slices * group.slice_tiles + inside)
            end_k = int32(min(group.k_tiles, int32(first_k + (walk.last - unit))))
        number = int32(number + group.whole)
    product = product_of(number, group.first)
    row, column = tile_place(
        int32(number - of_product(product, group.first)),
        of_product(product, group.tiles_m),
        of_product(product, group.tiles_n),
    )
    return GroupTile(part, row, column, first_k, end_k, product, number)


@device_inline
def parts_of(number, group):
    """How many parts tile `number` has."""
    if number < group.whole:
        return int32(1)
    begin = int32((number - group.whole) * group.left)
    next_share = int32((int32(uint32(begin) // uint32(group.share)) + 1) * group.share)
    return int32(group.slices + 1 + int32(next_share < begin + group.left))


# On the host --------------------------------------------------------------------------------------


class GemmGroupCut(NamedTuple):
    """How tiles are shared among blocks: as the fields of `GemmGroup` of these names; blocks: of
    the launch."""

    whole: int
    slice_tiles: int
    slices: int
    alone: int
    left: int
    share: int
    parts: int
    blocks: int


def cut(tiles, k_tiles, blocks, shortest=1, splits=True):
    """The `GemmGroupCut` of `tiles` tiles of k_tiles steps for `blocks` blocks; shortest: the
    fewest steps of a slice (a tile's last one may have fewer); splits: whether tiles may be cut."""
    whole = tiles // blocks * blocks
    rest = tiles - whole
    steps = min(k_tiles, max(shortest, -(-rest * k_tiles // blocks)))
    if not rest or not splits or steps == k_tiles:
        return GemmGroupCut(tiles, 1, 0, 0, 1, 1, 1, min(tiles, blocks))
    slices = -(-k_tiles // steps) - 1
    left, others = k_tiles - slices * steps, blocks - rest * slices
    share = max(left, -(-rest * left // others))
    return GemmGroupCut(
        whole,
        steps,
        slices,
        rest * slices,
        left,
        share,
        slices + 1 + bool(cuts_of(rest, left, share)),
        blocks,
    )


def cuts_of(rest, left, share):
    """How many last slices of `rest` tiles are cut in two."""
    return sum(1 for at in range(share, rest * left, share) if at % left)


def longest(cut):
    """Steps, of the tiles that are cut, of the block that has most of them."""
    return max(cut.slice_tiles, cut.share)


def count_parts(cut, tiles):
    """Parts of all tiles that are cut."""
    rest = tiles - cut.whole
    return rest * (cut.slices + 1) + cuts_of(rest, cut.left, cut.share)
