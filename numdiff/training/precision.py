"""Which arithmetic a run uses where none was chosen (`--precision auto`): only this file decides."""

from .. import extensions
from ..device.capability import acting_capability
from ..dtypes import half_of
from ..errors import UsageError, quoted
from ..nn.inference import InferenceParameters
from ..nn.model import NO_FLOAT8

ON_TENSOR_CORES = "fp16"  # where the float16 kernels have tensor cores to run on
ELSEWHERE = "fp32"  # on the CPU, on the emulator and on older cards
# compute capabilities: Turing, the oldest whose tensor cores the float16 kernels use, and Ampere,
# the oldest with bfloat16 and tf32
TENSOR_CORES_FROM, BFLOAT16_FROM = (7, 5), (8, 0)

MEANING = {
    "fp32": "float32 throughout",
    "tf32": "products by TF32 on tensor cores, all else in float32",
    "fp16": "activations and products in float16; weights, sums and statistics in float32",
    "bf16": "activations and products in bfloat16; weights, sums and statistics in float32",
}
IN_TRAINING = {
    **MEANING,
    "fp8": "products of the blocks' linear layers, forward and backward, in E4M3, all else as fp16",
}  # a model that was trained so samples in float16, unless it is loaded to sample in fp8
SCALES_LOSS = "fp16", "fp8"
FLOAT8_FROM = (8, 9)  # Ada, the oldest with products of E4M3


def automatic(capability):
    """The precision on a GPU of this compute capability; None: on no GPU."""
    return (
        ON_TENSOR_CORES
        if capability is not None and tuple(capability)[:2] >= TENSOR_CORES_FROM
        else ELSEWHERE
    )


def precision_on(name, backend):
    """The precision with this name, "auto" or another, for a model on this backend."""
    if name != "auto":
        return name
    return automatic(backend.capability if getattr(backend, "name", None) == "cuda" else None)


def set_precision(model, name):
    """Let a model compute in the precision of this name, "auto", one of `MEANING`, or "fp8" where it
    only makes samples; returns its name."""
    if name == "fp8":
        if not isinstance(model.parameters, InferenceParameters):
            raise UsageError(
                "precision fp8 is for training, and for models that only make samples: load this one "
                "with inference=True, or use fp16."
            )
        if model.backend is None:
            raise UsageError(NO_FLOAT8)
        compute_in(model, name)
        return name
    if name not in ("auto", *MEANING):
        raise UsageError(f"unknown precision {quoted(name)}: use auto, {', '.join(MEANING)}.")
    chosen = precision_on(name, model.backend)
    lowest = BFLOAT16_FROM if chosen == "bf16" and model.backend is None else (0, 0)
    if (
        chosen in ("tf32", "bf16")
        and getattr(model.backend, "capability", lowest)[:2] < BFLOAT16_FROM
    ):
        raise UsageError(
            f"--precision {chosen} needs a GPU of compute capability 8.0 or later; use --precision fp32."
        )
    compute_in(model, chosen)
    return chosen


def compute_in(model, name, promoted=True):
    """Let a model compute in "fp32", "tf32", "fp16", "bf16" or "fp8", while it is trained or if it
    only makes samples.

    promoted: whether products of fp8 are added up in float32 every 128 of k
    """
    if name == "tf32":
        extensions.find("matmul", "tf32", "precision tf32")  # or its products would be float32's
    model.tf32 = name == "tf32"
    if name == "fp8":
        model.compute_in_float8(promoted)
        return
    half = half_of(name)
    if half is None:
        model.compute_in_single()
    else:
        model.compute_in_half(half)


def gpu_capability(index=0):
    """(major, minor) of a GPU, asked of the driver without setting the card up: a rank of a job may
    use another one. What NUMDIFF_CAPABILITY names goes before it."""
    from cuda.bindings import driver

    device, known = driver.cuDeviceGet(index)[1], driver.CUdevice_attribute
    both = (
        known.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        known.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    return acting_capability(
        [int(driver.cuDeviceGetAttribute(attribute, device)[1]) for attribute in both]
    )
