"""Matmul, rung 0: the product with which every course begins, and the exchange of two letters that
makes it fast.

MATHEMATICS
    C[m, n] = Σ_k A[m, k] · B[k, n]
SHAPES
    A (M, K), B (K, N), C (M, N): float32, stored row by row
VERSIONS
    v1  uncoalesced: `row, column = cuda.grid(2)`. Thread x is the one whose number runs fastest: the 32 threads of a
        warp are 32 rows of C in one column. At each k they read 32 elements of A that are K apart, in 32 different
        lines of memory, and for one number of B.
    v2  coalesced: `column, row = cuda.grid(2)`. The 32 threads are 32 columns of a row: they read one element of A,
        which all of them get, and for 32 neighbours of B, one line of 128 bytes. They write one line, too.
    The arithmetic is the same, and so are its bits.
WHAT A GPU SEES
    A warp's 32 loads are one request. It costs as many transactions as pieces of 32 bytes that it
    touches. In the emulator `numdiff kernels check matmul_first --counts` counts them: on a small
    problem 7.1 for a request that loads and 17.5 for one that stores in v1, 2.1 and 3.2 in v2.
LAUNCH
    blocks of 32 × 8 threads, one for each element of C; a thread outside of C does nothing.
DETERMINISM
    one thread sums its products in the order of k.
COST
    4 · (M · K + K · N + M · N) bytes at least, 2 · M · N · K FLOPs. These kernels read 8 · M · N ·
    K bytes.
SOURCE
    the definition of the product.
READ NEXT
    naive.py, v2 for all layouts and batches: the first rung of the ladder that the models climb.
"""

from ...device import cuda, empty, float32, launch
from ..operation import Problem, Version, operation, single

BLOCK = 32, 8  # threads along x and y: a warp is a row of x


@cuda.jit
def matmul_first_kernel_v1(C, A, B, M, N, K):
    row, column = cuda.grid(2)
    if row < M and column < N:
        total = float32(0)
        for k in range(K):
            total += A[row, k] * B[k, column]
        C[row, column] = total


@cuda.jit
def matmul_first_kernel_v2(C, A, B, M, N, K):
    column, row = cuda.grid(2)
    if row < M and column < N:
        total = float32(0)
        for k in range(K):
            total += A[row, k] * B[k, column]
        C[row, column] = total


def matmul_first_forward_reference(a, b):
    return a @ b


def matmul_first_forward_cost(M, N, K):
    """(bytes, FLOPs): each operand read once and the result written once."""
    return 4 * (M * K + K * N + M * N), 2 * M * N * K


def _check(a, b):
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"a {a.shape} needs b ({a.shape[1]}, N), not {b.shape}")


@operation(
    reference=matmul_first_forward_reference,
    cost=matmul_first_forward_cost,
    check=_check,
    versions=[
        Version("uncoalesced", matmul_first_kernel_v1),
        Version("coalesced", matmul_first_kernel_v2),
    ],
    problems=[
        Problem("", a=single(35, 6), b=single(6, 37)),
        Problem(a=single(2048, 2048), b=single(2048, 2048), measured=True),
    ],
)
def matmul_first_forward(a, b, version=None):
    """A·B as a new array (M, N): a (M, K), b (K, N), float32."""
    (M, K), N = a.shape, b.shape[1]
    c = empty((M, N), a.dtype, like=a)
    along_x, along_y = (M, N) if version.name == "uncoalesced" else (N, M)
    x, y = BLOCK
    launch(version.kernel, (-(-along_x // x), -(-along_y // y)), BLOCK, c, a, b, M, N, K)
    return c
