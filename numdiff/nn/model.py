"""What all models have in common: a backend, flat parameters, prediction from NumPy, values by
name."""

import contextlib
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing

from .. import extensions
from ..configuration import given_values
from ..device import AnyArray, get_backend, is_device, is_planned, upload
from ..dtypes import is_bfloat16, is_half
from ..errors import UsageError, quoted, shown
from ..sizes import as_size, image_shape
from .evaluation import evaluate
from .flops import LayerProduct, total
from .inference import parameters_of
from .module import FlatParameters, Module
from .tensor import Tensor

SEEDS = 2**64
NO_FLOAT8 = "--precision fp8 needs a GPU of compute capability 8.9 or later; use --precision fp16 on other GPUs."
LARGEST_TIMESTEP = 100_000  # of a model whose diffusion is not known: the largest number of steps


class Model(Module):
    """A network that takes noisy images and timesteps. A subclass lays out its modules and then
    calls `_finish`.

    Attributes: kind (the name of its record in training/kinds/), options (to build it again),
    image_size (a side, or height and width: numdiff/sizes.py), in_channels, out_channels,
    learn_sigma, num_classes (None: without classes),
    null_class (the index that stands for no class, or None), backend, parameters, diffusion
    (options of the Diffusion it was trained with; empty: the defaults), tf32 (whether products use
    TF32; None: as the device's switch says).

    Can be copied by `copy.deepcopy` and pickled: a copy has its own weights. A pickle made on a GPU
    is loaded onto the GPU, or onto the CPU, in float32, if there is none.
    """

    kind: str = ""
    null_class: int | None = None
    image_size: int | tuple[int, int]
    in_channels: int
    out_channels: int
    num_classes: int | None
    learn_sigma: bool
    options: dict
    diffusion: dict
    meta: dict
    precision: str
    parameters: FlatParameters
    largest: typing.ClassVar[dict] = {}  # {argument of the constructor: its largest value}
    block_kinds: tuple = ()  # classes of the modules that `recompute_blocks` recomputes
    # {name: classes of the modules within a block that it may recompute alone}
    part_kinds: typing.ClassVar[dict] = {}
    # how the `peer` all-reduce overlaps the backward pass (extras/transports/overlap.py)
    exchange_beside: str | None = None
    lends_gradients = True  # whether activations may alias the blocks' gradients (aliasing.py)
    # linear layers within them that `compute_in_float8` is for, by their names there
    float8_layers: tuple = ()

    def _configure(self, kind, config, options):
        """The configuration, a `kind`, that a constructor was given as `config` or by name, and
        `options` of it; a `UsageError` as of `constructor_options`."""
        config = kind(**given_values(kind, config, options, kind.__name__.removesuffix("Config")))
        self.options = checked_options(type(self), kind, vars(config))
        return config

    def _finish(self, device, seed, fixed=0):
        if seed is not None and not (isinstance(seed, numbers.Integral) and 0 <= seed < SEEDS):
            raise UsageError(
                f"seed {quoted(seed)} must be a whole number from 0 to {SEEDS - 1}, or None for zeros."
            )
        self.diffusion = {}
        self.dtype = np.float32  # of the activations
        self.tf32 = None
        if not (device is None or isinstance(device, str) or hasattr(device, "allocate")):
            raise UsageError(
                f"device must be 'auto', 'cpu', 'cuda' or 'emulator', and not {shown(device)}."
            )
        self.backend = get_backend(device) if isinstance(device, str) else device
        self.parameters = parameters_of(
            self, self.backend, None if is_planned(self.backend) else seed, fixed
        )
        self.parameters.exchange_beside = self.exchange_beside

    def __setstate__(self, state):
        super().__setstate__(state)
        self.parameters.exchange_beside = self.exchange_beside
        if self.parameters.half is None:  # a GPU's pickle on the CPU
            self.dtype = np.float32

    def __call__(self, *inputs, **options) -> Tensor:
        with self.arithmetic():
            return super().__call__(*inputs, **options)

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Context in which the device's switch `tf32` is set as this model needs it."""
        before = getattr(self.backend, "tf32", None)
        if self.tf32 is None or before is None:
            yield
            return
        self.backend.tf32 = self.tf32
        try:
            yield
        finally:
            self.backend.tf32 = before

    def compute_in_single(self) -> None:
        """From now on compute in float32, as a new model does."""
        self.dtype = np.float32
        self.parameters.drop_half()

    def compute_in_half(self, dtype: np.typing.DTypeLike = np.float16) -> None:
        """From now on compute in float16 or bfloat16, with a copy of the weights; statistics,
        embeddings and accumulators stay float32."""
        if self.backend is None and not is_bfloat16(dtype):
            raise UsageError("--precision fp16 computes on a GPU; on the CPU use --precision fp32.")
        self.dtype = np.dtype(dtype)
        self.parameters.keep_half(dtype)

    def compute_like(self, other: "Model") -> None:
        """From now on compute in the precision of another model of the same options."""
        self.tf32 = other.tf32
        if other.evaluates_in_float8:
            self.compute_in_float8(evaluates=True)
        elif is_half(other.dtype):
            self.compute_in_half(other.dtype)

    @property
    def evaluates_in_float8(self) -> bool:
        """Whether samples are made in E4M3."""
        parameters = self.parameters.parameters.values()
        return any(p.float8 is not None and p.float8.evaluates for p in parameters)

    def compute_in_float8(self, promoted: bool = True, evaluates: bool = False) -> None:
        """From now on, while a tape records, compute the products of the blocks' linear layers,
        backward too, in E4M3, all else in float16; NumPy computes it, too, slowly. See
        extras/fp8/layers.py. The first block and the last stay in float16, where there are more than two.

        promoted: add products up in float32 every 128 of k
        evaluates: without a tape, too, as models that were built for inference always do
        """
        names, blocks = dict(self.named_parameters()), [*self.blocks_within()]
        found = [
            name
            for block in blocks[1:-1] or blocks
            for layer in self.float8_layers
            if (name := f"{block.name}.{layer}.weight") in names
        ]
        if not found:
            raise UsageError(
                f"--precision fp8 has kernels for the blocks of a DiT, and not for a {self.kind}: use "
                "--precision fp16."
            )
        if not extensions.find("precision", "fp8", "--precision fp8").supports(self.backend):
            raise UsageError(NO_FLOAT8)
        if odd := next((name for name in found if any(n % 16 for n in names[name].shape)), None):
            raise UsageError(
                f"--precision fp8 moves 16 numbers at a time, and {odd} is "
                f"{' × '.join(map(str, names[odd].shape))}: change the widths, or use --precision fp16."
            )
        self.dtype = np.dtype(np.float16)
        self.parameters.keep_float8(found, promoted)
        for parameter in self.parameters.parameters.values() if evaluates else ():
            if parameter.float8 is not None:
                parameter.float8 = parameter.float8._replace(evaluates=True)

    def recompute_blocks(self, part: str = "blocks") -> None:
        """From now on keep only the inputs of the blocks for the backward pass, which recomputes
        what is inside.

        part: "blocks" for all of them, or which of their parts alone: a name in `part_kinds`
        """
        for module in self.parts_within(part):
            module.recomputed = True

    def parts_within(self, part: str) -> list[Module]:
        """The modules that `recompute_blocks` recomputes."""
        blocks = [*self.blocks_within()]
        if part == "blocks":
            return blocks
        if part not in self.part_kinds:
            raise UsageError(
                f"--recompute {part} names no part of the blocks of a {self.kind}: use "
                f"{' or '.join(['blocks', *self.part_kinds])}."
            )
        return [
            module
            for block in blocks
            for module in block.modules_within()
            if isinstance(module, self.part_kinds[part])
        ]

    def recomputed_flops(self, part: str, float8: bool = False) -> int:
        """FLOPs of one image that the backward pass repeats at most if this part is recomputed.
        What precedes the first trained parameter is not recomputed.

        float8: the last product of a module is, too (recompute.py)
        """
        names = [name for name, _ in self.named_parameters()]  # which names the modules
        modules = [*self.parts_within(part)]
        inside = {
            name for module in modules for name in names if name.startswith(module.name + ".")
        }
        if not float8:
            inside -= {f"{module.name}.{module.ends_in}.weight" for module in modules}
        return sum(product.flops for product in self.products() if product.weight in inside)

    def blocks_within(self) -> Iterator[Module]:
        """The outermost modules of the `block_kinds`, in the order of the parameters."""
        stack = [self]
        while stack:
            module = stack.pop()
            if isinstance(module, self.block_kinds):
                yield module
            else:
                stack += [
                    child for _, child in reversed(module.children()) if isinstance(child, Module)
                ]

    def matrices(self) -> dict[str, int]:
        """{name: how many matrices, one below the other} of the blocks' weights that `Muon` makes
        orthogonal."""
        found = {}
        names = dict(self.named_parameters())  # which names the modules
        for block in self.blocks_within():
            for module in block.modules_within():
                if (name := f"{module.name}.weight") in names and module.matrices:
                    found[name] = module.matrices
        return found

    def place(self) -> tuple:
        """What a recorded evaluation depends on besides its inputs: where the weights are, and the
        arithmetic."""
        return (
            self.parameters.place(),
            np.dtype(self.dtype).name,
            (self.backend.tf32 if self.tf32 is None else self.tf32),
        )

    def predict(
        self, x_t: np.ndarray, t: np.typing.ArrayLike, y: np.typing.ArrayLike | None = None
    ) -> np.ndarray:
        """The model's output for NumPy inputs, as NumPy, whatever the device.

        x_t: float32 (B, H, W, C); t: timesteps (B,), or one for all, integers or floats from 0 to
            the diffusion's number of steps; values between two timesteps are allowed. A model with
            a timestep_scale sees them scaled. On the path linear t is from 0 to 1, on the path edm
            it is sigma
        y: class indices (B,), or one for all, if the model has classes
        From the second call with a shape on, a GPU records and replays the evaluation, with the
        same bits.
        """
        try:
            if np.iscomplexobj(x_t):
                raise TypeError
            x_t = np.ascontiguousarray(x_t, np.float32)
        except (TypeError, ValueError):
            raise UsageError(
                f"x_t must be an array of real numbers, and not {shown(x_t)}."
            ) from None
        expected = image_shape(self)
        if x_t.ndim != 4 or x_t.shape[1:] != expected or not len(x_t):
            raise UsageError(
                f"x_t has shape {x_t.shape}; this model takes (B, {', '.join(map(str, expected))})."
            )

        def per_image(values, name):
            if values.shape not in ((), (1,), (len(x_t),)):
                raise UsageError(
                    f"{name} has shape {values.shape}; give one value, or one for each of the {len(x_t)} "
                    "images."
                )
            return np.ascontiguousarray(np.broadcast_to(values, (len(x_t),)))

        self.require_classes(y)
        path = self.diffusion.get("path", "discrete")
        t = checked_timesteps(
            t,
            {"linear": 1, "edm": math.inf}.get(path, self.diffusion.get("steps", LARGEST_TIMESTEP)),
        )
        if path == "edm":
            t = edm_timesteps(t)
        if y is not None:
            y = per_image(self.checked_classes(y), "y")
        if (scale := self.diffusion.get("timestep_scale", 1)) != 1:
            t = (t * scale).astype(np.float32)
        t = per_image(t, "t")
        if hasattr(self.backend, "capture") and len(x_t):
            return evaluate(self, x_t, t, y)
        t, y = (None if a is None else upload(a, self.backend) for a in (t, y))
        return self(Tensor(upload(x_t, self.backend)), t, y).numpy()

    def checked_classes(self, y: np.typing.ArrayLike) -> np.ndarray:
        """Class indices as int32; a `UsageError` for those that the model does not have. The null
        class is allowed."""
        last = self.num_classes - 1 if self.null_class is None else self.null_class
        y = np.asarray(y)
        if not np.issubdtype(y.dtype, np.integer) or not ((y >= 0) & (y <= last)).all():
            null = "" if self.null_class is None else f", and {self.null_class} for no class"
            raise UsageError(
                f"y holds a class that does not exist: the model has classes 0 to {self.num_classes - 1}"
                f"{null}."
            )
        return y.astype(np.int32)

    def check_inputs(self, t: AnyArray, y: AnyArray | None, x: Tensor | None = None) -> None:
        """Raise a `UsageError` for invalid timesteps or classes that are on the host (those on a
        device are not read), and where x is given for what is no tensor, or for shapes that do not
        fit."""
        self.require_classes(y)
        if x is not None:
            self._check_shapes(t, y, x)
        # which receives log(sigma) / 4
        if not is_device(t) and self.diffusion.get("path") != "edm":
            checked_timesteps(t, LARGEST_TIMESTEP)
        if y is not None and not is_device(y):
            self.checked_classes(y)

    def _check_shapes(self, t, y, x):
        if not isinstance(x, Tensor):
            raise UsageError(
                f"a model is called with a Tensor, and not with {shown(x)}: write model(Tensor(x), t), or "
                "model.predict(x, t) for NumPy in and out."
            )
        shape = getattr(x.data, "shape", ())
        if len(shape) != 4 or shape[3] != self.in_channels:
            raise UsageError(
                f"x has shape {tuple(shape)}; this model takes (B, "
                f"{', '.join(map(str, image_shape(self)))})."
            )
        for name, values, dtypes in (("t", t, "int32 or float32"), ("y", y, "int32")):
            if values is not None and getattr(values, "shape", None) not in ((1,), shape[:1]):
                raise UsageError(
                    f"{name} must be an array of {shape[0]} {dtypes}, one for each image, and not "
                    f"{shown(values)}."
                )

    def require_classes(self, y: Any) -> None:
        """Raise a `UsageError` if classes are given and the model has none, or the other way round."""
        if (y is None) != (self.num_classes is None):
            raise UsageError(
                "this model has classes: give y, one class index for each image"
                if y is None
                else "this model has no classes: leave y out, or build it with num_classes"
            )

    def products(self) -> list[LayerProduct]:
        """The products of one image's way through the model, with the names of their weights; here
        those of weights that each serve once: a subclass knows better."""
        return [LayerProduct(name, 2 * math.prod(p.shape)) for name, p in self.named_parameters()]

    def forward_flops(self) -> int:
        """FLOPs of one image through the model: a multiply-add counts as two."""
        return total(self.products())

    def arrays(self) -> dict[str, np.ndarray]:
        """{name: NumPy array} of the weights, in numdiff's layout."""
        return self.parameters.arrays()

    def gradients(self) -> dict[str, np.ndarray]:
        """{name: NumPy array} of the gradients, in numdiff's layout."""
        return self.parameters.arrays(self.parameters.grad)

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Overwrite all weights from {name: array}; a `NumdiffError` names what does not fit."""
        self.parameters.load_flat(self.parameters.flatten(arrays))


def edm_timesteps(sigma):
    """The noise-level input of a model of EDM's path: log(σ) / 4, float32."""
    if not (np.isfinite(sigma) & (sigma > 0)).all():
        raise UsageError(
            "timesteps of a model of the path edm are noise levels sigma, numbers above 0."
        )
    return (np.log(sigma.astype(np.float64)) / 4).astype(np.float32)


