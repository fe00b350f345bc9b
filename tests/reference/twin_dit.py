"""The independent PyTorch twin of the public DiT and of its training loss: where the stored test values come from.

Written from the papers (Peebles and Xie 2023, arXiv:2212.09748, section 3; Nichol and Dhariwal 2021, arXiv:2102.09672,
section 3; Ho et al. 2020, arXiv:2006.11239, sections 2 and 3) and from the public names and shapes of the released
weights. It shares no line with numdiff and keeps PyTorch's own layout (B, C, H, W). The loss is written as the papers
write it, through the posterior's mean and variance, and lets autograd find the gradient.

    python tests/reference/twin_dit.py       prints the parameter counts that the project promises
"""
import math

import torch
from torch import nn
from torch.nn import functional as F
from twin import timestep_embedding

PARAMETERS = {"S/2": 32_963_360, "B/2": 130_512_416, "L/2": 458_102_816, "XL/2": 675_129_632}
SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}


def positions(width, side):
    """(1, side², width): for each token, row by row, first its column's numbers, then its row's."""
    table = torch.zeros(side, side, width, dtype=torch.float64)
    quarter = width // 4
    for row in range(side):
        for column in range(side):
            for half, place in enumerate((column, row)):
                for k in range(quarter):
                    angle = place / 10000 ** (k / quarter)
                    table[row, column, half * 2 * quarter + k] = math.sin(angle)
                    table[row, column, half * 2 * quarter + quarter + k] = math.cos(angle)
    return table.reshape(1, side * side, width)


class Embedder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t):
        return self.mlp(timestep_embedding(t, 256).to(self.mlp[0].weight.dtype))


class Patches(nn.Module):
    def __init__(self, patch, channels, width):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Labels(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.embedding_table = nn.Embedding(rows, width)

    def forward(self, y):
        return self.embedding_table(y)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.reshape(batch, length, self.heads, -1) for part in self.qkv(x).chunk(3, dim=-1))
        weight = torch.softmax(torch.einsum("bthc,bshc->bhts", q, k) / math.sqrt(q.shape[-1]), dim=-1)
        return self.proj(torch.einsum("bhts,bshc->bthc", weight, v).reshape(batch, length, width))


class Perceptron(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def adaptive(norm, x, shift, scale):
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    def __init__(self, width, heads, ratio):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Perceptron(width, int(width * ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        beta1, gamma1, alpha1, beta2, gamma2, alpha2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + alpha1[:, None] * self.attn(adaptive(self.norm1, x, beta1, gamma1))
        return x + alpha2[:, None] * self.mlp(adaptive(self.norm2, x, beta2, gamma2))


class Final(nn.Module):
    def __init__(self, width, outputs):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x, c):
        beta, gamma = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(adaptive(self.norm_final, x, beta, gamma))


class Twin(nn.Module):
    """The public DiT; the options are those of `numdiff.nn.DiT`."""

    def __init__(self, image_size=32, in_channels=4, patch_size=2, hidden_size=1152, depth=28, num_heads=16,
                 mlp_ratio=4.0, num_classes=1000, class_dropout=0.1, learn_sigma=True):
        super().__init__()
        self.patch, self.side = patch_size, image_size // patch_size
        self.outputs = in_channels * (2 if learn_sigma else 1)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.side ** 2, hidden_size), requires_grad=False)
        self.x_embedder = Patches(patch_size, in_channels, hidden_size)
        self.t_embedder = Embedder(hidden_size)
        self.y_embedder = Labels(num_classes + (class_dropout > 0), hidden_size) if num_classes else None
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
        self.final_layer = Final(hidden_size, patch_size ** 2 * self.outputs)

    def forward(self, x, t, y=None):
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t)
        if y is not None:
            c = c + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        image = x.new_zeros(len(x), self.outputs, self.side * self.patch, self.side * self.patch)
        for token in range(self.side ** 2):  # each token's numbers are (row, column, channel) of its square
            square = x[:, token].reshape(len(x), self.patch, self.patch, self.outputs).permute(0, 3, 1, 2)
            top, left = token // self.side * self.patch, token % self.side * self.patch
            image[:, :, top:top + self.patch, left:left + self.patch] = square
        return image


