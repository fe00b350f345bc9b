"""`numdiff evaluate`: compare samples with a reference, by the figures of numdiff/evaluation/.

evaluate.py computes and prints the figures; sources.py reads and writes images, features and
statistics, of numdiff and of other programs.
"""
