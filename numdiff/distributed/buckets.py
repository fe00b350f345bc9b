"""Buckets of the flat gradient, and the moment in the backward pass at which each is complete.

A bucket is a run of whole parameters. It may leave for the other ranks once the last operation that
adds to one of its gradients has been played back. The first backward pass shows which one that is:
each record of the tape names the parameters to whose gradients it adds (`Record.parameters`). The
step is static, so the plan made then holds for every later step; if a tape ever has another length,
all buckets of that step leave at its end.

A gradient that changed after it had left would make the ranks' weights differ, which
`Trainer.check_ranks` finds.
"""

import math

from ..device.threads import ThreadStack
from ..nn import Tape

NEVER = math.inf  # in place of a record, of a parameter that is in none: it is complete at the end
# float32 of a bucket, 4 MiB: large enough for the links' full speed, small enough to leave early
BUCKET = 1 << 20

_watchers = ThreadStack()  # those whose backward pass is running in this thread, innermost last


class WatchedTape(Tape):
    """The tape, which reports every record played to the watcher of this backward pass, if there is
    one."""

    def backward(self, output, gradient=None):
        if _watchers:
            _watchers[-1].begin(self.records)
            for number, record in enumerate(reversed(self.records)):
                record.backward = _then(record.backward, _watchers[-1].played, number)
        super().backward(output, gradient)


def _then(function, played, number):
    def both(*gradients):
        result = function(*gradients)
        played(number)
        return result

    return both


class BucketPlan:
    """The buckets of a flat gradient, and after which record each may leave.

    buckets: [(first element, stop)]; `order`: their numbers as they leave; `leaving`: record number
    -> bucket numbers
    """

    def __init__(self, parameters, size=BUCKET):
        self.buckets, self._members = [], []
        stop, members = parameters.total, []
        for entry, parameter in reversed(
            list(zip(parameters.index, parameters.parameters.values(), strict=True))
        ):
            members.append(parameter)
            if stop - entry["offset"] >= size or entry["offset"] == 0:
                self.buckets.append((entry["offset"], stop))
                self._members.append(members)
                stop, members = entry["offset"], []
        self.records = None  # how many the tape had when the plan was made
        self.order, self.leaving = list(range(len(self.buckets))), {}

    def make(self, touched):
        """Plan from `touched`: for each record, in the order of playing back, the parameters that
        it adds to."""
        self.records, last = len(touched), last_records(touched)
        ready = [max(last.get(id(p), NEVER) for p in members) for members in self._members]
        self.order = sorted(range(len(self.buckets)), key=lambda k: (ready[k], k))
        self.leaving = {}
        for k in self.order:
            if ready[k] < NEVER:
                self.leaving.setdefault(ready[k], []).append(k)


def touched_by(records):
    """For each record of a tape, in the order of playing back, the parameters that it adds to."""
    return [record.parameters for record in reversed(records)]


def last_records(touched):
    """{id of a parameter: number of the last record, in the order of playing back, that adds to its
    gradient}."""
    return {
        id(parameter): number
        for number, parameters in enumerate(touched)
        for parameter in parameters
    }


class WatchBackward:
    """Context: the tapes played back inside call `begin` and `played` of `watcher`."""

    def __init__(self, watcher):
        self.watcher = watcher

    def __enter__(self):
        _watchers.append(self.watcher)

    def __exit__(self, *_):
        _watchers.pop()