def draw(model, seed):
    """Fill every trained parameter with the numbers that `stored.weight` gives for its name, and the positions."""
    from stored import weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape), seed)).double())
        model.pos_embed.copy_(positions(model.pos_embed.shape[2], model.side))
    return model


# The hybrid loss, as the papers write it ------------------------------------------------------------------------------

class Process:
    """A linear schedule of T steps and everything derived from it, in float64."""

    def __init__(self, T):
        self.T = T
        self.beta = torch.linspace(0.1 / T, 20 / T, T, dtype=torch.float64)
        self.alpha_bar = torch.cumprod(1 - self.beta, 0)
        self.previous = torch.cat([torch.ones(1, dtype=torch.float64), self.alpha_bar[:-1]])
        self.posterior = self.beta * (1 - self.previous) / (1 - self.alpha_bar)

    def mean_of_posterior(self, x_0, x_t, t):
        """Ho et al., eq. 7."""
        a = self.previous[t].sqrt() * self.beta[t] / (1 - self.alpha_bar[t])
        b = (1 - self.beta[t]).sqrt() * (1 - self.previous[t]) / (1 - self.alpha_bar[t])
        return spread(a) * x_0 + spread(b) * x_t

    def x_0_of(self, prediction, x_t, t, kind):
        ab = spread(self.alpha_bar[t])
        if kind == "eps":
            return (x_t - (1 - ab).sqrt() * prediction) / ab.sqrt()
        return ab.sqrt() * x_t - (1 - ab).sqrt() * prediction if kind == "v" else prediction


def spread(values):
    return values[:, None, None, None]


def approximate_cdf(z):
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z ** 3)))


def hybrid_loss(process, output, x_0, x_t, eps, t, kind="eps"):
    """Squared error + T/1000 · the bound's term of t in bits a number, whose means get no gradient."""
    channels = x_0.shape[1]
    prediction, v = output[:, :channels], output[:, channels:]
    ab = spread(process.alpha_bar[t])
    target = {"eps": eps, "x_0": x_0, "v": ab.sqrt() * eps - (1 - ab).sqrt() * x_0}[kind]
    simple = ((prediction - target) ** 2).flatten(1).mean(1)

    smallest = spread(process.posterior.clamp(min=process.posterior[1])[t].log())
    largest = spread(process.beta[t].log())
    share = (v + 1) / 2
    log_variance = share * largest + (1 - share) * smallest
    mean = process.mean_of_posterior(process.x_0_of(prediction.detach(), x_t, t, kind), x_t, t)
    true_mean = process.mean_of_posterior(x_0, x_t, t)
    divergence = 0.5 * (log_variance - smallest - 1 + (smallest - log_variance).exp()
                        + (true_mean - mean) ** 2 * (-log_variance).exp())

    deviation = (0.5 * log_variance).exp()
    above, below = (approximate_cdf((x_0 + shift - mean) / deviation) for shift in (1 / 255, -1 / 255))
    probability = torch.where(x_0 < -0.999, above, torch.where(x_0 > 0.999, 1 - below, above - below))
    reconstruction = -probability.clamp(min=1e-12).log()

    bound = torch.where(spread(t) == 0, reconstruction, divergence).flatten(1).mean(1) / math.log(2)
    return (simple + process.T / 1000 * bound).mean()


def count_parameters(name):
    depth, width, heads = SIZES[name.split("/")[0]]
    with torch.device("meta"):
        model = Twin(hidden_size=width, depth=depth, num_heads=heads, patch_size=int(name.split("/")[1]))
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)


if __name__ == "__main__":
    for model_name, promised in PARAMETERS.items():
        total, trained = count_parameters(model_name)
        assert total == promised, (model_name, total)
        print(f"DiT-{model_name}: {total:,} parameters as promised, {trained:,} of them trained")
