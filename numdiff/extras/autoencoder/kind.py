"""The record of the autoencoder: settings, presets, objective; the model is nn/autoencoder.py.

It is no diffusion model: of the common settings those of the diffusion and of samplers are left
out, and the run draws reconstructions in place of samples.
"""

from ...settings import COMMON, SAME, setting
from ...training.kinds.kind import ModelKind


class AutoencoderSettings:
    model_channels: int = setting(
        128,
        "Channels of the first level; a multiple of --groups.",
        unit="N",
        low=1,
        high=1 << 14,
        model=SAME,
    )
    channel_mult: tuple[int, ...] = setting(
        (1, 2, 4, 4),
        "Channels of each level, in multiples of --model-channels; each level but the last halves the size.",
        unit="N,N,…",
        low=1,
        high=256,
        model=SAME,
    )
    num_res_blocks: int = setting(
        2,
        "Residual blocks of an encoder's level; a decoder's has one more.",
        unit="N",
        low=1,
        high=64,
        model=SAME,
    )
    latent_channels: int = setting(
        4, "Channels of the latents.", unit="N", low=1, high=1024, model=SAME
    )
    attention_levels: tuple[int, ...] = setting(
        (),
        "Levels with attention after each block, from 0; `none` for none.",
        unit="N,…",
        low=0,
        high=16,
        model=SAME,
    )
    mid_attention: bool = setting(True, "Attention in the middle.", model=SAME)
    quant_convs: bool = setting(
        True, "Have 1×1 convolutions at the latents, as Stable Diffusion 1 and 2 do.", model=SAME
    )
    groups: int = setting(
        32, "Groups of every group normalisation.", unit="N", low=1, high=1 << 14, model=SAME
    )
    reconstruction: str = setting(
        "l1",
        "Error of the picture: l1, the mean absolute one, or l2, the mean squared one.",
        choices=("l1", "l2"),
    )
    kl_weight: float = setting(
        1e-6,
        "Weight of the latents' KL divergence from a standard normal distribution.",
        unit="W",
        low=0,
        high=1e6,
    )
    held_out: float = setting(
        0.05,
        "Share of the pictures that is not trained on; the PSNR is of these. 0: none, and the PSNR is of pictures "
        "that the model has seen.",
        unit="SHARE",
        low=0,
        high=0.5,
    )


PRESETS = {
    # The smallest one whose reconstructions of emoji are recognised: for a laptop without a GPU.
    # Latents are 8×8×4 for 32×32 pixels.
    "tiny": {
        "image_size": 32,
        "model_channels": 32,
        "channel_mult": (1, 2, 2),
        "num_res_blocks": 1,
        "mid_attention": False,
        "batch": 8,
        "steps": 1500,
        "learning_rate": 2e-3,
        "warmup_steps": 50,
        "lr_schedule": "cosine",
        "beta2": 0.99,
        "ema_halflife": 800.0,
        "sample_every": 500,
        "sample_count": 24,
        "checkpoint_every": 500,
        "log_every": 50,
    },
    # For one GPU, on pictures of 256×256: latents of 32×32×4, as Stable Diffusion's autoencoder
    # gives them, with a quarter of its channels' square.
    "vae256": {
        "image_size": 256,
        "model_channels": 64,
        "channel_mult": (1, 2, 4, 4),
        "num_res_blocks": 2,
        "batch": 16,
        "steps": 6000,
        "learning_rate": 2e-4,
        "warmup_steps": 200,
        "lr_schedule": "cosine",
        "beta2": 0.99,
        "ema_halflife": 10000.0,
        "sample_every": 2000,
        "sample_count": 16,
        "checkpoint_every": 2000,
        "log_every": 100,
    },
}
HELP = {
    "train": """Train an autoencoder of latent diffusion, which turns pictures into latents and back.

    A run's pictures are pairs of a picture and its reconstruction; reconstructions.jsonl has their PSNR, and
    autoencoder.h5 is the averaged model with the scaling factor measured on its latents. Give that file, or the run,
    as --vae.

    \b
    numdiff train vae                                            on emoji
    numdiff train vae --data photos.h5 --flip                    on images of your own
    numdiff train vae --data photos.h5 --init vae.safetensors    from given weights
    numdiff data encode photos.h5 latents.h5 --vae runs/00000-vae-vae256
    """,
}
# common settings that are of diffusion models alone
WITHOUT = {
    "vae",
    "fp8_promotion",
    "sampler",
    "sample_steps",
    "cfg_scale",
    "cfg_interval",
    "evaluate_every",
    "evaluate_count",
    *(name for name, line in COMMON.items() if line.group in ("Model", "Diffusion")),
}


class AutoencoderKind(ModelKind):
    @property
    def table(self):
        left_out, found = WITHOUT | {"init"}, {}
        for name, line in super().table.items():
            if name in WITHOUT or line.needs and line.needs[0] in left_out:
                left_out = left_out | {name}  # and with it what needs it
            else:
                found[name] = line
        return found

    def sizes(self, options, channels=3, num_classes=None):
        found = super().sizes(options, channels, num_classes)
        del found["num_classes"]
        return {**found, "scaling_factor": 1.0, "shift_factor": 0.0}  # measured with the pictures

    def upgrade(self, values):
        values.setdefault("held_out", 0.0)  # runs from before trained on all pictures

    def may_become(self, name, theirs, own):
        """The factors of the latents are measured again."""
        return theirs == own or name in ("scaling_factor", "shift_factor")

    def held_out(self, dataset, options):
        from ...data.split import split

        if not options.held_out or len(dataset) < 2:
            return dataset
        trained, held = split(dataset, options.held_out, options.seed)
        trained.held_out = held
        return trained

    def objective(self, options):
        from ...diffusion.reconstruction import Reconstruction

        return Reconstruction(options.reconstruction, options.kl_weight)

    def describe_objective(self, options):
        return f"loss      {options.reconstruction} of the pictures, KL divergence times {options.kl_weight:g}"

    def blocks(self, sizes):
        return sizes["num_res_blocks"] * len(sizes["channel_mult"])

    def check_options(self, options):
        self.check_sizes(self.sizes(options))


VAE = AutoencoderKind(
    "vae",
    "autoencoder",
    "numdiff.nn.autoencoder:Autoencoder",
    settings=AutoencoderSettings,
    presets=PRESETS,
    default_preset={"cpu": "tiny", "cuda": "vae256"},
    check="numdiff.nn.autoencoder:check_options",
    previews=f"{__package__}.reconstructions:Reconstructions",
    reader="numdiff.training.autoencoders:read_start",
    help=HELP,
)
