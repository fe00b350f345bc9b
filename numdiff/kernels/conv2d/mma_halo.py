"""3 × 3 convolution on the tensor cores of any GPU from sm_80 on: one tile of pixels serves all
nine taps.

MATHEMATICS
    as in mma.py, for 3 × 3 taps and stride 1: the forward, and the input gradient, which is the
    forward over dy with the flipped weight. The flipped weight is never written: `FLIPPED` reads
    the weight as it is stored, taps counted down, and ldmatrix transposes it.
SHAPES
    as in mma.py; C and N multiples of 8, any image size
WHAT IS NEW, AND WHY IT PAYS
    A block has 256 output pixels × 64 channels. mma.py loads each pixel from global memory once for
        each tap: nine times. Here 32 channels of the pixels and of the border around them (18 × 18
        pixels for 16 × 16) come once; all nine taps read them from shared memory at shifted
        addresses.
    A warp has four rows of 16 pixels × 64 channels: 128 accumulators a lane. For one column of taps
        it loads six rows, of which tap r multiplies rows r … r + 3. So 6 + 12 ldmatrix feed 96 mma
        (mma.py: 18 feed 48), and shared memory is read at half of its rate when the tensor cores
        run at theirs.
    Weights travel through a ring of three stages, three taps of 32 channels each: one barrier for
    192 mma of a warp. Two blocks stay on a multiprocessor and take tile after tile. The next tile's
    pixels and weights arrive while the
        last channels of one are multiplied and its results are written.
    Addresses are computed once a tile, into a table in shared memory, and in 32 bits: with 64-bit
        products for every copy a block executed 1,010 instructions for 192 mma of a warp, and the
        kernel took 1.5 times as long.
TILES
    The image is cut into segments of SEG columns and ROWS rows. Four warps take one segment of 16 ×
    16 pixels, or, for images of 8 columns, four segments of 8 × 8, of any images: 16 pixels of a
    fragment are then 8 of two segments. Tiles of 128 pixels (two rows a warp) are for problems with
    few of them.
SWIZZLE
    A pixel's 32 channels are four chunks of 16 bytes. Chunk c of a pixel in column h of the halo
    tile is stored at c ^ (h / 2 % 4): eight neighbours in a row, from any column on, are in eight
    different groups of four banks.
LAUNCH
    grid (blocks, channels / 64), 128 threads, two blocks on a multiprocessor. Dynamic shared
    memory: 79 KiB for 16 × 16 pixels, 89 for four times 8 × 8; every card from sm_80 on has 99,
    those of 8.0 and 9.0 room for two such blocks.
DETERMINISM
    one warp sums each output, in the order of channel chunks, columns of taps, halves of 16
    channels and rows of taps.
SOURCE
    PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma, ldmatrix).
READ NEXT
    mma_halo_gradient.py
"""

from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, int64, launch, opaque, uint32
from ...device.async_copy import cp_async_16_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.batch_invariance import nominal_extent
from ...device.common import divide, no_numbers
from ...device.half import in_bfloat16
from ...device.limits import multiprocessors_of, shared_limit
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise
from ...device.tensor_core import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_word,
    load_words4,
    load_words4_where,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
    store_words4,
    unpack_half2,
)
from .direct import Added, Addends

WARPS = 4
THREADS = 32 * WARPS
TILE_N = 64  # output channels of a block
KC = 32  # input channels of a chunk: a pixel's are 64 bytes
TAP = TILE_N * KC * 2  # bytes of one tap's weights
STAGE = 3 * TAP  # of a stage of the ring: a column of taps
STAGES = 3
PENDING = STAGES - 2  # groups of copies in flight when a step begins
# bytes from one pixel's results to the next: a warp's writes meet all banks
OUT_PITCH = TILE_N * 2 + 16
BLOCKS = 2  # on a multiprocessor
PASS = THREADS // 4  # pixels whose chunks one pass of all threads fetches

