"""The record of the DiT: settings, presets, checks; the model is nn/dit.py."""

import math

from ... import extensions, schema
from ...errors import UsageError
from ...settings import SAME, Argument, say, setting
from ...sizes import as_size, in_pixels, is_multiple, nearest_multiple, scaled_down
from .kind import ModelKind

ARCHITECTURES = (
    *(f"DiT-{size}/{patch}" for size in ("S", "B", "L", "XL") for patch in (2, 4, 8)),
    *(f"LightningDiT-{size}/{patch}" for size in ("S", "B", "L", "XL") for patch in (1, 2)),
    "DiT-Tiny",
    "LightningDiT-Tiny/2",
    "LightningDiT-Small/4",
)
ATTENTIONS = extensions.entries("dit_attention")  # instead of attention to all
BLOCK = ("norm", "qk_norm", "rope", "mlp", "shift")  # settings of the block
# of the positions, which are not in a file, or as many as its weights
MAX_POSITION_BYTES = 32 << 20


class DiTSettings:
    architecture: str = setting(
        "DiT-B/4",
        "Depth, width, patch size and block by name: DiT-S, -B, -L or -XL with /2, /4 or /8, LightningDiT-S, -B, -L or "
        "-XL with /1 or /2, or numdiff's own: DiT-Tiny, LightningDiT-Tiny/2 or LightningDiT-Small/4.",
        unit="NAME",
        choices=ARCHITECTURES,
    )
    patch_size: int | None = setting(
        None,
        "Side of a token in pixels.  [default: by --model]",
        unit="PX",
        low=1,
        high=4096,
        model=SAME,
    )
    hidden_size: int | None = setting(
        None,
        "Channels of a token.  [default: by --model]",
        unit="N",
        low=4,
        high=1 << 14,
        model=SAME,
    )
    depth: int | None = setting(
        None, "Blocks.  [default: by --model]", unit="N", low=1, high=1024, model=SAME
    )
    heads: int | None = setting(
        None,
        "Attention heads.  [default: by --model]",
        unit="N",
        low=1,
        high=1 << 14,
        model=Argument(name="num_heads"),
    )
    mlp_ratio: float = setting(
        4.0,
        "How much wider the MLP is than a token; with --mlp swiglu two thirds of that.",
        unit="X",
        above=0,
        high=1024,
        model=SAME,
    )
    norm: str | None = setting(
        None,
        "How tokens are normalised: LayerNorm, or RMSNorm with a weight.  [default: layer for a DiT, rms for a "
        "LightningDiT]",
        choices=("layer", "rms"),
        model=SAME,
    )
    qk_norm: bool | None = setting(
        None,
        "Normalise each head's queries and keys by RMSNorm with a weight, which bounds what attention sees.  "
        "[default: no, but for LightningDiT-Tiny and -Small]",
        model=SAME,
    )
    rope: bool | None = setting(
        None,
        "Rotate queries and keys by their token's row and column (rotary embedding).  [default: no for a DiT, yes for "
        "a LightningDiT]",
        model=SAME,
    )
    mlp: str | None = setting(
        None,
        "The MLP: a GELU between two layers, or SwiGLU.  [default: gelu for a DiT, swiglu for a LightningDiT]",
        choices=("gelu", "swiglu"),
        model=SAME,
    )
    shift: bool | None = setting(
        None,
        "Let the conditioning shift what the blocks normalise, as well as scale it; LightningDiT's wo_shift is "
        "--no-shift.  [default: yes, but for LightningDiT-Small]",
        model=SAME,
    )
    attention: str = setting(
        "full",
        f"Attention of each token to all others{''.join(f', or {each.text}' for each in ATTENTIONS.values())}.",
        choices=("full", *ATTENTIONS),
        model=SAME,
    )
    num_classes: int | None = setting(
        None,
        "Classes of the model.  [default: those of the dataset]",
        unit="N",
        low=1,
        high=1 << 20,
    )


