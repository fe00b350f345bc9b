"""Problems of linear layers, and of attention in three operations."""
from ...kernels import attention, linear, linear_gradients, linear_stack
from .problem import TOKENS, B, D, N, T, half, single

DEPTH = 12  # blocks of a DiT-B, each with a layer (6 · D, D) for its conditioning


def stack_of(weights, biases, D):
    """(weights, biases) of DEPTH layers that are one after the other in two arrays."""
    N = 6 * D
    return ([weights[at:at + N * D].reshape(N, D) for at in range(0, DEPTH * N * D, N * D)],
            [biases[at:at + N] for at in range(0, DEPTH * N, N)])


def linear_stack_forward(x, weight, bias):
    """The conditioning of all blocks of a DiT; weight, bias: those of all layers, flat."""
    return linear_stack.linear_stack_forward(x, [*zip(*stack_of(weight, bias, x.shape[1]), strict=True)])


def linear_stack_backward(x, dy, weight, dweight, dbias):
    """Its gradients, written, and the bias's added to."""
    weights, _ = stack_of(weight, dbias, x.shape[1])
    gradients = [*zip(*stack_of(dweight, dbias, x.shape[1]), strict=True)]
    return linear_stack.linear_stack_backward(dy, x, weights, gradients, False)


def linear_stack_forward_cost(B, C):
    return linear_stack.linear_stack_forward_cost(B, C, DEPTH * 6 * C)


def linear_stack_backward_cost(B, C):
    return linear_stack.linear_stack_backward_cost(B, C, DEPTH * 6 * C, accumulate=False)


def block_sizes(D):
    """(N, K) of the weights of a DiT's block: qkv, proj, fc1, fc2."""
    return (3 * D, D), (D, D), (4 * D, D), (D, 4 * D)


def linear_gradients_backward(x, others, dys, dweight, dbias):
    """The gradients of a block's weights, written, and the biases' added to, as views of two arrays; x, others: the
    layers' inputs (R, K), dys: what comes back to them (R, N)."""
    layers, at, place = [], 0, 0
    for (n, k), dy_i, x_i in zip(block_sizes(x.shape[1]), dys, (x, *others), strict=True):
        layers.append((dy_i, x_i, dweight[at:at + n * k].reshape(n, k), dbias[place:place + n]))
        at, place = at + n * k, place + n
    linear_gradients.linear_gradients_backward(layers, False)


def linear_gradients_backward_cost(rows, C):
    return linear_gradients.linear_gradients_backward_cost(rows, block_sizes(C), False)


def add_problems(add):
    add(linear.linear_forward, versions=(5, 6), x=TOKENS, weight=half(3 * D, D), bias=single(3 * D))
    add(linear.linear_backward, versions=(5, 6), dy=half(N, T, 3 * D), x=TOKENS, weight=half(3 * D, D),
        dweight=single(3 * D, D), dbias=single(3 * D))
    rows = DEPTH * 6 * D
    add(linear_stack_forward, x=half(N, D), weight=half(rows * D), bias=single(rows))
    add(linear_stack_backward, x=half(N, D), dy=half(N, rows), weight=half(rows * D),
        dweight=single(rows * D), dbias=single(rows))
    dys, inputs = ([half(N * T, size[i]) for size in block_sizes(D)] for i in range(2))
    add(linear_gradients_backward, x=inputs[0], others=inputs[1:], dys=dys,
        dweight=single(12 * D * D), dbias=single(9 * D))
    qkv = single(B, 256, 3 * 192)
    add(attention.attention_forward, qkv=qkv, heads=6)
    add(attention.attention_backward, dy=single(B, 256, 192), qkv=qkv, probabilities=single(B, 6, 256, 256), heads=6)
