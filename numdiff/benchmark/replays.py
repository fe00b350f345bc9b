"""Timing recorded graphs: with enough calls and replays to take long compared with the host's
clock."""

import statistics
import time

import numpy as np

REPLAY_S = 2e-3  # the least time to measure: long compared with the host's clock and its waiting
MAX_CALLS = 40  # of a graph
MAX_TURNS = 50  # replays of it that are timed together


def repeated(replay, wait, calls):
    """(run, wait, calls) of several replays, one after the other, of a graph of `calls` calls:
    enough to take long compared with the host's clock and its waiting."""
    for _ in range(2):  # the first loads the graph
        start = time.perf_counter()
        replay()
        wait()
    turns = int(np.clip(REPLAY_S / (time.perf_counter() - start), 1, MAX_TURNS))

    def run():
        for _ in range(turns):
            replay()

    return run, wait, calls * turns


def timed(run, wait, calls, repeats):
    """Median seconds of a call."""
    run()
    wait()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        wait()
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)