# Of each kernel: columns of a segment (16, 8), fragments of 16 pixels a warp (4, 2), whether the
# weight is flipped
SEG, FRAGS, FLIPPED = Constant(), Constant(), Constant()
ROWS = Constant(lambda SEG, FRAGS: 16 if (SEG, FRAGS) == (16, 4) else 8)  # of a segment
SEGMENTS = Constant(lambda SEG, FRAGS, ROWS: WARPS * FRAGS // ROWS * (16 // SEG))
# pixels of a row of the halo tile; even
PITCH = Constant(lambda SEG, SEGMENTS: SEGMENTS * (SEG + 2))
HALO = Constant(lambda ROWS, PITCH: (ROWS + 2) * PITCH)  # pixels
HALO_BYTES = Constant(lambda HALO: HALO * KC * 2)
ROW_BYTES = Constant(lambda PITCH: PITCH * KC * 2)
HALF_PASSES = Constant(lambda HALO: -(-HALO // (2 * PASS)))  # a chunk comes in two steps
RING = Constant(lambda HALO_BYTES: -(-2 * HALO_BYTES // 128) * 128)  # where the weights begin
TABLES = Constant(lambda RING: RING + STAGES * STAGE)  # where the halo's two tables begin
TABLE_BYTES = Constant(lambda HALO: 4 * HALO)
# fragments of a warp's results that are in shared memory at once
PATCH = Constant(lambda FRAGS: FRAGS // 2)
A_WORDS = Constant(lambda FRAGS: 4 * (FRAGS + 2))
ACCUMULATORS = Constant(lambda FRAGS: 32 * FRAGS)


class HaloImage(NamedTuple):
    """x (·, H, W, C), y (·, H, W, N); segments of an image down and across, and of all images;
    tiles."""

    H: int
    W: int
    C: int
    N: int
    bands: int
    across: int
    segments: int
    tiles: int


def shared_bytes(seg, frags):
    rows = 16 if (seg, frags) == (16, 4) else 8
    halo = (rows + 2) * (WARPS * frags // rows * 16 // seg) * (seg + 2)
    return -(-2 * halo * KC * 2 // 128) * 128 + STAGES * STAGE + 8 * halo


# Into shared memory -------------------------------------------------------------------------------


@device_inline
def origin(tile, which, image):
    """(image, row, column) of the first pixel of a tile's segment; one that does not exist begins
    below its image."""
    segment = int32(tile * SEGMENTS + (which if SEGMENTS > 1 else 0))
    number, rest = divide(segment, int32(image.bands * image.across))
    band, column = divide(rest, image.across)
    return number, int32(band * ROWS if segment < image.segments else 1 << 20), int32(column * SEG)


@device_inline
def write_table(tiles, table, tile, image, t):
    """For each pixel of a halo tile a word: where it is in x, in eights of channels, plus 1 (0:
    outside the image); in the two low bits its swizzle."""
    for i in range((HALO + THREADS - 1) // THREADS):
        p = int32(t + i * THREADS)
        row, column = divide(p, int32(PITCH))
        which = divide(column, int32(SEG + 2))[0]
        number, h, w = origin(tile, which, image)
        h, w = int32(h + row - 1), int32(w + column - which * (SEG + 2) - 1)
        inside = (h >= 0) & (h < image.H) & (w >= 0) & (w < image.W)
        at = int32(((number * image.H + h) * image.W + w) * (image.C >> 3) + 1)
        if p < HALO:
            store_word(
                tiles, int32(table + 4 * p), uint32((at if inside else 0) << 2 | column >> 1 & 3)
            )


@device_inline
def fetch_halo(tiles, table, halo, x, part, c0, C, t):
    """Start the copies of 32 channels, from c0 on, of half of a halo tile: part 0 or 1."""
    chunk = t & 3
    c, exists = int32(c0 + 8 * chunk - 8), c0 + 8 * chunk < C
    first = int32((t >> 2) + part * (HALF_PASSES * PASS))
    table, halo = int64(int32(table + 4 * first)), halo + uint32(first * (2 * KC))
    for i in range(HALF_PASSES):
        if (i + 1) * PASS + HALF_PASSES * PASS <= HALO or first + i * PASS < HALO:
            word = load_word(tiles, table + 4 * PASS * i)
            at = int32(word >> uint32(2))
            place = (
                halo + uint32(2 * KC * PASS * i) + (uint32(chunk) ^ word & uint32(3)) * uint32(16)
            )
            cp_async_16_zfill(
                place, x, int32(8 * at + c), uint32(16) if (at != 0) & exists else uint32(0)
            )


@device_inline
def fetch_weights(stage, weight, image, first_n, c0, s, t):
    """Start the copies of the weights of taps (0 … 2, s), from input channel c0 on.

    Rows of 64 bytes, one an output channel; FLIPPED: rows of 128, one an input channel of the
    flipped weight.
    """
    C, N = image.C, image.N
    if FLIPPED:
        chunk, row = t & 7, t >> 3
        n, k = int32(first_n + 8 * chunk), int32(c0 + row)
        to, at = (
            stage + uint32(row * 128 + ((chunk ^ row & 7) << 4)),
            int32((k * 9 + 8 - s) * N + n),
        )
        size = uint32(16) if (n < N) & (k < C) else uint32(0)
        size_2 = uint32(16) if (n < N) & (k + 16 < C) else uint32(0)
        far, tap = int32(144 * N), int32(-3 * N)
    else:
        chunk, row = t & 3, t >> 2
        n, c = int32(first_n + row), int32(c0 + 8 * chunk)
        to, at = (
            stage + uint32(row * 64 + ((chunk ^ row >> 1 & 3) << 4)),
            int32((n * 9 + s) * C + c),
        )
        size = uint32(16) if (n < N) & (c < C) else uint32(0)
        size_2 = uint32(16) if (n + 32 < N) & (c < C) else uint32(0)
        far, tap = int32(288 * C), int32(3 * C)
    for r in range(3):
        cp_async_16_zfill(to + uint32(r * TAP), weight, int32(at + r * tap), size)
        cp_async_16_zfill(to + uint32(r * TAP + 2048), weight, int32(at + r * tap + far), size_2)


# Products -----------------------------------------------------------------------------------------


@device_inline
def place_of_pixels(warp, lane, s):
    """Byte in the halo tile of a lane's row of the warp's first fragment, seen through taps (0, s)."""
    first = int32(warp * FRAGS)
    column = int32(first // ROWS * 16 + (lane & 15))
    column = int32(column + column // SEG * 2 + s)
    return uint32(
        first % ROWS * ROW_BYTES + column * (2 * KC) + ((lane >> 4 ^ column >> 1 & 3) << 4)
    )


@device_inline
def place_of_weights(lane):
    """Byte of a lane's row in a tap's weights."""
    if FLIPPED:
        return uint32((lane & 15) * 128 + ((lane >> 4 ^ lane & 7) << 4))
    row = int32((lane & 7) + (lane >> 4 << 3))
    return uint32(row * 64 + ((lane >> 3 & 1 ^ row >> 1 & 3) << 4))


@device_inline
def load_weights(at, half, r, j):
    """Fragments of output channels 16·j …, tap (r, s), 16 channels of the chunk's two halves."""
    if FLIPPED:
        return ldmatrix_x4_trans((at ^ uint32(32 * j)) + uint32(2048 * half + r * TAP))
    return ldmatrix_x4((at ^ uint32(32 * half)) + uint32(r * TAP + 1024 * j))


@device_inline
def multiply_tap(accumulators, a, weights, half, r):
    """accumulators += rows r … r + FRAGS - 1 of the loaded pixels · the weights of tap (r, s)."""
    for j in range(4):
        b = load_weights(weights, half, r, j)
        for m in range(FRAGS):
            k = 4 * (m + r)
            pixels = a[k], a[k + 1], a[k + 2], a[k + 3]
            mma_m16n8k16_into(accumulators, 32 * m + 8 * j, pixels, (b[0], b[1]))
            mma_m16n8k16_into(accumulators, 32 * m + 8 * j + 4, pixels, (b[2], b[3]))


@device_inline
def multiply_column(accumulators, a, pixels, weights, half):
    """accumulators += the products of taps (0 … 2, s) with 16 channels."""
    for i in range(FRAGS + 2):
        w = ldmatrix_x4((pixels ^ uint32(32 * half)) + uint32(i * ROW_BYTES))
        a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3] = w[0], w[1], w[2], w[3]
    multiply_tap(accumulators, a, weights, half, 0)
    multiply_tap(accumulators, a, weights, half, 1)
    multiply_tap(accumulators, a, weights, half, 2)


# Epilogue -----------------------------------------------------------------------------------------


@device_inline
def add_to_channels(accumulators, j, vectors, added, images, N, n):
    """Add bias and channel vectors to eight channels; one that is absent is read as the zeros of
    `no_numbers`.

    images: of a fragment's two halves
    """
    n = int32(min(int32(n + 8 * j), int32(N - 2)))
    at, above, below = int32(n * added.bias), int32(images[0] * N + n), int32(images[1] * N + n)
    above, below = int32(above * added.channel), int32(below * added.channel)
    b0, b1 = vectors.bias[uint32(at)], vectors.bias[uint32(at + 1)]
    e0, e1 = b0 + vectors.channel[uint32(above)], b1 + vectors.channel[uint32(above + 1)]
    f0, f1 = e0, e1
    if SEG == 8:
        f0, f1 = b0 + vectors.channel[uint32(below)], b1 + vectors.channel[uint32(below + 1)]
    for m in range(FRAGS):
        k = 32 * m + 4 * j
        accumulators[k], accumulators[k + 1] = accumulators[k] + e0, accumulators[k + 1] + e1
        accumulators[k + 2], accumulators[k + 3] = (
            accumulators[k + 2] + f0,
            accumulators[k + 3] + f1,
        )


@device_inline
def add_vectors(accumulators, vectors, added, image, tile, first_n, t):
    """Add bias and channel vectors to all of the warp's results."""
    lane, N = t & 31, image.N
    segment = int32(tile * SEGMENTS + (t >> 5) * FRAGS // ROWS * (16 // SEG))
    last, per_image = int32(image.segments - 1), int32(image.bands * image.across)
    above, below = (
        divide(min(segment, last), per_image)[0],
        divide(min(int32(segment + 1), last), per_image)[0],
    )
    images, n = (above, below), int32(first_n + (lane & 3) * 2)
    # not in a loop: accumulators stay in registers only under constant indices
    add_to_channels(accumulators, 0, vectors, added, images, N, n)
    add_to_channels(accumulators, 1, vectors, added, images, N, n)
    add_to_channels(accumulators, 2, vectors, added, images, N, n)
    add_to_channels(accumulators, 3, vectors, added, images, N, n)
    add_to_channels(accumulators, 4, vectors, added, images, N, n)
    add_to_channels(accumulators, 5, vectors, added, images, N, n)
    add_to_channels(accumulators, 6, vectors, added, images, N, n)
    add_to_channels(accumulators, 7, vectors, added, images, N, n)


@device_inline
def stash_pair(tiles, at, low, high, residual):
    """Two neighbouring channels of a pixel into the block's results; `residual`: where theirs is."""
    if residual:
        a, b = unpack_half2(load_word(tiles, at))
        low += a
        high += b
    store_word(tiles, at, pack_half2(low, high))


@device_inline
def stash(tiles, patch, accumulators, first, residual, lane):
    """PATCH fragments of the warp's results, from `first` on, into its patch, as float16."""
    at = int64(int32(patch + (lane >> 2) * OUT_PITCH + (lane & 3) * 4))
    for m in range(PATCH):
        for j in range(8):
            k, to = 32 * (first + m) + 4 * j, at + m * 16 * OUT_PITCH + j * 16
            stash_pair(tiles, to, accumulators[k], accumulators[k + 1], residual)
            stash_pair(
                tiles, to + 8 * OUT_PITCH, accumulators[k + 2], accumulators[k + 3], residual
            )


@device_inline
def move_results(tiles, patch, array, first, image, tile, first_n, t, loads):
    """Copy PATCH fragments of the warp between its patch and y, or an array like it, 16 bytes a
    lane.

    loads: from the array into the patch, zeros where nothing is; else from the patch
    """
    lane, fragment = t & 31, int32((t >> 5) * FRAGS)
    n = int32(first_n + 8 * (lane & 7))
    place = int64(int32(patch + (lane >> 3) * OUT_PITCH + (lane & 7) * 16))
    for q in range(4):
        number, h, w = origin(tile, int32(fragment // ROWS * (16 // SEG) + 4 * q // SEG), image)
        h, w = int32(h + fragment % ROWS + first), int32(w + 4 * q % SEG + (lane >> 3))
        at, step = (
            int64(int32(((number * image.H + h) * image.W + w) * image.N + n)),
            int32(image.W * image.N),
        )
        exists = (w < image.W) & (n < image.N)
        for m in range(PATCH):
            to, index = place + (16 * m + 4 * q) * OUT_PITCH, at + m * step
            inside = exists & (h + m < image.H)
            if loads:
                v = load_words4_where(array, index, int32(inside))
                store_words4(tiles, to, *v)
            elif inside:
                v = load_words4(tiles, to)
                store_words4(array, index, *v)


@device_inline
def write_results(tiles, region, accumulators, first, residual, added, y, image, tile, first_n, t):
    """PATCH fragments of the warp's results into y, by way of its patch; region: where the warps'
    patches begin."""
    patch = int32(region + (t >> 5) * (PATCH * 16 * OUT_PITCH))
    if added.residual:
        move_results(tiles, patch, residual, first, image, tile, first_n, t, True)
        cuda.syncwarp()
        stash(tiles, patch, accumulators, first, True, t & 31)
    else:
        stash(tiles, patch, accumulators, first, False, t & 31)
    cuda.syncwarp()
    move_results(tiles, patch, y, first, image, tile, first_n, t, False)
    cuda.syncwarp()


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
def convolve_halo(x, weight, addends, y, image, added):
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    first_n, C = int32(cuda.blockIdx.y * TILE_N), int32(image.C)
    steps = int32(3 * divide(C + KC - 1, int32(KC))[0])
    tile, stride = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    write_table(tiles, int32(TABLES), tile, image, t)
    write_table(tiles, int32(TABLES + TABLE_BYTES), int32(tile + stride), image, t)
    cuda.syncthreads()
    fetch_halo(tiles, int32(TABLES), base, x, int32(0), int32(0), C, t)
    fetch_halo(tiles, int32(TABLES), base, x, int32(1), int32(0), C, t)
    fetch_weights(base + uint32(RING), weight, image, first_n, int32(0), int32(0), t)
    cp_async_commit()
    fetch_weights(base + uint32(RING + STAGE), weight, image, first_n, int32(0), int32(1), t)
    cp_async_commit()

    a = cuda.local.array(A_WORDS, "uint32")
    accumulators = cuda.local.array(ACCUMULATORS, "float32")
    stage, ahead = uint32(0), uint32(2 * STAGE)
    halo, table = int32(0), int32(TABLES)  # of the chunk that is multiplied, and of its tile
    while tile < image.tiles:
        for k in range(ACCUMULATORS):
            accumulators[k] = float32(0)
        s, c0 = int32(0), int32(0)
        for _ in range(steps):
            cp_async_wait(PENDING)  # this thread's copies for the step have arrived
            # so have all others', and the stage of the step before is no longer read
            cuda.syncthreads()
            t = opaque(t)
            last = c0 + KC >= C  # the chunk after the tile's last is the next tile's first
            c_next = int32(0 if last else c0 + KC)
            other = int32(HALO_BYTES - halo)
            if s < 2 and (not last or tile + stride < image.tiles):
                fetch_halo(
                    tiles,
                    int32(2 * TABLES + TABLE_BYTES - table if last else table),
                    base + uint32(other),
                    x,
                    s,
                    c_next,
                    C,
                    t,
                )
            elif s == 2 and last:
                write_table(tiles, table, int32(tile + 2 * stride), image, t)
            fetch_weights(
                base + uint32(RING) + ahead,
                weight,
                image,
                first_n,
                int32(c0 if s == 0 else c_next),
                int32(2 if s == 0 else s - 1),
                t,
            )
            cp_async_commit()
            pixels = base + uint32(halo) + place_of_pixels(t >> 5, t & 31, s)
            weights = base + uint32(RING) + stage + place_of_weights(t & 31)
            multiply_column(accumulators, a, pixels, weights, 0)
            multiply_column(accumulators, a, pixels, weights, 1)
            ahead = stage
            stage = uint32(stage + STAGE if stage < 2 * STAGE else 0)
            s = int32(s + 1)
            if s == 3:
                s, c0, halo = int32(0), int32(c0 + KC), other

        cuda.syncthreads()  # the last chunk is no longer read: the warps' patches take its place
        t = opaque(t)
        table = int32(2 * TABLES + TABLE_BYTES - table)
        if added.bias or added.channel:
            add_vectors(accumulators, addends, added, image, tile, first_n, t)
        region, residual = int32(HALO_BYTES - halo), addends.residual
        write_results(tiles, region, accumulators, 0, residual, added, y, image, tile, first_n, t)
        write_results(
            tiles, region, accumulators, PATCH, residual, added, y, image, tile, first_n, t
        )
        tile = int32(tile + stride)


def make_kernel(seg, frags, flipped):
    return specialise(
        convolve_halo,
        launch_bounds=(THREADS, 2),
        SEG=seg,
        FRAGS=frags,
        FLIPPED=flipped,
        name=f"conv2d_forward_kernel_v4_halo_{seg}_{frags}{'_flipped' if flipped else ''}",
    )


KERNELS = Variants(
    [(seg, frags, flipped) for seg in (16, 8) for frags in (4, 2) for flipped in (False, True)],
    lambda key: make_kernel(*key),
)


# Launchers ----------------------------------------------------------------------------------------


def choose_tile(b, h, w, n, multiprocessors, shared):
    """(SEG, FRAGS): the tile that ends soonest, of those that `shared` bytes of shared memory hold."""
    best = None
    for seg in (16, 8):
        for frags in (4, 2):
            if shared_bytes(seg, frags) > shared:
                continue
            rows = 16 if (seg, frags) == (16, 4) else 8
            segments = WARPS * frags // rows * 16 // seg
            tiles = -(-b * -(-h // rows) * -(-w // seg) // segments)
            blocks = tiles * -(-n // TILE_N)
            # two blocks share a multiprocessor's tensor cores
            rounds = -(-blocks // multiprocessors)
            estimate = rounds * (frags + 0.5) * (1.0 if rounds > 1 else 1.3)
            if best is None or estimate < best[0]:
                best = estimate, seg, frags
    return best[1:]


def addends_of(x, bias, channel, residual):
    """(`Addends`, `Added`) of a convolution of x; None for what is absent."""
    nothing = no_numbers(x.backend)
    addends = Addends(
        nothing if bias is None else bias,
        nothing if channel is None else channel.reshape(-1),
        x.reshape(-1) if residual is None else residual.reshape(-1),
    )
    return addends, Added(*(int(each is not None) for each in (bias, channel, residual)))


def halo_forward(x, weight, bias, y, channel=None, residual=None, flipped=False, only=None):
    """y = conv2d(x, weight) + …, or, flipped, the convolution with the flipped weight (weight (C,
    3, 3, N)).

    only: (SEG, FRAGS)
    """
    b, h, w, c = x.shape
    n = y.shape[3]
    seg, frags = only or choose_tile(
        nominal_extent(b), h, w, n, multiprocessors_of(x), shared_limit(x)
    )
    rows = 16 if (seg, frags) == (16, 4) else 8
    bands, across = -(-h // rows), -(-w // seg)
    segments = b * bands * across
    tiles = -(-segments // (WARPS * frags // rows * 16 // seg))
    columns = -(-n // TILE_N)
    turns = -(-tiles // max(1, BLOCKS * multiprocessors_of(x) // columns))
    addends, added = addends_of(x, bias, channel, residual)
    launch(
        in_bfloat16(KERNELS[seg, frags, flipped], x.dtype),
        (-(-tiles // turns), columns),
        THREADS,
        x.reshape(-1),
        weight.reshape(-1),
        addends,
        y.reshape(-1),
        HaloImage(h, w, c, n, bands, across, segments, tiles),
        added,
        shared=shared_bytes(seg, frags),
    )
    return y
