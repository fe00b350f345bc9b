"""Tensor cores of sm_80 and later: `ldmatrix`, `mma.sync`, and the words of float16 that travel
between them.

A tensor-core instruction is executed by a whole warp. Each of its operands, a small matrix called a
fragment, is spread over the registers of the 32 lanes. The position of each element is documented
in `numdiff/emulator/fragments.py`. A warp loads fragments from shared memory with `ldmatrix`, which
spreads them in just that way, and accumulates their products:

    a = ldmatrix_x4(a_address)                          # 16 × 16 of float16
    b = ldmatrix_x4(b_address)                          # 16 × 16 of float16: two fragments of 16 × 8
    mma_m16n8k16_into(accumulators, 0, a, (b[0], b[1]))         # accumulators[0 … 3] += a · b, 16 × 8 of float32
    mma_m16n8k16_into(accumulators, 4, a, (b[2], b[3]))

WORDS AND FRAGMENTS
    A fragment of float16, tf32 or E4M3 is a tuple of uint32, each with two float16 (the low half is
    the first), one tf32, or four E4M3; where it is a single register, a plain uint32. Accumulators are float32: a
    tuple of four, or (…_into) four neighbours in a `cuda.local.array` of one axis, which a loop can
    index. Such an array stays in registers as long as every index into it is known once its loops
    are unrolled.

    ldmatrix_x1, _x2, _x4 (address), ldmatrix_x1_trans, …   one, two or four 8 × 8 matrices of 16-bit elements
    mma_m16n8k16(a, b, c)       float16: 4, 2 and 4 registers → 4       mma_m16n8k16_into(accumulators, first, a, b)
    mma_m16n8k8(a, b, c)        float16: 2, one and 4 registers → 4     mma_m16n8k8_into(accumulators, first, a, b)
    mma_m16n8k8_tf32(a, b, c)   tf32: 4, 2 and 4 registers → 4          mma_m16n8k8_tf32_into(accumulators, first, a, b)
    mma_m16n8k32_e4m3(a, b, c)  E4M3: 4, 2 and 4 registers → 4        mma_m16n8k32_e4m3_into(accumulators, first, a, b)
    pack_half2(low, high), unpack_half2(word), ones_half2(), round_tf32(x), word_of(x), float_of(word)
    load_word(array, index), store_word(array, index, word)     4 bytes of an array of any type
    load_words2(array, index), store_words2(array, index, a, b)     8 bytes: 2 float32, or 4 float16, as two words
    load_words4(array, index), store_words4(array, index, …)    16 bytes: 8 float16 as four words
    load_words4_where(array, index, inside)                     the same, or zeros, without a branch
    low_halves(a, b), high_halves(a, b)                         the low, the high 16 bits of two words, as a word
    choose_bytes(a, b, selector)                                any four of their eight bytes

ADDRESSES
    As in ../async_copy.py: `ldmatrix` takes 32-bit shared addresses (each row of 8 elements starts
    at a multiple of 16 bytes), the loads and stores of words take a contiguous array and an
    element's index counted over all its axes.

ACCUMULATION
    Products of two float16, or of two tf32, are exact in float32. The emulator adds them to c one
    by one in the order of k, rounding each sum to the nearest float32. The hardware adds a group of
    products and c in one step, aligned to the largest of them and truncated (Fasi, Higham, Mikaitis
    and Pranesh 2021, "Numerical behavior of NVIDIA tensor cores"), so results differ in their last
    bits. Of tf32 operands the low 13 bits are ignored. E4M3 (sm_89 and later) is loaded as pairs of
    bytes, which `ldmatrix` cannot transpose: both operands must be stored along k.

SOURCE  PTX ISA, sections 9.7.9.21 (`cvt`) and 9.7.14.5 (`mma`, `ldmatrix`).

FILES  words.py, ldmatrix.py, mma_sync.py. All names are here, too.
"""

from .ldmatrix import (
    ldmatrix_x1,
    ldmatrix_x1_trans,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
)
from .mma_sync import (
    make_mma,
    mma_m16n8k8,
    mma_m16n8k8_into,
    mma_m16n8k8_tf32,
    mma_m16n8k8_tf32_into,
    mma_m16n8k16,
    mma_m16n8k16_into,
    mma_m16n8k32_e4m3,
    mma_m16n8k32_e4m3_into,
)
from .words import (
    choose_bytes,
    float_of,
    high_halves,
    load_word,
    load_words2,
    load_words4,
    load_words4_where,
    low_halves,
    ones_half2,
    pack_half2,
    round_tf32,
    store_word,
    store_words2,
    store_words4,
    unpack_half2,
    word_of,
)

__all__ = [
    "choose_bytes",
    "float_of",
    "high_halves",
    "ldmatrix_x1",
    "ldmatrix_x1_trans",
    "ldmatrix_x2",
    "ldmatrix_x2_trans",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "load_word",
    "load_words2",
    "load_words4",
    "load_words4_where",
    "low_halves",
    "make_mma",
    "mma_m16n8k16",
    "mma_m16n8k16_into",
    "mma_m16n8k32_e4m3",
    "mma_m16n8k32_e4m3_into",
    "mma_m16n8k8",
    "mma_m16n8k8_into",
    "mma_m16n8k8_tf32",
    "mma_m16n8k8_tf32_into",
    "ones_half2",
    "pack_half2",
    "round_tf32",
    "store_word",
    "store_words2",
    "store_words4",
    "unpack_half2",
    "word_of",
]
