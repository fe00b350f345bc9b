# %% [markdown]
# # Train a diffusion model in Colab
#
# This notebook trains a UNet that draws emoji, and draws new ones with it. Choose a runtime with a
# GPU first (Runtime, Change runtime type, T4 GPU). It also runs without one, on the CPU. Nothing
# has to be built: every kernel is a Python function that Numba compiles when it is first launched.

# %%
STEPS = 1500

# %% [markdown]
# ## What this machine has
#
# A T4 has compute capability 7.5. numdiff computes in float16 on its tensor cores.

# %%
# !numdiff info

# %% [markdown]
# ## Train
#
# The preset `tiny` has 2.5 million parameters, for pictures of 32 × 32 pixels. The first steps
# include compiling. The line of each report has the step, the loss, and the time for a step.

# %%
# !numdiff train unet --preset tiny --steps {STEPS}

# %% [markdown]
# ## The loss, and the last pictures
#
# The run folder has a plot of the loss, and grids of samples that were drawn on the way.

# %%
import pathlib

from PIL import Image

run = max(pathlib.Path("runs").iterdir())
Image.open(run / "loss.png")

# %%
Image.open(max(run.glob("samples-*.png")))

# %% [markdown]
# ## Draw more
#
# `auto` is the newest run. Picture 5 of seed 7 is the same whether you draw 8 pictures or 64.

# %%
# !numdiff sample auto --count 36 --seed 7 --grid emoji.png

# %%
Image.open("emoji.png")

# %% [markdown]
# ## Next
#
# Train longer with a larger `STEPS`, on your own pictures with `--data`, or a diffusion transformer
# with `numdiff train dit --preset tiny`. The chapters of `numdiff learn` explain the kernels that
# ran.
