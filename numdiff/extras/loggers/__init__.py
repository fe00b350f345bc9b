"""A run's curves and pictures for other programs: TensorBoard, Trackio, Weights & Biases.

settings.py     --log
run.py          what a run gives to them, in a thread of its own
sinks.py        how each of them takes it: a class for each
"""
