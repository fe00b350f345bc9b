"""What the names and shapes of a public DiT's weights reveal about it; SiT's and LightningDiT's
likewise.

The counterpart of unet.py: `guess_dit_options` finds the options from a state dict,
`check_dit_state_dict` checks one against them. Names and shapes are those of facebookresearch/DiT,
which willisma/SiT has, too, and of hustvl/LightningDiT. Shapes do not reveal the number of
attention heads. It is known here for the published sizes, and from the weights of a QK-norm or the
angles of a rotary embedding. Nor do shapes reveal the image size without the fixed positions.
"""

import re

import numpy as np

from ... import extensions
from ...errors import NumdiffError
from ...nn.dit import MODELS, SIZES, mlp_width, padded_columns, padded_rows, position_table
from ...nn.dit_shapes import dit_shapes
from ...nn.rotary import rotation_table
from ...sizes import as_size, scaled_down, sides
from .check import check_shapes, check_whole, known_shape

WHAT = "public DiT"
POSITIONS = "pos_embed"  # never trained: some files leave it out
# LightningDiT's cosines and sines of the rotary embedding
ROTATION = ("feat_rope.freqs_cos", "feat_rope.freqs_sin")
ROUNDING = 1e-2  # of positions stored as bfloat16


def is_dit(state_dict):
    """Whether the names are a DiT's."""
    return any(name.startswith(("x_embedder.", "final_layer.")) for name in state_dict)


