"""The DiT's weights in other programs: the state dicts of the public DiT, of SiT and of
LightningDiT, and diffusers' folder (DiTTransformer2DModel)."""

import contextlib
import json
import pathlib

import numpy as np

from .... import extensions
from ....diffusion import Diffusion
from ....diffusion.sampling import PIXEL_CHANNELS
from ....errors import NumdiffError, UsageError
from ....files import atomic_pair, cannot_write
from ....nn.flops import mlp_width
from ....sizes import in_pixels, sides
from ....training.kinds.dit import describe_block
from ....training.kinds.kind import defaults_of
from ..diffusers import (
    CONFIG,
    PIPELINE,
    REMEDY,
    WEIGHTS,
    diffusers_config,
    diffusers_state_dict,
    public_state_dict,
    read_config,
    weights_file,
)
from ..dit import (
    ROTATION,
    check_dit_state_dict,
    guess_dit_options,
    is_dit,
    short_of,
    with_padding,
    with_positions,
    without_padding,
)
from ..files import read_weights, write_state_dict
from ..flow import with_time_reversed, without_variance
from .pipeline_files import read_pipeline
from .weights import (
    CLASSES,
    COUNT,
    IMAGE_SIZE,
    NULL_CLASS_DROPOUT,
    SHARE,
    Weights,
    yes_or_no,
)

ATTENTIONS = extensions.available("dit_attention")  # instead of attention to all


