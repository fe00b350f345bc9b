"""Benchmarks: a training step (step.py) compared with PyTorch's (torch_*.py), where its time goes
(profile.py), and each version of each operation at a model's own shapes (kernels.py)."""

CLASSES = 9  # of random data where the options ask for classes without saying how many
