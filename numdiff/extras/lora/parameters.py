"""Adapters of a DiT in place of its parameters: what is trained, and what the model computes with.

MATHEMATICS
    W is (N, K), of a linear layer of attention or MLP; A (r, K) and B (N, r) are trained:

        W' = W + s · B·A,   s = alpha / r          section 4.1; A is random and B zero at the start
        dB = s · dW'·Aᵀ,    dA = s · Bᵀ·dW'        as W' is linear in each of them

WHY W' IS FORMED, and no side branch x·Aᵀ·Bᵀ computed
    All fused kernels (gates, GELU, norms, recomputation, sampling) then stay as they are, and a
    merged model computes the same bits. The cost: dW' is a whole product, which a side branch does
    without. For XL/2, 64 images of 256 tokens and N = K = 1152 (H200, 600 TFLOP/s, 4 TB/s assumed)
    dW' takes 72 µs. A side branch reads and writes the activations some six times more, in kernels
    of rank 16 that no tensor core fills: 6 · 38 MB in 57 µs, and their launches.

MEMORY, bytes of an adapted element: W in the type that the model computes in, W' likewise: 4 in 16
bits. No master in float32, no moments, no average. dW' is in a buffer of one block, which all blocks
use in turn: when a block's layer requests the gradient of its weight, that of the block after it is
first turned into dA and dB (`ScratchUse.reclaim`).

SOURCE: Hu et al. 2021, arXiv:2106.09685, section 4.1 and eq. 3. The initial A is uniform in
±1/√K, as in the authors' code.
"""

import math
import re

import numpy as np

from ... import kernels as K
from ...data.fingerprint import hash_of
from ...device import copy_into, download, empty, upload, zeros
from ...device.planned import is_planned
from ...device.side_stream import rejoin
from ...errors import NumdiffError, UsageError
from ...kernels.elementwise import cast_into
from ...kernels.reduce.second_pass import flush_for
from ...nn.layers import constant, uniform
from ...nn.module import ALIGNMENT, FlatParameters, Module, same_index
from ...nn.parameter import Parameter
from ...training import kinds

# layers of attention and MLP, whose weights are adapted
ADAPTED = re.compile(r"blocks\.(\d+)\.(?:attn\.(?:qkv|proj)|mlp\.(?:fc1|fc2|w12|w3))\.weight")


def adapter_names(name):
    """The names of A and B of a weight."""
    layer = name.removesuffix(".weight")
    return f"{layer}.lora_A", f"{layer}.lora_B"


def adapter_shapes(shapes, kind, rank):
    """{name: shape} of what is trained of a model with parameters of these shapes: A and B of each
    adapted weight, and the class table, whole. A `UsageError` for a rank larger than a matrix."""
    found = {}
    for name, shape in shapes.items():
        if ADAPTED.fullmatch(name):
            outputs, inputs = shape[0], math.prod(shape[1:])
            if rank > min(outputs, inputs):
                raise UsageError(
                    f"--lora {rank} is more than {name} of {outputs}×{inputs} has: give at most "
                    f"{min(outputs, inputs)}."
                )
            down, up = adapter_names(name)
            found |= {down: (rank, inputs), up: (outputs, rank)}
    if not found:
        raise UsageError("--lora adapts the attention and MLPs of a DiT, which this model has not.")
    table = kinds.get(kind).class_table
    return found | ({table: shapes[table]} if table in shapes else {})


def hash_of_base(arrays, table):
    """A hash of a model's weights {name: array}, without its class table, which is trained."""
    found = hash_of()
    for name in sorted(arrays):
        if name != table:
            found.update(name.encode())
            found.update(np.ascontiguousarray(arrays[name], np.float32).view(np.uint8).data)
    return found.hexdigest()


class Adapters(Module):
    """A's, B's and the class table, under their names."""

    def __init__(self, parameters):
        self.named = parameters

    def named_parameters(self):
        yield from self.named.items()


class ScratchUse:
    """The use of a buffer for gradients by one adapted weight. An operation that requests the
    gradient calls `reclaim` (`Parameter.loan`)."""

    def __init__(self, place, adapter):
        self.place, self.adapter = place, adapter

    def reclaim(self):
        """Turn the gradient that another block has left here into those of its adapter."""
        last = self.place.get("last")
        if last is not None and last is not self.adapter:
            last.contract()
        self.place["last"] = self.adapter


class Adapter:
    """One weight W with its A and B. weight: the model's Parameter, whose data or half is W'."""

    def __init__(self, weight, down, up, scale, place):
        self.weight, self.down, self.up, self.scale, self.place = weight, down, up, scale, place
        self.rows = weight.shape[0]

    def form(self, fixed, formed, down, up):
        """W' = W + s · B·A from arrays of one dtype."""
        flat = (self.rows, -1)
        K.matmul_forward(
            up, down, alpha=self.scale, out=formed.reshape(*flat), residual=fixed.reshape(*flat)
        )

    def contract(self):
        """Add the gradients of A and B; W' has no gradient then."""
        gradient = self.weight._grad
        rejoin()
        flush_for(gradient)
        gradient, self.place["last"] = gradient.reshape(self.rows, -1), None
        for out, *product in (
            (self.up.grad, gradient, self.down.data, False, True),
            (self.down.grad, self.up.data, gradient, True, False),
        ):
            K.matmul_forward(*product, alpha=self.scale, out=out, accumulate=True)
        self.weight.stale = True


