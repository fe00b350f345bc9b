"""Write the stored values of the autoencoder, in float64, from its PyTorch twin. See make.py for
the conventions.

    python tests/reference/make_autoencoder.py       (needs PyTorch and NumPy; seconds)

    autoencoder_<name>.npz    moments, the image decoded from the mean, and gradients, of each model in
                              `stored_autoencoder.MODELS`
"""

import numpy as np
import stored
import stored_autoencoder
import torch
import twin
import twin_autoencoder
from make import last, noise, save

torch.set_default_dtype(torch.float64)


def make_model(name, options):
    model = twin.draw(twin_autoencoder.TwinAutoencoder(**options).double(), seed=1)
    x = noise(
        f"vae/{name}/x", (2, options["in_channels"], *stored_autoencoder.SIZE)
    ).requires_grad_()
    moments = model.moments(x)
    output = model.decode(moments[:, : options["latent_channels"]])
    g = noise(f"vae/{name}/g", output.shape)
    (output * g).sum().backward()
    used = dict(model.named_parameters())
    samples = [p.grad.reshape(-1).numpy()[stored.positions(k, p.numel())] for k, p in used.items()]
    save(
        f"autoencoder_{name}",
        info={"options": options, "shapes": {k: list(p.shape) for k, p in used.items()}},
        x=last(x),
        g=last(g),
        moments=last(moments),
        output=last(output),
        dx=last(x.grad),
        samples=np.concatenate(samples).astype(np.float32),
        norms=np.array([p.grad.norm().item() for p in used.values()], np.float32),
    )


if __name__ == "__main__":
    for each, options_of in stored_autoencoder.MODELS.items():
        make_model(each, options_of)
