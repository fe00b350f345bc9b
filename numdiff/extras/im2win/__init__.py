"""A convolution by windows that overlap in memory (Lu et al. 2023, arXiv:2306.14316):
`version="im2win"`.

    windows.py    the transform, and the products of its windows
"""