class LoraParameters(FlatParameters):
    """The adapters of a model as its `parameters`: `data`, `grad` and `index` are theirs.

    model: built, with the weights of its base; it computes with W' from now on
    record: {"rank", "alpha", "base", "weights", "hash"} for its files
    """

    def __init__(self, model, record, seed):
        base, backend, rank = model.parameters, model.backend, record["rank"]
        self.record, self.base, self.backend = record, base, backend
        known, table = base.parameters, kinds.get(model.kind).class_table
        wanted = adapter_shapes({n: p.shape for n, p in known.items()}, model.kind, rank)
        named, self.adapters, self.adapted, places = {}, [], {}, {}
        for name, parameter in known.items():
            parameter.frozen = True
            if not (match := ADAPTED.fullmatch(name)):
                continue
            down, up = adapter_names(name)
            named[down] = Parameter(wanted[down], uniform(wanted[down][1]))
            named[up] = Parameter(wanted[up], constant(0))
            place = places.setdefault(name.replace(match[1], "*", 1), {"shape": parameter.shape})
            adapter = Adapter(parameter, named[down], named[up], record["alpha"] / rank, place)
            self.adapters.append(adapter)
            self.adapted[name] = parameter
            parameter.frozen, parameter.loan = False, ScratchUse(place, adapter)
        if table in known:
            named[table] = known[table]
            known[table].frozen = False
        before = None if is_planned(backend) else base.arrays()
        for parameter in known.values():  # before the memory is requested again
            parameter.data = parameter.grad = None
        base.data = base.grad = base._bound = None
        own = [name for name in known if name in self.adapted]
        rest = [name for name in known if name not in self.adapted and name != table]
        self._fixed, self._rest = (self._flat(names, before) for names in (own, rest))
        self._fixed_half = self._rest_half = self._formed = self._down_up = None
        super().__init__(Adapters(named), backend, None if is_planned(backend) else seed)
        self.exchange_beside = base.exchange_beside
        if before is not None:
            self._start_with(before, table)
        for place in places.values():
            place["gradient"] = zeros(math.prod(place["shape"]), np.float32, backend)
        for adapter in self.adapters:
            adapter.weight.grad = adapter.place["gradient"].reshape(*adapter.weight.shape)
        # a few operations add to the gradient of a frozen bias, too: here, where nothing reads it
        vectors = [known[name] for name in self._rest[0] if len(known[name].shape) == 1]
        unread = zeros(max(p.shape[0] for p in vectors), np.float32, backend)
        for parameter in vectors:
            parameter.grad = unread[: parameter.shape[0]]
        layout, flat = self._rest
        for name, (offset, shape) in layout.items():
            known[name].data = _view(flat, offset, shape)

    def _flat(self, names, arrays):
        """({name: (offset, shape)}, the arrays of these names as one constant buffer)."""
        layout, total = {}, 0
        for name in names:
            shape = self.base.parameters[name].shape
            layout[name] = total, shape
            total += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        if arrays is None:
            return layout, zeros(total, np.float32, self.backend)
        flat = np.zeros(total, np.float32)
        for name, (offset, _) in layout.items():
            flat[offset : offset + arrays[name].size] = arrays[name].reshape(-1)
        return layout, upload(flat, self.backend)

    def _start_with(self, arrays, table):
        """The class table as it is; A without the columns that are padding of W (all zeros)."""
        for name in self.adapted:
            down = self.parameters[adapter_names(name)[0]]
            padding = ~arrays[name].reshape(arrays[name].shape[0], -1).any(0)
            if padding.any():
                values = download(down.data)
                copy_into(down.data, np.where(padding, np.float32(0), values))
        if table in arrays:
            copy_into(self.parameters[table].data, arrays[table])

    # The weights that the model computes with ----------------------------------------------------

    def keep_half(self, dtype=np.float16):
        """From now on W, W' and the other weights are kept in 16 bits; of the others float32, too."""
        (layout, fixed), (others, rest) = self._fixed, self._rest
        self._fixed_half = _cast(fixed, dtype)
        self._rest_half = _cast(rest, dtype)
        self._down_up = empty(self.total, dtype, like=self.data)
        self._formed = empty(fixed.size, dtype, like=fixed)
        self._fixed = layout, None  # 4 bytes an element that nothing reads
        for name, (offset, shape) in layout.items():
            self.base.parameters[name].half = _view(self._formed, offset, shape)
            self.base.parameters[name].data = None
        for name, (offset, shape) in others.items():
            self.base.parameters[name].half = _view(self._rest_half, offset, shape)
        self.round()

    def keep_float8(self, names, promoted=True):
        raise UsageError(
            "--lora has no kernels for --precision fp8: use fp16, whose products it adapts."
        )

    def drop_half(self):
        """Compute in float32 from now on."""
        self.half = self.float8 = None
        if self._fixed[1] is None:
            raise NumdiffError(
                "the weights under the adapters are in 16 bits, and have no float32 any more: load the "
                "model again."
            )
        self._fixed_half = self._rest_half = self._down_up = None
        self._formed = empty(self._fixed[1].size, np.float32, like=self._fixed[1])
        for name, (offset, shape) in self._fixed[0].items():
            self.base.parameters[name].data = _view(self._formed, offset, shape)
        for parameter in self.base.parameters.values():
            parameter.half = None
        self.round()

    def round(self):
        """Form W' of all adapted weights from the adapters in use."""
        if self._formed is None:  # a precision is yet to be chosen
            return
        fixed, source = self._fixed[1], self._bound
        if self._fixed_half is not None:
            cast_into(self._bound, self._down_up)
            fixed, source = self._fixed_half, self._down_up
        entries = {entry["name"]: entry for entry in self.index}
        for (name, (offset, shape)), adapter in zip(
            self._fixed[0].items(), self.adapters, strict=True
        ):
            adapter.form(
                _view(fixed, offset, shape),
                _view(self._formed, offset, shape),
                *(self._view(source, entries[each]) for each in adapter_names(name)),
            )

    refresh = round  # after an update

    def place(self):
        return tuple(
            self.backend.pointer(buffer)
            for buffer in (self._bound, self._formed, self._rest[1])
            if buffer is not None
        )

    # A step --------------------------------------------------------------------------------------

    def begin_gradients(self, ranges=None):
        super().begin_gradients(ranges)
        for adapter in self.adapters:
            adapter.weight.stale, adapter.place["last"] = True, None

    def end_gradients(self):
        """Gradients of the adapters from those that are left in the buffers."""
        for adapter in self.adapters:
            if adapter.place["last"] is adapter:
                adapter.contract()
        super().end_gradients()

    def freeze(self, patterns):
        if patterns:
            raise UsageError(
                "--lora trains adapters alone, and all else is frozen: leave --freeze out."
            )

    # Files ---------------------------------------------------------------------------------------

    def arrays(self, buffer=None):
        """{name: NumPy array}: of the model, with W' in place of W; or of a flat buffer."""
        if buffer is not None:
            return super().arrays(buffer)
        return {
            name: download(parameter.data if parameter.half is None else parameter.half)
            .astype(np.float32)
            .reshape(parameter.shape)
            if name in self.adapted
            else download(parameter.data).copy()
            for name, parameter in self.base.parameters.items()
        }

    def describe(self):
        return {"index": self.index, "lora": self.record}

    def fits(self, meta):
        """Whether a checkpoint is of these adapters; a `NumdiffError` for those of another base."""
        then = meta.get("lora") or {}
        if then.get("hash", self.record["hash"]) != self.record["hash"]:
            raise NumdiffError(
                f"the adapters were trained on other weights than {self.record['base']} has now: put "
                "the model back that the run began with, or start a new run."
            )
        same = all(then.get(name) == self.record[name] for name in ("rank", "alpha"))
        return same and same_index(meta.get("index", []), self.index)

    def __deepcopy__(self, memo):
        raise UsageError("a model with adapters cannot be copied: load a merged one instead.")

    def __getstate__(self):
        raise UsageError("a model with adapters cannot be pickled: save a merged one instead.")


