"""The matrix element in each register of each lane, for the tensor-core instructions of a warp.

Each function takes a lane (0 … 31) and gives that lane's registers in order; each register is a
tuple of the (row, column) of its elements, the element in the low bits first. E4M3 comes four to a
32-bit register, float16 two, float32 and tf32 one by one.

    mma m16n8k16    D (16 × 8) = A (16 × 16) · B (16 × 8) + C, float16 in, float32 sums
    mma m16n8k8     D (16 × 8) = A (16 × 8) · B (8 × 8) + C, float16 or tf32 in, float32 sums
    mma m16n8k32    D (16 × 8) = A (16 × 32) · B (32 × 8) + C, E4M3 in, float32 sums

All follow one pattern. An 8 × 8 matrix of 16-bit elements is spread over a warp so that lane l has
two neighbours of row l // 4, as one matrix of `ldmatrix` gives. A is made of such matrices, its
rows first; B too, but with its columns in the place of rows, which is why B is best stored as (N,
K). With E4M3 two neighbours along k stand for one 16-bit element, so `ldmatrix` loads them, too.

SOURCE  PTX ISA, section 9.7.14.5, "Matrix multiply-accumulate operation using mma instruction": the fragment layouts,
and "ldmatrix" there.
"""

LANES = 32


def matrix_8x8(lane):
    """What `ldmatrix` gives a lane of an 8 × 8 matrix of 16-bit elements: one register."""
    row, column = lane // 4, 2 * (lane % 4)
    return (((row, column), (row, column + 1)),)


def matrix_8x8_transposed(lane):
    """What `ldmatrix.trans` gives a lane: the same places of the transposed matrix."""
    return tuple(tuple((row, column) for column, row in register) for register in matrix_8x8(lane))


def _shifted(matrix, rows, columns):
    """The one register of an 8 × 8 matrix that begins at (rows, columns) of a larger one."""
    return tuple((rows + row, columns + column) for row, column in matrix[0])


def fragment_a_m16n8k16(lane):
    """A, 16 × 16 of float16: four registers, the 8 × 8 quarters down the rows first."""
    matrix = matrix_8x8(lane)
    return tuple(_shifted(matrix, rows, columns) for columns in (0, 8) for rows in (0, 8))


def fragment_b_m16n8k16(lane):
    """B, 16 × 8 (k, n) of float16: two registers, each with two neighbours along k."""
    matrix = matrix_8x8_transposed(lane)
    return tuple(_shifted(matrix, rows, 0) for rows in (0, 8))


def fragment_a_m16n8k8(lane):
    """A, 16 × 8 of float16: two registers."""
    matrix = matrix_8x8(lane)
    return tuple(_shifted(matrix, rows, 0) for rows in (0, 8))


def fragment_b_m16n8k8(lane):
    """B, 8 × 8 (k, n) of float16: one register."""
    return matrix_8x8_transposed(lane)


def fragment_a_m16n8k8_tf32(lane):
    """A, 16 × 8 of tf32: four registers."""
    row, column = lane // 4, lane % 4
    return tuple(((row + rows, column + columns),) for columns in (0, 4) for rows in (0, 8))


def fragment_b_m16n8k8_tf32(lane):
    """B, 8 × 8 (k, n) of tf32: two registers."""
    row, column = lane % 4, lane // 4
    return tuple(((row + rows, column),) for rows in (0, 4))


def fragment_a_m16n8k32(lane):
    """A, 16 × 32 of E4M3: four registers, each with four neighbours along k."""
    row, column = lane // 4, 4 * (lane % 4)
    return tuple(
        tuple((row + rows, column + columns + i) for i in range(4))
        for columns in (0, 16)
        for rows in (0, 8)
    )


def fragment_b_m16n8k32(lane):
    """B, 32 × 8 (k, n) of E4M3: two registers, each with four neighbours along k."""
    row, column = 4 * (lane % 4), lane // 4
    return tuple(tuple((row + rows + i, column) for i in range(4)) for rows in (0, 16))


def fragment_c_m16n8(lane):
    """C and D, 16 × 8 of float32, of every mma here: four registers, two neighbours of a row and
    two of row + 8."""
    row, column = lane // 4, 2 * (lane % 4)
    return tuple(((row + rows, column + columns),) for rows in (0, 8) for columns in (0, 1))
