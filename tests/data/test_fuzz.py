"""A few damaged files of each kind; `python -m tests.data.fuzz` makes as many as one likes."""

import pytest

from tests.conftest import exhaustive

from .fuzz import KINDS, run_case

CASES = {"checkpoint": 8, "stats": 20}  # which take longest


@exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused_in_one_sentence(kind, tmp_path):
    failed = {
        number: fault
        for number in range(CASES.get(kind, 40))
        if (fault := run_case(kind, number, tmp_path))
    }
    assert not failed
