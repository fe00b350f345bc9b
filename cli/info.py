"""`numdiff info`: what is here, and what will run."""

import importlib.metadata
import os
import platform

import click

from .output import echo

PACKAGES = ("numdiff-diffusion", "numba", "numba-cuda", "numpy", "h5py", "pillow", "matplotlib")
TOOLKIT = (
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-runtime",
    "nvidia-cuda-nvrtc",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)


def version(package):
    """The installed version of a package, or None. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def say(name, value):
    click.echo(f"{name:<12} {value}")


@click.command()
@click.argument("picture", type=click.Path(), metavar="[FILE.png]", required=False)
def info(picture):
    """Show what this machine has, and what will run on it.

    With FILE.png, a grid of `numdiff sample`: how it was made, and the command that makes it again.
    """
    if picture:
        from numdiff.training.picture_record import lines_of, read_record

        for line in lines_of(read_record(picture)):
            echo(line)
        return
    from numdiff.device import why_no_gpu
    from numdiff.device.kernel_cache import cache_directory
    from numdiff.training import kinds
    from numdiff.training.options import resolve

    say(
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    )
    say("packages", ", ".join(f"{name} {version(name) or 'missing'}" for name in PACKAGES))
    toolkit = [f"{name} {version(name)}" for name in TOOLKIT if version(name)]
    say(
        "cuda wheels",
        ", ".join(toolkit)
        or "none; with a GPU: pip install 'numdiff-diffusion[cuda13]', or [cuda12] "
        "if the driver is older than 580",
    )
    reason = why_no_gpu()
    say("gpu", f"none usable: {reason}" if reason else describe_gpus())
    say("mpi", describe_mpi())
    cache = cache_directory()
    say("cache", f"{cache} ({describe_cache(cache)})")
    models = {model: resolve({"model": model}) for model in kinds.names()}
    first = models[kinds.names()[0]]
    where = "on the GPU" if first.device == "cuda" else "on the CPU, with NumPy"
    presets = ", ".join(
        f"numdiff train {model}: preset {options.preset}" for model, options in models.items()
    )
    say("will run", f"{presets}; {where}, precision {first.precision}")


def describe_cache(cache):
    """Whether there is a folder of compiled kernels, or can be."""
    there, nearest = os.path.isdir(cache), os.path.abspath(cache)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not (os.path.isdir(nearest) and os.access(nearest, os.W_OK)):
        return f"{'has compiled kernels, but ' * there}cannot be written: set NUMDIFF_CACHE_DIR to a folder that can"
    from numdiff.caches import cache_root, check_own

    try:
        for folder in filter(os.path.lexists, (cache_root(), cache)):
            check_own(folder)
    except OSError as error:
        return f"is not used, as {error.strerror}"
    return "has compiled kernels" if there else "made when a kernel is compiled"


def describe_gpus():
    """Each GPU's name, compute capability, memory, and the driver's CUDA version."""
    from cuda.bindings import driver, nvml

    from numdiff.device.capability import MINIMUM_CAPABILITY, VARIABLE, acting_capability, dotted

    fields = driver.CUdevice_attribute
    halves = (
        fields.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        fields.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    lines = []
    for index in range(driver.cuDeviceGetCount()[1]):
        device = driver.cuDeviceGet(index)[1]
        name = driver.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode()
        capability = tuple(driver.cuDeviceGetAttribute(half, device)[1] for half in halves)
        memory = driver.cuDeviceTotalMem(device)[1]
        verdict = ", too old: numdiff needs 7.5"
        if capability >= MINIMUM_CAPABILITY:
            acting = acting_capability(capability)
            verdict = f", acts as {dotted(acting)} ({VARIABLE})" if acting != capability else ""
        lines.append(
            f"{index}: {name}, compute capability {dotted(capability)}, {memory / 2**30:.0f} GiB{verdict}"
        )
    number = driver.cuDriverGetVersion()[1]
    lines.append(
        f"driver {driver_version(nvml)}, for CUDA up to {number // 1000}.{number % 1000 // 10}"
    )
    return f"\n{'':<13}".join(lines)


def driver_version(nvml):
    """The version of the NVIDIA driver, as nvidia-smi shows it."""
    try:
        nvml.init_v2()
        try:
            return nvml.system_get_driver_version()
        finally:
            nvml.shutdown()
    except Exception:  # a driver without its management library, as in some containers
        return "unknown"


def describe_mpi():
    """Which MPI mpi4py would use; mpi4py is imported only if it is installed, and never
    initialised."""
    if version("mpi4py") is None:
        return "mpi4py is not installed; pip install 'numdiff-diffusion[mpi]' (one process works without it)"
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        return f"mpi4py {mpi4py.__version__}, {' '.join(MPI.Get_library_version().splitlines()[0].split())}"
    except Exception as error:  # mpi4py without a library: ImportError or RuntimeError, by version
        return f"mpi4py {version('mpi4py')} finds no MPI library ({' '.join(str(error).split())}); pip install mpich"
