"""The operations, one file each; start reading at README.md of this folder."""
from .attention import attention_backward, attention_forward
from .bias import bias_add_backward, bias_add_forward, channel_add_backward, channel_add_forward
from .concat import concat_backward, concat_forward
from .conv2d import conv2d_backward, conv2d_forward
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
from .layernorm import layernorm_backward, layernorm_forward
from .linear import linear_backward, linear_forward
from .matmul import matmul_backward, matmul_forward
from .mse import mse_backward, mse_forward
from .resample import avgpool_backward, avgpool_forward, upsample_backward, upsample_forward
from .scale_shift import scale_shift_backward, scale_shift_forward
from .softmax import softmax_backward, softmax_forward

__all__ = ["add_forward", "attention_backward", "attention_forward", "avgpool_backward", "avgpool_forward",
           "bias_add_backward", "bias_add_forward", "cast_forward", "channel_add_backward", "channel_add_forward",
           "concat_backward", "concat_forward", "conv2d_backward", "conv2d_forward", "dropout_backward",
           "dropout_forward", "embedding_backward", "embedding_forward", "gelu_backward", "gelu_forward",
           "groupnorm_backward", "groupnorm_forward", "layernorm_backward", "layernorm_forward", "linear_backward",
           "linear_forward", "matmul_backward", "matmul_forward", "mse_backward", "mse_forward", "scale_shift_backward",
           "scale_shift_forward", "silu_backward", "silu_forward", "softmax_backward", "softmax_forward",
           "timestep_embedding_forward", "upsample_backward", "upsample_forward"]
