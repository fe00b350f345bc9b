"""Averages of any width, put together after the training (Karras et al. 2024, arXiv:2312.02696).

settings.py     --ema-std, --ema-snapshots
power_ema.py    the kernels that update such averages
state.py        the averages that an optimizer holds
run.py          when a run stores them
combine.py      another width from what is stored
write.py        what `numdiff ema` does; command.py: its options
"""
