"""`ldmatrix`: a warp loads 8 × 8 matrices from shared memory, spread over its lanes as a product
takes them.

SOURCE  PTX ISA, section 9.7.14.5 (`ldmatrix`).
"""

import sys

from numba.cuda import types
from numba.cuda.extending import intrinsic

from ...emulator import twin
from ...emulator.warp_matrix import load_matrices
from ..inline_ptx import I32, statement
from .words import word_tuple


def _ldmatrix(count, which, transposed=""):
    """Signature and code of a load of `count` matrices."""
    result = types.uint32 if count == 1 else word_tuple(count)
    registers = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.{which}{transposed}.shared.b16 {{{registers}}}, [${count}];"
    return result(types.uint32), statement(text, [I32] * count, ordered=True, collective=True)


@intrinsic
def ldmatrix_x1(typingctx, address):
    """An 8 × 8 matrix of 16-bit elements from shared memory: lane l gets elements 2·(l % 4) and the
    next of row l // 4.

    Lanes 0 … 7 give the addresses of the rows.
    """
    return _ldmatrix(1, "x1")


@twin(ldmatrix_x1)
def _ldmatrix_x1(machine, address):
    return load_matrices(machine, address, 1, False, sys._getframe(1))


@intrinsic
def ldmatrix_x2(typingctx, address):
    """Two such matrices; lanes 0 … 7 give the rows of the first, 8 … 15 those of the second."""
    return _ldmatrix(2, "x2")


@twin(ldmatrix_x2)
def _ldmatrix_x2(machine, address):
    return load_matrices(machine, address, 2, False, sys._getframe(1))


@intrinsic
def ldmatrix_x4(typingctx, address):
    """Four such matrices; lane l gives row l % 8 of matrix l // 8.

    The A of an m16n8k16: lane l gives row l % 16, k from 8·(l // 16). Two Bs, stored (N, K): lane l
    gives n = l % 8 + 8·(l // 16), k from 8·(l // 8 % 2); registers 0 and 1 are the first B, 2 and 3
    the second.
    """
    return _ldmatrix(4, "x4")


@twin(ldmatrix_x4)
def _ldmatrix_x4(machine, address):
    return load_matrices(machine, address, 4, False, sys._getframe(1))


@intrinsic
def ldmatrix_x1_trans(typingctx, address):
    """As `ldmatrix_x1`, of the transposed matrix: lane l gets rows 2·(l % 4) and the next of column
    l // 4."""
    return _ldmatrix(1, "x1", ".trans")


@twin(ldmatrix_x1_trans)
def _ldmatrix_x1_trans(machine, address):
    return load_matrices(machine, address, 1, True, sys._getframe(1))


@intrinsic
def ldmatrix_x2_trans(typingctx, address):
    """As `ldmatrix_x2`, each matrix transposed: the B of an m16n8k16 stored (K, N), lane l giving
    row k = l."""
    return _ldmatrix(2, "x2", ".trans")


@twin(ldmatrix_x2_trans)
def _ldmatrix_x2_trans(machine, address):
    return load_matrices(machine, address, 2, True, sys._getframe(1))


@intrinsic
def ldmatrix_x4_trans(typingctx, address):
    """As `ldmatrix_x4`, each matrix transposed."""
    return _ldmatrix(4, "x4", ".trans")


@twin(ldmatrix_x4_trans)
def _ldmatrix_x4_trans(machine, address):
    return load_matrices(machine, address, 4, True, sys._getframe(1))