PRESETS = {
    # A small DiT that draws emoji of three kinds on request: for a laptop without a GPU. Muon and
    # JiT's objective as of the UNet's preset; it learns slower than that, so the learning rate is
    # twice as high. Patches of two pixels, and the block of today, without which they would not
    # pay.
    "tiny": {
        "architecture": "LightningDiT-Tiny/2",
        "image_size": 32,
        "class_cond": True,
        "schedule": "cosine",
        "prediction": "x_0",
        "path": "linear",
        "loss": "flow",
        "time_sampling": "logit-normal",
        "noise_mean": 0.8,
        "noise_std": 0.8,
        "batch": 4,
        "steps": 1150,
        "optimizer": "muon",
        "learning_rate": 4e-3,
        "warmup_steps": 20,
        "lr_schedule": "cosine",
        "beta2": 0.99,
        "ema_halflife": 1600.0,
        "sample_every": 575,
        "sample_count": 24,
        "sampler": "dpm++2m",
        "sample_steps": 20,
        "cfg_scale": 1.5,
        "checkpoint_every": 200,
        "log_every": 20,
        "evaluate_count": 16,
    },
    # As wide and deep as DiT-S/4, on 64×64 pixels, with the block of today and flow matching, for a
    # minute on one GPU: Muon updates its matrices, and the learning rate is twenty times as high as
    # DiT's and falls to zero. Its grids are drawn with a little guidance. --model DiT-S/4 is the
    # DiT of the paper: whole timesteps, v, a learned variance.
    "small64": {
        "architecture": "LightningDiT-Small/4",
        "image_size": 64,
        "class_cond": True,
        "schedule": "cosine",
        "prediction": "flow",
        "path": "linear",
        "batch": 64,
        "steps": 8000,
        "optimizer": "muon",
        "learning_rate": 2e-3,
        "warmup_steps": 200,
        "lr_schedule": "cosine",
        "beta2": 0.99,
        "ema_halflife": 20000.0,
        "sample_every": 2000,
        "sample_count": 63,
        "sampler": "dpm++2m",
        "sample_steps": 20,
        "cfg_scale": 1.5,
        "checkpoint_every": 2000,
        "log_every": 200,
    },
}
RATES = {"tiny": {"adamw": 2e-3}, "small64": {"adamw": 1e-3}}
EMOJI = {
    "tiny": {"classes": ("Smileys & Emotion", "Food & Drink", "Flags"), "flip": True},
    "small64": {},
}  # mirrored flags are no flags, and mirrored letters and digits are wrong


HELP = {
    "train": """Train a DiT, a diffusion transformer.

    Without options: on emoji and their classes, with a model and a number of steps that suit this machine. What you
    leave out, the preset fills. --classes takes names of classes, or one number: how many classes the model has. A
    dataset whose images are floats is taken as it is, as latents are.

    \b
    numdiff train dit                                            on emoji
    numdiff train dit --data photos.h5 --model DiT-S/4 --flip    on images of your own and their classes
    numdiff train dit --data latents.h5 --model DiT-B/2          on latents: float images (N, H, W, C)
    numdiff train dit --model DiT-B/4 --norm rms --rope          parts of LightningDiT's block, which the presets have
    numdiff train dit --model DiT-XL/2 --size 32 --channels 4 --classes 1000 --dry-run
    """,
    "compile": """The kernels of `numdiff train dit` with the same options: training step and pictures.

    \b
    numdiff compile dit --capability 8.0
    numdiff compile dit --model DiT-XL/2 --size 32 --channels 4 --classes 1000 --batch 32 --capability 9.0
    """,
    "bench step": "The DiT of a preset or of --model, on random images.",
    "bench sample": "The DiT of a preset or of --model, with random weights.",
}


