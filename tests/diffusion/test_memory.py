"""Too large a batch: what the arenas say that would fit."""

import contextlib
import functools

import pytest

from numdiff.device.arena import SEGMENT, Arena
from numdiff.device.limits import check_grid
from numdiff.device.planned import CARDS, Planned
from numdiff.device.ptx import PtxDevice
from numdiff.diffusion import Sampling
from numdiff.diffusion.memory import bytes_for, largest_batch, measuring_twin
from numdiff.errors import OutOfMemoryError, TooManyElementsError, UsageError
from numdiff.nn import DiT, UNet
from tests.conftest import quick


class Small(PtxDevice):
    """A GPU that runs nothing and has `total` bytes of memory, of which what is replayed has arenas
    of its own."""

    device_name = "Small GPU"
    turn = contextlib.nullcontext()

    def __init__(self, total):
        super().__init__()
        self.total, self.taken, self.sizes, self.address = total, 0, {}, 0
        self.arenas = [Arena(self._take)]
        self._arena = self.arenas[0]

    def new_arena(self):
        self.arenas.append(Arena(self._take))
        return self.arenas[-1]

    @functools.cached_property
    def inference_arena(self):
        return self.new_arena()

    @contextlib.contextmanager
    def within(self, arena):
        outer, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = outer

    @staticmethod
    def capture(function):
        function()
        return lambda: None

    @staticmethod
    def pointer(array):
        return 0

    def memory_info(self):
        return self.total - self.taken, self.total

    def _take(self, nbytes):
        if self.taken + nbytes > self.total:
            raise OutOfMemoryError("no more")
        self.taken, self.address = self.taken + nbytes, self.address + nbytes
        self.sizes[self.address - nbytes] = nbytes
        return self.address - nbytes

    def trim(self, arena, keep=()):
        def give_back(address):
            self.taken -= self.sizes.pop(address)

        arena.trim(give_back, keep)

    def allocate(self, nbytes):
        return self._arena.allocate(nbytes)

    def launch(self, *_):
        pass


def models(device):
    yield (
        UNet(image_size=64, channel_mult=(1, 2, 2), num_res_blocks=1, device=device, seed=None),
        {},
    )
    yield (
        DiT(image_size=32, hidden_size=384, depth=2, num_heads=6, device=device, seed=None),
        {"cfg_scale": 4.0},
    )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("which", [0, 1], ids=["unet", "dit"])
@quick(lambda which, half: half == (which == 1))
def test_a_batch_that_does_not_fit_is_told_with_one_that_does(which, half):
    def made():
        model, options = list(models(Small(3 << 30)))[which]
        if half:
            model.compute_in_half()
        return model, options

    model, options = made()
    wanted = Sampling(model, count=20_000, steps=3, batch=20_000, sampler="dpm++2m", **options)
    with pytest.raises(
        OutOfMemoryError,
        match=r"20,000 images at a time do not fit into the [\d,]+ MiB that Small GPU "
        r"has left after the model; use --batch \d+ or less",
    ) as error:
        next(wanted.batches())
    most = int(str(error.value).split("--batch ")[1].split()[0])
    # it does fit, after the attempt that did not, and where there was none
    for model in (wanted.model, made()[0]):
        gpu = model.backend
        room, arenas = gpu.memory_info()[0], (gpu.arenas[0], gpu.inference_arena)
        fitting = Sampling(model, count=most, steps=3, batch=most, sampler="dpm++2m", **options)
        needed, more = (
            bytes_for(fitting, measuring_twin(model), n, arenas)
            for n in (most, most + most // 32 + 2)
        )
        ((_, images),) = fitting.batches()
        assert len(images) == most
        assert room - gpu.memory_info()[0] == needed <= room - SEGMENT  # as foreseen
        assert more > room - 3 * SEGMENT >= 2 << 30


def test_no_room_for_one():
    model, _ = next(models(Small(3 << 30)))
    assert largest_batch(Sampling(model, count=8), 1 << 20) == 0


def test_a_batch_that_32_bits_do_not_count_is_told_before_anything_is_compiled():
    """60,000 images of 64×64 have 2³³ numbers in 64 channels."""
    model, _ = next(models(Planned(CARDS[-4])))
    with pytest.raises(
        UsageError, match=r"60,000 images at a time are more than kernels count.*--batch \d+"
    ) as error:
        Sampling(model, count=60_000, batch=60_000).rehearse()
    most = int(str(error.value).split("--batch ")[1].split()[0])
    assert 2_000 < most < 2**31 // (64 * 64 * 64)
    Sampling(model, count=most, batch=most).rehearse()


def test_more_blocks_than_a_launch_may_have_are_told_with_a_batch_that_has_not():
    """Attention's grid has a block for each image on an axis that counts to 65,535."""
    _, (model, _) = models(Planned(CARDS[-4]))
    model.compute_in_half()
    with pytest.raises(
        UsageError, match=r"70,000 images at a time are more than kernels count.*--batch \d+"
    ) as error:
        Sampling(model, count=70_000, batch=70_000).rehearse()
    most = int(str(error.value).split("--batch ")[1].split()[0])
    assert 64_000 < most <= 65_535
    Sampling(model, count=most, batch=most).rehearse()
    with pytest.raises(TooManyElementsError, match=r"a grid of \(1, 65536\) blocks is larger than"):
        check_grid((1, 65536))
