"""A pytest plugin by which tests run the emulator's threads as generators: `pytest -p
tests.emulator.generators …`."""

from numdiff import emulator

emulator.Emulator.generators = True
