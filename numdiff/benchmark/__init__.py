"""How fast things are: a training step (step.py), beside PyTorch's (torch_*.py); where its time goes (profile.py); each
version of each operation at a model's own shapes (kernels.py)."""
CLASSES = 9  # of a stand-in where the options ask for classes and do not say how many
