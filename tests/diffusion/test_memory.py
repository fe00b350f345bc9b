"""Too large a batch: what the arenas say that would fit."""
import contextlib
import functools

import pytest

from numdiff.device.arena import SEGMENT, Arena
from numdiff.device.planned import CARDS, Planned
from numdiff.device.ptx import PtxDevice
from numdiff.diffusion import Sampling
from numdiff.diffusion.memory import bytes_for, largest_batch, measuring_twin
from numdiff.errors import OutOfMemoryError, UsageError
from numdiff.nn import DiT, UNet


class Small(PtxDevice):
    """A GPU that runs nothing and has `total` bytes of memory."""

    device_name = "Small GPU"

    def __init__(self, total):
        super().__init__()
        self.total, self.taken, self.sizes, self.address = total, 0, {}, 0
        self.arenas = [Arena(self._take)]
        self._arena = self.arenas[0]

    @functools.cached_property
    def inference_arena(self):
        self.arenas.append(Arena(self._take))
        return self.arenas[-1]

    @contextlib.contextmanager
    def within(self, arena):
        yield

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
    yield UNet(image_size=64, device=device, seed=None), {}
    yield DiT(image_size=32, hidden_size=384, depth=2, num_heads=6, device=device, seed=None), {"cfg_scale": 4.0}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("which", [0, 1], ids=["unet", "dit"])
def test_a_batch_that_does_not_fit_is_told_with_one_that_does(which, half):
    device = Small(3 << 30)
    model, options = list(models(device))[which]
    if half:
        model.compute_in_half()
    wanted = Sampling(model, 20_000, steps=3, batch=20_000, sampler="dpm++2m", **options)
    with pytest.raises(OutOfMemoryError, match=r"20,000 images at a time do not fit into the [\d,]+ MiB that Small GPU "
                                               r"has left beside the model; use --batch \d+ or less") as error:
        next(wanted.batches())
    most = int(str(error.value).split("--batch ")[1].split()[0])
    fitting = Sampling(model, most, steps=3, batch=most, sampler="dpm++2m", **options)
    (_, images), = fitting.batches()  # it does fit, after the attempt that did not
    assert len(images) == most
    twin, room = measuring_twin(model), bytes_for(fitting, measuring_twin(model), most)
    assert bytes_for(fitting, twin, most + most // 32 + 2) + 3 * SEGMENT > room >= 2 << 30


def test_no_room_for_one():
    model, _ = next(models(Small(3 << 30)))
    assert largest_batch(Sampling(model, 8), 1 << 20) == 0


def test_a_batch_that_32_bits_do_not_count_is_told_before_anything_is_compiled():
    """60,000 images of 64×64 have 2³³ numbers in 64 channels."""
    model, _ = next(models(Planned(CARDS[-4])))
    with pytest.raises(UsageError, match=r"60,000 images at a time have arrays of 2³¹ elements.*--batch \d+") as error:
        Sampling(model, 60_000, batch=60_000).rehearse()
    most = int(str(error.value).split("--batch ")[1].split()[0])
    assert 2_000 < most < 2**31 // (64 * 64 * 64)
    Sampling(model, most, batch=most).rehearse()
