"""A small InceptionV3 with each kind of layer and branch, for tests of what is around it."""

from numdiff.extras.feature_networks import inception
from numdiff.extras.feature_networks.inception import Convolution, Pooling, branch
from tests.reference import stored_features

FEATURES = 4 + 15


def shrink(monkeypatch):
    """From now on InceptionV3 is the small network, of images of 19 × 19 pixels."""
    first = [
        branch("a", 4, ("1x1", 4)),
        branch("a", 4, ("2", 8), [("3a", 4, 1, 3), ("3b", 4, 3, 1)]),
        branch("a", 4, Pooling(mean=True, stride=1), ("pool", 3)),
    ]
    second = [branch("b", 15, ("1", 4), ("2", 4, 3, 3, 2)), [Pooling()]]
    stem = [Convolution("Conv2d_1a_3x3", 3, 4, (3, 3), 2), Pooling()]
    for name, value in {
        "STEM": stem,
        "BLOCKS": {"a": first, "b": second},
        "SIZE": 19,
        "FEATURES": FEATURES,
    }.items():
        monkeypatch.setattr(inception, name, value)


def state_dict():
    """Drawn weights under the public names, of the network as it is now."""
    shapes, _ = inception.public_shapes()
    return {name: stored_features.weight(name, shape) for name, shape in shapes.items()}