def _cast(flat, dtype):
    new = empty(flat.size, dtype, like=flat)
    cast_into(flat, new)
    return new


def _view(buffer, offset, shape):
    return buffer[offset : offset + math.prod(shape)].reshape(*shape)


def attach(model, config, origin):
    """Replace a model's parameters by adapters of the rank `config.lora`.

    origin: what `start_from` returned of the base, or None where only shapes count. Returns it with
    a line on the adapters.
    """
    if config.optimizer != "adamw":
        raise UsageError("--lora trains its adapters with AdamW: give --optimizer adamw.")
    if config.freeze:
        raise UsageError(
            "--lora trains adapters alone, and all else is frozen: leave --freeze out."
        )
    alpha = float(config.lora if config.lora_alpha is None else config.lora_alpha)
    table, planned = kinds.get(model.kind).class_table, is_planned(model.backend)
    if origin is None and not planned:
        raise UsageError("lora adapts the weights of a file: give init, too.")
    record = {
        "rank": config.lora,
        "alpha": alpha,
        "base": (origin or {}).get("file", ""),
        "weights": (origin or {}).get("weights"),
        "hash": "" if planned else hash_of_base(model.arrays(), table),
    }
    whole = model.parameters.total
    model.lends_gradients = False
    model.parameters = LoraParameters(model, record, config.seed)
    if origin is None:
        return None
    lines = [
        *origin["lines"],
        f"adapters of rank {config.lora}, alpha {alpha:g}: {model.parameters.trained:,} parameters are trained, "
        f"and {whole:,} stay",
    ]
    return {**origin, "lines": lines}
