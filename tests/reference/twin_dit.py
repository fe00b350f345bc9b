"""The independent PyTorch twin of the public DiT and of its training loss: where the stored test
values come from.

Written from the papers (Peebles and Xie 2023, arXiv:2212.09748, section 3; Nichol and Dhariwal
2021, arXiv:2102.09672, section 3; Ho et al. 2020, arXiv:2006.11239, sections 2 and 3; for the
options of LightningDiT's block Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; Su et al. 2021,
arXiv:2104.09864, eq. 12, 13; Shazeer 2020, arXiv:2002.05202, eq. 6) and from the public names and
shapes of the released weights. It shares no line with numdiff and keeps PyTorch's own layout (B, C,
H, W). The loss is written as the papers write it, through the posterior's mean and variance, and
lets autograd find the gradient.

    python tests/reference/twin_dit.py       prints the parameter counts that the project promises
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from twin import timestep_embedding

PARAMETERS = {"S/2": 32_963_360, "B/2": 130_512_416, "L/2": 458_102_816, "XL/2": 675_129_632}
SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}


def positions(width, grid):
    """(1, T, width): for each token of a grid (rows, columns), row by row, first its column's
    numbers, then its row's."""
    table = torch.zeros(*grid, width, dtype=torch.float64)
    quarter = width // 4
    for row in range(grid[0]):
        for column in range(grid[1]):
            for half, place in enumerate((column, row)):
                for k in range(quarter):
                    angle = place / 10000 ** (k / quarter)
                    table[row, column, half * 2 * quarter + k] = math.sin(angle)
                    table[row, column, half * 2 * quarter + quarter + k] = math.cos(angle)
    return table.reshape(1, -1, width)


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


class RootMeanSquare(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def turned(x, grid):
    """x (batch, T, heads, channels), each pair of neighbouring channels a complex number that
    is turned: those of the first half of a head by the token's row, those of the second by its
    column."""
    pairs = x.shape[-1] // 4  # of a half
    angle = torch.zeros(grid[0] * grid[1], 2 * pairs, dtype=torch.float64)
    for token in range(len(angle)):
        for half, place in enumerate(divmod(token, grid[1])):
            for i in range(pairs):
                angle[token, half * pairs + i] = place * 10000 ** (-i / pairs)
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], 2 * pairs, 2).contiguous())
    turn = torch.polar(torch.ones_like(angle), angle).to(numbers.dtype)[:, None]
    return torch.view_as_real(numbers * turn).reshape(x.shape)


def sparse_linear(q, k, v, topk, project, all_keys=False):
    """Zhang et al. 2025, arXiv:2509.24006, with all T × T numbers: q k v (batch, heads, T,
    channels).
    all_keys: the linear part takes the critical keys, too."""
    T, block = q.shape[2], 64
    starts = range(0, T, block)

    def means(x):
        return torch.stack([x[:, :, s : s + block].mean(2) for s in starts], 2)

    with torch.no_grad():
        scores = means(q) @ means(k - k.mean(2, keepdim=True)).transpose(-1, -2)
        count = max(1, int(topk * len(starts)))
        chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(count, -1).indices, 1).bool()
        critical = chosen.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :T, :T]
    dots = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~critical, -math.inf)
    share = (torch.softmax(q, -1) @ torch.softmax(k, -1).transpose(-1, -2)).masked_fill(
        critical & (not all_keys), 0
    )
    return torch.softmax(dots, -1) @ v + project(share / share.sum(-1, keepdim=True) @ v)


class TwinAttention(nn.Module):
    def __init__(self, width, heads, qk_norm, grid, topk, all_keys):
        super().__init__()
        self.all_keys = all_keys
        self.heads, self.grid, self.qk_norm = heads, grid, qk_norm
        self.qkv = nn.Linear(width, 3 * width)
        if qk_norm:
            self.q_norm, self.k_norm = (
                RootMeanSquare(width // heads),
                RootMeanSquare(width // heads),
            )
        self.proj = nn.Linear(width, width)
        self.topk = topk
        if topk is not None:
            self.proj_l = nn.Linear(width // heads, width // heads)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, -1) for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.grid:
            q, k = turned(q, self.grid), turned(k, self.grid)
        if self.topk is not None:
            y = sparse_linear(
                *(part.transpose(1, 2) for part in (q, k, v)), self.topk, self.proj_l, self.all_keys
            )
            return self.proj(y.transpose(1, 2).reshape(batch, length, width))
        weight = torch.softmax(
            torch.einsum("bthc,bshc->bhts", q, k) / math.sqrt(q.shape[-1]), dim=-1
        )
        return self.proj(torch.einsum("bhts,bshc->bthc", weight, v).reshape(batch, length, width))


class Perceptron(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class GatedPerceptron(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.inner = inner
        self.w12, self.w3 = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x):
        both = self.w12(x)
        swished, plain = both[..., : self.inner], both[..., self.inner :]
        return self.w3(swished * torch.sigmoid(swished) * plain)


def adaptive(norm, x, shift, scale):
    y = norm(x) * (1 + scale[:, None])
    return y if shift is None else y + shift[:, None]


def normaliser(kind, width):
    if kind == "rms":
        return RootMeanSquare(width)
    return nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)


class TwinBlock(nn.Module):
    def __init__(self, width, heads, ratio, grid, norm, qk_norm, rope, mlp, shift, topk, all_keys):
        super().__init__()
        self.norm1, self.norm2 = normaliser(norm, width), normaliser(norm, width)
        self.attn = TwinAttention(width, heads, qk_norm, grid if rope else None, topk, all_keys)
        inner = int(width * ratio)
        self.mlp = (
            GatedPerceptron(width, int(2 / 3 * inner))
            if mlp == "swiglu"
            else Perceptron(width, inner)
        )
        self.shift = shift
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), nn.Linear(width, (6 if shift else 4) * width)
        )

    def forward(self, x, c):
        if self.shift:
            beta1, gamma1, alpha1, beta2, gamma2, alpha2 = self.adaLN_modulation(c).chunk(6, dim=1)
        else:
            gamma1, alpha1, gamma2, alpha2 = self.adaLN_modulation(c).chunk(4, dim=1)
            beta1 = beta2 = None
        x = x + alpha1[:, None] * self.attn(adaptive(self.norm1, x, beta1, gamma1))
        return x + alpha2[:, None] * self.mlp(adaptive(self.norm2, x, beta2, gamma2))


class Final(nn.Module):
    def __init__(self, width, outputs, norm):
        super().__init__()
        self.norm_final = normaliser(norm, width)
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x, c):
        beta, gamma = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(adaptive(self.norm_final, x, beta, gamma))


