"""The rotary position embedding of an image's tokens, as LightningDiT has it: a table for
`F.qk_norm_rope`.

Half of a head's channels turn with the token's row, the other half with its column, in pairs of
neighbours. Pair i of a half of d = head size / 2 channels turns by the angle p · ω_i, p the row or
column, ω_i = theta^(-2i / d).

SOURCE  Su et al. 2021, arXiv:2104.09864, section 3.2.2, eq. 15 and 34; the order of rows, columns and pairs is that of
    EVA-02 (Fang et al. 2023, arXiv:2303.11331), whose embedding LightningDiT (Yao et al. 2025, arXiv:2501.01423) uses.
"""

import numpy as np

from ..errors import UsageError
from ..sizes import sides


def rotation_table(head_size, grid, theta=10000.0):
    """Cosines and sines of `grid` = (rows, columns) of tokens, or of as many of both, row by row:
    float32 (2, T, head_size), computed in float64."""
    if head_size < 4 or head_size % 4:
        raise UsageError(
            f"A head of {head_size} channels cannot be rotated: row and column share its pairs, so use a "
            "number of heads with which it is a multiple of 4."
        )
    half = head_size // 2
    down, across = sides(grid)
    positions = np.arange(max(down, across))[:, None]
    line = np.repeat(positions * theta ** (-np.arange(0, half, 2) / half), 2, axis=1)
    rows, columns = np.divmod(np.arange(down * across), across)
    angles = np.concatenate((line[rows], line[columns]), axis=1)
    return np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)
