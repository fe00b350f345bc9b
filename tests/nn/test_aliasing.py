"""Activations in the memory of the gradients: the same bits, less memory, and an error where the
invariant breaks."""

import contextlib
import ctypes
import types

import numpy as np
import pytest

from numdiff import kernels as K
from numdiff.device import download, side_stream
from numdiff.device.arena import Arena
from numdiff.device.array import POISON, set_poison
from numdiff.device.planned import CARDS, Planned
from numdiff.errors import NumdiffError
from numdiff.extras.convnext import functional as convnext
from numdiff.extras.sla import functional as sla
from numdiff.kernels import Pair
from numdiff.kernels.operation.versions import at_most
from numdiff.nn import DiT, UNet, aliasing, float8, functional
from numdiff.nn.aliasing import Aliasing
from numdiff.nn.dit import DiTBlock
from tests import models
from tests.arenas import ArenaEmulator, segments
from tests.conftest import exhaustive, exhaustively, needs, where
from tests.nn.steps import check_what_left, dit, step_of, unet, watch_buckets

LAUNCHING = [
    float8,
    convnext,
    sla,
    *(m for m in vars(functional).values() if isinstance(m, types.ModuleType) and hasattr(m, "K")),
]
LIGHTNING = {**models.LIGHTNING, "mlp_ratio": 3.0}


@pytest.fixture(autouse=True)
def all_alias(monkeypatch):
    """The blocks of small models, too, each by itself."""
    monkeypatch.setattr(aliasing, "SMALLEST", 0)


def state_of(step, steps):
    """{name: array} of all that the steps have computed: telemetry, weights, gradients, the
    optimizer's state."""
    parameters = step.model.parameters
    return {
        "telemetry": step.telemetry(0, steps),
        "weights": download(parameters.data),
        "gradients": download(parameters.grad),
        **step.optimizer.state(),
    }


def same(a, b):
    assert a.keys() == b.keys()
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)
    assert np.isfinite(a["weights"]).all() and a["gradients"].any()


class HostArena:
    """An arena in the memory of the host, for the CPU engine: results of its forward operations are
    copied there, and freed with their last reference, as on a GPU."""

    def __init__(self):
        self.kept = []
        self.arena = Arena(segments(self.kept), 1 << 16)
        self.aliased = 0  # arrays in aliased memory

    within = ArenaEmulator.within

    @staticmethod
    def pointer(array):
        return array.ctypes.data

    def lay(self, result):
        if isinstance(result, Pair):
            return Pair(*map(self.lay, result))
        if isinstance(result, (tuple, list)):
            return type(result)(map(self.lay, result))
        if not isinstance(result, np.ndarray) or not result.size:
            return result
        block = self.arena.allocate(result.nbytes)
        self.aliased += block.arena is self.arena and self.arena is not self.of_steps
        memory = (ctypes.c_uint8 * block.nbytes).from_address(block.address)
        memory.block = block  # as long as a view of it lives
        laid = np.frombuffer(memory, result.dtype, result.size).reshape(result.shape)
        laid[...] = result
        return laid

    def laying(self, function):
        return lambda *given, **more: self.lay(function(*given, **more))

    @contextlib.contextmanager
    def under(self, step):
        """Within the context activations of this step alias its gradients."""
        step.aliasing, self.of_steps = Aliasing(step.model), self.arena
        step.aliasing.backend = self
        # with those of extensions
        everything = {**vars(K), **{name: getattr(K, name) for name in K.__all__}}
        laying = types.SimpleNamespace(**everything)
        for name, function in everything.items():
            if name.endswith("_forward"):
                setattr(laying, name, self.laying(function))
        for module in LAUNCHING:
            module.K = laying
        try:
            yield step.aliasing
        finally:
            for module in LAUNCHING:
                module.K = K


def poison(step):
    """What the gradients of the blocks were before a step is of no matter."""
    for part in step.aliasing.parts:
        step.model.parameters.grad.view(np.uint8)[part.first : part.first + part.nbytes] = POISON


CASES = {
    "dit": dit,
    "lightning": lambda: dit(**LIGHTNING),
    "unet": unet,
    "convnext": lambda: unet(block="convnext"),
    "updown": lambda: unet(
        dropout=0.3, use_scale_shift_norm=True, resblock_updown=True, num_classes=3
    ),
}


