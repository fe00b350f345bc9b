"""Work that several ranks share and that may be told to stop at any moment: making samples."""
from ..progress import tick

DONE, WORKING, LEAVE = 0, 1, 2  # what ranks tell each other at each evaluation, until all are done or one leaves


class Interrupted(Exception):
    """A rank was asked to stop."""


def make_together(communicator, make, asked=lambda: 0):
    """([every rank's make(look)], number): number is what `asked()` gave on one of them, 0 at the end of all the work.

    make: calls `look()` at least every second or so, and is left there where a rank was asked to stop; that rank's part
    is then None. An error on one rank is raised on all. Collective.
    """
    def look(_=None):
        tick()
        if communicator.largest(LEAVE if asked() else WORKING) == LEAVE:
            raise Interrupted

    def make_and_wait():
        """Ranks have unlike amounts of work: who is done keeps answering the others."""
        try:
            part = make(look)
            while communicator.largest(LEAVE if asked() else DONE) == WORKING:
                pass
            return part
        except Interrupted:
            return None
        except Exception:
            communicator.largest(LEAVE)  # the others then come to where this error is told
            raise

    parts = communicator.everywhere(make_and_wait)
    return parts, communicator.largest(asked())
