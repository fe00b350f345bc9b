"""Errors that a user can cause and mend. Their message is one sentence that names the fault and the remedy.

The command line prints them without a traceback: `UsageError` ends with exit code 2, any other `NumdiffError` with 1.
"""


class NumdiffError(Exception):
    """Something went wrong that the user can mend; the message says how."""

    exit_code = 1  # of the command line


class UsageError(NumdiffError):
    """An option or a setting is wrong."""

    exit_code = 2


class OutOfMemoryError(NumdiffError):
    """The device has no memory left for an array."""
