"""From the options of a run to the objects that it trains with."""
from ..data.dataset import open_dataset
from ..errors import UsageError
from ..nn import UNet
from .trainer import Trainer

UNET_OPTIONS = ("image_size", "model_channels", "channel_mult", "num_res_blocks", "attention_resolutions", "num_heads",
                "num_head_channels", "use_scale_shift_norm", "resblock_updown", "conv_resample", "dropout",
                "use_new_attention_order", "max_period")
TRAINER_OPTIONS = ("batch", "microbatch", "flip", "learning_rate", "warmup_steps", "beta1", "beta2", "adam_eps",
                   "weight_decay", "clip_norm", "ema_halflife", "seed")


def build_dataset(options):
    """The dataset that the options name; a `UsageError` where its images are not of the model's kind."""
    dataset = open_dataset(options.data, options.image_size, options.classes)
    dataset.image_size  # noqa: B018 - refuses images that are not square
    if options.class_cond and dataset.labels is None:
        raise UsageError(f"--class-cond needs labels, and {dataset.path!r} has none: import it again with labels, or "
                         "leave --class-cond out.")
    if options.class_cond is False:
        dataset.labels = None
    return dataset


def build_model(options, channels=3, num_classes=None):
    """The UNet that the options describe."""
    chosen = {name: getattr(options, name) for name in UNET_OPTIONS}
    return UNet(**chosen, in_channels=channels, num_classes=num_classes, device=options.device, seed=options.seed)


def build_trainer(options, model, dataset):
    """A Trainer for the model and the dataset."""
    chosen = {name: getattr(options, name) for name in TRAINER_OPTIONS}
    diffusion = {"steps": options.diffusion_steps, "schedule": options.schedule, "prediction": options.prediction}
    return Trainer(model, dataset, **chosen, diffusion=diffusion, total_steps=options.steps,
                   cosine=options.lr_schedule == "cosine")
