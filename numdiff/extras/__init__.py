"""Optional features, one package each: what each of them adds to numdiff, by `register`
(extensions.py).

Here is all that they add; README.md describes them. Nothing else is imported before an option asks
for it.
"""

from ..extensions import register

register(
    "numdiff.extras.evaluate",
    command={"evaluate": ("command:evaluate", "Measure samples against a reference.")},
)

register(
    "numdiff.extras.convert",
    command={
        "convert": (
            "command:convert",
            "Convert weights from and to the formats of other programs.",
        )
    },
    foreign={"weights": "reader"},
)

register(
    "numdiff.extras.kernel_check",
    command={"kernels": ("command:kernels", "Check the kernels, on a GPU or in the emulator.")},
)

register(
    "numdiff.extras.post_hoc_ema",
    command={"ema": ("command:ema", "Average a run's weights again, with another width.")},
    settings={"ema_std": "settings:AverageSettings", "ema_snapshots": "settings:SnapshotSettings"},
    kernels={"power_ema": "power_ema"},
    optimizer_state={"ema_std": "state:PowerAverages"},
    run={"ema_std": "run:PostHocEma"},
    weights={"ema_std": "combine"},
    checkpoint_meta={"ema_std": "settings:WIDTHS", "updates": "settings:UPDATES"},
)

register(
    "numdiff.extras.loggers", settings={"log": "settings:LogSettings"}, run={"log": "run:RunLog"}
)

register(
    "numdiff.extras.learned_steps",
    command={
        "schedule": ("command:schedule", "Learn the steps of a sampler from a trained model.")
    },
    steps={"learned steps": "steps"},
)

register(
    "numdiff.extras.importers",
    data={"import": "command:import_command", "info": "command:info_command"},
    importer={name: name for name in ("cifar", "mnist", "tar", "unet_cu")},
    pictures={"files": "pictures", "folders": "folders"},
)

register("numdiff.extras.autoencoder", kind={"vae": "kind:VAE"})

register("numdiff.extras.encode", data={"encode": "command:encode_command"})

register(
    "numdiff.extras.learn",
    command={"learn": ("command:learn", "Learn GPU programming by puzzles, without a GPU.")},
)

register(
    "numdiff.extras.measure",
    command={
        "bench": (
            "bench:bench",
            "Measure training steps, samples and kernels, optionally compared with PyTorch.",
        ),
        "profile": (
            "profile:profile",
            "Show where a training step's time goes, by kernel and by layer.",
        ),
    },
)

register(
    "numdiff.extras.pages",
    command={
        "report": ("report_command:report", "Show runs as one page: curves, samples, settings."),
        "serve": ("serve_command:serve", "Sample from a model on a page in the browser."),
    },
)

register(
    "numdiff.extras.convnext",
    unet_block={"convnext": ("block:ConvNeXtBlock", "ConvNeXt's with a depthwise 7×7 convolution")},
    unet_block_names={"convnext": "names"},
    torch_unet_block={"convnext": "torch_block:TorchConvNeXtBlock"},
    bench={"block": "command:block"},
    kernels={"depthwise": "depthwise"},
    kernel_names={
        name: f"depthwise:{name}"
        for name in (
            "depthwise_backward",
            "depthwise_forward",
            "depthwise_layernorm_backward",
            "depthwise_layernorm_forward",
        )
    },
    functional={
        name: f"functional:{name}" for name in ("depthwise_conv2d", "depthwise_layer_norm")
    },
)

register(
    "numdiff.extras.sla",
    dit_attention={
        "sla": (
            "attention:SparseLinearAttention",
            "sparse-linear attention, sla, for images of many tokens: exact to the blocks of 64 "
            "tokens that matter most, linear to the rest",
        )
    },
    dit_settings={
        "sla_topk": "settings:SparseAttentionSettings",
        "sla_linear": "settings:SparseAttentionSettings",
    },
    convert={"sla_topk": "command:TOPK", "sla_linear": "command:LINEAR"},
    kernels={"sla": "kernels"},
    kernel_names={"sla_backward": "kernels:sla_backward", "sla_forward": "kernels:sla_forward"},
    functional={"sparse_linear_attention": "functional:sparse_linear_attention"},
)

