# %% [markdown]
# # 6. Training
#
# Kernels compute; training decides what and in which order. This chapter writes a tape for
# automatic differentiation in a hundred lines, and trains a small diffusion model with it, on
# points in the plane. Then it looks at three things that a fast trainer needs: float16, a loss
# scale, and a step that is recorded once and replayed.

# %%
import numpy as np
from numba import cuda

from numdiff import emulator
from numdiff.lessons.lab import drawing, measured, run

rng = np.random.default_rng(0)

# %% [markdown]
# ## A tape
#
# While a program runs forward, write down each operation: its result, its inputs, and a function
# that turns the gradient of the result into the gradients of the inputs. Played from its end, this
# *tape* gives all gradients. Every gradient passes through `through`, which does nothing yet.


# %%
class Tensor:
    def __init__(self, data):
        self.data, self.grad = np.asarray(data, np.float32), None

    def receive(self, gradient):
        self.grad = gradient if self.grad is None else self.grad + gradient


class Tape:
    def __init__(self, through=lambda gradient: gradient):
        self.records, self.through = [], through

    def record(self, data, inputs, backward):
        result = Tensor(data)
        self.records.append((result, inputs, backward))
        return result

    def backward(self, loss, scale=1.0):
        loss.receive(np.float32(scale))
        while self.records:
            result, inputs, backward = self.records.pop()
            for tensor, gradient in zip(inputs, backward(self.through(result.grad)), strict=True):
                tensor.receive(self.through(gradient))


# %% [markdown]
# ## Three operations, each with its gradient
#
# A layer is a product and a bias, SiLU is the bend between two layers, and the loss is a mean of
# squares. The gradient stands next to the forward mathematics. Nothing else is needed.


# %%
class Network(Tape):
    def linear(self, x, weight, bias):  # y = x W + b
        return self.record(
            x.data @ weight.data + bias.data,
            (x, weight, bias),
            lambda dy: (dy @ weight.data.T, x.data.T @ dy, dy.sum(0)),
        )

    def silu(self, x):  # y = x · s with s = 1 / (1 + e^-x)
        s = 1 / (1 + np.exp(-x.data))
        return self.record(x.data * s, (x,), lambda dy: (dy * s * (1 + x.data * (1 - s)),))

    def mse(self, x, target):  # mean of (x - target)²
        away = x.data - target
        return self.record((away**2).mean(), (x,), lambda dy: (dy * 2 * away / away.size,))

    def forward(self, x, parameters):
        for n in range(0, len(parameters), 2):
            x = self.linear(x, *parameters[n : n + 2])
            x = self.silu(x) if n + 2 < len(parameters) else x
        return x


# %% [markdown]
# ## Check it against differences
#
# Change all parameters a little along a random direction. The loss changes by the gradient times
# the direction. A tape that fails this check trains anyway, and badly; so check first.


# %%
def layers(*widths):
    parameters = []
    for a, b in zip(widths, widths[1:], strict=False):
        parameters += [Tensor(rng.standard_normal((a, b)) / np.sqrt(a)), Tensor(np.zeros(b))]
    return parameters


def gradients(parameters, x, target, through=lambda gradient: gradient, scale=1.0):
    network = Network(through)
    loss = network.mse(network.forward(Tensor(x), parameters), target)
    for p in parameters:
        p.grad = None
    network.backward(loss, scale)
    return float(loss.data)


parameters = layers(4, 32, 32, 2)
x, target = rng.standard_normal((16, 4)), rng.standard_normal((16, 2)).astype(np.float32)
gradients(parameters, x, target)
found = [p.grad for p in parameters]
directions = [rng.standard_normal(p.data.shape).astype(np.float32) for p in parameters]
losses = []
for step in (1e-2, -1e-2):
    moved = [Tensor(p.data + step * d) for p, d in zip(parameters, directions, strict=True)]
    losses.append(gradients(moved, x, target))
slope = sum((g * d).sum() for g, d in zip(found, directions, strict=True))
print(
    "the gradient agrees with differences:",
    np.isclose(slope, (losses[0] - losses[1]) / 2e-2, rtol=1e-2),
)

# %% [markdown]
# ## A diffusion model of points
#
# Take a data point x_0, mix it with noise: x_t = cos(a) · x_0 + sin(a) · noise, for a random angle
# a. The network sees x_t and a, and predicts the noise. That is all of training a diffusion model;
# an image has more numbers than a point. Adam adapts the step of each parameter.


# %%
def points(n):  # a spiral
    a = 1.5 * np.pi * (1 + 2 * rng.random(n))
    return (
        np.stack([np.cos(a), np.sin(a)], 1) * a[:, None] / 10 + 0.02 * rng.standard_normal((n, 2))
    ) * 1.2


