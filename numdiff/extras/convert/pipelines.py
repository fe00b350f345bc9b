"""Whole pipelines of diffusers: a DiT of latents, its autoencoder and a scheduler in one folder,
which `DiTPipeline.from_pretrained` loads.

    OUT/transformer/    config.json and the weights of the DiT
    OUT/vae/            the same of the autoencoder
    OUT/scheduler/scheduler_config.json
    OUT/model_index.json    written last: without it the folder is no pipeline

Such a folder's parts are read, too: the DiT with its schedule and names of classes
(kinds/pipeline_files.py), and the autoencoder by `load_autoencoder`.
"""

import contextlib
import pathlib

from ...errors import UsageError
from ...files import cannot_write, write_json
from ...outputs import check_apart
from ...training import kinds
from ...training.autoencoders import KIND, read_autoencoder
from ...training.model_files import files_of
from .autoencoders import write_autoencoder
from .diffusers import CONFIG, PIPELINE, WEIGHTS
from .kinds import weights_of
from .kinds.pipeline_files import SCHEDULER, SCHEDULER_CONFIG, scheduler_config
from .layout import to_torch_layout
from .models import Conversion, read_source

TRANSFORMER = "transformer"
NULL_OF_PIPELINE = 1000  # the class that DiTPipeline guides away from, whatever the model's
PARTS = {
    "scheduler": ["diffusers", "DDIMScheduler"],
    "transformer": ["diffusers", "DiTTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def convert_pipeline(source, target, vae=None, weights=None, diffusion=None, **free):
    """Write a DiT of latents and its autoencoder as a folder that diffusers' `DiTPipeline` loads.

    source, weights, diffusion, free: as of `convert`; vae: file or folder of the autoencoder (None:
    that of the run). Returns a `Conversion`.
    """
    target = pathlib.Path(target)
    if target.suffix:
        raise UsageError(
            f"OUT is {str(target)!r}, and with --to diffusers-pipeline it is a folder: give a name "
            "without an ending."
        )
    free = {k: v for k, v in free.items() if v is not None}
    diffusion = {k: v for k, v in (diffusion or {}).items() if v is not None}
    found = read_source(source, weights, diffusion, free)
    kind, sizes = kinds.get(found.kind), found.options
    vae = vae or (found.pictures or {}).get("vae")
    if vae is None:
        raise UsageError(
            f"a pipeline has an autoencoder, and {source} names none: give the one by which its latents "
            "were encoded as --vae."
        )
    sources = [*files_of(source), *files_of(vae)]
    names = CONFIG, WEIGHTS
    parts = [target, target / PIPELINE, target / SCHEDULER / SCHEDULER_CONFIG]
    parts += [target / part / name for part in (TRANSFORMER, KIND) for name in names]
    for path in parts:
        check_apart("the pipeline", path, *sources)
    options, arrays = read_autoencoder(vae)
    if options["latent_channels"] != sizes["in_channels"]:
        raise UsageError(
            f"--vae {vae} decodes latents of {options['latent_channels']} channels, and {source} makes "
            f"{sizes['in_channels']}: give the autoencoder by which its data were encoded."
        )
    config = scheduler_config(found.diffusion)
    index = {"_class_name": "DiTPipeline", **PARTS}
    if found.classes:
        index["id2label"] = {str(i): name for i, name in enumerate(found.classes)}
    try:
        (target / SCHEDULER).mkdir(parents=True, exist_ok=True)
        (target / PIPELINE).unlink(missing_ok=True)  # of an older one, whose parts are replaced now
    except OSError as error:
        raise cannot_write("the pipeline into", target, error) from error
    training = {"classes": found.classes} if found.classes else {}
    try:
        notes = weights_of(kind).write_folder(
            target / TRANSFORMER, sizes, to_torch_layout(found.arrays), found.diffusion, training
        )
        write_autoencoder(target / KIND, options, arrays)
        write_json(target / SCHEDULER / SCHEDULER_CONFIG, config, "the scheduler")
        write_json(target / PIPELINE, index, "the pipeline's index")
    except BaseException:
        with contextlib.suppress(OSError):  # they hold something
            (target / SCHEDULER).rmdir()
            target.rmdir()
        raise
    notes = [(heading, text) for heading, text in notes if heading != "scheduler"]
    notes = [
        (heading, text.replace("block in model.", "block in pipeline.transformer."))
        for heading, text in notes
    ]
    if sizes["num_classes"] != NULL_OF_PIPELINE:
        notes.append(
            (
                "guidance",
                f"DiTPipeline takes {NULL_OF_PIPELINE} for no class, which this model of "
                f"{sizes['num_classes']} classes does not have: call it with guidance_scale=1",
            )
        )
    return Conversion(
        kind.name,
        sizes,
        kind.count_parameters(sizes)[0],
        found.step,
        found.diffusion,
        found.remarks + notes,
    )
