"""Python runs this file at the start of each process whose PYTHONPATH has this folder: kernels of
the processes that numba-cuda's tests start run in the emulator, too (numba_suite.py).

Nothing of Numba is imported here: the emulator waits until the program imports `numba.cuda`.
"""

from numdiff import emulator

emulator.install(float64=True)