class DiTKind(ModelKind):
    def resolve(self, options, given):
        """Fill in the sizes that the architecture's name implies, where they were not given."""
        from ...nn.dit import MODELS, PLAIN  # here, as it loads the kernels

        sizes = {**PLAIN, **MODELS[options.architecture]}
        for name, line in self.own.items():
            if getattr(options, name) is None and "model" in line.readers:
                setattr(options, name, sizes[line.argument("model")[0]])

    def upgrade(self, values):
        from ...nn.dit import PLAIN

        for name, value in PLAIN.items():  # runs from before there was a choice
            if values.get(name) is None:
                values[name] = value

    def learns_sigma(self, options):
        """As DiT does; LightningDiT has none, and short runs on laptops no use for it."""
        return options.architecture != "DiT-Tiny" and not options.architecture.startswith(
            "Lightning"
        )

    def start_with(self, found, given, sizes):
        from ...nn.dit import MODELS, PLAIN, UNPUBLISHED

        named = [name for name, line in self.own.items() if line.open and "model" in line.readers]
        if "architecture" in given:  # it decides, and is held against the file
            for name in named:
                found.pop(name, None)
            return
        same = [
            name
            for name, known in MODELS.items()
            if all(
                sizes[key] == value
                for key, value in {**PLAIN, **known}.items()
                if key not in UNPUBLISHED
            )
        ]
        if same:
            found["architecture"] = same[0]

    def implied(self, given):
        from ...nn.dit import MODELS

        return MODELS[given["architecture"]] if "architecture" in given else {}

    def may_become(self, name, theirs, own):
        """Attention to all can become another one, whose settings can change; not the other way
        round."""
        return (
            theirs == own
            or name in extensions.entries("dit_settings")
            or (name, theirs) == ("attention", "full")
        )

    def resized(self, theirs, own):
        now, before = (
            in_pixels(scaled_down(sizes["image_size"], sizes["patch_size"]))
            for sizes in (own, theirs)
        )
        angles = " and the angles of the rotary embedding" if own["rope"] else ""
        return f"positions{angles} are recomputed for {now} tokens, which were {before}"

    def is_recomputed(self, name, theirs):
        return theirs["attention"] == "full" and any(
            kind.mark in name for kind in extensions.available("dit_attention").values()
        )

    def label(self, options):
        return options.architecture

    def check_options(self, options):
        from ...nn.flops import mlp_width, token_count

        patch, hidden = options.patch_size, options.hidden_size
        # not resolved yet: the name decides, and its sizes fit each other
        if None in (patch, hidden, options.heads):
            return
        if not is_multiple(options.image_size, patch):
            fits = [str(p) for p in (8, 4, 2) if is_multiple(options.image_size, p)]
            raise UsageError(
                f"--image-size {options.image_size} is not divisible by the {patch} pixels of a patch; "
                f"use a multiple of {patch}, such as {nearest_multiple(options.image_size, patch)}"
                f"{', or patches of ' + ' or '.join(fits) if fits else ''}."
            )
        if hidden % options.heads or hidden % 4:
            raise UsageError(
                f"--hidden-size {hidden} must be a multiple of 4 and of --heads {options.heads}; use "
                f"{max(1, round(hidden / math.lcm(4, options.heads))) * math.lcm(4, options.heads)}."
            )
        if options.attention != "full":
            kind = extensions.find(
                "dit_attention", options.attention, f"--attention {options.attention}"
            )
            kind.check(vars(options), token_count(vars(options)), hidden // options.heads)
        if options.rope and hidden // options.heads % 4:
            raise UsageError(
                f"--rope rotates pairs of a head's channels by row and by column, so 4 must divide their "
                f"number, and --hidden-size {hidden} over --heads {options.heads} is "
                f"{hidden // options.heads}: use --heads {_heads_to_rotate(hidden, options.heads)}, or "
                "--no-rope."
            )
        if mlp_width(hidden, options.mlp_ratio, options.mlp) < 1:
            raise UsageError(
                f"--mlp-ratio {say(options.mlp_ratio)} leaves the MLP no channel; use a larger one."
            )
        if options.precision == "fp8":
            from ...nn.dit import check_float8

            check_float8(hidden, mlp_width(hidden, options.mlp_ratio, options.mlp), options.mlp)
        if options.num_classes is not None and not options.class_cond:
            raise UsageError(
                "--num-classes needs --class-cond; leave it out, or turn the classes on."
            )

    def count_parameters(self, sizes):
        from ...nn.dit_shapes import dit_parameter_counts

        return dit_parameter_counts(sizes)

    def products(self, sizes):
        from ...nn.flops import dit_products

        return dit_products(sizes)

    def activations(self, sizes):
        from ...nn.flops import token_count

        return 8 * sizes["depth"] * token_count(sizes) * sizes["hidden_size"]

    def blocks(self, sizes):
        return sizes["depth"]

    def check_file(self, sizes, weights):
        from ...nn.flops import token_count

        tokens = token_count(sizes)
        if 4 * tokens * sizes["hidden_size"] > max(MAX_POSITION_BYTES, weights):
            raise schema.Mismatch(
                f"model_options.image_size is {as_size(sizes['image_size'])}, {tokens:,} patches, too many "
                "for such a model"
            )

    def describe(self, options, sizes):
        count, trained = self.count_parameters(sizes)
        size = f"{in_pixels(sizes['image_size'])}×{sizes['in_channels']}"
        classes = f", {sizes['num_classes']:,} classes" if sizes["num_classes"] is not None else ""
        return (
            f"{self.label(options)}, {size}{classes}: {count:,} parameters ({trained:,} trained, "
            f"{count - trained:,} fixed positions), {sizes['depth']} blocks of {sizes['hidden_size']} channels, "
            f"{sizes['num_heads']} heads, patches of {sizes['patch_size']}{describe_block(sizes)}"
        )


def describe_block(sizes):
    """What a block has other than DiT's, in words; empty if it is DiT's."""
    words = {
        "norm": {"rms": "RMSNorm"},
        "qk_norm": {True: "QK-norm"},
        "rope": {True: "rotary embedding"},
        "mlp": {"swiglu": "SwiGLU"},
        "shift": {False: "no shift"},
    }
    said = "".join(f", {words[name][sizes[name]]}" for name in BLOCK if sizes[name] in words[name])
    attention = sizes.get("attention", "full")
    return (
        said
        if attention == "full"
        else said
        + extensions.find("dit_attention", attention, f"attention {attention}").words(sizes)
    )


def _heads_to_rotate(hidden, heads):
    """The number of heads nearest to `heads` whose size 4 divides (hidden is a multiple of 4)."""
    return min(
        (n for n in range(1, hidden // 4 + 1) if hidden % (4 * n) == 0),
        key=lambda n: abs(n - heads),
    )


DIT = DiTKind(
    "dit",
    "DiT",
    "numdiff.nn.dit:DiT",
    settings=DiTSettings,
    presets=PRESETS,
    default_preset={"cpu": "tiny", "cuda": "small64"},
    rates=RATES,
    emoji=EMOJI,
    check="numdiff.nn.dit:check_options",
    twin="numdiff.benchmark.torch_dit:TorchDiT",
    float8=True,
    class_dropout=0.1,
    parts=("attention", "mlp"),
    class_table="y_embedder.embedding_table.weight",
    implying=("architecture",),
    help=HELP,
)