class DiTWeights(Weights):
    free = {
        "image_size": IMAGE_SIZE,
        "num_heads": COUNT,
        "num_classes": CLASSES,
        "class_dropout": SHARE,
        "rope": yes_or_no,
        **{name: allowed for kind in ATTENTIONS.values() for name, allowed in kind.free.items()},
    }

    def recognises(self, state_dict):
        return is_dit(state_dict)

    def shown_by(self, state_dict):
        if "x_embedder.proj.weight" not in state_dict:
            return ()
        absent = [
            kind
            for kind in ATTENTIONS.values()
            if not any(kind.mark in name for name in state_dict)
        ]
        return guess_dit_options(state_dict).keys() | {
            name for kind in absent for name in kind.free
        }

    def complete(self, source, state_dict, stored, free):
        ratio, depth, ours = stored.get("mlp_ratio"), stored.get("depth", 0), {*stored}
        stored = self.believed(stored, free)
        try:
            guessed = guess_dit_options(state_dict, depth if COUNT(depth) else 0)
        except NumdiffError as error:
            raise NumdiffError(f"cannot use {source}: {error}.") from None
        rows = guessed.pop("rows")
        if guessed.get("rope") and free.get("rope") is False:
            raise UsageError(
                f"--no-rope: {source} holds the angles of a rotary embedding ({ROTATION[0]}); leave it "
                "out."
            )
        for kind in ATTENTIONS.values():
            own = guessed.get("attention") == kind.name
            for name in kind.free:
                if name in free and not own:
                    raise UsageError(
                        f"{self.option(name)}: {source} has no tensors of {kind.title} "
                        f"(blocks.0{kind.mark}weight); leave it out."
                    )
            if own and not ours & kind.free.keys():
                stored = {**kind.foreign, **stored}
        if _same_width(guessed, ratio):
            guessed["mlp_ratio"] = ratio
        # from a published size: only likely
        heads = {key: stored[key] for key in ("num_heads",) if key in stored}
        known = {**stored, **guessed, **heads, **free}
        if "image_size" not in known:
            asked = self.ask("--image-size, for latents their side, for example --image-size 32")
            raise UsageError(
                f"{source} does not say for which image size it was trained, as it has no pos_embed: "
                f"{asked}."
            )
        if "num_heads" not in known:
            short = short_of(known)
            size = (
                f"{known['depth']} blocks of {known['hidden_size']} channels, is no published one"
            )
            size += f" (a {short[0]} has {short[1]} blocks)" if short else ""
            raise UsageError(
                f"{source} does not say how many attention heads the model has, and its size, {size}: "
                f"{self.ask(self.option('num_heads'))}."
            )
        dropout = known.get("class_dropout", defaults_of(self.kind.model_class)["class_dropout"])
        classes = self.classes(source, rows, dropout, free.get("num_classes"))
        options = {**defaults_of(self.kind.model_class), **known, **classes}
        self.kind.check_sizes(options)
        return options

    def remarks(self, sizes, stored):
        short = short_of(sizes)
        if short is None or stored.get("depth") == sizes["depth"]:
            return []
        return [
            (
                "depth",
                f"{sizes['depth']} blocks, where a {short[0]}, as wide, has {short[1]}: if it should be one, "
                "the file lacks the last",
            )
        ]

    def hold(self, state_dict, sizes):
        return with_padding(check_dit_state_dict(state_dict, sizes), sizes)

    def usual_path(self, sizes):
        return "linear" if lightning_arguments(sizes) else "discrete"

    def in_our_time(self, state_dict, sizes, diffusion, reversed=True):
        if diffusion.get("path") != "linear":
            return state_dict, sizes
        if sizes["learn_sigma"]:
            state_dict, sizes = without_variance(state_dict, sizes)
        return _reversed(state_dict, diffusion) if reversed else state_dict, sizes

    def in_their_time(self, state_dict, diffusion):
        return _reversed(state_dict, diffusion) if diffusion.get("path") == "linear" else state_dict

    def exported(self, state_dict, sizes):
        return with_positions(without_padding(state_dict, sizes), sizes)

    def notes(self, sizes, diffusion):
        found, height_width = self._notes(sizes, diffusion), sides(sizes["image_size"])
        if len({*height_width}) > 1:
            found = [
                *found,
                ("elsewhere", "the public code makes squares: its pos_embed and unpatchify"),
            ]
        return found

    def _notes(self, sizes, diffusion):
        if kind := ATTENTIONS.get(sizes.get("attention")):
            return [
                (
                    "elsewhere",
                    f"the public DiT's code has no {kind.title}, nor its blocks.*{kind.mark}weight and "
                    "bias",
                )
            ]
        block = lightning_arguments(sizes)
        if block is None:
            return [
                (
                    "elsewhere",
                    "LightningDiT's code has no such block: its QK-norm is RMSNorm with use_rmsnorm "
                    "alone",
                )
            ]
        if block:
            path, prediction = diffusion.get("path", "discrete"), diffusion["prediction"]
            note = (
                ""
                if (path, prediction) == ("linear", "flow")
                else (
                    f"; its models predict the flow on the path linear, and this one {prediction} on the path {path}"
                )
            )
            return [("elsewhere", f"in LightningDiT's code: LightningDiT({block}){note}")]
        return [("elsewhere", text) for text in remarks_on_objective(diffusion)]

    def write_folder(self, folder, sizes, state_dict, diffusion, training=None):
        kind = ATTENTIONS.get(sizes.get("attention"))
        if kind and any(kind.mark in name and np.any(array) for name, array in state_dict.items()):
            raise UsageError(
                f"diffusers' DiT has no {kind.title}, whose {kind.part} this model has learned: write "
                ".safetensors or .npz instead."
            )
        config = json.dumps(diffusers_config(sizes), indent=2, sort_keys=True).encode() + b"\n"
        folder = pathlib.Path(folder)
        made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write("the weights into", folder, error) from error
        try:
            with atomic_pair(
                folder / WEIGHTS, "the weights", folder / CONFIG, "the configuration", config
            ) as file:
                write_state_dict(
                    file,
                    diffusers_state_dict(state_dict, sizes["depth"]),
                    "safetensors",
                    sizes,
                    diffusion,
                    training,
                )
        except BaseException:
            if made:
                with contextlib.suppress(OSError):  # it holds something
                    folder.rmdir()
            raise
        sparse = (
            [
                (
                    "diffusers",
                    f"pays attention to all tokens, where this model has {kind.title}, whose "
                    f"{kind.part} is zero",
                )
            ]
            if kind
            else []
        )
        return sparse + notes_on_diffusers(diffusion, sizes)

    def lines(self, target, result, o):
        yield (
            f"{target}: a DiT of {result.parameters:,} parameters for {in_pixels(o['image_size'])}×"
            f"{o['in_channels']} images"
        )
        yield (
            f"blocks      {o['depth']} of {o['hidden_size']} channels, {o['num_heads']} heads, patches of "
            f"{o['patch_size']}{', learned variance' if o['learn_sigma'] else ''}{describe_block(o)}"
        )
        null = (
            " and a null class" if o["num_classes"] is not None and o["class_dropout"] > 0 else ""
        )
        yield f"classes     {o['num_classes'] or 'none'}{null}"


def _reversed(state_dict, diffusion):
    return with_time_reversed(
        state_dict, diffusion["prediction"], diffusion.get("timestep_scale", 1.0)
    )


def _same_width(sizes, ratio):
    """Whether a model has the same MLP with this ratio, which a file claims: several have, as
    widths are whole."""
    if type(ratio) is not float or not 0 < ratio <= 1024:
        return False
    hidden, mlp = sizes["hidden_size"], sizes["mlp"]
    return mlp_width(hidden, ratio, mlp) == mlp_width(hidden, sizes["mlp_ratio"], mlp)


