"""Extensions: what is added to numdiff by code that no module of the core imports.

An extension is a package that calls `register` for itself. An object is named as "module:name",
where the module is within that package, and is imported when it is first used: registering costs
microseconds, and no NumPy.

    register("numdiff.extras.post_hoc_ema",
             settings={"ema_std": "settings:AverageSettings", "ema_snapshots": "settings:SnapshotSettings"},
             kernels={"power_ema": "power_ema"},
             command={"ema": ("command:ema", "Average a run's weights again, with another width.")})

PLACES
    what can be added, each a table {name: where it is, or (where, a text for help)}; where without ":name": a module
    command           a subcommand of `numdiff`: its click command, and its line of help
    settings          a setting of training runs: the class that has it, in the form of numdiff/settings.py; its
                      `heading` is that of help
    kind              the record of a kind of model other than diffusion models: a `ModelKind`
                      (training/kinds/kind.py)
    kernels           a module, or a package of modules, that declares operations (kernels/operation/record.py)
    matmul            a product of float32 that a switch of the device chooses (kernels/matmul/launcher.py)
    conv2d_switched   a convolution of float32, likewise (kernels/conv2d/launcher.py)
    conv2d            a version of the convolution in float32, for who names it (kernels/conv2d/launcher.py)
    flash_attention   {version of flash attention: (a module, {"number": its place in the ladder; "dtypes", "requires":
                      as of `Version` (kernels/operation/record.py); "bytes_at_once": of a load, 16 by default})},
                      chosen where it fits (kernels/attention/launcher.py says what the module has)
    kernel_names      a name that `numdiff.kernels` exports, too
    functional        a differentiable operation, a name of `numdiff.nn.functional`
    bench             a subcommand of `numdiff bench`
    unet_block        a block of the UNet in place of residual ones (nn/unet.py, `other_block`), and its words in help
    unet_block_names  the names and shapes of such a block's weights in files
    dit_attention     an attention of the DiT (nn/dit.py, `attention_kind`), and its words in help
    dit_settings      a setting of training runs of a DiT, as `settings`; likewise of each kind of model
    convert           a click option of `numdiff convert`, whose value is one of the model's options
    converter         a module that converts files of no model for `numdiff convert`: holds(source), and
                      convert(source, target, given), lines
    foreign           "weights": a module that reads other programs' weights: folder_of(path), files_of(path),
                      read(source, weights, diffusion, free, reader) (training/model_files.py), and
                      read_autoencoder(path) (training/autoencoders.py)
    features          by the ending of a file: a function (name, backend, precision) that returns an extractor
                      of features (evaluation/features.py)
    transport         a module that sums the gradients of ranks on GPUs (distributed/exchange.py says what it has)
    torch_unet_block  its counterpart in PyTorch (benchmark/torch_unet.py)
    precision         {precision: what keeps a model's weights in it} (nn/module.py, `keep_float8`)
    problems          {operation: a function that returns [Problem], in addition to its own}
    run               {setting: a `RunExtension` (training/run_extension.py)}, for runs that have this setting
    nn_names          a name that `numdiff.nn` exports, too
    optimizer         a module with `make`, `atoms`, `describe` and `flops` (training/trainer.py, `optimizer_of`)
    optimizer_state   {setting: what an optimizer keeps (nn/optimizer.py)}, likewise
    checkpoint_meta   a key of a checkpoint's description: its schema
    adapter           {setting: a module of what is trained in place of a model's weights}: attach(model, config,
                      origin) of a `Trainer`; shapes, merged and applied of files (training/model_files.py)
    importer          a format of `numdiff data import`: a module (extras/importers/__init__.py says what it has)
    pictures          "files": a module that opens pictures: open_picture(path), flatten(image, background),
                      looks_like_picture(name, head), Unreadable; "folders": one for a folder of them as a
                      dataset: decoded(folder, image_size), class_names(folder) (data/dataset.py)
    data              a subcommand of `numdiff data`
    weights           a module that computes weights from a checkpoint's buffers (training/model_files.py)
    steps             a module of steps that are read from a file (diffusion/sampling.py)

Another program calls `register` before it calls numdiff. The packages in `PACKAGES` are imported at
the first use.
"""

import contextlib
import functools
import importlib.util
import pathlib
from typing import Any, NamedTuple

from .errors import UsageError

PACKAGES = ("numdiff.extras",)  # each registers its extensions when it is imported


class Entry(NamedTuple):
    """What an extension adds under a name. where: "package.module:name", or "package.module"; text:
    for help, or what else PLACES says."""

    where: str
    text: Any = ""


_places: dict[str, dict[str, Entry]] = {}


def register(package: str, **places: dict[str, Any]) -> None:
    """Declare what a package adds: see the head of this file. A `ValueError` for a name that is
    taken."""
    for place, entries in places.items():
        known = _places.setdefault(place, {})
        for name, entry in entries.items():
            where, text = entry if isinstance(entry, tuple) else (entry, "")
            if name in known:
                raise ValueError(
                    f"{package} registers the {place} {name!r}, which is {known[name].where} already"
                )
            known[name] = Entry(f"{package}.{where}", text)


@functools.cache
def _load():
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:  # it is there, and lacks something
                raise


def entries(place: str) -> dict[str, Entry]:
    """{name: Entry} of a place, in the order in which they were registered; imports none of the
    objects."""
    _load()
    return _places.get(place, {})


def find(place: str, name: str, wanted: str) -> Any:
    """The object of this name. wanted: the option or argument that needs it, for the `UsageError`
    where its module cannot be imported."""
    if name not in entries(place):
        raise UsageError(f"{wanted} needs an extension that adds the {place} {name!r}: install it.")
    module, _, attribute = entries(place)[name].where.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{wanted} needs {module}, which cannot be imported ({error}): install what it lacks, or do "
            f"without {wanted}."
        ) from error
    return getattr(found, attribute) if attribute else found


def available(place: str) -> dict[str, Any]:
    """{name: object} of a place, without those that cannot be imported: the options that need these
    say so."""
    found = {}
    for name in entries(place):
        try:
            found[name] = find(place, name, name)
        except UsageError:
            continue
    return found


def active(place: str, settings: Any) -> list[Any]:
    """[object] of a place whose names are settings, for those that are set among the attributes of
    `settings`."""
    return [
        find(place, name, f"--{name.replace('_', '-')}")
        for name in entries(place)
        if getattr(settings, name, None)
    ]


def attribute_of(module: str, place: str, name: str) -> Any:
    """For a module's `__getattr__`: what extensions add to its names."""
    if name in entries(place):
        return find(place, name, f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


@functools.cache
def kernel_packages() -> tuple[str, ...]:
    """Names of the packages and modules with kernels, that of the core first."""
    return "numdiff.kernels", *(entry.where for entry in entries("kernels").values())


def kernel_files() -> list[pathlib.Path]:
    """The source files of extensions' kernels, in one order; none of those that cannot be found."""
    found = []
    for name in kernel_packages()[1:]:
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec(name)
            found += [pathlib.Path(spec.origin)] if spec and spec.origin else []
    return [
        path
        for origin in found
        for path in (
            sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
        )
    ]
