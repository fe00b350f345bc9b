"""Thread-local values and stacks. Two threads may train two models and must not interfere."""

import functools
import threading


def kept(function):
    """`functools.cache` for a function of one argument, where all threads use the first result that
    is ready."""
    known = {}

    @functools.wraps(function)
    def get(key):
        return known[key] if key in known else known.setdefault(key, function(key))

    return get


class ThreadStack(threading.local):
    """A list of which every thread has its own, initially empty."""

    def __init__(self):
        self.items = []

    def append(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def remove(self, item):
        self.items.remove(item)

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)


class PerThread:
    """An attribute of which every thread has its own value, initially `start`."""

    def __init__(self, start):
        self.start = start

    def __set_name__(self, owner, name):
        self.name = f"_{name}_by_thread"

    def _values(self, instance):
        return instance.__dict__.setdefault(self.name, threading.local())

    def __get__(self, instance, owner):
        return (
            self.start if instance is None else getattr(self._values(instance), "value", self.start)
        )

    def __set__(self, instance, value):
        self._values(instance).value = value
