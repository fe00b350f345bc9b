"""Tables of what the emulator has found out about an object, which do not keep the object alive.

A test suite makes thousands of kernels. With each of them go its closure, and the arrays in it.
"""

import weakref


class WeakTable:
    """{object: value} by identity, also of what has no hash. An entry is removed with its object;
    it stays where Python cannot refer to the object weakly.

    A value must not refer to its object, which would then live as long as the table.
    """

    def __init__(self):
        self._entries = {}  # id of an object -> (reference to the object, value)

    def get(self, key):
        """The value of an object, or None."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def put(self, key, value):
        """Set the value of an object; returns the value."""
        number, entries = id(key), self._entries
        try:
            reference = weakref.ref(key, lambda _: entries.pop(number, None))
        except TypeError:
            reference = key
        entries[number] = reference, value
        return value

    def dict_of(self, key):
        """The value of an object that has a dictionary as its value; at first an empty one."""
        found = self.get(key)
        return self.put(key, {}) if found is None else found

    def values(self):
        return [value for _, value in list(self._entries.values())]
