"""Single operations, forward and backward, against values that PyTorch gave
(tests/reference/operations.npz)."""

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.extras.convert.layout import to_numdiff_layout
from tests.conftest import large
from tests.reference import stored

pytestmark = large
STORED = stored.load("operations")


class StoredCase:
    """The stored arrays of one operation: `case["x"]` on the engine, `case.check(got, "dx")`
    against a result."""

    def __init__(self, name, engine, tolerance=1e-5):
        self.arrays = {k.split("__")[1]: v for k, v in STORED.items() if k.startswith(name + "__")}
        for key in ("weight", "dweight"):
            if key in self.arrays:
                self.arrays[key] = to_numdiff_layout({key: self.arrays[key]})[key]
        self.engine, self.tolerance = engine, tolerance

    def __getitem__(self, key):
        return self.engine(self.arrays[key])

    def zeros(self, key):
        return self.engine.zeros(self.arrays[key].shape)

    def check(self, got, key):
        self.engine.check(got, self.arrays[key], self.tolerance)


@pytest.mark.parametrize(
    "name, stride",
    [
        ("conv2d_1x1_stride1", 1),
        ("conv2d_3x3_stride1", 1),
        ("conv2d_3x3_stride2", 2),
        ("conv2d_3x3_stride2_odd", 2),
    ],
)
def test_conv2d(engine, name, stride):
    case = StoredCase(name, engine)
    dweight, dbias = case.zeros("weight"), case.zeros("bias")
    case.check(K.conv2d_forward(case["x"], case["weight"], case["bias"], stride=stride), "y")
    case.check(
        K.conv2d_backward(case["dy"], case["x"], case["weight"], dweight, dbias, stride=stride),
        "dx",
    )
    case.check(dweight, "dweight")
    case.check(dbias, "dbias")


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
def test_group_norm(engine, silu):
    case = StoredCase("group_norm_silu" if silu else "group_norm", engine)
    y, mean, rstd = K.groupnorm_forward(
        case["x"], case["weight"], case["bias"], 32, 1e-5, silu=silu
    )
    case.check(y, "y")
    dweight, dbias = case.zeros("weight"), case.zeros("bias")
    case.check(
        K.groupnorm_backward(
            case["dy"],
            case["x"],
            case["weight"],
            case["bias"],
            mean,
            rstd,
            dweight,
            dbias,
            32,
            silu=silu,
        ),
        "dx",
    )
    case.check(dweight, "dweight")
    case.check(dbias, "dbias")


@pytest.mark.parametrize("order", ["legacy", "new"])
def test_attention(engine, order):
    case = StoredCase(f"attention_{order}", engine)
    y, probabilities = K.attention_forward(case["x"], 3, order)
    case.check(y, "y")
    case.check(K.attention_backward(case["dy"], case["x"], probabilities, 3, order), "dx")


def test_layer_norm(engine):
    case = StoredCase("layer_norm", engine)
    y, mean, rstd = K.layernorm_forward(case["x"], case["weight"], case["bias"], 1e-5)
    case.check(y, "y")
    dweight, dbias = case.zeros("weight"), case.zeros("bias")
    case.check(
        K.layernorm_backward(case["dy"], case["x"], case["weight"], mean, rstd, dweight, dbias),
        "dx",
    )
    case.check(dweight, "dweight")
    case.check(dbias, "dbias")


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activation(engine, name):
    case = StoredCase(name, engine)
    function = name.split("_")[0]
    case.check(getattr(K, f"{function}_forward")(case["x"]), "y")
    case.check(getattr(K, f"{function}_backward")(case["dy"], case["x"]), "dx")


def test_softmax(engine):
    case = StoredCase("softmax", engine)
    y = K.softmax_forward(case["x"], 0.7)
    case.check(y, "y")
    case.check(K.softmax_backward(case["dy"], y, 0.7), "dx")


def test_linear(engine):
    case = StoredCase("linear", engine)
    case.check(K.linear_forward(case["x"], case["weight"], case["bias"]), "y")
    dweight, dbias = case.zeros("weight"), case.zeros("bias")
    case.check(K.linear_backward(case["dy"], case["x"], case["weight"], dweight, dbias), "dx")
    case.check(dweight, "dweight")
    case.check(dbias, "dbias")


@pytest.mark.parametrize("name, function", [("avg_pool", "avgpool"), ("upsample", "upsample")])
def test_resample(engine, name, function):
    case = StoredCase(name, engine)
    case.check(getattr(K, f"{function}_forward")(case["x"]), "y")
    case.check(getattr(K, f"{function}_backward")(case["dy"]), "dx")


def test_scale_shift(engine):
    case = StoredCase("scale_shift", engine)
    case.check(K.scale_shift_forward(case["x"], case["scale"], case["shift"]), "y")
    for got, key in zip(
        K.scale_shift_backward(case["dy"], case["x"], case["scale"]),
        ("dx", "dscale", "dshift"),
        strict=True,
    ):
        case.check(got, key)


def test_embedding(engine):
    case = StoredCase("embedding", engine)
    case.check(K.embedding_forward(case["labels"], case["weight"]), "y")
    dweight = case.zeros("weight")
    K.embedding_backward(case["dy"], case["labels"], dweight)
    case.check(dweight, "dweight")


def test_mse(engine):
    case = StoredCase("mse", engine)
    case.check(K.mse_forward(case["x"], case["target"]), "y")
    scale = float(case.arrays["dy"][0])  # the gradient that arrives at the loss
    case.check(K.mse_backward(case["x"], case["target"], scale), "dx")


@pytest.mark.parametrize("period", [1000, 10000])
@pytest.mark.parametrize("dim", [32, 33], ids=["even", "odd"])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_timestep_embedding(engine, period, dim, dtype):
    """float32 angles of t up to 999 carry an error of 6e-5, and cosines inherit it."""
    case = StoredCase(f"timestep_embedding_{period}_{dim}", engine, tolerance=1e-4)
    t = engine(STORED["timestep_embedding__t"].astype(dtype))
    case.check(K.timestep_embedding_forward(t, dim, float(period)), "y")
