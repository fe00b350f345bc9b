"""What diffusion needs besides a model: noise in, samples out, the loss. Read the files in this
order.

    images.py         bytes to numbers between -1 and 1, and back
    q_sample.py       noise added to images, as much as the timestep says
    mse.py            the mean squared error and its gradient
    ahead.py          the conditioning of many steps of a sampler at a time
    sampler.py        everything between two evaluations of the model
    class_dropout.py  classes that are sometimes lost, for guidance
    levels.py         noise levels without whole timesteps, and what each objective makes of them
    l1.py             the mean absolute error of an autoencoder, and its gradient
    posterior.py      an autoencoder's latents, drawn from their Gaussian, and their divergence

READ NEXT
    images.py
"""
