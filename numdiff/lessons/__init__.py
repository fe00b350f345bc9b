"""Thirty puzzles, from one thread for an element to a pipeline on tensor cores: `numdiff learn`.

puzzles/ holds a file for each puzzle, solutions/ a solution of each. catalogue.py finds and copies them, judge.py runs
a learner's kernel in the emulator, advice.py explains what is wrong with it, progress.py keeps the stars.
"""
