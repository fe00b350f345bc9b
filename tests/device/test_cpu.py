"""The CPU engine's threads."""

import os
import threading
import time

import numpy as np
import pytest

from numdiff.device import cpu, one_after_another, over_batch, side_by_side
from tests.conftest import needs

MUCH = 1 << 30  # elements: worth sharing


@pytest.fixture(params=[2, 3])
def count(request):
    before = cpu._share
    cpu.share_cores(request.param)
    yield request.param
    cpu.share_cores(before)


def test_each_share_has_a_thread_and_the_first_is_the_callers(count):
    for _ in range(3):
        found = over_batch(lambda share: (share, threading.current_thread()), 7, MUCH)
        assert [share for share, _ in found] == cpu.shares(7, count)
        assert (
            found[0][1] is threading.current_thread() and len({thread for _, thread in found}) > 1
        )


def test_results_are_in_order_of_submission(count):
    assert over_batch(
        lambda share: time.sleep(0.02 * (3 - share.start)) or share.start, 3, MUCH
    ) == [share.start for share in cpu.shares(3, count)]


def test_all_have_ended_when_an_error_is_raised(count):
    ended = []

    def fails_first(share):
        if share.start == 0:
            raise ValueError("the first")
        time.sleep(0.05)
        ended.append(share)

    with pytest.raises(ValueError, match="the first"):
        over_batch(fails_first, 3, MUCH)
    assert len(ended) == count - 1
    with pytest.raises(ZeroDivisionError):
        over_batch(
            lambda share: 1 // (2 - share.stop if share.stop == 2 else 1 - share.start // 9),
            2,
            MUCH,
        )


def test_a_share_shares_nothing_further(count):
    assert (
        over_batch(lambda share: len(over_batch(lambda inner: inner, 4, MUCH)), 3, MUCH)
        == [1] * count
    )
    assert over_batch(lambda share: share, 3, 10) == [slice(0, 3)]  # little work
    for least in (1, 2, 3):  # of shares worth handing over there may be fewer than cores
        assert len(over_batch(lambda share: share, 8, (least + 1) * cpu.LEAST_SHARE - 1)) == min(
            least, count
        )


def test_nothing_of_the_work_is_kept(count):
    class Array:
        left = 0

        def __del__(self):
            Array.left += 1

    over_batch(lambda share, array=Array(): None, 3, MUCH)  # noqa: B008
    deadline = time.monotonic() + 5
    while not Array.left and time.monotonic() < deadline:
        time.sleep(0.001)
    assert Array.left


def test_several_threads_ask_at_once(count):
    found = {}

    def ask(number):
        found[number] = [
            sum(over_batch(lambda share: np.arange(100)[share].sum() * number, 100, MUCH))
            for _ in range(30)
        ]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {number: [4950 * number] * 30 for number in range(4)}


def test_threads_end_when_fewer_cores_are_to_be_used(count):
    over_batch(lambda share: None, 3, MUCH)
    crew = [thread for thread in threading.enumerate() if thread.name.startswith(cpu.WORKER)]
    assert len(crew) >= count - 1
    cpu.share_cores(1)
    for thread in crew:
        thread.join(5)
        assert not thread.is_alive()


@needs("posix")
def test_a_forked_process_has_threads_of_its_own(count):
    over_batch(lambda share: None, 3, MUCH)
    process = os.fork()
    if not process:
        code = 1
        try:
            code = 0 if len(over_batch(lambda share: share, 3, MUCH)) == count else 2
        finally:
            os._exit(code)
    assert os.waitpid(process, 0)[1] == 0


def test_side_by_side_keeps_the_order(count):
    assert list(side_by_side(lambda item: item * item, range(20))) == [
        item * item for item in range(20)
    ]


def test_one_after_another_in_the_thread_that_asks():
    with one_after_another():
        assert set(side_by_side(lambda _: threading.current_thread(), range(9))) == {
            threading.current_thread()
        }
    assert threading.current_thread() not in set(
        side_by_side(lambda _: threading.current_thread(), range(9))
    )