class TwinDiT(nn.Module):
    """The public DiT, or with the block of LightningDiT; the options are those of `numdiff.nn.DiT`."""

    def __init__(
        self,
        image_size=32,
        in_channels=4,
        patch_size=2,
        hidden_size=1152,
        depth=28,
        num_heads=16,
        mlp_ratio=4.0,
        num_classes=1000,
        class_dropout=0.1,
        learn_sigma=True,
        norm="layer",
        qk_norm=False,
        rope=False,
        mlp="gelu",
        shift=True,
        attention="full",
        sla_topk=0.2,
        sla_linear="rest",
    ):
        super().__init__()
        size = image_size if isinstance(image_size, (list, tuple)) else (image_size, image_size)
        self.patch, self.grid = patch_size, tuple(n // patch_size for n in size)
        self.outputs = in_channels * (2 if learn_sigma else 1)
        self.pos_embed = nn.Parameter(
            torch.zeros(1, math.prod(self.grid), hidden_size), requires_grad=False
        )
        self.x_embedder = Patches(patch_size, in_channels, hidden_size)
        self.t_embedder = Embedder(hidden_size)
        self.y_embedder = (
            Labels(num_classes + (class_dropout > 0), hidden_size) if num_classes else None
        )
        topk = sla_topk if attention == "sla" else None
        self.blocks = nn.ModuleList(
            TwinBlock(
                hidden_size,
                num_heads,
                mlp_ratio,
                self.grid,
                norm,
                qk_norm,
                rope,
                mlp,
                shift,
                topk,
                sla_linear == "all",
            )
            for _ in range(depth)
        )
        self.final_layer = Final(hidden_size, patch_size**2 * self.outputs, norm)

    def forward(self, x, t, y=None):
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t)
        if y is not None:
            c = c + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)
        image = x.new_zeros(len(x), self.outputs, *(n * self.patch for n in self.grid))
        # each token's numbers are (row, column, channel) of its square
        for token in range(math.prod(self.grid)):
            square = (
                x[:, token]
                .reshape(len(x), self.patch, self.patch, self.outputs)
                .permute(0, 3, 1, 2)
            )
            top, left = (place * self.patch for place in divmod(token, self.grid[1]))
            image[:, :, top : top + self.patch, left : left + self.patch] = square
        return image


def draw(model, seed):
    """Fill every trained parameter with the numbers that `stored.weight` gives for its name, and
    the positions."""
    from stored import weight

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(
                    torch.from_numpy(weight(name, tuple(parameter.shape), seed)).double()
                )
        model.pos_embed.copy_(positions(model.pos_embed.shape[2], model.grid))
    return model


# The hybrid loss, as the papers write it ----------------------------------------------------------


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
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


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
    divergence = 0.5 * (
        log_variance
        - smallest
        - 1
        + (smallest - log_variance).exp()
        + (true_mean - mean) ** 2 * (-log_variance).exp()
    )

    deviation = (0.5 * log_variance).exp()
    above, below = (
        approximate_cdf((x_0 + shift - mean) / deviation) for shift in (1 / 255, -1 / 255)
    )
    probability = torch.where(
        x_0 < -0.999, above, torch.where(x_0 > 0.999, 1 - below, above - below)
    )
    reconstruction = -probability.clamp(min=1e-12).log()

    bound = torch.where(spread(t) == 0, reconstruction, divergence).flatten(1).mean(1) / math.log(2)
    return (simple + process.T / 1000 * bound).mean()


def count_parameters(name):
    depth, width, heads = SIZES[name.split("/")[0]]
    with torch.device("meta"):
        model = TwinDiT(
            hidden_size=width, depth=depth, num_heads=heads, patch_size=int(name.split("/")[1])
        )
    return sum(p.numel() for p in model.parameters()), sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


if __name__ == "__main__":
    for model_name, promised in PARAMETERS.items():
        total, trained = count_parameters(model_name)
        assert total == promised, (model_name, total)
        print(f"DiT-{model_name}: {total:,} parameters as promised, {trained:,} of them trained")
