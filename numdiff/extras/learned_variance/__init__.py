"""The hybrid loss of a model that learns its variance, as guided-diffusion's and DiT's do: `--learn-sigma`,
`--vlb-weight`, `F.hybrid_loss`. And the step by which
`ddpm` samples from it.

vlb.py           the kernels of the loss
step.py          a sampler's step
functional.py    as a differentiable operation
"""