def batch(n):
    a, noise = np.pi / 2 * rng.random((n, 1)), rng.standard_normal((n, 2)).astype(np.float32)
    x_t = np.cos(a) * points(n) + np.sin(a) * noise
    return inputs(x_t, a), noise


def inputs(x_t, a):
    return np.concatenate([x_t, np.sin(4 * x_t), np.cos(4 * x_t), np.cos(a), np.sin(a)], 1)


def adam(parameters, moments, step, rate):
    for p, (m, v) in zip(parameters, moments, strict=True):
        m += 0.1 * (p.grad - m)
        v += 0.01 * (p.grad**2 - v)
        p.data -= rate * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.99**step)) + 1e-8)


def train(steps, parameters, through=lambda gradient: gradient, scale=1.0):
    moments, losses = [(np.zeros_like(p.data), np.zeros_like(p.data)) for p in parameters], []
    for step in range(1, steps + 1):
        losses.append(gradients(parameters, *batch(256), through, scale))
        for p in parameters:
            p.grad = p.grad / np.float32(scale)
        adam(parameters, moments, step, 3e-3 * (1 - step / (steps + 1)))
    return losses


model = layers(8, 96, 96, 96, 2)
losses = train(1500, model)
print(f"loss {losses[0]:.1f} at first, {np.mean(losses[-100:]):.1f} at the end")


def draw(axes):
    axes.plot(losses, linewidth=0.6, color="#b0cce8", label="each step")
    axes.plot(
        np.arange(25, 1476),
        np.convolve(losses, np.ones(50) / 50, "valid"),
        color="#165ea6",
        label="mean of 50",
    )
    axes.legend()


drawing("Training a diffusion model of points", "step", "loss", draw)

# %% [markdown]
# ## Draw samples
#
# Begin with noise, a = π/2. The prediction of the noise gives an estimate of x_0; mix both again
# for a smaller angle. Fifty such steps lead to the data. `numdiff sample` does the same with a
# UNet.

# %%
sample = rng.standard_normal((800, 2))
angles = np.linspace(np.pi / 2, 0, 51)[:, None, None]
for a, following in zip(angles, angles[1:], strict=False):
    a = np.clip(a, None, np.pi / 2 - 0.02)
    noise = Network().forward(Tensor(inputs(sample, np.broadcast_to(a[0], (800, 1)))), model).data
    x_0 = np.clip((sample - np.sin(a[0]) * noise) / np.cos(a[0]), -2, 2)
    sample = np.cos(following[0]) * x_0 + np.sin(following[0]) * noise
data = points(800)
nearest = np.sqrt(((sample[:, None] - points(2000)[None]) ** 2).sum(-1)).min(1)
print("most samples are near the spiral:", np.median(nearest) < 0.1)


def draw(axes):
    axes.plot(*data.T, ".", markersize=3, color="#b0cce8", label="data")
    axes.plot(*sample.T, ".", markersize=3, color="#d9622b", label="samples")
    axes.set_aspect("equal")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))


drawing("800 samples", "", "", draw, 4.6)

# %% [markdown]
# ## float16, seen in a histogram
#
# Tensor cores want float16. It ends at 65,504 above. Below 2^-14 it loses bits, and below 2^-25,
# about 3e-8, all that is left is 0. Look at the gradients that travel on the tape, of a batch as
# large as an image model's. The loss is a mean, so the more it averages the smaller its gradients
# are.


# %%
def half(gradient):
    return np.asarray(gradient, np.float32).astype(np.float16).astype(np.float32)


seen = []


def watch(gradient):
    seen.append(np.abs(np.ravel(gradient)))
    return gradient


fresh = layers(8, 64, 64, 64, 2)
gradients(fresh, *batch(16384), watch)
sizes = np.concatenate(seen)
sizes = sizes[sizes > 0]
for scale in (1, 2**6, 2**12):
    print(
        f"loss scale {scale:5,}: {(half(sizes * scale) == 0).mean():4.0%} become 0, "
        f"{(sizes * scale < 2.0**-14).mean():4.0%} lose bits"
    )


def draw(axes):
    edges = np.arange(-36, 4)
    for scale, colour in ((1, "#d9622b"), (2**12, "#165ea6")):
        axes.hist(
            np.log2(sizes * scale), edges, color=colour, alpha=0.6, label=f"loss scale {scale:,}"
        )
    top = axes.get_ylim()[1]
    axes.set_ylim(top=1.2 * top)
    for at, name in ((-25, "0 below "), (-14, "fewer bits below ")):
        axes.axvline(at, color="#282c34", linewidth=1)
        axes.annotate(name, (at, 1.1 * top), ha="right")
    axes.legend(loc="center left")


