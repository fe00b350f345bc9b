"""`numdiff train vae`: train an autoencoder of latent diffusion (nn/autoencoder.py).

kind.py              the record of this kind of model: settings, presets, objective (diffusion/reconstruction.py)
reconstructions.py   what a run draws and measures, and the autoencoder that it writes
"""
