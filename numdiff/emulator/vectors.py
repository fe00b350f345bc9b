"""CUDA's vector types in a kernel: `cuda.float32x4(x, y, z, w)`, also under CUDA's names
(`cuda.float4`)."""

from collections import namedtuple

from .values import TYPES

_ALIASES = {
    "int8": ("char",),
    "int16": ("short",),
    "int32": ("int",),
    "int64": ("long", "longlong"),
    "uint8": ("uchar",),
    "uint16": ("ushort",),
    "uint32": ("uint",),
    "uint64": ("ulong", "ulonglong"),
    "float32": ("float",),
    "float64": ("double",),
}


def vector_type(name, cast, size):
    """A constructor of vectors from numbers and shorter vectors, whose elements are converted."""
    kind = namedtuple(name, tuple("xyzw"[:size]))

    def make(*parts):
        numbers = [n for part in parts for n in (part if isinstance(part, tuple) else (part,))]
        if len(numbers) != size:
            raise TypeError(f"{name} takes {size} numbers, {len(numbers)} were given")
        return kind(*map(cast, numbers))

    make.__name__ = name
    return make


def vector_types():
    """{name: what makes such a vector}"""
    found = {}
    for base, aliases in _ALIASES.items():
        for size in range(1, 5):
            made = vector_type(f"{base}x{size}", TYPES[base], size)
            found.update(
                dict.fromkeys((made.__name__, *(f"{alias}{size}" for alias in aliases)), made)
            )
    return found
