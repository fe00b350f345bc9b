"""Write the stored values of the autoencoder, in float64, from its PyTorch twin.

python -m tests.reference.make_autoencoder       (needs PyTorch and NumPy; seconds)

autoencoder_<name>.npz    moments, the image decoded from the mean, and gradients, of each model in
                          `stored_autoencoder.MODELS`
"""

from tests.reference import stored_autoencoder, twin, twin_autoencoder
from tests.reference.making import last, noise, save_pass


def make_model(name, options):
    model = twin.draw(twin_autoencoder.TwinAutoencoder(**options), seed=1)
    x = noise(f"vae/{name}/x", (2, options["in_channels"], *stored_autoencoder.SIZE))
    moments = model.moments(x.requires_grad_())
    output = model.decode(moments[:, : options["latent_channels"]])
    moments = last(moments)
    save_pass(f"autoencoder_{name}", f"vae/{name}", options, model, x, output, moments=moments)


if __name__ == "__main__":
    for each, options_of in stored_autoencoder.MODELS.items():
        make_model(each, options_of)
