"""`ldmatrix`: a warp loads 8 × 8 matrices from shared memory, spread over its lanes as a product
takes them.

SOURCE  PTX ISA, section 9.7.14.5 (`ldmatrix`).
"""

import sys

from ...emulator.warp_matrix import load_matrices
from ..inline_ptx import instruction, many, u32


def _load(count, transposed=""):
    """Decorator: a load of `count` matrices."""
    registers = ", ".join(f"${i}" for i in range(count))
    text = (
        f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{registers}}}, [${count}];"
    )
    return instruction(text, ordered=True, collective=True)


@_load(1)
def ldmatrix_x1(machine, address: u32) -> u32:
    """An 8 × 8 matrix of 16-bit elements from shared memory: lane l gets elements 2·(l % 4) and the
    next of row l // 4.

    Lanes 0 … 7 give the addresses of the rows.
    """
    return load_matrices(machine, address, 1, False, sys._getframe(1))


@_load(2)
def ldmatrix_x2(machine, address: u32) -> many(u32, 2):
    """Two such matrices; lanes 0 … 7 give the rows of the first, 8 … 15 those of the second."""
    return load_matrices(machine, address, 2, False, sys._getframe(1))


@_load(4)
def ldmatrix_x4(machine, address: u32) -> many(u32, 4):
    """Four such matrices; lane l gives row l % 8 of matrix l // 8.

    The A of an m16n8k16: lane l gives row l % 16, k from 8·(l // 16). Two Bs, stored (N, K): lane l
    gives n = l % 8 + 8·(l // 16), k from 8·(l // 8 % 2); registers 0 and 1 are the first B, 2 and 3
    the second.
    """
    return load_matrices(machine, address, 4, False, sys._getframe(1))


@_load(1, ".trans")
def ldmatrix_x1_trans(machine, address: u32) -> u32:
    """As `ldmatrix_x1`, of the transposed matrix: lane l gets rows 2·(l % 4) and the next of column
    l // 4."""
    return load_matrices(machine, address, 1, True, sys._getframe(1))


@_load(2, ".trans")
def ldmatrix_x2_trans(machine, address: u32) -> many(u32, 2):
    """As `ldmatrix_x2`, each matrix transposed: the B of an m16n8k16 stored (K, N), lane l giving
    row k = l."""
    return load_matrices(machine, address, 2, True, sys._getframe(1))


@_load(4, ".trans")
def ldmatrix_x4_trans(machine, address: u32) -> many(u32, 4):
    """As `ldmatrix_x4`, each matrix transposed."""
    return load_matrices(machine, address, 4, True, sys._getframe(1))
