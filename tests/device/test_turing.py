"""Kernels written for sm_80 on Turing: their PTX, and their results in an emulator of such a card."""

import re
import subprocess

import numpy as np
import pytest

from numdiff.device import cuda, download, int64, upload
from numdiff.device.async_copy import (
    cp_async_4_zfill,
    cp_async_8,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    shared_address,
)
from numdiff.device.compiler import compile_kernel, type_of_word
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.half import in_bfloat16
from numdiff.device.kernel_cache import KernelCache, Key
from numdiff.device.ptx import compile_to_ptx
from numdiff.device.ptxas import find_ptxas
from numdiff.device.requires import supports
from numdiff.device.tensor_core import ldmatrix_x2_trans, ldmatrix_x4, mma_m16n8k16, pack_half2
from numdiff.device.turing import for_turing, needs_rewriting
from numdiff.extras.kernel_check.run import CASES, reference, relative_error, run_once
from numdiff.kernels.matmul import mma
from tests.conftest import exhaustive, needs

TURING = (7, 5)
FLOATS, HALVES = "float32[1]", "float16[1]"


@cuda.jit
def product_kernel(a, b, c, count):
    """c (16, 8) float16 = a (16, 16) · b (16, 8) by every instruction that Turing lacks."""
    tile = cuda.shared.array(512 + 256 + 16, "uint8", alignment=16)
    lane, base = cuda.threadIdx.x, shared_address(tile)
    cp_async_16(base + 16 * lane, a, 8 * lane)
    if lane < 16:
        cp_async_16_zfill(base + 512 + 16 * lane, b, 8 * lane, 16 * count)
    if lane == 16:
        cp_async_8(base + 768, a, 0)
        cp_async_4_zfill(base + 776, a, 0, 0)
    cp_async_commit()
    cp_async_wait(0)
    cuda.syncthreads()
    x = ldmatrix_x4(base + lane % 16 * 32 + lane // 16 * 16)
    y = ldmatrix_x2_trans(base + 512 + lane % 16 * 16)
    zero = np.float32(0)
    z = mma_m16n8k16(x, y, (zero, zero, zero, zero))
    words = pack_half2(z[0], z[1]), pack_half2(z[2], z[3])
    for i in range(2):
        c[int64((lane // 4 + 8 * i) * 4 + lane % 4)] = words[i]


TYPES = (HALVES, HALVES, "uint32[1]", "uint32")


def numba_types():
    return tuple(map(type_of_word, TYPES))


def test_the_ptx_has_no_instruction_of_later_cards():
    before = compile_to_ptx(product_kernel, numba_types(), TURING)
    after = for_turing(before)
    assert len(re.findall(r"cp\.async\.c[ag]", before)) == 4 and "cp.async" not in after
    assert "m16n8k16" in before and "m16n8k16" not in after
    assert after.count("mma.sync.aligned.m16n8k8") == 2
    assert before.count("f16x2.f32") == 2 and "f16x2.f32" not in after


@needs("ptxas")
def test_ptxas_takes_it(tmp_path):
    """…and refuses what was not rewritten."""
    before = compile_to_ptx(product_kernel, numba_types(), TURING)
    for text, code in ((for_turing(before), 0), (before, 255)):
        (tmp_path / "k.ptx").write_text(text)
        command = [find_ptxas(), "-arch", "sm_75", tmp_path / "k.ptx", "-o", tmp_path / "k"]
        assert subprocess.run(command, capture_output=True).returncode == code


def test_machine_code_is_made_and_kept_under_its_own_name():
    assert needs_rewriting(TURING) and not needs_rewriting((8, 0))
    key, acting = Key("module", "kernel", TYPES), (9, 0, 7, 5)
    names = {KernelCache(c, "folder").file_name(key) for c in (TURING, (9, 0), acting)}
    assert len(names) == 3
    assert len(compile_kernel(product_kernel, TYPES, acting).cubin) > 1000
    assert len(compile_kernel(product_kernel, TYPES, TURING).cubin) > 1000


@pytest.mark.parametrize("capability", [TURING, (8, 0)])
def test_the_emulator_gives_the_product(capability):
    rng, device = np.random.default_rng(), EmulatorDevice(cc=capability)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = upload(np.zeros(64, np.uint32), device)
    arrays = [upload(x.reshape(-1), device) for x in (a, b)]
    for count, expected in ((1, a.astype(np.float64) @ b), (0, np.zeros((16, 8)))):
        device.launch(product_kernel, 1, 32, (*arrays, c, np.uint32(count)))
        result = download(c).view(np.float16).reshape(16, 8)
        np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-3)


def test_half_precision_takes_tensor_cores_and_bfloat16_does_not():
    kernel = next(iter(mma.KERNELS.values()))
    assert supports(TURING, kernel) and not supports((7, 0), kernel)
    brain = in_bfloat16(kernel, "bfloat16")
    assert supports((8, 0), brain) and not supports(TURING, brain)


QUICK = {
    ("matmul", "float16, aᵀ·b, tile (64, 64), float16, with a residual"),
    ("conv2d", "float16, mma, segments of 8, 128 pixels"),
    ("conv2d", "float16, 8 → 8"),
    ("flash_attention", "float16, legacy, HS 32, T 65, 128 queries"),
    ("linear_gradients_backward", "float16, by mma, Turing's stages, written"),
}
# what a block of Turing has too little shared memory for, or what needs a later card
LATER = re.compile(
    r"cluster|segments of 16, 256|segments of 8, 256|, [23] stages|bfloat16|tf32|pairs|blocks$"
    r"|HS 128|HS (64|72), T 3, 128 keys|256 keys"
)


def turing_cases():
    """(case, version) of float16 problems that rungs for tensor cores take."""
    rungs = {"matmul": 5, "conv2d": 4, "conv2d_weight_gradient": 4, "conv2d_input_gradient": 4}
    rungs |= {"flash_attention": 3, "flash_attention_backward": 3}
    rungs |= {"linear_gradients_backward": None, "groupnorm": 3, "groupnorm_backward": 3}
    for case in CASES:
        version = rungs.get(case.name, 0)
        if version in case.versions and "float16" in case.label and not case.only_compiled:
            if not LATER.search(case.label):
                marks = () if (case.name, case.label) in QUICK else exhaustive
                yield pytest.param(case, version, marks=marks, id=f"{case.name}, {case.label}")


@pytest.mark.parametrize("case, version", list(turing_cases()))
def test_float16_kernels_run_on_turing(case, version):
    """…as the reference does, without a fault: with 64 KiB and no asynchronous copies."""
    results = run_once(case, version, EmulatorDevice(cc=TURING, float64=False))
    for got, want in zip(results, reference(case), strict=True):
        assert relative_error(got, want) <= case.tolerance


def test_the_quick_cases_exist():
    found = {(case.name, case.label) for case in CASES}
    assert found >= QUICK