register(
    "numdiff.extras.lora",
    command={
        "lora": ("command:lora", "Merge adapters of a LoRA run into the weights of their model.")
    },
    settings={"lora": "settings:LoraSettings", "lora_alpha": "settings:LoraSettings"},
    run={"lora": "run:LoraRun"},
    adapter={"lora": "files"},
    checkpoint_meta={"lora": "settings:RECORD"},
)

register("numdiff.extras.im2win", conv2d={"im2win": "windows"}, kernels={"im2win": "windows"})

register(
    "numdiff.extras.tf32",
    matmul={"tf32": "matmul"},
    conv2d_switched={"tf32": "conv2d.launcher"},
    flash_attention={
        "tf32-bf16": ("attention", {"number": 4, "dtypes": ("float32",), "requires": "8.0"})
    },
    kernels={"tf32 matmul": "matmul", "tf32 conv2d": "conv2d", "tf32 attention": "attention"},
)

register(
    "numdiff.extras.levels",
    flash_attention={
        "naive": ("attention.simple", {"number": 1, "bytes_at_once": 1}),
        "register-tiled": ("attention", {"number": 2, "dtypes": ("float32",)}),
    },
    problems={
        "flash_attention": "attention.problems:forward",
        "flash_attention_backward": "attention.problems:backward",
    },
    kernels={
        "attention levels": "attention",
        "mma levels": "mma",
        "wgmma levels": "wgmma",
        "conv2d levels": "conv2d",
        "fused": "fused",
    },
)

register(
    "numdiff.extras.fp8",
    precision={"fp8": "layers:Float8"},
    problems={
        "gate_adaln": "gate_problems:forward",
        "gate_adaln_backward": "gate_problems:backward",
    },
    kernels={
        "fp8 rounding": "quantise",
        "fp8 matmul": "matmul",
        "fp8 weights": "weights",
        "fp8 both": "both",
        "fp8 epilogues": "epilogues",
        "fp8 mma": "mma",
        "fp8 mma epilogues": "mma_epilogues",
    },
    kernel_names={
        name: f"linear:{name}"
        for name in (
            "linear_fp8_backward",
            "linear_fp8_forward",
            "linear_fp8_gelu_forward",
            "linear_fp8_swiglu_forward",
        )
    },
)

register(
    "numdiff.extras.feature_networks",
    features={".h5": "files:load_extractor"},
    converter={"feature network": "files"},
    settings={"evaluate_features": "settings:FeatureSettings"},
    kernels={"feature networks": "kernels"},
)

register(
    "numdiff.extras.muon",
    optimizer={"muon": "optimizer"},
    nn_names={"Muon": "optimizer:Muon"},
    kernels={
        "muon": "update",
        "newton_schulz": "newton_schulz",
        "symmetric": "symmetric",
        "symmetric tiles": "symmetric_epilogue",
    },
)

register(
    "numdiff.extras.qk_norm_rope",
    functional={"qk_norm_rope": "functional:qk_norm_rope"},
    kernels={
        "qk_norm_rope": "launcher",
        "qk_norm_rope naive": "naive",
        "qk_norm_rope fused": "fused",
        "qk_norm_rope host": "cpu",
    },
    kernel_names={
        name: f"launcher:{name}" for name in ("qk_norm_rope_backward", "qk_norm_rope_forward")
    },
)

register(
    "numdiff.extras.learned_variance",
    functional={"hybrid_loss": "functional:hybrid_loss"},
    kernels={"hybrid_loss": "vlb", "learned_step": "step"},
    kernel_names={
        "hybrid_loss_backward": "vlb:hybrid_loss_backward",
        "hybrid_loss_forward": "vlb:hybrid_loss_forward",
        "learned_step": "step:learned_step",
    },
)

register(
    "numdiff.extras.layer_norm",
    functional={"layer_norm": "functional:layer_norm"},
    kernels={"layernorm": "layernorm"},
    kernel_names={
        name: f"layernorm:{name}" for name in ("layernorm_backward", "layernorm_forward")
    },
)

register(
    "numdiff.extras.rms_norm",
    functional={"rms_norm": "functional:rms_norm"},
    kernels={"rmsnorm": "rmsnorm"},
    kernel_names={name: f"rmsnorm:{name}" for name in ("rmsnorm_backward", "rmsnorm_forward")},
)

register(
    "numdiff.extras.transports",
    transport={"peer": "peer", "nccl": "nccl_exchange"},
    kernels={"peer reduce": "reduce", "peer pieces": "pieces"},
)
