"""Few steps of a sampler, learned from a trained model (Duan et al. 2023, OLSS, arXiv:2305.14677).

fit.py      levels and weights from a long run of DDIM
steps.py    a file of them: read, checked, and followed as a sampler
write.py    what `numdiff schedule` does; command.py: its options
"""