def checked_timesteps(t, last):
    """Timesteps as int32, or as float32 if they are floats; a `UsageError` unless all are between 0
    and `last`."""
    t = np.asarray(t)
    if t.dtype.kind not in "iuf":
        raise UsageError(f"timesteps must be numbers, not {t.dtype}.")
    wrong = t[~((t >= 0) & (t <= last))]  # a NaN, too
    if wrong.size:
        raise UsageError(
            f"timestep {wrong[0]:g} is not between 0 and {last}, the range of the model's timesteps."
        )
    return t.astype(np.float32 if t.dtype.kind == "f" else np.int32)


class _Laid(Exception):  # noqa: N818 - no error
    pass


def laid_out(kind, options):
    """A model of `kind` (a subclass of `Model`) that is laid out but not built: its parameters have
    shapes and take no memory."""

    class Sketch(kind):
        def _finish(self, *_, **__):
            raise _Laid(self)

    try:
        Sketch(**options)
    except _Laid as laid:
        return laid.args[0]


def parameter_shapes(kind, options):
    """{name: shape} of the parameters of a model that is not built. Options from a file can thus be
    checked against the weights stored with them before the model is built."""
    return {name: tuple(p.shape) for name, p in laid_out(kind, options).named_parameters()}


def constructor_options(values):
    """The options among a constructor's `locals()`, as JSON can say them; a `UsageError` for one of
    the wrong type, as the constructor's hints have it, or above the class's `largest`."""
    kind = type(values["self"])
    left_out = "self", "device", "seed", "__class__"
    return checked_options(
        kind, kind.__init__, {k: v for k, v in values.items() if k not in left_out}
    )


