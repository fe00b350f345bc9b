"""The differentiable operations: each calls a kernel forward and gives the tape the kernel for its
backward.

Inputs and results are `Tensor`s; weights are `Parameter`s, whose gradients the backward adds into.
Nothing here asks which device the arrays are on. The mathematics, shapes and sources stand in
numdiff/kernels, in the file of the operation that a function calls (`K.groupnorm_forward`:
kernels/groupnorm).

    elementwise.py    each element by itself: sums, casts, activations, chains in one kernel, dropout
    products.py       linear layers, one or several at once
    convolutions.py   convolutions
    norms.py          GroupNorm, softmax
    attentions.py     softmax attention, the norm and rotation of q and k
    modulation.py     adaptive norms, gates, learned scales
    feed_forward.py   two products and the GELU or SwiGLU between them
    movement.py       parts, pairs, patches, resolutions
    embeddings.py     of timesteps and classes
    losses.py         what training minimises
    gradients.py      where gradients of weights go; for the other files alone
    arguments.py      what is said of an array where a Tensor or a Parameter should be

The operations' names are here, too: `from numdiff.nn import functional as F`, then `F.linear`.
Called by these names they check what they are given. Extensions add operations (extensions.py),
which are imported at first use.
"""

from ... import extensions
from .arguments import checked
from .attentions import attention, single_head_attention
from .convolutions import conv2d, halved_conv2d, upsampled_conv2d
from .elementwise import (
    add,
    add_constant,
    cast,
    channel_add,
    dropout,
    fused,
    gelu,
    scale_shift,
    silu,
    swiglu,
    weigh,
)
from .embeddings import class_dropout, embedding, timestep_embedding
from .feed_forward import bias_gelu, gates_products, mlp, swiglu_mlp
from .losses import l1, mse, posterior_kl, posterior_sample
from .modulation import adaln, gate, gate_adaln, layer_scale
from .movement import (
    avgpool,
    chunk,
    columns,
    concat,
    pair,
    patchify,
    reshape,
    unpatchify,
    upsample,
    window,
)
from .norms import group_norm, softmax
from .products import linear, linear_group, linear_stack, matmul, stack_columns, stacks, together

__all__ = [
    "adaln",
    "add",
    "add_constant",
    "attention",
    "avgpool",
    "bias_gelu",
    "cast",
    "channel_add",
    "chunk",
    "class_dropout",
    "columns",
    "concat",
    "conv2d",
    "dropout",
    "embedding",
    "fused",
    "gate",
    "gate_adaln",
    "gates_products",
    "gelu",
    "group_norm",
    "halved_conv2d",
    "l1",
    "layer_scale",
    "linear",
    "linear_group",
    "linear_stack",
    "matmul",
    "mlp",
    "mse",
    "pair",
    "patchify",
    "posterior_kl",
    "posterior_sample",
    "reshape",
    "scale_shift",
    "silu",
    "single_head_attention",
    "softmax",
    "stack_columns",
    "stacks",
    "swiglu",
    "swiglu_mlp",
    "timestep_embedding",
    "together",
    "unpatchify",
    "upsample",
    "upsampled_conv2d",
    "weigh",
    "window",
]

# Names, signatures and docstrings stay those of the imports above, which is what editors and type
# checkers read.
globals().update({name: checked(globals()[name]) for name in __all__})
__all__ += extensions.entries("functional")


def __getattr__(name):
    globals()[name] = found = checked(extensions.attribute_of(__name__, "functional", name))
    return found
