"""How good the samples are: distances between two sets of images, measured on their features.

frechet.py, kid.py and precision_recall.py hold the mathematics, on NumPy arrays of features;
features.py computes features of images; in_training.py measures a run. The extra `evaluate` reads
images of other programs and prints the figures.
"""

from .features import RandomConv, find_extractor
from .frechet import frechet_distance, mean_and_covariance
from .kid import kid, kid_subsets
from .precision_recall import precision_recall

__all__ = [
    "RandomConv",
    "find_extractor",
    "frechet_distance",
    "kid",
    "kid_subsets",
    "mean_and_covariance",
    "precision_recall",
]