@pytest.mark.parametrize(
    "kind, optimizer, precision, recompute",
    [
        ("dit", "adamw", "fp32", None),
        ("lightning", "muon", "fp32", "mlp"),
        ("dit", "adamw", "fp8", "blocks"),
        ("dit", "adamw", "fp8", "attention"),
        ("unet", "muon", "fp32", "blocks"),
        ("updown", "adamw", "fp32", None),
        *exhaustively(
            *(
                (kind, optimizer, "fp32", recompute)
                for kind in CASES
                for optimizer in ("adamw", "muon")
                for recompute in (None, "blocks", "attention")
            ),
            ("lightning", "adamw", "fp8", None),
            ("dit", "muon", "fp8", None),
            ("lightning", "adamw", "fp8", "mlp"),
        ),
    ],
)
def test_steps_with_aliasing_have_the_same_bits(kind, optimizer, precision, recompute):
    states = []
    for aliases in (False, True):
        model, host = CASES[kind](), HostArena()
        if recompute:
            model.recompute_blocks(recompute)
        step = step_of(model, optimizer, precision)
        with host.under(step) if aliases else contextlib.nullcontext():
            for _ in range(3):
                if aliases:
                    poison(step)
                step.run()
        states.append(state_of(step, 3))
    assert host.aliased > 3 * len(step.aliasing.parts) > 6
    same(*states)


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_frozen_blocks_are_not_aliased(kind):
    frozen = {"dit": "blocks.1.mlp.*", "unet": "input_blocks.1.*"}[kind]
    states = []
    for aliases in (False, True):
        model, host = CASES[kind](), HostArena()
        step = step_of(model)
        with host.under(step) if aliases else contextlib.nullcontext():
            step.run()
            before = aliases and len(step.aliasing.parts)
            model.parameters.freeze([frozen])  # later than the parts were laid out
            step.run()
        states.append(state_of(step, 2))
    assert 0 < len(step.aliasing.parts) < before
    same(*states)


def test_neighbours_share_an_aliased_part(monkeypatch):
    model = dit(depth=5)
    each = Aliasing(model).parts[0].nbytes
    monkeypatch.setattr(aliasing, "SMALLEST", each + 1)
    step, host = step_of(model), HostArena()
    with host.under(step):
        found = step.aliasing.parts
        assert [[block.name for block in part.blocks] for part in found] == [
            ["blocks.0", "blocks.1"],
            ["blocks.2", "blocks.3"],
        ]
        poison(step)
        step.run()
    plain = step_of(dit(depth=5))
    plain.run()
    same(state_of(plain, 1), state_of(step, 1))


@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_a_bucket_leaves_when_nothing_lies_there_any_more(kind):
    step, host = step_of(CASES[kind]()), HostArena()
    watched = watch_buckets(step)
    with host.under(step):
        poison(step)
        step.run()
    check_what_left(step, *watched)


# What breaks the invariant ------------------------------------------------------------------------


class Keeping(DiTBlock):
    """Keeps what it gives."""

    def forward(self, *given):
        self.kept = super().forward(*given)
        return self.kept


class Keeps(DiT):
    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks.modules.values():
            block.__class__ = Keeping


class Tied(DiT):
    """Its last block takes the first one's projection."""

    def forward(self, *given, **more):
        self.blocks[2].attn.proj = self.blocks[0].attn.proj
        return super().forward(*given, **more)


@pytest.mark.parametrize("kind", [Keeps, Tied])
def test_a_broken_invariant_is_reported(kind):
    def made():
        return step_of(kind(**dit().options, device="cpu"), batch=2)

    step, host = made(), HostArena()
    with (
        host.under(step),
        pytest.raises(
            NumdiffError,
            match=r"are still where the gradients of blocks\.[01] are to be "
            r"written.*lends_gradients = False",
        ),
    ):
        step.run()
    assert not any(p.loan for p in step.model.parameters.parameters.values())
    step.aliasing = None  # from now on without
    plain = made()
    for each in (step, plain):
        each.run()
    same(state_of(step, 1), state_of(plain, 1))


def test_an_interrupted_step_leaves_nothing_aliased():
    step, host = step_of(dit()), HostArena()
    arrays = step.model.arrays()
    with host.under(step):
        step.run()
        broken = {
            **arrays,
            "blocks.2.mlp.fc2.bias": np.full_like(arrays["blocks.2.mlp.fc2.bias"], np.nan),
        }
        step.model.load_arrays(broken)
        assert step.name_first_nonfinite().startswith("blocks.2.mlp")
        assert not any(p.loan for p in step.model.parameters.parameters.values())
        step.model.load_arrays(arrays)
        step.run()
    assert np.isfinite(step.model.parameters.grad).all()


# Less memory --------------------------------------------------------------------------------------