def checked_options(kind, hints, values):
    """Options of a model of this class, {name: value}, as JSON can say them; see
    `constructor_options`. hints: the function or class that has their types"""
    if "image_size" in values:
        values = {**values, "image_size": as_size(values["image_size"])}
    check_types(hints, values)
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, numbers.Real):
                if not math.isfinite(number):
                    raise UsageError(f"{name} {number} must be a finite number.")
                if number > kind.largest.get(name, math.inf):
                    raise UsageError(f"{name} {number:,} must be at most {kind.largest[name]:,}.")
    return {name: _plain(value) for name, value in values.items()}


@functools.cache
def _hints(function):
    return typing.get_type_hints(function)


def check_types(function, values):
    """Raise a `UsageError` for a value among {argument: value} that is of another type than the
    function's hint says.
    """
    for name, hint in _hints(function).items():
        if name in values and not _is(values[name], hint):
            raise UsageError(f"{name} must be {_in_words(hint)}, and not {shown(values[name])}.")
    for name, value in values.items():
        check_magnitude(name, value)


def check_magnitude(name, value):
    """Raise a `UsageError` for an integer, or a list or tuple with one, that no float can hold."""
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, numbers.Integral) and abs(int(number)) >= MAGNITUDE:
            raise UsageError(f"{name} must be a number between -2^64 and 2^64.")


def _plain(value):
    """A constructor's value as JSON can say it: a list for a tuple, Python's numbers for NumPy's."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


MAGNITUDE = 1 << 64
NUMBERS = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    bool: (bool | np.bool_, "True or False"),
    types.NoneType: (types.NoneType, "None"),
    str: (str, "a text"),
}


def _is(value, hint):
    """Whether a value is of the kind that a hint of a constructor says; True for hints of other
    kinds."""
    if isinstance(hint, types.UnionType):
        return any(_is(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is Sequence:
        (inner,) = typing.get_args(hint)
        return isinstance(value, list | tuple) and all(_is(item, inner) for item in value)
    known = NUMBERS.get(hint)
    return (
        known is None
        or isinstance(value, known[0])
        and isinstance(value, bool | np.bool_) <= (hint is bool)
    )


def _in_words(hint):
    if isinstance(hint, types.UnionType):
        return " or ".join(map(_in_words, typing.get_args(hint)))
    if typing.get_origin(hint) is Sequence:
        return f"a list or tuple, each item {_in_words(*typing.get_args(hint))}"
    return NUMBERS[hint][1]
