"""The operations: a file each, or a folder with a rung a file. Start reading at README.md of this
folder."""

from .. import extensions
from .attention import (
    attention_backward,
    attention_forward,
    flash_attention_backward,
    flash_attention_forward,
    single_head_attention_forward,
)
from .bias import bias_add_backward, bias_add_forward, channel_add_backward, channel_add_forward
from .concat import Pair, concat_backward, concat_forward
from .conv2d import (
    channel_statistics,
    conv2d_backward,
    conv2d_forward,
    halved_conv2d_forward,
    resampled_statistics,
    resampled_supports,
    upsampled_conv2d_forward,
)
from .diffusion.class_dropout import class_dropout_forward
from .diffusion.l1 import l1_backward, l1_forward
from .diffusion.mse import mse_backward, mse_forward
from .diffusion.posterior import (
    posterior_kl_backward,
    posterior_kl_forward,
    posterior_sample_backward,
    posterior_sample_forward,
)
from .diffusion.q_sample import weigh_forward
from .dropout import dropout_backward, dropout_forward
from .elementwise import (
    add_forward,
    cast_forward,
    gelu_backward,
    gelu_forward,
    silu_backward,
    silu_forward,
)
from .embedding import embedding_backward, embedding_forward, timestep_embedding_forward
from .groupnorm import groupnorm_backward, groupnorm_forward
from .linear.gradients import linear_gradients_backward, linear_gradients_supports
from .linear.group import linear_group_backward, linear_group_forward
from .linear.layer import (
    linear_backward,
    linear_forward,
    linear_gate_forward,
    linear_gate_supports,
    linear_gelu_forward,
    linear_gelu_supports,
    linear_layer_scale_forward,
    linear_swiglu_forward,
    linear_swiglu_supports,
)
from .linear.stack import linear_stack_backward, linear_stack_forward, linear_stack_supports
from .matmul import matmul_backward, matmul_forward, pair_supports
from .reduce.trees import column_sum
from .resample import avgpool_backward, avgpool_forward, upsample_backward, upsample_forward
from .scale_shift import scale_shift_backward, scale_shift_forward
from .softmax import softmax_backward, softmax_forward
from .transformer.adaln import adaln_backward, adaln_forward
from .transformer.bias_gelu import bias_gelu_backward, bias_gelu_forward
from .transformer.chunk import chunk_backward, chunk_forward
from .transformer.columns import columns_forward, join_columns
from .transformer.gate import gate_backward, gate_forward
from .transformer.gate_adaln import gate_adaln_backward, gate_adaln_forward, gate_adaln_supports
from .transformer.patchify import (
    patchify_backward,
    patchify_forward,
    unpatchify_backward,
    unpatchify_forward,
)
from .transformer.swiglu import swiglu_backward, swiglu_forward
from .window import window_forward

__all__ = [
    "Pair",
    "adaln_backward",
    "adaln_forward",
    "add_forward",
    "attention_backward",
    "attention_forward",
    "avgpool_backward",
    "avgpool_forward",
    "bias_add_backward",
    "bias_add_forward",
    "bias_gelu_backward",
    "bias_gelu_forward",
    "cast_forward",
    "channel_add_backward",
    "channel_add_forward",
    "channel_statistics",
    "chunk_backward",
    "chunk_forward",
    "class_dropout_forward",
    "join_columns",
    "columns_forward",
    "column_sum",
    "concat_backward",
    "concat_forward",
    "conv2d_backward",
    "conv2d_forward",
    "dropout_backward",
    "dropout_forward",
    "embedding_backward",
    "embedding_forward",
    "flash_attention_backward",
    "flash_attention_forward",
    "gate_adaln_backward",
    "gate_adaln_forward",
    "gate_adaln_supports",
    "gate_backward",
    "gate_forward",
    "gelu_backward",
    "gelu_forward",
    "groupnorm_backward",
    "groupnorm_forward",
    "halved_conv2d_forward",
    "l1_backward",
    "l1_forward",
    "linear_backward",
    "linear_forward",
    "linear_gate_forward",
    "linear_gate_supports",
    "linear_gelu_forward",
    "linear_gelu_supports",
    "linear_gradients_backward",
    "linear_gradients_supports",
    "linear_group_backward",
    "linear_group_forward",
    "linear_layer_scale_forward",
    "linear_stack_backward",
    "linear_stack_forward",
    "linear_stack_supports",
    "linear_swiglu_forward",
    "linear_swiglu_supports",
    "matmul_backward",
    "matmul_forward",
    "mse_backward",
    "mse_forward",
    "pair_supports",
    "patchify_backward",
    "patchify_forward",
    "posterior_kl_backward",
    "posterior_kl_forward",
    "posterior_sample_backward",
    "posterior_sample_forward",
    "resampled_statistics",
    "resampled_supports",
    "scale_shift_backward",
    "scale_shift_forward",
    "silu_backward",
    "silu_forward",
    "single_head_attention_forward",
    "softmax_backward",
    "softmax_forward",
    "swiglu_backward",
    "swiglu_forward",
    "timestep_embedding_forward",
    "unpatchify_backward",
    "unpatchify_forward",
    "upsample_backward",
    "upsample_forward",
    "upsampled_conv2d_forward",
    "weigh_forward",
    "window_forward",
]
__all__ += extensions.entries("kernel_names")


def __getattr__(name):
    globals()[name] = found = extensions.attribute_of(__name__, "kernel_names", name)
    return found