class Counting(Planned):
    """A stand-in for an H100 that launches nothing and hands out addresses as its arenas would."""

    def __init__(self):
        super().__init__(next(card for card in CARDS if "H100 80GB" in card.device_name))
        self.arenas, self.taken = [], 0
        self.arena = self.new_arena()
        self.launched = 0

    def new_arena(self):
        self.arenas.append(Arena(self._take))
        return self.arenas[-1]

    def _take(self, nbytes):
        self.taken += nbytes
        return self.taken - nbytes

    def allocate(self, nbytes):
        return self.arena.allocate(nbytes)

    within = HostArena.within

    @staticmethod
    def pointer(array):
        return 0

    def launch(self, *_):
        self.launched += 1


BASE = {"image_size": 32, "in_channels": 4, "hidden_size": 384, "depth": 6, "num_heads": 6}


@pytest.mark.parametrize(
    "kind, precision, recompute, share",
    [
        ("dit", "fp16", "blocks", 0.4),
        ("unet", "fp16", None, 0.8),
        *exhaustively(
            ("dit", "fp8", None, 0.65),
            ("dit", "fp16", None, 0.7),
            ("dit", "fp32", None, 0.7),
            ("dit", "fp16", "mlp", 0.7),
            ("unet", "fp32", "blocks", 0.2),
        ),
    ],
)
def test_the_peak_is_lower_by_most_of_the_gradients(kind, precision, recompute, share, monkeypatch):
    monkeypatch.undo()  # only what is worth a launch
    monkeypatch.setattr(side_stream, "HELD", 0)  # aliasing leaves less memory to hold back
    peaks, launches = [], []
    for aliases in (False, True):
        device = Counting()
        model = (
            DiT(**BASE, device=device, seed=None)
            if kind == "dit"
            else UNet(device=device, seed=None)
        )
        model.lends_gradients = aliases
        if recompute:
            model.recompute_blocks(recompute)
        step = step_of(model, precision=precision, batch=32)
        device.arena = device.new_arena()
        for _ in range(2):
            device.launched = 0
            step.run()
        peaks.append(device.arena.peak_bytes)
        launches.append(device.launched)
    gradients = model.parameters.grad.nbytes
    assert share * gradients < peaks[0] - peaks[1] < gradients
    assert launches[1] == launches[0] + len(step.aliasing.parts) <= launches[0] + 14


# On devices ---------------------------------------------------------------------------------------


@exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dit", "unet"])
@pytest.mark.usefixtures("few_frequencies")
def test_kernels_have_the_same_bits_too(kind):
    states = []
    for aliases in (False, True):
        model = CASES[kind](
            ArenaEmulator(),
            **{
                "dit": {"image_size": 4, "hidden_size": 16, "depth": 2},
                "unet": {
                    "image_size": 4,
                    "model_channels": 8,
                    "channel_mult": (1,),
                    "attention_resolutions": (),
                    "groups": 4,
                    "num_head_channels": 8,
                },
            }[kind],
        )
        model.lends_gradients = aliases
        step = step_of(model, batch=2)
        old = set_poison(True)  # what is laid over the gradients, too
        # quick with small arrays
        with at_most({"matmul": 1, "linear_group": 1, "column_sum": 1, "sample_sum": 1}):
            step.run()
        set_poison(old)
        states.append(state_of(step, 1))
    assert step.aliasing.parts
    same(*states)


@pytest.mark.parametrize("kind", ["dit", "lightning", "unet", "convnext"])
@pytest.mark.parametrize(
    "optimizer, precision, recompute, capture",
    [
        ("adamw", "fp16", None, True),
        ("adamw", "fp32", None, True),
        ("muon", "fp16", "blocks", True),
        ("muon", "bf16", None, False),
        ("adamw", "fp16", "attention", True),
        ("adamw", "fp8", "blocks", True),
    ],
)
@where(lambda kind, precision: precision != "fp8" or kind in ("dit", "lightning"))
@needs("gpu")
def test_a_gpus_steps_have_the_same_bits(kind, optimizer, precision, recompute, capture):
    states, peaks = [], []
    for aliases in (False, True):
        model = (
            dit(
                "cuda", image_size=16, hidden_size=128, **(LIGHTNING if kind == "lightning" else {})
            )
            if kind in ("dit", "lightning")
            else unet(
                "cuda",
                image_size=32,
                attention_resolutions=(16,),
                block="convnext" if kind == "convnext" else "resnet",
            )
        )
        model.lends_gradients = aliases
        if recompute:
            model.recompute_blocks(recompute)
        step = step_of(model, optimizer, precision, batch=32, capture=capture)
        with (
            contextlib.nullcontext() if capture else model.backend.within(model.backend.new_arena())
        ):
            arena = step.arena or model.backend.arena
            for _ in range(4):
                step.run()
        states.append(state_of(step, 4))
        peaks.append(arena.peak_bytes)
    same(*states)
    # whose peak is elsewhere
    assert peaks[1] < peaks[0] or peaks[1] == peaks[0] and (recompute or optimizer == "muon")
