"""The UNet's weights in other programs: guided-diffusion, improved-diffusion, unet.cu."""

from .... import extensions
from ....errors import NumdiffError, UsageError
from ....settings import counted
from ....sizes import in_pixels
from ....training.kinds.kind import defaults_of
from ..guided import guided_diffusion_flags, with_convolutions
from ..unet import check_state_dict, guess_unet_options
from .weights import (
    CLASSES,
    COUNT,
    IMAGE_SIZE,
    PERIOD,
    SHARE,
    Weights,
    count_or_none,
    yes_or_no,
)


class UNetWeights(Weights):
    free = {
        "image_size": IMAGE_SIZE,
        "num_heads": COUNT,
        "num_heads_upsample": count_or_none,
        "num_head_channels": count_or_none,
        "use_new_attention_order": yes_or_no,
        "max_period": PERIOD,
        "dropout": SHARE,
        "num_classes": CLASSES,
        "class_dropout": SHARE,
    }
    may_rescale = True

    def recognises(self, state_dict):
        """What no other kind recognises counts as a UNet's, whose names are the oldest; `complete`
        says what is missing."""
        return True

    def complete(self, source, state_dict, stored, free):
        stored = self.believed(stored, free)
        if "num_heads" in free and "num_head_channels" in free and free["num_head_channels"] != -1:
            raise UsageError(
                "--num-heads and --num-head-channels exclude each other: give the one that the model was "
                "trained with."
            )
        if "num_heads" in free:
            stored["num_head_channels"] = -1
        known = {**stored, **free}
        if "image_size" not in known:
            raise UsageError(
                f"{source} does not say for which image size it was trained: "
                f"{self.ask('--image-size, for example --image-size 64')}."
            )
        if known.get("num_head_channels", -1) == -1 and "num_heads" not in known:
            asked = self.ask(
                "--num-head-channels (64 for the models of guided-diffusion, 32 for unet.cu's) or "
                "--num-heads (4 for those of improved-diffusion)"
            )
            raise UsageError(
                f"{source} does not say how many attention heads the model has: {asked}."
            )
        try:
            guessed = guess_unet_options(state_dict, known["image_size"])
        except NumdiffError as error:
            raise NumdiffError(f"cannot use {source}: {error}.") from None
        known.update(
            self.classes(
                source,
                guessed["num_classes"],
                known.get("class_dropout", 0.0),
                free.get("num_classes"),
            )
        )
        options = {
            **defaults_of(self.kind.model_class),
            "num_head_channels": -1,
            **guessed,
            **known,
        }
        self.kind.check_sizes(options)
        return options

    def hold(self, state_dict, sizes):
        return check_state_dict(state_dict, sizes)

    def notes(self, sizes, diffusion):
        if sizes.get("block", "resnet") != "resnet":
            return [
                (
                    "elsewhere",
                    f"it has {sizes['block']} blocks, under numdiff's own names, which numdiff convert "
                    "and --init read again; guided-diffusion's code has none",
                )
            ]
        flags, missing = guided_diffusion_flags(sizes, diffusion)
        return [
            ("guided-diffusion", f"its scripts need: {flags}"),
            *(("no flag there", text) for text in missing),
        ]

    def with_convolutions(self, state_dict, sizes):
        return with_convolutions(state_dict, sizes)

    def lines(self, target, result, o):
        heads = f"{o['num_head_channels']} channels a head"
        if o["num_head_channels"] == -1:
            heads = f"{o['num_heads']} heads"
        block = o.get("block", "resnet")
        blocks = (
            ""
            if block == "resnet"
            else extensions.find("unet_block", block, f"block {block}").title + " "
        )
        order = "new" if o["use_new_attention_order"] else "legacy"
        yield (
            f"{target}: a UNet of {result.parameters:,} parameters for {in_pixels(o['image_size'])} images"
        )
        yield (
            f"channels    {o['model_channels']} × ({', '.join(f'{m:g}' for m in o['channel_mult'])}), "
            f"{counted(o['num_res_blocks'], f'{blocks}block')} a level"
        )
        sizes = ", ".join(map(str, o["attention_resolutions"])) or "the middle only"
        yield f"attention   at {sizes}; {heads}, {order} order"
        null = (
            f" and a null class, the last row of label_emb: elsewhere, {o['num_classes'] + 1} classes"
            if o["num_classes"] is not None and o.get("class_dropout", 0) > 0
            else ""
        )
        yield f"classes     {o['num_classes'] or 'none'}{null}"