def guess_dit_options(state_dict, depth=0):
    """The options of `numdiff.nn.DiT` that shapes determine: in_channels, patch_size, hidden_size,
    depth, mlp_ratio, learn_sigma, norm, qk_norm, mlp, shift, attention; image_size if the positions
    are there; rope if its angles are there; num_heads from a QK-norm, from these angles or from an
    extension's attention, else for a published size; and `rows` of the class table (None without
    classes), one more than there are classes if the model was trained with class dropout.

    depth: how many blocks it has at least, where that is known
    Raises a `NumdiffError` that counts what is missing of such a model, or names what no such model
    has.
    """
    blocks = {
        int(match.group(1))
        for name in state_dict
        if (match := re.match(r"blocks\.(\d{1,5})\.", name))
    }
    depth = max(blocks | {depth - 1}, default=-1) + 1
    if depth > len(state_dict):  # which lists no names for an invented number
        raise NumdiffError(
            f"its blocks are not numbered from 0 to {depth - 1}; save the whole model"
        )
    check_whole(state_dict, _names(state_dict, max(1, depth)), WHAT)
    hidden, channels, patch, width = known_shape(state_dict, "x_embedder.proj.weight", 4, WHAT)
    outputs = known_shape(state_dict, "final_layer.linear.weight", 2, WHAT)[0]
    if patch != width or outputs not in (patch * patch * channels, 2 * patch * patch * channels):
        raise NumdiffError(
            f"final_layer.linear.weight gives {outputs} numbers for a patch of {patch}×{width} pixels "
            f"of {channels} channels, which no {WHAT} does"
        )
    options = {
        "in_channels": channels,
        "patch_size": patch,
        "hidden_size": hidden,
        "depth": depth,
        **_block_of(state_dict, hidden),
        "learn_sigma": outputs == 2 * patch * patch * channels,
        "rows": None,
    }
    if "y_embedder.embedding_table.weight" in state_dict:
        options["rows"] = known_shape(state_dict, "y_embedder.embedding_table.weight", 2, WHAT)[0]
    if POSITIONS in state_dict:
        tokens = known_shape(state_dict, POSITIONS, 3, WHAT)[1]
        width = _columns(state_dict[POSITIONS], tokens)
        options["image_size"] = as_size((tokens // width * patch, width * patch))
    for size in MODELS.values():
        if (size["hidden_size"], size["depth"]) == (hidden, depth):
            options["num_heads"] = size["num_heads"]
    options["attention"] = attention_in(state_dict)
    of_heads = [
        (f"blocks.0{kind.mark}weight", 2) for kind in extensions.available("dit_attention").values()
    ]
    for name, axes in (("blocks.0.attn.q_norm.weight", 1), (ROTATION[0], 2), *of_heads):
        if name in state_dict:
            head = known_shape(state_dict, name, axes, WHAT)[-1]
            if hidden % head:
                raise NumdiffError(
                    f"{name} is for heads of {head} channels, which do not divide the model's {hidden}"
                )
            options["num_heads"] = hidden // head
    if any(name in state_dict for name in ROTATION):
        options["rope"] = True
    return options


def _columns(positions, tokens):
    """How many tokens a row of an image has, from the table (1, tokens, D), whose first half repeats
    with the column."""
    line = np.asarray(positions, np.float32)[0, :, : positions.shape[2] // 2]
    repeated = np.abs(line[1:] - line[0]).max(axis=1, initial=0) <= ROUNDING
    width = 1 + int(np.argmax(repeated)) if repeated.any() else tokens
    if tokens % width:
        raise NumdiffError(
            f"{POSITIONS} has {tokens} tokens, of which no row of {width} is the last: it is not the table "
            "of sines and cosines that a DiT has"
        )
    return width


def _names(state_dict, depth):
    """The names of what is trained in a model of this depth, of whose tensors these are some."""

    def has(*parts):
        return any(part in name for part in parts for name in state_dict)

    some = {
        "image_size": 1,
        "patch_size": 1,
        "in_channels": 1,
        "hidden_size": 4,
        "num_heads": 1,
        "mlp_ratio": 4,
        # on which no name depends
        "class_dropout": 0,
        "learn_sigma": False,
        "shift": True,
        "depth": depth,
    }
    return [
        name
        for name in dit_shapes(
            {
                **some,
                "num_classes": 1 if has("y_embedder.") else None,
                "norm": "rms"
                if has(".norm1.weight", ".norm2.weight", ".norm_final.weight")
                else "layer",
                "qk_norm": has(".attn.q_norm.weight", ".attn.k_norm.weight"),
                "mlp": "swiglu" if has(".mlp.w") else "gelu",
                "attention": attention_in(state_dict),
            }
        )
        if name != POSITIONS
    ]


def attention_in(state_dict):
    """The attention that these names show."""
    return next(
        (
            name
            for name, kind in extensions.available("dit_attention").items()
            if any(kind.mark in each for each in state_dict)
        ),
        "full",
    )


def short_of(options):
    """The name and depth of the published models that are as wide as this one and deeper; None if
    there is none."""
    for letter, size in SIZES.items():
        if size["hidden_size"] == options["hidden_size"] and size["depth"] > options["depth"]:
            return f"DiT-{letter}", size["depth"]
    return None


def _block_of(state_dict, hidden):
    """norm, qk_norm, mlp, mlp_ratio and shift, as block 0 has them."""
    first = "blocks.0."
    if first + "attn.q_norm.bias" in state_dict:
        raise NumdiffError(
            "its queries and keys are normalised by LayerNorm (attn.q_norm.bias), as LightningDiT does "
            "where use_rmsnorm is off, and numdiff's QK-norm is RMSNorm"
        )
    mlp = "swiglu" if first + "mlp.w12.weight" in state_dict else "gelu"
    inner = known_shape(
        state_dict, first + ("mlp.w12.weight" if mlp == "swiglu" else "mlp.fc1.weight"), 2, WHAT
    )[0]
    if mlp == "swiglu":
        if inner % 2:
            raise NumdiffError(
                f"{first}mlp.w12.weight has {inner} rows, and a SwiGLU has two halves"
            )
        inner //= 2
    rows = known_shape(state_dict, first + "adaLN_modulation.1.weight", 2, WHAT)[0]
    return {
        "norm": "rms" if first + "norm1.weight" in state_dict else "layer",
        "qk_norm": first + "attn.q_norm.weight" in state_dict,
        "mlp": mlp,
        "mlp_ratio": _mlp_ratio(hidden, inner, mlp),
        "shift": rows != 4 * hidden,
    }


def _mlp_ratio(hidden, inner, mlp):
    """The simplest ratio with which a model has an MLP this wide inside."""
    about = inner * 3 // 2 if mlp == "swiglu" else inner
    ratios = [
        (part, (whole + part) / hidden) for part in (0, 0.5) for whole in range(about, about + 3)
    ]
    fitting = [
        (part, len(repr(ratio)), ratio)
        for part, ratio in ratios
        if mlp_width(hidden, ratio, mlp) == inner
    ]
    return min(fitting)[-1]


def check_dit_state_dict(state_dict, options):
    """The trained weights in module order; a `NumdiffError` names what differs from
    `dit_shapes(options)`.

    The positions and the angles of a rotary embedding may be missing; if they are there, they must
    be the fixed ones, which the model makes itself.
    """
    tables = fixed_tables(options)
    rotation = {name: tables[name].shape for name in ROTATION if name in tables}
    state_dict = check_shapes(
        state_dict, {**dit_shapes(options), **rotation}, "DiT", optional=(POSITIONS, *ROTATION)
    )
    for name, table in tables.items():
        if name in state_dict:
            difference = float(np.abs(np.asarray(state_dict.pop(name), np.float32) - table).max())
            if not difference <= ROUNDING:
                raise NumdiffError(
                    f"{name} is not the table of sines and cosines that a DiT has (it differs by up to "
                    f"{difference:.3g}), and numdiff's positions are fixed"
                )
    return state_dict


def fixed_tables(options):
    """{name: array} of a public model's fixed tables: the positions, and with a rotary embedding
    its cosines and sines (T, head size)."""
    hidden = options["hidden_size"]
    grid = sides(scaled_down(options["image_size"], options["patch_size"]))
    tables = {POSITIONS: position_table(hidden, grid)[None]}
    if options.get("rope"):
        tables |= zip(ROTATION, rotation_table(hidden // options["num_heads"], grid), strict=True)
    return tables


def with_positions(state_dict, options):
    """The state dict with the fixed positions in first place, as in the public DiT, and the angles
    of a rotary embedding before the blocks, as in LightningDiT."""
    positions, *angles = fixed_tables(options).items()
    before = {
        name: array for name, array in state_dict.items() if name.startswith(("x_", "t_", "y_"))
    }
    return dict((positions, *before.items(), *angles, *state_dict.items()))


# The padding of a SwiGLU's width ------------------------------------------------------------------


def with_padding(state_dict, options):
    """The state dict, in PyTorch's layout, with the zeros that numdiff has where 8 does not divide
    a SwiGLU's width."""
    return _each_swiglu(
        state_dict,
        options,
        {"w12.weight": padded_rows, "w12.bias": padded_rows, "w3.weight": padded_columns},
    )


def without_padding(state_dict, options):
    """Undoes `with_padding`."""

    def rows(array, inner):
        return np.concatenate([half[:inner] for half in np.split(array, 2)])

    return _each_swiglu(
        state_dict,
        options,
        {"w12.weight": rows, "w12.bias": rows, "w3.weight": lambda array, inner: array[:, :inner]},
    )


def _each_swiglu(state_dict, options, change):
    if options.get("mlp") != "swiglu":
        return state_dict
    inner = mlp_width(options["hidden_size"], options["mlp_ratio"], "swiglu")
    result = {}
    for name, array in state_dict.items():
        _, found, part = name.partition(".mlp.")
        result[name] = change[part](np.asarray(array), inner) if found and part in change else array
    return result
