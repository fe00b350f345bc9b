"""An image size in both forms: a side, or height and width."""

import json

import numpy as np
import pytest

from numdiff.errors import UsageError
from numdiff.setting import say
from numdiff.sizes import (
    Sides,
    as_size,
    check_halvings,
    in_pixels,
    is_multiple,
    level_sides,
    nearest_multiple,
    scaled_down,
    sides,
)


def test_a_square_is_one_number():
    for size in (64, np.int64(64), (64, 64), [64, 64]):
        assert as_size(size) == 64 and type(as_size(size)) is int and sides(size) == (64, 64)
    assert as_size([48, 64]) == Sides(48, 64) == (48, 64) and sides([48, 64]) == (48, 64)
    assert json.dumps({"size": as_size((48, 64))}) == '{"size": [48, 64]}'


def test_in_words():
    assert str(as_size((48, 64))) == say(as_size((48, 64))) == "48x64" and say(as_size(64)) == "64"
    assert in_pixels([48, 64]) == "48×64" and in_pixels(64) == "64×64"


@pytest.mark.parametrize("size", [(1, 2, 3), (4,), "48x64", 4.5, True, (4, None), None])
def test_what_is_no_size(size):
    with pytest.raises(UsageError, match="image_size must be a whole number, or height and width"):
        as_size(size)


def test_what_a_number_divides():
    assert is_multiple((48, 64), 16) and not is_multiple((48, 64), 32)
    assert scaled_down((48, 64), 8) == (6, 8) and scaled_down(64, 8) == 8
    assert nearest_multiple((50, 3), 8) == (48, 8) and nearest_multiple((30, 33), 16) == 32
    assert level_sides((64, 48), 3) == [64, 32, 16]
    check_halvings((48, 64), 4)
    with pytest.raises(UsageError, match="50x64 cannot be halved 3 times.* 8, such as 48x64"):
        check_halvings((50, 64), 3)
