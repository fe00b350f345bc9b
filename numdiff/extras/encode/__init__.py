"""`numdiff data encode`: a dataset's pictures as latents of an autoencoder, on which diffusion models
train.

command.py    the command and its options
latents.py    the latents, in blocks: interrupted, continued, on several ranks
"""
