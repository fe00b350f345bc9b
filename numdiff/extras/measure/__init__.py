"""Measurements: `numdiff bench` times steps, samples and kernels, `numdiff profile` shows where a step's
time goes.

bench.py      the group of commands, each of which has a file: step.py, ladder.py, sample.py, quality.py, …
profile.py    the other command
shared.py, versus.py    what several of them need
time_to_quality.py    what `bench quality` does; what the others call stands in numdiff/benchmark/
"""
