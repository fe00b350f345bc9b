"""The ConvNeXt block in PyTorch, and its times, eagerly and compiled."""

import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ...benchmark.replays import MAX_CALLS, REPLAY_S, repeated, timed
from ...benchmark.torch_unet import TorchDownsample, TorchEmbeddedBlock, TorchUpsample


class TorchConvNeXtBlock(TorchEmbeddedBlock):
    def __init__(self, channels, emb_channels, out_channels, dropout, resample=None):
        super().__init__()
        self.skip_connection = (
            nn.Identity() if out_channels == channels else nn.Conv2d(channels, out_channels, 1)
        )
        self.depthwise = nn.Conv2d(out_channels, out_channels, 7, padding=3, groups=out_channels)
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, out_channels))
        self.norm = nn.LayerNorm(out_channels, eps=1e-6)
        self.mlp_in, self.mlp_out = (
            nn.Linear(out_channels, 4 * out_channels),
            nn.Linear(4 * out_channels, out_channels),
        )
        self.layer_scale = nn.ParameterDict({"weight": torch.full((out_channels,), 1e-6)})
        self.dropout = nn.Dropout(dropout)
        self.resample = {
            None: nn.Identity(),
            "up": TorchUpsample(channels, False),
            "down": TorchDownsample(channels, False),
        }[resample]

    def forward(self, x, emb):
        x = self.resample(self.skip_connection(x))
        h = self.depthwise(x) + self.emb_layers(emb)[:, :, None, None]
        h = self.norm(h.permute(0, 2, 3, 1))  # channels last, as they are stored
        h = self.mlp_out(F.gelu(self.mlp_in(h), approximate="tanh"))
        return x + (self.layer_scale["weight"] * self.dropout(h)).permute(0, 3, 1, 2)


class TorchOneBlock(TorchConvNeXtBlock):
    """The block, given what the timestep adds."""

    def __init__(self, channels):
        super().__init__(channels, channels, channels, 0.0)
        del self.emb_layers

    def forward(self, x, added):
        # channels last, as they are stored
        h = (self.depthwise(x) + added[:, :, None, None]).permute(0, 2, 3, 1)
        h = self.mlp_out(F.gelu(self.mlp_in(self.norm(h)), approximate="tanh"))
        return x + (self.layer_scale["weight"] * h).permute(0, 3, 1, 2)


def torch_times(mode, precision, cuda, shape, repeats):
    """(seconds forward, seconds with backward) of a block on images (batch, size, channels of
    `shape`).

    mode: "eager" or "compile"; precision: fp32, tf32, fp16 or bf16, of the weights, too
    """
    batch, size, channels = shape
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    device = "cuda" if cuda else "cpu"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    model = TorchOneBlock(channels).to(device, dtype).to(memory_format=torch.channels_last)
    run = model if mode == "eager" else torch.compile(model)
    x, dy = (
        torch.randn(batch, channels, size, size, device=device, dtype=dtype).to(
            memory_format=torch.channels_last
        )
        for _ in range(2)
    )
    added = torch.randn(batch, channels, device=device, dtype=dtype)
    wanted = [x.requires_grad_(), added.requires_grad_(), *model.parameters()]

    def forward():
        with torch.no_grad():
            return run(x, added)

    def both():
        return torch.autograd.grad(run(x, added), wanted, dy)

    found = []
    for once in (forward, both):
        if not cuda:
            found.append(timed(once, lambda: None, 1, repeats))
            continue
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # a backward pass runs where its forward pass ran
            for _ in range(4):  # compiles
                torch.cuda.synchronize()
                start = time.perf_counter()
                once()
                torch.cuda.synchronize()
            calls = int(np.clip(4 * REPLAY_S / (time.perf_counter() - start), 4, MAX_CALLS))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    once()
            found.append(timed(*repeated(graph.replay, torch.cuda.synchronize, calls), repeats))
    return tuple(found)