def lightning_arguments(sizes):
    """The arguments with which LightningDiT's constructor makes this model's block; empty for the
    block of DiT and SiT, None for one that it cannot make."""
    if sizes["qk_norm"] and sizes["norm"] != "rms":
        return None
    chosen = {
        "use_qknorm": sizes["qk_norm"],
        "use_swiglu": sizes["mlp"] == "swiglu",
        "use_rope": sizes["rope"],
        "use_rmsnorm": sizes["norm"] == "rms",
        "wo_shift": not sizes["shift"],
    }
    return ", ".join(f"{name}=True" for name, value in chosen.items() if value)


def read_diffusers_folder(folder, weights="ema"):
    """(state dict under the public DiT's names, the folder's settings), as `read_weights`; a
    `NumdiffError` for a setting in config.json that no public DiT has."""
    config = read_config(folder)
    path = weights_file(folder)
    state_dict, stored = read_weights(path, weights)
    if read_config(folder) != config:
        raise NumdiffError(f"{folder} was written while it was read: try again.")
    try:
        state_dict = public_state_dict(state_dict, config)
        guessed = guess_dit_options(state_dict)
        guessed["num_classes"] = guessed["rows"] - 1  # the library's models all have a null class
        for key, value in config.items():
            if guessed.get(key, value) != value and key != "num_heads":
                raise NumdiffError(
                    f"{CONFIG} says {key} {value}, and the weights have {guessed[key]}"
                )
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {path}: {error}.") from None
    whole = folder.parent / PIPELINE
    of_pipeline = read_pipeline(folder.parent) if whole.is_file() else {}
    return state_dict, {"class_dropout": NULL_CLASS_DROPOUT, **of_pipeline, **stored, **config}


def remarks_on_objective(diffusion):
    """What users of the public names must know of the objective: at most one sentence."""
    path, prediction, scale = (
        diffusion.get(key, default)
        for key, default in (("path", "discrete"), ("prediction", None), ("timestep_scale", 1.0))
    )
    if path == "discrete":
        return (
            []
            if diffusion == Diffusion().options
            else ["the public DiT's create_diffusion has another diffusion by default"]
        )
    if path != "linear":
        return [
            f"neither the public DiT's code nor SiT's has the path {path}, on which this model was trained"
        ]
    if prediction == "flow" and scale == 1:
        return [
            "SiT's code, create_transport(path_type='Linear', prediction='velocity'); the public DiT's has no such "
            "path"
        ]
    note = f"predicts {prediction}" + ("" if scale == 1 else f" and sees t times {scale:g}")
    return [
        "time runs from noise to image, as in SiT's code, whose models predict the velocity, while this one "
        f"{note}; the public DiT's has no such path"
    ]


def notes_on_diffusers(diffusion, sizes):
    """What users of the folder in diffusers must do to get the model that was trained:
    `Conversion.notes`."""
    fits, scale = scheduler_of(diffusion, sizes["in_channels"] in PIXEL_CHANNELS)
    return [
        (
            "diffusers",
            "gives other outputs, by percents at late timesteps (its timestep embedding has other "
            "frequencies, whatever config.json says), until this is run on the model it has loaded:",
        ),
        ("", REMEDY if scale == 1 else f"{REMEDY}; block.norm1.emb.time_proj.scale = {scale:g}"),
        (
            "scheduler",
            fits
            or f"none of diffusers' fits a model that predicts {diffusion['prediction']} on the "
            f"path {diffusion.get('path', 'discrete')}",
        ),
    ]


def scheduler_of(diffusion, pixels):
    """(the scheduler of diffusers that samples a model of this objective, as Python; None if there
    is none; by how much the model must multiply the timesteps that it passes). As of diffusers
    0.42."""
    path, prediction = diffusion.get("path", "discrete"), diffusion["prediction"]
    scale, shift = diffusion.get("timestep_scale", 1.0), diffusion.get("time_shift", 1.0)
    name = {"eps": "epsilon", "v": "v_prediction", "x_0": "sample"}.get(prediction)
    if path == "discrete":
        if name is None:
            return None, scale
        steps = diffusion["steps"]
        betas = "beta_schedule='squaredcos_cap_v2'"
        if diffusion["schedule"] == "linear":
            betas = f"beta_start={0.1 / steps:g}, beta_end={20 / steps:g}"
        clip = "" if pixels else ", clip_sample=False"
        return (
            f"DDIMScheduler(num_train_timesteps={steps}, {betas}, prediction_type='{name}'{clip})",
            scale,
        )
    if path == "edm":
        return (
            f"EDMEulerScheduler(sigma_data={diffusion['sigma_data']:g})"
            if prediction == "edm"
            else None
        ), scale
    if prediction == "flow":
        return f"FlowMatchEulerDiscreteScheduler(shift={shift:g})", scale / 1000
    if prediction in ("eps", "x_0"):
        return (
            f"DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift={shift:g}, "
            f"prediction_type='{name}')"
        ), scale / 1000
    return None, scale / 1000
