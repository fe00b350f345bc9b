"""The names and shapes of a ConvNeXt block's weights in PyTorch's layout; the names are numdiff's
own."""

FIRST = "depthwise"  # the layer that shows such a block, whose output is as wide as the block's
INSIDE = FIRST, "emb_layers.1", "norm", "mlp_in", "mlp_out"  # layers with weight and bias


def shapes(name, inputs, outputs, emb):
    """{name: shape} of the block called `name`."""
    layers = {"skip_connection": (outputs, inputs, 1, 1)} if inputs != outputs else {}
    layers |= {
        "depthwise": (outputs, 1, 7, 7),
        "emb_layers.1": (outputs, emb),
        "norm": (outputs,),
        "mlp_in": (4 * outputs, outputs),
        "mlp_out": (outputs, 4 * outputs),
    }
    found = {}
    for layer, shape in layers.items():
        found[f"{name}.{layer}.weight"], found[f"{name}.{layer}.bias"] = shape, shape[:1]
    return {**found, f"{name}.layer_scale.weight": (outputs,)}
