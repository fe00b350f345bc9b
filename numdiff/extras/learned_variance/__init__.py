"""The hybrid loss of a model that learns its variance, as guided-diffusion's and DiT's do: `--learn-sigma`,
`--vlb-weight`, `F.hybrid_loss`.

vlb.py           the kernels
functional.py    as a differentiable operation
"""
