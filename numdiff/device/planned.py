"""Which kernels some work will launch, found without running it: on a stand-in for a GPU, which
only takes notes.

    keys = collect(lambda device: …, card)        any work over arrays of `device`; nothing is computed
    keys = collect(work, card_of(get_gpu()))      …as the GPU of this machine would do it

A launcher's choice depends on shapes and types, on the card's size and on its table of tiles, never
on values. So the notes are complete, and an evening's training is planned in a tenth of a second.
"""

from typing import NamedTuple

from ..errors import UsageError
from .compiler import is_kept, key_of
from .gpu import restore_gpu
from .limits import check_grid
from .ptx import PtxDevice
from .requires import check_supported


class Card(NamedTuple):
    """The properties of a GPU that launchers use.

    shared_limit: bytes of shared memory that a block may have
    own: the capability that kernels are compiled for, where NUMDIFF_CAPABILITY has launchers choose
    by another
    """

    device_name: str
    capability: tuple
    multiprocessors: int
    shared_limit: int
    own: tuple = ()

    @property
    def compiled_for(self):
        return self.own or self.capability


# Common cards, for planning without one: the first of a compute capability stands for all of it
CARDS = (
    Card("Tesla T4", (7, 5), 40, 64 << 10),
    Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10),
    Card("NVIDIA A10", (8, 6), 72, 99 << 10),
    Card("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 << 10),
    Card("NVIDIA L4", (8, 9), 58, 99 << 10),
    Card("NVIDIA L40S", (8, 9), 142, 99 << 10),
    Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 << 10),
    Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10),
    Card("NVIDIA H200", (9, 0), 132, 227 << 10),
    Card("NVIDIA H100 PCIe", (9, 0), 114, 227 << 10),
    Card("NVIDIA B200", (10, 0), 148, 227 << 10),
    Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 << 10),
)


def card_of(gpu):
    """The `Card` that a `Gpu` is."""
    own = gpu.cache.capability
    return Card(
        gpu.device_name,
        tuple(gpu.capability),
        gpu.multiprocessors,
        gpu.shared_limit,
        own if own != gpu.capability else (),
    )


def cards_with(capability):
    """All known cards of a compute capability; a `UsageError` if there are none."""
    found = [card for card in CARDS if card.capability == tuple(capability)]
    if not found:
        known = ", ".join(dict.fromkeys("{}.{}".format(*card.capability) for card in CARDS))
        raise UsageError(
            f"--capability {'.'.join(map(str, capability))}: no such card is known; use one of {known}, "
            "or compile on a machine that has it."
        )
    return found


class Planned(PtxDevice):
    """A stand-in for a GPU that runs nothing and notes what is launched.

    kernels: {key: None} of what is launched, in the order of the first launches
    """

    name = "cuda"  # so that callers act as on a GPU
    plans = True

    def __init__(self, card):
        super().__init__()
        self.device_name, self.capability, self.multiprocessors, self.shared_limit = card[:4]
        self.kernels = {}

    def __reduce__(self):
        return restore_gpu, ()

    def launch(self, kernel, grid, block, args, *_):
        check_grid(grid)
        check_supported(self, kernel, self.device_name)
        key = key_of(kernel, args)
        if is_kept(key) and not getattr(kernel.py_func, "made_here", False):
            self.kernels[key] = None


def collect(work, card):
    """[Key] of the kernels that `work(device)` would launch on a card."""
    device = Planned(card)
    work(device)
    return list(device.kernels)


def is_planned(backend):
    """Whether the backend computes nothing, so that no values are needed."""
    return getattr(backend, "plans", False)