drawing("Gradients of one step", "log2 of the magnitude", "count", draw)

# %% [markdown]
# ## The cure: scale the loss
#
# Backward is linear. Multiply the loss by 4,096, and every gradient is 4,096 times as large; divide
# before the update. A power of two changes no digit. If the scale is too large a gradient becomes
# infinite: skip this step, and halve the scale. If all goes well for a while, double it. That is
# *dynamic loss scaling*, the rule below.


# %%
def next_scale(scale, clean, finite, interval=5):
    """(the scale, clean steps in a row) after a step."""
    if not finite:
        return scale / 2, 0
    return (2 * scale, 0) if clean + 1 == interval else (scale, clean + 1)


scale, clean, history = 2.0**24, 0, []
with np.errstate(over="ignore", invalid="ignore"):
    for _ in range(60):
        gradients(model, *batch(256), half, scale)
        finite = all(np.isfinite(p.grad).all() for p in model)
        history.append((np.log2(scale), finite))
        scale, clean = next_scale(scale, clean, finite)
print("skipped at first:", next(n for n, (_, finite) in enumerate(history) if finite) > 0)
print("skipped later, now and then:", 0 < sum(not finite for _, finite in history[20:]) < 20)


def draw(axes):
    axes.step(
        range(60),
        [log for log, _ in history],
        where="mid",
        color="#165ea6",
        label="log2 of the scale",
    )
    skipped = [(n, log) for n, (log, finite) in enumerate(history) if not finite]
    axes.plot(
        *zip(*skipped, strict=True), "x", color="#d9622b", label="overflow: the step is skipped"
    )
    axes.legend()


drawing("Dynamic loss scaling", "step", "", draw)

# %% [markdown]
# ## A step as a graph
#
# A real step launches hundreds of kernels, and Python takes some 20 µs for each: the card waits. So
# record the launches of one step, with their arguments, and replay the list. That is a *graph*. But
# whatever was an argument is now frozen. In this step the host computes the learning rate. Watch
# the weight.


# %%
@cuda.jit
def update(w, rate):
    w[cuda.threadIdx.x] -= rate * np.float32(1)


class Graph:
    def __init__(self):
        self.launches = []

    def launch(self, *launch):
        self.launches.append(launch)
        emulator.Emulator().launch(*launch)

    def replay(self):
        for launch in self.launches:
            emulator.Emulator().launch(*launch)


def train_on_host(replayed):
    w, graph = np.zeros(1, np.float32), Graph()
    for step in range(4):
        if replayed and step > 0:
            graph.replay()
        else:
            graph.launch(update, 1, 1, w, np.float32(1 / (1 + step)))  # the rate of this step
    return w[0]


print(f"step by step {train_on_host(False):.4f}, replayed {train_on_host(True):.4f}")

# %% [markdown]
# ## What changes lives on the device
#
# The replay used the rate of step 0 four times. The cure: keep the step's number in an array, and
# let a kernel compute the rate from it and advance it. The arguments are then addresses, which
# never change. Now both agree, bit for bit.


# %%
@cuda.jit
def schedule(step, rate):
    rate[0] = np.float32(1) / np.float32(1 + step[0])
    step[0] += 1


@cuda.jit
def update_from(w, rate):
    w[cuda.threadIdx.x] -= rate[0] * np.float32(1)


def train_on_device(replayed):
    w, rate, step = np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    graph = Graph()
    for n in range(4):
        if replayed and n > 0:
            graph.replay()
        else:
            graph.launches.clear()
            graph.launch(schedule, 1, 1, step, rate)
            graph.launch(update_from, 1, 1, w, rate)
    return w[0]


print(f"step by step {train_on_device(False):.4f}, replayed {train_on_device(True):.4f}")
run(schedule, 1, 1, np.zeros(1, np.int32), np.zeros(1, np.float32))

# %% [markdown]
# numdiff's whole step is such a graph: the batch, the noise, the loss scale and the finite check
# are all arrays. On one H100 the UNet's step took 59.8 ms launch by launch and 6.28 ms as a graph
# (the ladder in `numdiff/kernels/README.md`). These are two of its kernels, on one H200.

# %%
measured("adamw_update")
measured("loss_scale_update")

# %% [markdown]
# ## Now train
#
# `numdiff train unet --preset tiny` trains a UNet on this machine in a few minutes, and draws a
# grid of pictures. `numdiff/kernels/optimizer/loss_scale.py` is the rule of the loss scale, on the
# device; `numdiff/device/replay.py` records a step. You can now read `numdiff/nn/tensor.py`, the
# tape: it has your two classes.
