"""NUMDIFF_CAPABILITY: a GPU that acts as one of a lower compute capability."""

import sys
import types

import pytest

import numdiff.device
from numdiff.device.capability import acting_capability, shared_of
from numdiff.device.emulator import EmulatorDevice, LaunchRefused
from numdiff.device.gpu_launch import Launching
from numdiff.errors import UsageError
from numdiff.extras.kernel_check import run as checking
from numdiff.training import options as options_module
from numdiff.training.options import resolve


@pytest.mark.parametrize(
    "text, capability, shared",
    [
        (None, (9, 0), 227),
        ("", (9, 0), 227),
        ("9.0", (9, 0), 227),
        ("8.9", (8, 9), 99),
        ("8.6", (8, 6), 99),
        (" 8.0 ", (8, 0), 163),
        ("7.5", (7, 5), 64),
    ],
)
def test_a_card_acts_as_a_lower_one(monkeypatch, text, capability, shared):
    if text is None:
        monkeypatch.delenv("NUMDIFF_CAPABILITY", raising=False)
    else:
        monkeypatch.setenv("NUMDIFF_CAPABILITY", text)
    assert acting_capability((9, 0)) == capability
    assert shared_of(capability) == shared << 10


@pytest.mark.parametrize(
    "text, why",
    [
        ("ampere", "is not a compute capability that numdiff knows"),
        ("8", "is not a compute capability"),
        ("8.3", "is not a compute capability"),
        ("8.0a", "is not a compute capability"),
        ("x" * 99, "is not a compute capability"),
        ("7.0", r"is below 7.5 \(Turing\), the lowest that numdiff supports"),
        ("10.0", "is above this GPU's own, 9.0"),
        ("12.0", "is above this GPU's own, 9.0"),
    ],
)
def test_other_values_are_refused_in_one_sentence(monkeypatch, text, why):
    monkeypatch.setenv("NUMDIFF_CAPABILITY", text)
    with pytest.raises(
        UsageError,
        match=rf"^NUMDIFF_CAPABILITY={text[:20]}.*{why}.*: set one of 7.5, 8.0, 8.6, 8.7, "
        r"8.9, 9.0, or unset it\.$",
    ) as refused:
        acting_capability((9, 0))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("capability, has_bfloat16", [((8, 0), True), ((7, 5), False)])
def test_precision_follows(monkeypatch, capability, has_bfloat16):
    monkeypatch.setattr(numdiff.device, "why_no_gpu", lambda: None)
    monkeypatch.setattr(options_module, "gpu_capability", lambda: capability)
    assert resolve({"model": "unet", "device": "cuda"}).precision == "fp16"
    given = {"model": "unet", "device": "cuda", "precision": "bf16"}
    if has_bfloat16:
        assert resolve(given).precision == "bf16"
    else:
        with pytest.raises(
            UsageError, match="--precision bf16 needs a GPU of compute capability 8"
        ):
            resolve(given)
    with pytest.raises(
        UsageError, match="--precision fp8 needs a GPU of compute capability 8.9 or later"
    ):
        resolve({"model": "dit", "device": "cuda", "precision": "fp8"})


def test_the_check_leaves_out_what_such_a_card_lacks(monkeypatch):
    """A version that is forced is refused by its launch; the check says so and does not fail."""
    card = EmulatorDevice(cc=(8, 6))
    assert card.shared_limit == 99 << 10
    monkeypatch.setattr(checking, "get_backend", lambda device: card)
    found = {
        version: checking.check_case(case, version, "cuda")
        for version in (5, 6)
        for case in [
            next(
                case
                for case in checking.cases_named(["matmul"])
                if case.versions == (version,) and case.fast and "float16" in case.label
            )
        ]
    }
    assert found[5].passed
    assert (
        found[6].lacking
        and not found[6].passed
        and "needs compute capability 9.0a" in found[6].fault
    )


def test_the_check_leaves_out_what_needs_more_shared_memory(monkeypatch):
    """A tile that has no place in Turing's 64 KiB is lacking there, and another version is advised
    that such a card has."""
    monkeypatch.setattr(checking, "get_backend", lambda device: EmulatorDevice(cc=(7, 5)))
    case = next(
        case
        for case in checking.cases_named(["flash_attention"])
        if 2 in case.versions and "HS 64" in case.label
    )
    found = checking.check_case(case, 2, "cuda")
    assert found.lacking and "more shared memory" in found.fault
    assert found.fault.endswith("use version=1")


def test_lanes_and_kernels_are_those_of_the_card(monkeypatch):
    """What is compiled is for the card itself: `Gpu` sets its cache up with its own capability."""
    from numdiff.device import gpu as module

    monkeypatch.setenv("NUMDIFF_CAPABILITY", "8.6")
    properties = types.SimpleNamespace(
        max_shared_memory_per_block_optin=227 << 10, multiprocessor_count=132, clock_rate=1980000
    )
    device = types.SimpleNamespace(
        compute_capability=(9, 0),
        name="NVIDIA H200",
        properties=properties,
        set_current=lambda: None,
        create_stream=lambda: types.SimpleNamespace(handle=0),
    )
    monkeypatch.setitem(
        sys.modules,
        "cuda.core",
        types.SimpleNamespace(
            Device=lambda index: device, LaunchConfig=None, ObjectCode=None, launch=None
        ),
    )
    monkeypatch.setattr(module.cuda, "select_device", lambda index: None)
    monkeypatch.setattr(module.Gpu, "memory_info", lambda gpu: (139 << 30, 140 << 30))
    made = module.Gpu()
    assert (
        made.capability == (8, 6)
        and made.cache.capability == (9, 0)
        and made.shared_limit == 99 << 10
    )
    assert made.device_name == "NVIDIA H200 as 8.6" and not made._early
    assert made.peak_float32_flops == pytest.approx(2 * 128 * 132 * 1.98e9)


def test_a_launch_with_too_much_shared_memory_is_refused():
    card = types.SimpleNamespace(shared_limit=64 << 10, capability=(7, 5))
    with pytest.raises(
        LaunchRefused, match="65537 bytes of .* than the 65536 .* on compute capability 7.5"
    ):
        Launching._configure(card, 1, 32, 65537, 1)
