"""A UNet's first layer in float16, 3 → 64 channels, and its last, 64 → 3. Read the files in this
order.

    windows.py           which taps of a window are in the image
    from_few.py          v3  3 → 64 channels: a window's numbers are the inner dimension; also dx of a last layer
    to_few.py            v3  64 → 3 channels: the sum over channels first, then the one over taps
    weight_gradient.py   v3  pixels are the inner dimension
    launcher.py              which layers they take, and what was measured

Memory is the roof: the wide side is read or written once, 16 bytes an instruction. The arithmetic
is small, but still too much for ordinary multiply-adds, so it goes to the tensor cores, whose tiles
taps fill. Nothing of the wide side passes through shared memory.

READ NEXT
    windows.py
"""
