"""What `make_autoencoder.py` and the tests that read its values must agree on. The counterpart of
stored.py."""

_TINY = {
    "image_size": 16,
    "in_channels": 3,
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "latent_channels": 4,
    "attention_levels": [],
    "mid_attention": True,
    "quant_convs": True,
}
MODELS = {  # between them every option; of 8 × 12 pixels
    "plain": _TINY,
    "wide": {**_TINY, "latent_channels": 16, "channel_mult": [1, 1, 2], "quant_convs": False},
    "attention": {**_TINY, "attention_levels": [1], "num_res_blocks": 2, "channel_mult": [2, 2]},
    "bare": {**_TINY, "mid_attention": False, "channel_mult": [1], "in_channels": 1},
}
SIZE = 8, 12
