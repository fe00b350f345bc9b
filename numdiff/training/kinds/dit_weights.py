"""The DiT's weights in other programs: the public DiT's state dict, and diffusers' folder (DiTTransformer2DModel)."""
import json
import pathlib

from ...diffusion import Diffusion
from ...errors import NumdiffError, UsageError
from ...files import atomic_file, cannot_write
from ...nn.convert import (
    check_dit_state_dict,
    diffusers_config,
    diffusers_state_dict,
    guess_dit_options,
    is_dit,
    public_state_dict,
    read_config,
    read_weights,
    weights_file,
    with_positions,
    write_state_dict,
)
from ...nn.convert.diffusers import CONFIG, REMEDY, WEIGHTS
from .weights import CLASSES, COUNT, IMAGE_SIZE, NULL_CLASS_DROPOUT, SHARE, Weights, defaults_of


class DiTWeights(Weights):
    free = {"image_size": IMAGE_SIZE, "num_heads": COUNT, "num_classes": CLASSES, "class_dropout": SHARE}

    def recognises(self, state_dict):
        return is_dit(state_dict)

    def complete(self, source, state_dict, told, free):
        told = self.believed(told, free)
        try:
            guessed = guess_dit_options(state_dict)
        except NumdiffError as error:
            raise NumdiffError(f"cannot use {source}: {error}.") from None
        rows = guessed.pop("rows")
        heads = {key: told[key] for key in ("num_heads",) if key in told}  # from a published size: only likely
        known = {**told, **guessed, **heads, **free}
        if "image_size" not in known:
            raise UsageError(f"{source} does not say for which image size it was trained, as it has no pos_embed: give "
                             "--image-size, for latents their side, for example --image-size 32.")
        if "num_heads" not in known:
            raise UsageError(f"{source} does not say how many attention heads the model has, and its size is no "
                             "published one: give --num-heads.")
        dropout = known.get("class_dropout", defaults_of(self.kind.model_class)["class_dropout"])
        classes = self.classes(source, rows, dropout, free.get("num_classes"))
        options = {**defaults_of(self.kind.model_class), **known, **classes}
        self.kind.check_sizes(options)
        return options

    def hold(self, state_dict, sizes):
        return check_dit_state_dict(state_dict, sizes)

    def exported(self, state_dict, sizes):
        return with_positions(state_dict, sizes)

    def notes(self, sizes, diffusion):
        public = diffusion == Diffusion().options
        return [] if public else [("elsewhere", "the public DiT's create_diffusion has another diffusion by default")]

    def write_folder(self, folder, sizes, state_dict, diffusion):
        config = json.dumps(diffusers_config(sizes), indent=2, sort_keys=True) + "\n"
        folder = pathlib.Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write("the weights into", folder, error) from error
        with atomic_file(folder / WEIGHTS, "the weights") as file:
            write_state_dict(file, diffusers_state_dict(state_dict, sizes["depth"]), "safetensors", sizes, diffusion)
        with atomic_file(folder / CONFIG, "the configuration") as file:
            file.write(config.encode())
        return notes_on_diffusers(diffusion)

    def lines(self, target, result, o):
        yield (f"{target}: a DiT of {result.parameters:,} parameters for {o['image_size']}×{o['image_size']}×"
               f"{o['in_channels']} images")
        yield (f"blocks      {o['depth']} of {o['hidden_size']} channels, {o['num_heads']} heads, patches of "
               f"{o['patch_size']}{', learned variance' if o['learn_sigma'] else ''}")
        null = " and a null class" if o["num_classes"] is not None and o["class_dropout"] > 0 else ""
        yield f"classes     {o['num_classes'] or 'none'}{null}"


def read_diffusers_folder(folder, weights="ema"):
    """(state dict under the public DiT's names, what the folder tells), as `read_weights`; a `NumdiffError` for a
    setting in config.json that no public DiT has."""
    config = read_config(folder)
    path = weights_file(folder)
    state_dict, told = read_weights(path, weights)
    try:
        state_dict = public_state_dict(state_dict, config)
        guessed = guess_dit_options(state_dict)
        guessed["num_classes"] = guessed["rows"] - 1  # the library's models all have a null class
        for key, value in config.items():
            if guessed.get(key, value) != value and key != "num_heads":
                raise NumdiffError(f"{CONFIG} says {key} {value}, and the weights have {guessed[key]}")
    except NumdiffError as error:
        raise NumdiffError(f"cannot use {path}: {error}.") from None
    return state_dict, {"class_dropout": NULL_CLASS_DROPOUT, **told, **config}


def notes_on_diffusers(diffusion):
    """What users of the folder in diffusers must do to get the model that was trained: `Conversion.notes`."""
    scale = diffusion.get("timestep_scale", 1.0)
    return [("diffusers", "gives other outputs, by percents at late timesteps (its timestep embedding has other "
                          "frequencies, whatever config.json says), until this is run on the model it has loaded:"),
            ("", REMEDY if scale == 1 else f"{REMEDY}; block.norm1.emb.time_proj.scale = {scale:g}")]
